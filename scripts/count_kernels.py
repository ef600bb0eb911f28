"""Count instructions and memory accesses of every kernel per frame, without a GPU, and estimate its time on an H200.

    python scripts/count_kernels.py [STRATEGY ...]     print the tables of these strategies, or of all
    python scripts/count_kernels.py --utterances 32    of a batch of this size; 128 in the page
    python scripts/count_kernels.py --write            write them into docs/experiments/gpu_counts.md; two minutes
    python scripts/count_kernels.py --new-texts        share of hypotheses with a new text, on the shipped speech

Needs NVRTC and g++. NVRTC reports registers and static shared memory of its machine code for sm_90. All other numbers
are counted while the PTX runs in the emulator of `tests/cuda_emulator`, on one utterance. Nothing has run on a GPU;
`estimated` explains the estimates of times.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the emulator is test code

from benchmarks import ours, sources  # noqa: E402
from benchmarks.options import BenchOptions  # noqa: E402
from benchmarks.peers.base import Setting  # noqa: E402
from benchmarks.tasks import Task  # noqa: E402
from nemo_gpu_decoding import AESConfig, AESPlusPlus, ALSDConfig, ALSDPlusPlus  # noqa: E402
from nemo_gpu_decoding.cuda import nvrtc  # noqa: E402
from nemo_gpu_decoding.cuda.launch import use_runtime  # noqa: E402
from nemo_gpu_decoding.plain_text import format_table  # noqa: E402
from nemo_gpu_decoding.search.transducer import cuda_engine  # noqa: E402
from scripts.check_kernels import check  # noqa: E402
from tests.cuda_emulator.emulator import EmulatedRuntime, Launched  # noqa: E402

PAGE = REPOSITORY / "docs" / "experiments" / "gpu_counts.md"
ARCHITECTURE = 90

# Of an H200, and of its kernels, as far as documents and measurements of others tell. Cycles of one access or
# operation that a thread waits for. Of the waits for shared memory four overlap, beside those that PTX shows to
# overlap: most stand in loops, which machine code unrolls with the loads in front.
CLOCK_GHZ, PROCESSORS, BYTES_PER_US, FLOPS_PER_US = 1.98, 132, 4.8e6, 60e6
REGISTERS, SHARED_BYTES, THREADS = 65536, 227 * 1024, 2048  # of a multiprocessor
CYCLES = {"instructions": 2, "doubles": 16, "shared_waits": 30 / 4, "global_waits": 270}
BARRIER_CYCLES, NODE_US = 40, 2.0  # a launch, or a node of a CUDA graph
UTTERANCES = 128  # decoded together


class Run(NamedTuple):
    """One utterance, decoded."""

    launches: list[Launched]
    products: list[tuple[int, int]]  # flops and bytes of each matrix product that torch ran
    frames: int


class Row(NamedTuple):
    """A kernel, or all matrix products, per frame of one utterance; `us` of a batch of `UTTERANCES`."""

    kernel: str
    registers: int
    waves: int  # of blocks, of a batch of `UTTERANCES`
    shared: int  # bytes of a block, static and dynamic
    launches: float
    barriers: float  # of a block
    instructions: float  # of a block's slowest thread
    bytes: float  # of global memory, of all blocks
    waits: float  # of a block's slowest thread, for what it loads from global memory
    us: float


# ------------------------------------------------------------------------------------------ what is decoded

OPTIONS: dict[str, Any] = {"utterances": 1, "min_frames": 90, "max_frames": 110, "sentences": 3000}
# line of the table -> strategy, task of the benchmarks, beam (0: the second of those that suit the task), LM
CASES = {
    "flexctc_beam, peaked, K = 16": ("flexctc_beam", "peaked", 16, False),
    "flexctc_beam, peaked, K = 16, LM": ("flexctc_beam", "peaked", 16, True),
    "flexctc_beam, flat, K = 16, LM": ("flexctc_beam", "hard", 16, True),
    "alsd_pp, RNN-T, K = 4": ("alsd_pp", "peaked", 4, False),
    "aes_pp, RNN-T, K = 4": ("aes_pp", "peaked", 4, False),
    "cuda_wfst, peaked": ("cuda_wfst", "peaked", 0, True),
    "cuda_wfst, flat": ("cuda_wfst", "hard", 0, True),
    "paged_biglm, peaked": ("paged_biglm", "peaked", 0, True),
    "paged_biglm, flat": ("paged_biglm", "hard", 0, True),
}


def decode(case: str, runtime: EmulatedRuntime) -> Run:
    """Decode one utterance in the emulator and note all launches and products."""
    strategy, name, beam, with_lm = CASES[case]
    options = BenchOptions(strategy=strategy, tasks=[name], transducers=["rnnt"], **OPTIONS)
    (task,) = sources.make_tasks(options)
    decoder = decoder_of(options, task, Setting(beam or task.weights.graph_beams[1], with_lm, 0, 1))
    products, runtime.counted = Products(), []
    frames = min(int(task.lengths[0]), OPTIONS["max_frames"])
    # blocks are those of a launch for all utterances, of which this is one
    gpu = cuda_engine.Gpu(PROCESSORS / UTTERANCES, (9, 0), nvrtc.version())
    share = patch.object(cuda_engine, "gpu_of", return_value=gpu)
    with use_runtime(runtime), products, share:
        decoder.decode(task.inputs[:1, :frames], torch.tensor([frames]))
    return Run(runtime.counted, products.found, frames)


def decoder_of(options: BenchOptions, task: Task, setting: Setting) -> Any:
    """The decoder with kernels; networks stay on the CPU."""
    if task.transducer is None:
        return ours.OURS[options.strategy](replace(options, device="cuda"), task, setting).decoder
    if options.strategy == "alsd_pp":
        return ALSDPlusPlus(task.transducer.ours(), ALSDConfig(beam_size=setting.beam_size, backend="cuda"))
    return AESPlusPlus(task.transducer.ours(), AESConfig(beam_size=setting.beam_size, backend="cuda"))


class Products(TorchDispatchMode):
    """Notes the matrix products that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            (m, k), n = args[-2].shape, args[-1].shape[1]
            moved = args[-1].element_size() * (m * k + k * n + m * n)
            self.found.append((2 * m * k * n, moved))
        return result


# ------------------------------------------------------------------------------------------------ estimates


def rows_of(run: Run) -> Iterator[Row]:
    """One per kernel, and one for the products."""
    for name in dict.fromkeys(launched.kernel for launched in run.launches):
        launches = [launched for launched in run.launches if launched.kernel == name]
        first = launches[0]
        registers, static = compiled(first.source, name, dict(first.defines))
        shared = static + max(launched.shared_bytes for launched in launches)
        us = sum(estimated(launched, registers, shared) for launched in launches)
        waves = max(waves_of(launched, registers, shared) for launched in launches)
        sums = [
            len(launches),
            sum(launched.barriers / launched.grid for launched in launches),
            sum(launched.slowest.instructions / launched.grid for launched in launches),
            sum(launched.all.bytes_read + launched.all.bytes_written for launched in launches),
            sum(launched.slowest.global_waits / launched.grid for launched in launches),
            us,
        ]
        yield Row(name, registers, waves, shared, *(total / run.frames for total in sums))
    if run.products:
        us = sum(
            NODE_US + max(UTTERANCES * flops / FLOPS_PER_US, moved / BYTES_PER_US) for flops, moved in run.products
        )
        moved = sum(moved for _, moved in run.products)
        yield Row("products", 0, 0, 0, *(total / run.frames for total in (len(run.products), 0, 0, moved, 0, us)))


def estimated(launched: Launched, registers: int, shared: int) -> float:
    """Estimated microseconds of a launch for `UTTERANCES`, each with the counts of the measured one.

    The maximum of two times: the waits of a block's slowest thread, times the number of rounds of blocks on the
    multiprocessors; and the bytes of all blocks divided by the bandwidth.
    """
    cycles = sum(getattr(launched.slowest, name) * weight for name, weight in CYCLES.items())
    cycles = (cycles + BARRIER_CYCLES * launched.barriers) / launched.grid
    waited = cycles / (CLOCK_GHZ * 1000) * waves_of(launched, registers, shared)
    moved = UTTERANCES * (launched.all.bytes_read + launched.all.bytes_written) / BYTES_PER_US
    return NODE_US + max(waited, moved)


def waves_of(launched: Launched, registers: int, shared: int) -> int:
    """Rounds of blocks on the multiprocessors in which a launch for `UTTERANCES` runs."""
    at_once = min(
        THREADS // launched.block, REGISTERS // (registers * launched.block), SHARED_BYTES // (shared + 1024)
    )
    return ceil(launched.grid * UTTERANCES / (PROCESSORS * at_once))


_compiled: dict[tuple[Any, ...], dict[str, tuple[int, int]]] = {}


def compiled(source: str, kernel: str, defines: dict[str, int | str]) -> tuple[int, int]:
    """Registers of a thread and bytes of static shared memory."""
    key = source, *sorted(defines.items())
    if key not in _compiled:
        found = check(source, ARCHITECTURE, defines)
        if isinstance(found, str):
            raise RuntimeError(found)
        _compiled[key] = {usage.function: (usage.registers, usage.shared) for usage in found}
    return _compiled[key][kernel]


# ---------------------------------------------------------------------------------------------------- table

COUNTS = ["launches", "barriers", "instructions", "bytes", "waits", "µs"]
SUMMARY, HEADER = ["search", *COUNTS], ["search", "kernel", "registers", "waves", "shared", *COUNTS]


def kernel_lines(case: str, rows: list[Row]) -> list[list[str]]:
    """The lines of a case, one for each kernel; products have no registers."""
    return [[case, row.kernel, *(str(size) if size else "" for size in row[1:3]),
             str(row.shared) if row.registers else "", *map(shown, row[4:])] for row in rows]  # fmt: skip


def case_line(case: str, rows: list[Row]) -> list[str]:
    """All kernels of a case together."""
    return [case, *(shown(sum(row[i] for row in rows)) for i in range(4, len(Row._fields)))]


def shown(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def with_tables(text: str, *tables: list[list[str]]) -> str:
    """The page with these tables between its marks."""
    pages = ("\n".join(f"| {' | '.join(row)} |" for row in [t[0], ["---"] * len(t[0]), *t[1:]]) for t in tables)
    body, version = "\n\n".join(pages), ".".join(map(str, nvrtc.version()))
    mark = re.compile(r"(<!-- counts)[^>]*(-->\n).*?(<!-- end -->)", re.DOTALL)
    return mark.sub(lambda match: f"{match[1]}: NVRTC {version} {match[2]}\n{body}\n\n{match[3]}", text)


def new_texts(models: Iterable[str] = ("rnnt", "tdt"), beam_size: int = 6) -> list[tuple[str, str, str]]:
    """Models, strategies, and the share of hypotheses with a new text after a step, which the prediction network must
    compute. Measured on a batch of 16 utterances of the shipped test speech; needs NeMo."""
    from nemo_gpu_decoding.cli.dev_set import encode
    from nemo_gpu_decoding.manifest import read_manifest
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.presets import load_preset
    from nemo_gpu_decoding.search.transducer.cpu_networks import CompiledNetworks
    from nemo_gpu_decoding.search.transducer.engine import Predictions

    assets, found = REPOSITORY / "assets" / "self", []
    utterances, extend = read_manifest(assets / "speech" / "test.json")[:16], Predictions.extend
    for model, strategy in product(models, ("alsd_pp", "aes_pp")):
        head = Model.load(str(assets / "models" / f"self_hybrid_{model}.nemo"), device="cpu").head("rnnt")
        (batch,), preset = encode(head, utterances).batches, load_preset(str(assets / f"demo_{model}.yaml"))
        preset.strategy, preset.beam.beam_size = strategy, beam_size
        steps: list[tuple[int, int]] = []

        def counted(own: Predictions, networks: Any, pending: Any, rows: Any, steps: Any = steps) -> None:
            steps.append((int(pending.counts[rows].sum()), len(rows) * beam_size))
            extend(own, networks, pending, rows)

        uncompiled = patch.object(CompiledNetworks, "current", return_value=None)  # its calls can be counted
        with uncompiled, patch.object(Predictions, "extend", counted):
            head.search(preset).decode(batch.inputs, batch.lengths)
        computed, hypotheses = map(sum, zip(*steps, strict=True))
        found.append((model, strategy, f"{100 * computed / hypotheses:.0f} %"))
    return found


def main() -> int:
    global UTTERANCES
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("strategies", nargs="*", help="all if none is named")
    parser.add_argument("--utterances", type=int, default=UTTERANCES, help="decoded together (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/experiments/gpu_counts.md")
    parser.add_argument("--new-texts", action="store_true", help="count new texts of the shipped speech instead")
    options = parser.parse_args()
    if options.write and (options.strategies or options.utterances != UTTERANCES):
        parser.error(f"--write takes no strategies and {UTTERANCES} utterances: the page has the tables of all")
    UTTERANCES = options.utterances
    if options.new_texts:
        print(format_table(["model", "strategy", "new texts"], new_texts()))
        return 0
    cases = [case for case, (strategy, *_) in CASES.items() if strategy in (options.strategies or [strategy])]
    # one order of threads, so that counts are the same each time
    runtime = EmulatedRuntime(by_nvrtc=True, order="ascending")
    found = {case: list(rows_of(decode(case, runtime))) for case in cases}
    summary = [case_line(case, rows) for case, rows in found.items()]
    lines = [line for case, rows in found.items() for line in kernel_lines(case, rows)]
    print(format_table(SUMMARY, summary), format_table(HEADER, lines), sep="\n\n")
    if options.write:
        page = with_tables(PAGE.read_text(encoding="utf-8"), [SUMMARY, *summary], [HEADER, *lines])
        PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
