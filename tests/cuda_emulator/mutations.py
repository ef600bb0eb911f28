"""Kernels less one barrier: where the checker finds nothing wrong then, the barrier is idle."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nemo_gpu_decoding.cuda.compile import read_source
from nemo_gpu_decoding.cuda.launch import use_runtime
from tests.cuda_emulator.emulator import EmulatedRuntime, EmulatorError

_BARRIER = re.compile(r"__syncthreads\(\);")
_INCLUDE = re.compile(r'^#include "(search/[^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Barrier:
    kernel: str  # file that is compiled, relative to the package
    file: str  # where the barrier stands: the same, or a header of search/
    line: int

    def __str__(self) -> str:
        return f"{self.kernel} {self.file}:{self.line}"


def barriers_of(kernel: str, files: Iterable[str] | None = None) -> list[Barrier]:
    """The barriers of a kernel file and of its headers in search/; `files`: only those in these."""
    source = read_source(kernel)
    texts = {kernel: source.text, **source.headers}
    return [
        Barrier(kernel, file, text.count("\n", 0, match.start()) + 1)
        for file, text in sorted(texts.items())
        if (file.startswith("search/") if files is None else file in files)
        for match in _BARRIER.finditer(text)
    ]


def assert_needed(barrier: Barrier, use: Callable[[], None], folder: Path, cache: Path) -> None:
    """Without the barrier, the checker must find a fault in what `use` launches."""
    altered = folder / Path(barrier.kernel).name
    altered.write_text(_without(barrier))
    runtime = _AlteredRuntime(cache=cache, check=True, yield_percent=30, kernel=barrier.kernel, altered=altered)
    with use_runtime(runtime), pytest.raises(EmulatorError):
        use()


@dataclass
class _AlteredRuntime(EmulatedRuntime):
    """Runs an altered copy of one kernel file."""

    kernel: str = ""
    altered: Path = field(default_factory=Path)

    def load(self, source, device, defines=None):
        return super().load(str(self.altered) if source == self.kernel else source, device, defines)


def _without(barrier: Barrier) -> str:
    """The kernel in one file, headers of search/ in the places of their #includes, less the barrier."""
    source = read_source(barrier.kernel)

    def body(file: str, text: str) -> str:
        guard = re.sub(r"\W", "_", file).upper()
        lines = text.replace("#pragma once", "").split("\n")
        if file == barrier.file:
            line, count = _BARRIER.subn(";", lines[barrier.line - 1])
            assert count == 1, f"{barrier}: {count} barriers in this line"
            lines[barrier.line - 1] = line
        inlined = _INCLUDE.sub(include, "\n".join(lines))
        return f"#ifndef {guard}\n#define {guard}\n{inlined}\n#endif\n"

    def include(match: re.Match[str]) -> str:
        return body(match[1], source.headers[match[1]])

    return body(barrier.kernel, source.text)
