"""Automata and other tables in a device's memory, uploaded once however often they are decoded with."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.fusion.automaton import AutomatonArrays, BackoffAutomaton


class DeviceAutomaton(NamedTuple):
    """The arrays of one or several automata as kernels take them, see fusion.cuh."""

    states: torch.Tensor  # [S, bytes of automaton.STATE] uint8
    arcs: torch.Tensor  # [A, bytes of automaton.ARC] uint8


_lock = threading.Lock()
# weakly: an automaton that nobody decodes with any more takes its copies along
_uploaded: weakref.WeakKeyDictionary[BackoffAutomaton, dict[torch.device, DeviceAutomaton]]
_uploaded = weakref.WeakKeyDictionary()
_uploaded_arrays: weakref.WeakKeyDictionary[object, dict[torch.device, tuple[torch.Tensor, ...]]]
_uploaded_arrays = weakref.WeakKeyDictionary()


def on_device(automaton: BackoffAutomaton, device: torch.device) -> DeviceAutomaton:
    """The automaton in the memory of `device`; uploaded by the first call for it."""
    with _lock:
        copies = _uploaded.setdefault(automaton, {})
        if device not in copies:
            copies[device] = upload(automaton.arrays, device)
            if device.type == "cuda":  # whatever stream the next user works on, the copy is there
                torch.cuda.current_stream(device).synchronize()
        return copies[device]


def arrays_on_device(
    owner: object, arrays: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """The arrays that belong to `owner`, which never change, in the memory of `device`.

    Records as `as_records` lays them out, others as they are; uploaded by the first call for a device,
    and forgotten together with the owner.
    """
    with _lock:
        copies = _uploaded_arrays.setdefault(owner, {})
        if device not in copies:
            copies[device] = tuple(
                (as_records(array) if array.dtype.names else torch.tensor(array)).to(device)
                for array in arrays
            )
        return copies[device]


def upload(arrays: AutomatonArrays, device: torch.device) -> DeviceAutomaton:
    """A new copy in the memory of `device`; the host does not wait for it."""
    return DeviceAutomaton(*(as_records(array).to(device, non_blocking=True) for array in arrays))
