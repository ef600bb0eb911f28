"""Compile loops with numba, without the GIL and with a cache on disk.

numba's cache checks only the file that defines a function. If a file with a called function changes, numba
would use stale code; if a type is renamed, it cannot read the cache. So the cache folder has a name with
a fingerprint of all sources of compiled code.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import config

from nemo_gpu_decoding.jit_cache import ForgivingCache, warn_once
from nemo_gpu_decoding.jit_progress import progress

logger = logging.getLogger("nemo_gpu_decoding")

PACKAGE = Path(__file__).parent
CACHE_VARIABLE = "NEMO_GPU_DECODING_CACHE"

# Versions of numba with which `jit_linked.py` is tested; it uses internals of numba, so others do not use it.
LINKED_VERSIONS = ((0, 63), (0, 68))

F = TypeVar("F", bound=Callable)


def compiled(function: F) -> F:
    """Compile at the first call; later processes load the code from disk in milliseconds."""
    return _njit(function)


def inlined(function: F) -> F:
    """Compile a small function that returns arrays to compiled code; numba copies it at each call.

    This makes compilation slow. For other functions, `linked` gives the same machine code.
    """
    return _jit(function, inline="always")


def no_refcount(function: F) -> F:
    """Like `compiled`, for functions that neither create nor return arrays.

    numba counts references to each array that a function uses, with atomic instructions. In a search that
    reads a few elements of many arrays, these took half of the time (measured). A function without new
    arrays needs no counts, because its caller holds all arrays until it returns.
    """
    return _njit(function, _nrt=False, forceinline=True)


def linked(function: F) -> F:
    """Like `no_refcount`, for functions that only compiled code calls; they are compiled with their callers.

    This halves the compile time, see `jit_linked.py`. Python cannot call such functions.
    """
    oldest, newest = LINKED_VERSIONS
    if not oldest <= numba.version_info.short <= newest:
        return no_refcount(function)
    from nemo_gpu_decoding.jit_linked import LinkedCompiler

    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": LinkedCompiler}
    return _jit(function, _nrt=False, forceinline=True, **options)


def _jit(function: F, **options: Any) -> Any:
    decorator: Any = numba.njit  # its type hints lack some options
    return decorator(nogil=True, **options)(function)


def _njit(function: F, **options: Any) -> Any:
    settings: Any = config
    outer, dispatcher = settings.CACHE_DIR, _jit(function, **options)
    try:
        settings.CACHE_DIR = progress.folder = str(cache_folder())  # numba reads it when it makes the cache
        dispatcher._cache = ForgivingCache(function)
    except (OSError, RuntimeError) as error:  # a full disk
        warn_once(settings.CACHE_DIR, error)
    finally:
        settings.CACHE_DIR = outer
    return dispatcher


def read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view, which has the same type in compiled code for mapped and other arrays."""
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


class CopiedByFields:
    """Base of frozen dataclasses that make their arrays read-only in `__post_init__`.

    NumPy copies and unpickles a read-only array as a writable one, of another type for compiled code. Copies are
    therefore made of the fields, through `__post_init__`, so that nothing is compiled again.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        own: Any = self
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(own))


def cache_root() -> Path:
    """The folder of all caches: below the environment variable NEMO_GPU_DECODING_CACHE, or else ~/.cache."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "nemo_gpu_decoding"


@functools.lru_cache(maxsize=1)
def cache_folder() -> Path:
    """The folder of this version's compiled code, below `cache_root`; created if it does not exist."""
    name = f"jit-{_fingerprint()}"
    temporary = Path(tempfile.gettempdir()) / f"nemo-gpu-decoding-{_user()}-{name}"
    for folder in (cache_root() / name, temporary):
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if _is_ours_alone(folder):
                return folder
        except OSError:
            continue
        logger.warning("compiled code is not kept in %s, which is not ours alone to write", folder)
    return Path(tempfile.mkdtemp(prefix="nemo-gpu-decoding-"))


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _is_ours_alone(folder: Path) -> bool:
    """Whether only this user can write to the folder, because numba and CUDA run the code in it."""
    found = folder.lstat()
    others = 0o022 if os.name == "posix" else 0  # other systems do not use these bits
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & others
    return is_ours and os.access(folder, os.W_OK)


def announce_compilation(purpose: str) -> None:
    """Set the name of the next compilations in the messages of `jit_progress.py`."""
    progress.purpose = purpose


def _fingerprint() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_bytes()
        if b"jit import" in text or source.name.startswith("jit"):
            digest.update(text)
    return digest.hexdigest()[:16]
