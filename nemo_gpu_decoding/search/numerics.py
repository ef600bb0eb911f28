"""Numbers of the CPU searches: scores (natural log, float32), hashes of texts, labels, and the scan of a row."""

from __future__ import annotations

import math

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.simd import LANES, not_below, trailing_zeros

IMPOSSIBLE = np.float32(-np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)
MOST_LOG_PROB = np.float32(0.01)  # no log-probability exceeds it; above 0 because types such as bfloat16 round
HASH_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's MMIX generator


@compiled
def log_add(a, b):
    """log(exp(a) + exp(b)), computed in double and rounded once: all libraries and devices agree to the bit."""
    if a < b:
        a, b = b, a
    if b == IMPOSSIBLE:
        return a
    return np.float32(a + math.log1p(math.exp(np.float64(b) - np.float64(a))))


@compiled
def extended_hash(text_hash, label):
    """The 64-bit hash of a text that is extended by one token; equal texts of hypotheses have equal hashes."""
    return text_hash * HASH_MULTIPLIER + np.uint64(label + 1)


@linked
def label_of(column, blank_id):
    """The label in automata, which number labels without the blank, of a column of the log-probs."""
    return np.int32(column - 1 if column > blank_id else column)


@linked
def column_of(label, blank_id):
    """The column of the log-probs of a label in automata."""
    return np.int32(label + 1 if label >= blank_id else label)


@linked
def next_label(row, v, least):
    """The first label >= v whose log-prob is not below `least`, or the number of labels.

    NaN is never below `least`, so the scan stops at every bad value.
    """
    while v + LANES <= row.shape[0]:
        found = np.uint32(not_below(row, v, least))
        if found != 0:
            return v + np.int64(trailing_zeros(found))
        v += LANES
    while v < row.shape[0] and row[v] < least:
        v += 1
    return v
