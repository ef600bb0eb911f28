"""Scan of a row of log-probs for labels above a bound, used by the CPU searches."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.jit import linked

BLOCK = 16  # labels compared at once with SIMD


@linked
def next_label(row, v, least):
    """The first label >= v whose value is not below `least`; blocks without such labels are skipped as a whole.

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
