"""Launches as the driver sees them, against a driver that writes down what it is asked."""

import logging
import re
import struct
import sys
import threading
from collections import Counter
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


def test_a_launch_has_the_right_sizes_stream_context_and_arguments(module, fake):
    launch(module, shared_bytes=1000)
    (seen,) = fake.launches
    assert (seen.grid, seen.block, seen.shared) == ((3, 1, 1), (64, 1, 1), 1000)
    assert seen.stream == 0x5EED
    assert seen.context == "context of device 1"
    assert seen.arguments == [struct.pack("<Qfi", X.data_ptr(), 0.1, -2)]
    assert seen.extra == 0


def test_the_stream_is_the_one_current_at_the_launch(module, fake, gpus):
    launch(module)
    gpus.streams[1] = 77
    launch(module)
    assert [seen.stream for seen in fake.launches] == [0x5EED, 77]


def test_contexts_and_capture_modes_are_put_back(module, fake):
    launch(module)
    fake.failing["cuLaunchKernel"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError):
        launch(module)
    assert fake.contexts == []
    assert fake.capture_mode == "global"


@pytest.mark.parametrize("first", [launch, lambda module: module.find(AXPY)], ids=["launched", "found"])
def test_a_later_launch_makes_no_call_that_a_capture_forbids(module, fake, first):
    first(module)
    fake.calls.clear()
    launch(module)
    assert [call[0] for call in fake.calls] == ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]


MANY = Signature(
    "axpy", {f"x{i}": Tensor(torch.float32, ("N",)) for i in range(15)} | {f"n{i}": Scalar(np.int32) for i in range(5)}
)


@pytest.mark.parametrize("fresh", [0, 5])
def test_a_later_launch_takes_few_steps(module, fake, fresh):
    """Of 15 tensors, some of them new, and 5 numbers: 18 microseconds on a busy core, of which calls are the most.

    Calls of Python and C functions are counted, since times depend on the machine.
    """
    fake.parameter_sizes = (MANY.size,)
    given = {f"x{i}": torch.zeros(4) for i in range(15)} | {f"n{i}": i for i in range(5)}
    sizes = {"grid": 3, "block": 64}
    module.launch(MANY, **sizes, **given)
    given |= {f"x{i}": torch.zeros(4) for i in range(fresh)}
    calls = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        module.launch(MANY, **sizes, **given)
    finally:
        sys.setprofile(None)
    assert calls["call"] <= 40 + 2 * fresh  # 55 where all of them are looked at
    assert calls["c_call"] <= 80 + 5 * fresh  # 99


def test_a_kernel_may_use_all_shared_memory_less_its_own(module, fake):
    launch(module, shared_bytes=232448 - 48)
    opt_in = fake.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [call[1:] for call in fake.named("cuFuncSetAttribute")] == [(opt_in, 232448 - 48)]
    with pytest.raises(ValueError, match=r"axpy: shared_bytes is 232401, expected 0 \.\. 232400"):
        launch(module, shared_bytes=232448 - 47)
    assert len(fake.launches) == 1


@pytest.mark.parametrize("block", [0, 33, 544, -32])
def test_odd_blocks_are_refused(block, module, fake):
    with pytest.raises(ValueError, match=f"block is {block}, expected a multiple of 32 up to 512"):
        launch(module, block=block)
    assert not fake.launches


def test_odd_grids_and_bad_arguments_are_refused_before_the_driver_is_asked(module, fake):
    fake.calls.clear()
    with pytest.raises(ValueError, match="kernel axpy, argument x: has dtype"):
        launch(module, x=X.double())
    assert not fake.calls
    with pytest.raises(ValueError, match="grid is 0, expected at least 1"):
        launch(module, grid=0)


def test_a_failing_launch_names_kernel_sizes_and_status(module, fake):
    fake.failing["cuLaunchKernel"] = Status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(DriverError) as caught:
        launch(module, shared_bytes=64)
    assert str(caught.value) == (
        "kernel axpy can't start on cuda:1 with 3 blocks of 64 threads and 64 bytes of shared memory: "
        "cuLaunchKernel fails with CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (what it means)"
    )


def test_a_kernel_that_is_not_there(module):
    other = Signature("gone", AXPY.parameters)
    with pytest.raises(DriverError, match=r"kernel gone is not in a/kernel\.cu: .*NOT_FOUND"):
        launch(module, signature=other)


@pytest.mark.parametrize("sizes", [(), (8,), (24,), (16, 4), (8, 4, 4)])
def test_a_signature_that_is_not_the_kernels(sizes, module, fake):
    fake.parameter_sizes = sizes
    with pytest.raises(ValueError, match=r"axpy has parameters of .* but its signature says \[16\]"):
        launch(module)
    assert not fake.launches


def test_drivers_that_know_no_parameter_sizes_still_launch(module, fake):
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


def test_a_thread_that_compiles_keeps_no_other_waiting(gpus, fake, monkeypatch):
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


def test_an_image_that_the_driver_refuses(gpus, compiled, fake):
    fake.failing["cuModuleLoadData"] = Status.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(DriverError, match="cuModuleLoadData fails with CUDA_ERROR_INVALID_IMAGE"):
        CudaRuntime(fake).load("a/kernel.cu", SECOND)
    assert fake.contexts == []


def test_ptx_in_place_of_machine_code_that_the_driver_refuses(gpus, compiled, fake, caplog):
    def load(image):
        is_ptx = image == b"PTX"
        return (Status.CUDA_SUCCESS, "module") if is_ptx else (Status.CUDA_ERROR_INVALID_IMAGE, None)

    fake.do_cuModuleLoadData = load
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        CudaRuntime(fake).load("a/kernel.cu", SECOND).find(AXPY)
    assert [arch for _, arch, _ in compiled] == [(90, False), (90, True)]
    assert "the driver compiles it from PTX" in caplog.text


def test_ptx_for_a_gpu_that_is_newer_than_the_compiler(gpus, compiled, fake):
    gpus.capability = (13, 0)
    CudaRuntime(fake).load("a/kernel.cu", SECOND)
    assert compiled == [("a/kernel.cu", (120, True), {})]


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


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", None),
        ("cuda", None),
        ("cpu", "kernels run on CUDA devices, not on 'cpu'"),
        ("cuda:2", "there is no cuda:2, torch finds 2 GPU(s)"),
    ],
)
def test_devices_that_are_there(fake, device, expected):
    assert reason(fake, torch.device(device)) == expected


def failing(error):
    def fail():
        raise error

    return fail


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("module", "name", "value", "expected"),
    [
        (torch.version, "cuda", None, f"torch {re.escape(torch.__version__)} is built without CUDA"),
        (torch.cuda, "is_available", lambda: False, "torch finds no GPU.*"),
        (nvrtc, "version", failing(RuntimeError("Failure finding libnvrtc.so\nsearched in many places")),
         r"NVRTC can't be loaded \(RuntimeError: Failure finding libnvrtc.so\): pip install .*"),
        (torch.cuda, "device_count", failing(OSError("something\nelse")), "CUDA does not answer: OSError: something"),
    ],
)  # fmt: skip
def test_what_torch_and_the_compiler_say(fake, monkeypatch, module, name, value, expected):
    monkeypatch.setattr(module, name, value)
    shown = reason(fake)
    assert re.fullmatch(expected, shown)
    if module is not nvrtc and name != "device_count":
        assert not fake.calls  # no library of the driver is touched


@pytest.mark.parametrize(
    ("capability", "known", "expected"),
    [
        ((7, 0), (75, 80, 90), "cuda:0 is too old: compute capability 7.0, needed is 7.5 or newer"),
        ((13, 0), (75, 80, 90), None),  # the driver compiles from PTX
        ((7, 5), (80, 90), "NVRTC 13.1 can't compile for compute capability 7.5"),
    ],
)
def test_gpus_that_are_too_old_or_that_the_compiler_does_not_know(
    gpus, fake, monkeypatch, capability, known, expected
):
    monkeypatch.setattr(nvrtc, "architectures", lambda: known)
    gpus.capability = capability
    assert reason(fake) == expected


@pytest.mark.usefixtures("gpus")
def test_drivers_of_another_generation_and_drivers_that_fail(fake):
    for fake.version in (13000, 13010, 14000):
        assert reason(fake) is None
    fake.version = 12080
    assert reason(fake) == (
        "the driver is for CUDA 12.8 and can't run what NVRTC 13.1 compiles: take a newer driver, or "
        "pip install 'nemo-gpu-decoding[cuda12]'"
    )
    fake.failing["cuDriverGetVersion"] = Status.CUDA_ERROR_INVALID_VALUE
    assert reason(fake).startswith("the NVIDIA driver fails with")


@pytest.mark.usefixtures("gpus")
def test_no_cuda_python_or_an_old_one(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert reason(fake) == "cuda-python is not installed: pip install 'nemo-gpu-decoding[cuda13]'"
    module = ModuleType("cuda.bindings")
    module.__version__ = "12.6.2.post1"
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expected = "cuda-python 12.6.2.post1 is older than 12.9: pip install 'nemo-gpu-decoding[cuda12]'"
    assert reason(fake) == expected


@pytest.mark.usefixtures("gpus")
def test_the_answer_is_found_once_per_device(fake, monkeypatch):
    cuda = CudaRuntime(fake)
    assert cuda.why_not(FIRST) is None
    monkeypatch.setattr(availability, "_torch_problem", lambda _: "asked again")
    assert cuda.why_not(FIRST) is None
    assert cuda.why_not(torch.device("cuda", 1)) == "asked again"
