"""Clocks for decoders: the host's clock, or events of a GPU."""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.cuda.launch import runtime

LEAST_SECONDS = 0.2  # a faster decoder is called repeatedly until a measurement lasts this long
COPIES = 20
FLUSH_BYTES = 256 << 20  # several times the largest cache of a GPU
PACKAGES = (
    "nemo_gpu_decoding", "torch", "numpy", "numba", "llvmlite", "nemo_toolkit", "flashlight-text",
    "pyctcdecode", "kenlm", "kaldi-decoder", "kaldifst", "kaldialign", "cuda-bindings", "triton",
)  # fmt: skip


class Seconds(NamedTuple):
    """Duration of one call, in seconds."""

    cpu: float  # of all threads together
    wall: float  # on a GPU from idle to idle
    device: float = 0.0  # between two events on the GPU's current stream


class Clock(Protocol):
    least_seconds: float  # a measurement should last so long

    def measure(self, call: Callable[[], object], calls: int) -> Seconds:
        """Of one of so many calls."""
        ...


class HostClock:
    least_seconds = LEAST_SECONDS

    def measure(self, call: Callable[[], object], calls: int) -> Seconds:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(calls):
            call()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Seconds(cpu / calls, wall / calls, wall / calls)


class CudaClock:
    """Waits for the GPU before and after, and records an event on the current stream at both ends.

    Before each call the GPU's cache is filled with other data. Otherwise a batch would stay in the cache, and repeated
    calls would not read memory.
    """

    least_seconds = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._other_things = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(self, call: Callable[[], object], calls: int) -> Seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other_things.add_(1)
        torch.cuda.synchronize(self._device)
        cpu, wall = time.process_time(), time.perf_counter()
        with torch.cuda.device(self._device):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return Seconds(cpu, wall, begin.elapsed_time(end) / 1e3)


class Hardware(NamedTuple):
    """The machine on which decoders are measured."""

    device: torch.device
    name: str
    clock: Clock
    # The clock of the ratios. CPU time does not depend on other processes; with several threads it does not show the
    # gain of parallelism.
    ratio_clock: str = "cpu"
    on_gpu: bool = False
    copy_buffer_bytes: int = 1 << 30

    def copy_bandwidth(self) -> float:
        """Bytes that a copy within the memory reads and writes per second."""
        source, target = (torch.ones(self.copy_buffer_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        times = [self.clock.measure(lambda: target.copy_(source), 1).device for _ in range(COPIES)]
        return 2 * self.copy_buffer_bytes / statistics.median(times)


def find_hardware(device: str, threads: int) -> Hardware:
    """The CPU, or the GPU that the user names.

    Raises:
        ValueError: there is no such GPU, or kernels don't run there; says why.
    """
    if device == "cpu":
        return Hardware(torch.device("cpu"), cpu_name(), HostClock(), "cpu" if threads == 1 else "wall")
    gpu = runtime().device_for(torch.device(device))
    why_not = runtime().why_not(gpu)
    if why_not is not None:
        raise FieldError("device", device, f"cpu or a GPU that runs kernels: {why_not}")
    free, _ = torch.cuda.mem_get_info(gpu)
    name = torch.cuda.get_device_name(gpu)
    return Hardware(gpu, name, CudaClock(gpu), "wall", True, min(1 << 30, free // 8))


def time_in_turn(
    calls: Sequence[Callable[[], object]], clock: Clock, repeats: int, most_seconds: float
) -> list[list[Seconds]]:
    """Time all calls in turn, `repeats` times, so that a change of the machine's speed affects all of them.

    All must be warm. No round begins after `most_seconds`, except for the first one.
    """
    taken: list[list[Seconds]] = [[] for _ in calls]
    times = [1] * len(calls)
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        for i, call in enumerate(calls):
            seconds = clock.measure(call, times[i])
            if seconds.wall * times[i] < clock.least_seconds:
                times[i] = math.ceil(clock.least_seconds / max(seconds.wall, 1e-6))
                seconds = clock.measure(call, times[i])
            taken[i].append(seconds)
        if time.perf_counter() - start > most_seconds:
            break
    return taken


def summary(taken: Sequence[Seconds]) -> dict[str, dict[str, float]]:
    """Clock -> median, minimum and maximum."""
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in zip(Seconds._fields, zip(*taken, strict=True), strict=True)
    }


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_machine() -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of this tree, with "-dirty" after it if files were changed; None outside of a repository."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cpu_name() -> str:
    """The processor's name, as reported by the operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
