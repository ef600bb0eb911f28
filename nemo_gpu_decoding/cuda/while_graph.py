"""Loops on the device: a CUDA graph with a WHILE node, which repeats work until a kernel ends it.

    graph = capture_while(device, body)
    graph.replay()

`body(handle)` launches the work, including one kernel that sets the conditional handle:
cudaGraphSetConditional(handle, more). The body runs at least once. It may contain torch's operators. They
allocate from a pool of the graph during capture; a replay allocates no memory. WHILE nodes need CUDA 12.4
and a driver for 12.6, like NeMo.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

OLDEST_DRIVER = 12060  # 12.6
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the stream does not wait for the default stream
ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: every replay begins with the condition's default value


class GraphError(RuntimeError):
    """A call of CUDA's graph interface failed."""


class Bindings:
    """`cuda.bindings.driver` with exceptions instead of statuses, and one interface for CUDA 12 and 13.

    `cuda.bindings.runtime` has a CUDA runtime of its own, which refuses drivers of an older major version.
    """

    def __init__(self, driver: Any = None, version: str | None = None) -> None:
        """The arguments replace `cuda.bindings.driver` and its version."""
        self.driver = driver or importlib.import_module("cuda.bindings.driver")
        version = version or importlib.import_module("cuda.bindings").__version__
        # from CUDA 13 on, functions have an argument for data on edges between nodes
        self.edge_data: tuple[None, ...] = (None,) if int(version.split(".")[0]) >= 13 else ()

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a function without its status."""
        status, *values = getattr(self.driver, name)(*arguments)
        if int(status) != 0:
            raise GraphError(f"{name} fails with {status}")
        return values[0] if len(values) == 1 else tuple(values)


def why_no_while_graphs(device: torch.device, bindings: Bindings | None = None) -> str | None:
    """None if WHILE nodes work on `device`, else the reason in one line. Never raises."""
    if device.type != "cuda":
        return f"CUDA graphs run on CUDA devices, not on '{device}'"
    try:
        bindings = bindings or Bindings()
        version = bindings.call("cuDriverGetVersion")
    except Exception as error:  # missing libraries raise errors of many types; none may stop a decoder
        return f"cuda-python does not answer ({type(error).__name__}: {error})"
    if version < OLDEST_DRIVER:
        return f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}, WHILE nodes need 12.6"
    return None


class CapturedGraph:
    """A captured graph, which replays on the current stream asynchronously."""

    def __init__(self, graph: torch.cuda.CUDAGraph, streams: list[torch.cuda.Stream], pool: Any = None) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._streams = streams  # on which it was captured
        self._pool = pool  # memory of a loop's tensors

    def replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def __del__(self) -> None:
        self._graph = self._pool = None  # before another graph can use the streams
        for stream in self._streams:
            _idle_streams.setdefault(stream.device.index, []).append(stream)


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_while(
    device: torch.device, body: Callable[[int], None], bindings: Bindings | None = None
) -> CapturedGraph:
    """Capture `body(handle)` in a loop that repeats while it sets the handle's condition.

    A capture does not run the kernels. Run the body once before, as for any graph.

    Raises:
        GraphError, RuntimeError: CUDA refuses; nothing has changed then.
    """
    bindings = bindings or Bindings()
    with torch.cuda.device(device):
        pool = torch.cuda.MemPool()  # belongs to the current device
    try:
        with _capturing(bindings, device) as (graph, stream):
            parent, _ = _captured(bindings, stream)
            context = bindings.call("cuCtxGetCurrent")
            handle = bindings.call("cuGraphConditionalHandleCreate", parent, context, 1, ASSIGN_DEFAULT)
            inner = _add_while_node(bindings, stream, handle, context)
            inside = _unused_stream(bindings)
            with _capturing_into(bindings, inner, inside), torch.cuda.use_mem_pool(pool, device):
                body(int(handle))
    except BaseException:
        _abandoned.append(pool)
        raise
    return CapturedGraph(graph, [stream, inside], pool)


# torch captures one graph at a time: it waits for the device before a capture, which fails during another one.
# Reentrant, because a collection of garbage within a capture may delete what waits for the device.
capture_lock = threading.RLock()
# Pools of failed captures. Deleting one ends the process if torch still has a capture in progress.
_abandoned: list[Any] = []
# Device index -> streams that no graph uses. torch has 32 streams in turn, but graphs must not share one.
# cuBLAS has a workspace per stream; torch from 2.12 on frees it with the first graph of the stream.
_idle_streams: dict[int, list[torch.cuda.Stream]] = {}


def _unused_stream(bindings: Bindings) -> torch.cuda.Stream:
    """A stream of the current device that no graph uses. Call with `capture_lock`."""
    device = torch.cuda.current_device()
    if idle := _idle_streams.get(device):
        return idle.pop()
    stream = bindings.call("cuStreamCreate", NON_BLOCKING)
    return torch.cuda.ExternalStream(int(stream), device=device)


@contextmanager
def _capturing(bindings: Bindings, device: torch.device) -> Iterator[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]]:
    """Capture the block into a new graph on a stream of its own; restores torch's state if that fails.

    torch.cuda.graph does not restore it. If CUDA refuses to end a capture, the capture's stream stays current and the
    generator of random numbers refuses to work. torch before 2.12 (its pull request 180395) also continues to allocate
    from the graph's pool. The stream of a failed capture is not used again.
    """
    with capture_lock, torch.cuda.device(device):  # graph and pool belong to the current device
        graph, stream, pool = torch.cuda.CUDAGraph(), _unused_stream(bindings), torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield graph, stream
        except BaseException:
            torch.cuda.set_stream(before)
            _end_allocation(torch.cuda.current_device(), pool)
            _free_generator(bindings)
            torch.cuda.set_stream(before)
            raise
        before.wait_stream(stream)


def _free_generator(bindings: Bindings) -> None:
    """Make the device's generator of random numbers usable after a failed capture.

    Only the end of a capture does, so this captures nothing. A new state of the generator would break the graphs
    that have registered the old one.
    """
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
        graph, stream = torch.cuda.CUDAGraph(), _unused_stream(bindings)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            pass
        CapturedGraph(graph, [stream])  # makes the stream available


def _end_allocation(device: int, pool: Any) -> None:
    """End the capture into this pool in the allocator, as newer versions of torch do."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _captured(bindings: Bindings, stream: torch.cuda.Stream) -> tuple[Any, list[Any]]:
    """The graph of a stream's capture, and the dependencies of its next node."""
    status, _, graph, dependencies = bindings.call("cuStreamGetCaptureInfo", stream.cuda_stream)[:4]
    active = bindings.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    if status != active:
        raise GraphError(f"the stream's capture is {status}, expected {active}")
    return graph, dependencies


def _add_while_node(bindings: Bindings, stream: torch.cuda.Stream, handle: Any, context: Any) -> Any:
    """Append a WHILE node to the stream's capture; returns the empty graph of its body."""
    driver = bindings.driver
    graph, dependencies = _captured(bindings, stream)
    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle = handle
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node.conditional.size = 1
    node.conditional.ctx = context
    count = len(dependencies)
    added = bindings.call("cuGraphAddNode", graph, dependencies, *bindings.edge_data, count, node)
    replace = int(driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    update = "cuStreamUpdateCaptureDependencies"
    bindings.call(update, stream.cuda_stream, [added], *bindings.edge_data, 1, replace)
    return node.conditional.phGraph_out[0]


@contextmanager
def _capturing_into(bindings: Bindings, graph: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the block on a stream into a given graph."""
    mode = bindings.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    bindings.call("cuStreamBeginCaptureToGraph", stream.cuda_stream, graph, None, None, 0, mode)
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        with suppress(GraphError):  # the error inside the block is the cause
            bindings.call("cuStreamEndCapture", stream.cuda_stream)
        raise
    bindings.call("cuStreamEndCapture", stream.cuda_stream)
