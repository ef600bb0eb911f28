"""Scripts for a session with a GPU: stages, wheels, and a rehearsal on the emulator."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.options import BenchOptions
from benchmarks.published import figures
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.search.transducer.cuda_graphs import LOOP, PLAIN
from tests.assets import ROOT, load_script
from tests.gpu.conftest import pytest_runtest_makereport
from tests.gpu.test_sanitizer import NAMES

FOLDER = ROOT / "scripts" / "gpu_host"
REHEARSAL = os.environ | {"GPU_TESTS": "rehearsal", "PYTHONPATH": str(ROOT)}
pack, stages = load_script(FOLDER / "pack.py"), load_script(FOLDER / "stages.py")


def python(code, seconds=30, name="a stage"):
    return stages.Stage(name, seconds, ("{python}", "-c", code), (stages.TESTS,))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run some stages; the exit status and what summary.json says."""

    def run(*some, **options):
        monkeypatch.setattr(stages, "STAGES", some)
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return stages.main(["--out", str(tmp_path), *more]), json.loads((tmp_path / "summary.json").read_text())

    return run


# ----------------------------------------------------------------------------------------- stages
def test_stage_that_fails_keeps_none_from_running(run, tmp_path, capsys):
    status, summary = run(
        python("print('what went wrong'); raise SystemExit(3)", name="first"),
        python("print(open('{out}/summary.json').read())", name="second"),
    )
    assert status == 1
    assert [(row["name"], row["outcome"], row["status"]) for row in summary] == [
        ("first", "failed", 3), ("second", "passed", 0),
    ]  # fmt: skip
    assert "-- end of first\nwhat went wrong" in capsys.readouterr().out
    assert '"outcome": "failed"' in (tmp_path / "log.txt").read_text()  # the summary is written as stages end


@pytest.mark.slow
def test_stage_that_takes_too_long_is_ended_with_all_that_it_started(run, tmp_path):
    child = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(child)!r}).write_text(str(child.pid));"
        "child.wait()"
    )
    start = time.monotonic()
    status, (row,) = run(python(code, seconds=2))
    assert time.monotonic() - start < 20
    assert (status, row["outcome"], row["status"]) == (1, "took too long", None)
    process = Path(f"/proc/{child.read_text()}/stat")
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - start < 30
        time.sleep(0.1)


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_stage_names_existing_files_options_kernels_and_figures(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word.format(python=sys.executable, out=tmp_path) for word in stage.command]
    if words[0] == "bash":
        words = shlex.split(words[-1].split("&&")[0])
    if "benchmarks" in words:
        assert parse_options(BenchOptions, words[words.index("benchmarks") + 1 :]).device == "cuda"
    if stage.name.startswith("profile "):
        (kernels,) = re.findall(r"::regex:\^\(([\w|]+)\)\$:", words[words.index("--kernel-id") + 1])
        assert set(kernels.split("|")) <= set(NAMES)
        assert words[-1] in load_script(FOLDER / "first_figures.py").FIGURES
    for word in words:
        if word.startswith(("tests/", "scripts/", "--ignore=")):
            assert Path(word.removeprefix("--ignore=")).exists()
    if "pytest" in words:
        assert all(word.startswith("tests/gpu/") for word in words if word.startswith("tests/"))  # others lack `gpu`
        (seconds,) = re.findall(r"faulthandler_timeout=(\d+)", " ".join(words))
        assert int(seconds) < stage.seconds  # a test that hangs prints its stack before its stage ends


@pytest.mark.slow
def test_stages_choose_tests_by_names_that_exist():
    """An unknown name after `-k` chooses nothing, or with `not` keeps everything, and pytest does not complain."""
    collect = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(collect, cwd=ROOT, env=REHEARSAL, capture_output=True, text=True, check=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    for stage in stages.STAGES:
        if "-k" not in stage.command:
            continue
        files = tuple(word for word in stage.command if word.startswith("tests/"))
        ours = [test for test in tests if test.startswith(files)]
        for name in set(re.findall(r"\w+", stage.command[stage.command.index("-k") + 1])) - {"and", "or", "not"}:
            assert any(name in test for test in ours), f"stage {stage.name}: no test is named {name}"


@pytest.mark.parametrize(
    "fault", ["illegal memory access", "invalid program counter", "hardware stack error",
              "operation not supported on global/shared address space"],
)  # fmt: skip
def test_lost_context_stops_the_session(fault):
    """A GPU that made an illegal access answers everything with the same error."""
    item = SimpleNamespace(name="test_a", session=SimpleNamespace(shouldstop=False))
    call = SimpleNamespace(excinfo=SimpleNamespace(value=RuntimeError(f"CUDA error: an {fault} was seen")))
    hook = pytest_runtest_makereport(item, call)
    next(hook)
    with pytest.raises(StopIteration, match="the report"):
        hook.send("the report")
    assert item.session.shouldstop == f"test_a: {fault}"


# -------------------------------------------------------------------------------------- rehearsal
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [
    ["--one-case", "-k", "not test_contract and not test_common_cuh or depend_on_the_batch or forgotten"],
    ["-k", "float16-cuda-max"],
])  # fmt: skip
def test_gpu_tests_pass_on_the_emulator(chosen):
    """Primitives and the contract run on the emulator elsewhere, but for float16 and bfloat16."""
    command = [sys.executable, "-m", "pytest", "tests/gpu", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=REHEARSAL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_benchmarks_and_figures_are_rehearsed_to_their_last_line(tmp_path):
    """Three stages with their own commands, on the emulator; the summary has the published figures beside ours."""
    names = ["first figures", "bench paged_biglm", "published figures"]
    command = [sys.executable, str(FOLDER / "stages.py"), "--out", str(tmp_path), "--patience", "4", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, env=REHEARSAL, capture_output=True, text=True, check=False)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {line["equal_to_cpu"] for line in lines} == {"2 of 2"}
    assert {line["took"] for line in lines} == {None, LOOP, PLAIN}
    rows = json.loads((tmp_path / "paged_biglm.json").read_text())["rows"]
    assert {row["verified"] for row in rows} == {True}
    assert {row["batch"] for row in rows} == {1, 2}
    paged = [row["work"]["ours"] for row in rows if row["params"]["placement"] == "paged"]
    assert "published, beside this run on Emulated GPU:" in log
    table = done.stdout.partition("published by ")[2].splitlines()
    assert sum(line.endswith("not measured  not measured") for line in table) == len(list(figures()))
    assert paged
    assert all({"cache_hit_rate", "bus_bytes"} <= work.keys() for work in paged)
