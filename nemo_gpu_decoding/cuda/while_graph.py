"""Run loops on the device: a CUDA graph with a WHILE node repeats work until a kernel ends it.

    graph = capture_while(device, body)
    graph.replay()

`body(handle)` launches the work, including one kernel that calls cudaGraphSetConditional(handle, more). The body runs
at least once. The body of the loop may contain torch's operators.
Torch's operators allocate from a memory pool of the graph during capture; a replay allocates no memory. WHILE nodes
need CUDA 12.4 and a driver for 12.6, as in NeMo.

This module captures without torch: `torch.cuda.graph` cannot capture into the body of a node, and torch before 2.12
(its pull request 180395) does not recover from a capture that CUDA refuses to end.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from nemo_gpu_decoding.cuda.availability import driver_version
from nemo_gpu_decoding.cuda.driver import DriverError, bindings, call, in_context, primary_context

OLDEST_DRIVER = (12, 6)
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work on the stream does not wait for the default stream
ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: every replay begins with the condition's default value


def why_no_while_graphs(device: torch.device) -> str | None:
    """Return None if WHILE nodes work on `device`, else the reason in one line; never raises."""
    if device.type != "cuda":
        return f"CUDA graphs run on CUDA devices, not on '{device}'"
    try:
        version = driver_version()
    except Exception as error:  # missing libraries raise errors of many types; none may stop a decoder
        return f"cuda-python does not answer ({type(error).__name__}: {error})"
    if version < OLDEST_DRIVER:
        return f"the driver is for CUDA {version[0]}.{version[1]}, WHILE nodes need 12.6"
    return None


class CapturedGraph:
    """A captured graph, which replays on torch's current stream asynchronously."""

    def __init__(self, graph: Any, stream: torch.cuda.Stream, pool: Any) -> None:
        """Store an executable graph, the stream on which it was captured and the memory of its tensors."""
        self._graph, self._stream, self._pool = graph, stream, pool

    def replay(self) -> None:
        device = self._stream.device
        with in_context(device.index):
            call("cuGraphLaunch", self._graph, torch.cuda.current_stream(device).cuda_stream)

    def __del__(self) -> None:
        with suppress(DriverError):  # at the end of the process, there may be no context
            call("cuGraphExecDestroy", self._graph)
        self._pool = None  # must happen before another graph uses the stream
        _idle_streams.setdefault(self._stream.device.index, []).append(self._stream)


def is_capturing(device: torch.device) -> bool:
    """Return whether torch's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_while(device: torch.device, body: Callable[[int], None]) -> CapturedGraph:
    """Capture `body(handle)` in a loop that repeats while it sets the handle's condition.

    A capture does not run the kernels. Run the body once before, as for any graph.

    Raises:
        DriverError, RuntimeError: CUDA refuses the capture, and nothing has changed.
    """
    with capture_lock, torch.cuda.device(device), in_context(device.index):
        torch.cuda.empty_cache()  # during the capture, torch's allocator returns no memory to the device
        graph = call("cuGraphCreate", 0)
        try:
            context = primary_context(device.index)
            handle = call("cuGraphConditionalHandleCreate", graph, context, 1, ASSIGN_DEFAULT)
            inner = _add_while_node(graph, handle, context)
            stream, pool = _unused_stream(device.index), torch.cuda.MemPool()
            with _capturing_into(inner, stream), torch.cuda.use_mem_pool(pool, device):
                body(int(handle))
            return CapturedGraph(call("cuGraphInstantiate", graph, 0), stream, pool)
        finally:
            call("cuGraphDestroy", graph)


# One graph is captured at a time: `empty_cache` and `synchronize_unless_capturing` wait for the device, which would
# end the capture of another thread. Reentrant, because a collection of garbage within a capture may delete what waits
# for the device.
capture_lock = threading.RLock()
# Device index -> streams that no graph uses. torch has 32 streams in turn, but graphs must not share one: cuBLAS has a
# workspace per stream. The stream of a failed capture is not used again.
_idle_streams: dict[int, list[torch.cuda.Stream]] = {}


def _unused_stream(device: int) -> torch.cuda.Stream:
    """Return a stream of the current device that no graph uses; the caller holds `capture_lock`."""
    if idle := _idle_streams.get(device):
        return idle.pop()
    return torch.cuda.ExternalStream(int(call("cuStreamCreate", NON_BLOCKING)), device=device)


def _add_while_node(graph: Any, handle: Any, context: Any) -> Any:
    """Add a WHILE node to an empty graph; return the empty graph of its body."""
    driver = bindings()
    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle = handle
    node.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    node.conditional.size = 1
    node.conditional.ctx = context
    # cuda-python 12 has two functions, of which the second takes the data of edges, as the only one of cuda-python 13
    name = "cuGraphAddNode_v2" if hasattr(driver, "cuGraphAddNode_v2") else "cuGraphAddNode"
    call(name, graph, None, None, 0, node)
    return node.conditional.phGraph_out[0]


@contextmanager
def _capturing_into(graph: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the work of the `with` block on a stream into a given graph."""
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call("cuStreamBeginCaptureToGraph", stream.cuda_stream, graph, None, None, 0, mode)
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        with suppress(DriverError):  # the error inside the block is the cause
            call("cuStreamEndCapture", stream.cuda_stream)
        raise
    call("cuStreamEndCapture", stream.cuda_stream)
