"""Launches as the driver sees them, against a driver that writes down what it is asked."""

import logging
import re
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import availability, driver, nvrtc
from nemo_gpu_decoding.cuda.driver import CudaRuntime, DriverError
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.signature import checked_arguments
from tests.cuda.fakes import FakeDriver, Status

AXPY = Signature("axpy", {"x": Tensor(torch.float32, ("N",)), "a": Scalar(np.float32), "n": Scalar(np.int32)})
SECOND = torch.device("cuda", 1)
X = torch.zeros(4)


@pytest.fixture
def fake():
    return FakeDriver()


@pytest.fixture
def module(gpus, compiled, fake, monkeypatch):
    """A module on cuda:1 that takes CPU tensors for tensors there."""
    monkeypatch.setattr(
        driver,
        "checked_arguments",
        lambda signature, device, given: checked_arguments(signature, torch.device("cpu"), given),
    )
    return CudaRuntime(fake).load("a/kernel.cu", SECOND)


def launch(module, *, grid=3, block=64, shared_bytes=0, signature=AXPY, **changes):
    given = {"x": X, "a": 0.1, "n": -2, **changes}
    module.launch(signature, grid=grid, block=block, shared_bytes=shared_bytes, **given)


def test_launch_has_sizes_context_arguments_and_the_current_stream(module, fake, gpus):
    launch(module, shared_bytes=1000)
    gpus.streams[1] = 77
    launch(module)
    seen, other = fake.launches
    assert (seen.grid, seen.block, seen.shared) == ((3, 1, 1), (64, 1, 1), 1000)
    assert (seen.stream, other.stream) == (0x5EED, 77)
    assert seen.context == "context of device 1"
    assert seen.arguments == [struct.pack("<Qfi", X.data_ptr(), 0.1, -2)]
    assert seen.extra == 0


@pytest.mark.parametrize("first", [launch, lambda module: module.find(AXPY)], ids=["launched", "found"])
def test_later_launch_makes_no_call_that_a_capture_forbids(module, fake, first):
    first(module)
    fake.calls.clear()
    launch(module)
    assert [call[0] for call in fake.calls] == ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]


def test_kernel_may_use_all_shared_memory_less_its_static_part(module, fake):
    launch(module, shared_bytes=232448 - 48)
    opt_in = fake.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [call[1:] for call in fake.named("cuFuncSetAttribute")] == [(opt_in, 232448 - 48)]


@pytest.mark.parametrize(
    ("given", "sizes", "message"),
    [
        *(
            ({"block": block}, (16,), f"block is {block}, expected a multiple of 32 up to 512")
            for block in (0, 33, 544)
        ),
        ({"grid": 0}, (16,), "grid is 0, expected at least 1"),
        ({"x": X.double()}, (16,), "kernel axpy, argument x: has dtype"),
        ({"shared_bytes": 232401}, (16,), r"axpy: shared_bytes is 232401, expected 0 \.\. 232400"),
        *(
            ({}, sizes, r"axpy has parameters of .* but its signature says \[16\]")
            for sizes in ((), (8,), (24,), (16, 4))
        ),
    ],
)
def test_launch_that_does_not_fit_is_refused_before_the_driver_is_asked(module, fake, given, sizes, message):
    fake.parameter_sizes = sizes
    with pytest.raises(ValueError, match=message):
        launch(module, **given)
    assert not fake.launches


def test_failing_launch_names_kernel_sizes_and_status_and_restores_the_context(module, fake):
    fake.failing["cuLaunchKernel"] = Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DriverError) as caught:
        launch(module, shared_bytes=64)
    assert str(caught.value) == (
        "kernel axpy can't start on cuda:1 with 3 blocks of 64 threads and 64 bytes of shared memory: "
        "cuLaunchKernel fails with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (what it means)"
    )
    with pytest.raises(DriverError, match=r"kernel gone is not in a/kernel\.cu: .*NOT_FOUND"):
        launch(module, signature=Signature("gone", AXPY.parameters))
    assert (fake.contexts, fake.capture_mode) == ([], "global")


def test_driver_without_parameter_sizes_still_launches(module, fake):
    def missing(*_):
        raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    fake.do_cuFuncGetParamInfo = missing
    launch(module)
    assert len(fake.launches) == 1


def test_modules_are_kept_per_device_and_macros(gpus, compiled, fake):
    cuda = CudaRuntime(fake)
    first = cuda.load("a/kernel.cu", SECOND, {"WIDTH": 8})
    assert cuda.load("a/kernel.cu", SECOND, {"WIDTH": 8}) is first
    assert cuda.load("a/kernel.cu", SECOND) is not first
    gpus.current = 1
    assert cuda.load("a/kernel.cu", torch.device("cuda"), {"WIDTH": 8}) is first
    assert cuda.load("a/kernel.cu", torch.device("cuda", 0)).device == torch.device("cuda", 0)
    assert compiled == [("a/kernel.cu", (90, False), macros) for macros in ({"WIDTH": 8}, {}, {})]


def test_two_threads_load_a_module_once(gpus, compiled, fake):
    cuda = CudaRuntime(fake)
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: cuda.load("a/kernel.cu", SECOND), range(8)))
    assert len({id(module) for module in loaded}) == 1
    assert len(compiled) == 1


def test_compilation_in_one_thread_does_not_block_others(gpus, fake, monkeypatch):
    started, finished = threading.Event(), threading.Event()

    def compile_slowly(source, arch, defines=None):
        if source == "slow/kernel.cu":
            started.set()
            assert finished.wait(30)
        return b"machine code"

    monkeypatch.setattr(driver, "kernel_code", compile_slowly)
    cuda = CudaRuntime(fake)
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


def test_ptx_replaces_machine_code_that_the_driver_refuses(gpus, compiled, fake, caplog):
    def load(image):
        is_ptx = image == b"PTX"
        return (Status.CUDA_SUCCESS, "module") if is_ptx else (Status.CUDA_ERROR_INVALID_IMAGE, None)

    fake.failing["cuModuleLoadData"] = Status.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(DriverError, match="cuModuleLoadData fails with CUDA_ERROR_INVALID_IMAGE"):
        CudaRuntime(fake).load("a/kernel.cu", SECOND)
    assert fake.contexts == []
    compiled.clear()
    fake.failing.clear()
    fake.do_cuModuleLoadData = load
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        CudaRuntime(fake).load("a/kernel.cu", SECOND).find(AXPY)
    assert [arch for _, arch, _ in compiled] == [(90, False), (90, True)]
    assert "the driver compiles it from PTX" in caplog.text
    gpus.capability = (13, 0)  # newer than the compiler
    CudaRuntime(fake).load("a/kernel.cu", SECOND)
    assert compiled[2:] == [("a/kernel.cu", (120, True), {})]


def test_devices_and_their_shared_memory(fake, gpus):
    with pytest.raises(RuntimeError, match="no CUDA kernels on cpu: kernels run on CUDA devices"):
        CudaRuntime(fake).load("a/kernel.cu", torch.device("cpu"))
    assert not fake.calls
    cuda = CudaRuntime(fake)
    assert cuda.shared_bytes(SECOND) == 232448
    assert cuda.device_for(SECOND) == SECOND
    gpus.current = 1
    assert cuda.device_for(torch.device("cpu")) == SECOND
    assert cuda.device_for(torch.device("cuda")) == SECOND


# ------- Every reason why kernels can't run is one plain line, asked for once, and never an exception
FIRST = torch.device("cuda", 0)


def reason(fake, device=FIRST):
    return CudaRuntime(fake).why_not(device)


def failing(error):
    def fail(*_):
        raise error

    return fail


NO_NVRTC = RuntimeError("Failure finding libnvrtc.so\nsearched in many places")


@pytest.mark.parametrize(
    ("device", "changes", "version", "expected"),
    [
        ("cuda:0", {}, 13000, None),
        ("cuda", {}, 13010, None),
        ("cuda:0", {}, 14000, None),
        ("cpu", {}, 13000, "kernels run on CUDA devices, not on 'cpu'"),
        ("cuda:2", {}, 13000, r"there is no cuda:2, torch finds 2 GPU\(s\)"),
        ("cuda:0", {(torch.version, "cuda"): None}, None,
         f"torch {re.escape(torch.__version__)} is built without CUDA"),
        ("cuda:0", {(torch.cuda, "is_available"): lambda: False}, None, "torch finds no GPU.*"),
        ("cuda:0", {(nvrtc, "version"): failing(NO_NVRTC)}, 13000,
         r"NVRTC can't be loaded \(RuntimeError: Failure finding libnvrtc.so\): pip install .*"),
        ("cuda:0", {(torch.cuda, "device_count"): failing(OSError("some\nthing"))}, 13000,
         "CUDA does not answer: OSError: some"),
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (7, 0)}, 13000,
         r"cuda:0 is too old: compute capability 7\.0, needed is 7\.5 or newer"),
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (13, 0)}, 13000, None),  # from PTX
        ("cuda:0", {(torch.cuda, "get_device_capability"): lambda _: (7, 5), (nvrtc, "architectures"): lambda: (80,)},
         13000, r"NVRTC 13\.1 can't compile for compute capability 7\.5"),
        ("cuda:0", {}, 12080, r"the driver is for CUDA 12\.8 and can't run what NVRTC 13\.1 compiles: take a newer "
         r"driver, or pip install 'nemo-gpu-decoding\[cuda12\]'"),
        ("cuda:0", {}, Status.CUDA_ERROR_INVALID_VALUE, "the NVIDIA driver fails with .*"),
    ],
)  # fmt: skip
def test_reason_why_kernels_cannot_run_is_one_line(gpus, fake, monkeypatch, device, changes, version, expected):
    """`version` None: no library of the driver is touched."""
    for (module, name), value in changes.items():
        monkeypatch.setattr(module, name, value)
    if isinstance(version, Status):
        fake.failing["cuDriverGetVersion"] = version
    else:
        fake.version = version
    shown = reason(fake, torch.device(device))
    assert shown is expected or re.fullmatch(expected, shown)
    assert version is not None or not fake.calls


@pytest.mark.usefixtures("gpus")
def test_missing_or_old_cuda_python_is_named(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert reason(fake) == "cuda-python is not installed: pip install 'nemo-gpu-decoding[cuda13]'"
    module = ModuleType("cuda.bindings")
    module.__version__ = "12.6.2.post1"
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expected = "cuda-python 12.6.2.post1 is older than 12.9: pip install 'nemo-gpu-decoding[cuda12]'"
    assert reason(fake) == expected


@pytest.mark.usefixtures("gpus")
def test_reason_is_found_once_per_device(fake, monkeypatch):
    cuda = CudaRuntime(fake)
    assert cuda.why_not(FIRST) is None
    monkeypatch.setattr(availability, "_torch_problem", lambda _: "asked again")
    assert cuda.why_not(FIRST) is None
    assert cuda.why_not(torch.device("cuda", 1)) == "asked again"
