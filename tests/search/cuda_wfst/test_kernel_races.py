"""The kernels under the race and bounds checker: clean on any schedule, and no barrier is idle."""

from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.cuda.sources import read_source
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from tests.cuda_emulator.mutations import assert_needed, barriers_of
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import assert_equal, assert_equal_lattices, limit_tokens, on_cuda
from tests.search.cuda_wfst.models import random_graph

pytest.importorskip("kaldifst")

COLUMNS, T = 40, 4
OPTIONS = {"vocab_size": COLUMNS - 1, "blank_id": COLUMNS - 1, "max_active": 12, "beam": 6.0}


FOLDER = "search/word_graph"
# what a search without composition is made of
OWN = [f"{FOLDER}/kernel.cu", f"{FOLDER}/frame.cuh", f"{FOLDER}/prune.cuh", f"{FOLDER}/compact.cu"]
OWN += [name for name in read_source(f"{FOLDER}/frame.cuh").headers if name.startswith(FOLDER)]
OF_LINKS = f"{FOLDER}/links.cuh"  # of no use without links, as the rest is with them
BARRIERS = [
    *barriers_of(f"{FOLDER}/kernel.cu", OWN),
    *barriers_of(f"{FOLDER}/compact.cu", OWN),
    *barriers_of(f"{FOLDER}/best_path.cu", [f"{FOLDER}/best_path.cu"]),
]


@pytest.fixture
def short_lists(monkeypatch):
    """Lists and tables so short that every frame goes through each of the kernel's loops."""
    monkeypatch.setattr(kernel_abi, "THREADS", 64)
    monkeypatch.setattr(kernel_abi, "CANDIDATES", 192)
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 64)
    limit_tokens(monkeypatch, 48)


def log_probs_of(seed: int, sharpness: float = 0.7) -> torch.Tensor:
    return random_log_probs(2, T, COLUMNS, seed=seed, sharpness=sharpness)


def search_everything(topology: str) -> None:
    """Ties, full tables, boosting, utterances of different lengths; then the same with lattices."""
    graph = random_graph(1, columns=COLUMNS, states=40, coarse=True)
    boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0}, graph)
    log_probs = torch.round(log_probs_of(1))
    options = {"topology": topology, "boosting": boosting, **OPTIONS}
    assert_equal(graph, log_probs, [T, 2], **options)
    assert_equal_lattices(graph, log_probs, [T, 2], n_best=3, **options)


def search_in_chunks(monkeypatch: pytest.MonkeyPatch, lattice: bool = False) -> None:
    """Tokens come back from global memory, records have to be compacted in between."""
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE", "FIRST_LINKS"):
        monkeypatch.setattr(cuda_engine, name, 1)
    graph = random_graph(1, columns=COLUMNS, states=40)
    for sharpness, beam, capacity in ((0.5, 6.0, 48), (0.5, 2.5, 48), (3.0, 6.0, 16)):
        limit_tokens(monkeypatch, capacity)
        decoder = on_cuda(graph, topology="normal", lattice=lattice, **{**OPTIONS, "beam": beam})
        streams, log_probs = decoder.open(2), log_probs_of(1, sharpness)
        decoder.push(streams, log_probs[:, :3], [3, 1])
        decoder.push(streams, log_probs[:, 3:], [1, 0])
        decoder.close(streams)


@pytest.mark.parametrize("topology", ["compact", "normal"])
@pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"check": True, "seed": 0},
        {"check": True, "seed": 100, "yield_percent": 50, "resident": 1},
        {"check": True, "order": "descending"},
    ],
    indirect=True,
)
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, topology, monkeypatch):
    search_everything(topology)
    for lattice in (False, True):
        search_in_chunks(monkeypatch, lattice)


@pytest.mark.parametrize("barrier", BARRIERS, ids=str)
def test_every_barrier_is_needed(request, tmp_path, short_lists, monkeypatch, barrier):
    cache = request.config.cache.mkdir("cuda_emulator")
    lattice = barrier.file == OF_LINKS
    assert_needed(barrier, lambda: search_in_chunks(monkeypatch, lattice), tmp_path, cache)
