"""What compiling takes: said when it begins, shown while it lasts, and left out of measured speeds."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from numba.core import event

logger = logging.getLogger("nemo_gpu_decoding")

LOG_SECONDS = 10.0  # between lines of progress where stderr is no terminal


class Progress(event.Listener):
    """Listens to numba, which compiles one function at a time, with those that it calls.

    The messages are warnings: Python shows no others by default, and a first call takes up to a minute.
    """

    def __init__(self) -> None:
        self.purpose = "functions for LMs and graphs"  # until a decoder names itself
        self.folder = ""  # where compiled code is kept
        self.count = 0
        self.seconds = 0.0  # of all compilations that have ended
        self._depth = 0
        self._began = self._told = 0.0
        self._announced: set[str] = set()

    def on_start(self, event: Any) -> None:
        if self._depth or _is_ours(event):
            self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter()
            self._announce()

    def on_end(self, event: Any) -> None:
        if not self._depth:
            return
        self._depth -= 1
        self.count += _is_ours(event)
        if not self._depth:
            self.seconds += time.perf_counter() - self._began
        self._show()

    def _announce(self) -> None:
        if self.purpose not in self._announced:
            self._announced.add(self.purpose)
            self._told = self._began
            logger.warning("compiling %s (once per machine, kept in %s)", self.purpose, self.folder)

    def _show(self) -> None:
        now = time.perf_counter()
        spent = self.seconds + (now - self._began if self._depth else 0.0)
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\rcompiling {self.purpose}: {self.count} functions, {spent:.0f} s ")
            sys.stderr.write("" if self._depth else "\r\x1b[K")  # nothing stays of the line
            sys.stderr.flush()
        elif now - self._told > LOG_SECONDS:
            self._told = now
            logger.warning("compiling %s: %d functions, %.0f s so far", self.purpose, self.count, spent)


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("nemo_gpu_decoding")


progress = Progress()
event.register("numba:compile", progress)


def working_seconds() -> float:
    """A clock that stands still while functions are compiled, for speeds. Seconds since some moment."""
    return time.perf_counter() - progress.seconds
