"""Everything below this folder is marked `gpu` and `slow`, and skipped with the reason where no kernel can run."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_gpu_decoding.cuda.availability import why_unavailable
from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.cuda_emulator.build import why_no_compiler
from tests.cuda_emulator.fixtures import new_runtime
from tests.gpu import REHEARSAL

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="run each test of tests/gpu with its first case only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("one_case", default=False):
        items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
        items.reverse()
    ours = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.slow)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


# after these the device's context answers everything with the same error
_LOST = re.compile(
    "illegal memory access|unspecified launch failure|misaligned address|illegal instruction|invalid program counter"
    "|hardware stack error|operation not supported on global/shared address space"
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Stop after the test that lost the context: all others would fail for its fault."""
    report = yield
    if call.excinfo is not None and (found := _LOST.search(str(call.excinfo.value))):
        item.session.shouldstop = f"{item.name}: {found[0]}"
    return report


def _why_not() -> str | None:
    return why_no_compiler() if REHEARSAL else why_unavailable(torch.device("cuda"))


@pytest.fixture(autouse=True)
def place(request, monkeypatch):
    """The runtime that these tests are about: the GPU's, which is in use anyway."""
    if not REHEARSAL:
        yield
        return
    monkeypatch.setattr(cuda_engine, "THREADS", 32)
    monkeypatch.setattr(cuda_engine, "FINISH_THREADS", 32)
    for name, size in {"THREADS": 32, "CANDIDATES": 128, "LEAST_GROUPS": 64}.items():
        monkeypatch.setattr(kernel_abi, name, size)
    with use_runtime(new_runtime(request)):
        yield


@pytest.fixture
def device() -> torch.device:
    """Where tensors lie: the first GPU, or the host in a rehearsal."""
    return torch.device("cpu") if REHEARSAL else torch.device("cuda", 0)


@pytest.fixture
def gpu(device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("a rehearsal has no GPU")
    return device
