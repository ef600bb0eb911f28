"""The emulator for the kernels, with small blocks: a fiber per thread takes its time."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernel_abi, "THREADS", 32)
    monkeypatch.setattr(kernel_abi, "CANDIDATES", 128)
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 64)


@pytest.fixture
def small_lists(small_blocks, monkeypatch):
    """And lists so short that frames with a large LM go through each of the kernel's loops."""
    monkeypatch.setattr(kernel_abi, "LM_QUERIES", 64)
    monkeypatch.setattr(kernel_abi, "CACHED_SCORES", 96)
