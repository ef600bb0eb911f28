"""The emulator for the kernels of transducer searches, with small blocks: a fiber takes its time."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.transducer import records
from tests.cuda_emulator.fixtures import emulated_runtime

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(records, name, 32)
