"""Measure the host time of a push of one frame (80 ms) on the CUDA path of every strategy, without a GPU.

    python scripts/push_time.py [STRATEGY ...]

Needs g++: the first pushes run the kernels in the emulator of `tests/cuda_emulator`. The launches of the measured
pushes do nothing. What remains is Python, torch's dispatch and copies between buffers on the CPU, and the packing of
the kernels' arguments. The driver's own costs (launch, copy, wait) are missing. The steps of a transducer are one CUDA
graph, whose replay does nothing but to advance the hypotheses to the last frame. Networks are in evaluation mode, and
torch multiplies frames as on a GPU, without oneDNN. Where CUDA graphs do not work, the host launches every step; the
last rows are the time of one step.
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
from nemo_gpu_decoding.plain_text import format_table  # noqa: E402
from nemo_gpu_decoding.search.transducer import cuda_graphs, networks  # noqa: E402
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder  # noqa: E402
from nemo_gpu_decoding.search.transducer.records import HYPOTHESIS, IDLE, STREAM_COUNTERS, STREAM_PARAMS  # noqa: E402
from tests.contract import subjects  # noqa: E402
from tests.cuda_emulator.emulator import EmulatedModule, EmulatedRuntime  # noqa: E402
from tests.cuda_emulator.graphs import CapturedWhile, captured_while  # noqa: E402

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


class HostGraph:
    """The steps of a transducer; while the runtime is idle, every hypothesis takes a token and all frames."""

    def __init__(self, graph: CapturedWhile, runtime: HostRuntime, work: Any) -> None:
        self._graph, self._runtime = graph, runtime
        self._beams = work.beams.numpy().view(HYPOTHESIS)[..., 0]
        self._counters = work.counters.numpy().view(STREAM_COUNTERS)[..., 0]
        self._streams = work.streams.numpy().view(STREAM_PARAMS)[..., 0]

    def replay(self) -> None:
        with self._runtime.clock.leave_out():
            if not self._runtime.idle:
                self._graph.replay()
                return
            self._beams["frame"] = self._streams["end"][:, None]
            self._counters["node_count"] += 1
            self._counters["activity"] = IDLE


def host_time(strategy: str, batch: int, pushes: int = PUSHES, warm_up: int = WARM_UP) -> tuple[float, float | None]:
    """Medians in microseconds: a push of one frame for `batch` streams, and a step of a transducer without a graph."""
    clock, times, steps = Clock(), [], []
    runtime = HostRuntime(clock)
    kind, variant = STRATEGIES[strategy]
    subject = kind("cuda")

    def captured(device: torch.device, body: Any) -> HostGraph:
        (step,) = body.args
        graph = captured_while(device, lambda handle: step.run(in_loop=True, handle=handle))
        return HostGraph(graph, runtime, step.work)

    with ExitStack() as stack:
        stack.enter_context(use_runtime(runtime))
        stack.enter_context(patch.object(cuda_graphs, "why_no_while_graphs", lambda device: None))
        stack.enter_context(patch.object(cuda_graphs, "capture_while", captured))
        stack.enter_context(patch.object(networks, "_can_pack", lambda *given: False))
        stack.enter_context(patch.object(networks, "whole_blocks", lambda rows: rows))
        for module, sizes in subject.small_sizes().items():  # of blocks: a fiber per thread takes its time
            stack.enter_context(patch.multiple(module, **sizes))
        decoder = subject.fused(variant)
        if isinstance(decoder, TransducerDecoder):
            decoder.networks.output.eval()
        inputs = subject.random_inputs(batch, pushes, seed=1)
        streams = decoder.open(batch, capacity=pushes, device="cpu")
        for chunk in inputs.split(1, dim=1):
            runtime.idle = len(times) >= warm_up
            chunk, begin = chunk.contiguous(), clock.now()
            decoder.push(streams, chunk, [1] * batch)
            times.append(clock.now() - begin)
        if isinstance(decoder, TransducerDecoder):
            _, step = streams.engine._step
            for _ in range(pushes):
                begin = clock.now()
                with torch.inference_mode():
                    step.run()
                steps.append(clock.now() - begin)
    return 1e6 * median(times[warm_up:]), 1e6 * median(steps) if steps else None


def main(strategies: list[str]) -> None:
    header = ["strategy", *(f"B = {batch}, µs" for batch in BATCHES)]
    rows, steps = [], []
    for name in strategies or STRATEGIES:
        found = [host_time(name, batch) for batch in BATCHES]
        rows.append([name, *(round(push) for push, _ in found)])
        if found[0][1] is not None:
            steps.append([f"{name}, a step", *(round(step) for _, step in found)])
    print(format_table(header, rows + steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
