"""Automata in a device's memory, as kernels take them (fusion.cuh)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nemo_gpu_decoding.cuda.launch import as_records
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion


class DeviceAutomaton(NamedTuple):
    """The arrays of one or several automata in a device's memory."""

    states: torch.Tensor  # [S, bytes of automaton.STATE] uint8
    arcs: torch.Tensor  # [A, bytes of automaton.ARC] uint8


def on_device(automaton: BackoffAutomaton, device: torch.device) -> DeviceAutomaton:
    """The automaton in the memory of `device`; uploaded once, however often it is decoded with."""
    return DeviceAutomaton(*arrays_on_device(automaton, automaton.arrays, device))


def trees_on_device(fusion: BatchFusion, device: torch.device) -> DeviceAutomaton:
    """All boosting trees of a batch; one alone is uploaded once, several are joined for this batch."""
    if len(fusion.trees) == 1:
        return on_device(fusion.trees[0], device)
    joined = fusion.arrays.boosting
    return DeviceAutomaton(*(as_records(array).to(device, non_blocking=True) for array in joined))
