"""Progress of compilation: messages for the user, and a clock that excludes compile time."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from numba.core import event

logger = logging.getLogger("nemo_gpu_decoding")

LOG_SECONDS = 10.0  # between lines of progress if stderr is no terminal


class Progress(event.Listener):
    """A listener of numba's events; numba compiles one function at a time, with its callees.

    The messages are warnings, because Python hides other levels by default and a first call may take a
    minute.
    """

    def __init__(self) -> None:
        self.purpose = "functions for LMs and graphs"  # until a decoder sets it
        self.folder = ""  # of compiled code
        self.count = 0
        self.seconds = 0.0  # of all finished compilations
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
            sys.stderr.write("" if self._depth else "\r\x1b[K")  # erases the line
            sys.stderr.flush()
        elif now - self._told > LOG_SECONDS:
            self._told = now
            logger.warning("compiling %s: %d functions, %.0f s so far", self.purpose, self.count, spent)


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("nemo_gpu_decoding")


progress = Progress()
event.register("numba:compile", progress)


def working_seconds() -> float:
    """A clock in seconds that excludes compile time, for measurements of speed."""
    return time.perf_counter() - progress.seconds
