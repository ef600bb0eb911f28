"""Prometheus metrics of the live server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # upper bounds of a histogram
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NAMESPACE = "nemo_gpu_decoding"


class Metrics:
    """Counters of a server since its start, in their own registry.

    Args:
        open_streams: returns the number of open streams.
    """

    def __init__(self, open_streams: Callable[[], int]) -> None:
        disable_created_metrics()  # the default adds a gauge of the creation time to each counter
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": NAMESPACE, "registry": self.registry}
        Gauge("streams_open", "Streams that are open.", **own).set_function(open_streams)
        self.streams = Counter("streams", "Streams that ended, by how.", ["outcome"], **own)
        self.finals = Counter("finals", "Utterances that ended.", **own)
        self.audio_seconds = Counter("audio_seconds", "Audio decoded, seconds.", **own)
        self.step_seconds = Histogram(
            "step_seconds", "Time of one step of encoder and decoder.", buckets=SECONDS, **own
        )
        self.step_streams = Histogram("step_streams", "Streams in one step.", buckets=STREAMS, **own)
        self.partial_seconds = Histogram(
            "partial_seconds", "From audio received to its partial transcript.", buckets=SECONDS, **own
        )
        self.registry.register(_Process())

    def value(self, name: str, **labels: str) -> float:
        """The present value of a metric, 0 if nothing was counted; `name` without the namespace."""
        return self.registry.get_sample_value(f"{NAMESPACE}_{name}", labels) or 0.0


class _Process(Collector):
    """CPU time and memory of this process, on all operating systems."""

    def collect(self) -> Iterator[Metric]:
        cpu, resident = f"{NAMESPACE}_cpu_seconds", f"{NAMESPACE}_resident_bytes"
        yield CounterMetricFamily(cpu, "CPU time of the process, seconds.", value=time.process_time())
        yield GaugeMetricFamily(resident, "Memory of the process, bytes.", value=resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if the system does not provide it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
