"""Automata in a device's memory, uploaded once however often they are decoded with."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.fusion.automaton import AutomatonArrays, BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion


class DeviceAutomaton(NamedTuple):
    """The arrays of one or several automata as kernels take them, see fusion.cuh."""

    states: torch.Tensor  # [S, bytes of automaton.STATE] uint8
    arcs: torch.Tensor  # [A, bytes of automaton.ARC] uint8


_lock = threading.Lock()
# weakly: an automaton that nobody decodes with any more takes its copies along
_uploaded: weakref.WeakKeyDictionary[BackoffAutomaton, dict[torch.device, DeviceAutomaton]]
_uploaded = weakref.WeakKeyDictionary()


def on_device(automaton: BackoffAutomaton, device: torch.device) -> DeviceAutomaton:
    """The automaton in the memory of `device`; uploaded by the first call for it."""
    with _lock:
        copies = _uploaded.setdefault(automaton, {})
        if device not in copies:
            copies[device] = upload(automaton.arrays, device)
            if device.type == "cuda":  # whatever stream the next user works on, the copy is there
                torch.cuda.current_stream(device).synchronize()
        return copies[device]


def upload(arrays: AutomatonArrays, device: torch.device) -> DeviceAutomaton:
    """A new copy in the memory of `device`; the host does not wait for it."""
    return DeviceAutomaton(*(as_records(array).to(device, non_blocking=True) for array in arrays))


def trees_on_device(fusion: BatchFusion, device: torch.device) -> DeviceAutomaton:
    """All boosting trees of a batch; one alone is uploaded once and for all, several are joined."""
    if len(fusion.trees) == 1:
        return on_device(fusion.trees[0], device)
    return upload(fusion.arrays.boosting, device)
