"""Compile every CUDA kernel for every GPU generation and print its resources. Needs NVRTC, but no GPU.

    python scripts/check_kernels.py [FILE ...] [--arch 80 ...]
    python scripts/check_kernels.py --headers build/include

Fails if a kernel does not compile or spills registers: spilled values are in slow memory, and make a kernel many times
slower. A kernel file that is compiled with preprocessor macros lists them, one line per set:

    // variants: WIDTH=32 NAME=value
    // variants: WIDTH=64 arch>=80          checked for these architectures only

With --keep they are compiled only for this machine's GPU and stored in the cache of the decoders. With --headers
nothing is compiled: the headers that are generated from numpy records are written to a folder, for readers and
editors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.availability import install_advice
from nemo_gpu_decoding.cuda.compile import (
    Architecture,
    architecture,
    compiler_options,
    kernel_code,
    kernel_files,
    printed_header,
    read_source,
)
from nemo_gpu_decoding.plain_text import format_table

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

_VARIANT = re.compile(r"^//[ \t]*variants:(.*)$", re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Usage:
    """Resources of one function on one architecture."""

    function: str
    is_kernel: bool
    registers: int = 0  # per thread
    shared: int = 0  # bytes per block, without dynamic shared memory
    stack: int = 0  # bytes per thread
    spills: int = 0  # bytes per thread, stores and loads


def main(arguments: list[str] | None = None) -> int:
    """Check all kernels, print a table and the errors; returns 0 if there are none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", help="relative to the package; all kernels if none is named")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--keep", action="store_true", help="compile for this machine's GPU, into the cache")
    parser.add_argument("--nvrtc", metavar="12.4", help="fail unless this version of NVRTC compiles")
    parser.add_argument("--headers", type=Path, metavar="FOLDER", help="write printed headers there")
    options = parser.parse_args(arguments)
    if options.headers is not None:
        return write_headers(options.headers, options.files or kernel_files())
    if options.keep:
        return fill_cache(options.files or kernel_files())
    try:
        known = [arch for arch in options.arch if arch in nvrtc.architectures()]
    except (ImportError, RuntimeError) as error:  # the loader's errors are RuntimeErrors
        print(f"NVRTC can't be loaded: {install_advice()}\n{error}")
        return 1
    version = ".".join(map(str, nvrtc.version()))
    if options.nvrtc not in (None, version):
        print(f"NVRTC is {version}, expected {options.nvrtc}")
        return 1
    for arch in sorted(set(options.arch) - set(known)):
        print(f"not checked: NVRTC {version} does not know sm_{arch}")
    files = options.files or kernel_files()
    if not known or not files:
        print("nothing to check")
        return 1
    jobs = [(name, arch, macros) for name in files for arch in known for macros in variants(name, arch)]
    # processes, since NVRTC compiles one thing at a time in each; forked, since they only compile
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        results = pool.starmap(check, jobs, chunksize=1)
    return report(jobs, results)


def write_headers(folder: Path, files: list[str]) -> int:
    """Write the generated headers that the files include to a folder, and print their names."""
    printed = {}
    for file in files:
        for name, text in read_source(file).headers.items():
            if printed_header(name) == text:
                printed[name] = text
    for name, text in sorted(printed.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
    return 0


def fill_cache(files: list[str]) -> int:
    """Compile all variants for the first GPU of this machine, in parallel, and print the time."""
    import torch

    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to compile for")
        return 1
    arch = architecture(torch.cuda.get_device_capability(0))
    if arch is None:
        print(f"NVRTC {'.'.join(map(str, nvrtc.version()))} compiles for no GPU as old as this one")
        return 1
    jobs = [(name, arch, macros) for name in files for macros in variants(name, arch.number)]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:  # torch may have started CUDA
        sizes = [len(code) for code in pool.starmap(kernel_code, jobs, chunksize=1)]
    print(f"{len(jobs)} variants for {arch}, {sum(sizes)} bytes, in {time.monotonic() - began:.0f} s")
    return 0


def variants(name: str, arch: int) -> list[dict[str, int | str]]:
    """The sets of macros with which a file is used on an architecture; one empty set if it lists none."""
    lines = [line.split() for line in _VARIANT.findall(read_source(name).text)] or [[]]
    macros = ([word.split("=", 1) for word in line if not word.startswith("arch>=")] for line in lines)
    oldest = (max([int(word[6:]) for word in line if word.startswith("arch>=")], default=0) for line in lines)
    return [dict(own) for own, first in zip(macros, oldest, strict=True) if arch >= first]


def check(name: str, arch: int, macros: dict[str, int | str]) -> list[Usage] | str:
    """Compile one variant of a file; returns the resources of its functions, or the compiler's errors."""
    source = read_source(name)
    command = [*compiler_options(Architecture(arch), macros), "--ptxas-options=-v"]
    try:
        return usages(nvrtc.compile_program(source.name, source.text, source.headers, command).log)
    except nvrtc.CompileError as error:
        return str(error)


def usages(log: str) -> list[Usage]:
    """Parse the report of ptxas: kernels, and functions that are not inlined."""
    found: dict[str, Usage] = {}
    entries = set(_ENTRY.findall(log))
    current = None
    for line in log.splitlines():
        if match := _FUNCTION.search(line) or _ENTRY.search(line):
            name = match.group(1)
            current = found.setdefault(name, Usage(name, name in entries))
        if current is None:
            continue
        if match := _MEMORY.search(line):
            current.stack, stores, loads = map(int, match.groups())
            current.spills = stores + loads
        if current.is_kernel and (match := _REGISTERS.search(line)):
            current.registers = int(match.group(1))
            shared = _SHARED.search(line)
            current.shared = int(shared.group(1)) if shared else 0
    return list(found.values())


def report(jobs: list, results: list[list[Usage] | str]) -> int:
    """Print the table and the errors."""
    rows, faults = [], []
    for (name, arch, macros), result in zip(jobs, results, strict=True):
        if isinstance(result, str):
            faults.append(result)
            continue
        if not any(usage.is_kernel for usage in result):
            faults.append(f"{name}: no kernel in it for sm_{arch}")
        variant = " ".join(f"{key}={value}" for key, value in macros.items())
        label = f"{name} {variant}".strip()
        for usage in result:
            numbers = (usage.registers, usage.shared, usage.stack, usage.spills)
            rows.append([name, variant, usage.function, f"sm_{arch}", *map(str, numbers)])
            if usage.spills:
                faults.append(f"{label}: {usage.function} spills on sm_{arch}")
    header = ["file", "variant", "function", "arch", "registers", "static shared", "stack", "spills"]
    print(format_table(header, rows))
    print("\n".join(faults) or "all kernels compile, none spills")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
