"""Compiled code that counts no references.

numba counts references to every array that a function touches, with an atomic instruction each. In a
search that looks at a few elements of many arrays these were half of its time (measured). A function
that makes no arrays of its own needs no counting: the caller holds all of them until it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import config

from nemo_gpu_decoding.jit import cache_folder

F = TypeVar("F", bound=Callable)


def uncounted(function: F) -> F:
    """As `jit.compiled`, for functions that neither make arrays nor return any."""
    settings: Any = config
    outer = settings.CACHE_DIR
    settings.CACHE_DIR = str(cache_folder())  # read while decorating, so this touches nobody else
    try:
        options: Any = {"_nrt": False}
        return numba.njit(cache=True, nogil=True, inline="never", **options)(function)
    finally:
        settings.CACHE_DIR = outer
