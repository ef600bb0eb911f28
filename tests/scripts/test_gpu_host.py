"""What brings a session with a GPU on its way: wheels, stages, and the one command."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.clock import Hardware, HostClock
from benchmarks.options import STRATEGIES, BenchOptions
from nemo_gpu_decoding.cli.options import parse_options
from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.search.transducer.cuda_graphs import CHUNKS, LOOP, PLAIN
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.assets import ROOT, load_script
from tests.cuda_emulator.fixtures import emulated_runtime  # noqa: F401 (a fixture)
from tests.gpu.test_sanitizer import NAMES

FOLDER = ROOT / "scripts" / "gpu_host"
pytest_plugins = ("pytester",)
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
def test_a_stage_that_fails_keeps_none_from_running(run, tmp_path, capsys):
    status, summary = run(
        python("print('what went wrong'); raise SystemExit(3)", name="first"),
        python("print('all is well')", name="second"),
    )
    assert status == 1
    assert [(row["name"], row["outcome"], row["status"]) for row in summary] == [
        ("first", "failed", 3),
        ("second", "passed", 0),
    ]
    printed = capsys.readouterr().out
    assert "-- end of first\nwhat went wrong" in printed
    assert "all is well" not in printed
    assert "all is well" in (tmp_path / "log.txt").read_text()


def test_stages_and_parts_can_be_chosen_and_have_their_time(run, monkeypatch):
    assert run(python("pass"), python("pass", name="another"))[0] == 0
    _, summary = run(python("pass", name="one"), python("pass", name="two"), only="two")
    assert [row["name"] for row in summary] == ["two"]
    tests = python("pass", name="one")
    _, summary = run(tests, replace(tests, name="two", parts=(stages.PROFILES,)), part="profiles")
    assert [row["name"] for row in summary] == ["two"]
    status, (row,) = run(python("pass"), limit=3)
    assert (status, row["outcome"]) == (1, "no time left")


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended_with_all_that_it_started(run, tmp_path):
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
    assert not is_running(int(child.read_text()))


def test_patience_multiplies_the_limits(run):
    _, (row,) = run(python("import time; time.sleep(1)", seconds=0.5), patience=20)
    assert row["outcome"] == "passed"


def is_running(pid):
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def of(part):
    return [stage for stage in stages.STAGES if part in stage.parts]


@pytest.mark.parametrize("part", stages.PARTS)
def test_a_call_has_time_for_its_stages_and_leaves_eight_files_at_most(part):
    """And 15 s for the installation of the wheels."""
    assert sum(stage.seconds for stage in of(part)) <= stages.TOTAL_SECONDS - 15
    words = " ".join(word for stage in of(part) for word in stage.command)
    files = set(re.findall(r"\{out\}/\w+", words)) | {"summary.json", "log.txt"}
    assert len(files) <= 8


def test_first_figures_and_memcheck_come_first():
    names = [stage.name for stage in of(stages.TESTS)]
    first = [*names[: names.index("memcheck") + 1]]
    assert first == ["machine", "warm-up", "smoke", "first figures", "doctor", "memcheck"]
    assert "races" in [stage.name for stage in of(stages.PROFILES)]


@pytest.mark.slow
def test_tests_that_fail_run_again_with_kernels_that_are_waited_for(run, tmp_path):
    case = tmp_path / "test_case.py"
    case.write_text("import os\ndef test_a(): assert os.environ.get('CUDA_LAUNCH_BLOCKING') == 'never'\n")
    command = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(case))
    status, (row,) = run(stages.Stage("tests", 60, command, (stages.TESTS,)))
    assert (status, row["outcome"], row["status"]) == (1, "failed", 1)
    log = (tmp_path / "log.txt").read_text()
    assert log.index("None == 'never'") < log.index("once more") < log.index("'1' == 'never'")


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_runtime")
def test_first_figures_are_lines_of_json(monkeypatch, capsys):
    """Every kind of figure on the emulator, with two utterances; one that fails does not stop the others."""
    figures = load_script(FOLDER / "first_figures.py")
    small = {
        name: figures.FIGURES[name]._replace(batch=2, beam=beam)
        for name, beam in (("flexctc_beam-32", 2), ("cuda_wfst-32", 2), ("alsd_pp-plain-bf16", 2))
    }
    small["broken"] = small["cuda_wfst-32"]._replace(strategy="unknown")
    make = figures.make_tasks

    def short(options):
        (task,) = make(options)
        return [replace(task, inputs=task.inputs[:, :6].contiguous(), lengths=task.lengths.clamp(max=6))]

    monkeypatch.setattr(figures, "make_tasks", short)
    monkeypatch.setattr(figures, "FIGURES", small)
    monkeypatch.setattr(figures, "REPEATS", 1)
    monkeypatch.setattr(kernel_abi, "THREADS", 32)
    hardware = Hardware(torch.device("cpu"), "Emulated GPU", HostClock(), on_gpu=True)
    assert figures.run(list(small), hardware) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["figure"] for line in lines] == list(small)
    assert "error" in lines.pop()
    assert all(line["device"] == "Emulated GPU" and line["ms_per_batch"] > 0 for line in lines)
    assert [line["equal_to_cpu"] for line in lines[:2]] == ["2 of 2"] * 2
    assert lines[2]["took"] == "plain"
    assert runtime().launches > 0


def test_every_file_of_gpu_tests_has_a_process_and_every_strategy_a_measurement():
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {*stages.TEST_FILES, "test_sanitizer", "test_clock"}
    words = " ".join(word for stage in of(stages.BENCHMARKS) for word in stage.command)
    assert all(f"strategy={name}" in words for name in STRATEGIES[1:])
    assert "decoders.json" in words  # flexctc_beam, which is the default


def test_the_summary_is_written_as_stages_end(run):
    code = "import json, os, pathlib; print(json.loads(pathlib.Path('{out}/summary.json').read_text())[0]['name'])"
    assert run(python("pass", name="first"), python(code, name="second"))[0] == 0


@pytest.mark.parametrize(
    "fault", ["illegal memory access", "invalid program counter", "hardware stack error",
              "operation not supported on global/shared address space"],
)  # fmt: skip
def test_one_lost_context_fails_one_test(pytester, fault):
    """A GPU that made an illegal access answers everything with the same error."""
    pytester.makeconftest("from tests.gpu.conftest import pytest_runtest_makereport")
    pytester.makepyfile(f"def test_a(): raise RuntimeError('CUDA error: an {fault} was seen')\ndef test_b(): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert f"test_a: {fault}" in result.stdout.str()


@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_stages_name_what_there_is(stage, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word.format(python=sys.executable, out=tmp_path) for word in stage.command]
    if words[0] == "bash":
        words = shlex.split(words[-1].split("&&")[0])
        assert words[:2] == ["ncu", "--clock-control"] or stage.name == "warm-up"
    if "benchmarks" in words:
        options = parse_options(BenchOptions, words[words.index("benchmarks") + 1 :])
        assert options.device == "cuda"
        if "ncu" not in words:
            assert Path(options.out).parent == tmp_path
    for word in words:
        if word.startswith(("tests/", "scripts/", "--ignore=")):
            assert Path(word.removeprefix("--ignore=")).exists()


def test_profiles_name_kernels_and_figures_that_there_are():
    figures = load_script(FOLDER / "first_figures.py").FIGURES
    profiles = [stage for stage in stages.STAGES if stage.name.startswith("profile ")]
    assert profiles
    for stage in profiles:
        words = shlex.split(stage.command[-1].split(" && ")[0])
        (kernels,) = re.findall(r"::regex:\^\(([\w|]+)\)\$:", words[words.index("--kernel-id") + 1])
        assert set(kernels.split("|")) <= set(NAMES)
        assert words[-1] in figures


def test_a_test_that_hangs_on_a_host_prints_its_stack_before_its_stage_ends():
    pytests = [stage for stage in stages.STAGES if "pytest" in stage.command]
    assert len(pytests) > len(stages.TEST_FILES)
    for stage in pytests:
        files = [word for word in stage.command if word.startswith("tests/")]
        assert files
        assert all(file.startswith("tests/gpu/") for file in files)  # others lack the mark `gpu`
        (seconds,) = re.findall(r"faulthandler_timeout=(\d+)", " ".join(stage.command))
        assert int(seconds) < stage.seconds


@pytest.mark.parametrize("own", ["results", None])
def test_results_go_to_the_folder_of_the_host_and_caches_stay_in_build(tmp_path, own):
    """The next call on a machine that is still held finds compiled code, LMs and wheels."""
    shown = tmp_path / "python"
    lines = '"$OUT" "$NEMO_GPU_DECODING_CACHE" "$XDG_CACHE_HOME" "$@"'  # paths may have spaces
    shown.write_text(f"#!/bin/sh\nprintf '%s\\n' {lines}\n", encoding="utf-8")
    shown.chmod(0o755)
    given = {"PATH": os.environ["PATH"], "PYTHON": str(shown), "WHEELS": str(tmp_path)}
    if own:
        given["OUT"] = str(tmp_path / own)
    command = ["bash", str(FOLDER / "run.sh"), "--part", "tests"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    out, code, other, *arguments = done.stdout.splitlines()
    assert out == given.get("OUT", "build/gpu_host")
    assert code == other == str(ROOT / "build" / "gpu_host_cache")
    assert (arguments[1:3], arguments[-2:]) == (["--out", out], ["--part", "tests"])


def test_first_figures_have_each_way_to_launch_in_both_precisions():
    figures = load_script(FOLDER / "first_figures.py").FIGURES.values()
    seen = {(figure.mode, figure.dtype) for figure in figures if figure.strategy == "alsd_pp"}
    assert seen == {(mode, dtype) for mode in (LOOP, CHUNKS, PLAIN) for dtype in (torch.float32, torch.bfloat16)}
    assert {figure.batch for figure in figures if figure.strategy == "flexctc_beam"} == {32, 128}
    assert {figure.batch for figure in figures if figure.strategy == "cuda_wfst"} == {32}


def test_one_command_lists_the_stages(tmp_path):
    done = subprocess.run(
        ["bash", str(FOLDER / "run.sh"), "--dry-run"],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split(" (at most")[0] for line in lines] == [stage.name for stage in stages.STAGES]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_command_installs_the_wheels_it_finds(tmp_path):
    """No wheel here: pip complains, and the stages run all the same."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    done = subprocess.run(
        ["bash", str(FOLDER / "run.sh"), "--only", "machine"],
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "WHEELS": str(wheels)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "can't be installed, going on without" in done.stderr
    (row,) = json.loads((tmp_path / "summary.json").read_text())
    assert row["name"] == "machine"
    assert "Python 3" in (tmp_path / "log.txt").read_text()


# ----------------------------------------------------------------------------------------- wheels
def test_the_list_is_exact_and_complete():
    wanted = pack.read_list(pack.WHEELS)
    names = {pack.name_of(requirement) for requirement in wanted}
    assert {"nemo-toolkit", "kaldialign", "soundfile", "omegaconf"} <= names
    assert not names & {"torch", "numpy", "triton", "pip"}  # a host has its own, and they are large


@pytest.mark.parametrize(
    ("text", "message"), [("numpy>=2\n", "'numpy>=2' is no exact"), ("a_b==1\nA-b==2  # again\n", "names a-b twice")]
)
def test_a_list_that_is_not_exact_is_refused(tmp_path, text, message):
    path = tmp_path / "wheels.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        pack.read_list(path)


def test_pip_is_asked_for_the_hosts_wheels():
    download, build = pack.pip_commands(["a==1", "antlr4-python3-runtime==4.9.3"], Path("w"), False)
    assert "a==1" in download
    assert "antlr4-python3-runtime==4.9.3" not in download
    assert download[download.index("--python-version") + 1] == "3.12"
    assert "manylinux_2_28_x86_64" in download
    assert build[-1] == "antlr4-python3-runtime==4.9.3"
    (dry,) = pack.pip_commands(["a==1"], Path("w"), True)
    assert "--dry-run" in dry


def test_what_was_fetched_is_compared_with_the_list(tmp_path, capsys):
    for name in ("A_b-1.0-py3-none-any.whl", "extra-2.0-py3-none-any.whl"):
        (tmp_path / name).write_bytes(b"x")
    assert pack.report(tmp_path, ["a-b==1.0", "c==3"]) == 1
    assert capsys.readouterr().err.splitlines() == ["missing: c", "not asked for: extra"]
    (tmp_path / "extra-2.0-py3-none-any.whl").unlink()
    assert pack.report(tmp_path, ["a-b==1.0"]) == 0


def test_wheels_must_not_be_too_heavy(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pack, "MOST_BYTES", 1 << 20)
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(bytes((1 << 20) + 1))
    assert pack.report(tmp_path, ["a==1"]) == 1
    assert "more than 1 MiB" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- rehearsal
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [
    ["--one-case", "-k", "not test_contract and not test_common_cuh or test_batch_does_not_matter or forgotten"],
    ["-k", "float16-cuda-max"],
])  # fmt: skip
def test_the_gpu_tests_pass_on_the_emulator(chosen):
    """Each test with its first case: a typing error in a test is found before it costs minutes on a GPU.

    The primitives run on the emulator elsewhere, with all cases, and so does the contract, except for float16 and
    bfloat16.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", *chosen],
        cwd=ROOT,
        env=os.environ | {"GPU_TESTS": "rehearsal", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_benchmarks_and_figures_are_rehearsed_to_their_last_line(tmp_path):
    """Two stages with their own commands, on the emulator."""
    names = ["first figures", "bench paged_biglm"]
    command = [sys.executable, str(FOLDER / "stages.py"), "--out", str(tmp_path), "--patience", "4", "--only", *names]
    rehearsal = os.environ | {"GPU_TESTS": "rehearsal", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=rehearsal, capture_output=True, text=True, check=False)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    figures = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert {line["equal_to_cpu"] for line in figures} == {"2 of 2"}
    assert {line["took"] for line in figures} == {None, LOOP, CHUNKS, PLAIN}
    rows = json.loads((tmp_path / "paged_biglm.json").read_text())["rows"]
    assert {row["verified"] for row in rows} == {True}
    assert {row["batch"] for row in rows} == {1, 2}
