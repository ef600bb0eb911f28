"""Chunks that arrive at random and wait for one server: a simulation by events, and the M/D/1 formula.

Real time is simulated. A clock jumps from event to event: to the next arrival where nothing waits, and
past a batch by the seconds that decoding it took, which are measured. So a minute of many streams takes
no longer than its decoding, and a machine that does other things in between spoils nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Chunk(NamedTuple):
    """A chunk of a stream's audio, and when it is there."""

    time: float  # seconds
    stream: int


@dataclass(frozen=True)
class Latencies:
    """Of C chunks, in the order in which they were served, in B batches. Seconds."""

    queue: np.ndarray  # [C] from a chunk's arrival until its batch was begun
    compute: np.ndarray  # [C] how long its batch took
    batches: np.ndarray  # [B] chunks in each batch
    busy: float  # time spent on batches
    span: float  # from 0 to the end of the last batch

    @property
    def total(self) -> np.ndarray:
        """[C] from arrival to result."""
        return self.queue + self.compute

    @property
    def utilisation(self) -> float:
        """Share of the time in which the server was busy."""
        return self.busy / self.span


def draw_arrivals(
    streams: int, chunk_seconds: float, seconds: float, rng: np.random.Generator
) -> list[Chunk]:
    """Chunks of `streams` streams within `seconds`, in order of time: a Poisson process each.

    A chunk comes every `chunk_seconds` on average, its gaps jittered as far as can be (exponentially).
    All streams together are a Poisson process too, as M/D/1 supposes.
    """
    count = rng.poisson(streams * seconds / chunk_seconds)
    times = np.sort(rng.uniform(0, seconds, count)).tolist()
    return [
        Chunk(*chunk) for chunk in zip(times, rng.integers(streams, size=count).tolist(), strict=True)
    ]


def simulate(
    arrivals: Sequence[Chunk],
    serve: Callable[[list[int]], float],
    max_batch: int | None = None,
) -> Latencies:
    """Serve all chunks with dynamic batching: whatever waits when the server is free goes together.

    Args:
        arrivals: in order of time, at least one.
        serve: decodes the next chunk of each of these streams; returns the seconds that it took.
        max_batch: chunks in a batch at most; of one stream there is never more than one.
    """
    now = busy = 0.0
    following, waiting = 0, list[Chunk]()
    queue, compute, batches = list[float](), list[float](), list[int]()
    while following < len(arrivals) or waiting:
        if not waiting:
            now = max(now, arrivals[following].time)
        while following < len(arrivals) and arrivals[following].time <= now:
            waiting.append(arrivals[following])
            following += 1
        batch, waiting = _next_batch(waiting, max_batch or len(waiting))
        seconds = serve([chunk.stream for chunk in batch])
        queue += [now - chunk.time for chunk in batch]
        compute += [seconds] * len(batch)
        batches.append(len(batch))
        now += seconds
        busy += seconds
    return Latencies(np.array(queue), np.array(compute), np.array(batches), busy, now)


def _next_batch(waiting: list[Chunk], most: int) -> tuple[list[Chunk], list[Chunk]]:
    """The chunks that waited longest, one of a stream, and those that go on waiting."""
    batch: list[Chunk] = []
    rest: list[Chunk] = []
    taken: set[int] = set()
    for chunk in waiting:
        if len(batch) < most and chunk.stream not in taken:
            batch.append(chunk)
            taken.add(chunk.stream)
        else:
            rest.append(chunk)
    return batch, rest


def md1(rate: float, service: float) -> dict[str, float | None]:
    """Mean latency of an M/D/1 queue [CUDA-WFST, Kendall 1953]: one chunk at a time, always as long.

        utilisation  rho = rate * service
        queue        rho * service / (2 * (1 - rho))
        total        queue + service

    Args:
        rate: chunks that arrive per second, a Poisson process.
        service: seconds that each takes.

    Returns:
        These numbers; queue and total are None from a utilisation of 1 on, where the queue has no end.
    """
    utilisation = rate * service
    queue = utilisation * service / (2 * (1 - utilisation)) if utilisation < 1 else None
    return {
        "service": service,
        "utilisation": utilisation,
        "queue": queue,
        "total": None if queue is None else queue + service,
    }
