"""Arrays that one copy moves between the host and a device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 16  # bytes


class Exchange:
    """Named arrays in one buffer on the device, and the same arrays in pinned host memory.

    Attributes:
        on_device: the arrays for kernels; records as in `as_records`.
        on_host: the arrays for the host.

    Args:
        arrays: name -> type and shape, in the order of the buffer.
        device: device of the kernels.
    """

    def __init__(self, arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]], device: torch.device) -> None:
        self._begins: dict[str, int] = {}
        ends: dict[str, int] = {}
        size = 0
        for name, (dtype, shape) in arrays.items():
            self._begins[name], size = size, size + int(np.prod(shape)) * dtype.itemsize
            ends[name] = size
            size = -(-size // ALIGNMENT) * ALIGNMENT
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.on_device: dict[str, torch.Tensor] = {}
        self.on_host: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in arrays.items():
            part = slice(self._begins[name], ends[name])
            self.on_host[name] = self._host[part].numpy().view(dtype).reshape(shape)
            kernels = self._device[part]
            plain = None if dtype.fields else torch.from_numpy(np.empty(0, dtype)).dtype
            self.on_device[name] = kernels.view(plain).view(shape) if plain else kernels.view(*shape, dtype.itemsize)
        self._parts: dict[tuple[str | None, str | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def upload(self, *, before: str | None = None) -> None:
        """Copy the arrays before this one, or all, to the device; `on_host` must stay as it is until a `fetch`."""
        device, host = self._part(None, before)
        device.copy_(host, non_blocking=True)

    def fetch(self, *, first: str | None = None) -> None:
        """Copy the arrays from this one on, or all, to the host. Waits for the device."""
        device, host = self._part(first, None)
        host.copy_(device)

    def _part(self, first: str | None, before: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        if (first, before) not in self._parts:
            part = slice(self._begins[first] if first else 0, self._begins[before] if before else None)
            self._parts[first, before] = self._device[part], self._host[part]
        return self._parts[first, before]
