"""Every reason why kernels can't run is one plain line, asked for once, and never an exception."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from nemo_gpu_decoding.cuda import availability, nvrtc
from nemo_gpu_decoding.cuda.driver import CudaRuntime
from tests.cuda.fakes import FakeDriver, Status

FIRST = torch.device("cuda", 0)


@pytest.fixture
def fake():
    return FakeDriver()


def reason(fake, device=FIRST):
    return CudaRuntime(fake).why_not(device)


@pytest.mark.usefixtures("gpus")
def test_nothing_is_wrong(fake):
    assert reason(fake) is None
    assert reason(fake, torch.device("cuda")) is None


def test_tensors_on_the_cpu(fake):
    assert reason(fake, torch.device("cpu")) == "kernels run on CUDA devices, not on 'cpu'"


def test_a_torch_without_cuda(gpus, fake, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert reason(fake) == f"torch {torch.__version__} is built without CUDA"


def test_without_a_gpu_no_library_of_the_driver_is_touched(gpus, fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reason(fake).startswith("torch finds no GPU")
    assert not fake.calls


@pytest.mark.usefixtures("gpus")
def test_a_device_that_is_not_there(fake):
    assert reason(fake, torch.device("cuda", 2)) == "there is no cuda:2, torch finds 2 GPU(s)"


def test_old_gpus(gpus, fake):
    gpus.capability = (7, 0)
    assert reason(fake) == "cuda:0 is too old: compute capability 7.0, needed is 7.5 or newer"


def test_a_gpu_that_the_compiler_does_not_know(gpus, fake):
    gpus.capability = (13, 0)
    assert reason(fake) == "NVRTC 13.1 can't compile for compute capability 13.0"


@pytest.mark.usefixtures("gpus")
def test_no_cuda_python(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    expected = "cuda-python is not installed: pip install 'nemo-gpu-decoding[cuda13]'"
    assert reason(fake) == expected


@pytest.mark.usefixtures("gpus")
def test_an_old_cuda_python(fake, monkeypatch):
    module = ModuleType("cuda.bindings")
    module.__version__ = "12.6.2.post1"
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expected = "cuda-python 12.6.2.post1 is older than 12.9: pip install 'nemo-gpu-decoding[cuda12]'"
    assert reason(fake) == expected


@pytest.mark.usefixtures("gpus")
def test_no_compiler_library(fake, monkeypatch):
    def missing():
        raise RuntimeError("Failure finding libnvrtc.so\nsearched in many places")

    monkeypatch.setattr(nvrtc, "version", missing)
    expected = "NVRTC can't be loaded (RuntimeError: Failure finding libnvrtc.so): pip install"
    assert reason(fake).startswith(expected)


@pytest.mark.usefixtures("gpus")
def test_a_driver_of_an_older_generation(fake):
    fake.version = 12080
    assert reason(fake) == (
        "the driver is for CUDA 12.8 and can't run what NVRTC 13.1 compiles: take a newer driver, or "
        "pip install 'nemo-gpu-decoding[cuda12]'"
    )


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("version", [13000, 13010, 14000])
def test_drivers_of_the_same_or_a_later_generation(version, fake):
    fake.version = version
    assert reason(fake) is None


@pytest.mark.usefixtures("gpus")
def test_a_driver_that_fails(fake):
    fake.failing["cuDriverGetVersion"] = Status.CUDA_ERROR_INVALID_VALUE
    assert reason(fake).startswith("the NVIDIA driver fails with")


@pytest.mark.usefixtures("gpus")
def test_the_unforeseen_is_a_reason_too(fake, monkeypatch):
    def fail():
        raise OSError("something\nelse")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert reason(fake) == "CUDA does not answer: OSError: something"


@pytest.mark.usefixtures("gpus")
def test_the_answer_is_found_once_per_device(fake, monkeypatch):
    cuda = CudaRuntime(fake)
    assert cuda.why_not(FIRST) is None
    monkeypatch.setattr(availability, "_torch_problem", lambda _: "asked again")
    assert cuda.why_not(FIRST) is None
    assert cuda.why_not(torch.device("cuda", 1)) == "asked again"
