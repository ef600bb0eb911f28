"""64-bit hashes by which texts of hypotheses are compared; extended token by token."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled

HASH_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's MMIX generator


@compiled
def extended_hash(text_hash, label):
    """The hash of a text that is extended by one token."""
    return text_hash * HASH_MULTIPLIER + np.uint64(label + 1)
