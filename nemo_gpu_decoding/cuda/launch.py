"""Define how decoders load and launch CUDA kernels.

    module = runtime().load("search/flexctc_beam/kernel.cu", device)
    module.launch(SIGNATURE, grid=batch, block=256, log_probs=log_probs, lengths=lengths, beam=16)

The runtime of a process is CUDA's (`driver.py`). Tests replace the GPU runtime by an emulator that runs the same
kernels on the CPU.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nemo_gpu_decoding.cuda.signature import Scalar, Signature, Tensor, as_records

__all__ = ["Module", "Runtime", "Scalar", "Signature", "Tensor", "as_records", "runtime", "use_runtime"]


class Module(Protocol):
    """The kernels of one source file that are ready on one device."""

    device: torch.device

    def find(self, signature: Signature) -> object:
        """Prepare a kernel, so that its first launch may be captured into a CUDA graph."""

    def launch(self, signature: Signature, *, grid: int, block: int, shared_bytes: int = 0, **arguments: Any) -> None:
        """Start `grid` blocks of `block` threads on torch's current stream of the device, asynchronously.

        Args:
            signature: the kernel and its parameters.
            grid: blocks, at least 1.
            block: threads per block, a multiple of 32.
            shared_bytes: dynamic shared memory per block, at most `Runtime.shared_bytes`.
            arguments: by name, see `signature.checked_arguments`. The memory of tensors must stay valid until the
                kernel has run; this holds for memory that torch allocated on the current stream.

        Raises:
            ValueError: an argument, `grid`, `block` or `shared_bytes` is invalid.
            RuntimeError: the device refuses the launch; the message names the kernel.
        """


class Runtime(Protocol):
    """A place where kernels run: real GPUs or an emulator."""

    name: str  # "cuda", or "emulator" in tests

    def why_not(self, device: torch.device) -> str | None:
        """Return None if kernels run on `device`, else the reason in one line; never raises."""

    def load(self, source: str, device: torch.device, defines: Mapping[str, int | str] | None = None) -> Module:
        """Return the kernels of a source file, compiled at first use.

        Args:
            source: path relative to the package, "search/flexctc_beam/kernel.cu".
            device: device that runs the kernels.
            defines: preprocessor macros; each set of macros gives a separate module.
        """

    def shared_bytes(self, device: torch.device) -> int:
        """Return the largest dynamic shared memory of a block, in bytes."""

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device that runs kernels for tensors on `device`; `why_not` tells whether it is available."""


_lock = threading.Lock()
_in_use: Runtime | None = None


def runtime() -> Runtime:
    """Return the runtime of this process: CUDA's, unless `use_runtime` has set another."""
    global _in_use
    with _lock:
        if _in_use is None:
            from nemo_gpu_decoding.cuda.driver import CudaRuntime

            _in_use = CudaRuntime()
        return _in_use


@contextmanager
def use_runtime(replacement: Runtime) -> Iterator[Runtime]:
    """Replace the runtime, for the whole process, until the `with` block ends."""
    global _in_use
    with _lock:
        before, _in_use = _in_use, replacement
    try:
        yield replacement
    finally:
        with _lock:
            _in_use = before
