"""The runtime for real GPUs: modules and launches through the CUDA driver's interface.

Modules belong to torch's context, and kernels run on torch's current stream. So they run in order with
torch's kernels, on any device, and a caller may capture them into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nemo_gpu_decoding.cuda.availability import why_unavailable
from nemo_gpu_decoding.cuda.compile import Defines, architecture, kernel_code
from nemo_gpu_decoding.cuda.signature import Signature, checked_arguments

logger = logging.getLogger("nemo_gpu_decoding")

WARP = 32


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class CudaRuntime:
    """`launch.Runtime` on NVIDIA GPUs; one per process, for all devices and threads."""

    name = "cuda"

    def __init__(self, bindings: Any = None) -> None:
        """`bindings` replaces `cuda.bindings.driver`."""
        self._driver = Driver(bindings)
        self._lock = threading.Lock()
        self._reasons: dict[torch.device, str | None] = {}
        self._modules: dict[tuple, CudaModule] = {}
        self._loading: dict[tuple, threading.Lock] = {}

    def why_not(self, device: torch.device) -> str | None:
        with self._lock:
            if device.index is None:  # the current device may change
                return why_unavailable(device, self._driver.given)
            if device not in self._reasons:
                self._reasons[device] = why_unavailable(device, self._driver.given)
            return self._reasons[device]

    def device_for(self, device: torch.device) -> torch.device:
        if device.type == "cuda" and device.index is not None:
            return device
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)

    def shared_bytes(self, device: torch.device) -> int:
        device = self._usable(device)
        with self._driver.context(device.index):
            return self._driver.shared_limit(device.index)

    def load(self, source: str, device: torch.device, defines: Defines | None = None) -> CudaModule:
        device = self._usable(device)
        key = (device.index, source, tuple(sorted((defines or {}).items())))
        if key not in self._modules:
            with self._lock:
                loading = self._loading.setdefault(key, threading.Lock())
            with loading:  # compiling takes seconds: threads wait only for the same kernels
                if key not in self._modules:
                    handle = self._new_module(source, device, defines)
                    self._modules[key] = CudaModule(self._driver, handle, source, device)
        return self._modules[key]

    def _new_module(self, source: str, device: torch.device, defines: Defines | None) -> Any:
        arch = architecture(torch.cuda.get_device_capability(device))
        assert arch is not None, "why_not has looked at this"
        try:
            return self._loaded(kernel_code(source, arch, defines), device)
        except DriverError as error:
            if arch.ptx:
                raise
            logger.warning("%s on %s: the driver compiles it from PTX, because %s", source, device, error)
            return self._loaded(kernel_code(source, arch._replace(ptx=True), defines), device)

    def _loaded(self, code: bytes, device: torch.device) -> Any:
        with self._driver.context(device.index), self._driver.outside_capture():
            return self._driver.call("cuModuleLoadData", code)

    def _usable(self, device: torch.device) -> torch.device:
        reason = self.why_not(device)
        if reason is not None:
            raise RuntimeError(f"no CUDA kernels on {device}: {reason}")
        return self.device_for(device)


class CudaModule:
    """`launch.Module`: the kernels of one file on one GPU."""

    def __init__(self, driver: Driver, handle: Any, source: str, device: torch.device) -> None:
        self.device = device
        self._driver = driver
        self._handle = handle
        self._source = source
        self._lock = threading.Lock()
        self._kernels: dict[str, _Kernel] = {}

    def find(self, signature: Signature) -> None:
        self._kernel(signature)

    def launch(
        self, signature: Signature, /, *, grid: int, block: int, shared_bytes: int = 0, **arguments: Any
    ) -> None:
        values = checked_arguments(signature, self.device, arguments)
        kernel = self._kernel(signature)
        kernel.check_sizes(grid, block, shared_bytes)
        slots, addresses = signature.packed(values)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        try:
            with self._driver.context(self.device.index):
                self._driver.call(
                    "cuLaunchKernel", kernel.function, grid, 1, 1, block, 1, 1, shared_bytes,
                    self._driver.bindings.CUstream(stream), ctypes.addressof(addresses), 0,
                )  # fmt: skip
        except DriverError as error:
            raise DriverError(
                f"kernel {signature.name} can't start on {self.device} with {grid} blocks of {block} "
                f"threads and {shared_bytes} bytes of shared memory: {error}"
            ) from None
        del slots  # must stay alive until here, when the driver has copied the arguments

    def _kernel(self, signature: Signature) -> _Kernel:
        kernel = self._kernels.get(signature.name)
        if kernel is not None and kernel.signature is signature:
            return kernel
        with self._lock:
            kernel = self._kernels.get(signature.name)
            if kernel is None or kernel.signature is not signature:
                with self._driver.context(self.device.index), self._driver.outside_capture():
                    kernel = self._find(signature)
                self._kernels[signature.name] = kernel
            return kernel

    def _find(self, signature: Signature) -> _Kernel:
        """Find a kernel, compare its parameters and allow it all shared memory of the device."""
        driver, limit = self._driver, self._driver.shared_limit(self.device.index)
        try:
            function = driver.call("cuModuleGetFunction", self._handle, signature.name.encode())
        except DriverError as error:
            raise DriverError(f"kernel {signature.name} is not in {self._source}: {error}") from None
        driver.check_parameters(function, signature)
        shared = limit - driver.function_attribute("SHARED_SIZE_BYTES", function)
        attribute = driver.bindings.CUfunction_attribute
        opt_in = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.call("cuFuncSetAttribute", function, opt_in, shared)
        threads = driver.function_attribute("MAX_THREADS_PER_BLOCK", function)
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


class Driver:
    """`cuda.bindings.driver` with exceptions in place of status codes."""

    def __init__(self, bindings: Any = None) -> None:
        self.given = bindings
        self._contexts: dict[int, _Current] = {}

    @cached_property
    def bindings(self) -> Any:
        return self.given or importlib.import_module("cuda.bindings.driver")

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a driver function, without its status."""
        status, *values = getattr(self.bindings, name)(*arguments)
        if int(status) != 0:
            raise DriverError(f"{name} fails with {self._explained(status)}")
        return values[0] if len(values) == 1 else tuple(values)

    def context(self, index: int) -> _Current:
        """Make the device's primary context, which is torch's too, current on this thread for a `with` block."""
        current = self._contexts.get(index)
        if current is None:
            self.call("cuInit", 0)
            # kept until the process ends, as in torch
            context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", index))
            current = self._contexts[index] = _Current(self, context)
        return current

    @contextmanager
    def outside_capture(self) -> Iterator[None]:
        """Allow calls without a stream, which a stream capture forbids otherwise."""
        relaxed = self.bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self.call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", before)

    def shared_limit(self, index: int) -> int:
        """Bytes of shared memory that one block can have if its kernel asks for more than usual."""
        attribute = self.bindings.CUdevice_attribute
        limit = attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        return self.call("cuDeviceGetAttribute", limit, self.call("cuDeviceGet", index))

    def function_attribute(self, name: str, function: Any) -> int:
        attribute = getattr(self.bindings.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return self.call("cuFuncGetAttribute", attribute, function)

    def check_parameters(self, function: Any, signature: Signature) -> None:
        """Compare the signature with the compiled kernel, if the driver can (12.4 and newer)."""
        wanted = [signature.size]
        sizes: list[int] = []
        try:
            while len(sizes) <= len(wanted):
                status, _, size = self.bindings.cuFuncGetParamInfo(function, len(sizes))
                if int(status) != 0:
                    break
                sizes.append(int(size))
        except RuntimeError:
            return  # the driver has no such function
        if sizes != wanted:
            raise ValueError(
                f"kernel {signature.name} has parameters of {sizes} bytes (up to {len(wanted) + 1} are "
                f"looked at), but its signature says {wanted}"
            )

    def _explained(self, status: Any) -> str:
        texts = []
        for function in (self.bindings.cuGetErrorName, self.bindings.cuGetErrorString):
            unknown, text = function(status)
            texts.append(str(status) if int(unknown) != 0 or text is None else text.decode())
        return f"{texts[0]} ({texts[1]})"


class _Current:
    """A context, current on this thread within `with`; not a generator, because every launch enters it."""

    def __init__(self, driver: Driver, context: Any) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent", self._context)

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent")
