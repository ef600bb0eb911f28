"""`nemo-gpu-decoding bench`: for every case verify, then time, then report.

    rows = run(BenchOptions(peers=["nemo"], beams=[4], out="r.json"))

Every row is a dict:

    strategy, peer          names
    params, peer_params     beam_size, lm, boosting, phrases, threads of our decoder and of the peer
    verified, verified_by   did the check before the timing hold, and which check it was
    seconds                 {"ours", "peer"}: median of one pass over the batch, on the ratio's clock
    ratio                   peer / ours
    target, met             the least ratio that we promise (None: none), and whether it is reached
    repetitions             how often both were timed
    timing                  {"ours", "peer"}: {"cpu", "wall"}: {"median", "min", "max"} seconds
    rtfx                    {"ours", "peer"}: seconds of audio decoded per second
    wer, ter                {"ours", "peer"}: percent of words and of tokens that are wrong
    skipped                 None, or why nothing was measured: verified is False, numbers are None
    networks                rnnt or tdt; in rows of transducers only
    graph                   n-grams, words, states and arcs of the graph; in rows of word graphs only
    lms, work               n-grams of both LMs, work per frame of both sides; of paged_biglm only

`bench mode=stream` and `mode=scale` measure something else: see `stream/run.py` and `scale/run.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from nemo_gpu_decoding.bench.cases import Case, make_cases
from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.large_lm.cases import make_large_lm_cases
from nemo_gpu_decoding.bench.large_lm.strategies import LARGE_LM_STRATEGIES, PagedBigLMSearch
from nemo_gpu_decoding.bench.measure import ratio_clock, time_alternately, torch_threads
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.probe import probe_process
from nemo_gpu_decoding.bench.report import format_table, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row, empty_row, missing_input, report_progress
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.strategies import STRATEGIES, Strategy
from nemo_gpu_decoding.bench.task import Task, Utterances
from nemo_gpu_decoding.bench.transducer.cases import make_transducer_cases
from nemo_gpu_decoding.bench.transducer.sources import transducer_tasks
from nemo_gpu_decoding.bench.transducer.strategies import TRANSDUCER_STRATEGIES
from nemo_gpu_decoding.bench.transducer.task import TransducerTask
from nemo_gpu_decoding.bench.verify import Errors, verify
from nemo_gpu_decoding.bench.word_graph.cases import make_word_graph_cases
from nemo_gpu_decoding.bench.word_graph.graphs import describe, word_graph
from nemo_gpu_decoding.bench.word_graph.sources import word_graph_task
from nemo_gpu_decoding.bench.word_graph.strategies import WORD_GRAPH_STRATEGIES

__all__ = ["BenchOptions", "run"]

FIT_PEERS = (  # strategies, and the families of peers that they are measured beside
    (TRANSDUCER_STRATEGIES, ("nemo",)),
    (WORD_GRAPH_STRATEGIES, ("kaldi_decoder",)),
    (LARGE_LM_STRATEGIES, ("small_lm", "eager")),
    (STRATEGIES, ("nemo", "flashlight", "pyctcdecode")),
)


def run(options: BenchOptions) -> list[Row]:
    """Measure; print a table; write `options.out` and `options.plot` if they are given.

    Rows of a run on a GPU say more, see `gpu/run.py`.

    Raises:
        ValueError: unknown strategy, or files that do not fit each other, or no such GPU.
    """
    known = all_strategies()
    if options.strategy not in known:
        raise ValueError(f"strategy is {options.strategy!r}, expected one of {', '.join(known)}")
    if options.strategy not in STRATEGIES | WORD_GRAPH_STRATEGIES and options.device != "cpu":
        raise ValueError(f"device is {options.device!r}, expected cpu with strategy={options.strategy}")
    if options.mode == "scale":
        from nemo_gpu_decoding.bench.scale.run import run_scale

        return run_scale(options)
    if options.mode == "stream":
        from nemo_gpu_decoding.bench.stream.run import run_streams

        return run_streams(options, _tasks(options), known[options.strategy])
    if options.device != "cpu":
        from nemo_gpu_decoding.bench.gpu.run import run_on_gpu

        return run_on_gpu(options)
    _name_absent_peers(options)
    tasks = _tasks(options)
    task = tasks[0]
    header = describe_run(options, task)
    rows: list[Row] = []
    out = result_path(options.out, header) if options.out else None
    with torch_threads(options.threads):
        for case, its_task in _work(options, tasks):
            rows.append(measure_case(case, its_task, options))
            report_progress(rows[-1])
            if out:  # a run that is cut off keeps what it has
                write_result(out, header, rows)
    if options.probes and options.strategy in STRATEGIES:
        header["probes"] = {kind: probe_process(kind, options) for kind in ("memory", "start")}
    print(format_table(header, rows))
    if out:
        write_result(out, header, rows)
    if options.plot:
        from nemo_gpu_decoding.bench.plot import plot_rows

        plot_rows(rows, options.plot, title=f"{task.name}, {header['cpu']}, {options.threads} thread(s)")
    return rows


def all_strategies() -> dict[str, type[Strategy]]:
    """Name -> what measures it."""
    return STRATEGIES | TRANSDUCER_STRATEGIES | WORD_GRAPH_STRATEGIES | LARGE_LM_STRATEGIES


def _tasks(options: BenchOptions) -> Sequence[Utterances]:
    """One task; for transducers one of each kind."""
    if options.strategy in TRANSDUCER_STRATEGIES:
        return transducer_tasks(options)
    if options.strategy in WORD_GRAPH_STRATEGIES | LARGE_LM_STRATEGIES:
        return [word_graph_task(options)]
    return [make_task(options)]


def _name_absent_peers(options: BenchOptions) -> None:
    """Say which of the peers that were asked for are no match for this strategy."""
    fit = next(peers for names, peers in FIT_PEERS if options.strategy in names)
    absent = [peer for peer in options.peers if peer not in fit]
    if absent:
        print(f"no row for {', '.join(absent)} with strategy={options.strategy}", file=sys.stderr)


def _work(options: BenchOptions, tasks: Sequence[Utterances]) -> Iterator[tuple[Case, Utterances]]:
    """All cases with what they are measured on."""
    for task in tasks:
        if isinstance(task, TransducerTask):
            cases = make_transducer_cases(options, task.kind)
        elif options.strategy in WORD_GRAPH_STRATEGIES:
            cases = make_word_graph_cases(options)
        elif options.strategy in LARGE_LM_STRATEGIES:
            cases = make_large_lm_cases(options)
        else:
            cases = make_cases(options)
        for case in cases:
            yield case, task


def measure_case(case: Case, task: Utterances, options: BenchOptions) -> Row:
    """One row: verify, then time."""
    strategy = all_strategies()[options.strategy]
    peer = (case.peer or strategy)(options)
    ours = strategy(options)
    row = empty_row(case, peer, ours)
    if isinstance(task, TransducerTask):
        row["networks"] = task.kind
    row["skipped"] = peer.available() or missing_input(case, task)
    if row["skipped"]:
        return row
    peer.prepare(task, case.theirs)
    ours.prepare(task, case.ours)
    if isinstance(task, Task) and options.strategy in WORD_GRAPH_STRATEGIES:
        row["graph"] = describe(word_graph(task))
    if isinstance(task, Task) and isinstance(ours, PagedBigLMSearch):
        row |= ours.describe(peer, task)
    outputs = [decoder.decode(task.inputs, task.lengths) for decoder in (peer, ours)]
    errors = Errors.of(task, outputs[0]), Errors.of(task, outputs[1])
    verdict = verify(case.check, task, peer, ours, errors)
    theirs, mine = time_alternately(
        lambda: peer.decode(task.inputs, task.lengths),
        lambda: ours.decode(task.inputs, task.lengths),
        options.repeats,
        options.pair_seconds,
    )
    clock = ratio_clock(options.threads)
    seconds = {"ours": mine.median(clock), "peer": theirs.median(clock)}
    ratio = seconds["peer"] / seconds["ours"]
    return row | {
        "verified": verdict.verified,
        "verified_by": verdict.how,
        "seconds": seconds,
        "ratio": ratio,
        "met": None if case.target is None else ratio >= case.target,
        "repetitions": len(mine.cpu),
        "timing": {"ours": mine.as_row(), "peer": theirs.as_row()},
        "rtfx": {side: task.audio_seconds / value for side, value in seconds.items()},
        "wer": {"ours": errors[1].wer, "peer": errors[0].wer},
        "ter": {"ours": errors[1].ter, "peer": errors[0].ter},
    }
