"""The labels of a frame that can matter: those with which some candidate may stay below the cutoff."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.row_scan import next_label

SORTED_LABELS = 64  # up to so many labels in play are sorted, likely ones first


@no_refcount
def choose_labels(row, search, work):
    """Fill work.labels with those that can stay below the cutoff, likely ones first if they are few.

    Returns:
        False if the frame holds NaN or +inf.
    """
    frame, count, least = work.frame[0], 0, _least_likely(work.frame[0], search)
    v = next_label(row, 0, least)
    while v < len(row):
        if not row[v] <= LARGEST:
            return False
        if v != search.params.blank_id or search.params.topology == GRAPH:
            work.labels[count] = v
            count += 1
        v = next_label(row, v + 1, least)
    frame.labels = count
    _sort_if_few(row, work)
    return True


@no_refcount
def narrow_labels(row, search, work):
    """Keep of work.labels those that can stay below the cutoff, which has become lower."""
    frame, count, least = work.frame[0], 0, _least_likely(work.frame[0], search)
    for i in range(frame.labels):
        if not row[work.labels[i]] < least:
            work.labels[count] = work.labels[i]
            count += 1
    was_sorted = frame.labels <= SORTED_LABELS
    frame.labels = count
    if not was_sorted:
        _sort_if_few(row, work)


@inlined
def _least_likely(frame, search):
    """The log-prob below which a label leads above the cutoff, whatever the source."""
    most = np.float64(frame.cutoff) - search.weights.least_cost
    slack = 1e-6 * abs(most) + 1e-5  # for rounding
    return np.float32(max(-(most + slack) / search.params.acoustic_scale, -np.float64(LARGEST)))


@inlined
def _sort_if_few(row, work):
    count, labels = work.frame[0].labels, work.labels
    if count <= SORTED_LABELS:
        for i in range(1, count):
            v, index = labels[i], i
            while index > 0 and row[labels[index - 1]] < row[v]:
                labels[index] = labels[index - 1]
                index -= 1
            labels[index] = v
