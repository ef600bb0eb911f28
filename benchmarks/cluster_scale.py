"""Saturation of a cluster: costs per partition, measured on this machine, and a simulation of up to 1,000 workers.

    python -m benchmarks.cluster_scale pace=50 storage_mb=1000 ray=true

In a cycle of a worker, the driver assigns a partition to it (one at a time). The worker reads the audio from a shared
storage, decodes, and writes transcripts and marker to the same storage. The driver's time per partition is that of Ray
Data with two workers and empty partitions. It includes their files, so it is an upper bound.
"""

from __future__ import annotations

import heapq
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cluster import WARM_UP, finished
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.cluster.corpus import Corpus, Folder, Partition, RunPlan, write_rows
from nemo_gpu_decoding.cluster.run import Job, Workers, transcribe_corpus
from nemo_gpu_decoding.plain_text import format_table

PROGRAM = "python -m benchmarks.cluster_scale"
SUMMARY = "where a cluster of up to 1,000 workers saturates"
EXAMPLES = ("ray=true", "pace=50 storage_mb=1000 driver=0.021")


@dataclass
class ScaleOptions:
    """Options of the simulation."""

    # Speed of a worker: seconds of audio per second.
    pace: float = 50.0
    # Seconds of audio in a partition.
    partition_seconds: float = 600.0
    # Bandwidth of the storage, shared by all workers, in megabytes per second.
    storage_mb: float = 1000.0
    # Bytes per second of audio: 32,000 for 16-bit WAV at 16 kHz, about half of that for FLAC.
    audio_bytes: float = 32000.0
    # Seconds of the driver per partition; null: measured, with ray=true.
    driver: float | None = None
    # Measure the driver, on a local Ray of two workers.
    ray: bool = False
    # Number of partitions for this measurement.
    partitions: int = 300


OPTIONS = ScaleOptions


class Costs(NamedTuple):
    """Seconds per partition."""

    driver: float
    storage: float
    work: float


class Simulated(NamedTuple):
    times_real_time: float
    driver: float  # share of the time for which the driver is busy
    storage: float


def simulate(workers: int, costs: Costs, partition_seconds: float) -> Simulated:
    """A closed queueing network: driver and storage serve one partition at a time, first come first served."""
    random = np.random.default_rng(0)
    partitions = max(30 * workers, 3000)
    work = costs.work * random.lognormal(-0.02, 0.2, partitions)  # mean 1: some speech is harder
    free = [0.0] * workers
    driver = storage = end = 0.0
    for n in range(partitions):
        driver = max(heapq.heappop(free), driver) + costs.driver
        storage = max(driver, storage) + costs.storage
        done = storage + work[n]
        heapq.heappush(free, done)
        end = max(end, done)
    busy = partitions / end
    return Simulated(partitions * partition_seconds / end, busy * costs.driver, busy * costs.storage)


def measure_planner(rows: int = 100_000) -> float:
    """Seconds per row of a manifest."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "corpus.json"
        row = json.dumps({"audio_filepath": "audio/utterance.wav", "duration": 12.5, "text": "some words " * 12})
        manifest.write_text(f"{row}\n" * rows)
        started = time.perf_counter()
        write_rows(Corpus((str(manifest),)), BytesIO(), 600.0)
        return (time.perf_counter() - started) / rows


def measure_partition(workers: Workers, partitions: int) -> float:
    """Seconds per partition of a run with empty partitions, without its start."""
    with tempfile.TemporaryDirectory() as out:
        folder = Folder(out)
        folder.write("rows.jsonl", b"")
        plan = RunPlan([Partition(n, 0, 0, 0, 0, 600.0) for n in range(partitions)], ["none"])
        transcribe_corpus(Job(out, nothing, ("none",)), plan, workers)
        times = [time for time, _ in finished(Path(out))]
    first = int(WARM_UP * len(times))
    return (times[-1] - times[first]) / (len(times) - first - 1)


class NoModel:
    """Decodes nothing: partitions are empty."""

    def encode(self, files: Any, batch_size: int) -> list[Any]:
        return []


def nothing() -> Any:
    return NoModel()


def run(options: ScaleOptions) -> int:
    """Measure the costs, simulate, print a table.

    Raises:
        ValueError: the driver's seconds are neither given nor measured.
    """
    if options.driver is None and not options.ray:
        raise ValueError("driver is null, expected seconds per partition, or ray=true to measure them")
    print(f"planner: {1e6 * measure_planner():.1f} us per row")
    print(f"transcripts and marker on this disk: {1e3 * measure_partition(Workers(), 200):.2f} ms per partition")
    driver = options.driver or 0.0
    if options.ray:
        driver = measure_partition(Workers("local", 2, 2), options.partitions)
        print(f"Ray, with two workers that do nothing: {1e3 * driver:.2f} ms per partition")
    seconds = options.partition_seconds
    costs = Costs(driver, seconds * options.audio_bytes / (1e6 * options.storage_mb), seconds / options.pace)
    rows = []
    for workers in (1, 2, 4, 16, 64, 128, 256, 512, 1000):
        found = simulate(workers, costs, seconds)
        share = found.times_real_time / (workers * options.pace)
        shares = [f"{100 * part:.1f}" for part in (share, found.driver, found.storage)]
        rows.append([workers, f"{found.times_real_time:.0f}", *shares])
    print(f"\n{costs.work:.1f} s of work, {costs.storage:.3f} s of storage, {1e3 * driver:.2f} ms of driver each")
    header = ["workers", "x real time", "of ideal %", "driver busy %", "storage busy %"]
    print(format_table(header, rows))
    return 0


def main() -> int:
    """Run the command; returns an exit code as `nemo-gpu-decoding` does."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
