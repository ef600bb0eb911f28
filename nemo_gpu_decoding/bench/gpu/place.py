"""The GPU under measurement: its name, its clock, and how fast it copies memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from nemo_gpu_decoding.cuda.launch import runtime

COPIES = 20
FLUSH_BYTES = 256 << 20  # several times the largest cache of a GPU


class Seconds(NamedTuple):
    """How long one call took."""

    wall: float  # from an idle GPU to an idle GPU, on the host's clock
    device: float  # between two events on the GPU's current stream


class Clock(Protocol):
    def measure(self, call: Callable[[], object]) -> Seconds: ...


class CudaClock:
    """Waits for the GPU before and after; an event on the current stream at both ends.

    Before each call the GPU's cache is filled with other things: a batch would fit into it, and a
    decoder that is called again and again would never read memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._other_things = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, call: Callable[[], object]) -> Seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other_things.add_(1)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        with torch.cuda.device(self._device):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        return Seconds(time.perf_counter() - start, begin.elapsed_time(end) / 1e3)


class HostClock:
    """The host's clock alone, where kernels run on the host."""

    def measure(self, call: Callable[[], object]) -> Seconds:
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return Seconds(seconds, seconds)


@dataclass(frozen=True)
class Place:
    """Where decoders are measured."""

    device: torch.device
    name: str
    clock: Clock
    copy_buffer_bytes: int = 1 << 30

    def copy_bandwidth(self) -> float:
        """Bytes that a copy within the memory reads and writes per second."""
        source, target = (
            torch.ones(self.copy_buffer_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        times = [self.clock.measure(lambda: target.copy_(source)).device for _ in range(COPIES)]
        return 2 * self.copy_buffer_bytes / statistics.median(times)


def find_place(device: str) -> Place:
    """The GPU that the user names.

    Raises:
        ValueError: there is none, or kernels don't run there; says why.
    """
    place = runtime().device_for(torch.device(device))
    why_not = runtime().why_not(place)
    if why_not is not None:
        raise ValueError(f"device is {device!r}, expected cpu or a GPU that runs kernels: {why_not}")
    free, _ = torch.cuda.mem_get_info(place)
    buffer_bytes = min(1 << 30, free // 8)
    return Place(place, torch.cuda.get_device_name(place), CudaClock(place), buffer_bytes)


@dataclass
class Samples:
    """What the clock said of one decoder, an entry per repetition."""

    all: list[Seconds] = field(default_factory=list)

    def median(self, clock: str) -> float:
        return statistics.median(getattr(seconds, clock) for seconds in self.all)

    def as_row(self) -> dict[str, dict[str, float]]:
        row = {}
        for clock in Seconds._fields:
            values = [getattr(seconds, clock) for seconds in self.all]
            row[clock] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        return row


def time_in_turn(
    calls: Sequence[Callable[[], object]], clock: Clock, repeats: int, most_seconds: float
) -> list[Samples]:
    """Time all of them `repeats` times, one after the other; all must be warm.

    After `most_seconds` there is no further round, but there is at least one.
    """
    samples = [Samples() for _ in calls]
    start = time.perf_counter()
    for _ in range(repeats):
        for call, taken in zip(calls, samples, strict=True):
            taken.all.append(clock.measure(call))
        if time.perf_counter() - start > most_seconds:
            break
    return samples
