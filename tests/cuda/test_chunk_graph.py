"""What is captured into a graph, and when; a fake in the place of CUDA's."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from nemo_gpu_decoding.cuda.chunk_graph import capture_chunk

GPU = torch.device("cuda", 1)


@pytest.fixture
def log(monkeypatch):
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
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, capture_error_mode: noted(graph, capture_error_mode)
    )
    return entries


def test_the_body_is_captured_on_the_device(log):
    assert capture_chunk(GPU, lambda: log.append("body")) == "the graph"
    # thread_local: other threads of the process may go on using the GPU
    assert log == [
        ("enter", "device", GPU),
        ("enter", "the graph", "thread_local"),
        "body",
        ("leave", "the graph", "thread_local"),
        ("leave", "device", GPU),
    ]


def test_a_body_that_fails_ends_its_capture(log):
    def body():
        raise RuntimeError("not permitted")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture_chunk(GPU, body)
    assert log[-1] == ("leave", "device", GPU)
