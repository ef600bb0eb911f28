"""Run the stages of a GPU session in sequence, each with a time limit, and print a summary.

    python scripts/gpu_host/stages.py --out FOLDER [--part PART] [--dry-run] [--only NAME ...] [--limit SECONDS]

After a stage that fails or takes too long, the next stages still run. FOLDER then contains summary.json (written after
every stage), log.txt (all output) and the files of benchmarks and profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
TOTAL_SECONDS = 580  # limit of a run, below ten minutes
TAIL = 25  # lines of a failed stage that are shown again at the end

REHEARSAL = os.environ.get("GPU_TESTS") == "rehearsal"  # no GPU: the emulator runs the kernels, on small inputs

PASSED, FAILED, TOO_LONG, NO_TIME = "passed", "failed", "took too long", "no time left"


@dataclass(frozen=True)
class Stage:
    """`command` may hold {python} and {out}."""

    name: str
    seconds: float  # time limit
    command: tuple[str, ...]
    parts: tuple[str, ...]  # of PARTS: the calls that it belongs to


def _pytest(*arguments: str) -> tuple[str, ...]:
    # -vv outweighs the -q of pyproject.toml: the log names each finished test, also if the process is killed later.
    # A test that hangs prints its stack.
    common = ("-vv", "-m", "gpu", "-p", "no:cacheprovider", "-rs", "-o", "faulthandler_timeout=10")
    return ("{python}", "-m", "pytest", *common, *arguments)


def _program(name: str, *arguments: str) -> tuple[str, ...]:
    """The benchmarks or a script, as they are or on the emulator."""
    how = ("-m", "tests.gpu.rehearse") if REHEARSAL else ("-m",) if name == "benchmarks" else ()
    return ("{python}", *how, name, *arguments)


def _bench(*arguments: str) -> tuple[str, ...]:
    common = ("device=cuda", "peers=[nemo]", "repeats=30", "pair_seconds=0.7", "check_utterances=8")
    return _program("benchmarks", *common, *arguments)


def _profile(name: str, kernels: str, *command: str) -> tuple[str, ...]:
    """ncu for the third launch of each of these kernels: its report, and figures in the log.

    A rehearsal runs the profiled command only.
    """
    if REHEARSAL:
        return command
    report = f"{{out}}/{name}"
    profiled = f"ncu --clock-control none --set full --kernel-id '::regex:^({kernels})$:3' -f -o {report}"
    shown = f"ncu --import {report}.ncu-rep --csv --page details"
    return ("bash", "-c", f"{profiled} {shlex.join(command)} && {shown}")


# compiles in parallel what the later stages need, and keeps it: the kernels, and the CPU searches beside them
_WARM_UP = (
    "for strategy in flexctc_beam alsd_pp aes_pp cuda_wfst paged_biglm; do "
    "{python} -m benchmarks.compile_seconds --row $strategy & done; "
    f"{{python}} scripts/check_kernels.py {'--arch 90' if REHEARSAL else '--keep'}; status=$?; wait; exit $status"
)
_SELF = "assets/self"
_SANITIZER = "tests/gpu/test_sanitizer.py"
_FIGURES = _program("scripts/gpu_host/first_figures.py")
_TRANSDUCERS = ("tasks=[hard]", "beams=[4]", "batches=[1,8,32,128]", "end_to_end=false")
_GRAPHS = ("tasks=[hard]", "batches=[8,32]", "graph_beams=[12]")
PARTS = TESTS, BENCHMARKS, PUBLISHED, PROFILES = ("tests", "benchmarks", "published", "profiles")
SHOWN = "published figures"  # the stage whose output the summary repeats
# settings of benchmarks/published.yaml
_SETTING = ("tasks=[peaked]", "phrases=0", "probes=false", "repeats=10", "check_utterances=2")
# file of tests/gpu -> seconds; each runs in its own process, because a fault on the GPU breaks the whole process
TEST_FILES = {
    "test_common_cuh": 15, "test_launch": 30, "test_equals_cpu": 45, "test_transducer_gpu": 60,
    "test_word_graph_gpu": 45, "test_contract": 60, "test_concurrency": 40,
}  # fmt: skip

STAGES = (
    Stage("machine", 20, ("{python}", "scripts/gpu_host/machine.py"), PARTS),
    Stage("warm-up", 60, ("bash", "-c", _WARM_UP), PARTS),
    Stage(
        "smoke",
        45,
        _pytest(
            "-x", "tests/gpu/test_contract.py", "tests/gpu/test_transducer_gpu.py",
            "-k", "test_results_do_not_depend_on_the_batch and not float16 or test_loop_is_the_default_mode",
        ),
        (TESTS,),
    ),
    Stage("first figures", 60, _FIGURES, (TESTS,)),
    Stage("doctor", 10, ("{python}", "-m", "nemo_gpu_decoding.cli.main", "doctor"), (TESTS,)),
    Stage("memcheck", 60, _pytest(_SANITIZER, "-k", "memcheck or not check", "--durations=0"), (TESTS,)),
    *(
        Stage(name, seconds, _pytest(f"tests/gpu/{name}.py", "--durations=5"), (TESTS,))
        for name, seconds in TEST_FILES.items()
    ),
    Stage("test_clock", 15, _pytest("tests/gpu/test_clock.py"), (BENCHMARKS,)),
    Stage(
        "bench decoders",
        135,
        _bench("beams=[4,16,64]", "end_to_end=false", "out={out}/decoders.json"),
        (BENCHMARKS,),
    ),
    Stage("bench alsd_pp", 60, _bench("strategy=alsd_pp", *_TRANSDUCERS, "out={out}/alsd_pp.json"), (BENCHMARKS,)),
    Stage("bench aes_pp", 60, _bench("strategy=aes_pp", *_TRANSDUCERS, "out={out}/aes_pp.json"), (BENCHMARKS,)),
    Stage(
        "bench cuda_wfst",
        60,
        _bench("strategy=cuda_wfst", *_GRAPHS, "peers=[riva]", "end_to_end=false", "out={out}/cuda_wfst.json"),
        (BENCHMARKS,),
    ),
    Stage(
        "bench paged_biglm",
        60,
        _bench("strategy=paged_biglm", *_GRAPHS, "peers=[small_lm]", "out={out}/paged_biglm.json"),
        (BENCHMARKS,),
    ),
    Stage("bench end to end", 80, _bench("beams=[16]", "probes=false", "out={out}/end_to_end.json"), (BENCHMARKS,)),
    *(
        Stage(f"published {name}", seconds, _bench(*_SETTING, *options, f"out={{out}}/{name}.json"), (PUBLISHED,))
        for name, seconds, options in (
            ("flexctc_beam", 100, ("phrases=100", "peers=[greedy_fusion]", "beams=[4,8,16]", "batches=[32]")),
            ("alsd_pp", 140, ("strategy=alsd_pp", "encoder_precision=float16", "beams=[6]",
                              "batches=[1,4,8,16,32,128,256]")),
            ("alsd_pp_beams", 60, ("strategy=alsd_pp", "transducers=[rnnt]", "beams=[1,2,4,8,12]", "batches=[32]")),
            ("alsd_pp_64", 60, ("strategy=alsd_pp", "transducers=[rnnt]", "beams=[4]", "batches=[64]",
                                "min_frames=192", "max_frames=256", "vocab_size=500", "end_to_end=false")),
            ("cuda_wfst", 60, ("strategy=cuda_wfst", "peers=[nemo,riva]", "graph_beams=[17]", "batches=[200]")),
            ("paged_biglm", 60, ("strategy=paged_biglm", "peers=[small_lm,on_cpu]", "graph_beams=[16]",
                                 "batches=[1,8]")),
        )
    ),
    Stage(SHOWN, 15, ("{python}", "-m", "benchmarks.published", "{out}"), (BENCHMARKS, PUBLISHED)),
    Stage(
        "bench a model",
        50,
        _bench(
            "beams=[16]", "batches=[1,8,32]", "probes=false", "phrases=50", "out={out}/model.json",
            f"model={_SELF}/models/self_ctc.nemo", f"manifest={_SELF}/speech/test.json",
            f"lm={_SELF}/lm/tok6.arpa", f"word_lm={_SELF}/lm/word3.arpa",
        ),
        (PROFILES,),
    ),
    Stage("races", 120, _pytest(_SANITIZER, "-k", "racecheck or synccheck", "--durations=0"), (PROFILES,)),
    *(
        Stage(f"profile {name}", 90, _profile(name, kernels, *_FIGURES, figure), (PROFILES,))
        for name, kernels, figure in (
            ("transducers", "join_rows|expand|merge|lstm_layer|lstm_output", "alsd_pp-plain-fp32"),
            ("flexctc_beam", "advance|finish", "flexctc_beam-32"),
            ("cuda_wfst", "advance|best_path", "cuda_wfst-32"),
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Outcome of a stage."""

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
    parser.add_argument("--part", choices=PARTS, help="one of the calls; all of them, as far as time goes, if not")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--limit", type=int, default=TOTAL_SECONDS, help="seconds for everything")
    parser.add_argument("--patience", type=float, default=1, help="multiplies all limits, for a rehearsal")
    parser.add_argument("--started", type=float, default=None, help="when the clock began, as in time()")
    options = parser.parse_args(arguments)
    parts = {options.part} if options.part else set(PARTS)
    stages = [
        replace(stage, seconds=stage.seconds * options.patience)
        for stage in STAGES
        if stage.name in options.only and parts & set(stage.parts)
    ]
    values = {"python": sys.executable, "out": str(options.out)}
    if options.dry_run:
        for stage in stages:
            print(f"{stage.name} (at most {stage.seconds} s): {shown(stage, values)}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    end = (options.started or time.time()) + options.limit * options.patience
    with (options.out / "log.txt").open("w", encoding="utf-8") as log:
        results = run_all(stages, values, end, log)
    print_summary(results, options.out / "log.txt")
    return 0 if all(result.outcome == PASSED for result in results) else 1


def run_all(stages: Sequence[Stage], values: Mapping[str, str], end: float, log: TextIO) -> list[Result]:
    """Run all stages, except for those that would begin after `end` (as in time())."""
    results = []
    for stage in stages:
        left = end - time.time()
        if left < 5:
            results.append(Result(stage.name, NO_TIME, 0.0, None, shown(stage, values)))
        else:
            print(f"== {stage.name}", flush=True)
            result = run_stage(stage, values, min(stage.seconds, left), log)
            print(f"   {result.outcome} after {result.seconds:.0f} s", flush=True)
            results.append(result)
        write_summary(Path(values["out"]) / "summary.json", results)  # kept if this process is killed
    return results


def run_stage(stage: Stage, values: Mapping[str, str], limit: float, log: TextIO) -> Result:
    """Run one stage; its output goes to the log.

    In the time that is left, tests that fail run again with kernels that are waited for, so that an error is raised
    where it occurs.
    """
    log.write(f"\n== {stage.name}\n")
    log.flush()
    start = time.monotonic()
    command = [word.format(**values) for word in stage.command]
    status = _status(command, limit, log)
    left = limit - (time.monotonic() - start)
    if status and "pytest" in command and left > 5:
        log.write("\n-- once more, with CUDA_LAUNCH_BLOCKING=1\n")
        log.flush()
        _status([*command, "-x"], left, log, CUDA_LAUNCH_BLOCKING="1")
    outcome = TOO_LONG if status is None else FAILED if status else PASSED
    return Result(stage.name, outcome, round(time.monotonic() - start, 1), status, shown(stage, values))


def _status(command: Sequence[str], limit: float, log: TextIO, **variables: str) -> int | None:
    """The exit status of a command. After the time limit, all its processes are killed, and it is None."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | variables,
        start_new_session=True,  # a process group, so that all its processes can be killed
    )
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def shown(stage: Stage, values: Mapping[str, str]) -> str:
    return " ".join(word.format(**values) for word in stage.command)


def write_summary(path: Path, results: Sequence[Result]) -> None:
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


def print_summary(results: Sequence[Result], log: Path) -> None:
    """Print the last lines of failed stages, the published figures beside ours, and at the end one line per stage."""
    text = log.read_text(encoding="utf-8", errors="replace")
    for result in results:
        has_failed = result.outcome in (FAILED, TOO_LONG)
        if has_failed or (result.name == SHOWN and result.outcome == PASSED):
            own = text.split(f"\n== {result.name}\n", 1)[1].split("\n== ", 1)[0]
            lines = own.splitlines()
            print(f"\n-- end of {result.name}" if has_failed else "")
            print("\n".join(lines[-TAIL:] if has_failed else lines))
    print()
    for result in results:
        print(f"{result.name:18} {result.outcome:14} {result.seconds:6.1f} s")


if __name__ == "__main__":
    sys.exit(main())
