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
"""

from __future__ import annotations

from nemo_gpu_decoding.bench.cases import Case, make_cases
from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.measure import ratio_clock, time_alternately, torch_threads
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.probe import probe_process
from nemo_gpu_decoding.bench.report import format_table, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row, empty_row, missing_input, report_progress
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.strategies import STRATEGIES
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.verify import Errors, verify

__all__ = ["BenchOptions", "run"]


def run(options: BenchOptions) -> list[Row]:
    """Measure; print a table; write `options.out` and `options.plot` if they are given.

    Rows of a run on a GPU say more, see `gpu/run.py`.

    Raises:
        ValueError: unknown strategy, or files that do not fit each other, or no such GPU.
    """
    if options.strategy not in STRATEGIES:
        raise ValueError(f"strategy is {options.strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if options.device != "cpu":
        from nemo_gpu_decoding.bench.gpu.run import run_on_gpu

        return run_on_gpu(options)
    task = make_task(options)
    header = describe_run(options, task)
    rows: list[Row] = []
    out = result_path(options.out, header) if options.out else None
    with torch_threads(options.threads):
        for case in make_cases(options):
            rows.append(measure_case(case, task, options))
            report_progress(rows[-1])
            if out:  # a run that is cut off keeps what it has
                write_result(out, header, rows)
    if options.probes:
        header["probes"] = {kind: probe_process(kind, options) for kind in ("memory", "start")}
    print(format_table(header, rows))
    if out:
        write_result(out, header, rows)
    if options.plot:
        from nemo_gpu_decoding.bench.plot import plot_rows

        plot_rows(rows, options.plot, title=f"{task.name}, {header['cpu']}, {options.threads} thread(s)")
    return rows


def measure_case(case: Case, task: Task, options: BenchOptions) -> Row:
    """One row: verify, then time."""
    strategy = STRATEGIES[options.strategy]
    peer = (case.peer or strategy)(options)
    ours = strategy(options)
    row = empty_row(case, peer, ours)
    row["skipped"] = peer.available() or missing_input(case, task)
    if row["skipped"]:
        return row
    peer.prepare(task, case.theirs)
    ours.prepare(task, case.ours)
    outputs = [decoder.decode(task.log_probs, task.lengths) for decoder in (peer, ours)]
    errors = Errors.of(task, outputs[0]), Errors.of(task, outputs[1])
    verdict = verify(case.check, task, peer, ours, errors)
    theirs, mine = time_alternately(
        lambda: peer.decode(task.log_probs, task.lengths),
        lambda: ours.decode(task.log_probs, task.lengths),
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
