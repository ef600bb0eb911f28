"""`bench mode=stream`: N live streams through one decoder, with dynamic batching.

Real time is simulated. A clock jumps from event to event: to the next arrival where nothing waits, and
past a batch by the seconds that decoding it took, which are measured. So a minute of many streams takes
no longer than its decoding, and a machine that does other things in between spoils nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.bench.clock import Hardware
from nemo_gpu_decoding.bench.options import GRAPH_STRATEGIES, BenchOptions
from nemo_gpu_decoding.bench.ours import OURS
from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.report import Row
from nemo_gpu_decoding.bench.tasks import Task
from nemo_gpu_decoding.checks import FieldError

WARM_UP, ALONE = 8, 256  # chunks decoded one by one, before the clock runs and for the M/D/1 formula
SPEAKING = 8  # streams that these are of, so that each goes on for a while
WHOLE = 1e-6  # a chunk may miss a whole number of frames by so much, relatively
CHECKED_AT_ONCE = 16  # streams


class Chunk(NamedTuple):
    """A chunk of a stream's audio, and when it is there."""

    time: float  # seconds
    stream: int


class Latencies(NamedTuple):
    """Of C chunks, in the order in which they were served, in B batches. Seconds."""

    queue: np.ndarray  # [C] from a chunk's arrival until its batch was begun
    compute: np.ndarray  # [C] how long its batch took
    batches: np.ndarray  # [B] chunks in each batch
    busy: float  # time spent on batches
    span: float  # from 0 to the end of the last batch


def count(options: BenchOptions, tasks: Sequence[Task]) -> int:
    return len(tasks) * len(options.texts) * len(options.streams)


def measure(options: BenchOptions, hardware: Hardware, tasks: Sequence[Task]) -> Iterator[Row]:
    """A row for every task, kind of texts and number of streams."""
    for task in tasks:
        in_graph = options.strategy in GRAPH_STRATEGIES
        beams = task.weights.graph_beams if in_graph else options.beams
        setting = Setting(max(beams), in_graph or task.lm is not None, threads=options.threads)
        decoder = OURS[options.strategy](options, task, setting).decoder
        for texts in options.texts:
            for n in options.streams:
                row: Row = {"strategy": options.strategy, "task": task.name, "networks": task.kind}
                row["params"] = setting._asdict()
                yield row | measure_streams(options, decoder, task, hardware, n, texts)


def measure_streams(options: BenchOptions, decoder: Any, task: Task, hardware: Hardware, n: int, texts: str) -> Row:
    """Simulate, then verify that no stream was harmed.

    Raises:
        ValueError: a chunk is no whole number of frames, or none came.
    """
    chunk = frames_of_chunk(options.chunk_ms, task.frame_seconds)
    recording = Recording(task)
    gc.collect()
    single = Replay(decoder, recording, n, chunk, texts, hardware)
    taken = [single.serve([number % min(n, SPEAKING)]) for number in range(WARM_UP + ALONE)]
    alone = float(np.mean(taken[WARM_UP:]))
    single.close()
    live, chunk_seconds = Replay(decoder, recording, n, chunk, texts, hardware), chunk * task.frame_seconds
    rng = np.random.default_rng(options.seed)
    arrivals = draw_arrivals(n, chunk_seconds, options.stream_seconds, rng)
    if not arrivals:
        raise ValueError(f"stream_seconds is {options.stream_seconds}, in which no chunk came: expected more")
    seen = simulate(arrivals, live.serve, options.max_batch)
    equal = [
        ours.best.tokens.tolist() == whole.best.tokens.tolist() and ours.best.score == whole.best.score
        for ours, whole in zip(live.close(), live.in_one_piece(), strict=True)
    ]
    rate, served = n / chunk_seconds, seen.busy / len(arrivals)
    latency = {}
    for name, seconds in (("compute", seen.compute), ("queue", seen.queue), ("total", seen.queue + seen.compute)):
        p50, p99 = np.percentile(seconds, [50, 99]).tolist()
        latency[name] = {"mean": float(seconds.mean()), "p50": p50, "p99": p99}
    return {
        "streams": n,
        "texts": texts,
        "chunk_seconds": chunk_seconds,
        "chunks": len(arrivals),
        "verified": all(equal),
        "verified_by": f"equal to decoding in one piece: {sum(equal)} of {len(equal)} streams",
        "utilisation": seen.busy / seen.span,
        "batch": {"mean": float(seen.batches.mean()), "max": int(seen.batches.max())},
        "latency": latency,
        "md1": {"alone": md1(rate, alone), "batched": md1(rate, served)},
    }


def frames_of_chunk(chunk_ms: float, frame_seconds: float) -> int:
    """Frames in a chunk.

    Raises:
        ValueError: they are no whole number, or none.
    """
    frames = chunk_ms / 1000 / frame_seconds
    if round(frames) < 1 or abs(frames - round(frames)) > WHOLE * frames:
        whole = f"a whole number of frames of {1000 * frame_seconds:g} ms"
        raise FieldError("chunk_ms", chunk_ms, whole)
    return round(frames)


# ----------------------------------------------------------------------------------------- the queue


def draw_arrivals(streams: int, chunk_seconds: float, seconds: float, rng: np.random.Generator) -> list[Chunk]:
    """Chunks of `streams` streams within `seconds`, in order of time: a Poisson process each.

    A chunk comes every `chunk_seconds` on average, its gaps jittered as far as can be (exponentially).
    All streams together are a Poisson process too, as M/D/1 supposes.
    """
    chunks = rng.poisson(streams * seconds / chunk_seconds)
    times = np.sort(rng.uniform(0, seconds, chunks)).tolist()
    return [Chunk(*c) for c in zip(times, rng.integers(streams, size=chunks).tolist(), strict=True)]


def simulate(
    arrivals: Sequence[Chunk], serve: Callable[[list[int]], float], max_batch: int | None = None
) -> Latencies:
    """Serve all chunks with dynamic batching: whatever waits when the server is free goes together.

    Args:
        arrivals: in order of time, at least one.
        serve: decodes the next chunk of each of these streams; returns the seconds that it took.
        max_batch: chunks in a batch at most; of one stream there is never more than one.
    """
    now = busy = 0.0
    arrived, waiting = 0, list[Chunk]()
    queue, compute, batches = list[float](), list[float](), list[int]()
    while arrived < len(arrivals) or waiting:
        if not waiting:
            now = max(now, arrivals[arrived].time)
        while arrived < len(arrivals) and arrivals[arrived].time <= now:
            waiting.append(arrivals[arrived])
            arrived += 1
        batch: dict[int, Chunk] = {}  # by stream; those that waited longest
        for chunk in waiting:
            if len(batch) < (max_batch or len(waiting)):
                batch.setdefault(chunk.stream, chunk)
        waiting = [chunk for chunk in waiting if batch.get(chunk.stream) is not chunk]
        seconds = serve(list(batch))
        queue += [now - chunk.time for chunk in batch.values()]
        compute += [seconds] * len(batch)
        batches.append(len(batch))
        now += seconds
        busy += seconds
    return Latencies(np.array(queue), np.array(compute), np.array(batches), busy, now)


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
    load = rate * service
    queue = load * service / (2 * (1 - load)) if load < 1 else None
    total = None if queue is None else queue + service
    return {"service": service, "utilisation": load, "queue": queue, "total": total}


# --------------------------------------------------------------------------------------- the streams


class Recording:
    """The utterances of a task, one after the other, without end. Stream i begins with utterance i."""

    def __init__(self, task: Task) -> None:
        lengths = task.lengths.tolist()
        self.frames = torch.cat([row[:n] for row, n in zip(task.inputs, lengths, strict=True)])
        self._begin = np.append(0, np.cumsum(lengths)[:-1])

    def read(self, stream: int, first: int, frames: int) -> torch.Tensor:
        """[frames, width] of a stream, from its frame `first` on."""
        begin = int(self._begin[stream % len(self._begin)]) + first
        return self.frames[torch.arange(begin, begin + frames) % len(self.frames)]


class Replay:
    """One decoder with `n` open streams that hear a recording, `chunk` frames at a time.

    Args:
        recording: on the device where decoders get their log-probs.
        texts: none, own or all; see `BenchOptions.texts`.
    """

    def __init__(self, decoder: Any, recording: Recording, n: int, chunk: int, texts: str, hardware: Hardware) -> None:
        self._decoder, self._recording, self._texts, self._hardware = decoder, recording, texts, hardware
        self._streams = decoder.open(n)
        # where an encoder would put its output
        self._inputs = torch.zeros(n, chunk, recording.frames.shape[1], device=recording.frames.device)
        self._lengths = torch.zeros(n, dtype=torch.int64)
        self._heard = np.zeros(n, np.int64)  # frames

    def serve(self, streams: Sequence[int]) -> float:
        """Decode the next chunk of these streams, together; the seconds that it took.

        Only the decoder is timed. The other streams have length 0.
        """
        chunk = self._inputs.shape[1]
        self._lengths.zero_()
        for stream in streams:
            self._inputs[stream] = self._recording.read(stream, int(self._heard[stream]), chunk)
            self._lengths[stream] = chunk
            self._heard[stream] += chunk

        def decode() -> None:
            self._decoder.push(self._streams, self._inputs, self._lengths)
            if self._texts == "own":
                self._decoder.partial(self._streams, rows=streams)
            elif self._texts == "all":
                self._decoder.partial(self._streams)

        return float(getattr(self._hardware.clock.measure(decode, 1), self._hardware.ratio_clock))

    def close(self) -> list[Any]:
        """End all streams; their results."""
        return self._decoder.close(self._streams)

    def in_one_piece(self) -> Iterator[Any]:
        """What the decoder makes of the same audio when it gets all of it at once."""
        frames = self._recording.frames
        for first in range(0, len(self._heard), CHECKED_AT_ONCE):
            heard = self._heard[first : first + CHECKED_AT_ONCE]
            inputs = torch.zeros(len(heard), int(heard.max()), frames.shape[1], device=frames.device)
            for row, heard_frames in enumerate(heard.tolist()):
                inputs[row, :heard_frames] = self._recording.read(first + row, 0, heard_frames)
            yield from self._decoder.decode(inputs, heard.tolist())
