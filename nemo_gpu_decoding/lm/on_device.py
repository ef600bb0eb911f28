"""Place packed LMs on GPUs: all arrays in device memory, or the arcs in host memory; one copy for all decoders.

    device    states, labels and arcs in the GPU's memory
    paged     arcs in pinned host memory, two thirds of the LM; the rest and a cache of arcs on the GPU
    auto      device, if that leaves enough for the acoustic model and the search; else paged

An LM that does not fit raises an error before the copy starts. The message has the sizes that are needed
and free, and a setting that fits.

A decoder creates a `PlacedLM` and keeps it. `PlacedLM.on` returns the device's copy for a kernel launch:

    large = PlacedLM(lm.arrays, config.placement, config.cache_mb * 10**6, lm.name)

    counters = Tensor(torch.int64, ("B", 3))
    ADVANCE = Signature("advance", {..., **lm_parameters("large"), "counts": counters})
    counts = torch.zeros((batch, 3), dtype=torch.int64, device=device)
    module.launch(ADVANCE, ..., **large.on(device).arguments("large"), counts=counts)

    extern "C" __global__ void advance(const AdvanceArgs args) {
      const PagedLM large = {
        {args.large_states, (const uint64*)args.large_labels,
         (const uint64*)(args.large_arcs ? args.large_arcs : args.large_host_arcs), args.large_label_bits,
         args.large_target_bits},
        (CachedArc*)args.large_cache, args.large_cache_slots};
      LookupCounters counters = {};
      LMStep step = lookup(large, state, label, counters);
      warp_add(counters, (uint64*)args.counts + 3 * blockIdx.x);

`paged.cuh` is the counterpart in kernels.
"""

import mmap
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from nemo_gpu_decoding.checks import FieldError, check_choice
from nemo_gpu_decoding.cuda.host_memory import HostTable, PinningError, free_host_bytes
from nemo_gpu_decoding.cuda.launch import Scalar, Tensor
from nemo_gpu_decoding.cuda.upload import synchronize_unless_capturing
from nemo_gpu_decoding.lm.packed import PackedArrays
from nemo_gpu_decoding.lm.records import CACHED_ARC, LM_STATE

PLACEMENTS = ("auto", "device", "paged")
Placement = Literal["device", "paged"]

SLOT_BYTES = CACHED_ARC.itemsize  # of the cache
# `auto` keeps the larger of both free on a GPU, for the activations of an acoustic model and for the
# search, which takes some 5 to 20 MB per utterance of a batch
RESERVED_BYTES = 2 * 10**9
RESERVED_SHARE = 0.1  # share of the device's memory
# Largest share of free host memory to pin. Pinned memory is never swapped out; if too little other memory
# is left, the system kills processes.
PINNABLE_SHARE = 0.9


class Memory(NamedTuple):
    """The free memory of a device and its host, and the total memory of the device, in bytes."""

    device_free: int
    device_total: int
    host_free: int | None  # None: unknown


class Footprint(NamedTuple):
    """The bytes that an LM takes."""

    tables: int  # states and labels
    arcs: int
    cache: int  # if it is paged

    @property
    def on_device(self) -> int:
        """Return the size on the GPU with placement device."""
        return self.tables + self.arcs

    @property
    def paged(self) -> int:
        """Return the size on the GPU with placement paged."""
        return self.tables + self.cache


def free_memory(device: torch.device) -> Memory:
    """Return the free memory that the driver and the system report; an emulated device has the host's memory."""
    host = free_host_bytes()
    if device.type != "cuda":
        free = 1 << 62 if host is None else host
        return Memory(free, free, host)
    free, total = torch.cuda.mem_get_info(device)
    # reserve of torch's allocator, which it frees before it reports that memory is exhausted
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(free + idle, total, host)


def footprint(arrays: PackedArrays, cache_bytes: int) -> Footprint:
    """Return the sizes of an LM with a cache of at most `cache_bytes`, and at most one slot per arc."""
    cache = cache_slots(arrays, cache_bytes) * SLOT_BYTES
    return Footprint(arrays.states.nbytes + arrays.labels.nbytes, arrays.arcs.nbytes, cache)


def cache_slots(arrays: PackedArrays, cache_bytes: int) -> int:
    """Return the number of arcs that a cache of `cache_bytes` bytes holds, at least one."""
    return max(1, min(cache_bytes // SLOT_BYTES, int(arrays.states["arc_begin"][-1])))


def resolve_placement(placement: str, need: Footprint, free: Memory, name: str, device: torch.device) -> Placement:
    """Return the placement of an LM; replace "auto" by device or paged.

    Args:
        placement: one of `PLACEMENTS`.
        need, free: the size of the LM, and the free memory.
        name, device: names of LM and device in messages.
    """
    reserved = 0 if placement == "device" else max(RESERVED_BYTES, int(RESERVED_SHARE * free.device_total))
    if placement != "paged" and need.on_device <= free.device_free - reserved:
        return "device"
    if placement != "device" and need.paged <= free.device_free and _is_pinnable(need, free):
        return "paged"
    raise ValueError(shortage(placement, need, free, name, device))


def shortage(placement: str, need: Footprint, free: Memory, name: str, device: torch.device) -> str:
    """Return the message for too little memory: sizes that are needed and free, and a setting that fits."""
    cache = f"the cache's {_gb(need.cache)} included"
    paged = f"{_gb(need.paged)} on {device}, {cache}, and {_gb(need.arcs)} of pinned host memory"
    wanted = {"device": f"{_gb(need.on_device)} on {device}", "paged": paged}
    wanted["auto"] = f"{wanted['device']}, or, paged, {paged}"
    host = "an unknown amount" if free.host_free is None else _gb(free.host_free)
    return (
        f"placement is {placement!r}: {name} needs {wanted[placement]}; free are "
        f"{_gb(free.device_free)} on {device} and {host} of host memory, of which "
        f"{PINNABLE_SHARE:.0%} may be pinned; {_advice(placement, need, free)}"
    )


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


SECTOR_BYTES = 32  # bytes of the smallest read over the bus
PIECE = 1 << 26  # bytes that are copied at a time
SHOWN_FROM = 10**9  # smaller copies take about a second and show no progress bar
_WORD = torch.int64  # holds the bits of uint64


def lm_parameters(name: str) -> dict[str, Tensor | Scalar]:
    """Return the kernel parameters of an LM, in order; all names begin with `name`."""
    parameters: dict[str, Tensor | Scalar] = {
        "states": Tensor(LM_STATE, (f"{name} states",)),
        "labels": Tensor(_WORD, (f"{name} label words",)),
        "arcs": Tensor(_WORD, (f"{name} arc words",), optional=True),
        "host_arcs": Tensor(_WORD, (f"{name} arc words",), optional=True, pinned=True),
        "cache": Tensor(_WORD, (f"{name} slots", SLOT_BYTES // 8), optional=True),
        "cache_slots": Scalar(np.uint32),
        **{bits: Scalar(np.int32) for bits in ("label_bits", "target_bits")},
    }
    return {f"{name}_{parameter}": kind for parameter, kind in parameters.items()}


@dataclass(frozen=True, eq=False)
class DeviceLM:
    """An LM in the form that kernels on `device` read, which is `PagedLM` in paged.cuh."""

    source: PackedArrays  # the arrays that were copied
    device: torch.device
    placement: Placement
    states: torch.Tensor  # [S + 1, 12] uint8
    labels: torch.Tensor  # packed, int64
    arcs: torch.Tensor | None  # packed, int64; None: in host memory
    host_table: HostTable | None  # paged: the arcs in pinned host memory, one copy for all devices
    cache: torch.Tensor | None  # [slots, 2] int64; kernels fill it

    @property
    def host_arcs(self) -> torch.Tensor | None:
        """Return the arcs in host memory, [packed] int64."""
        return None if self.host_table is None else self.host_table.bytes.view(_WORD)

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the arguments for `lm_parameters(name)`."""
        values = {
            **{part: getattr(self, part) for part in ("states", "labels", "arcs", "host_arcs", "cache")},
            "cache_slots": 0 if self.cache is None else len(self.cache),
            **{bits: getattr(self.source, bits) for bits in ("label_bits", "target_bits")},
        }
        return {f"{name}_{parameter}": value for parameter, value in values.items()}


class PlacedLM:
    """An LM with its placement on GPUs; keep it as long as decoders use it.

    All decoders of the process with the same arrays and options share one copy per device. The copy on the device is
    freed with the last `PlacedLM` that uses it.

    Args:
        arrays: arrays of a `PackedLM`, in memory or mapped.
        placement: auto, device or paged, see above.
        cache_bytes: largest size of the arc cache of a paged LM on each device, at least 16.
        name: name of the LM in messages.

    Raises:
        ValueError: placement or cache_bytes are out of range.
    """

    def __init__(self, arrays: PackedArrays, placement: str, cache_bytes: int, name: str = "the LM") -> None:
        check_choice("placement", placement, PLACEMENTS)
        if cache_bytes < SLOT_BYTES:
            raise FieldError("cache_bytes", cache_bytes, f"at least {SLOT_BYTES}")
        self._arrays, self._placement, self._cache_bytes, self._name = arrays, placement, cache_bytes, name
        self._copies: dict[torch.device, DeviceLM] = {}

    def on(self, device: torch.device) -> DeviceLM:
        """Return the LM's copy for kernels on `device`; the first call in the process creates the copy.

        Raises:
            ValueError: there is not enough memory; the message has the sizes and a setting that fits.
        """
        if device not in self._copies:
            with _lock:
                self._copies[device] = self._existing(device) or self._new(device)
        return self._copies[device]

    def _existing(self, device: torch.device) -> DeviceLM | None:
        """Return the copy that another decoder uses; "auto" accepts any placement, because sharing needs no memory."""
        accepted = ("device", "paged") if self._placement == "auto" else (self._placement,)
        copies = (_copies.get(self._key(device, placement)) for placement in accepted)
        return next((copy for copy in copies if copy is not None), None)

    def _new(self, device: torch.device) -> DeviceLM:
        need, free = footprint(self._arrays, self._cache_bytes), free_memory(device)
        if id(self._arrays.arcs) in _host_tables:
            free = free._replace(host_free=None)  # the pinned copy exists already
        placement = resolve_placement(self._placement, need, free, self._name, device)
        slots = cache_slots(self._arrays, self._cache_bytes)
        try:
            copy = _upload(self._arrays, device, placement, slots, self._name)
        except (torch.OutOfMemoryError, PinningError) as error:  # another process took the memory, or a limit applies
            raise ValueError(f"{shortage(placement, need, free, self._name, device)} ({error})") from error
        _copies[self._key(device, placement)] = copy
        return copy

    def _key(self, device: torch.device, placement: str) -> tuple[Any, ...]:
        slots = 0 if placement == "device" else cache_slots(self._arrays, self._cache_bytes)
        # arrays by identity: a copy keeps its source arrays alive, so their ids stay unique
        return (*map(id, self._arrays[:3]), device, placement, slots)


_lock = threading.Lock()
_copies: weakref.WeakValueDictionary[tuple[Any, ...], DeviceLM] = weakref.WeakValueDictionary()
# key: id of the source arcs, which a `DeviceLM` keeps alive together with the table
_host_tables: weakref.WeakValueDictionary[int, HostTable] = weakref.WeakValueDictionary()


def _upload(arrays: PackedArrays, device: torch.device, placement: Placement, slots: int, name: str) -> DeviceLM:
    cache = None
    if placement == "paged":
        cache = torch.zeros((slots, SLOT_BYTES // 8), dtype=_WORD, device=device)
    with copying_bar(sum(array.nbytes for array in arrays[:3]), f"{name} to {device}") as bar:

        def uploaded(array: np.ndarray) -> torch.Tensor:
            return copy_bytes(array, torch.empty(array.nbytes, dtype=torch.uint8, device=device), bar)

        copy = DeviceLM(
            source=arrays,
            device=device,
            placement=placement,
            states=uploaded(arrays.states).view(-1, LM_STATE.itemsize),
            labels=uploaded(arrays.labels).view(_WORD),
            arcs=uploaded(arrays.arcs).view(_WORD) if placement == "device" else None,
            host_table=_pinned(arrays.arcs, device, bar) if placement == "paged" else None,
            cache=cache,
        )
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # a kernel on any stream may read the copy
        # a kernel may still read the copy when its last reference is dropped
        weakref.finalize(copy, synchronize_unless_capturing, device).atexit = False
    return copy


def _pinned(array: np.ndarray, device: torch.device, bar: tqdm) -> HostTable:
    """Return the bytes of an array in pinned host memory, mapped for `device`; all devices share one copy."""
    table = _host_tables.get(id(array))
    if table is None:
        table = HostTable(array.nbytes)
        copy_bytes(array, table.bytes, bar)
    if device.type == "cuda":
        table.pin(device)
    _host_tables[id(array)] = table
    return table


def copying_bar(total: int, what: str) -> tqdm:
    """Return a progress bar over the bytes of an LM, on stderr if that is a terminal and the LM is large."""
    hidden = None if total >= SHOWN_FROM else True  # None: shown only if stderr is a terminal
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=hidden, file=sys.stderr)


def copy_bytes(source: np.ndarray, target: torch.Tensor, bar: tqdm) -> torch.Tensor:
    """Copy the bytes of an array piece by piece to `target`, a uint8 tensor [nbytes] on any device; return `target`.

    Pages of a mapped file are dropped after each piece. Otherwise the process would hold a second copy of the array.
    """
    content = source.reshape(-1).view(np.uint8)
    mapping = _mapped_file(source)
    for begin in range(0, len(content), PIECE):
        piece = content[begin : begin + PIECE]
        end = begin + len(piece)
        if target.device.type == "cpu":
            np.copyto(target.numpy()[begin:end], piece)
        else:
            target[begin:end].copy_(torch.from_numpy(piece.copy()))
        if mapping is not None:
            _give_back(piece, mapping)
        bar.update(len(piece))
    return target


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    """Return the read-only file mapping that contains an array, or None."""
    base: Any = array
    reads_file = False
    while isinstance(base, np.ndarray):
        reads_file |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    return base if reads_file and isinstance(base, mmap.mmap) else None


def _give_back(piece: np.ndarray, mapping: mmap.mmap) -> None:
    """Drop the whole pages of a piece from the process; later reads load them from the file again."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    begin = -(-(piece.ctypes.data - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.ctypes.data + piece.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
