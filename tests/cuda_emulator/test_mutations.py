"""Without any one of its barriers a kernel is faulty, and the checker says so: none is idle."""

import re
from pathlib import Path

import pytest
import torch

from tests.cuda_emulator.build import PACKAGE
from tests.cuda_emulator.emulator import EmulatorError
from tests.cuda_emulator.kernels import HERE, launch

BARRIER = re.compile(r"__sync(threads|warp)\(\);")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"]),
]


def barriers_of(path: Path) -> list[int]:
    """Where a source file has its barriers, as offsets."""
    text = re.sub(r"//.*", lambda comment: " " * len(comment[0]), path.read_text())
    return [match.start() for match in BARRIER.finditer(text)]


def without_barrier(path: Path, offset: int) -> str:
    """The text of a file with one barrier replaced by nothing, lines unchanged."""
    text = path.read_text()
    end = text.index(";", offset)
    return text[:offset] + " " * (end - offset) + text[end:]


def line_of(path: Path, offset: int) -> int:
    return path.read_text().count("\n", 0, offset) + 1


def run_scan(runtime, source):
    a = torch.ones(256, dtype=torch.int32)
    launch(runtime, source, "block_scan", block=256, shared_bytes=32, a=a, out=a.clone(), n=256)


def run_top_k(runtime, source):
    x = torch.randn(1, 600).mul(10).round().div(10)
    values, indices = torch.zeros(1, 100), torch.zeros(1, 100, dtype=torch.int32)
    launch(runtime, source, "top_k", block=256, x=x, n=600, k=100, values=values, indices=indices)


def run_graph_loop(runtime, source):
    ints = torch.zeros(128, dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int32)
    arguments = {"limits": ints + 1, "counts": ints, "active": one, "steps": one.clone()}
    launch(runtime, source, "step", block=128, **arguments)


KERNELS = {"block_scan.cu": run_scan, "top_k.cu": run_top_k, "graph_loop.cu": run_graph_loop}


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        pytest.param(name, offset, id=f"{name}:{line_of(HERE / name, offset)}")
        for name in KERNELS
        for offset in barriers_of(HERE / name)
    ],
)
def test_a_kernel_without_one_of_its_barriers_is_caught(emulated_runtime, tmp_path, name, offset):
    mutant = tmp_path / name
    mutant.write_text(without_barrier(HERE / name, offset))
    with pytest.raises(EmulatorError, match=r"race on shared memory|nothing was written to"):
        KERNELS[name](emulated_runtime, mutant)


COMMON = PACKAGE / "cuda" / "common.cuh"


def run_primitives(runtime, source):
    """What the primitives of common.cuh can be used for with barriers of their own only."""
    x = torch.arange(128, dtype=torch.int32)
    launch(runtime, source, "reductions", block=128, x=x, out=x.new_zeros(512))
    keys = torch.randperm(600)
    launch(runtime, source, "sort_and_order", block=128, keys=keys, order=torch.zeros(600, dtype=torch.int32))
    copied = torch.zeros(64, dtype=torch.int64)
    launch(runtime, source, "team_copies", block=64, keys=keys[:64].clone(), out=copied)
    assert torch.equal(copied.view(8, 8), keys[:64].view(8, 8).roll(-1, 1))


@pytest.mark.parametrize(
    "offset", [pytest.param(offset, id=f"line {line_of(COMMON, offset)}") for offset in barriers_of(COMMON)]
)
def test_common_cuh_without_one_of_its_barriers_is_caught(emulated_runtime, tmp_path, offset):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "common.cuh").write_text(without_barrier(COMMON, offset))
    mutant = tmp_path / "primitives.cu"
    mutant.write_text((HERE / "primitives.cu").read_text())
    with pytest.raises(EmulatorError, match=r"race on shared memory|nothing was written to"):
        run_primitives(emulated_runtime, mutant)


def test_the_unchanged_kernels_pass(emulated_runtime):
    for name, run in KERNELS.items():
        run(emulated_runtime, HERE / name)
    run_primitives(emulated_runtime, HERE / "primitives.cu")
