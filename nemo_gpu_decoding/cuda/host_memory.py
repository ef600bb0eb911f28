"""How much memory of the host a process may still take: the system's, and its control groups'.

A process in a container sees the memory of the whole machine as free, takes it, and is killed. So the
limits of all control groups that the process belongs to are looked at, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# names of a control group's files, versions 2 and 1: limit, usage
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# pages of files, counted as usage, that the system drops when memory is asked for
_RECLAIMABLE = ("inactive_file", "active_file")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Bytes that can be taken without swapping or being killed; None if the system does not tell.

    Args:
        root: where `proc` and `sys` are.
    """
    limits = [_available(root), *(_left_of(folder) for folder in _memory_groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def lock_limit() -> int | None:
    """Bytes that the process may lock (`ulimit -l`); None if there is no limit.

    NVIDIA's driver for Linux does not ask for it when it pins memory, so this is for messages only.
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
    """The folders of the groups that limit this process: its own and all above it.

    A container may see its own group as the top; folders that are not there have no files to read.
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
    """What a control group may still take; None if it has no limit."""
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
