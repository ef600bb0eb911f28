"""A small cache for LMs and boosting trees: NeMo rebuilds its decoding objects far too often.

A model restores, transcribes with timestamps or switches strategy, and each time the decoding and all
that hangs on it is made anew. What takes seconds to load is therefore kept here, outside the decoding,
under a key that says everything the result depends on.
"""

from __future__ import annotations

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
    """What `build` returned for this key before, or else what it returns now.

    Callers that come while another thread builds the same key wait for that result. If `build` raises,
    all of them get the exception and nothing is kept.
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
        _fill(key, entry, build)
    return entry.result()


def _fill(key: Hashable, entry: Future[Any], build: Callable[[], Any]) -> None:
    try:
        entry.set_result(build())
    except BaseException as error:
        with _lock:
            if _entries.get(key) is entry:
                del _entries[key]
        entry.set_exception(error)


def file_key(path: str | PathLike[str]) -> tuple[str, int, int]:
    """Identifies the content of a file without reading it: path, size, time of last change.

    Raises:
        OSError: there is no such file.
    """
    resolved = Path(path).resolve()
    status = resolved.stat()
    return str(resolved), status.st_size, status.st_mtime_ns


def clear() -> None:
    """Forget everything."""
    with _lock:
        _entries.clear()


# ------------------------------------------------------------------------ shared by processes of a machine


@contextmanager
def one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Other processes of this machine wait here for each other; the system lets go when one dies."""
    try:
        import fcntl
    except ImportError:  # Windows: all do it, which costs time and no more
        yield
        return
    with lock.open("a") as file:
        with suppress(OSError):  # a file system without locks: as on Windows
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_held(lock: Path) -> bool:
    """Whether a process is between the lines of `one_process_at_a_time`; True as well where nobody can tell.

    Raises:
        OSError: there is no such file.
    """
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
