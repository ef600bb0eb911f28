import logging

import pytest
import torch

from nemo_gpu_decoding.cuda.launch import use_runtime
from nemo_gpu_decoding.search import backend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class FakeRuntime:
    """Says why kernels do not run, or None."""

    def __init__(self, reason):
        self.reason = reason

    def device_for(self, device):
        return GPU

    def why_not(self, device):
        assert device == GPU
        return self.reason


def nothing(device):
    return None


@pytest.fixture
def said(caplog):
    backend._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="nemo_gpu_decoding"):
        yield lambda: [record.getMessage() for record in caplog.records]
    backend._say_once.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [("auto", GPU, "cuda"), ("cuda", GPU, "cuda"), ("cuda", CPU, "cuda"),
     ("auto", CPU, "cpu"), ("cpu", CPU, "cpu"), ("cpu", GPU, "cpu")],
)  # fmt: skip
def test_where_kernels_run(wanted, device, chosen):
    with use_runtime(FakeRuntime(None)):
        assert backend.choose_backend(wanted, device, nothing) == chosen


@pytest.mark.parametrize(
    ("reason", "obstacle", "why"),
    [
        ("the driver is too old", nothing, "the driver is too old"),
        (None, lambda device: "a beam of 4096 is too large", "a beam of 4096 is too large"),
        (None, backend.no_kernels, "this strategy has no CUDA kernels yet"),
    ],
)
def test_what_stands_against_kernels_is_said_once(said, reason, obstacle, why):
    with use_runtime(FakeRuntime(reason)):
        for _ in range(3):
            assert backend.choose_backend("auto", GPU, obstacle) == "cpu"
        with pytest.raises(ValueError, match=f"backend is 'cuda' for tensors on cpu, .*: {why}"):
            backend.choose_backend("cuda", CPU, obstacle)
    assert said() == [f"backend cpu for tensors on cuda:0, which are copied to the host: {why}"]


def test_the_choice_is_said_once(said):
    with use_runtime(FakeRuntime(None)):
        for _ in range(3):
            backend.choose_backend("auto", GPU, nothing)
            backend.choose_backend("auto", CPU, nothing)
    assert said() == [
        "backend cuda for tensors on cuda:0, as that is where they are",
        "backend cpu for tensors on cpu, as that is where they are",
    ]


def test_cpu_tensors_need_no_runtime(monkeypatch):
    monkeypatch.setattr(backend, "runtime", lambda: pytest.fail("asked for CUDA"))
    assert backend.choose_backend("auto", CPU, nothing) == "cpu"
    assert backend.choose_backend("cpu", GPU, nothing) == "cpu"
