"""compute-sanitizer finds no stray access, no race and no barrier that only some threads reach."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.assets import ROOT
from tests.gpu import sanitized

SECONDS = 80  # for one check
FOUND = 99  # exit status if something is found
# the tool's own words for GPUs and containers in which it can't work
CAN_NOT_WORK = ("Device not supported", "Unable to find the driver", "requires elevated privileges")
# Ours; torch's kernels are others' affair, and would take most of the time.
NAMES = (
    "advance", "finish", "compact", "best_path", "expand", "merge", "schedule", "move_rows",
    "join_rows", "lstm_layer", "lstm_output", "stateless",
)  # fmt: skip
KERNELS = tuple(word for name in NAMES for word in ("--kernel-name", f"kns={name}"))
CHECKS = {
    # Calls of the driver may fail, and some are made to find out whether they do. A gap behind every
    # allocation, so that a step beyond its end does not meet the next one.
    "memcheck": ("--report-api-errors", "no", "--padding", "256"),
    "racecheck": (),
    "synccheck": (),
}

pytestmark = pytest.mark.slow


def find_tool() -> str | None:
    """On the PATH, in the CUDA toolkit, or from `pip install nvidia-cuda-sanitizer-api`."""
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda")]
    spec = find_spec("nvidia")
    packages = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    folders += [str(folder) for package in packages for folder in package.iterdir() if folder.is_dir()]
    places = [os.environ.get("PATH", "")]
    places += [f"{folder}/{part}" for folder in folders for part in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def run_tool(check: str, *arguments: str) -> tuple[int, str]:
    """Status and output of a check on tests/gpu/sanitized.py; skips where there is no tool."""
    tool = find_tool()
    if tool is None:
        pytest.skip("no compute-sanitizer here: pip install nvidia-cuda-sanitizer-api, or the CUDA toolkit")
    options = ("--tool", check, *CHECKS[check], *KERNELS, "--error-exitcode", str(FOUND))
    done = subprocess.run(
        [tool, *options, sys.executable, "-m", "tests.gpu.sanitized", *arguments],
        cwd=ROOT,
        # every tensor gets an allocation of its own
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    for problem in CAN_NOT_WORK:
        if problem in done.stdout:
            pytest.skip(f"compute-sanitizer can't work here: {problem}")
    return done.returncode, done.stdout


def test_every_kernel_is_checked():
    sources = [path.read_text() for path in (ROOT / "nemo_gpu_decoding").rglob("*.cu*")]
    names = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", "\n".join(sources))
    assert set(names) == set(NAMES)


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_are_clean(gpu, check):
    expected = sanitized.everything(gpu)
    status, said = run_tool(check, str(gpu))
    assert status == 0, said[-5000:]
    assert expected in said.split(), said[-5000:]


@pytest.mark.parametrize(
    ("check", "kernel", "report"),
    [("memcheck", "advance_too_far", "Invalid __global__ write"), ("racecheck", "advance_without_barrier", "hazard")],
)
def test_sanitizer_finds_faults(gpu, check, kernel, report):
    """A tool that looks at nothing finds nothing either."""
    status, said = run_tool(check, str(gpu), kernel)
    assert status == FOUND, said[-5000:]
    assert report in said


def test_cases_of_the_sanitizer_run_every_kernel(device):
    assert sanitized.everything(device) == sanitized.everything(device)


def test_digest_differs_if_a_result_differs(device, monkeypatch):
    expected = sanitized.everything(device)
    monkeypatch.setattr(sanitized, "LENGTHS", [9, 0, 4])
    assert sanitized.everything(device) != expected
