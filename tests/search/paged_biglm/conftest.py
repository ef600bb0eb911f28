"""The emulator for the kernel of paged_biglm, with small blocks: a fiber per thread takes its time."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.word_graph.composition import launch_shape
from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    """And lists so short that frames go through each of the kernel's loops."""
    monkeypatch.setattr(launch_shape.shapes, "THREADS", 32)
    monkeypatch.setattr(launch_shape.shapes, "WAYS", 128)
    monkeypatch.setattr(launch_shape.shapes, "LEAST_GROUPS", 64)
    monkeypatch.setattr(launch_shape, "ERRANDS", 64)
    monkeypatch.setattr(launch_shape, "ANSWERS", 96)
