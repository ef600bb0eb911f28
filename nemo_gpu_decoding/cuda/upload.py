"""Copy arrays between the host and a device, and keep them valid for kernels.

Constant tables are uploaded once per owner and device. An `Exchange` copies many arrays in one transfer.
"""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.cuda.while_graph import capture_lock

ALIGNMENT = 16  # bytes
LONGEST_CAPTURE = 10.0  # seconds; a limit, because a finalizer may run while its thread holds any lock

_lock = threading.Lock()
# weak keys: the copies are freed together with their owner
_uploaded: weakref.WeakKeyDictionary[object, dict[torch.device, tuple[torch.Tensor, ...]]]
_uploaded = weakref.WeakKeyDictionary()


def arrays_on_device(owner: object, arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the constant arrays of `owner` in the memory of `device`.

    Records have the layout of `as_records`. The first call for a device uploads the arrays; they are freed
    together with the owner.
    """
    with _lock:
        copies = _uploaded.setdefault(owner, {})
        if device not in copies:
            copies[device] = tuple((as_records(a) if a.dtype.names else torch.tensor(a)).to(device) for a in arrays)
        return copies[device]


def outlive_kernels(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the tensors' memory until the kernels on torch's current stream end, even if the tensors are deleted.

    torch returns memory to the stream of its allocation. Without this call, a kernel of that stream may overwrite
    memory that a kernel of another stream still reads.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def synchronize_unless_capturing(device: torch.device) -> None:
    """Wait for all kernels on `device`, but first for captures of other threads, which the wait would end.

    Do nothing if this thread captures a stream, because a capture forbids waiting.
    """
    if not torch.cuda.is_current_stream_capturing():
        captured = capture_lock.acquire(timeout=LONGEST_CAPTURE)
        torch.cuda.synchronize(device)
        if captured:
            capture_lock.release()


class Exchange:
    """Named arrays that lie in one buffer on the device, and also in pinned host memory.

    Attributes:
        on_device: the arrays for kernels; records as in `as_records`.
        on_host: the arrays for the host.

    Args:
        arrays: name -> type and shape, in the order of the buffer.
        device: device of the kernels.
        new: makes both buffers: `torch.zeros`, or `torch.empty` for arrays that a kernel fills.
    """

    def __init__(
        self, arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]], device: torch.device, new: Any = torch.zeros
    ) -> None:
        places: dict[str, slice] = {}
        size = 0
        for name, (dtype, shape) in arrays.items():
            places[name] = slice(size, size + int(np.prod(shape)) * dtype.itemsize)
            size = -(-places[name].stop // ALIGNMENT) * ALIGNMENT
        self._begins = {name: place.start for name, place in places.items()}
        self._device = new(size, dtype=torch.uint8, device=device)
        self._host = new(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.on_device: dict[str, torch.Tensor] = {}
        self.on_host: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in arrays.items():
            self.on_host[name] = self._host[places[name]].numpy().view(dtype).reshape(shape)
            kernels = self._device[places[name]]
            plain = None if dtype.fields else torch.from_numpy(np.empty(0, dtype)).dtype
            self.on_device[name] = kernels.view(plain).view(shape) if plain else kernels.view(*shape, dtype.itemsize)
        self._parts: dict[tuple[str | None, str | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def upload(self, *, before: str | None = None) -> None:
        """Copy all arrays, or those before the given one, to the device; do not change `on_host` before a `fetch`."""
        device, host = self._part(None, before)
        device.copy_(host, non_blocking=True)

    def fetch(self, *, first: str | None = None) -> None:
        """Copy arrays to the host: the given array and all after it, or all arrays. Wait for the device."""
        device, host = self._part(first, None)
        host.copy_(device)

    def _part(self, first: str | None, before: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        if (first, before) not in self._parts:
            part = slice(self._begins[first] if first else 0, self._begins[before] if before else None)
            self._parts[first, before] = self._device[part], self._host[part]
        return self._parts[first, before]
