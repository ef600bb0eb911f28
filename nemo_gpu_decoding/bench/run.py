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
    networks        rnnt or tdt; in rows of transducers only
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from nemo_gpu_decoding.bench.cases import Case, make_cases
from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.measure import ratio_clock, time_alternately, torch_threads
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.probe import probe_process
from nemo_gpu_decoding.bench.report import format_table, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row, empty_row, missing_input, report_progress
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.strategies import STRATEGIES
from nemo_gpu_decoding.bench.task import Task, Utterances
from nemo_gpu_decoding.bench.transducer.cases import make_transducer_cases
from nemo_gpu_decoding.bench.transducer.sources import transducer_tasks
from nemo_gpu_decoding.bench.transducer.strategies import TRANSDUCER_STRATEGIES
from nemo_gpu_decoding.bench.transducer.task import TransducerTask
from nemo_gpu_decoding.bench.verify import Errors, verify

__all__ = ["BenchOptions", "run"]


def run(options: BenchOptions) -> list[Row]:
    """Measure; print a table; write `options.out` and `options.plot` if they are given.

    Rows of a run on a GPU say more, see `gpu/run.py`.

    Raises:
        ValueError: unknown strategy, or files that do not fit each other, or no such GPU.
    """
    known = STRATEGIES | TRANSDUCER_STRATEGIES
    if options.strategy not in known:
        raise ValueError(f"strategy is {options.strategy!r}, expected one of {', '.join(known)}")
    if options.strategy in TRANSDUCER_STRATEGIES and options.device != "cpu":
        raise ValueError(f"device is {options.device!r}, expected cpu with strategy={options.strategy}")
    if options.device != "cpu":
        from nemo_gpu_decoding.bench.gpu.run import run_on_gpu

        return run_on_gpu(options)
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
    if options.probes and isinstance(task, Task):
        header["probes"] = {kind: probe_process(kind, options) for kind in ("memory", "start")}
    print(format_table(header, rows))
    if out:
        write_result(out, header, rows)
    if options.plot:
        from nemo_gpu_decoding.bench.plot import plot_rows

        plot_rows(rows, options.plot, title=f"{task.name}, {header['cpu']}, {options.threads} thread(s)")
    return rows


def _tasks(options: BenchOptions) -> Sequence[Utterances]:
    """One task; for transducers one of each kind."""
    if options.strategy not in TRANSDUCER_STRATEGIES:
        return [make_task(options)]
    absent = [peer for peer in options.peers if peer != "nemo"]
    if absent:
        print(f"{', '.join(absent)}: for CTC only, see strategy=flexctc_beam", file=sys.stderr)
    return transducer_tasks(options)


def _work(options: BenchOptions, tasks: Sequence[Utterances]) -> Iterator[tuple[Case, Utterances]]:
    """All cases with what they are measured on."""
    for task in tasks:
        if isinstance(task, TransducerTask):
            cases = make_transducer_cases(options, task.kind)
        else:
            cases = make_cases(options)
        for case in cases:
            yield case, task


def measure_case(case: Case, task: Utterances, options: BenchOptions) -> Row:
    """One row: verify, then time."""
    strategy = (STRATEGIES | TRANSDUCER_STRATEGIES)[options.strategy]
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
