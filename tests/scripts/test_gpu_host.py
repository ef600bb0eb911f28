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

from benchmarks.options import STRATEGIES, BenchOptions
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.search.transducer.cuda_graphs import CHUNKS, LOOP, PLAIN
from tests.assets import ROOT, load_script
from tests.gpu.conftest import pytest_runtest_makereport
from tests.gpu.test_sanitizer import NAMES

FOLDER = ROOT / "scripts" / "gpu_host"
pack, stages = load_script(FOLDER / "pack.py"), load_script(FOLDER / "stages.py")


def python(code, seconds=30, name="a stage"):
    return stages.Stage(name, seconds, ("{python}", "-c", code), (stages.TESTS,))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run some stages; the exit status and what summary.json says."""

    def run(*some, **options):
        monkeypatch.setattr(stages, "STAGES", some)
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        status = stages.main(["--out", str(tmp_path), *more])
        return status, json.loads((tmp_path / "summary.json").read_text())

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


@pytest.mark.parametrize(
    ("options", "names", "outcome"),
    [
        ({}, ["one", "two"], "passed"),
        ({"only": "two"}, ["two"], "passed"),
        ({"limit": 3}, ["one", "two"], "no time left"),
    ],
)
def test_stages_can_be_chosen_and_have_their_time(run, options, names, outcome):
    _, summary = run(python("pass", name="one"), python("pass", name="two"), **options)
    assert [(row["name"], row["outcome"]) for row in summary] == [(name, outcome) for name in names]


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


def of(part):
    return [stage for stage in stages.STAGES if part in stage.parts]


@pytest.mark.parametrize("part", stages.PARTS)
def test_call_has_time_for_its_stages_and_leaves_eight_files_at_most(part):
    """And 15 s for the installation of the wheels."""
    assert sum(stage.seconds for stage in of(part)) <= stages.TOTAL_SECONDS - 15
    words = " ".join(word for stage in of(part) for word in stage.command)
    assert len(set(re.findall(r"\{out\}/\w+", words)) | {"summary.json", "log.txt"}) <= 8


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


def test_every_file_of_gpu_tests_has_a_process_and_every_strategy_a_measurement():
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {*stages.TEST_FILES, "test_sanitizer", "test_clock"}
    words = " ".join(word for stage in of(stages.BENCHMARKS) for word in stage.command)
    assert all(f"strategy={name}" in words for name in STRATEGIES[1:])
    assert "decoders.json" in words  # flexctc_beam, which is the default


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


def test_one_command_lists_the_stages(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = ["bash", str(FOLDER / "run.sh"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    names = [line.split(" (at most")[0] for line in done.stdout.splitlines()]
    assert names == [stage.name for stage in stages.STAGES]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_command_goes_on_without_a_wheel_that_is_broken(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "WHEELS": str(wheels)}
    command = ["bash", str(FOLDER / "run.sh"), "--only", "machine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "can't be installed, going on without" in done.stderr
    (row,) = json.loads((tmp_path / "summary.json").read_text())
    assert row["name"] == "machine"


# ----------------------------------------------------------------------------------------- wheels
def test_list_of_wheels_is_exact_and_lacks_what_a_host_has(tmp_path):
    names = {pack.name_of(requirement) for requirement in pack.read_list(pack.WHEELS)}
    assert {"nemo-toolkit", "kaldialign", "soundfile", "omegaconf"} <= names
    assert not names & {"torch", "numpy", "triton", "pip"}
    path = tmp_path / "wheels.txt"
    for text, message in (("numpy>=2\n", "'numpy>=2' is no exact"), ("a_b==1\nA-b==2  # again\n", "names a-b twice")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            pack.read_list(path)


def test_fetched_wheels_are_compared_with_the_list(tmp_path, capsys, monkeypatch):
    for name in ("A_b-1.0-py3-none-any.whl", "extra-2.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(b"x")
    assert pack.report(tmp_path, ["a-b==1.0", "c==3"]) == 1
    assert capsys.readouterr().err.splitlines() == ["missing: c", "not asked for: extra"]
    (tmp_path / "extra-2.0-py3-none-any.whl").unlink()
    assert pack.report(tmp_path, ["a-b==1.0"]) == 0
    monkeypatch.setattr(pack, "MOST_BYTES", 0)
    assert pack.report(tmp_path, ["a-b==1.0"]) == 1


# -------------------------------------------------------------------------------------- rehearsal
REHEARSAL = os.environ | {"GPU_TESTS": "rehearsal", "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [
    ["--one-case", "-k", "not test_contract and not test_common_cuh or depend_on_the_batch or forgotten"],
    ["-k", "float16-cuda-max"],
])  # fmt: skip
def test_gpu_tests_pass_on_the_emulator(chosen):
    """Each test with its first case: a typing error in a test is found before it costs minutes on a GPU.

    The primitives run on the emulator elsewhere, with all cases, and so does the contract, except for float16 and
    bfloat16.
    """
    command = [sys.executable, "-m", "pytest", "tests/gpu", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=REHEARSAL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_benchmarks_and_figures_are_rehearsed_to_their_last_line(tmp_path):
    """Two stages with their own commands, on the emulator."""
    names = ["first figures", "bench paged_biglm"]
    command = [sys.executable, str(FOLDER / "stages.py"), "--out", str(tmp_path), "--patience", "4", "--only", *names]
    done = subprocess.run(command, cwd=ROOT, env=REHEARSAL, capture_output=True, text=True, check=False)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    figures = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {line["equal_to_cpu"] for line in figures} == {"2 of 2"}
    assert {line["took"] for line in figures} == {None, LOOP, CHUNKS, PLAIN}
    rows = json.loads((tmp_path / "paged_biglm.json").read_text())["rows"]
    assert {row["verified"] for row in rows} == {True}
    assert {row["batch"] for row in rows} == {1, 2}
