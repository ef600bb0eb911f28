"""The bits of a SIMD comparison are those of NumPy's."""

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.numerics import LANES, not_below


@compiled
def bits_of(row, begin, least):
    return not_below(row, begin, least)


def test_bits_of_not_below_equal_those_of_numpy():
    row = np.random.default_rng(0).choice(np.float32([-np.inf, -2, -1, -0.5, np.nan, np.inf]), 200)
    for begin in range(len(row) - LANES + 1):
        for least in np.float32([-3, -1, 0, np.inf]):
            expected = ~(row[begin : begin + LANES] < least)
            assert bits_of(row, begin, least) == sum(1 << lane for lane in np.flatnonzero(expected).tolist())
