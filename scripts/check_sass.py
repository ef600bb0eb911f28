"""Read the machine code of every CUDA kernel and print what slows it down. Needs NVRTC and nvdisasm, but no GPU.

    python scripts/check_sass.py [FILE ...] [--arch 90 ...]

nvdisasm is a package, `pip install nvidia-cuda-nvdisasm`, or part of a CUDA toolkit. The columns are:

- registers: per thread.
- threads: per block, as the searches launch the kernel for 128 utterances with 4 hypotheses.
- blocks: resident blocks per multiprocessor, as registers and threads allow. Shared memory may lower it.
- waves: rounds of blocks of such a launch on the smallest data-centre GPU of the architecture.
- instructions, fp64: all, and those of the double precision unit in percent.
- loads: from global memory; `generic` of them have an address space that the compiler does not know.
- 32/64/128: bits per thread that these loads read.
- strong: accesses of memory that bypass the caches of a multiprocessor (STRONG.SYS).
- local: accesses of thread-local memory, which is as slow as global memory.

Fails if a kernel uses local memory or calls a function that is neither in it nor in the driver.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import Architecture, compiler_options, kernel_files, read_source
from nemo_gpu_decoding.plain_text import format_table
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine as flexctc_engine
from nemo_gpu_decoding.search.transducer import cuda_engine as transducer_engine
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.word_graph import kernel_abi
from scripts.check_kernels import variants


class Processor(NamedTuple):
    """Limits of one multiprocessor, and the number of multiprocessors of a GPU."""

    threads: int
    blocks: int
    count: int  # of T4, A100, A10, L4, H100, B200, RTX PRO 6000


PROCESSORS = {
    75: Processor(1024, 16, 40),
    80: Processor(2048, 32, 108),
    86: Processor(1536, 16, 72),
    89: Processor(1536, 24, 58),
    90: Processor(2048, 32, 132),
    100: Processor(2048, 32, 148),
    120: Processor(1536, 24, 188),
}
REGISTERS, REGISTER_UNIT = 65536, 256  # of a multiprocessor; a warp takes multiples of the unit
UTTERANCES, HYPOTHESES = 128, 4
# kernels with a block per hypothesis, or for fewer; all others have one per utterance
ROWS = ("expand", "move_rows", "join_rows", "lstm_layer", "lstm_output", "stateless")
IN_DRIVER = {"cudaGraphSetConditional"}  # the driver resolves it when it loads the code

_SECTION = re.compile(r"^\t\.section\t\.(text|nv\.info)\.(\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^ +/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*)[^;]*;", re.MULTILINE)
_FUNCTION = re.compile(r"^\t\.type\s+(\S+),@function", re.MULTILINE)
_DEFINITION = re.compile(r"^([\w$]+):", re.MULTILINE)
_REGISTERS = re.compile(r"EIATTR_REGCOUNT\n(?:.*\n){1,9}?.*index@\((\w+)\)\n.*\.word\t0x([0-9a-f]+)")


@dataclass
class Kernel:
    """Counts of one kernel's machine code, with the functions that it calls."""

    name: str
    registers: int = 0
    instructions: int = 0
    doubles: int = 0
    strong: int = 0
    local: int = 0
    generic: int = 0
    widths: Counter[int] = field(default_factory=Counter)  # bits -> loads from global memory

    def blocks(self, processor: Processor, threads: int) -> int:
        """Resident blocks per multiprocessor."""
        per_warp = ceil(self.registers * 32 / REGISTER_UNIT) * REGISTER_UNIT
        return min(REGISTERS // (per_warp * ceil(threads / 32)), processor.threads // threads, processor.blocks)

    def waves(self, processor: Processor, threads: int) -> int:
        """Rounds of blocks in which one launch runs."""
        launched = UTTERANCES * (HYPOTHESES if self.name in ROWS else 1)
        return ceil(launched / (self.blocks(processor, threads) * processor.count))


def threads_of(source: str, kernel: str, arch: int) -> int:
    """Threads of a block, as the search of this source file launches the kernel."""
    match source.split("/")[1:], kernel:
        case ["flexctc_beam", _], "advance":
            return flexctc_engine.THREADS
        case ["flexctc_beam", _], "finish":
            return flexctc_engine.FINISH_THREADS
        case ["word_graph", _], "advance" | "best_path" | "compact":
            return kernel_abi.THREADS
        case ["transducer", file], "expand":
            gpu = transducer_engine.Gpu(PROCESSORS[arch].count, divmod(arch, 10), nvrtc.version())
            return transducer_engine.expand_threads(UTTERANCES * HYPOTHESES, file == "aes.cu", gpu)
        case ["transducer", _], "merge" | "schedule":
            return records.MERGE_THREADS
        case ["transducer", _], _ if kernel in ROWS:
            return records.MOVE_THREADS
    raise ValueError(f"{kernel} of {source} is no kernel of a search, expected one that `threads_of` lists")


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the faults; returns 0 if there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="relative to the package; all kernels if none is named")
    parser.add_argument("--arch", type=int, nargs="+", default=(90,), choices=PROCESSORS)
    options = parser.parse_args(arguments)
    if nvdisasm() is None:
        print("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
        return 1
    files = options.files or kernel_files()
    jobs = [(name, arch, macros) for name in files for arch in options.arch for macros in variants(name, arch)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        listings = pool.starmap(listing_of, jobs, chunksize=1)
    return report(jobs, listings)


def nvdisasm() -> str | None:
    """The path of nvdisasm: of its package, or on PATH."""
    package = find_spec("nvidia")
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    found = [path for folder in folders for path in Path(folder).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def listing_of(name: str, arch: int, macros: dict[str, int | str]) -> str:
    """Compile one variant of a file; returns the listing of nvdisasm."""
    source = read_source(name)
    command = compiler_options(Architecture(arch), macros)
    code = nvrtc.compile_program(source.name, source.text, source.headers, command).code
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([str(nvdisasm()), file.name], check=True, capture_output=True, text=True).stdout


def counted(listing: str) -> list[Kernel]:
    """Count the instructions of each kernel of a listing of nvdisasm."""
    starts = [(match.start(), match[1], match[2]) for match in _SECTION.finditer(listing)]
    registers = {match[1]: int(match[2], 16) for match in _REGISTERS.finditer(listing)}
    kernels: dict[str, Kernel] = {}
    for (begin, kind, name), end in zip(starts, [start for start, _, _ in starts[1:]] + [len(listing)], strict=True):
        kernel = kernels.setdefault(name, Kernel(name, registers.get(name, 0)))
        if kind == "text":
            _count(kernel, listing[begin:end])
    return list(kernels.values())


def _count(kernel: Kernel, text: str) -> None:
    for name, *qualifiers in (match[1].split(".") for match in _INSTRUCTION.finditer(text)):
        kernel.instructions += name != "NOP"
        kernel.doubles += name in ("DADD", "DMUL", "DFMA", "DSETP")
        kernel.strong += "STRONG" in qualifiers and "SYS" in qualifiers
        kernel.local += name in ("LDL", "STL")
        if name in ("LD", "LDG"):
            kernel.widths[next((int(q) for q in qualifiers if q in ("64", "128")), 32)] += 1
            kernel.generic += name == "LD"


def unknown_functions(listing: str) -> set[str]:
    """Functions that the code calls and that are neither in it nor in the driver."""
    return set(_FUNCTION.findall(listing)) - set(_DEFINITION.findall(listing)) - IN_DRIVER


def report(jobs: list, listings: list[str]) -> int:
    """Print the table and the faults."""
    rows, faults = [], []
    for (name, arch, macros), listing in zip(jobs, listings, strict=True):
        variant = " ".join(f"{key}={value}" for key, value in macros.items())
        for function in unknown_functions(listing):
            faults.append(f"{name} {variant} on sm_{arch} calls {function}, which is not there")
        for kernel in counted(listing):
            processor = PROCESSORS[arch]
            widths = "/".join(str(kernel.widths[bits]) for bits in (32, 64, 128))
            threads = threads_of(name, kernel.name, arch)
            blocks, waves = kernel.blocks(processor, threads), kernel.waves(processor, threads)
            numbers = [kernel.registers, threads, blocks, waves, kernel.instructions]
            share = f"{100 * kernel.doubles / kernel.instructions:.1f}"
            memory = [kernel.widths.total(), kernel.generic, widths, kernel.strong, kernel.local]
            rows.append([name, variant, kernel.name, f"sm_{arch}", *map(str, [*numbers, share, *memory])])
            if kernel.local:
                faults.append(
                    f"{name} {variant}: {kernel.name} on sm_{arch} has {kernel.local} accesses of local memory"
                )
    header = ["file", "variant", "kernel", "arch", "registers", "threads", "blocks", "waves"]
    print(format_table([*header, "instructions", "fp64 %", "loads", "generic", "32/64/128", "strong", "local"], rows))
    print("\n".join(faults) or "no local memory, no unknown function")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
