"""One run of `bench device=cuda`: for every case verify, then time, then report.

Rows are those of `bench/run.py`, and have besides:

    part            "decoder", or "end to end": an encoder runs before the decoder, its time included
    batch           utterances
    device_seconds  {"ours", "peer"}: median between two events on the GPU; `seconds` are wall clock
    roofline        {"bytes", "seconds", "ours"}: one read of the valid log-probs at the bandwidth of a
                    copy, and our device seconds as a multiple of that; None for "end to end"
    graphs          the peer's mode of CUDA graphs, None where it uses none

kaldi_decoder runs on the CPU beside cuda_wfst: its clock starts with the log-probs there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from nemo_gpu_decoding.bench.cases import Case
from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.gpu.cases import DECODER, END_TO_END, GPUCase, make_gpu_cases
from nemo_gpu_decoding.bench.gpu.encoder import Encoder, encoder_and_task
from nemo_gpu_decoding.bench.gpu.place import Place, find_place, time_in_turn
from nemo_gpu_decoding.bench.gpu.probes import probe_first_use
from nemo_gpu_decoding.bench.gpu.verify import Verifier
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Peer, Setting
from nemo_gpu_decoding.bench.report import format_table, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row, empty_row, missing_input, report_progress
from nemo_gpu_decoding.bench.strategies import STRATEGIES, Strategy
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.verify import Errors
from nemo_gpu_decoding.bench.word_graph.graphs import describe, word_graph
from nemo_gpu_decoding.bench.word_graph.strategies import WORD_GRAPH_STRATEGIES

RATIO = (
    "peer / ours, medians of wall seconds from an idle to an idle GPU over up to {} repetitions, warm"
)


def run_on_gpu(options: BenchOptions, place: Place | None = None) -> list[Row]:
    """Measure; print a table; write `options.out` and `options.plot` if they are given.

    Args:
        options: `device` names a GPU.
        place: stands in for that GPU.

    Raises:
        ValueError: there is no such GPU, kernels don't run there, or the task is too small.
    """
    place = place or find_place(options.device)
    fit = ("nemo", "riva", "kaldi_decoder") if options.strategy in WORD_GRAPH_STRATEGIES else ("nemo",)
    absent = [peer for peer in options.peers if peer not in fit]
    if absent:
        print(f"no row on a GPU for {', '.join(absent)}, see device=cpu", file=sys.stderr)
    encoder, task = encoder_and_task(options, place)
    if len(task.texts) < max(options.batches):
        raise ValueError(
            f"batches holds {max(options.batches)}, expected at most {len(task.texts)}, "
            "the utterances that there are"
        )
    bandwidth = place.copy_bandwidth()
    header = describe_run(options, task) | {
        "device": place.name,
        "copy_bandwidth": bandwidth,
        "encoder": encoder.name if encoder else None,
        "ratio": RATIO.format(options.repeats),
    }
    out = result_path(options.out, header) if options.out else None
    rows: list[Row] = []
    bench = Bench(options, place, encoder, task, bandwidth)
    for case in make_gpu_cases(options):
        rows.append(bench.measure(case))
        report_progress(rows[-1])
        if out:  # a run that is cut off keeps what it has
            write_result(out, header, rows)
    if options.probes and options.strategy in STRATEGIES:
        header["probes"] = {"first use": probe_first_use()}
    print(format_table(header, rows))
    if out:
        write_result(out, header, rows)
    if options.plot:
        from nemo_gpu_decoding.bench.gpu.plot import plot_rows_on_gpu

        plot_rows_on_gpu(rows, options.plot, title=f"{place.name}, {task.name}")
    return rows


class Bench:
    """What the rows of a run share."""

    def __init__(
        self,
        options: BenchOptions,
        place: Place,
        encoder: Encoder | None,
        task: Task,
        bandwidth: float,
    ) -> None:
        self._options = options
        self._place = place
        self._encoder = encoder
        self._all = task.on(place.device)
        self._bandwidth = bandwidth
        self._verifier = Verifier(
            self._all, options.check_utterances, self._strategy_on_cpu, self._peer_alone
        )
        self._batch = 0
        self._task = self._all
        # prepared for this batch size, and what they get wrong in it
        self._decoders: dict[tuple[type[Peer], Setting], Peer] = {}
        self._errors: dict[tuple[type[Peer], Setting], Errors] = {}

    def measure(self, gpu_case: GPUCase) -> Row:
        """One row."""
        case, options = gpu_case.case, self._options
        strategy = _strategy(options)
        assert case.peer is not None
        row = empty_row(case, case.peer(options), strategy(options)) | {
            "part": gpu_case.part,
            "batch": gpu_case.batch,
            "device_seconds": {"ours": None, "peer": None},
            "roofline": None,
            "graphs": None,
        }
        row["skipped"] = case.peer(options).available() or missing_input(case, self._all)
        if row["skipped"]:
            return row
        self._turn_to(gpu_case.batch)
        if options.strategy in WORD_GRAPH_STRATEGIES:
            row["graph"] = describe(word_graph(self._all))
        peer, ours = self._decoder(case.peer, case.theirs), self._decoder(strategy, case.ours)
        assert isinstance(ours, Strategy)
        task = self._task
        paths = ours.paths(task.log_probs, task.lengths)
        errors = self._errors_of(peer, case.theirs), Errors.of(task, [p.tokens.tolist() for p in paths])
        verdict = self._verifier.verify(case, ours, paths, errors)
        row |= {"verified": verdict.verified, "verified_by": verdict.how, "graphs": peer.graphs}
        row |= self._timed(gpu_case, peer, ours)
        row["wer"] = {"ours": errors[1].wer, "peer": errors[0].wer}
        row["ter"] = {"ours": errors[1].ter, "peer": errors[0].ter}
        return row

    def _errors_of(self, peer: Peer, setting: Setting) -> Errors:
        """Of the peer on this batch; it decodes it once for all rows, and is warm then."""
        if (type(peer), setting) not in self._errors:
            outputs = peer.decode(self._task.log_probs, self._task.lengths)
            self._errors[type(peer), setting] = Errors.of(self._task, outputs)
        return self._errors[type(peer), setting]

    def _timed(self, gpu_case: GPUCase, peer: Peer, ours: Strategy) -> Row:
        options, target = self._options, gpu_case.case.target
        calls = [self._call(gpu_case.part, decoder) for decoder in (peer, ours)]
        if gpu_case.part == END_TO_END:  # the decoders are warm, but the encoder may not be
            calls[1]()
        theirs, mine = time_in_turn(calls, self._place.clock, options.repeats, options.pair_seconds)
        seconds = {"ours": mine.median("wall"), "peer": theirs.median("wall")}
        ratio = seconds["peer"] / seconds["ours"]
        return {
            "seconds": seconds,
            "device_seconds": {"ours": mine.median("device"), "peer": theirs.median("device")},
            "ratio": ratio,
            "met": None if target is None else ratio >= target,
            "repetitions": len(mine.all),
            "timing": {"ours": mine.as_row(), "peer": theirs.as_row()},
            "rtfx": {side: self._task.audio_seconds / value for side, value in seconds.items()},
            "roofline": self._roofline(mine.median("device")) if gpu_case.part == DECODER else None,
        }

    def _call(self, part: str, decoder: Peer) -> Callable[[], object]:
        """What is timed: a decoder, or an encoder and a decoder."""
        task, encoder = self._task, self._encoder
        if part != END_TO_END:
            return lambda: decoder.results(task.log_probs, task.lengths)
        assert encoder is not None

        def encode_and_decode() -> object:
            return decoder.results(*encoder.encode())

        return encode_and_decode

    def _roofline(self, device_seconds: float) -> dict[str, float]:
        log_probs = self._task.log_probs
        row_bytes = log_probs.shape[2] * log_probs.element_size()
        read = int(self._task.lengths.sum()) * row_bytes
        seconds = read / self._bandwidth
        return {"bytes": read, "seconds": seconds, "ours": device_seconds / seconds}

    def _turn_to(self, batch: int) -> None:
        """Go on with another batch size. Decoders are made anew: NeMo's keep the size of their largest
        batch, and take the time of it ever after."""
        if batch == self._batch:
            return
        self._batch, self._task = batch, self._all.first(batch)
        self._decoders.clear()
        self._errors.clear()
        if self._place.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._encoder is not None:
            self._encoder.prepare(self._task)

    def _decoder(self, kind: type[Peer], setting: Setting) -> Peer:
        if (kind, setting) not in self._decoders:
            decoder = kind(self._options)
            decoder.prepare(self._all, setting)
            self._decoders[kind, setting] = decoder
        return self._decoders[kind, setting]

    def _peer_alone(self, case: Case) -> Peer:
        """A peer of its own for utterances decoded alone, whose buffers fit one utterance."""
        assert case.peer is not None
        peer = case.peer(self._options)
        peer.prepare(self._all, case.theirs)
        return peer

    def _strategy_on_cpu(self, setting: Setting) -> Strategy:
        strategy = _strategy(self._options)(self._options)
        strategy.backend = "cpu"
        strategy.prepare(self._all, setting)
        return strategy


def _strategy(options: BenchOptions) -> type[Strategy]:
    return (STRATEGIES | WORD_GRAPH_STRATEGIES)[options.strategy]
