"""Launches of the steps of a run: one CUDA graph with a loop, a graph that is replayed, or single kernels.

    loop    a WHILE node repeats a few steps until no utterance has a next one; the host launches once
    chunks  a graph of some steps is replayed; between replays the host checks for active utterances
    plain   every kernel is launched on its own; the host checks for active utterances every few steps

The first mode that works is used; the reason for each fallback is logged once. Steps after the end have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from nemo_gpu_decoding.cuda.while_graph import capture_chunk, capture_while, why_no_while_graphs
from nemo_gpu_decoding.search.transducer.cuda_workspace import Workspace
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

logger = logging.getLogger("nemo_gpu_decoding")

LOOP, CHUNKS, PLAIN = "loop", "chunks", "plain"
STEPS_PER_ROUND = 4  # of a loop; each round has a fixed cost, and steps after the end cost their launches
STEPS_PER_CHUNK = 16
STEPS_PER_LOOK = 8
MOST_GRAPHS = 2  # per workspace


class GraphStep(Protocol):
    """The step that a run repeats."""

    @property
    def key(self) -> Hashable:
        """Values that a captured step depends on, besides the workspace."""
        ...

    def run(self, *, in_loop: bool = False, handle: int | None = None) -> None:
        """Queue a step. With `in_loop`, its kernels set the condition of the WHILE node of `handle`, if there is one:
        whether any utterance has a next step."""

    def count_active(self) -> None: ...


class GraphRunner:
    """Runs steps until no utterance has a next one. `allowed`: allow_cuda_graphs."""

    def __init__(self, networks: TransducerNetworks, *, allowed: bool) -> None:
        self._networks = networks
        self._allowed = allowed
        self.mode: str | None = None  # found by the first run

    def run(self, step: GraphStep, work: Workspace) -> None:
        """Run on the workspace's device and torch's current stream."""
        device = work.shape.device
        if self.mode is None:
            self.mode = self._best_mode(device)
        while self._num_active(step, work):
            mode = self.mode  # shared by threads: another thread may change it when a mode fails
            if mode == PLAIN:
                # on the CPU a check costs nothing
                for _ in range(1 if device.type == "cpu" else STEPS_PER_LOOK):
                    step.run()
            elif (graph := self._graph(mode, step, work)) is not None:
                before = work.beams.clone()
                graph.replay()
                if torch.equal(before, work.beams) and self._num_active(step, work):
                    work.graphs.clear()
                    self._fall_back(mode, "a replay changes nothing")

    def _best_mode(self, device: torch.device) -> str:
        if not self._allowed or device.type != "cuda":
            return PLAIN
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("a transducer can't be decoded while a CUDA graph is captured")
        why_not = why_no_while_graphs(device)
        if why_not is not None:
            logger.info("CUDA graphs in chunks instead of one with a loop: %s", why_not)
            return CHUNKS
        return LOOP

    def _num_active(self, step: GraphStep, work: Workspace) -> int:
        step.count_active()
        return int(work.active)

    def _graph(self, mode: str, step: GraphStep, work: Workspace) -> Any | None:
        """The graph of this step, captured if it is new; None if the mode failed."""
        weights = tuple(_versions_of_weights(self._networks))
        key = mode, step.key, weights, _arithmetic()
        if key in work.graphs:
            return work.graphs[key]
        if not weights:
            self._fall_back(mode, "the networks have no visible weights, so changes cannot be detected")
            return None
        # run a step before capturing, so that kernels are compiled and libraries allocate their workspaces
        with _casts_in_place():
            step.run(in_loop=mode == LOOP)
        try:
            torch.cuda.synchronize(work.shape.device)
            with _casts_in_place():
                graph = _captured(mode, step, work.shape.device)
        except Exception as error:  # CUDA's libraries raise many types; plain launches need none of them
            self._fall_back(mode, f"{type(error).__name__}: {error}".split("\n", 1)[0])
            return None
        while len(work.graphs) >= MOST_GRAPHS:
            del work.graphs[next(iter(work.graphs))]
        work.graphs[key] = graph
        return graph

    def _fall_back(self, mode: str, reason: str) -> None:
        if self.mode != mode:
            return  # another thread has logged it
        worse = CHUNKS if mode == LOOP else PLAIN
        logger.warning("CUDA graphs: '%s' does not work here, going on with '%s': %s", mode, worse, reason)
        self.mode = worse


def _captured(mode: str, step: GraphStep, device: torch.device) -> Any:
    """The graph of LOOP or of CHUNKS."""

    def round_of_steps(handle: int) -> None:
        for _ in range(STEPS_PER_ROUND - 1):
            step.run(in_loop=True)
        step.run(in_loop=True, handle=handle)

    def chunk() -> None:
        for _ in range(STEPS_PER_CHUNK):
            step.run()

    return capture_while(device, round_of_steps) if mode == LOOP else capture_chunk(device, chunk)


@contextmanager
def _casts_in_place() -> Iterator[None]:
    """Turn off autocast's cache of cast weights: a graph would read them after they are freed."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _arithmetic() -> tuple[Hashable, ...]:
    """Settings that torch's choice of kernels for products depends on, besides the operands."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    backends = matmul, getattr(cudnn, "rnn", cudnn)
    tf32 = [b.fp32_precision if hasattr(b, "fp32_precision") else b.allow_tf32 for b in backends]  # torch < 2.9
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return autocast, *tf32, *sums


def _versions_of_weights(networks: object) -> Iterator[tuple[int, int]]:
    """Addresses and version counters of the weights: a graph contains the addresses, and tables computed from them."""
    for tensor in _tensors(list(vars(networks).values())):
        yield tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _tensors(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(list(value))
