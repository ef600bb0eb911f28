"""Tables in a device's memory, uploaded once however often they are used."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records

_lock = threading.Lock()
# weakly: an owner that nobody uses any more takes its copies along
_uploaded: weakref.WeakKeyDictionary[object, dict[torch.device, tuple[torch.Tensor, ...]]]
_uploaded = weakref.WeakKeyDictionary()


def arrays_on_device(owner: object, arrays: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The arrays that belong to `owner`, which never change, in the memory of `device`.

    Records as `as_records` lays them out, others as they are; uploaded by the first call for a device,
    and forgotten together with the owner.
    """
    with _lock:
        copies = _uploaded.setdefault(owner, {})
        if device not in copies:
            copies[device] = tuple(
                (as_records(array) if array.dtype.names else torch.tensor(array)).to(device) for array in arrays
            )
        return copies[device]


def outlive_kernels(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the tensors' memory for the kernels of torch's current stream, also when nobody holds them any more.

    Memory goes back to the stream that it was allocated on: without this, somebody there may write to it
    while a kernel of another stream still reads.
    """
    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def synchronize_unless_capturing(device: torch.device) -> None:
    """Wait for all kernels on `device`; a stream that this thread captures forbids it."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
