"""The emulator as a runtime: kernels run on the CPU, each CUDA thread a fiber, and can be checked.

    with use_runtime(EmulatedRuntime(seed=1, check=True)):
        decoder(log_probs, lengths)

See README.md for what is emulated, what is found and what is not.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from nemo_gpu_decoding.cuda.signature import Signature, checked_arguments
from tests.cuda_emulator.build import PACKAGE, build, why_no_compiler

WARP = 32
THREADS_MAX = 1024
SHARED_BYTES_MAX = 227 * 1024  # per block on sm_90; SHARED_BYTES_MAX of engine.h
CPU = torch.device("cpu")

Order = Literal["random", "ascending", "descending"]
Sizes: TypeAlias = tuple[int, int, int]
Size: TypeAlias = int | Sizes
ORDERS: dict[Order, int] = {"random": 0, "ascending": 1, "descending": 2}


class Counts(NamedTuple):
    """What threads have done; `Counts` of engine.h."""

    instructions: int  # of PTX, those that read parameters not among them
    doubles: int  # of which in fp64
    shared_waits: int  # for what loads from shared memory and atomics on it bring; one for all that are on their way
    global_waits: int  # the same of global memory
    bytes_read: int  # of global memory, as threads ask for them
    bytes_written: int


class Launched(NamedTuple):
    source: str  # relative to the package
    defines: Mapping[str, int | str]
    kernel: str
    grid: int  # blocks
    block: int  # threads of each
    shared_bytes: int  # dynamic
    barriers: int  # of all blocks
    # the most that one thread did from barrier to barrier, added up over the barriers of a block, and over blocks:
    # that is what a block waits for
    slowest: Counts
    all: Counts  # of all threads


class EmulatorError(RuntimeError):
    """A kernel did what it may not do; the message names the kernel, thread and line."""


@dataclass
class EmulatedRuntime:
    """A `Runtime` for CPU tensors. It keeps modules, which it compiles at first use; options may change later."""

    # of the schedule and of the garbage in fresh shared memory; every launch takes the next one
    seed: int = 0
    # in which the threads of a block run between two barriers
    order: Order = "random"
    # find races and stray accesses; about a hundred times slower
    check: bool = False
    # run what NVRTC makes of the kernels, see ptx.py, in the place of what g++ makes of them
    by_nvrtc: bool = False
    # blocks that are under way at once
    resident: int = 4
    # how often a thread gives way at an atomic or (checker on) a memory access, in percent
    yield_percent: int = 10
    # most dynamic shared memory per block, in bytes: smaller to take kernels' fallbacks
    most_shared_bytes: int = SHARED_BYTES_MAX
    # where libraries are kept
    cache: Path = Path(tempfile.gettempdir()) / f"cuda_emulator-{os.getuid()}"
    name: str = field(default="emulator", init=False)
    launches: int = field(default=0, init=False)  # so far
    # what kernels have set the conditions of CUDA graphs to, by handle; any number is a handle
    conditions: dict[int, int] = field(default_factory=dict, init=False)
    # where launches are written down instead of being run, while something is captured; see graphs.py
    recording: list[Callable[[], None]] | None = field(default=None, init=False)
    switches: int = field(default=0, init=False)  # between fibers in the last launch
    # where launches are noted with what they took, if anybody wants to know; with `by_nvrtc`
    counted: list[Launched] | None = field(default=None, init=False)

    def why_not(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"the emulator runs kernels for CPU tensors, not on {device}"
        return why_no_compiler()

    def load(
        self, source: str, device: torch.device, defines: Mapping[str, int | str] | None = None
    ) -> EmulatedModule:
        """Compile `source` (relative to the package, or absolute) for the emulator."""
        if device.type != "cpu":
            raise ValueError(f"device: is {device}, expected cpu, where the emulator runs")
        options = {"check": self.check, "defines": defines or {}, "by_nvrtc": self.by_nvrtc}
        library = build(PACKAGE / source, Path(self.cache), **options)
        module = EmulatedModule(self, library, self.check)
        module.source, module.defines = source, dict(defines or {})
        return module

    def shared_bytes(self, device: torch.device) -> int:
        return self.most_shared_bytes

    def device_for(self, device: torch.device) -> torch.device:
        return CPU


class EmulatedModule:
    """The kernels of one file; a `Module`."""

    def __init__(self, runtime: EmulatedRuntime, library: Path, check: bool) -> None:
        self.device = CPU
        self.source, self.defines = str(library), dict[str, "int | str"]()  # what it was compiled from
        self._runtime = runtime
        self._library = library
        self._check = check
        self._code = ctypes.CDLL(str(library))
        self._code.emulator_message.restype = ctypes.c_char_p
        self._code.emulator_switches.restype = ctypes.c_uint64
        self._code.emulator_kernels.restype = ctypes.c_char_p
        self.kernels = tuple(self._code.emulator_kernels().decode().split())
        self._lock = _lock_of(library)

    def find(self, signature: Signature) -> None:
        """As `Module.find`: compares the signature with the C++ declaration."""
        self._check_parameters(signature)

    def launch(
        self, signature: Signature, /, *, grid: Size, block: Size, shared_bytes: int = 0, **arguments: Any
    ) -> None:
        """Run a kernel to its end; grids and blocks may have three dimensions here.

        Raises:
            ValueError: an argument, or the launch's own sizes, are not what is expected.
            EmulatorError: the kernel did what it may not do.
        """
        if self._runtime.recording is not None:
            sizes: dict[str, Any] = {"grid": grid, "block": block, "shared_bytes": shared_bytes}
            self._runtime.recording.append(partial(self.launch, signature, **sizes, **arguments))
            return
        values = checked_arguments(signature, self.device, arguments)
        grid, block = _three(grid), _three(block)
        self._check_sizes(signature, math.prod(grid), math.prod(block), shared_bytes)
        self._check_parameters(signature)
        _slots, addresses = signature.packed(values)
        pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        options, _memory = self._options(grid, block, shared_bytes, arguments)
        entry = getattr(self._code, f"emulator_launch_{signature.name}")
        with self._lock:  # the engine's state is global; another thread may launch too
            failed = entry(ctypes.byref(options), pointers)
            message = self._code.emulator_message().decode() if failed else ""
            self._runtime.switches = self._code.emulator_switches()
            self._runtime.conditions |= self._conditions()
            self._note_work(signature.name, grid, block, shared_bytes)
        _free_stacks_of_others(self._library, self._code)
        if failed:
            raise EmulatorError(f"kernel {signature.name}: {self._with_lines(message)}")

    def _note_work(self, kernel: str, grid: Sizes, block: Sizes, shared_bytes: int) -> None:
        if self._runtime.counted is not None:
            work = _Work()
            self._code.emulator_work(ctypes.byref(work))
            counts = (Counts(*(getattr(part, name) for name in Counts._fields)) for part in (work.slowest, work.all))
            size = math.prod(grid), math.prod(block), shared_bytes
            self._runtime.counted.append(Launched(self.source, self.defines, kernel, *size, work.barriers, *counts))

    def _conditions(self) -> dict[int, int]:
        """The conditions of CUDA graphs that the last launch has set."""
        found = (_Condition * self._code.emulator_conditions(None, 0))()
        self._code.emulator_conditions(found, len(found))
        return {condition.handle: condition.value for condition in found}

    def _check_sizes(self, signature: Signature, grid: int, block: int, shared_bytes: int) -> None:
        if signature.name not in self.kernels:
            names = ", ".join(self.kernels) or "none"
            raise ValueError(f"kernel {signature.name}: not in its source file, which has {names}")
        if grid < 1:
            raise ValueError(f"kernel {signature.name}: grid is {grid}, expected at least 1")
        if block % WARP or not WARP <= block <= THREADS_MAX:
            raise ValueError(
                f"kernel {signature.name}: block is {block}, expected a multiple of {WARP} up to {THREADS_MAX}"
            )
        most = min(self._runtime.most_shared_bytes, SHARED_BYTES_MAX)
        if not 0 <= shared_bytes <= most:
            raise ValueError(f"kernel {signature.name}: shared_bytes is {shared_bytes}, expected at most {most}")

    def _check_parameters(self, signature: Signature) -> None:
        """The signature says the same as the C++ declaration, as far as sizes tell."""
        declared = (ctypes.c_uint32 * 256)()
        getattr(self._code, f"emulator_parameters_{signature.name}")(declared)
        expected = list(declared)[: list(declared).index(0)]
        if [signature.struct.itemsize] != expected:
            raise ValueError(
                f"kernel {signature.name}: the signature's struct takes {signature.struct.itemsize} bytes, "
                f"the parameters of the C++ declaration {expected}"
            )

    def _options(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int, arguments: Mapping[str, Any]
    ) -> tuple[_Options, object]:
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        starts = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        sizes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], np.uint64)
        runtime = self._runtime
        runtime.launches += 1
        options = _Options(
            grid=grid,
            block=block,
            dynamic_bytes=shared_bytes,
            seed=runtime.seed + runtime.launches - 1,
            order=ORDERS[runtime.order],
            resident=runtime.resident,
            yield_percent=runtime.yield_percent,
            check=self._check,
            memory_ranges=len(tensors),
            memory_starts=starts.ctypes.data,
            memory_bytes=sizes.ctypes.data,
        )
        return options, (starts, sizes)

    def _with_lines(self, message: str) -> str:
        """Replace code addresses, "@0x7f..", by the lines of the source."""
        start = _start_of(self._library)

        def line(match: re.Match[str]) -> str:
            offset = int(match[1], 16) - start - 1  # a return address: the call is before it
            command = ["addr2line", "-e", str(self._library), hex(offset)]
            found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            found = re.sub(r" \(discriminator \d+\)$", "", found)  # nothing else: the path may have spaces
            return found if found and not found.startswith("?") else match[0]

        try:
            return re.sub(r"@0x([0-9a-f]+)", line, message)
        except OSError:  # no addr2line: the addresses will do
            return message


class _Options(ctypes.Structure):
    """`Options` of engine.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("yield_percent", ctypes.c_uint32),
        ("check", ctypes.c_uint32),
        ("memory_ranges", ctypes.c_uint32),
        ("memory_starts", ctypes.c_uint64),
        ("memory_bytes", ctypes.c_uint64),
    )


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in Counts._fields)


class _Work(ctypes.Structure):
    """`Work` of engine.h."""

    _fields_ = (("barriers", ctypes.c_uint64), ("slowest", _Counts), ("all", _Counts))


class _Condition(ctypes.Structure):
    """`Condition` of engine.h."""

    _fields_ = (("handle", ctypes.c_uint64), ("value", ctypes.c_uint32))


def _three(size: Size) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else size


_locks: dict[Path, threading.Lock] = {}


def _lock_of(library: Path) -> threading.Lock:
    """One per library, however many modules were made of it."""
    return _locks.setdefault(library, threading.Lock())


MOST_WITH_STACKS = 6  # libraries, those used last
_with_stacks: dict[Path, ctypes.CDLL] = {}  # by their last use
_with_stacks_lock = threading.Lock()


def _free_stacks_of_others(library: Path, code: ctypes.CDLL) -> None:
    """A library keeps the stacks of its threads between launches, unless many others were used since."""
    with _with_stacks_lock:
        _with_stacks.pop(library, None)
        _with_stacks[library] = code
        others = list(_with_stacks.items())[:-MOST_WITH_STACKS]
        for other, _ in others:
            del _with_stacks[other]
    for other, its_code in others:
        with _lock_of(other):
            its_code.emulator_free_stacks()


def _start_of(library: Path) -> int:
    """Where the library lies in this process."""
    path = os.path.realpath(library)
    with open("/proc/self/maps") as maps:
        for entry in maps:
            if entry.rstrip().endswith(path):
                return int(entry.split("-")[0], 16)
    return 0
