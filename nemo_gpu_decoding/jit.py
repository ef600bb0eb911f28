"""How this package's loops are compiled: numba, without the GIL, kept on disk between runs.

numba's own cache looks only at the file in which a function stands: after an update of a file with
functions that it calls, a stale result would be used, and after a renamed type the cache can't even
be read. So the cache lies in a folder named by a fingerprint of all sources that hold compiled code.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numba
import numpy as np
from numba.core import config

logger = logging.getLogger("nemo_gpu_decoding")

PACKAGE = Path(__file__).parent
CACHE_VARIABLE = "NEMO_GPU_DECODING_CACHE"

F = TypeVar("F", bound=Callable)


def compiled(function: F) -> F:
    """Compile at the first call; later processes load the result from disk in milliseconds."""
    return _njit(function, inline="never")


def inlined(function: F) -> F:
    """Like `compiled`, for small functions inside hot loops: a call there costs more than the work.

    numba copies the code of such a function, and of all that it inlines, at each call: of a large one
    `no_refcount` makes the same machine code in half the time.
    """
    return _njit(function, inline="always")


def no_refcount(function: F) -> F:
    """As `compiled`, for functions that neither make arrays nor return any.

    numba counts references to every array that a function touches, with an atomic instruction each. In a
    search that looks at a few elements of many arrays these were half of its time (measured). A function
    that makes no arrays of its own needs no counting: the caller holds all of them until it returns.
    """
    return _njit(function, inline="never", _nrt=False, forceinline=True)


def _njit(function: F, inline: Literal["never", "always"], **options: Any) -> Any:
    settings: Any = config
    outer = settings.CACHE_DIR
    settings.CACHE_DIR = str(cache_folder())  # read while decorating, so this touches nobody else
    try:
        return numba.njit(cache=True, nogil=True, inline=inline, **options)(function)
    finally:
        settings.CACHE_DIR = outer


def read_only(array: np.ndarray) -> np.ndarray:
    """A plain view that cannot be written: of one type for compiled code, whether it is mapped or not."""
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


@functools.lru_cache(maxsize=1)
def cache_folder() -> Path:
    """The folder of this version's compiled code, made if need be.

    Set the environment variable NEMO_GPU_DECODING_CACHE to put it elsewhere than ~/.cache.
    """
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"jit-{_fingerprint()}"
    temporary = Path(tempfile.gettempdir()) / f"nemo-gpu-decoding-{_user()}-{name}"
    for folder in (Path(base).expanduser() / "nemo_gpu_decoding" / name, temporary):
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
    """Whether we can write there and nobody else: numba and CUDA run what they find."""
    found = folder.lstat()
    others = 0o022 if os.name == "posix" else 0  # elsewhere these bits say nothing
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & others
    return is_ours and os.access(folder, os.W_OK)


@functools.lru_cache(maxsize=1)
def announce_compilation() -> None:
    """Say once that the first call takes long, if nothing is cached yet."""
    folder = cache_folder()
    if not any(folder.rglob("*.nbi")):
        logger.warning("compiling the search for this machine, once: 20-60 s (kept in %s)", folder)


def _fingerprint() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_bytes()
        if b"jit import" in text or source.name == "jit.py":
            digest.update(text)
    return digest.hexdigest()[:16]
