"""Launch the steps of a run, as one CUDA graph with a loop or as single kernels.

    loop    a WHILE node repeats a few steps until no utterance has a next one; the host launches once
    plain   every kernel is launched on its own; the host checks for active utterances every few steps

If the loop fails in a run, the run continues with plain launches. Later runs try the loop again until it has failed
`MOST_FAILURES` times, because the cause (another thread, a lack of memory) may pass. The first reason is logged. Steps
after the end have no effect.
"""

import logging
import operator
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from nemo_gpu_decoding.cuda.while_graph import CapturedGraph, capture_while, is_capturing, why_no_while_graphs
from nemo_gpu_decoding.search.transducer.cuda_workspace import RunWorkspace
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

logger = logging.getLogger("nemo_gpu_decoding")

LOOP, PLAIN = "loop", "plain"
STEPS_PER_ROUND = 4  # of a loop; each round has a fixed cost, and steps after the end cost their launches
STEPS_PER_LOOK = 8
MOST_GRAPHS = 2  # per workspace
MOST_FAILURES = 3  # of the loop, before later runs begin plainly


class GraphStep(Protocol):
    """The step that a run of the search repeats."""

    @property
    def key(self) -> Hashable:
        """Return values that a captured step depends on, besides the workspace."""
        ...

    def load(self, *, in_loop: bool) -> None:
        """Load the kernels without a change to anything that a step reads."""

    def run(self, *, in_loop: bool = False, handle: int | None = None) -> None:
        """Queue a step. With `in_loop`, it tells the WHILE node of `handle` whether any utterance has a next one."""

    def look(self) -> bytes | None:
        """Wait for the device. Return None if no utterance has a next step, else a value that a step changes."""
        ...


class Conditions(NamedTuple):
    """The networks and settings that a graph depends on, besides the step."""

    weights: tuple[tuple[int, int], ...]  # addresses and version counters: a graph has tables computed from weights
    modules: tuple[nn.Module, ...]
    arithmetic: tuple[Hashable, ...]


class GraphRunner:
    """An object that runs steps until no utterance has a next one.

    Attributes:
        allowed: whether CUDA graphs may be used.
        mode: "loop" or "plain" at the end of the last run; None before the first run.
    """

    def __init__(self, networks: TransducerNetworks, *, allowed: bool) -> None:
        self._networks = networks
        self.allowed = allowed
        self.mode: str | None = None
        self.first_mode: str | None = None  # the mode that a run begins with; found by the first run
        self._failures = 0  # of the loop
        self._parts: _Parts | None = None  # as of the last run

    def run(self, step: GraphStep, work: RunWorkspace, known: Conditions | None = None) -> None:
        """Run at least one step on the workspace's device and torch's current stream; `known` is from `conditions`."""
        device = work.shape.device
        if self.first_mode is None and self.allowed:
            why_not = why_no_while_graphs(device)
            self.first_mode = PLAIN if why_not else LOOP
            if why_not and device.type == "cuda":
                logger.info("no CUDA graphs: %s", why_not)
        mode = self.first_mode if self.first_mode and self.allowed else PLAIN
        known = known or self.conditions()
        before: bytes | None = None
        now: bytes | None = b""
        while now is not None:
            if mode == PLAIN:
                # on the CPU a look costs nothing
                for _ in range(1 if device.type == "cpu" else STEPS_PER_LOOK):
                    step.run()
            elif (graph := self._graph(step, work, known)) is None:
                mode = PLAIN
                continue
            else:
                graph.replay()
            before, now = now, step.look()
            if mode != PLAIN and now == before:
                work.graphs.clear()
                self._fail("a replay changes nothing")
                mode = PLAIN
        self.mode = mode

    def conditions(self) -> Conditions:
        """Return the networks and settings at present."""
        parts = self._parts
        if parts is None or not parts.are_same():
            self._parts = parts = _Parts(self._networks)
        return Conditions(parts.versions(), tuple(parts.modules), _arithmetic())

    def _graph(self, step: GraphStep, work: RunWorkspace, known: Conditions) -> CapturedGraph | None:
        """Return the graph of this step, which is captured if it is new, or None if the capture failed."""
        key = step.key, known
        if key in work.graphs:
            return work.graphs[key]
        if not known.weights:
            self._fail("the networks have no visible weights, so changes cannot be detected")
            return None
        with _casts_in_place():
            try:
                step.load(in_loop=True)
            except Exception as error:  # a driver may refuse kernels that set a condition
                self._fail(error)
                return None
            step.run(in_loop=True)  # libraries allocate their workspaces before the capture
            try:
                graph = capture_while(work.shape.device, partial(_round_of_steps, step))
            except Exception as error:  # CUDA's libraries raise many types; plain launches need none of them
                self._fail(error)
                return None
        while len(work.graphs) >= MOST_GRAPHS:
            del work.graphs[next(iter(work.graphs))]
        work.graphs[key] = graph
        return graph

    def _fail(self, reason: Exception | str) -> None:
        """Count a failure and log the first one; threads may call this at once."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}".split("\n", 1)[0]
        self._failures += 1
        if self._failures == 1:
            logger.warning("CUDA graphs do not work here, going on without: %s", text)
        if self._failures >= MOST_FAILURES:
            self.first_mode = PLAIN


def check_not_capturing(device: torch.device) -> None:
    """Raise a ValueError if torch's current stream is captured: a search waits for the device and ends a capture."""
    if is_capturing(device):
        raise ValueError("a transducer can't be decoded while a CUDA graph is captured, expected a call outside of it")


def _round_of_steps(step: GraphStep, handle: int) -> None:
    """Run a few steps, which are the body of the loop."""
    for _ in range(STEPS_PER_ROUND - 1):
        step.run(in_loop=True)
    step.run(in_loop=True, handle=handle)


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
    """Return the settings that, besides the operands, decide which kernels torch uses for matrix products."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    backends = matmul, getattr(cudnn, "rnn", cudnn)
    tf32 = [b.fp32_precision if hasattr(b, "fp32_precision") else b.allow_tf32 for b in backends]  # torch < 2.9
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return autocast, *tf32, *sums


class _Parts:
    """The modules and tensors that networks have, and whether they are still the same ones."""

    def __init__(self, networks: object) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.tensors: list[torch.Tensor] = []
        self._views: list[Collection[Any]] = []  # views of dictionaries show their present values
        self._look_through(vars(networks).values())
        self._seen = list(chain.from_iterable(self._views))

    def _look_through(self, values: Collection[Any]) -> None:
        self._views.append(values)
        for value in values:
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, nn.Module) and value not in self.modules:
                self.modules[value] = None
                for members in (value._parameters, value._buffers, value._modules):
                    self._look_through(members.values())
            elif isinstance(value, (list, tuple)):
                self._look_through(value)

    def are_same(self) -> bool:
        if sum(map(len, self._views)) != len(self._seen):
            return False
        return all(map(operator.is_, chain.from_iterable(self._views), self._seen))

    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return addresses and version counters of the tensors."""
        return tuple((tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in self.tensors)
