"""Measure the host time of a push of one frame (80 ms) on the CUDA path of every strategy, without a GPU.

    python scripts/push_time.py [STRATEGY ...]

Needs g++: the first pushes run the kernels in the emulator of `tests/cuda_emulator`. The launches of the measured
pushes do nothing, except those of transducers, whose time is subtracted. What remains is Python, torch's dispatch and
copies between buffers on the CPU, and the packing of the kernels' arguments. The driver's own costs (launch, copy,
wait) are missing. The steps of a transducer are subtracted, because a GPU runs them as one CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the emulator is test code

from nemo_gpu_decoding.cuda.launch import use_runtime  # noqa: E402
from nemo_gpu_decoding.cuda.signature import Signature, checked_arguments  # noqa: E402
from nemo_gpu_decoding.report import format_table  # noqa: E402
from nemo_gpu_decoding.search.transducer.cuda_graphs import GraphRunner  # noqa: E402
from tests.contract import subjects  # noqa: E402
from tests.cuda_emulator.emulator import EmulatedModule, EmulatedRuntime  # noqa: E402

BATCHES = (1, 32)
PUSHES, WARM_UP = 200, 10
STRATEGIES: dict[str, tuple[type[Any], str]] = {
    "flexctc_beam": (subjects.FlexCTC, "max"),
    "alsd_pp": (subjects.TransducerLSTM, "rnnt"),
    "aes_pp": (subjects.AESLSTM, "rnnt"),
    "cuda_wfst": (subjects.CudaWFSTSubject, "normal"),
    "paged_biglm": (subjects.PagedBigLMSubject, "normal"),
}


class Clock:
    """Measures the time outside of the blocks that it leaves out."""

    def __init__(self) -> None:
        self._left_out, self._depth = 0.0, 0

    def now(self) -> float:
        return perf_counter() - self._left_out

    @contextmanager
    def leave_out(self) -> Iterator[None]:
        begin, self._depth = perf_counter(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._left_out += perf_counter() - begin


class HostRuntime(EmulatedRuntime):
    """The emulator, with the lookups and checks of the real runtime; the clock leaves the kernels out."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.idle = clock, False  # idle: launches do nothing
        self._modules: dict[Any, HostModule] = {}

    def load(self, source: str, device: torch.device, defines: Mapping[str, int | str] | None = None) -> Any:
        key = source, tuple(sorted((defines or {}).items()))
        if key not in self._modules:
            self._modules[key] = HostModule(super().load(source, device, defines), self)
        return self._modules[key]


class HostModule:
    """The kernels of a file in the emulator, with the host work of `driver.CudaModule`."""

    def __init__(self, module: EmulatedModule, runtime: HostRuntime) -> None:
        self.device, self.find = module.device, module.find
        self._module, self._runtime = module, runtime

    def launch(self, signature: Signature, /, **given: Any) -> None:
        sizes = {name: given.pop(name) for name in ("grid", "block", "shared_bytes") if name in given}
        signature.packed(checked_arguments(signature, self.device, given))
        if self._runtime.idle:
            return
        with self._runtime.clock.leave_out():
            self._module.launch(signature, **sizes, **given)


def host_time(strategy: str, batch: int, pushes: int = PUSHES, warm_up: int = WARM_UP) -> float:
    """The median host time of a push of one frame for `batch` streams, in microseconds."""
    clock, times = Clock(), []
    runtime = HostRuntime(clock)
    kind, variant = STRATEGIES[strategy]
    subject = kind("cuda")
    run = GraphRunner.run

    def left_out(*given: Any) -> None:
        with clock.leave_out():
            run(*given)

    with ExitStack() as stack:
        stack.enter_context(use_runtime(runtime))
        stack.enter_context(patch.object(GraphRunner, "run", left_out))
        for module, sizes in subject.small_sizes().items():  # of blocks: a fiber per thread takes its time
            stack.enter_context(patch.multiple(module, **sizes))
        decoder = subject.fused(variant)
        inputs = subject.random_inputs(batch, pushes, seed=1)
        streams = decoder.open(batch, capacity=pushes, device="cpu")
        for chunk in inputs.split(1, dim=1):
            runtime.idle = len(times) >= warm_up and not issubclass(kind, subjects.Transducer)
            chunk, begin = chunk.contiguous(), clock.now()
            decoder.push(streams, chunk, [1] * batch)
            times.append(clock.now() - begin)
    return 1e6 * median(times[warm_up:])


def main(strategies: list[str]) -> None:
    header = ["strategy", *(f"B = {batch}, µs" for batch in BATCHES)]
    rows = [[name, *(round(host_time(name, batch)) for batch in BATCHES)] for name in strategies or STRATEGIES]
    print(format_table(header, rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
