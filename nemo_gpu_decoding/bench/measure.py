"""Timing two decoders alternately in one process."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

LEAST_SECONDS = 0.2  # a quicker decoder is called repeatedly until a measurement lasts this long


@dataclass
class Timing:
    """Seconds of one call, one entry per repetition. CPU seconds are those of all threads together."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def median(self, clock: str) -> float:
        return statistics.median(getattr(self, clock))

    def as_row(self) -> dict[str, dict[str, float]]:
        return {
            clock: {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
            for clock, seconds in (("cpu", self.cpu), ("wall", self.wall))
        }


def time_alternately(
    theirs: Callable[[], object],
    ours: Callable[[], object],
    repeats: int,
    most_seconds: float = math.inf,
) -> tuple[Timing, Timing]:
    """Time both `repeats` times, one after the other, so that a change of the machine's mood hits both.

    Both must have run once already: what is measured is warm. After `most_seconds` there is no further
    repetition, but there is at least one.
    """
    timings = Timing(), Timing()
    calls = [1, 1]
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        for side, call in enumerate((theirs, ours)):
            cpu, wall = _time_calls(call, calls[side])
            if wall * calls[side] < LEAST_SECONDS:
                calls[side] = math.ceil(LEAST_SECONDS / max(wall, 1e-6))
                cpu, wall = _time_calls(call, calls[side])
            timings[side].cpu.append(cpu)
            timings[side].wall.append(wall)
        if time.perf_counter() - start > most_seconds:
            break
    return timings


def _time_calls(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """CPU and wall seconds of one of `calls` calls."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    return (time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls


def ratio_clock(threads: int) -> str:
    """The clock that ratios are taken from.

    On one thread CPU time is the time of the work itself, whatever else the machine does; on several
    threads it would hide what parallelism wins.
    """
    return "cpu" if threads == 1 else "wall"


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch runs on so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
