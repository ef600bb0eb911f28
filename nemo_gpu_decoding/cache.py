"""Cache LMs and boosting trees in memory, lock work between processes, and return free memory.

NeMo rebuilds its decoding objects whenever a model is restored, transcribes with timestamps or changes its strategy.
The cache keeps LMs and boosting trees, which take seconds to load. A key contains every option and
file on which the cached object depends.
"""

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_ENTRIES = 16  # least recently used entries beyond this are dropped

_entries: OrderedDict[Hashable, Future[Any]] = OrderedDict()
_lock = threading.Lock()


def cached(key: Hashable, build: Callable[[], T]) -> T:
    """Return the cached object for this key; if there is none, call `build` and cache the object that it returns.

    If another thread builds the object of the same key, this call waits for that object. If `build` raises, all
    waiting callers get the exception and nothing is cached.
    """
    with _lock:
        entry = _entries.get(key)
        is_builder = entry is None
        if entry is None:
            entry = _entries[key] = Future()
        _entries.move_to_end(key)
        while len(_entries) > MAX_ENTRIES:
            _entries.popitem(last=False)
    if is_builder:
        try:
            entry.set_result(build())
        except BaseException as error:
            with _lock:
                if _entries.get(key) is entry:
                    del _entries[key]
            entry.set_exception(error)
    return entry.result()


def file_key(path: str | PathLike[str]) -> tuple[str, int, int]:
    """Return a value that identifies the content of a file by its path, size and modification time."""
    resolved = Path(path).resolve()
    status = resolved.stat()
    return str(resolved), status.st_size, status.st_mtime_ns


# ------------------------------------------------------------------------ shared by processes of a machine


@contextmanager
def one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock that excludes other processes of this machine; the system releases it if this process dies."""
    try:
        import fcntl
    except ImportError:  # Windows: no lock, so processes repeat the work
        yield
        return
    with lock.open("a") as file:
        with suppress(OSError):  # a file system without locks: as on Windows
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(lock: Path) -> bool:
    """Return whether any process holds the lock of `one_process_at_a_time`; True if the system cannot tell."""
    try:
        import fcntl
    except ImportError:
        return True
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            return True
    return False


def return_memory() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed memory blocks below used ones. Batches have different sizes, fit into few kept blocks, and get
    new blocks: without this call, the process grows over hours.
    """
    with suppress(AttributeError, OSError, TypeError):  # C libraries other than glibc lack the function
        ctypes.CDLL(None).malloc_trim(0)
