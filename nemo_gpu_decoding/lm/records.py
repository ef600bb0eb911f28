"""Declare the records of packed LMs; `records.cuh` is generated from this file."""

import numpy as np

LM_STATE = np.dtype(
    [
        ("arc_begin", np.uint32),  # its first arc; the next state's first arc ends the range
        ("backoff_to", np.uint32),  # the longest proper suffix that is a state; the root's is the root
        ("backoff_cost", np.float32),
    ]
)
# A slot of the cache of a paged LM, see paged.cuh
CACHED_ARC = np.dtype(
    [
        ("low", np.uint64),  # arc + 1, and the lower 32 bits of the arc
        ("high", np.uint64),  # arc + 1, and the upper 32 bits
    ],
    metadata={"align": 16},
)
