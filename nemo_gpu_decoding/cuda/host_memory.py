"""Find the free host memory of a process, within the limits of its control groups.

In a container, the system reports the free memory of the whole machine, but kills a process that exceeds
the container's limit. This module therefore also reads the limits of the process's control groups.
"""

from __future__ import annotations

import mmap
import re
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from nemo_gpu_decoding.cuda.driver import device_attribute

ROOT = Path("/")
# names of a control group's files, versions 2 and 1: limit, usage
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# pages of files, which count as usage but are dropped when memory is needed
_RECLAIMABLE = ("inactive_file", "active_file")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes that this process can allocate without swapping or being killed, or None if unknown.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    limits = [_available(root), *(_left_of(folder) for folder in _memory_groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def _available(root: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s*(\d+)", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the existing folders of the control groups that limit this process: its own and all parents."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.lstrip("/")
            yield own
            yield from (folder for folder in own.parents if folder == top or top in folder.parents)


def _left_of(group: Path) -> int | None:
    """Return the bytes left in a control group, or None if it has no limit."""
    for limit_file, usage_file in _FILES:
        limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
        if limit.isdigit() and usage.isdigit():
            counts = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            reclaimable = sum(int(counts.get(name, 0)) for name in _RECLAIMABLE)
            return max(0, int(limit) - int(usage) + reclaimable)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


HUGE_PAGE = 1 << 21  # bytes; fewer and larger pages make pinning and the GPU's reads faster

# cudaHostRegister's flags: usable from all devices; has an address on the device
_PORTABLE, _MAPPED = 1, 2


class PinningError(RuntimeError):
    """An error: host memory cannot be allocated, or CUDA cannot pin it."""


class HostTable:
    """Bytes in host memory that are pinned on request, for parameters declared as `Tensor(..., pinned=True)`.

    Memory stays pinned until the table and all tensors made from it are deleted. Before deleting the last of them, the
    caller must wait for all kernels that read the memory.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate `nbytes` zero bytes; the system reserves memory at the first write.

        Raises:
            ValueError: `nbytes` is negative.
            PinningError: the system does not have enough memory.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}, expected 0 or more")
        self._memory = _anonymous(max(1, -(-nbytes // HUGE_PAGE)) * HUGE_PAGE)
        self._array = np.frombuffer(self._memory, np.uint8, count=nbytes)
        self._unpin: weakref.finalize | None = None

    @property
    def bytes(self) -> torch.Tensor:
        """Return the content as uint8 tensor [nbytes] that shares this memory; view it as other types."""
        return torch.from_numpy(self._array)

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def pin(self, device: torch.device) -> HostTable:
        """Pin the memory and map it for all GPUs, unless it is pinned; `device` must be able to read it.

        Raises:
            PinningError: CUDA refuses, or kernels on `device` can't read it at the host's address.
        """
        if self.nbytes == 0:
            return self
        with torch.cuda.device(device):  # CUDA is initialised on the current device
            # not all systems let kernels read a table at its host address
            if not device_attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", device.index):
                raise PinningError(f"kernels on {device} can't read host memory at the host's address")
            if self._unpin is None:
                self._lock_pages()
        return self

    def _lock_pages(self) -> None:
        address = self._array.ctypes.data
        # a fork of the process would copy all pinned pages at once
        _advise(self._memory, "MADV_DONTFORK")
        status = torch.cuda.cudart().cudaHostRegister(address, self.nbytes, _PORTABLE | _MAPPED)
        if int(status) != 0:
            _advise(self._memory, "MADV_DOFORK")
            _forget_error()
            raise PinningError(
                f"cudaHostRegister can't pin {_gib(self.nbytes)} of host memory: {status}; "
                f"{_gib(free_host_bytes())} are free"
            )
        # tensors made from the array keep it alive and pinned
        self._unpin = weakref.finalize(self._array, lambda: torch.cuda.cudart().cudaHostUnregister(address))
        # at exit the driver unpins all memory, perhaps before this call
        self._unpin.atexit = False


def _anonymous(nbytes: int) -> mmap.mmap:
    """Allocate private anonymous memory: file pages cannot stay pinned, and shared pages are rarely huge."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise PinningError(
            f"can't get {_gib(nbytes)} of host memory ({error.strerror}), {_gib(free_host_bytes())} are free"
        ) from error
    _advise(memory, "MADV_HUGEPAGE")
    return memory


def _advise(memory: mmap.mmap, advice: str) -> None:
    """Tell the system how the memory will be used, if the system supports such hints."""
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel built without
            memory.madvise(getattr(mmap, advice))


def _gib(nbytes: int | None) -> str:
    return "an unknown amount" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


def _forget_error() -> None:
    """Clear the error of a failed call; otherwise the next launch reports it."""
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
