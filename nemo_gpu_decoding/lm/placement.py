"""Placement of an LM for a GPU: all arrays in device memory, or the arcs in host memory.

    device    states, labels and arcs in the GPU's memory
    paged     arcs in pinned host memory, two thirds of the LM; the rest and a cache of arcs on the GPU
    auto      device, if that leaves enough for the acoustic model and the search; else paged

An LM that does not fit raises an error before the copy starts. The message has the sizes that are needed
and free, and a setting that fits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from nemo_gpu_decoding.cuda.host_memory import free_host_bytes
from nemo_gpu_decoding.lm.packed import PackedArrays
from nemo_gpu_decoding.lm.records import CACHED_ARC

PLACEMENTS = ("auto", "device", "paged")
ResolvedPlacement = Literal["device", "paged"]

SLOT_BYTES = CACHED_ARC.itemsize  # of the cache
# `auto` keeps the larger of both free on a GPU, for the activations of an acoustic model and for the
# search, which takes some 5 to 20 MB per utterance of a batch
RESERVED_BYTES = 2 * 10**9
RESERVED_SHARE = 0.1  # of all its memory
# Largest share of free host memory to pin. Pinned memory is never swapped out; if too little other memory
# is left, the system kills processes.
PINNABLE_SHARE = 0.9


class Memory(NamedTuple):
    """Free memory in bytes."""

    device_free: int
    device_total: int
    host_free: int | None  # None: unknown


class Footprint(NamedTuple):
    """Size of an LM in bytes."""

    tables: int  # states and labels
    arcs: int
    cache: int  # if it is paged

    @property
    def on_device(self) -> int:
        """On the GPU with placement device."""
        return self.tables + self.arcs

    @property
    def paged(self) -> int:
        """On the GPU with placement paged."""
        return self.tables + self.cache


def free_memory(device: torch.device) -> Memory:
    """The free memory that the driver and the system report; an emulated device has the host's memory."""
    host = free_host_bytes()
    if device.type != "cuda":
        free = 1 << 62 if host is None else host
        return Memory(free, free, host)
    free, total = torch.cuda.mem_get_info(device)
    # reserve of torch's allocator, which it frees before it reports that memory is exhausted
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(free + idle, total, host)


def footprint(arrays: PackedArrays, cache_bytes: int) -> Footprint:
    """The sizes of an LM with a cache of at most `cache_bytes`, and at most one slot per arc."""
    tables = arrays.states.nbytes + arrays.labels.nbytes
    cache = cache_slots(arrays, cache_bytes) * SLOT_BYTES
    return Footprint(tables, arrays.arcs.nbytes, cache)


def cache_slots(arrays: PackedArrays, cache_bytes: int) -> int:
    """How many arcs a cache of `cache_bytes` holds, at least one."""
    return max(1, min(cache_bytes // SLOT_BYTES, int(arrays.states["arc_begin"][-1])))


def resolve_placement(
    placement: str, need: Footprint, free: Memory, name: str, device: torch.device
) -> ResolvedPlacement:
    """The placement of an LM, "auto" resolved.

    Args:
        placement: one of `PLACEMENTS`.
        need, free: the size of the LM, and the free memory.
        name, device: for messages.
    """
    if placement == "device":
        if need.on_device > free.device_free:
            raise ValueError(shortage("device", need, free, name, device))
        return "device"
    reserved = max(RESERVED_BYTES, int(RESERVED_SHARE * free.device_total))
    if placement == "auto" and need.on_device <= free.device_free - reserved:
        return "device"
    if need.paged <= free.device_free and _is_pinnable(need, free):
        return "paged"
    raise ValueError(shortage(placement, need, free, name, device))


def shortage(
    placement: str, need: Footprint, free: Memory, name: str, device: torch.device, reason: str | None = None
) -> str:
    """The message for too little memory: sizes that are needed and free, and a setting that fits.

    Args:
        reason: why an allocation failed although the memory seemed to be free.
    """
    cache = f"the cache's {_gb(need.cache)} included"
    paged = f"{_gb(need.paged)} on {device}, {cache}, and {_gb(need.arcs)} of pinned host memory"
    wanted = {"device": f"{_gb(need.on_device)} on {device}", "paged": paged}
    wanted["auto"] = f"{wanted['device']}, or, paged, {paged}"
    host = "an unknown amount" if free.host_free is None else _gb(free.host_free)
    text = (
        f"placement is {placement!r}: {name} needs {wanted[placement]}; free are "
        f"{_gb(free.device_free)} on {device} and {host} of host memory, of which "
        f"{PINNABLE_SHARE:.0%} may be pinned; {_advice(placement, need, free)}"
    )
    return f"{text} ({reason})" if reason else text


def _is_pinnable(need: Footprint, free: Memory) -> bool:
    return free.host_free is None or need.arcs <= PINNABLE_SHARE * free.host_free


def _advice(placement: str, need: Footprint, free: Memory) -> str:
    if placement == "paged" and need.on_device <= free.device_free:
        return "expected placement 'device'"
    cache_mb = (free.device_free - need.tables) // 10**6  # for a cache, MB
    if cache_mb >= 1 and _is_pinnable(need, free):
        if placement == "device":
            return f"expected placement 'paged', with cache_mb at most {cache_mb}"
        if need.paged > free.device_free:
            return f"expected cache_mb at most {cache_mb}"
    return "expected a smaller LM (prune-lm makes one), or more free memory"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
