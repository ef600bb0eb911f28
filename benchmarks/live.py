"""`python -m benchmarks mode=live`: utterances that begin at random times, decoded in chunks as they arrive.

Three decoders read the same chunks, of N simultaneous utterances on average: the strategy in slots, the strategy with
a call for each stream, and NeMo's greedy decoding. Time is simulated: a clock advances by the measured seconds of each
step, and jumps to the next chunk if none waits. Queues are therefore as long as in real time, and other processes on
the machine do not affect them.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean as mean
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.clock import Hardware
from benchmarks.options import GRAPH_STRATEGIES, BenchOptions
from benchmarks.ours import OURS
from benchmarks.peers.base import Setting
from benchmarks.peers.nemo import GREEDY_BATCH, live_greedy
from benchmarks.report import Row
from benchmarks.tasks import Task
from benchmarks.verify import identical
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.live.slots import Slots

ONE_BY_ONE, GREEDY = "one_by_one", "nemo_greedy"
WARM_UP = 2  # chunks of each stream before time 0, which are not counted
WARM_UP_CHUNKS = 16  # chunks of all streams before them
TICKS = 8  # steps with a chunk of all streams, for the streams per core
PATIENCE = 2.0  # seconds that a chunk may wait; then the queue counts as unbounded, and the decoder is stopped
WHOLE = 1e-6  # a chunk may miss a whole number of frames by so much, relatively
CHECKED_AT_ONCE = 64  # utterances


class Chunk(NamedTuple):
    """Frames `begin` to `end` of an utterance."""

    time: float  # seconds; when the last of them is there
    stream: int  # each is spoken once
    row: int  # of the task
    begin: int
    end: int
    is_last: bool


class Live(Protocol):
    """A decoder of streams that begin and end at any time."""

    at_once: int | None  # maximum number of streams in a step; None: any number

    def begin(self) -> Any:
        """A new stream."""

    def step(self, streams: Sequence[Any], chunks: Sequence[torch.Tensor], over: Sequence[bool]) -> list[Any]:
        """Read a chunk [T, width] of each stream; returns the final results of streams that have ended. Partial
        results of the others are computed and not returned."""

    def end(self, streams: Sequence[Any]) -> list[Any]:
        """Final results."""

    def whole(self, utterances: Sequence[torch.Tensor]) -> list[Any]:
        """The results of utterances [T, width] in one piece."""

    def same(self, result: Any, other: Any) -> bool:
        """Whether two results are equal, to the bit."""


class InSlots:
    """A decoder of this package in slots: all waiting chunks form one step."""

    at_once: int | None = None

    def __init__(self, decoder: Any, n: int) -> None:
        self.decoder, self._slots = decoder, Slots(decoder, n)

    def begin(self) -> Any:
        return self._slots.begin()

    def step(self, streams: Sequence[Any], chunks: Sequence[torch.Tensor], over: Sequence[bool]) -> list[Any]:
        for error in self._slots.push(dict(zip(streams, chunks, strict=True))).values():
            raise error
        self._slots.partial([stream for stream, is_over in zip(streams, over, strict=True) if not is_over])
        return self.end([stream for stream, is_over in zip(streams, over, strict=True) if is_over])

    def end(self, streams: Sequence[Any]) -> list[Any]:
        return self._slots.end(streams)

    def whole(self, utterances: Sequence[torch.Tensor]) -> list[Any]:
        return self.decoder.decode(pad_sequence(list(utterances), batch_first=True), list(map(len, utterances)))

    def same(self, result: Any, other: Any) -> bool:
        return identical(result.best, other.best)


class OneByOne(InSlots):
    """The same decoder with a batch of its own for every stream."""

    at_once: int | None = 1

    def begin(self) -> Any:
        return self.decoder.open(1)

    def step(self, streams: Sequence[Any], chunks: Sequence[torch.Tensor], over: Sequence[bool]) -> list[Any]:
        ((stream, chunk, is_over),) = zip(streams, chunks, over, strict=True)
        self.decoder.push(stream, chunk[None], [len(chunk)])
        if is_over:
            return self.end(streams)
        self.decoder.partial(stream)
        return []

    def end(self, streams: Sequence[Any]) -> list[Any]:
        return [self.decoder.close(stream)[0] for stream in streams]


# --------------------------------------------------------------------------------------------- rows


def count(options: BenchOptions, tasks: Sequence[Task]) -> int:
    return len(tasks) * len(options.streams) * (3 if "nemo" in options.peers else 2)


def measure(options: BenchOptions, hardware: Hardware, tasks: Sequence[Task]) -> Iterator[Row]:
    """A row for every task, number of streams and decoder."""
    for task in tasks:
        in_graph = options.strategy in GRAPH_STRATEGIES
        beams = task.weights.graph_beams if in_graph else options.beams
        setting = Setting(max(beams), in_graph or task.lm is not None, threads=options.threads)
        decoder = OURS[options.strategy](options, task, setting).decoder
        for n in options.streams:
            row = {"strategy": options.strategy, "task": task.name, "networks": task.kind, "streams": n}
            makers: dict[str, Callable[[], Live]] = {
                options.strategy: partial(InSlots, decoder, n),
                ONE_BY_ONE: partial(OneByOne, decoder, n),
            }  # fmt: skip
            skipped = GREEDY_BATCH.unavailable()
            if "nemo" in options.peers and skipped is None:
                makers[GREEDY] = partial(live_greedy, options, task)
            for found in compare(options, task, hardware, makers, n):
                yield row | {"params": setting._asdict(), "skipped": None} | found
            if "nemo" in options.peers and skipped is not None:
                yield row | {"params": setting._asdict(), "peer": GREEDY, "verified": False, "skipped": skipped}


def compare(
    options: BenchOptions, task: Task, hardware: Hardware, makers: Mapping[str, Callable[[], Live]], n: int
) -> Iterator[Row]:
    """Rows of several decoders with the same chunks; the first decoder is that of this package.

    Raises:
        ValueError: a chunk is no whole number of frames, or no chunk arrived.
    """
    size = frames_of_chunk(options.chunk_ms, task.frame_seconds)
    seconds = size * task.frame_seconds
    rng = np.random.default_rng(options.seed)
    spoken = draw_chunks(task, n, size, (-WARM_UP * seconds, options.live_seconds), rng)
    if not any(chunk.time >= 0 for chunk in spoken):
        raise ValueError(f"live_seconds is {options.live_seconds}, in which no chunk came: expected more")
    together = [c._replace(time=seconds * math.ceil(c.time / seconds)) for c in spoken if c.time < TICKS * seconds]
    for make in makers.values():  # compiles, or reads compiled code
        warm = Server(make(), task, hardware)
        Queue(spoken[:WARM_UP_CHUNKS], warm.serve, warm.decoder.at_once).run()
        list(warm.equal_to_one_piece())
    servers: dict[str, list[Server]] = {name: [] for name in makers}
    queues: dict[str, list[Queue]] = {name: [] for name in makers}
    for chunks in (together, spoken):
        for name, make in makers.items():
            servers[name].append(Server(make(), task, hardware))
            queues[name].append(Queue(chunks, servers[name][-1].serve, servers[name][-1].decoder.at_once))
        gc.collect()
        in_turn([own[-1] for own in queues.values()], seconds)
    capacity = {name: own[0].streams_per_core(task.frame_seconds) for name, own in queues.items()}
    ours, *_ = capacity.values()
    for name, (_, queue) in queues.items():
        equal = [same for server in servers[name] for same in server.equal_to_one_piece()]
        yield {
            "peer": name,
            "chunk_seconds": seconds,
            "verified": all(equal),
            "verified_by": f"equal to decoding in one piece: {sum(equal)} of {len(equal)} streams",
            **queue.figures(),
            "streams_per_core": capacity[name],
            "ratio": ours / capacity[name],
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


def draw_chunks(task: Task, n: int, size: int, window: tuple[float, float], rng: np.random.Generator) -> list[Chunk]:
    """Chunks of random utterances that arrive within the window, in order of time.

    Utterances begin as a Poisson process, n at once on average (Little's law), and a chunk of each comes every `size`
    frames. Of those that began before the window the rest is heard.
    """
    lengths, frame = task.lengths.tolist(), task.frame_seconds
    earliest = window[0] - max(lengths) * frame
    begun = rng.poisson(n * (window[1] - earliest) / (np.mean(lengths) * frame))
    chunks = []
    for stream, begin in enumerate(rng.uniform(earliest, window[1], begun).tolist()):
        row = int(rng.integers(len(lengths)))
        for first in range(0, lengths[row], size):
            end = min(first + size, lengths[row])
            if window[0] <= begin + end * frame < window[1]:
                chunks.append(Chunk(begin + end * frame, stream, row, first, end, end == lengths[row]))
    return sorted(chunks)


# ---------------------------------------------------------------------------------------- the queue


class Served(NamedTuple):
    """A chunk that was decoded."""

    chunk: Chunk
    begin: float  # of its step, in simulated seconds
    end: float
    batch: int  # chunks in the step


class Queue:
    """Chunks that wait for a decoder, in simulated time. All chunks that wait when it is free form one step.

    Args:
        chunks: in order of time, at least one.
        serve: decodes chunks of different streams; returns the seconds that it took.
        at_once: maximum number of chunks in a step, the oldest ones first; None: any number.
    """

    def __init__(
        self, chunks: Sequence[Chunk], serve: Callable[[list[Chunk]], float], at_once: int | None = None
    ) -> None:
        self.chunks, self._serve, self._at_once = chunks, serve, at_once
        self._arrived, self._waiting = 0, list[Chunk]()
        self.now, self.keeps_up = chunks[0].time, True
        self.served = list[Served]()

    def run(self, until: float = math.inf) -> None:
        """Decode until the clock reaches `until`, all chunks are served, or a chunk waits too long."""
        while self.keeps_up:
            if not self._waiting:
                if self._arrived == len(self.chunks):
                    return
                self.now = max(self.now, self.chunks[self._arrived].time)
            if self.now >= until:
                return
            while self._arrived < len(self.chunks) and self.chunks[self._arrived].time <= self.now:
                self._waiting.append(self.chunks[self._arrived])
                self._arrived += 1
            batch: dict[int, Chunk] = {}  # by stream: one chunk of each
            for chunk in self._waiting:
                if self._at_once is None or len(batch) < self._at_once:
                    batch.setdefault(chunk.stream, chunk)
            self._waiting = [chunk for chunk in self._waiting if batch.get(chunk.stream) is not chunk]
            begin = self.now
            self.now += self._serve(list(batch.values()))
            self.served += [Served(chunk, begin, self.now, len(batch)) for chunk in batch.values()]
            self.keeps_up = not self._waiting or self.now - self._waiting[0].time <= PATIENCE

    def streams_per_core(self, frame_seconds: float) -> float:
        """Seconds of audio for each second of decoding."""
        taken = self._counted()
        heard = sum(one.chunk.end - one.chunk.begin for one in taken) * frame_seconds
        return heard / _busy(taken)

    def figures(self) -> Row:
        """Load and latencies; latencies are None if the queue is unbounded. The mean latency has two parts, the wait
        in the queue and the step.
        """
        taken = self._counted()
        sizes = [one.batch for one in taken]
        latency: dict[str, dict[str, float | None]] = {}
        for name, is_last in (("partial", False), ("final", True)):
            waits = [one.end - one.chunk.time for one in taken if one.chunk.is_last == is_last]
            known = waits if self.keeps_up and waits else [math.nan]
            p50, p99 = (None if math.isnan(x) else float(x) for x in np.percentile(known, [50, 99]))
            latency[name] = {"p50": p50, "p99": p99}
        return {
            "chunks": len(taken),
            "finals": sum(one.chunk.is_last for one in taken),
            "keeps_up": self.keeps_up,
            "load": _busy(taken) / (taken[-1].end - taken[0].begin),
            "batch": {"mean": len(sizes) / sum(1 / size for size in sizes), "max": max(sizes)},
            "latency": latency,
            "mean": {
                "queue": mean([one.begin - one.chunk.time for one in taken]) if self.keeps_up else None,
                "compute": mean([one.end - one.begin for one in taken]) if self.keeps_up else None,
            },
        }

    def _counted(self) -> list[Served]:
        return [one for one in self.served if one.chunk.time >= 0] or self.served


def _busy(taken: Sequence[Served]) -> float:
    return sum((one.end - one.begin) / one.batch for one in taken)


def in_turn(queues: Sequence[Queue], seconds: float) -> None:
    """Run all queues in turn for `seconds` of simulated time, so that a change of the machine's speed affects all."""
    first, last = queues[0].chunks[0].time, queues[0].chunks[-1].time
    for until in [*np.arange(first + seconds, last + seconds, seconds).tolist(), math.inf]:
        for queue in queues:
            queue.run(until)


# --------------------------------------------------------------------------------------- the streams


class Heard(NamedTuple):
    """The frames that a stream has read, of an utterance of the task."""

    row: int
    begin: int
    end: int


class Server:
    """A decoder, its streams, and their results."""

    def __init__(self, decoder: Live, task: Task, hardware: Hardware) -> None:
        self.decoder, self._task, self._hardware = decoder, task, hardware
        self._running: dict[int, Any] = {}
        self._heard: dict[int, Heard] = {}
        self._results: dict[int, Any] = {}

    def serve(self, chunks: Sequence[Chunk]) -> float:
        """Decode chunks of different streams; the seconds that it took. Only the decoder is timed."""
        frames = [self._task.inputs[chunk.row, chunk.begin : chunk.end] for chunk in chunks]
        over, finals = [chunk.is_last for chunk in chunks], list[Any]()

        def step() -> None:
            for chunk in chunks:
                if chunk.stream not in self._running:
                    self._running[chunk.stream] = self.decoder.begin()
            finals.extend(self.decoder.step([self._running[chunk.stream] for chunk in chunks], frames, over))

        seconds = getattr(self._hardware.clock.measure(step, 1), self._hardware.ratio_clock)
        for chunk in chunks:
            begin = self._heard[chunk.stream].begin if chunk.stream in self._heard else chunk.begin
            self._heard[chunk.stream] = Heard(chunk.row, begin, chunk.end)
        ended = [chunk.stream for chunk in chunks if chunk.is_last]
        self._results |= dict(zip(ended, finals, strict=True))
        for stream in ended:
            del self._running[stream]
        return float(seconds)

    def equal_to_one_piece(self) -> Iterator[bool]:
        """End all streams; yields for each whether its result equals that of its audio in one piece."""
        self._results |= dict(zip(self._running, self.decoder.end(list(self._running.values())), strict=True))
        self._running = {}
        expected: dict[Heard, Any] = {}
        distinct = sorted(set(self._heard.values()), key=lambda heard: heard.end - heard.begin)
        for first in range(0, len(distinct), CHECKED_AT_ONCE):
            some = distinct[first : first + CHECKED_AT_ONCE]
            whole = self.decoder.whole([self._task.inputs[h.row, h.begin : h.end] for h in some])
            expected |= dict(zip(some, whole, strict=True))
        for stream, heard in self._heard.items():
            yield self.decoder.same(self._results[stream], expected[heard])
