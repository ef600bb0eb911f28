"""Captures of a WHILE node, with notes in place of CUDA and torch; `test_bindings.py` has the real cuda-python."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from nemo_gpu_decoding.cuda import while_graph
from nemo_gpu_decoding.cuda.driver import DriverError
from nemo_gpu_decoding.cuda.while_graph import capture_while, why_no_while_graphs

GPU = torch.device("cuda", 1)  # not the current one


@pytest.fixture
def log(monkeypatch):
    """Calls of the driver and blocks of torch, in their order; `log.failing` names the call that fails."""

    class Log(list):
        failing = ""

    log = Log()

    def call(name, *arguments):
        log.append(name)
        if name == log.failing:
            raise DriverError(f"{name} fails with 801")
        return log.count("cuStreamCreate")

    @contextmanager
    def noted(name):
        log.append(f"enter {name}")
        yield
        log.append(f"leave {name}")

    fakes = {
        "ExternalStream": lambda number, device: SimpleNamespace(
            cuda_stream=number, device=torch.device("cuda", device)
        ),
        "MemPool": lambda: log.append("pool"),
        "current_stream": lambda device: SimpleNamespace(cuda_stream=0),
        "device": lambda device: noted(device),
        "empty_cache": lambda: log.append("empty cache"),
        "stream": lambda stream: noted("stream"),
        "use_mem_pool": lambda pool, device: noted("pool"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(while_graph, "_idle_streams", {})
    monkeypatch.setattr(while_graph, "call", call)
    monkeypatch.setattr(while_graph, "bindings", MagicMock())
    monkeypatch.setattr(while_graph, "primary_context", lambda index: index)
    monkeypatch.setattr(while_graph, "in_context", lambda index: nullcontext())
    return log


def test_pool_belongs_to_the_device_of_the_graph_and_serves_its_body(log):
    """torch makes a pool on the current device, which is another one here."""
    capture_while(GPU, lambda handle: log.append("body")).replay()
    assert [entry for entry in log if not entry.startswith("cu")] == [
        "enter cuda:1", "empty cache", "pool", "enter stream", "enter pool", "body", "leave pool", "leave stream",
        "leave cuda:1",
    ]  # fmt: skip


def test_live_graphs_share_no_stream(log):
    """cuBLAS has a workspace per stream."""
    graphs = [capture_while(GPU, lambda handle: None) for _ in range(40)]
    assert [graph._stream.cuda_stream for graph in graphs] == list(range(1, 41))
    del graphs[3]
    assert log[-1] == "cuGraphExecDestroy"
    assert capture_while(GPU, lambda handle: None)._stream.cuda_stream == 4


def test_one_graph_is_captured_at_a_time(log):
    inside = []

    def body(handle):
        inside.append(1)
        time.sleep(0.02)
        assert len(inside) == 1
        inside.pop()

    with ThreadPoolExecutor(3) as pool:
        assert len(list(pool.map(lambda _: capture_while(GPU, body), range(3)))) == 3


@pytest.mark.parametrize("failing", ["", "cuStreamEndCapture", "cuGraphInstantiate"])
def test_failed_capture_ends_and_its_stream_is_not_used_again(log, failing):
    """An error of the body is shown even if CUDA refuses to end the capture."""

    def body(handle):
        if failing != "cuGraphInstantiate":
            raise RuntimeError("not permitted")

    log.failing = failing
    with pytest.raises(RuntimeError, match=f"{failing} fails" if failing == "cuGraphInstantiate" else "not permitted"):
        capture_while(GPU, body)
    assert log.count("cuStreamEndCapture") == log.count("cuGraphDestroy") == 1
    assert while_graph._idle_streams == {}


def test_driver_without_while_nodes_is_named(monkeypatch):
    monkeypatch.setattr(while_graph, "driver_version", lambda: (12, 6))
    assert why_no_while_graphs(GPU) is None
    monkeypatch.setattr(while_graph, "driver_version", lambda: (12, 4))
    assert "the driver is for CUDA 12.4, WHILE nodes need 12.6" in why_no_while_graphs(GPU)
    monkeypatch.setattr(while_graph, "driver_version", lambda: 1 // 0)
    assert "cuda-python does not answer (ZeroDivisionError" in why_no_while_graphs(GPU)
    assert "not on 'cpu'" in why_no_while_graphs(torch.device("cpu"))
