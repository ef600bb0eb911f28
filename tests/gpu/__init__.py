"""Rehearse these tests where there is no GPU: the emulator runs the kernels, on small inputs.

    GPU_TESTS=rehearsal python -m pytest tests/gpu             all tests
    GPU_TESTS=rehearsal python -m pytest tests/gpu --one-case  each test with its first case

What only a GPU has (CUDA streams and graphs, memory statistics, tools) is skipped then. A rehearsal finds typing
errors and changed interfaces before the first minute on a GPU is spent on them; it says nothing about GPUs.
"""

import os
from typing import TypeVar

T = TypeVar("T")

REHEARSAL = os.environ.get("GPU_TESTS") == "rehearsal"


def sized(on_a_gpu: T, rehearsed: T) -> T:
    """A size for the real thing and one that the emulator manages in a second."""
    return rehearsed if REHEARSAL else on_a_gpu
