"""Kernels for the emulator's own tests, and a launcher that reads signatures off the arguments."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from tests.cuda_emulator.emulator import CPU, EmulatedRuntime

HERE = Path(__file__).parent


def launch(
    runtime: EmulatedRuntime, source: str | Path, kernel: str, *, grid: Any = 1, block: Any = 64,
    shared_bytes: int = 0, defines: dict | None = None, **arguments: Any,
) -> None:  # fmt: skip
    """Launch a kernel of this folder; `arguments`, in the kernel's order, are its signature too."""
    signature = Signature(kernel, {name: _parameter(name, value) for name, value in arguments.items()})
    module = runtime.load(str(HERE / source), CPU, defines)
    module.launch(signature, grid=grid, block=block, shared_bytes=shared_bytes, **arguments)


def _parameter(name: str, value: Any) -> Tensor | Scalar:
    if isinstance(value, torch.Tensor):
        return Tensor(value.dtype, tuple(f"{name}{axis}" for axis in range(value.ndim)))
    return Scalar(type(value) if isinstance(value, np.generic) else np.int32)
