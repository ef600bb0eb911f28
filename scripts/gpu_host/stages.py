"""Run the stages of a GPU session one after the other, each with a time limit; sum up at the end.

    python scripts/gpu_host/stages.py --out FOLDER [--dry-run] [--only NAME ...] [--limit SECONDS]

A stage that fails or takes too long does not keep the others from running. Leaves in FOLDER
summary.json, log.txt (all output), tests.xml and what the benchmarks write: eight files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
TOTAL_SECONDS = 580  # under ten minutes, whatever happens
TAIL = 25  # lines of a failed stage that are shown again at the end

PASSED, FAILED, TOO_LONG, NO_TIME = "passed", "failed", "took too long", "no time left"


@dataclass(frozen=True)
class Stage:
    """`command` may hold {python} and {out}."""

    name: str
    seconds: int  # time limit
    command: tuple[str, ...]


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("{python}", "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rs", *arguments)


def _bench(*arguments: str) -> tuple[str, ...]:
    common = ("device=cuda", "peers=[nemo]", "repeats=30", "pair_seconds=0.7", "check_utterances=8")
    return ("{python}", "-m", "nemo_gpu_decoding.cli.main", "bench", *common, *arguments)


_SELF = "assets/self"
_SANITIZER = "tests/gpu/test_sanitizer.py"

STAGES = (
    Stage("machine", 30, ("{python}", "scripts/gpu_host/machine.py")),
    Stage("doctor", 30, ("{python}", "-m", "nemo_gpu_decoding.cli.main", "doctor")),
    Stage("kernels", 60, ("{python}", "scripts/check_kernels.py")),
    Stage(
        "tests",
        190,
        _pytest(
            "tests/gpu", "tests/bench/test_clock.py", f"--ignore={_SANITIZER}", "--durations=15",
            "--junitxml={out}/tests.xml",
        ),
    ),
    Stage(
        "bench decoders",
        190,
        _bench(
            "beams=[4,16,64]", "end_to_end=false", "out={out}/decoders.json"
        ),
    ),
    Stage(
        "bench end to end",
        100,
        _bench(
            "beams=[16]", "probes=false", "out={out}/end_to_end.json"
        ),
    ),
    Stage(
        "bench a model",
        50,
        _bench(
            "beams=[16]", "batches=[1,8,32]", "probes=false", "phrases=50", "out={out}/model.json",
            f"model={_SELF}/models/self_ctc.nemo", f"manifest={_SELF}/speech/test.json",
            f"lm={_SELF}/lm/tok6.arpa", f"word_lm={_SELF}/lm/word3.arpa",
        ),
    ),
    Stage(
        "bench transducers",
        60,
        _bench(
            "strategy=alsd_pp", "tasks=[speech]", "beams=[4]", "batches=[1,8]", "out={out}/alsd_pp.json"
        ),
    ),
    Stage(
        "bench word graphs",
        60,
        _bench(
            "strategy=paged_biglm", "tasks=[speech]", "peers=[small_lm]", "batches=[8,32]", "graph_beams=[12]",
            "out={out}/paged_biglm.json",
        ),
    ),
    Stage("sanitizer", 160, _pytest(_SANITIZER, "--durations=0")),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a stage ended."""

    name: str
    outcome: str
    seconds: float
    status: int | None
    command: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; 0 if all passed."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_host"))
    parser.add_argument("--dry-run", action="store_true", help="list the stages and stop")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--limit", type=int, default=TOTAL_SECONDS, help="seconds for everything")
    parser.add_argument("--started", type=float, default=None, help="when the clock began, as in time()")
    options = parser.parse_args(arguments)
    stages = [stage for stage in STAGES if stage.name in options.only]
    values = {"python": sys.executable, "out": str(options.out)}
    if options.dry_run:
        for stage in stages:
            print(f"{stage.name} (at most {stage.seconds} s): {shown(stage, values)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = (options.started or time.time()) + options.limit
    with (options.out / "log.txt").open("w", encoding="utf-8") as log:
        results = run_all(stages, values, end, log)
    write_summary(options.out / "summary.json", results)
    print_summary(results, options.out / "log.txt")
    return 0 if all(result.outcome == PASSED for result in results) else 1


def run_all(stages: Sequence[Stage], values: Mapping[str, str], end: float, log: TextIO) -> list[Result]:
    """Run stages until all are done; those that would begin after `end` (as in time()) are left out."""
    results = []
    for stage in stages:
        left = end - time.time()
        if left < 5:
            results.append(Result(stage.name, NO_TIME, 0.0, None, shown(stage, values)))
            continue
        print(f"== {stage.name}", flush=True)
        result = run_stage(stage, values, min(stage.seconds, left), log)
        print(f"   {result.outcome} after {result.seconds:.0f} s", flush=True)
        results.append(result)
    return results


def run_stage(stage: Stage, values: Mapping[str, str], limit: float, log: TextIO) -> Result:
    """Run one stage; its output goes to the log. When time is up, all that it started is ended."""
    log.write(f"\n== {stage.name}\n")
    log.flush()
    start = time.monotonic()
    process = subprocess.Popen(
        [word.format(**values) for word in stage.command],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a group of its own, so that it can be ended as a whole
    )
    try:
        status: int | None = process.wait(timeout=limit)
        outcome = PASSED if status == 0 else FAILED
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        status, outcome = None, TOO_LONG
    return Result(stage.name, outcome, round(time.monotonic() - start, 1), status, shown(stage, values))


def shown(stage: Stage, values: Mapping[str, str]) -> str:
    return " ".join(word.format(**values) for word in stage.command)


def write_summary(path: Path, results: Sequence[Result]) -> None:
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def print_summary(results: Sequence[Result], log: Path) -> None:
    """The last lines of what failed, then one line per stage: the end of the output says how it went."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for result in results:
        if result.outcome in (FAILED, TOO_LONG):
            own = text.split(f"\n== {result.name}\n", 1)[1].split("\n== ", 1)[0]
            print(f"\n-- end of {result.name}\n" + "\n".join(own.splitlines()[-TAIL:]))
    print()
    for result in results:
        print(f"{result.name:18} {result.outcome:14} {result.seconds:6.1f} s")


if __name__ == "__main__":
    sys.exit(main())
