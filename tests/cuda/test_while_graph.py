"""Capturing a WHILE node asks CUDA for the right things in the right order; fakes write them down."""

# ruff: noqa: N802, N815 (methods are named like the functions of CUDA)

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nemo_gpu_decoding.cuda.while_graph import Bindings, GraphError, capture_chunk, capture_while, why_no_while_graphs

GPU = torch.device("cuda", 0)


class FakeCUDA:
    """Both `cuda.bindings.runtime` and `.driver`."""

    cudaStreamCaptureStatus = SimpleNamespace(cudaStreamCaptureStatusActive="active")
    cudaStreamUpdateCaptureDependenciesFlags = SimpleNamespace(cudaStreamSetCaptureDependencies="set")
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal="thread local")
    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_CONDITIONAL="conditional")
    CUgraphConditionalNodeType = SimpleNamespace(CU_GRAPH_COND_TYPE_WHILE="while")

    def __init__(self, log):
        self.log = log
        self.failing = ()
        self.status = "active"
        self.version = 13000
        self.node = None

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

    def do_cudaStreamGetCaptureInfo(self, stream):
        return 0, self.status, 7, "graph", ["last node"], 1

    def do_cudaGraphConditionalHandleCreate(self, graph, default, flags):
        return 0, 42

    def do_cuCtxGetCurrent(self):
        return 0, "context"

    def do_cuGraphAddNode(self, *arguments):
        return 0, "while node"

    def do_cuDriverGetVersion(self):
        return 0, self.version


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

    streams = iter(("outer", "inner"))

    def stream(device=None):
        return SimpleNamespace(cuda_stream=next(streams), wait_stream=lambda other: None)

    fakes = {
        "Stream": stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append(("replay",))),
        "MemPool": lambda: "pool",
        "current_stream": lambda device=None: SimpleNamespace(wait_stream=lambda other: None),
        "device": lambda device: noted("device"),
        "graph": lambda graph, **options: noted("graph"),
        "stream": lambda stream: noted("stream"),
        "use_mem_pool": lambda pool, device=None: noted("pool"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def capture(cuda, log, version="13.0.0"):
    return capture_while(
        GPU,
        lambda handle: log.append(("decide", handle)),
        lambda: log.append(("body",)),
        Bindings(cuda, cuda, version),
    )


def test_a_loop_is_captured_and_replayed(cuda, log, torch_cuda):
    graph = capture(cuda, log)
    graph.replay()
    assert [entry[0] for entry in log] == [
        "enter device", "enter graph",
        "cudaStreamGetCaptureInfo", "cudaGraphConditionalHandleCreate", "decide",
        "cudaStreamGetCaptureInfo", "cuCtxGetCurrent", "cuGraphAddNode",
        "cudaStreamUpdateCaptureDependencies",
        "cudaStreamBeginCaptureToGraph", "enter stream", "enter pool", "body", "decide",
        "leave pool", "leave stream", "cudaStreamEndCapture",
        "leave graph", "leave device", "replay",
    ]  # fmt: skip
    assert ("decide", 42) in log
    assert ("cudaStreamBeginCaptureToGraph", "inner", "body graph", None, None, 0, "thread local") in log
    assert ("cudaStreamEndCapture", "inner") in log
    node = cuda.node.conditional
    assert (cuda.node.type, node.handle, node.type, node.size, node.ctx) == (
        "conditional", 42, "while", 1, "context",
    )  # fmt: skip


@pytest.mark.parametrize(("version", "data"), [("12.9.1", ()), ("13.4.4", (None,))])
def test_edges_carry_data_from_cuda_13_on(cuda, log, torch_cuda, version, data):
    capture(cuda, log, version)
    assert ("cuGraphAddNode", "graph", ["last node"], *data, 1, cuda.node) in log
    update = ("cudaStreamUpdateCaptureDependencies", "outer", ["while node"], *data, 1, "set")
    assert update in log


def test_what_cuda_refuses_is_named(cuda, log, torch_cuda):
    cuda.failing = ("cuGraphAddNode",)
    with pytest.raises(GraphError, match="cuGraphAddNode fails with 801"):
        capture(cuda, log)


def test_a_body_that_fails_ends_its_capture(cuda, log, torch_cuda):
    def body():
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture_while(GPU, lambda handle: None, body, Bindings(cuda, cuda, "13.0.0"))
    assert ("cudaStreamEndCapture", "inner") in log


def test_a_stream_that_is_not_captured_is_refused(cuda, log, torch_cuda):
    cuda.status = "none"
    with pytest.raises(GraphError, match="capture is none, expected active"):
        capture(cuda, log)


def test_old_drivers_are_told_apart(cuda):
    bindings = Bindings(cuda, cuda, "13.0.0")
    assert why_no_while_graphs(GPU, bindings) is None
    cuda.version = 12040
    assert "the driver is for CUDA 12.4, WHILE nodes need 12.6" in why_no_while_graphs(GPU, bindings)
    cuda.failing = ("cuDriverGetVersion",)
    assert "cuDriverGetVersion fails with 801" in why_no_while_graphs(GPU, bindings)
    assert "not on 'cpu'" in why_no_while_graphs(torch.device("cpu"), bindings)


@pytest.mark.parametrize(
    "name", ["cudaStreamGetCaptureInfo", "cudaGraphConditionalHandleCreate",
             "cudaStreamUpdateCaptureDependencies", "cudaStreamBeginCaptureToGraph",
             "cudaStreamEndCapture"],
)  # fmt: skip
def test_the_functions_exist(name):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert hasattr(runtime, name)


# ----------------------------- What is captured into a graph, and when; a fake in the place of CUDA's

CHUNK_GPU = torch.device("cuda", 1)


@pytest.fixture
def chunk_log(monkeypatch):
    """What torch.cuda was asked for, in its order."""
    entries = []

    @contextmanager
    def noted(*entry):
        entries.append(("enter", *entry))
        try:
            yield
        finally:
            entries.append(("leave", *entry))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "the graph")
    monkeypatch.setattr(torch.cuda, "device", lambda device: noted("device", device))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: noted(graph, capture_error_mode))
    return entries


def test_the_body_is_captured_on_the_device(chunk_log):
    assert capture_chunk(CHUNK_GPU, lambda: chunk_log.append("body")) == "the graph"
    # thread_local: other threads of the process may go on using the GPU
    assert chunk_log == [
        ("enter", "device", CHUNK_GPU),
        ("enter", "the graph", "thread_local"),
        "body",
        ("leave", "the graph", "thread_local"),
        ("leave", "device", CHUNK_GPU),
    ]


def test_a_body_that_fails_ends_its_capture_chunk(chunk_log):
    def body():
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture_chunk(CHUNK_GPU, body)
    assert chunk_log[-1] == ("leave", "device", CHUNK_GPU)
