"""The labels of a frame that can matter: those with which some candidate may stay below the cutoff."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.log_space import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph.candidates import cost_of, least_total
from nemo_gpu_decoding.search.word_graph.keys import NONE, ordered_bits

BLOCK = 16  # labels looked at together
SORTED_LABELS = 128  # up to so many labels in play are sorted, likely ones first; not more than BINS


@linked
def choose_labels(row, search, work):
    """Fill work.labels with those that can stay below the cutoff, the likeliest one first.

    Returns:
        False if the frame holds NaN or a value above MOST_LOG_PROB.
    """
    frame, labels, least = work.frame[0], work.labels, _least_likely(work.frame[0], search)
    count, likeliest, skipped_label = 0, 0, NONE if search.params.topology == GRAPH else search.params.blank_id
    for begin in range(0, len(row), BLOCK):
        end, hits = min(begin + BLOCK, len(row)), np.int32(begin + BLOCK > len(row))
        if hits == 0:
            for i in range(BLOCK):  # unsigned: an index that may be negative keeps the loop from SIMD
                hits += np.int32(not row[np.uintp(begin) + np.uintp(i)] < least)
        for v in range(begin, end if hits > 0 else begin):
            labels[count] = v
            count += not row[v] < least and v != skipped_label  # NaN is not below anything
    for i in range(count):
        if not row[labels[i]] <= MOST_LOG_PROB:
            return False
        likeliest = i if row[labels[i]] > row[labels[likeliest]] else likeliest
    if count > 0:
        labels[0], labels[likeliest] = labels[likeliest], labels[0]
    frame.labels = count
    return True


@linked
def rank_labels(row, search, work):
    """Keep of work.labels those that stay below the cutoff once it was tightened; sort them if they are few."""
    frame, labels, count = work.frame[0], work.labels, 0
    least = _least_likely(frame, search)
    for i in range(frame.labels):
        labels[count] = labels[i]
        count += not row[labels[i]] < least
    frame.labels = count
    if count <= SORTED_LABELS:
        keys = work.histogram
        for i in range(count):
            keys[i] = -(ordered_bits(row[labels[i]]) << 32) + labels[i]
        for i in range(count):
            index = 0
            for j in range(count):  # all pairs: there is no branch to guess, and SIMD compares eight at once
                index += int(keys[np.uintp(j)] < keys[np.uintp(i)])
            labels[index] = keys[i] & 0xFFFFFFFF


@linked
def labels_within(cost, source, row, search, work):
    """How many of work.labels, from the first on, may keep an arc of a state below the cutoff."""
    frame, count = work.frame[0], 0
    if frame.labels > SORTED_LABELS:
        return frame.labels
    while count < frame.labels:
        acoustic_cost = cost_of(row, work.labels[count], search)
        if least_total(cost, source.least_cost, acoustic_cost, search) > frame.cutoff:
            break
        count += 1
    return count


@linked
def _least_likely(frame, search):
    """The log-prob below which a label leads above the cutoff, whatever the source; at most MOST_LOG_PROB."""
    most = np.float64(frame.cutoff) - search.weights.least_cost
    slack = 1e-6 * abs(most) + 1e-5  # for rounding
    limit = -(most + slack) / search.params.acoustic_scale
    return np.float32(min(max(limit, -np.float64(LARGEST)), np.float64(MOST_LOG_PROB)))
