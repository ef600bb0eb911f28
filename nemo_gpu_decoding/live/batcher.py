"""All live streams through one recognizer: every tick takes a chunk of each stream that has one.

The recognizer works in a thread of its own, so that the event loop goes on reading and sending; what
arrives while it works is the next batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor

from nemo_gpu_decoding.live.metrics import Metrics
from nemo_gpu_decoding.live.recognizer import Chunk, Recognizer
from nemo_gpu_decoding.live.session import Limits, Session, Start

logger = logging.getLogger("nemo_gpu_decoding")


class ServerFullError(Exception):
    """There is no room for another stream."""


class Batcher:
    """Streams that come and go, decoded together.

    Args:
        recognizer: the model.
        limits: of the server.
        batch_size: the most streams in one step.
        tick_seconds: how long to wait for other streams' chunks when there is one.
    """

    def __init__(
        self, recognizer: Recognizer, limits: Limits, *, batch_size: int = 64, tick_seconds: float = 0.02
    ) -> None:
        self.recognizer, self.limits = recognizer, limits
        self.batch_size, self.tick_seconds = batch_size, tick_seconds
        self.sessions: dict[int, Session] = {}  # by number, those that were served last at the end
        self.metrics = Metrics(lambda: len(self.sessions))
        self._numbers, self._streams = itertools.count(), itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recognizer")
        self._ready = asyncio.Event()
        self._reserved = 0  # slots of clients whose phrases are being prepared

    @property
    def is_full(self) -> bool:
        return len(self.sessions) + self._reserved >= self.limits.max_streams

    async def open(self, start: Start) -> Session:
        """A stream for a client.

        Raises:
            ServerFullError: as many streams as may be are open.
            FieldError: the model cannot do what the client wants.
        """
        if self.is_full:
            raise ServerFullError
        self._reserved += 1
        try:
            options = await asyncio.to_thread(self.recognizer.prepare, start.options)
        finally:
            self._reserved -= 1
        shape = self.recognizer.sample_rate, self.recognizer.chunk_samples
        session = Session(start, options, shape, self.limits, lambda: next(self._streams))
        self.sessions[next(self._numbers)] = session
        return session

    def wake(self) -> None:
        """A stream has audio, or ends."""
        self._ready.set()

    async def run(self) -> None:
        """Decode until cancelled."""
        while True:
            await self._ready.wait()
            await asyncio.sleep(self.tick_seconds)
            self._ready.clear()
            while batch := self._take():
                await self._step(batch)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> list[tuple[Session, Chunk]]:
        batch: list[tuple[Session, Chunk]] = []
        for number, session in list(self.sessions.items()):
            if len(batch) == self.batch_size:
                break
            if session.is_ready:
                self.sessions[number] = self.sessions.pop(number)
                chunk = session.take()
                if chunk is not None:
                    batch.append((session, chunk))
        self._forget()
        return batch

    def _forget(self) -> None:
        """Make room where streams are over."""
        self.sessions = {number: session for number, session in self.sessions.items() if not session.is_over}

    async def _step(self, batch: list[tuple[Session, Chunk]]) -> None:
        chunks = [chunk for _, chunk in batch]
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            steps = await loop.run_in_executor(self._thread, self.recognizer.step, chunks)
        except Exception:
            # nobody knows how far it came: these streams are lost, others and later ones are not
            logger.exception("a step of %d streams failed", len(chunks))
            with contextlib.suppress(Exception):  # whatever state it is in, the server goes on
                self.recognizer.drop([chunk.stream for chunk in chunks])
            for session, _ in batch:
                session.fail("server", "the recognizer failed; its log says why")
                session.kill()
                session.is_over = True
                session.changed.set()
            self._forget()
            return
        self.metrics.step_seconds.observe(loop.time() - started)
        self.metrics.step_streams.observe(len(batch))
        for (session, chunk), step in zip(batch, steps, strict=True):
            seconds = session.receive(chunk, step)
            self.metrics.audio_seconds.inc(len(chunk.samples) / self.recognizer.sample_rate)
            if step.final is not None:
                self.metrics.finals.inc()
            if step.partial is not None:
                self.metrics.partial_seconds.observe(seconds)
        self._forget()
