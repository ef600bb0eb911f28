"""Capturing a WHILE node asks CUDA for the right things in the right order; fakes write them down."""

# ruff: noqa: N802 (methods are named like the functions of CUDA)

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cuda import while_graph
from nemo_gpu_decoding.cuda.while_graph import Bindings, GraphError, capture_while, why_no_while_graphs

GPU = torch.device("cuda", 1)  # not the current one


class FakeCUDA:
    """`cuda.bindings.driver`."""

    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE="active")
    CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread local")
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL="conditional")
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_WHILE="while")

    def __init__(self, log):
        self.log = log
        self.failing = ()
        self.status = "active"
        self.version = 13000
        self.node = None
        self.num_streams = 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.log.append((name, *arguments))
            if name in self.failing:
                return 801, None
            return getattr(self, f"do_{name}", lambda *_: (0,))(*arguments)

        return call

    def CUgraphNodeParams(self):
        self.node = SimpleNamespace(conditional=SimpleNamespace(phGraph_out=["body graph"]))
        return self.node

    def do_cuStreamGetCaptureInfo(self, stream):
        return 0, self.status, 7, "graph", ["last node"], 1

    def do_cuGraphConditionalHandleCreate(self, graph, context, default, flags):
        return 0, 42

    def do_cuCtxGetCurrent(self):
        return 0, "context"

    def do_cuGraphAddNode(self, *arguments):
        return 0, "while node"

    def do_cuStreamCreate(self, flags):
        self.num_streams += 1
        return 0, 16 * self.num_streams

    def do_cuDriverGetVersion(self):
        return 0, self.version


class FakeGraph(SimpleNamespace):
    """`torch.cuda.CUDAGraph`; unlike its base, it has weak references."""


@pytest.fixture
def log():
    return []


@pytest.fixture
def cuda(log):
    return FakeCUDA(log)


@pytest.fixture
def torch_cuda(monkeypatch, log):
    """torch.cuda's streams, graphs and pools as entries in the log."""

    @contextmanager
    def noted(name, *given, **options):
        log.append((f"enter {name}",))
        yield
        log.append((f"leave {name}",))

    current = [0]
    monkeypatch.setattr(while_graph, "_idle_streams", {})

    def stream(number, device):
        log.append(("stream on", device))
        name, place = f"stream {number // 16}", torch.device("cuda", device)
        return SimpleNamespace(cuda_stream=name, device=place, wait_stream=lambda other: None)

    @contextmanager
    def on_device(device):
        current.append(device.index)
        try:
            yield
        finally:
            current.pop()

    def made(what, value):
        log.append((f"{what} on", current[-1]))
        return value

    fakes = {
        "ExternalStream": stream,
        "CUDAGraph": lambda: made("graph", FakeGraph(replay=lambda: log.append(("replay",)))),
        "MemPool": lambda: made("pool", "pool"),
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: current[-1],
        "set_stream": lambda stream: log.append(("set stream",)),
        "current_stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
        "device": on_device,
        "graph": lambda graph, **options: noted("graph"),
        "stream": lambda stream: noted("stream"),
        "use_mem_pool": lambda pool, device=None: noted("pool"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def capture(cuda, log, version="13.0.0"):
    return capture_while(GPU, lambda handle: log.append(("body", handle)), Bindings(cuda, version))


def test_loop_is_captured_on_its_device_and_replayed(cuda, log, torch_cuda):
    """torch makes graphs and pools on the current device, which is another one here."""
    graph = capture(cuda, log)
    graph.replay()
    assert [entry[0] for entry in log] == [
        "pool on", "graph on", "cuStreamCreate", "stream on", "enter graph",
        "cuStreamGetCaptureInfo", "cuCtxGetCurrent", "cuGraphConditionalHandleCreate",
        "cuStreamGetCaptureInfo", "cuGraphAddNode",
        "cuStreamUpdateCaptureDependencies",
        "cuStreamCreate", "stream on", "cuStreamBeginCaptureToGraph", "enter stream", "enter pool", "body",
        "leave pool", "leave stream", "cuStreamEndCapture", "leave graph", "replay",
    ]  # fmt: skip
    assert {entry[1] for entry in log if entry[0].endswith(" on")} == {1}
    assert ("cuGraphConditionalHandleCreate", "graph", "context", 1, 1) in log  # true at the beginning of each replay
    assert ("body", 42) in log
    assert ("cuStreamBeginCaptureToGraph", "stream 2", "body graph", None, None, 0, "thread local") in log
    assert ("cuStreamEndCapture", "stream 2") in log
    node = cuda.node.conditional
    assert (cuda.node.type, node.handle, node.type, node.size, node.ctx) == (
        "conditional", 42, "while", 1, "context",
    )  # fmt: skip


def test_live_graphs_share_no_stream(cuda, log, torch_cuda):
    """cuBLAS has a workspace per stream, which torch frees with the first graph of the stream."""
    graphs = [capture(cuda, log) for _ in range(20)]
    streams = [stream.cuda_stream for graph in graphs for stream in graph._streams]
    assert len(set(streams)) == len(streams) == 40
    deleted = [stream.cuda_stream for stream in graphs.pop(3)._streams]
    again = capture(cuda, log)
    assert sorted(stream.cuda_stream for stream in again._streams) == sorted(deleted)
    assert cuda.num_streams == 40


def test_graph_is_destroyed_before_its_stream_is_used_again(cuda, log, torch_cuda):
    graph = capture(cuda, log)
    weakref.finalize(graph._graph, lambda: log.append(("destroyed", dict(while_graph._idle_streams))))
    del graph
    assert log[-1] == ("destroyed", {})
    assert len(while_graph._idle_streams[1]) == 2


def test_one_graph_is_captured_at_a_time(cuda, log, torch_cuda):
    inside, bindings = [], Bindings(cuda, "13.0.0")

    def body(handle):
        inside.append(1)
        time.sleep(0.02)
        assert len(inside) == 1
        inside.pop()

    with ThreadPoolExecutor(3) as pool:
        graphs = list(pool.map(lambda _: capture_while(GPU, body, bindings), range(3)))
    assert all(hasattr(graph, "replay") for graph in graphs)


@pytest.mark.parametrize(("version", "data"), [("12.9.1", ()), ("13.4.4", (None,))])
def test_edges_carry_data_from_cuda_13_on(cuda, log, torch_cuda, version, data):
    capture(cuda, log, version)
    assert ("cuGraphAddNode", "graph", ["last node"], *data, 1, cuda.node) in log
    update = ("cuStreamUpdateCaptureDependencies", "stream 1", ["while node"], *data, 1, 1)
    assert update in log


def test_refused_call_or_capture_is_named_and_a_failing_body_ends_its_capture(cuda, log, torch_cuda):
    def body(handle):
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture_while(GPU, body, Bindings(cuda, "13.0.0"))
    assert ("cuStreamEndCapture", "stream 2") in log
    cuda.failing = ("cuGraphAddNode",)
    with pytest.raises(GraphError, match="cuGraphAddNode fails with 801"):
        capture(cuda, log)
    cuda.status = "none"
    with pytest.raises(GraphError, match="capture is none, expected active"):
        capture(cuda, log)


def test_driver_without_while_nodes_is_named(cuda):
    bindings = Bindings(cuda, "13.0.0")
    assert why_no_while_graphs(GPU, bindings) is None
    cuda.version = 12040
    assert "the driver is for CUDA 12.4, WHILE nodes need 12.6" in why_no_while_graphs(GPU, bindings)
    cuda.failing = ("cuDriverGetVersion",)
    assert "cuDriverGetVersion fails with 801" in why_no_while_graphs(GPU, bindings)
    assert "not on 'cpu'" in why_no_while_graphs(torch.device("cpu"), bindings)
