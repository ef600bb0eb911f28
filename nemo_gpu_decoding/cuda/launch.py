"""Loading and launching kernels: the two things that decoders ask for, and who provides them.

    module = runtime().load("search/flexctc_beam/kernel.cu", device)
    module.launch(SIGNATURE, grid=batch, block=256, log_probs=log_probs, lengths=lengths, beam=16)

The runtime of a process is CUDA's (`driver.py`). Tests put an emulator in its place that runs the
same kernels on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nemo_gpu_decoding.cuda.signature import Scalar, Signature, Tensor, as_records, checked_arguments

__all__ = [
    "Module",
    "Runtime",
    "Scalar",
    "Signature",
    "Tensor",
    "as_records",
    "checked_arguments",
    "runtime",
    "use_runtime",
]


class Module(Protocol):
    """The kernels of one source file, ready on one device."""

    device: torch.device

    def find(self, signature: Signature) -> None:
        """Look a kernel up before its first launch, which then may be captured into a CUDA graph."""
        ...

    def launch(
        self, signature: Signature, /, *, grid: int, block: int, shared_bytes: int = 0, **arguments: Any
    ) -> None:
        """Start `grid` blocks of `block` threads on torch's current stream of the device; don't wait.

        Args:
            signature: the kernel and its parameters.
            grid: blocks, at least 1.
            block: threads per block, a multiple of 32.
            shared_bytes: dynamic shared memory per block, at most `Runtime.shared_bytes`.
            arguments: by name, see `checked_arguments`. The tensors must live until the kernel has
                run; memory from torch's allocator does if it was allocated on the current stream.

        Raises:
            ValueError: an argument, or the launch's own sizes, are not what is expected.
            RuntimeError: the device refuses the launch; the kernel is named.
        """
        ...


class Runtime(Protocol):
    """A place where kernels run."""

    name: str  # "cuda", or "emulator" in tests

    def why_not(self, device: torch.device) -> str | None:
        """None if kernels run on `device`, else one plain line that says why not; never raises."""
        ...

    def load(self, source: str, device: torch.device, defines: Mapping[str, int | str] | None = None) -> Module:
        """The kernels of a source file, compiled at first use.

        Args:
            source: path relative to the package, "search/flexctc_beam/kernel.cu".
            device: where the kernels will run.
            defines: preprocessor macros, a variant of the module for each set.
        """
        ...

    def shared_bytes(self, device: torch.device) -> int:
        """The most dynamic shared memory that one block may ask for, in bytes."""
        ...

    def device_for(self, device: torch.device) -> torch.device:
        """Where kernels run for tensors that lie on `device`; ask `why_not` whether they do."""
        ...


_lock = threading.Lock()
_in_use: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this process; CUDA's unless `use_runtime` says otherwise."""
    global _in_use
    with _lock:
        if _in_use is None:
            from nemo_gpu_decoding.cuda.driver import CudaRuntime

            _in_use = CudaRuntime()
        return _in_use


@contextmanager
def use_runtime(replacement: Runtime) -> Iterator[Runtime]:
    """Put another runtime in place, for all threads of the process, until the block ends."""
    global _in_use
    with _lock:
        before, _in_use = _in_use, replacement
    try:
        yield replacement
    finally:
        with _lock:
            _in_use = before
