"""The emulator for the kernels of cuda_wfst, with small blocks: a fiber per thread takes its time."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.word_graph import launch_shape
from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(launch_shape, "THREADS", 32)
    monkeypatch.setattr(launch_shape, "WAYS", 128)
    monkeypatch.setattr(launch_shape, "LEAST_GROUPS", 64)
