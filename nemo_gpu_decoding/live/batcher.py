"""`Batcher` decodes all live streams with one recognizer, in steps that read one chunk of each ready stream.

The recognizer runs in a separate thread, so that the event loop continues to read and send. Chunks that arrive during
a step form the batch of the next step.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from nemo_gpu_decoding.live.interface import Chunk, Limits, Recognizer, StepOutput, StreamOptions
from nemo_gpu_decoding.live.session import Session

logger = logging.getLogger("nemo_gpu_decoding")

STUCK_SECONDS = 60.0  # a longer step counts as hung


class ServerFullError(Exception):
    """An error for a client that connects while `limits.max_streams` streams are open."""


class Batcher:
    """A scheduler that decodes the chunks of all open streams in batches.

    Args:
        recognizer: the model.
        limits: limits of the server.
        batch_size: maximum number of streams in one step.
        tick_seconds: seconds that a step waits for chunks of other streams.
    """

    def __init__(
        self, recognizer: Recognizer, limits: Limits, *, batch_size: int = 64, tick_seconds: float = 0.02
    ) -> None:
        self.recognizer, self.limits = recognizer, limits
        self.batch_size, self.tick_seconds = batch_size, tick_seconds
        self.sessions: dict[int, Session] = {}  # by number; sessions that were served last are at the end
        self.metrics = Metrics(lambda: len(self.sessions))
        self._numbers, self._streams = itertools.count(), itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recognizer")
        self._ready = asyncio.Event()
        self._reserved = 0  # streams of clients whose phrases are being prepared
        self._lost: deque[int] = deque()  # streams that the recognizer must drop
        self._is_dead = False  # `run` has ended
        self._step_began: float | None = None

    @property
    def is_well(self) -> bool:
        """Return whether `run` has not ended and no step of the recognizer takes longer than `STUCK_SECONDS`."""
        began = self._step_began
        return not self._is_dead and (began is None or time.monotonic() - began < STUCK_SECONDS)

    @property
    def is_full(self) -> bool:
        return len(self.sessions) + self._reserved >= self.limits.max_streams

    async def open(self, start: StreamOptions) -> Session:
        """Open a stream for a client and return its session.

        Raises:
            ServerFullError: `limits.max_streams` streams are open.
            FieldError: the model does not support an option of the client.
            RuntimeError: `run` has ended.
        """
        if self._is_dead:
            raise RuntimeError("no stream can be opened: the batcher has ended")
        if self.is_full:
            raise ServerFullError
        self._reserved += 1
        try:
            options = await asyncio.to_thread(self.recognizer.prepare, start)
        finally:
            self._reserved -= 1
        shape = self.recognizer.sample_rate, self.recognizer.chunk_samples
        session = Session(start, options, shape, self.limits, lambda: next(self._streams))
        session.left_out = self.recognizer.left_out(options)
        self.sessions[next(self._numbers)] = session
        return session

    def wake(self) -> None:
        """Signal to `run` that a stream has new audio or has ended."""
        self._ready.set()

    def end(self) -> None:
        """End all streams as soon as the audio that has arrived is decoded."""
        for session in list(self.sessions.values()):
            try:
                session.end()
            except Exception as error:
                self.crash(session, error)
        self.wake()

    def crash(self, session: Session, error: BaseException) -> None:
        """End one stream after an internal error. The other streams continue."""
        logger.error("a stream ended by a fault of the server", exc_info=error)
        stream = session.crash()
        if stream is not None:
            self._lost.append(stream)
        self._forget()
        self.wake()

    async def run(self) -> None:
        """Decode the chunks of all streams in steps until this task is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._ready.wait()
                await asyncio.sleep(self.tick_seconds)
                self._ready.clear()
                while batch := self._take():
                    await self._step(batch)
                if self._lost:
                    await loop.run_in_executor(self._thread, self._drop)
        except Exception:
            logger.exception("the batcher ended; all streams end")
            raise
        finally:
            self._is_dead = True
            for session in self.sessions.values():
                session.crash()
            self.sessions.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> list[tuple[Session, Chunk]]:
        batch: list[tuple[Session, Chunk]] = []
        for number, session in list(self.sessions.items()):
            if len(batch) == self.batch_size:
                break
            try:
                if session.is_ready:
                    self.sessions[number] = self.sessions.pop(number)
                    if (chunk := session.take()) is not None:
                        batch.append((session, chunk))
            except Exception as error:
                self.crash(session, error)
        self._forget()
        return batch

    def _forget(self) -> None:
        """Remove the sessions of streams that have ended from `sessions`."""
        self.sessions = {number: session for number, session in self.sessions.items() if not session.is_over}

    async def _step(self, batch: list[tuple[Session, Chunk]]) -> None:
        loop = asyncio.get_running_loop()
        started, self._step_began = loop.time(), time.monotonic()
        steps = await loop.run_in_executor(self._thread, self._try, [chunk for _, chunk in batch])
        self._step_began = None
        if isinstance(steps, BaseException):
            if len(batch) == 1:
                self.crash(batch[0][0], steps)
                return
            logger.warning("a step of %d streams failed; each stream is stepped alone", len(batch), exc_info=steps)
            for one in batch:
                await self._step([one])
            return
        self.metrics.step_seconds.observe(loop.time() - started)
        self.metrics.step_streams.observe(len(batch))
        for (session, chunk), step in zip(batch, steps, strict=True):
            try:
                seconds = session.receive(chunk, step)
                self.metrics.audio_seconds.inc(len(chunk.samples) / self.recognizer.sample_rate)
                self.metrics.finals.inc(step.final is not None)
                if step.partial is not None:
                    self.metrics.partial_seconds.observe(seconds)
            except Exception as error:
                self.crash(session, error)
        self._forget()

    def _try(self, chunks: list[Chunk]) -> list[StepOutput] | BaseException:
        """Run a step in the recognizer's thread; return any exception, also SystemExit, which would end the thread."""
        try:
            self._drop(later={chunk.stream for chunk in chunks})
            return self.recognizer.step(chunks)
        except BaseException as error:
            return error

    def _drop(self, later: Collection[int] = ()) -> None:
        """Remove crashed streams from the recognizer; called in the recognizer's thread.

        Args:
            later: streams of the next step. They are dropped after the step, which may begin a stream that crashed
                after its first chunk was taken.
        """
        for _ in range(len(self._lost)):
            stream = self._lost.popleft()
            if stream in later:
                self._lost.append(stream)
                continue
            try:
                self.recognizer.drop([stream])
            except Exception:
                logger.exception("stream %d of the recognizer could not be dropped", stream)


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # upper bounds of a histogram
STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NAMESPACE = "nemo_gpu_decoding"


class Metrics:
    """Prometheus metrics of one server since its start, in a separate registry.

    Args:
        open_streams: returns the number of open streams.
    """

    def __init__(self, open_streams: Callable[[], int]) -> None:
        disable_created_metrics()  # the default adds a gauge of the creation time to each counter
        self.registry = CollectorRegistry()
        settings: dict[str, Any] = {"namespace": NAMESPACE, "registry": self.registry}
        timed = settings | {"buckets": SECONDS}
        Gauge("streams_open", "Streams that are open.", **settings).set_function(open_streams)
        self.streams = Counter("streams", "Streams that ended, by how.", ["outcome"], **settings)
        self.finals = Counter("finals", "Utterances that ended.", **settings)
        self.audio_seconds = Counter("audio_seconds", "Audio decoded, seconds.", **settings)
        self.step_seconds = Histogram("step_seconds", "Time of one step of encoder and decoder.", **timed)
        self.step_streams = Histogram("step_streams", "Streams in one step.", buckets=STREAMS, **settings)
        self.partial_seconds = Histogram("partial_seconds", "From audio received to its partial transcript.", **timed)
        ProcessCollector(NAMESPACE, registry=self.registry)
