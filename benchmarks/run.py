"""`python -m benchmarks`: for every case verify, then time, then report.

    rows = run(BenchOptions(peers=["nemo"], beams=[4], out="r.json"))

`docs/results/README.md` explains the rows. `live.py` has mode=live, `scale.py` mode=scale,
`cluster.py` mode=cluster.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.cases import DECODER, END_TO_END, TABLE, Case, lines_of, make_cases
from benchmarks.clock import Hardware, describe_machine, find_hardware, summary, time_in_turn, torch_threads
from benchmarks.encoder import Encoder, make_encoder
from benchmarks.options import GRAPH_STRATEGIES, BenchOptions
from benchmarks.ours import (
    LARGE,
    LARGE_LM,
    OURS,
    SMALL,
    SMALL_LM,
    contexts_per_group,
    describe_graph,
    packed_lm,
    word_graph,
    work_per_frame,
)  # fmt: skip
from benchmarks.packages import check_packages
from benchmarks.peers.base import Batch, Peer, Ready, Setting
from benchmarks.report import Row, format_rows, line_of, result_path, write_result
from benchmarks.sources import make_tasks
from benchmarks.tasks import Task
from benchmarks.verify import Errors, Verdict, beside, beside_cpu, verify

__all__ = ["BenchOptions", "run"]
FILE_OPTIONS = (
    "data", "tokenizer", "lm", "word_lm", "lexicon", "model", "manifest", "out", "folder",
)  # fmt: skip


def run(options: BenchOptions, hardware: Hardware | None = None) -> list[Row]:
    """Measure; print a table; write `options.out` if it is given.

    Args:
        hardware: replaces the device of `options.device`.

    Raises:
        ImportError: a package that the run needs is not installed.
        ValueError: files do not fit each other, the task is too small, or there is no such GPU.
    """
    check_packages(options)
    if options.mode == "batch":
        check_peers(options)
    hardware = hardware or find_hardware(options.device, options.threads)
    header, measured, total = _plan(options, hardware)
    out = result_path(options.out, header) if options.out else None
    rows: list[Row] = []
    with torch_threads(options.threads), tqdm(
        total=total, unit="row", desc=f"bench {options.strategy}", disable=None, file=sys.stderr
    ) as bar:  # fmt: skip
        for row in measured:
            rows.append(row)
            tqdm.write(line_of(row), file=sys.stderr)
            bar.update()
            if out:  # an interrupted run keeps its rows
                write_result(out, header, rows)
    if options.probes and options.strategy == "flexctc_beam":
        from benchmarks.probe import probe_process

        kinds = ("start",) if hardware.on_gpu else ("memory", "start")
        header["probes"] = {kind: probe_process(kind, options) for kind in kinds}
    print(format_rows(header, rows))
    if out:
        write_result(out, header, rows)
    return rows


def check_peers(options: BenchOptions) -> None:
    """Name the peers that are not installed, whose rows are skipped.

    Raises:
        ImportError: no row is left. A peer with a published figure keeps its row, which shows the figure.
    """
    peers = {line.peer for line in lines_of(options)}
    absent = {peer.name: why_not for peer in peers if peer and (why_not := peer.unavailable())}
    if peers and all(peer and peer.name in absent and not peer.otherwise for peer in peers):
        reasons = "; ".join(dict.fromkeys(absent.values()))
        raise ImportError(f"strategy={options.strategy} has no row without its peers: {reasons}")
    for name, why_not in sorted(absent.items()):
        print(f"rows beside {name} are skipped: {why_not}", file=sys.stderr)


def _plan(options: BenchOptions, hardware: Hardware) -> tuple[dict[str, Any], Iterator[Row], int]:
    """Header, iterator of rows as they are measured, and their number."""
    if options.mode == "scale":
        from benchmarks import scale

        tasks = [scale.draw_task(options, name) for name in options.tasks]
        plan = list(scale.plan(options))
        return describe_run(options, hardware, tasks), scale.measure(options, plan), len(plan)
    tasks = [task.on(hardware.device) for task in make_tasks(options)]
    header = describe_run(options, hardware, tasks)
    if options.mode == "cluster":
        from benchmarks import cluster

        return header, cluster.measure(options, tasks), len(cluster.RUNS)
    if options.mode == "live":
        from benchmarks import live

        return header, live.measure(options, hardware, tasks), live.count(options, tasks)
    fit = {line.family for line in TABLE if line.strategy == options.strategy}
    absent = [peer for peer in options.peers if peer not in fit]
    if absent and options.peers != BenchOptions().peers:
        print(f"no row for {', '.join(absent)} with strategy={options.strategy}", file=sys.stderr)
    cases, bandwidth, encoder = list(make_cases(options, tasks)), 0.0, None
    fewest, largest = min(len(task.texts) for task in tasks), max(options.batch_sizes, default=0)
    if fewest < largest:
        raise ValueError(f"batches holds {largest}, expected at most {fewest}, the utterances that there are")
    if hardware.on_gpu:
        header["copy_bandwidth"] = bandwidth = hardware.copy_bandwidth()
    if any(case.part == END_TO_END for case in cases):
        encoder = make_encoder(options, hardware, tasks[0].vocab_size)
        header["encoder"] = encoder.name
    return header, measure(cases, Setup(options, hardware, bandwidth, encoder)), len(cases)


def describe_run(options: BenchOptions, hardware: Hardware, tasks: list[Task]) -> dict[str, Any]:
    """The header of a result file. Files are named without their folders."""
    asked = asdict(options)
    for name in FILE_OPTIONS:
        asked[name] = Path(asked[name]).name if asked[name] else None
    described = [
        {
            "name": task.name,
            "utterances": len(task.texts),
            "frames": [int(task.lengths.min()), int(task.lengths.max())],
            "vocab_size": task.vocab_size,
            "audio_seconds": round(task.audio_seconds, 2),
            "weights": asdict(task.weights),
        }
        for task in tasks
    ]
    return {
        "strategy": options.strategy,
        "mode": options.mode,
        "device": hardware.name,
        **describe_machine(),
        "threads": options.threads,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "clock": f"{hardware.ratio_clock} seconds" + ", from an idle to an idle GPU" * hardware.on_gpu,
        "tasks": described,
        "options": asked,
    }


class Setup(NamedTuple):
    """Objects that all rows of a run share."""

    options: BenchOptions
    hardware: Hardware
    bandwidth: float = 0.0  # bytes per second, of a copy on the GPU
    encoder: Encoder | None = None


def measure(cases: Iterable[Case], setup: Setup) -> Iterator[Row]:
    """Rows, one batch after the other."""
    for (task, size), own in itertools.groupby(cases, lambda case: (case.task, case.batch)):
        bench = BatchBench(setup, task, size)
        yield from map(bench.measure, own)
        del bench
        gc.collect()
        if setup.hardware.device.type == "cuda":
            torch.cuda.empty_cache()


class BatchBench:
    """Objects that the rows of one batch share: loaded decoders, and their word errors.

    Decoders are created for every batch, because NeMo's keep buffers of the largest batch and become slower.

    Args:
        size: B, the number of first utterances; None: all.
    """

    def __init__(self, setup: Setup, task: Task, size: int | None) -> None:
        self._setup, self._task = setup, task
        self._batch = task.first(size or len(task.texts))
        self._ready, self._errors = functools.cache(self._prepared), functools.cache(self._counted)
        self._encode = functools.cache(self._encoding)

    def measure(self, case: Case) -> Row:
        """One row: verify, then time."""
        options, hardware, _, _ = self._setup
        ours = Peer(options.strategy, OURS[options.strategy], multithreaded=True)
        peer = case.peer or ours
        row = empty_row(options, case, peer)
        row["skipped"] = peer.unavailable() or case.skipped
        if row["skipped"]:
            return row
        mine, own_errors = self._ready(ours, case.ours), self._errors(ours, case.ours)
        try:
            theirs, errors = self._ready(peer, case.theirs), (self._errors(peer, case.theirs), own_errors)
        except RuntimeError as error:  # for example a binary that does not support this GPU
            if peer.name == ours.name:
                raise
            row["skipped"] = f"{peer.name} does not work here: {type(error).__name__}: {error}"
            return row
        verdict = self._verdict(case, peer, ours, errors)
        calls = [self._call(case.part, decoder) for decoder in (theirs, mine)]
        if case.part == END_TO_END:  # the encoder may not be warm yet
            calls[1]()
        times = time_in_turn(calls, hardware.clock, options.repeats, options.pair_seconds)
        timing = {side: summary(taken) for side, taken in zip(("peer", "ours"), times, strict=True)}
        seconds = {side: timing[side][hardware.ratio_clock]["median"] for side in timing}
        return row | self._extras(case, theirs, mine, timing["ours"]["device"]["median"]) | {
            "verified": verdict.verified,
            "verified_by": verdict.how,
            "seconds": seconds,
            "ratio": seconds["peer"] / seconds["ours"],
            "repetitions": len(times[1]),
            "timing": timing,
            "rtfx": {side: self._batch.audio_seconds / value for side, value in seconds.items()},
            "wer": {"peer": errors[0].wer, "ours": errors[1].wer},
            "ter": {"peer": errors[0].ter, "ours": errors[1].ter},
            "fscore": {"peer": errors[0].fscore, "ours": errors[1].fscore},
        }  # fmt: skip

    def _prepared(self, peer: Peer, setting: Setting, device: str | None = None) -> Ready:
        """A decoder with its models loaded."""
        options = self._setup.options
        return peer.prepare(replace(options, device=device or options.device), self._task, setting)

    def _counted(self, peer: Peer, setting: Setting) -> Errors:
        """Errors of a decoder on the batch; this call also warms it up."""
        decoder, batch = self._ready(peer, setting), self._batch
        count = self._setup.options.phrases if self._task.lexicon else 0
        return Errors.of(batch, decoder.read(decoder.run(batch.inputs, batch.lengths)), self._task.phrases(count))

    def _verdict(self, case: Case, peer: Peer, ours: Peer, errors: tuple[Errors, Errors]) -> Verdict:
        batch, mine = self._batch, self._ready(ours, case.ours)
        if not self._setup.hardware.on_gpu:
            return verify(case, batch, self._ready(peer, case.theirs), mine, errors)
        # another instance of the peer for single utterances, with buffers for one utterance
        few = batch.first(self._setup.options.check_utterances)
        verdict = verify(case, few, self._prepared(peer, case.theirs), mine, errors)
        own = beside_cpu(batch, mine, self._ready(ours, case.ours, "cpu"))
        return Verdict(verdict.verified and own.verified, f"{verdict.how}; {own.how}")

    def _call(self, part: str, decoder: Ready) -> Callable[[], object]:
        """The call to time: a decoder, or an encoder and a decoder."""
        if part == DECODER:
            return lambda: decoder.run(self._batch.inputs, self._batch.lengths)
        encode = self._encode()
        return lambda: decoder.run(*encode())

    def _encoding(self) -> Callable[[], Batch]:
        options, hardware, _, encoder = self._setup
        assert encoder is not None
        return encoder.prepare(self._batch, hardware, options.encoder_precision)

    def _extras(self, case: Case, theirs: Ready, mine: Ready, device_seconds: float) -> Row:
        """Fields of rows for word graphs, or for a GPU."""
        batch, strategy, extras = self._batch, self._setup.options.strategy, Row(graphs=theirs.graphs)
        if strategy == "cuda_wfst":
            extras["graph"] = describe_graph(word_graph(case.task, LARGE))
        if strategy == "paged_biglm":
            both = {"peer": theirs.decoder, "ours": mine.decoder}
            results = {side: decoder.decode(batch.inputs, batch.lengths) for side, decoder in both.items()}
            extras["work"] = {side: work_per_frame(found) for side, found in results.items()}
            counts = packed_lm(case.task, LARGE).counts, packed_lm(case.task, SMALL).counts
            extras["lms"] = {"large": sum(counts[0]), "small": sum(counts[1])}
            if case.peer is SMALL_LM and not self._setup.hardware.on_gpu:
                extras["contexts_per_group"] = contexts_per_group(mine.decoder, batch)
            if LARGE_LM.name in self._setup.options.peers:
                static = self._ready(LARGE_LM, case.theirs).decoder.decode(batch.inputs, batch.lengths)
                extras["beside_large_lm"] = {side: beside(static, found) for side, found in results.items()}
        if self._setup.hardware.on_gpu and case.part == DECODER and case.task.transducer is None:
            read = int(batch.lengths.sum()) * batch.inputs.shape[2] * batch.inputs.element_size()
            at_best = read / self._setup.bandwidth
            extras["roofline"] = {"bytes": read, "seconds": at_best, "ours": device_seconds / at_best}
        return extras


def empty_row(options: BenchOptions, case: Case, peer: Peer) -> Row:
    """A row of names and settings, without measurements or checks."""
    used = case.theirs if peer.multithreaded else case.theirs._replace(threads=1)
    names = ("seconds", "timing", "rtfx", "wer", "ter", "fscore")
    nothing = {name: {"ours": None, "peer": None} for name in names}
    return {
        "strategy": options.strategy, "peer": peer.name, "task": case.task.name,
        "networks": case.task.kind, "part": case.part, "batch": case.batch,
        "params": params(options, case.task, case.ours), "peer_params": params(options, case.task, used),
        "verified": False, "verified_by": None, "ratio": None, "repetitions": 0, "skipped": None,
        "roofline": None, **nothing,
    }  # fmt: skip


def params(options: BenchOptions, task: Task, setting: Setting) -> Mapping[str, Any]:
    """A setting in the form of rows."""
    shown = setting._asdict() | {"boosting": setting.phrases > 0}
    if options.strategy != "paged_biglm":
        del shown["group_size"], shown["placement"]
    if options.strategy in GRAPH_STRATEGIES:
        shown |= {"max_active": options.max_active, "topology": options.topology}
        shown["acoustic_scale"] = task.weights.acoustic_scale
    return shown
