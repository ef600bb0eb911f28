"""A load test of the live server: many simultaneous clients with the shipped speech; some of them disconnect.

    python -m benchmarks.live_load clients=64 seconds=600 simulated=true out=build/live_load.json
    python -m benchmarks.live_load clients=64 seconds=600 speed=1 hostile=8 strategies=[flexctc_beam]

Each transcript is compared with the recognizer's result for the same chunks without a server. Additional hostile
clients send the messages of `ATTACKS`. In simulated time, server, clients and model run in one process on one core,
with one process per strategy. The clock stops while the event loop works, advances by the CPU time of each step of the
model, and jumps when all tasks wait. Delays are therefore those of a machine without other processes. Sockets are
replaced; all other parts of the server run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import selectors
import subprocess
import sys
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer, build_server
from nemo_gpu_decoding.live.batcher import NAMESPACE
from nemo_gpu_decoding.live.interface import Chunk, Recognizer, StreamOptions
from nemo_gpu_decoding.live.server import LiveServer
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.plain_text import format_table

DATA = Path(__file__).resolve().parents[1] / "assets" / "self"
PROGRAM = "python -m benchmarks.live_load"
SUMMARY = "many clients of a live server at once"
EXAMPLES = (
    "",
    "clients=64 seconds=600 simulated=true out=build/live_load.json",
    "clients=64 seconds=600 speed=1 hostile=8 strategies=[flexctc_beam]",
)
# Messages of hostile clients, one on each connection: text, or bytes of audio.
DEEP = "[" * 400_000
ATTACKS: tuple[tuple[str | bytes, ...], ...] = (
    ("blah",), (DEEP,), ("{}", DEEP), ("{}", bytes(3200), "blah"), (bytes(3200),), ("{}", bytes(3201)),
    ("{}", bytes(3_000_000)), ('{"end_silence": 1e12}',), ('{"end_silence": 1e306}',), ('{"sample_rate": 1e9}',),
    ('{"n_best": 1000000000}',), ('{"\\ud800": 1}',), ('{"phrases": ["\\ud800"]}',), ('{"language": [[]]}',),
    (json.dumps({"phrases": ["a"] * 1001}),), ('{"phrases": ["a"], "boosting_weight": 1e38}',),
    ("{}", '{"type": "end"}', "{}", bytes(2)), ("{}", b"", b"", "\0"),
)  # fmt: skip
WARM_UP = 60.0  # first seconds, in which memory may grow: buffers adapt to the load
GROWTH = 0.01  # share of its memory by which a process may grow after the warm-up


@dataclass
class LoadOptions:
    """Options of `live_load`."""

    # Number of simultaneous clients; each streams one utterance after the other.
    clients: int = 64
    # Seconds of audio that each client streams.
    seconds: float = 60.0
    # Speed at which clients send, relative to real time; 0: as fast as the server reads (in simulated time: 1).
    speed: float = 0.0
    # Share of the streams whose client disconnects without a close message, 0 .. 1.
    killed: float = 0.1
    # Number of clients that send garbage, values out of range and oversized messages; not in simulated time.
    hostile: int = 0
    # Strategies to test, with one server after the other; all except greedy use the shipped token LM.
    strategies: list[str] = field(default_factory=lambda: ["greedy", "flexctc_beam"])
    # Simulate time; all strategies run at the same time.
    simulated: bool = False
    # Output file: the rows as JSON.
    out: str | None = None


OPTIONS = LoadOptions


def run(options: LoadOptions) -> int:
    """Print one row per strategy; returns 1 if a transcript is missing or differs from the result without a server, if
    a stream stays open, or if memory grew."""
    if options.simulated and len(options.strategies) > 1:
        rows = in_processes(options)
    else:
        measure = in_simulated_time if options.simulated else over_sockets
        rows = [{"strategy": strategy} | measure(strategy, options) for strategy in options.strategies]
    shown = list(rows[0])
    print(format_table(shown, [[row[key] for key in shown] for row in rows]))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row[fault] for row in rows for fault in ("lost", "other texts", "left", "grew")))


def in_processes(options: LoadOptions) -> list[dict[str, Any]]:
    """Rows of this program, run for each strategy at the same time."""
    keys = ("clients", "seconds", "speed", "killed")  # without hostile clients
    shared = [f"{key}={getattr(options, key)}" for key in keys]
    given = [sys.executable, "-m", "benchmarks.live_load", "simulated=true", *shared]
    rows = []
    with TemporaryDirectory() as folder:
        runs = {
            Path(folder) / f"{strategy}.json": [*given, f"strategies=[{strategy}]", f"out={folder}/{strategy}.json"]
            for strategy in options.strategies
        }
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in runs.values()]
        for path, process in zip(runs, processes, strict=True):
            process.wait()
            if not path.exists():
                raise ValueError(f"the run of {path.stem} ended with {process.returncode} and without a result")
            rows += json.loads(path.read_text(encoding="utf-8"))
    return rows


def serve_options(strategy: str, options: LoadOptions) -> ServeOptions:
    """Options of a server of the shipped checkpoint; its encoder reads each chunk four times instead of seven."""
    serve = ServeOptions(model=str(DATA / "models" / "self_ctc.nemo"), strategy=strategy, port=0)
    serve = replace(serve, max_streams=options.clients + options.hostile + 16, left_seconds=0.8, right_seconds=0.4)
    return serve if strategy == "greedy" else replace(serve, lm=str(DATA / "lm" / "tok3.arpa"))


def over_sockets(strategy: str, options: LoadOptions) -> dict[str, Any]:
    """A row of a server in its own process."""
    from websockets.asyncio.client import connect

    serve = serve_options(strategy, options)
    load = Load(options, shipped_speech())
    load.texts = texts_without_a_server(build_recognizer(serve), load.speech, options.clients)
    with subprocess.Popen(command_of(serve), stdout=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)

            async def metric(name: str) -> float:
                text = await asyncio.to_thread(lambda: urllib.request.urlopen(url + "metrics").read().decode())
                found = re.search(rf"^\w+_{name} (\S+)", text, re.M)
                assert found is not None
                return float(found[1])

            stream_url = url.replace("http", "ws") + "stream"
            return asyncio.run(load.run(lambda: connect(stream_url, compression=None), metric))
        finally:
            process.terminate()


def in_simulated_time(strategy: str, options: LoadOptions) -> dict[str, Any]:
    """A row of server and clients in this process."""
    import numba
    import torch

    torch.set_num_threads(1)
    numba.set_num_threads(1)
    server = build_server(serve_options(strategy, options))
    recognizer: Any = server.batcher.recognizer
    load = Load(replace(options, speed=options.speed or 1.0), shipped_speech())
    load.texts = texts_without_a_server(recognizer, load.speech, options.clients)
    row = simulate(server, load)
    return row | {"left": row["left"] + len(recognizer.pipeline._state_pool)}


def simulate(server: LiveServer, load: Load) -> dict[str, Any]:
    """A row of clients in the event loop of the server."""
    app: Any = server.config.app

    async def metric(name: str) -> float:
        return server.batcher.metrics.registry.get_sample_value(f"{NAMESPACE}_{name}") or 0.0

    async def lived() -> dict[str, Any]:
        async with app.router.lifespan_context(app):
            return await load.run(lambda: Pipe(app), metric)

    loop = SimulatedTime()
    try:
        return loop.run_until_complete(lived())
    finally:
        loop.close()


def shipped_speech() -> list[np.ndarray]:
    """int16 samples of the shipped test utterances, at 16 kHz."""
    import soundfile

    utterances = read_manifest(DATA / "speech" / "test.json")
    return [soundfile.read(utterance.path, dtype="int16")[0] for utterance in utterances]


def texts_without_a_server(recognizer: Recognizer, speech: list[np.ndarray], most: int) -> list[str]:
    """Transcripts of all utterances, up to so many at a time."""
    wanted, n = recognizer.prepare(StreamOptions()), recognizer.chunk_samples
    texts, going = [""] * len(speech), dict.fromkeys(range(len(speech)), 0)
    while going:
        chunks = [
            Chunk(i, speech[i][at : at + n].astype("float32") / 32768, at == 0, at + n >= len(speech[i]), wanted)
            for i, at in list(going.items())[:most]
        ]
        for chunk, step in zip(chunks, recognizer.step(chunks), strict=True):
            i = chunk.stream
            if step.final is not None:
                texts[i] = f"{texts[i]} {step.final.text}".strip()
            going[i] += n
            if chunk.is_last:
                del going[i]
    return texts


def command_of(serve: ServeOptions) -> list[str]:
    keys = ("model", "strategy", "lm", "port", "max_streams", "left_seconds", "right_seconds")
    options = [f"{key}={getattr(serve, key)}" for key in keys if getattr(serve, key) is not None]
    return [sys.executable, "-m", "nemo_gpu_decoding.cli.main", "serve", *options]


def url_of(process: subprocess.Popen[str]) -> str:
    """The address that a server prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        raise ValueError(f"the server says {line!r}, expected its address")
    return found[0]


class Load:
    """Clients of one server, and their measurements.

    Args:
        options: number and behaviour of the clients.
        speech: int16 samples of utterances.
    """

    def __init__(self, options: LoadOptions, speech: list[np.ndarray]) -> None:
        self.options, self.speech = options, speech
        self.texts: list[str] = []  # of the utterances without a server, to be set before `run`
        self.counts = dict.fromkeys(("utterances", "killed", "lost", "other texts"), 0)
        self.delays = array("d")  # seconds from audio sent to its partial transcript
        self.final_delays = array("d")  # seconds from the end of a stream to its last final
        self.attacks = 0  # connections of hostile clients
        self.memory: list[tuple[float, float]] = []  # seconds since the beginning, MB

    async def run(self, connect: Callable[[], Any], metric: Callable[[str], Awaitable[float]]) -> dict[str, Any]:
        """Run all clients; returns a row of their measurements.

        Args:
            connect: opens a connection with the interface of `websockets`.
            metric: reads a metric of the server.
        """
        loop = asyncio.get_running_loop()
        started, cpu = loop.time(), await metric("process_cpu_seconds_total")
        watch = asyncio.create_task(self._watch_memory(metric))
        hostile = [asyncio.create_task(self._attack(connect, seed)) for seed in range(self.options.hostile)]
        audio = sum(await asyncio.gather(*(self._client(connect, seed) for seed in range(self.options.clients))))
        seconds, cpu = loop.time() - started, await metric("process_cpu_seconds_total") - cpu
        for task in (watch, *hostile):
            task.cancel()
        for ended in await asyncio.gather(watch, *hostile, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ValueError(f"a client or the watch of memory ended: {ended!r}")
        await asyncio.sleep(2.0)  # until the server has seen the last ones leave
        p50, p99 = (round(1000 * float(np.percentile(self.delays, p))) for p in (50, 99))
        final_p50, final_p99 = (round(1000 * float(np.percentile(self.final_delays, p))) for p in (50, 99))
        return self.counts | {
            "attacks": self.attacks, "left": round(await metric("streams_open")), "audio s": round(audio),
            "s": round(seconds), "streams per core": round(audio / cpu, 1), "partials p50 ms": p50, "p99 ms": p99,
            "finals p50 ms": final_p50, "finals p99 ms": final_p99,
        } | self._memory_growth()  # fmt: skip

    def _memory_growth(self) -> dict[str, Any]:
        """Memory after the warm-up, at the end, and its slope between. A run of less than two warm-ups has none."""
        after = np.array([sample for sample in self.memory if sample[0] >= WARM_UP])
        last = self.memory[-1][1]
        if not len(after) or after[-1, 0] < 2 * WARM_UP:
            return {"MB warm": "", "MB end": round(last), "MB per min": "", "grew": False}
        slope = float(np.polyfit(after[:, 0], after[:, 1], 1)[0])  # MB per second
        grown = slope * (after[-1, 0] - after[0, 0])
        return {
            "MB warm": round(after[0, 1]), "MB end": round(last), "MB per min": round(60 * slope, 2),
            "grew": bool(grown > GROWTH * after[0, 1]),
        }  # fmt: skip

    async def _watch_memory(self, metric: Callable[[str], Awaitable[float]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            self.memory.append((loop.time() - started, await metric("process_resident_memory_bytes") / 1e6))
            await asyncio.sleep(0.5)

    async def _client(self, connect: Callable[[], Any], seed: int) -> float:
        """One utterance after the other; returns the seconds of audio that were sent."""
        choice, audio, clock = random.Random(seed), 0.0, asyncio.get_running_loop().time
        await asyncio.sleep(choice.random())  # they do not all begin at once
        while audio < self.options.seconds:
            i = choice.randrange(len(self.speech))
            is_killed = choice.random() < self.options.killed
            samples = self.speech[i][: choice.randrange(len(self.speech[i]))] if is_killed else self.speech[i]
            async with connect() as socket:
                await socket.send("{}")
                sent: list[tuple[float, float]] = []  # seconds of audio so far, and when they were sent
                size = choice.choice((800, 1600, 5000))
                sending = asyncio.create_task(send(socket, samples, self.options.speed, size, sent))
                if is_killed:
                    await sending
                    socket.transport.abort()
                    self.counts["killed"] += 1
                else:
                    texts, last = [], None
                    async for message in socket:
                        found = json.loads(message)
                        if found["type"] == "partial":
                            heard = next(when for until, when in sent if until >= found["audio_seconds"] - 1e-3)
                            self.delays.append(clock() - heard)
                        elif found["type"] == "final":
                            texts.append(found["text"])
                            last = clock()
                    await asyncio.gather(sending, return_exceptions=True)  # an error: the server has closed
                    self.counts["utterances"] += 1
                    self.counts["lost"] += socket.close_code != 1000
                    self.counts["other texts"] += " ".join(texts) != self.texts[i]
                    if last is not None and last >= sent[-1][1]:  # else the last utterance had ended before
                        self.final_delays.append(last - sent[-1][1])
            audio += len(samples) / 16000
        return audio

    async def _attack(self, connect: Callable[[], Any], seed: int) -> None:
        """Run one attack after the other until cancelled. Some attacks do not read the server's answers."""
        from websockets.exceptions import WebSocketException

        choice = random.Random(seed)
        while True:
            for attack in choice.sample(ATTACKS, len(ATTACKS)):
                with contextlib.suppress(WebSocketException, OSError, asyncio.TimeoutError):
                    async with connect() as socket:
                        for message in attack:
                            await socket.send(message)
                        if choice.random() < 0.5:
                            await asyncio.wait_for(_read_all(socket), choice.random())
                        if choice.random() < 0.5:
                            socket.transport.abort()
                self.attacks += 1
                await asyncio.sleep(0.2 * choice.random())


async def _read_all(socket: Any) -> None:
    async for _ in socket:
        pass


async def send(socket: Any, samples: np.ndarray, speed: float, size: int, sent: list[tuple[float, float]]) -> None:
    """Send audio in messages of `size` samples, and the end, unless the client disconnects before."""
    clock = asyncio.get_running_loop().time
    began = clock()
    for at in range(0, len(samples), size):
        until = min(at + size, len(samples)) / 16000
        if speed:
            await asyncio.sleep(began + until / speed - clock())
        sent.append((until, clock()))
        await socket.send(samples[at : at + size].tobytes())
    await socket.send('{"type": "end"}')


class Pipe:
    """A WebSocket connection to an ASGI application in this process, with the methods of `websockets` that `Load`
    uses."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue(4)  # when full, the sender waits
        self._to_client: asyncio.Queue[str | None] = asyncio.Queue()
        self._is_gone, self.close_code = False, None

    async def __aenter__(self) -> Pipe:
        scope = {
            "type": "websocket", "path": "/stream", "headers": [], "query_string": b"", "subprotocols": [],
            "client": ("simulated", 0),
        }  # fmt: skip
        self._serving = asyncio.create_task(self._app(scope, self._to_server.get, self._receive))
        await self._to_server.put({"type": "websocket.connect"})
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._serving

    async def __aiter__(self) -> AsyncIterator[str]:
        while (message := await self._to_client.get()) is not None:
            yield message

    @property
    def transport(self) -> Pipe:
        return self

    async def send(self, message: str | bytes) -> None:
        if self.close_code is not None:
            raise ConnectionError(f"the server has closed with {self.close_code}")
        kind = "text" if isinstance(message, str) else "bytes"
        await self._to_server.put({"type": "websocket.receive", kind: message})

    def abort(self) -> None:
        """Disconnect without a close message."""
        self._is_gone = True
        self._clear()
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def _receive(self, message: dict[str, Any]) -> None:
        if self._is_gone:
            raise OSError("the client is gone")
        if message["type"] == "websocket.send":
            self._to_client.put_nowait(message["text"])
        elif message["type"] == "websocket.close":
            self.close_code = message.get("code", 1000)
            self._clear()
            self._to_client.put_nowait(None)

    def _clear(self) -> None:
        while not self._to_server.empty():
            self._to_server.get_nowait()


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop without waiting: its clock jumps to the next timer. Calls in another thread run immediately, and
    the clock advances by their CPU time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future, started = self.create_future(), time.process_time()
        try:
            settle, result = future.set_result, func(*args)
        except Exception as error:
            settle, result = future.set_exception, error
        self.call_later(time.process_time() - started, lambda: future.done() or settle(result))
        return future


class _Jumping(selectors.DefaultSelector):
    """Files that are ready now; else time goes on to the timeout."""

    def __init__(self, loop: SimulatedTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("all clients wait, and nothing will happen any more")
            self._loop.now += max(timeout, 0.0)
        return found


def main() -> int:
    """Run the command; returns an exit code as `nemo-gpu-decoding` does."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
