"""A load run of the live server: many clients at once on the shipped speech, some of which die.

    python scripts/live_load.py clients=64 seconds=600 out=build/live_load.json
    python scripts/live_load.py clients=32 speed=1 strategies=[greedy,flexctc_beam]

Each transcript is compared with what the recognizer gives for the same chunks without a server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.cli.main import guarded
from nemo_gpu_decoding.cli.options import help_text, parse_options
from nemo_gpu_decoding.cli.serve import ServeOptions, build_recognizer
from nemo_gpu_decoding.live.recognizer import Chunk, StreamOptions
from nemo_gpu_decoding.manifest import read_manifest
from nemo_gpu_decoding.report import format_table

DATA = Path(__file__).resolve().parents[1] / "assets" / "self"
EXAMPLES = ("", "clients=64 seconds=600 out=build/live_load.json", "clients=32 speed=1 strategies=[flexctc_beam]")


@dataclass
class LoadOptions:
    """Options of `live_load`."""

    # Clients that stream at the same time, each one utterance after the other.
    clients: int = 64
    # Seconds of audio that each client streams.
    seconds: float = 60.0
    # Times real time at which clients send; 0: as fast as the server reads.
    speed: float = 0.0
    # Share of the streams whose client dies without a word.
    killed: float = 0.1
    # Strategies to serve with, one server after the other; all but greedy with the shipped token LM.
    strategies: list[str] = field(default_factory=lambda: ["greedy", "flexctc_beam"])
    # Write the rows here as JSON.
    out: str | None = None


def run(options: LoadOptions) -> int:
    """One row per strategy; 1 if a transcript was lost or is another than without a server."""
    rows = []
    for strategy in options.strategies:
        serve = ServeOptions(model=str(DATA / "models" / "self_ctc.nemo"), strategy=strategy, port=0)
        serve = replace(serve, max_streams=options.clients + 16)
        if strategy != "greedy":
            serve = replace(serve, lm=str(DATA / "lm" / "tok3.arpa"))
        speech = shipped_speech()
        expected = texts_without_a_server(serve, speech)
        with subprocess.Popen(command_of(serve), stdout=subprocess.PIPE, text=True) as process:
            try:
                rows.append(asyncio.run(load(url_of(process), options, speech, expected)) | {"strategy": strategy})
            finally:
                process.terminate()
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shown = ["strategy", *(key for key in rows[0] if key != "strategy")]
    print(format_table(shown, [[row[key] for key in shown] for row in rows]))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["lost"] or row["other texts"] for row in rows))


def shipped_speech() -> list[np.ndarray]:
    """int16 samples of the shipped test utterances, at 16 kHz."""
    import soundfile

    utterances = read_manifest(DATA / "speech" / "test.json")
    return [soundfile.read(utterance.path, dtype="int16")[0] for utterance in utterances]


def texts_without_a_server(serve: ServeOptions, speech: list[np.ndarray]) -> list[str]:
    """Transcripts of all utterances, in one batch of streams."""
    recognizer = build_recognizer(serve)
    wanted, n = recognizer.prepare(StreamOptions()), recognizer.chunk_samples
    texts, going = [""] * len(speech), dict.fromkeys(range(len(speech)), 0)
    while going:
        chunks = [
            Chunk(i, speech[i][at : at + n].astype("float32") / 32768, at == 0, at + n >= len(speech[i]), wanted)
            for i, at in list(going.items())[: serve.max_streams]
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
    keys = ("model", "strategy", "lm", "port", "max_streams")
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


async def load(url: str, options: LoadOptions, speech: list[np.ndarray], expected: list[str]) -> dict[str, Any]:
    """What clients of a server saw."""
    counts = dict.fromkeys(("utterances", "killed", "lost", "other texts"), 0)
    delays: list[float] = []
    memory: list[float] = []
    watch = asyncio.create_task(watch_memory(url, memory))
    cpu = await metric(url, "cpu_seconds_total")
    started = time.perf_counter()
    clients = [client(url, options, (speech, expected), (counts, delays), seed) for seed in range(options.clients)]
    audio = sum(await asyncio.gather(*clients))
    seconds, cpu = time.perf_counter() - started, await metric(url, "cpu_seconds_total") - cpu
    watch.cancel()
    p50, p99 = (round(1000 * float(np.percentile(delays, p))) for p in (50, 99))
    tenth = max(1, len(memory) // 10)
    return counts | {
        "audio s": round(audio), "s": round(seconds), "streams per core": round(audio / cpu, 1),
        "partials p50 ms": p50, "p99 ms": p99, "MB early": round(float(np.median(memory[tenth : 3 * tenth]))),
        "MB late": round(float(np.median(memory[-2 * tenth :]))),
    }  # fmt: skip


async def client(url: str, options: LoadOptions, spoken: Any, seen: Any, seed: int) -> float:
    """One utterance after the other; returns the seconds of audio that were sent."""
    from websockets.asyncio.client import connect

    (speech, expected), (counts, delays) = spoken, seen
    choice, audio = random.Random(seed), 0.0
    while audio < options.seconds:
        i = choice.randrange(len(speech))
        is_killed = choice.random() < options.killed
        samples = speech[i][: choice.randrange(len(speech[i]))] if is_killed else speech[i]
        async with connect(url.replace("http", "ws") + "stream", compression=None) as socket:
            await socket.send("{}")
            sending = asyncio.create_task(send(socket, samples, options.speed, choice.choice((800, 1600, 5000))))
            if is_killed:
                await sending
                socket.transport.abort()
                counts["killed"] += 1
            else:
                texts = []
                async for message in socket:
                    found = json.loads(message)
                    if found["type"] == "partial":
                        delays.append(time.perf_counter() - sent_at(socket, found["audio_seconds"]))
                    elif found["type"] == "final":
                        texts.append(found["text"])
                await sending
                counts["utterances"] += 1
                counts["lost"] += socket.close_code != 1000
                counts["other texts"] += " ".join(texts) != expected[i]
        audio += len(samples) / 16000
    return audio


async def send(socket: Any, samples: np.ndarray, speed: float, size: int) -> None:
    """Audio in messages of `size` samples, and the end."""
    socket.sent = []  # (seconds of audio so far, when they were sent)
    began = time.perf_counter()
    for at in range(0, len(samples), size):
        until = min(at + size, len(samples)) / 16000
        if speed:
            await asyncio.sleep(began + until / speed - time.perf_counter())
        await socket.send(samples[at : at + size].tobytes())
        socket.sent.append((until, time.perf_counter()))
    await socket.send('{"type": "end"}')


def sent_at(socket: Any, seconds: float) -> float:
    """When the last sample was sent that a message has heard."""
    return next(when for until, when in socket.sent if until >= seconds - 1e-3)


async def watch_memory(url: str, memory: list[float]) -> None:
    """The server's resident memory, in MB, twice a second."""
    while True:
        memory.append(await metric(url, "resident_bytes") / 1e6)
        await asyncio.sleep(0.5)


async def metric(url: str, name: str) -> float:
    """One of the server's counters."""
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url + "metrics").read().decode())
    found = re.search(rf"^\w+_{name} (\S+)", text, re.M)
    assert found is not None
    return float(found[1])


def main() -> int:
    """The command: 0, or another exit code as of `nemo-gpu-decoding`."""
    arguments, program = sys.argv[1:], "python scripts/live_load.py"
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text(program, "many clients of a live server at once", LoadOptions, EXAMPLES))
        return 0
    return guarded(program, lambda: run(parse_options(LoadOptions, arguments)), __name__)


if __name__ == "__main__":
    sys.exit(main())
