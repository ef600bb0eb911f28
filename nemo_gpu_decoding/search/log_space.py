"""Arithmetic of scores: natural logarithms, float32."""

from __future__ import annotations

import math

import numpy as np

from nemo_gpu_decoding.jit import compiled

IMPOSSIBLE = np.float32(-np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)
MOST_LOG_PROB = np.float32(0.01)  # no log-probability exceeds it; above 0 because types such as bfloat16 round


@compiled
def log_add(a, b):
    """log(exp(a) + exp(b)), computed in double and rounded once: all libraries and devices agree to the bit."""
    if a < b:
        a, b = b, a
    if b == IMPOSSIBLE:
        return a
    return np.float32(a + math.log1p(math.exp(np.float64(b) - np.float64(a))))
