# ruff: noqa: N802 (methods are named like the functions of the driver)
"""A CUDA driver that only writes down what it is asked, in place of `cuda.bindings.driver`."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_gpu_decoding.cuda import nvrtc


class Status(IntEnum):
    """A few of the driver's results, by their real numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701


class FunctionAttribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class FakeDriver:
    """One kernel name, `parameter_sizes` as its parameters; `failing[name]` makes a function fail."""

    CUfunction_attribute = FunctionAttribute
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM=91,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=97,
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstream = int

    def __init__(self, kernel: str = "axpy", parameter_sizes: tuple[int, ...] = (16,)) -> None:
        self.kernel = kernel
        self.parameter_sizes = parameter_sizes
        self.shared_limit = 232448
        self.attributes = {88: 0}  # of devices; all others are `shared_limit`
        self.static_shared = 48
        self.max_threads = 512
        self.version = 13000
        self.failing: dict[str, Status] = {}
        self.calls: list[tuple] = []
        self.contexts: list[str] = []  # the stack of this thread
        self.capture_mode = "global"
        self.launches: list[SimpleNamespace] = []

    def named(self, name: str) -> list[tuple]:
        """The arguments of all calls of a function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        body = getattr(self, f"do_{name}", lambda *_: (Status.CUDA_SUCCESS,))

        def recorded(*arguments: Any) -> tuple:
            self.calls.append((name, *arguments))
            if name in self.failing:
                return (self.failing[name], None)
            return body(*arguments)

        return recorded

    def do_cuDriverGetVersion(self):
        return Status.CUDA_SUCCESS, self.version

    def do_cuGetErrorName(self, status):
        return Status.CUDA_SUCCESS, Status(status).name.encode()

    def do_cuGetErrorString(self, status):
        return Status.CUDA_SUCCESS, b"what it means"

    def do_cuDeviceGet(self, index):
        return Status.CUDA_SUCCESS, f"device {index}"

    def do_cuDevicePrimaryCtxRetain(self, device):
        return Status.CUDA_SUCCESS, f"context of {device}"

    def do_cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (Status.CUDA_SUCCESS,)

    def do_cuCtxPopCurrent(self):
        return Status.CUDA_SUCCESS, self.contexts.pop()

    def do_cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.capture_mode = self.capture_mode, mode
        return Status.CUDA_SUCCESS, before

    def do_cuDeviceGetAttribute(self, attribute, device):
        return Status.CUDA_SUCCESS, self.attributes.get(attribute, self.shared_limit)

    def do_cuModuleLoadData(self, image):
        assert self.capture_mode == "relaxed", "would break a stream capture of the caller"
        assert self.contexts, "there is no current context"
        return Status.CUDA_SUCCESS, f"module in {self.contexts[-1]}"

    def do_cuModuleGetFunction(self, module, name):
        assert self.capture_mode == "relaxed", "would break a stream capture of the caller"
        if name.decode() != self.kernel:
            return Status.CUDA_ERROR_NOT_FOUND, None
        return Status.CUDA_SUCCESS, f"{self.kernel} of {module}"

    def do_cuFuncGetAttribute(self, attribute, function):
        values = {
            FunctionAttribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: self.static_shared,
            FunctionAttribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: self.max_threads,
        }
        return Status.CUDA_SUCCESS, values[attribute]

    def do_cuFuncGetParamInfo(self, function, index):
        if index >= len(self.parameter_sizes):
            return Status.CUDA_ERROR_INVALID_VALUE, None, None
        return Status.CUDA_SUCCESS, sum(self.parameter_sizes[:index]), self.parameter_sizes[index]

    def do_cuLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        addresses = (ctypes.c_uint64 * len(self.parameter_sizes)).from_address(parameters)
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=(gx, gy, gz),
                block=(bx, by, bz),
                shared=shared,
                stream=stream,
                context=self.contexts[-1],
                arguments=[
                    ctypes.string_at(address, size)
                    for address, size in zip(addresses, self.parameter_sizes, strict=True)
                ],
                extra=extra,
            )
        )
        return (Status.CUDA_SUCCESS,)


class OldTorch:
    """torch 2.11 on two GPUs: what is current, what it believes about captures.

    `torch.cuda.graph` is torch's own. A capture during which `forbidden` is called fails at its end, and the allocator
    and the generator of its device still believe that it goes on: `underway` and `random` hold them. Put in place for
    the rest of the process: to destroy a pool while a capture seems to go on ends the process, as there.
    """

    def __init__(self) -> None:
        self.device, self.underway, self.random, self.made, self._failed = 0, set(), set(), 0, False
        self.current = {
            index: SimpleNamespace(name=f"default {index}", wait_stream=lambda _: None) for index in (0, 1)
        }
        replacements = {
            "CUDAGraph": lambda: SimpleNamespace(
                capture_begin=self._begin, capture_end=self._end, replay=lambda: None
            ),
            "MemPool": type("MemPool", (_Pool,), {"torch": self}),  # a class: torch 2.15 asks what is one
            "ExternalStream": lambda stream, device: SimpleNamespace(
                name="capture", device=torch.device("cuda", device), wait_stream=lambda _: None, cuda_stream=stream
            ),
            "current_device": lambda: self.device,
            "current_stream": lambda device=None: self.current[device.index],
            "device": self._device,
            "empty_cache": lambda: None,
            "graph_pool_handle": lambda: (0, 1),
            "is_current_stream_capturing": lambda: False,
            "set_stream": lambda stream: self.current.update({self.device: stream}),
            "stream": lambda stream: _StreamContext(self, stream),
            "synchronize": lambda device=None: self.forbidden() if self.underway else None,
        }
        for name, replacement in replacements.items():
            setattr(torch.cuda, name, replacement)
        torch._C._host_emptyCache = lambda: None
        torch._C._cuda_endAllocateToPool = lambda device, pool: self.underway.discard((device, pool))
        torch._C._cuda_releasePool = lambda device, pool: None

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        try:
            yield
        finally:
            self.device = before

    def forbidden(self) -> None:
        """Do what no capture permits, as waiting for the device does on any thread."""
        self._failed = True

    def _begin(self, pool: Any = (0, 2), **options: Any) -> None:
        self.underway.add((self.device, pool))
        self.random.add(self.device)

    def _end(self) -> None:
        if self._failed:
            self._failed = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.underway = {(device, pool) for device, pool in self.underway if device != self.device}
        self.random.discard(self.device)


class _Pool:
    torch: OldTorch

    def __del__(self) -> None:
        if self.torch.underway:
            os.abort()


class _StreamContext:
    """Not a generator: left without its exit, it stays entered."""

    def __init__(self, torch: OldTorch, stream: Any) -> None:
        self._torch, self._stream = torch, stream

    def __enter__(self) -> None:
        self._before = self._torch.current[self._torch.device]
        self._torch.current[self._torch.device] = self._stream

    def __exit__(self, *_: object) -> None:
        self._torch.current[self._torch.device] = self._before


# ---------------------------------------------- Marks for tests that need more than every machine has
def _why_no_compiler() -> str:
    try:
        nvrtc.version()
    except Exception as error:  # the loader raises many types for a missing library
        return f"no NVRTC here: {type(error).__name__}"
    return ""


needs_nvrtc = pytest.mark.skipif(bool(_why_no_compiler()), reason=_why_no_compiler() or "NVRTC is there")
