"""The emulator for the kernels of all searches, with small blocks: a fiber per thread takes its time."""

import pytest
import torch

from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from nemo_gpu_decoding.search.transducer import cuda_graphs, records
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.cuda_emulator.fixtures import emulated_runtime
from tests.cuda_emulator.graphs import captured_while

__all__ = ["emulated_runtime"]


@pytest.fixture
def small_blocks(monkeypatch):
    for module, sizes in (
        (cuda_engine, {"THREADS": 32, "FINISH_THREADS": 32}),
        # and few rows of the prediction network, so that utterances wait for one
        (records, {"EXPAND_THREADS": 32, "MERGE_THREADS": 32, "MOVE_THREADS": 32, "FEWEST_PREDICTION_ROWS": 1}),
        (kernel_abi, {"THREADS": 32, "CANDIDATES": 128, "LEAST_GROUPS": 64}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


@pytest.fixture
def small_lists(small_blocks, monkeypatch):
    """And lists so short that frames with a large LM go through each of the kernel's loops."""
    monkeypatch.setattr(kernel_abi, "LM_QUERIES", 64)
    monkeypatch.setattr(kernel_abi, "CACHED_SCORES", 96)


@pytest.fixture
def played_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "capture_while", captured_while)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
