"""Without any one of its barriers common.cuh is faulty, and the checker says so: none is idle."""

import re

import pytest
import torch

from tests.cuda_emulator.build import PACKAGE
from tests.cuda_emulator.emulator import EmulatorError
from tests.cuda_emulator.kernels import HERE, launch

COMMON = (PACKAGE / "cuda" / "common.cuh").read_text()
CODE = re.sub(r"//.*", lambda comment: " " * len(comment[0]), COMMON)
BARRIERS = [match.span() for match in re.finditer(r"__sync(threads|warp)\(\)", CODE)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"]),
]


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
    ("begin", "end"), BARRIERS, ids=[f"line {CODE.count(chr(10), 0, b) + 1}" for b, _ in BARRIERS]
)
def test_common_cuh_without_one_of_its_barriers_is_caught(emulated_runtime, tmp_path, begin, end):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "common.cuh").write_text(COMMON[:begin] + COMMON[end:])
    mutant = tmp_path / "primitives.cu"
    mutant.write_text((HERE / "primitives.cu").read_text())
    with pytest.raises(EmulatorError, match=r"race on shared memory|nothing was written to"):
        run_primitives(emulated_runtime, mutant)


def test_common_cuh_unchanged_passes(emulated_runtime):
    run_primitives(emulated_runtime, HERE / "primitives.cu")
