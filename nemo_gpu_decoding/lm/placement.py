"""Where a GPU finds an LM: whether everything fits into its memory, or arcs stay in the host's.

    device    states, labels, codebook and arcs in the GPU's memory
    paged     arcs in pinned host memory, two thirds of the LM; the rest and a cache of arcs on the GPU
    auto      device, if that leaves enough for the acoustic model and the search; else paged

What cannot fit is refused before anything is copied, with what is needed, what is free and what to set.
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
# `auto` leaves so much of a GPU's memory free, the larger of both: for the activations of an acoustic
# model and for the search, which takes some 5 to 20 MB per utterance of a batch
RESERVED_BYTES = 2 * 10**9
RESERVED_SHARE = 0.1  # of all its memory
# Of the host's free memory so much may be pinned: pinned memory is never swapped out, and a system
# without any other ends processes
PINNABLE_SHARE = 0.9


class Memory(NamedTuple):
    """Bytes that are free when an LM is to be placed."""

    device_free: int
    device_total: int
    host_free: int | None  # None: unknown


class Footprint(NamedTuple):
    """Bytes that an LM takes."""

    tables: int  # states, labels, codebook
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
    """What the driver and the system report. Kernels that run on the host share its memory."""
    host = free_host_bytes()
    if device.type != "cuda":
        free = 1 << 62 if host is None else host
        return Memory(free, free, host)
    free, total = torch.cuda.mem_get_info(device)
    # what torch's allocator holds in reserve, and gives back before it says that there is no more
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(free + idle, total, host)


def footprint(arrays: PackedArrays, cache_bytes: int) -> Footprint:
    """The sizes of an LM whose cache may take `cache_bytes`; it takes no more than all arcs need."""
    tables = arrays.states.nbytes + arrays.labels.nbytes + arrays.codebook.nbytes
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
        need, free: what the LM takes, and what there is.
        name, device: for messages.

    Raises:
        ValueError: it does not fit into the GPU's memory, or into the host's.
    """
    if placement == "device":
        if need.on_device > free.device_free:
            raise ValueError(shortage("device", need, free, name, device))
        return "device"
    reserved = max(RESERVED_BYTES, int(RESERVED_SHARE * free.device_total))
    if placement == "auto" and need.on_device <= free.device_free - reserved:
        return "device"
    if need.paged > free.device_free or not _is_pinnable(need, free):
        raise ValueError(shortage(placement, need, free, name, device))
    return "paged"


def shortage(
    placement: str, need: Footprint, free: Memory, name: str, device: torch.device, reason: str | None = None
) -> str:
    """Says that there is not enough memory: what is needed, what is free, what to set instead.

    Args:
        reason: why memory that seemed to be free could not be had.
    """
    wanted = {"device": _on_device(need, device), "paged": _paged(need, device)}
    wanted["auto"] = f"{wanted['device']}, or, paged, {wanted['paged']}"
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
    cache_mb = (free.device_free - need.tables) // 10**6  # for a cache, MB
    if cache_mb >= 1 and _is_pinnable(need, free):
        if placement == "device":
            return f"expected placement 'paged', with cache_mb at most {cache_mb}"
        if need.paged > free.device_free:
            return f"expected cache_mb at most {cache_mb}"
    if placement == "paged" and need.on_device <= free.device_free:
        return "expected placement 'device'"
    return "expected a smaller LM (pack-lm has layout=quantised, which takes less), or more free memory"


def _on_device(need: Footprint, device: torch.device) -> str:
    return f"{_gb(need.on_device)} on {device}"


def _paged(need: Footprint, device: torch.device) -> str:
    return (
        f"{_gb(need.paged)} on {device}, the cache's {_gb(need.cache)} included, and {_gb(need.arcs)} "
        "of pinned host memory"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
