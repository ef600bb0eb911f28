"""Compile Python loops with numba, so that they run without the GIL and are cached on disk.

numba's cache checks only the file that defines a function. If a file with a called function changes, numba
would use stale code; if a type is renamed, numba cannot read the cache. Therefore the name of the cache
folder contains a fingerprint of all sources of compiled code.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import caching, config, event
from numba.cpython.unsafe import numbers

logger = logging.getLogger("nemo_gpu_decoding")

PACKAGE = Path(__file__).parent
CACHE_VARIABLE = "NEMO_GPU_DECODING_CACHE"

# Versions of numba with which `jit_linked.py` is tested; it uses internals of numba, so others do not use it.
LINKED_VERSIONS = ((0, 63), (0, 68))

F = TypeVar("F", bound=Callable)

intrinsic: Any = extending.intrinsic  # typed as Any: its declared type cannot be called
trailing_zeros: Any = numbers.trailing_zeros
LANES = 16  # values that `not_below` compares at once


def compiled(function: F) -> F:
    """Compile a function at its first call; later processes load its machine code from disk in milliseconds."""
    return _njit(function)


def inlined(function: F) -> F:
    """Compile a small function that returns arrays to compiled code; numba copies it at each call.

    The copies slow down compilation. For functions that return no arrays, `linked` gives the same machine code.
    """
    return _jit(function, inline="always")


def no_refcount(function: F) -> F:
    """Compile like `compiled`, for functions that neither create nor return arrays.

    numba counts references to each array that a function uses, with atomic instructions. In a search that reads a few
    elements of many arrays, reference counting took half of the time (measured). A function that creates no
    arrays needs no counts, because its caller holds all arrays until the function returns.
    """
    return _njit(function, _nrt=False, forceinline=True)


def linked(function: F) -> F:
    """Compile like `no_refcount`, together with the callers; for functions that only compiled code calls.

    Joint compilation halves the compile time, see `jit_linked.py`. Python cannot call functions made by `linked`.
    """
    oldest, newest = LINKED_VERSIONS
    if not oldest <= numba.version_info.short <= newest:
        return no_refcount(function)
    from nemo_gpu_decoding.jit_linked import LinkedCompiler

    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "pipeline_class": LinkedCompiler}
    return _jit(function, _nrt=False, forceinline=True, **options)


def _jit(function: F, **options: Any) -> Any:
    decorator: Any = numba.njit  # its type hints lack some options
    if getattr(config, "DISABLE_JIT", 0):
        return functools.partial(_refuse, function.__name__)
    return decorator(nogil=True, **options)(function)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    """Raise an error, because code without numba cannot read the fields of NumPy records as attributes."""
    raise ValueError(f"NUMBA_DISABLE_JIT is set, expected unset: {name} exists as compiled code only")


def _njit(function: F, **options: Any) -> Any:
    settings: Any = config
    outer, dispatcher = settings.CACHE_DIR, _jit(function, **options)
    if settings.DISABLE_JIT:
        return dispatcher
    try:
        settings.CACHE_DIR = str(cache_folder())  # numba reads it when it makes the cache
        dispatcher._cache = _Cache(function)
    except (OSError, RuntimeError) as error:  # a full disk
        _warn_of_cache(error)
    finally:
        settings.CACHE_DIR = outer
    return dispatcher


class _FolderOnly(caching.CompileResultCacheImpl):
    """A cache of numba that uses only the folder `numba.core.config.CACHE_DIR`.

    Other cache folders of numba may hold stale code, because their names have no fingerprint of all sources.
    """

    # numba before 0.62 has the second name
    _locator_classes = [  # noqa: RUF012  (as numba declares it)
        getattr(caching, "UserProvidedCacheLocator", None) or getattr(caching, "_UserProvidedCacheLocator")  # noqa: B009
    ]


class _Cache(caching.FunctionCache):
    """A cache of numba on disk; if the disk is full or a cache file is damaged, numba compiles again."""

    _impl_class = _FolderOnly

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # damaged pickles raise errors of many types
            _warn_of_cache(error)
            with contextlib.suppress(OSError):
                Path(self._cache_file._index_path).unlink(missing_ok=True)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:  # OSError of the disk, or a damaged index that another process has written
            _warn_of_cache(error)
            self.disable()


_warned: set[Path] = set()  # folders with a warning so far


def _warn_of_cache(error: Exception) -> None:
    if (folder := cache_folder()) not in _warned:
        _warned.add(folder)
        logger.warning(
            "the cache of compiled code in %s cannot be used (%s: %s); what it lacks is compiled for this process",
            folder, type(error).__name__, error,
        )  # fmt: skip


class Compilation(event.Listener):
    """A listener of numba's events that warns once per purpose before a compilation, and sums up compile time.

    numba compiles one function at a time, with its callees. The message is a warning, because Python hides other
    levels by default and a first call may take a minute.
    """

    def __init__(self) -> None:
        self.purpose = "functions for LMs and graphs"  # until a decoder sets it
        self.count = 0
        self.seconds = 0.0  # of all finished compilations
        self._depth = 0
        self._began = 0.0
        self._announced: set[str] = set()

    def on_start(self, event: Any) -> None:
        if self._depth or _is_ours(event):
            self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter()
            if self.purpose not in self._announced:
                self._announced.add(self.purpose)
                logger.warning("compiling %s (once per machine, kept in %s)", self.purpose, cache_folder())

    def on_end(self, event: Any) -> None:
        if self._depth:
            self._depth -= 1
            self.count += _is_ours(event)
            if not self._depth:
                self.seconds += time.perf_counter() - self._began


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("nemo_gpu_decoding")


compilation = Compilation()
event.register("numba:compile", compilation)


def working_seconds() -> float:
    """Return the seconds of a clock that stops during compilation, to measure speed."""
    return time.perf_counter() - compilation.seconds


def announce_compilation(purpose: str) -> None:
    """Set the purpose that `Compilation`'s warnings name from now on."""
    compilation.purpose = purpose


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array: in compiled code, mapped and ordinary arrays then have the same type."""
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view


class CopiedByFields:
    """A base of frozen dataclasses that make their arrays read-only in `__post_init__`.

    NumPy copies and unpickles a read-only array as a writable one, which has another type in compiled code. Copies
    and unpickled objects therefore run `__post_init__` again, so that no function is compiled for the other type.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        instance: Any = self
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(instance))


def cache_root() -> Path:
    """Return the folder of all caches: below the environment variable NEMO_GPU_DECODING_CACHE, or else ~/.cache."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "nemo_gpu_decoding"


@functools.lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Return the folder below `cache_root` with the compiled code of these sources; create it if it is missing."""
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
    """Return whether only this user can write to a folder; numba and CUDA execute the code in cache folders."""
    status = folder.lstat()
    others = 0o022 if os.name == "posix" else 0  # other systems do not use these bits
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == _user() and not status.st_mode & others
    return is_ours and os.access(folder, os.W_OK)


def _fingerprint() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_bytes()
        if b"jit import" in text or source.name.startswith("jit"):
            digest.update(text)
    return digest.hexdigest()[:16]


@intrinsic
def not_below(typing_context, row, begin, least):
    """Return a bit per value of row[begin : begin + LANES], float32: 1 if the value is NaN or >= `least`.

    A Python loop would combine the bits one by one, which takes longer than the vector comparison.
    """

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, begin, least = arguments
        block = ir.VectorType(ir.FloatType(), LANES)
        first = builder.gep(context.make_array(signature.args[0])(context, builder, values).data, [begin])
        read = builder.load(builder.bitcast(first, block.as_pointer()), align=4)
        limit = builder.insert_element(ir.Constant(block, ir.Undefined), least, ir.Constant(ir.IntType(32), 0))
        limit = builder.shuffle_vector(limit, limit, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None))
        return builder.bitcast(builder.fcmp_unordered(">=", read, limit), ir.IntType(LANES))

    is_contiguous = row.layout == "C" and row.dtype == types.float32
    return (types.uint16(row, types.intp, types.float32), write) if is_contiguous else None
