"""Finding the labels of a row of log-probs that can matter; every search on the CPU calls this."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.jit import linked

BLOCK = 16  # labels looked at together


@linked
def next_label(row, v, least):
    """The first label from `v` on that is not below `least`; blocks without any are passed at a glance.

    NaN is not below anything: a bad value in the row is always met.
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
