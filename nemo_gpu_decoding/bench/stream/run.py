"""`bench mode=stream`: N live streams through one decoder, with dynamic batching.

Every row is a dict; latencies are in seconds:

    strategy, params        our decoder and its settings, with the largest of `beams` or `graph_beams`
    networks                rnnt or tdt; in rows of transducers only
    streams                 N
    texts                   of which streams partial results were asked after each batch: none, own, all
    chunk_seconds           audio in a chunk
    chunks                  how many were decoded
    verified, verified_by   does every stream give what its audio gives in one piece
    utilisation             share of the time in which the decoder was busy
    batch                   {"mean", "max"} chunks decoded together
    latency                 {"compute", "queue", "total"}: {"mean", "p50", "p99"}
    md1                     {"alone", "batched"}: the M/D/1 formula of `queueing.py` with the time of a
                            chunk decoded alone, and with a chunk's share in the batches
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import numpy as np

from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.gpu.place import Place, find_place
from nemo_gpu_decoding.bench.measure import ratio_clock, torch_threads
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Setting
from nemo_gpu_decoding.bench.report import machine, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.stream.queueing import draw_arrivals, md1, simulate
from nemo_gpu_decoding.bench.stream.replay import Replay, Tape, equal_results
from nemo_gpu_decoding.bench.stream.report import format_streams
from nemo_gpu_decoding.bench.task import Utterances
from nemo_gpu_decoding.bench.transducer.task import TransducerTask
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting
from nemo_gpu_decoding.bench.word_graph.strategies import WORD_GRAPH_STRATEGIES

WARM_UP, ALONE = 8, 256  # chunks decoded one by one, before the clock runs and for the M/D/1 formula
SPEAKING = 8  # streams that these are of, so that each goes on for a while
WHOLE = 1e-6  # a chunk may miss a whole number of frames by so much, relatively


def run_streams(
    options: BenchOptions,
    tasks: Sequence[Utterances],
    strategy: type[Strategy],
    place: Place | None = None,
) -> list[Row]:
    """Measure; print a table; write `options.out` and `options.plot` if they are given.

    Args:
        options: `device` may name a GPU: log-probs lie there then.
        tasks: what streams hear, rows for each.
        strategy: our decoder.
        place: stands in for that GPU.

    Raises:
        ValueError: a chunk is no whole number of frames, or there is no such GPU.
    """
    if place is None and options.device != "cpu":
        place = find_place(options.device)
    clock = "wall" if place else ratio_clock(options.threads)
    header = describe_run(options, tasks[0]) | {
        "mode": "stream",
        "clock": f"event-driven, fed with the {clock} seconds of the decoder",
    }
    if place:
        header["device"] = place.name
        tasks = [task.on(place.device) for task in tasks]
    del header["ratio"]
    rows: list[Row] = []
    out = result_path(options.out, header) if options.out else None
    with torch_threads(options.threads):
        for task in tasks:
            decoder = strategy(options)
            setting = _setting(options, task)
            decoder.prepare(task, setting)
            for texts in options.texts:
                for n in options.streams:
                    rows.append(measure_streams(decoder, task, setting, n, texts))
                    report_latency(rows[-1])
                    if out:  # a run that is cut off keeps what it has
                        write_result(out, header, rows)
    print(format_streams(header, rows))
    if options.plot:
        from nemo_gpu_decoding.bench.stream.plot import plot_streams

        title = f"{options.strategy}, {tasks[0].name}, {machine(header)}, {options.threads} thread(s)"
        plot_streams(rows, options.plot, title=title)
    return rows


def measure_streams(ours: Strategy, task: Utterances, setting: Setting, n: int, texts: str) -> Row:
    """One row: simulate, then verify that no stream was harmed."""
    options = ours.options
    chunk = frames_of_chunk(options.chunk_ms, task.frame_seconds)
    tape = Tape(task)

    def replay() -> Replay:
        return Replay(
            ours.decoder, tape, n, chunk, texts=texts, threads=options.threads,
            tells_rows=ours.tells_rows,
        )  # fmt: skip

    gc.collect()
    alone = seconds_alone(replay(), n)
    live = replay()
    chunk_seconds = chunk * task.frame_seconds
    rng = np.random.default_rng(options.seed)
    arrivals = draw_arrivals(n, chunk_seconds, options.stream_seconds, rng)
    if not arrivals:
        raise ValueError(
            f"stream_seconds is {options.stream_seconds}, in which no chunk came: expected more"
        )
    seen = simulate(arrivals, live.serve, options.max_batch)
    verified, how = equal_results(live)
    rate = n / chunk_seconds
    networks = {"networks": task.kind} if isinstance(task, TransducerTask) else {}
    return {"strategy": ours.name, "params": setting.as_params(), **networks} | {
        "streams": n,
        "texts": texts,
        "chunk_seconds": chunk_seconds,
        "chunks": len(arrivals),
        "verified": verified,
        "verified_by": how,
        "utilisation": seen.utilisation,
        "batch": {"mean": float(seen.batches.mean()), "max": int(seen.batches.max())},
        "latency": {
            name: _spread(seconds)
            for name, seconds in (
                ("compute", seen.compute), ("queue", seen.queue), ("total", seen.total)
            )
        },
        "md1": {"alone": md1(rate, alone), "batched": md1(rate, seen.busy / len(arrivals))},
    }  # fmt: skip


def report_latency(row: Row) -> None:
    """One line on stderr per row."""
    total = {name: f"{1000 * seconds:.2f} ms" for name, seconds in row["latency"]["total"].items()}
    what = f"{row['streams']} streams, texts: {row['texts']}"
    print(f"{what}: {total}, verified: {row['verified']}", file=sys.stderr, flush=True)


def frames_of_chunk(chunk_ms: float, frame_seconds: float) -> int:
    """Frames in a chunk.

    Raises:
        ValueError: they are no whole number, or none.
    """
    frames = chunk_ms / 1000 / frame_seconds
    if round(frames) < 1 or abs(frames - round(frames)) > WHOLE * frames:
        raise ValueError(
            f"chunk_ms is {chunk_ms}, expected a whole number of frames of {1000 * frame_seconds:g} ms"
        )
    return round(frames)


def seconds_alone(replay: Replay, n: int) -> float:
    """Mean seconds of a chunk that is decoded by itself, while n streams are open."""
    speaking = min(n, SPEAKING)
    for number in range(WARM_UP):
        replay.serve([number % speaking])
    seconds = [replay.serve([number % speaking]) for number in range(ALONE)]
    replay.close()
    return float(np.mean(seconds))


def _setting(options: BenchOptions, task: Utterances) -> Setting:
    if options.strategy in WORD_GRAPH_STRATEGIES:
        return graph_setting(options, max(options.graph_beams))
    return Setting(max(options.beams), lm=task.lm is not None, threads=options.threads)


def _spread(seconds: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p99": p99}
