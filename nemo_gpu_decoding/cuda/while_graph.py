"""A loop on the device: a CUDA graph whose WHILE node repeats captured work until a kernel says stop.

    graph = capture_while(device, body)
    graph.replay()

`body(handle)` launches the work, and in it one kernel that sets the conditional handle:
cudaGraphSetConditional(handle, more). The body runs once at least. It may hold torch's operators: what
they allocate comes from a pool that belongs to the graph and is settled while capturing: a replay
allocates nothing.
WHILE nodes need CUDA 12.4 and a driver for 12.6, as NeMo asks for too.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

OLDEST_DRIVER = 12060  # 12.6
ASSIGN_DEFAULT = 1  # cudaGraphCondAssignDefault: every replay begins with the condition's default value


class GraphError(RuntimeError):
    """A call of CUDA's graph interface failed."""


class Bindings:
    """`cuda.bindings` with exceptions instead of statuses, and one face for CUDA 12 and 13."""

    def __init__(self, runtime: Any = None, driver: Any = None, version: str | None = None) -> None:
        """The arguments stand in for `cuda.bindings.runtime`, `.driver` and their version."""
        self.runtime = runtime or importlib.import_module("cuda.bindings.runtime")
        self.driver = driver or importlib.import_module("cuda.bindings.driver")
        version = version or importlib.import_module("cuda.bindings").__version__
        # from CUDA 13 on, edges between nodes may carry data, and functions have an argument for it
        self.edge_data: tuple[None, ...] = (None,) if int(version.split(".")[0]) >= 13 else ()

    def call(self, module: Any, name: str, *arguments: Any) -> Any:
        """The result of a function without its status.

        Raises:
            GraphError: names the function and the status.
        """
        status, *values = getattr(module, name)(*arguments)
        if int(status) != 0:
            raise GraphError(f"{name} fails with {status}")
        return values[0] if len(values) == 1 else tuple(values)


def why_no_while_graphs(device: torch.device, bindings: Bindings | None = None) -> str | None:
    """None if WHILE nodes work on `device`, else the reason in one line. Never raises."""
    if device.type != "cuda":
        return f"CUDA graphs run on CUDA devices, not on '{device}'"
    try:
        bindings = bindings or Bindings()
        version = bindings.call(bindings.driver, "cuDriverGetVersion")
    except Exception as error:  # missing libraries raise many types; none may stop a decoder
        return f"cuda-python does not answer ({type(error).__name__}: {error})"
    if version < OLDEST_DRIVER:
        return f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}, WHILE nodes need 12.6"
    return None


def capture_chunk(device: torch.device, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph without a loop of its own: `body`, replayed on the current stream as often as the host says.

    Run the body once before, as for any graph.

    Raises:
        RuntimeError: CUDA refuses; nothing has changed then.
    """
    with _capturing(device) as (graph, _):
        body()
    return graph


class WhileGraph:
    """A captured loop. Replays on the current stream; the host does not wait."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self._graph = graph
        self._pool = pool  # holds what the body computes with

    def replay(self) -> None:
        self._graph.replay()


def capture_while(device: torch.device, body: Callable[[int], None], bindings: Bindings | None = None) -> WhileGraph:
    """Capture `body(handle)`, repeated as long as it sets the handle's condition.

    Nothing runs yet; run the body once before, as for any graph.

    Raises:
        GraphError, RuntimeError: CUDA refuses; nothing has changed then.
    """
    bindings = bindings or Bindings()
    with torch.cuda.device(device):
        pool = torch.cuda.MemPool()  # belongs to the current device
    try:
        with _capturing(device) as (graph, stream):
            parent, _ = _captured(bindings, stream)
            create = "cudaGraphConditionalHandleCreate"
            handle = bindings.call(bindings.runtime, create, parent, 1, ASSIGN_DEFAULT)
            inner = _add_while_node(bindings, stream, handle)
            with _capturing_into(bindings, inner, device), torch.cuda.use_mem_pool(pool, device):
                body(_number(handle))
    except BaseException:
        _abandoned.append(pool)
        raise
    return WhileGraph(graph, pool)


# torch captures one graph at a time: before each it frees memory, which it refuses while another goes on.
_capture_lock = threading.Lock()
# Pools of captures that failed. To destroy one ends the process if torch believes that a capture goes on.
_abandoned: list[Any] = []


@contextmanager
def _capturing(device: torch.device) -> Iterator[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]]:
    """Capture what happens inside into a new graph on a new stream; torch is as it was if that fails.

    torch.cuda.graph does not see to it: where CUDA refuses to end a capture, the capture's stream stays the
    current one, and torch before 2.12 (its pull request 180395) goes on allocating for the graph.
    """
    with _capture_lock, torch.cuda.device(device):  # graph and pool belong to the current device
        graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield graph, stream
        except BaseException:
            torch.cuda.set_stream(before)
            _end_allocation(torch.cuda.current_device(), pool)
            raise
        before.wait_stream(stream)


def _end_allocation(device: int, pool: Any) -> None:
    """Tell the allocator that a capture into this pool is over; newer versions of torch have done it."""
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def _number(handle: Any) -> int:
    """A conditional handle as kernels take it."""
    return int(handle)


def _captured(bindings: Bindings, stream: torch.cuda.Stream) -> tuple[Any, list[Any]]:
    """The graph that a stream is captured into, and the nodes that the next one waits for.

    Raises:
        GraphError: the stream is not being captured.
    """
    found = bindings.call(bindings.runtime, "cudaStreamGetCaptureInfo", stream.cuda_stream)
    status, _, graph, dependencies = found[:4]
    active = bindings.runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    if status != active:
        raise GraphError(f"the stream's capture is {status}, expected {active}")
    return graph, dependencies


def _add_while_node(bindings: Bindings, stream: torch.cuda.Stream, handle: Any) -> Any:
    """Append a WHILE node to what the stream captures; returns the graph of its body, still empty."""
    driver, runtime = bindings.driver, bindings.runtime
    graph, dependencies = _captured(bindings, stream)
    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle = handle
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node.conditional.size = 1
    node.conditional.ctx = bindings.call(driver, "cuCtxGetCurrent")
    count = len(dependencies)
    added = bindings.call(driver, "cuGraphAddNode", graph, dependencies, *bindings.edge_data, count, node)
    replace = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    bindings.call(
        runtime, "cudaStreamUpdateCaptureDependencies", stream.cuda_stream, [added], *bindings.edge_data, 1, replace
    )
    return node.conditional.phGraph_out[0]


@contextmanager
def _capturing_into(bindings: Bindings, graph: Any, device: torch.device) -> Iterator[None]:
    """Capture what happens inside on a stream of its own into a given graph."""
    runtime = bindings.runtime
    stream = torch.cuda.Stream(device)
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    bindings.call(runtime, "cudaStreamBeginCaptureToGraph", stream.cuda_stream, graph, None, None, 0, mode)
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        with suppress(GraphError):  # what was raised inside is the reason
            bindings.call(runtime, "cudaStreamEndCapture", stream.cuda_stream)
        raise
    bindings.call(runtime, "cudaStreamEndCapture", stream.cuda_stream)
