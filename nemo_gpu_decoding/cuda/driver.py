"""Load and launch kernels on real GPUs through the CUDA driver's interface.

Modules belong to torch's context, and kernels run on torch's current stream. So kernels run in order with torch's
kernels, on any device, and a caller may capture them into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nemo_gpu_decoding.cuda.availability import why_unavailable
from nemo_gpu_decoding.cuda.compile import Defines, architecture, kernel_code
from nemo_gpu_decoding.cuda.signature import Signature, checked_arguments

logger = logging.getLogger("nemo_gpu_decoding")

WARP = 32


class DriverError(RuntimeError):
    """An error that a call of the CUDA driver returned."""


class CudaRuntime:
    """A `launch.Runtime` that runs kernels on NVIDIA GPUs; one per process, for all devices and threads."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[torch.device, str | None] = {}
        self._modules: dict[tuple, CudaModule] = {}
        self._loading: dict[tuple, threading.Lock] = {}

    def why_not(self, device: torch.device) -> str | None:
        with self._lock:
            if device.index is None or device not in self._reasons:  # the current device may change
                self._reasons[device] = why_unavailable(device)
            return self._reasons[device]

    def device_for(self, device: torch.device) -> torch.device:
        if device.type == "cuda" and device.index is not None:
            return device
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)

    def shared_bytes(self, device: torch.device) -> int:
        return device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self._usable(device).index)

    def load(self, source: str, device: torch.device, defines: Defines | None = None) -> CudaModule:
        device = self._usable(device)
        key = (device.index, source, tuple(sorted((defines or {}).items())))
        if key not in self._modules:
            with self._loading.setdefault(key, threading.Lock()):  # compiling takes seconds: others do not wait
                if key not in self._modules:
                    self._modules[key] = CudaModule(_new_module(source, device, defines), source, device)
        return self._modules[key]

    def _usable(self, device: torch.device) -> torch.device:
        reason = self.why_not(device)
        if reason is not None:
            raise RuntimeError(f"no CUDA kernels on {device}: {reason}")
        return self.device_for(device)


def _new_module(source: str, device: torch.device, defines: Defines | None) -> Any:
    arch = architecture(torch.cuda.get_device_capability(device))
    assert arch is not None, "why_not has looked at this"
    with in_context(device.index), _outside_capture():
        try:
            return call("cuModuleLoadData", kernel_code(source, arch, defines))
        except DriverError as error:
            if arch.ptx:
                raise
            logger.warning("%s on %s: the driver compiles it from PTX, because %s", source, device, error)
            return call("cuModuleLoadData", kernel_code(source, arch._replace(ptx=True), defines))


class CudaModule:
    """A `launch.Module` that holds the kernels of one file on one GPU."""

    def __init__(self, handle: Any, source: str, device: torch.device) -> None:
        self.device = device
        self._handle = handle
        self._source = source
        self._lock = threading.Lock()
        self._kernels: dict[str, _Kernel] = {}

    def launch(self, signature: Signature, *, grid: int, block: int, shared_bytes: int = 0, **arguments: Any) -> None:
        values = checked_arguments(signature, self.device, arguments)
        kernel = self.find(signature)
        kernel.check_sizes(grid, block, shared_bytes)
        slots, addresses = signature.packed(values)
        sizes = grid, 1, 1, block, 1, 1, shared_bytes
        stream = torch.cuda.current_stream(self.device).cuda_stream
        try:
            with in_context(self.device.index):
                call("cuLaunchKernel", kernel.function, *sizes, stream, ctypes.addressof(addresses), 0)
        except DriverError as error:
            raise DriverError(
                f"kernel {signature.name} can't start on {self.device} with {grid} blocks of {block} "
                f"threads and {shared_bytes} bytes of shared memory: {error}"
            ) from None
        del slots  # must stay alive until the driver has copied the arguments

    def find(self, signature: Signature) -> _Kernel:
        with self._lock:
            kernel = self._kernels.get(signature.name)
            if kernel is None or kernel.signature is not signature:
                with in_context(self.device.index), _outside_capture():
                    kernel = self._kernels[signature.name] = self._find(signature)
            return kernel

    def _find(self, signature: Signature) -> _Kernel:
        """Find a kernel, compare its parameters and allow it all shared memory of the device."""
        try:
            function = call("cuModuleGetFunction", self._handle, signature.name.encode())
        except DriverError as error:
            raise DriverError(f"kernel {signature.name} is not in {self._source}: {error}") from None
        _check_parameters(function, signature)
        attribute = bindings().CUfunction_attribute
        limit = device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self.device.index)
        shared = limit - call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        opt_in = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, opt_in, shared)
        threads = call("cuFuncGetAttribute", attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        return _Kernel(signature, function, threads, shared)


@dataclass(frozen=True)
class _Kernel:
    signature: Signature
    function: Any
    max_threads: int  # per block; fewer than 1024 for a kernel with many registers
    max_shared: int  # bytes of dynamic shared memory per block

    def check_sizes(self, grid: int, block: int, shared_bytes: int) -> None:
        name = f"kernel {self.signature.name}"
        if grid < 1:
            raise ValueError(f"{name}: grid is {grid}, expected at least 1 block")
        if not 0 < block <= self.max_threads or block % WARP:
            raise ValueError(f"{name}: block is {block}, expected a multiple of {WARP} up to {self.max_threads}")
        if not 0 <= shared_bytes <= self.max_shared:
            raise ValueError(f"{name}: shared_bytes is {shared_bytes}, expected 0 .. {self.max_shared}")


def _check_parameters(function: Any, signature: Signature) -> None:
    """Compare the signature with the compiled kernel, if the driver can (12.4 and newer)."""
    try:
        parameters = [bindings().cuFuncGetParamInfo(function, i) for i in (0, 1)]
    except RuntimeError:
        return  # the driver has no such function
    sizes = [int(size) for status, _, size in parameters if int(status) == 0]
    if sizes != [signature.struct.itemsize]:
        raise ValueError(
            f"kernel {signature.name} has parameters of {sizes} bytes (up to 2 are looked at), but its signature "
            f"says [{signature.struct.itemsize}]"
        )


# ---------------------------------------------- The driver, with exceptions in place of status codes
@cache
def bindings() -> Any:
    """Return `cuda.bindings.driver`; `cuda.bindings.runtime` has a CUDA runtime that refuses older drivers."""
    return importlib.import_module("cuda.bindings.driver")


def call(name: str, *arguments: Any) -> Any:
    """Return the result of a driver function, without its status."""
    status, *values = getattr(bindings(), name)(*arguments)
    if int(status) != 0:
        raise DriverError(f"{name} fails with {_explained(status)}")
    return values[0] if len(values) == 1 else tuple(values)


def _explained(status: Any) -> str:
    texts = []
    for function in (bindings().cuGetErrorName, bindings().cuGetErrorString):
        unknown, text = function(status)
        texts.append(str(status) if int(unknown) != 0 or text is None else text.decode())
    return f"{texts[0]} ({texts[1]})"


def device_attribute(name: str, index: int) -> int:
    """Return an attribute of a device, by its name in `CUdevice_attribute` without the prefix."""
    call("cuInit", 0)
    attribute = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", index))


@cache
def primary_context(index: int) -> Any:
    """Return the CUDA context that torch uses on a device; torch and this module keep it until the process ends."""
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))


@contextmanager
def in_context(index: int) -> Iterator[None]:
    """Make torch's context of a device current on this thread."""
    call("cuCtxPushCurrent", primary_context(index))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@contextmanager
def _outside_capture() -> Iterator[None]:
    """Allow calls without a stream, which a stream capture forbids otherwise."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)
