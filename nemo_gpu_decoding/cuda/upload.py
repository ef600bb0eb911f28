"""Upload tables to device memory once per owner and device, and keep them valid for kernels."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.cuda.while_graph import capture_lock

LONGEST_CAPTURE = 10.0  # seconds; a limit, because a finalizer may run while its thread holds any lock

_lock = threading.Lock()
# weak keys: the copies are freed together with their owner
_uploaded: weakref.WeakKeyDictionary[object, dict[torch.device, tuple[torch.Tensor, ...]]]
_uploaded = weakref.WeakKeyDictionary()


def arrays_on_device(owner: object, arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The constant arrays of `owner` in the memory of `device`.

    Records have the layout of `as_records`. The first call for a device uploads the arrays; they are freed
    together with the owner.
    """
    with _lock:
        copies = _uploaded.setdefault(owner, {})
        if device not in copies:
            copies[device] = tuple(
                (as_records(array) if array.dtype.names else torch.tensor(array)).to(device) for array in arrays
            )
        return copies[device]


def outlive_kernels(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the tensors' memory until the kernels on torch's current stream end, even if the tensors are deleted.

    torch returns memory to the stream of its allocation. Without this call, a kernel there may overwrite it
    while a kernel of another stream still reads it.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def synchronize_unless_capturing(device: torch.device) -> None:
    """Wait for all kernels on `device`, after captures of other threads, which waiting would end.

    Does nothing if this thread captures a stream, which forbids waiting.
    """
    if not torch.cuda.is_current_stream_capturing():
        captured = capture_lock.acquire(timeout=LONGEST_CAPTURE)
        torch.cuda.synchronize(device)
        if captured:
            capture_lock.release()
