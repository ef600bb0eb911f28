"""What Prometheus reads of a live server, in its text format."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFIX = "nemo_gpu_decoding"


class Histogram:
    """Counts of values up to each bound, their sum and number."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> Iterator[str]:
        below = 0
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {below}"


class Metrics:
    """Counters of a server since it began."""

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()  # by how they ended: "end", or the field of the error
        self.finals = 0
        self.audio_seconds = 0.0
        self.step_seconds = Histogram(SECONDS)
        self.batch_streams = Histogram(STREAMS)
        self.partial_seconds = Histogram(SECONDS)

    def text(self, open_streams: int) -> str:
        """All of them, in Prometheus' text format 0.0.4."""
        lines: list[str] = []

        def add(name: str, kind: str, about: str, values: Sequence[str]) -> None:
            lines.extend([f"# HELP {PREFIX}_{name} {about}", f"# TYPE {PREFIX}_{name} {kind}", *values])

        def value(name: str, kind: str, about: str, number: float) -> None:
            add(name, kind, about, [f"{PREFIX}_{name} {number}"])

        def histogram(name: str, about: str, counted: Histogram) -> None:
            add(name, "histogram", about, list(counted.lines(f"{PREFIX}_{name}")))

        value("streams_open", "gauge", "Streams that are open.", open_streams)
        ended = [f'{PREFIX}_streams_total{{outcome="{how}"}} {n}' for how, n in sorted(self.streams.items())]
        add("streams_total", "counter", "Streams that ended, by how.", ended)
        value("finals_total", "counter", "Utterances that ended.", self.finals)
        value("audio_seconds_total", "counter", "Audio decoded, seconds.", self.audio_seconds)
        value("cpu_seconds_total", "counter", "CPU time of the process, seconds.", time.process_time())
        value("resident_bytes", "gauge", "Memory of the process, bytes.", resident_bytes())
        histogram("step_seconds", "Time of one step of encoder and decoder.", self.step_seconds)
        histogram("step_streams", "Streams in one step.", self.batch_streams)
        histogram("partial_seconds", "From audio received to its partial transcript.", self.partial_seconds)
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Memory that the process holds now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
