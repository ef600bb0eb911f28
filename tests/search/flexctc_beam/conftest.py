"""The emulator for the kernels of flexctc_beam, with small blocks: a fiber per thread takes its time."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(cuda_engine, "THREADS", 32)
    monkeypatch.setattr(cuda_engine, "FINISH_THREADS", 32)
