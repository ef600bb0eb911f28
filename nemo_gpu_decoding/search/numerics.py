"""Numbers of the CPU searches: scores (natural log, float32), hashes of texts, labels, and the scan of a row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked

IMPOSSIBLE = np.float32(-np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)
MOST_LOG_PROB = np.float32(0.01)  # no log-probability exceeds it; above 0 because types such as bfloat16 round
HASH_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's MMIX generator
BLOCK = 16  # labels compared at once with SIMD


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
    """The first label >= v whose log-prob is not below `least`; blocks without such labels are skipped as a whole.

    NaN is never below `least`, so the scan stops at every bad value.
    """
    while v < row.shape[0]:
        end = min(v + BLOCK, row.shape[0])
        if end == v + BLOCK:
            hits: Any = 0
            for i in range(BLOCK):  # unsigned: an index that may be negative keeps the loop from SIMD
                hits += np.int32(not row[np.uintp(v) + np.uintp(i)] < least)
            if hits == 0:
                v = end
                continue
        for i in range(v, end):
            if not row[i] < least:
                return i
        v = end
    return v
