"""The free host memory of a process, within the limits of its control groups.

In a container, the system reports the free memory of the whole machine, but kills a process that exceeds
the container's limit. So this module also reads the limits of all control groups of the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# names of a control group's files, versions 2 and 1: limit, usage
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# pages of files, which count as usage but are dropped when memory is needed
_RECLAIMABLE = ("inactive_file", "active_file")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Bytes that can be allocated without swapping or being killed; None if unknown.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    limits = [_available(root), *(_left_of(folder) for folder in _memory_groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def lock_limit() -> int | None:
    """Bytes that the process may lock (`ulimit -l`); None if there is no limit.

    For messages only: NVIDIA's driver for Linux ignores this limit when it pins memory.
    """
    try:
        resource = importlib.import_module("resource")
    except ModuleNotFoundError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _memory_groups(root: Path) -> Iterator[Path]:
    """The folders of the control groups that limit this process: its own and all parents.

    A container may see its own group as the root; missing folders are ignored.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = top / path.lstrip("/")
        yield own
        yield from (folder for folder in own.parents if folder == top or top in folder.parents)


def _left_of(group: Path) -> int | None:
    """The bytes left in a control group; None if it has no limit."""
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
