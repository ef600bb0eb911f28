"""Modules, kernels and launches, and the reasons why there are none; `test_bindings.py` has the real cuda-python."""

import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import availability, driver, nvrtc
from nemo_gpu_decoding.cuda.driver import CudaRuntime, DriverError
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.signature import checked_arguments

AXPY = Signature("axpy", {"x": Tensor(torch.float32, ("N",)), "a": Scalar(np.float32), "n": Scalar(np.int32)})
SECOND = torch.device("cuda", 1)
X = torch.zeros(4)


@pytest.fixture
def calls(monkeypatch):
    """The names and arguments of the driver's functions that were called; each returns 512, `refused` ones fail."""

    class Calls(list):
        refused = ()

    calls, bindings = Calls(), MagicMock()

    def call(name, *arguments):
        calls.append((name, *arguments))
        if name in calls.refused or arguments[:1] in calls.refused:
            raise DriverError(f"{name} fails with CUDA_ERROR_INVALID_IMAGE")
        return 512

    bindings().cuFuncGetParamInfo.side_effect = lambda function, i: (i > 0, 0, 16)
    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(driver, "bindings", bindings)
    monkeypatch.setattr(driver, "primary_context", lambda index: index)
    monkeypatch.setattr(availability, "driver_version", lambda: (13, 0))
    return calls


@pytest.fixture
def module(gpus, compiled, calls, monkeypatch):
    """A module on cuda:1 that takes CPU tensors for tensors there."""
    monkeypatch.setattr(
        driver,
        "checked_arguments",
        lambda signature, device, given: checked_arguments(signature, torch.device("cpu"), given),
    )
    return CudaRuntime().load("a/kernel.cu", SECOND)


def launch(module, *, grid=3, block=64, shared_bytes=0, **changes):
    module.launch(AXPY, grid=grid, block=block, shared_bytes=shared_bytes, **{"x": X, "a": 0.1, "n": -2, **changes})


@pytest.mark.parametrize("first", [launch, lambda module: module.find(AXPY)], ids=["launched", "found"])
def test_later_launch_makes_no_call_that_a_capture_forbids(module, calls, first):
    first(module)
    calls.clear()
    launch(module)
    assert [call[0] for call in calls] == ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"block": block}, f"block is {block}, expected a multiple of 32 up to 512") for block in (0, 33, 544)),
        ({"grid": 0}, "grid is 0, expected at least 1"),
        ({"x": X.double()}, "kernel axpy, argument x: has dtype"),
        ({"shared_bytes": 1}, r"axpy: shared_bytes is 1, expected 0 \.\. 0"),  # the kernel's own take all of it
    ],
)
def test_launch_that_does_not_fit_is_refused_before_the_driver_is_asked(module, calls, given, message):
    with pytest.raises(ValueError, match=message):
        launch(module, **given)
    assert "cuLaunchKernel" not in [call[0] for call in calls]


@pytest.mark.parametrize("sizes", [(), (8,), (16, 4)])
def test_signature_that_differs_from_the_compiled_kernel_is_refused(module, sizes):
    info = driver.bindings().cuFuncGetParamInfo
    info.side_effect = lambda function, i: (0, 0, sizes[i]) if i < len(sizes) else (1, None, None)
    with pytest.raises(ValueError, match=r"axpy has parameters of .* but its signature says \[16\]"):
        launch(module)
    info.side_effect = RuntimeError('Function "cuFuncGetParamInfo" not found')  # by a driver before 12.4
    launch(module)


def test_modules_are_kept_per_device_and_macros(gpus, compiled, calls):
    cuda = CudaRuntime()
    first = cuda.load("a/kernel.cu", SECOND, {"WIDTH": 8})
    assert cuda.load("a/kernel.cu", SECOND, {"WIDTH": 8}) is first
    assert cuda.load("a/kernel.cu", SECOND) is not first
    gpus.current = 1
    assert cuda.load("a/kernel.cu", torch.device("cuda"), {"WIDTH": 8}) is first
    assert cuda.load("a/kernel.cu", torch.device("cuda", 0)).device == torch.device("cuda", 0)
    assert compiled == [("a/kernel.cu", (90, False), macros) for macros in ({"WIDTH": 8}, {}, {})]


def test_two_threads_load_a_module_once(gpus, compiled, calls):
    cuda = CudaRuntime()
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: cuda.load("a/kernel.cu", SECOND), range(8)))
    assert len({id(module) for module in loaded}) == 1
    assert len(compiled) == 1


def test_compilation_in_one_thread_does_not_block_others(gpus, calls, monkeypatch):
    started, finished = threading.Event(), threading.Event()

    def compile_slowly(source, arch, defines=None):
        if source == "slow/kernel.cu":
            started.set()
            assert finished.wait(30)
        return b"machine code"

    monkeypatch.setattr(driver, "kernel_code", compile_slowly)
    cuda = CudaRuntime()
    cuda.load("known/kernel.cu", SECOND)

    def others():
        for source in ("known/kernel.cu", "new/kernel.cu"):
            cuda.load(source, SECOND)

    slow = threading.Thread(target=lambda: cuda.load("slow/kernel.cu", SECOND))
    slow.start()
    assert started.wait(30)
    other = threading.Thread(target=others, daemon=True)
    other.start()
    other.join(10)
    is_done = not other.is_alive()
    finished.set()
    slow.join()
    assert is_done


def test_ptx_replaces_machine_code_that_the_driver_refuses(gpus, compiled, calls, caplog):
    calls.refused = ("cuModuleLoadData",)
    with pytest.raises(DriverError, match="cuModuleLoadData fails with CUDA_ERROR_INVALID_IMAGE"):
        CudaRuntime().load("a/kernel.cu", SECOND)
    assert [call[0] for call in calls].count("cuCtxPopCurrent") == 1
    compiled.clear()
    calls.refused = ((b"machine code",),)
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        CudaRuntime().load("a/kernel.cu", SECOND).find(AXPY)
    assert [arch for _, arch, _ in compiled] == [(90, False), (90, True)]
    assert "the driver compiles it from PTX" in caplog.text
    gpus.capability = (13, 0)  # newer than the compiler
    CudaRuntime().load("a/kernel.cu", SECOND)
    assert compiled[2:] == [("a/kernel.cu", (120, True), {})]


def test_kernels_run_on_the_device_that_is_given_or_current(calls, gpus):
    with pytest.raises(RuntimeError, match="no CUDA kernels on cpu: kernels run on CUDA devices"):
        CudaRuntime().load("a/kernel.cu", torch.device("cpu"))
    assert not calls
    cuda = CudaRuntime()
    assert cuda.device_for(SECOND) == SECOND
    gpus.current = 1
    assert cuda.device_for(torch.device("cpu")) == SECOND
    assert cuda.device_for(torch.device("cuda")) == SECOND


# ------- Every reason why kernels can't run is one plain line, asked for once, and never an exception
FIRST = torch.device("cuda", 0)


def failing(error):
    def fail(*_):
        raise error

    return fail


NO_NVRTC = RuntimeError("Failure finding libnvrtc.so\nsearched in many places")


@pytest.mark.parametrize(
    ("device", "changes", "version", "expected"),
    [
        ("cuda:0", {}, (13, 0), None),
        ("cuda", {}, (13, 1), None),
        ("cuda:0", {}, (14, 0), None),
        ("cpu", {}, (13, 0), "kernels run on CUDA devices, not on 'cpu'"),
        ("cuda:2", {}, (13, 0), r"there is no cuda:2, torch finds 2 GPU\(s\)"),
        ("cuda:0", {(torch.version, "cuda"): None}, None,
         f"torch {re.escape(torch.__version__)} is built without CUDA"),
        ("cuda:0", {(torch.cuda, "is_available"): lambda: False}, None, "torch finds no GPU.*"),
        ("cuda:0", {(nvrtc, "version"): failing(NO_NVRTC)}, (13, 0),
         r"NVRTC can't be loaded \(RuntimeError: Failure finding libnvrtc.so\): pip install .*"),
        ("cuda:0", {(torch.cuda, "device_count"): failing(OSError("some\nthing"))}, (13, 0),
         "CUDA does not answer: OSError: some"),
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (7, 0)}, (13, 0),
         r"cuda:0 is too old: compute capability 7\.0, needed is 7\.5 or newer"),
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (13, 0)}, (13, 0), None),  # from PTX
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (7, 5), (nvrtc, "architectures"): lambda: (80,)},
         (13, 0), r"NVRTC 13\.1 can't compile for compute capability 7\.5"),
        ("cuda:0", {}, (12, 8), r"the driver is for CUDA 12\.8 and can't run what NVRTC 13\.1 compiles: take a newer "
         r"driver, or pip install 'nemo-gpu-decoding\[cuda12\]'"),
        ("cuda:0", {(availability, "driver_version"): failing(RuntimeError("the NVIDIA driver fails with 1"))}, (),
         "CUDA does not answer: RuntimeError: the NVIDIA driver fails with 1"),
    ],
)  # fmt: skip
def test_reason_why_kernels_cannot_run_is_one_line(gpus, monkeypatch, device, changes, version, expected):
    """`version` None: no library of the driver is touched."""
    monkeypatch.setattr(availability, "driver_version", lambda: version or pytest.fail("the driver is asked"))
    for (module, name), value in changes.items():
        monkeypatch.setattr(module, name, value)
    shown = CudaRuntime().why_not(torch.device(device))
    assert shown is expected or re.fullmatch(expected, shown)


@pytest.mark.usefixtures("gpus", "calls")
def test_missing_or_old_cuda_python_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert CudaRuntime().why_not(FIRST) == "cuda-python is not installed: pip install 'nemo-gpu-decoding[cuda13]'"
    module = ModuleType("cuda.bindings")
    module.__version__ = "12.6.2.post1"
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expected = "cuda-python 12.6.2.post1 is older than 12.9: pip install 'nemo-gpu-decoding[cuda12]'"
    assert CudaRuntime().why_not(FIRST) == expected


@pytest.mark.usefixtures("gpus", "calls")
def test_why_not_is_cached_per_device(monkeypatch):
    cuda = CudaRuntime()
    assert cuda.why_not(FIRST) is None
    monkeypatch.setattr(availability, "_torch_problem", lambda _: "asked again")
    assert cuda.why_not(FIRST) is None
    assert cuda.why_not(torch.device("cuda", 1)) == "asked again"
