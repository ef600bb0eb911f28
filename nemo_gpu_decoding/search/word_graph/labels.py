"""The labels of a frame that can matter: those with which some way may stay below the cutoff."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.row_scan import next_label

SORTED_LABELS = 64  # up to so many labels in play are sorted, likely ones first


@no_refcount
def choose_labels(row, search, space):
    """Fill space.labels with those that can stay below the cutoff, likely ones first if they are few.

    Returns:
        False if the frame holds NaN or +inf.
    """
    front, count, least = space.front[0], 0, _least_likely(space.front[0], search)
    v = next_label(row, 0, least)
    while v < len(row):
        if not row[v] <= LARGEST:
            return False
        if v != search.blank_id or search.topology == GRAPH:
            space.labels[count] = v
            count += 1
        v = next_label(row, v + 1, least)
    front.labels = count
    _sort_if_few(row, space)
    return True


@no_refcount
def narrow_labels(row, search, space):
    """Keep of space.labels those that can stay below the cutoff, which has become lower."""
    front, count, least = space.front[0], 0, _least_likely(space.front[0], search)
    for i in range(front.labels):
        if not row[space.labels[i]] < least:
            space.labels[count] = space.labels[i]
            count += 1
    was_sorted = front.labels <= SORTED_LABELS
    front.labels = count
    if not was_sorted:
        _sort_if_few(row, space)


@inlined
def _least_likely(front, search):
    """The log-prob below which a label leads above the cutoff, whatever the way."""
    most = np.float64(front.cutoff) - search.least_cost
    slack = 1e-6 * abs(most) + 1e-5  # for rounding
    return np.float32(max(-(most + slack) / search.acoustic_scale, -np.float64(LARGEST)))


@inlined
def _sort_if_few(row, space):
    count, labels = space.front[0].labels, space.labels
    if count <= SORTED_LABELS:
        for i in range(1, count):
            v, place = labels[i], i
            while place > 0 and row[labels[place - 1]] < row[v]:
                labels[place] = labels[place - 1]
                place -= 1
            labels[place] = v
