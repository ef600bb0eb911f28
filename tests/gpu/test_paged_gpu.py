"""paged_biglm on a GPU finds what it finds on the CPU: tokens, results and look-ups, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_composition, kernel_abi
from tests.gpu.rehearsal import REHEARSAL, sized
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import random_graph
from tests.search.paged_biglm.both import WORDS, assert_equal, on, pair
from tests.search.paged_biglm.models import LM, lm_table

pytest.importorskip("kaldifst")
COLUMNS, T = sized(200, 12), sized(60, 6)
BATCH = sized(150, 3)
TOPOLOGIES = ("compact", "normal", "minimal", "graph")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    if REHEARSAL:
        for name, size in {"THREADS": 32, "CANDIDATES": 128, "LEAST_GROUPS": 64}.items():
            monkeypatch.setattr(kernel_abi, name, size)


def graph_of(seed, topology="compact", coarse=False):
    blank = COLUMNS - 1 if topology == "graph" else None
    return random_graph(seed, columns=COLUMNS, blank=blank, states=sized(3000, 30), coarse=coarse)


def log_probs_on(device, batch=BATCH, *, seed, sharpness=2.0, dtype=torch.float32):
    return random_log_probs(batch, T, COLUMNS, seed=seed, sharpness=sharpness).to(device, dtype)


def lengths_for(batch=BATCH):
    lengths = np.random.default_rng(0).integers(0, T + 1, batch)
    lengths[0], lengths[-1] = T, 0
    return lengths.tolist()


def check(graph, lms, log_probs, requests=None, **options):
    options = {"columns": COLUMNS, "threads": 0, **options}
    assert_equal(graph, lms, log_probs, lengths_for(len(log_probs)), requests, **options)


@pytest.mark.parametrize("placement", ["device", "paged"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_topologies_and_placements(device, topology, placement):
    for seed, max_active in enumerate(sized((10_000, 700, 50), (50,))):
        check(
            graph_of(seed, topology), pair(seed, nested=seed == 1), log_probs_on(device, seed=seed),
            topology=topology, placement=placement, beam=10.0, max_active=max_active, chunk=T // 2,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", sized([torch.float16, torch.bfloat16], [torch.float16]), ids=str)
def test_types(device, dtype):
    check(graph_of(1), pair(1), log_probs_on(device, seed=1, dtype=dtype), beam=8.0, max_active=300)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("group_size", [0, 2])
def test_ties_are_broken_alike(device, topology, group_size):
    check(
        graph_of(3, topology, coarse=True), pair(3, coarse=True),
        torch.round(log_probs_on(device, seed=3)), topology=topology, group_size=group_size, beam=5.0,
        max_active=300,
    )  # fmt: skip


def test_requests_of_single_utterances(device):
    graph = graph_of(1)
    trees = [build_word_boosting(phrases, graph) for phrases in ({"w1": 2.0, "w2 w3": 3.0}, {"w3": 0.5})]
    wishes = [Request(boosting=tree, lm_weight=0.5 + i) for i, tree in enumerate(trees)] + [None]
    requests = [wishes[b % 3] for b in range(BATCH)]
    log_probs = log_probs_on(device, seed=4)
    check(graph, pair(1), log_probs, requests, boosting=trees[0], beam=8.0, max_active=300)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lattices(device, topology):
    check(
        graph_of(2, topology), pair(2), log_probs_on(device, sized(20, 2), seed=6),
        topology=topology, lattice=True, n_best=10, lattice_beam=5.0, beam=6.0, max_active=300,
    )  # fmt: skip


def test_eager_composition(device):
    check(
        graph_of(2), pair(2), log_probs_on(device, sized(10, 2), seed=6), composition="eager",
        beam=6.0, max_active=100,
    )  # fmt: skip


def test_many_histories(device):
    """An LM with so many states that groups are large."""
    order, keep = sized((6, 0.9), (3, 0.9))
    large = LM(lm_table(seed=2, words=WORDS, order=order, keep=keep))
    lms = LM(lm_table(seed=1, words=WORDS)), large
    log_probs = log_probs_on(device, sized(20, 2), seed=7, sharpness=0.5)
    check(graph_of(4), lms, log_probs, beam=20.0, max_active=sized(5000, 200))


def test_a_tiny_cache_is_shared_by_all_blocks(device, monkeypatch):
    placed = cuda_composition.PlacedLM
    monkeypatch.setattr(
        cuda_composition, "PlacedLM", lambda arrays, how, _, name: placed(arrays, how, 64, name)
    )
    graph, lms = graph_of(5), pair(0)
    options = {"placement": "paged", "beam": 10.0, "max_active": 300}
    check(graph, lms, log_probs_on(device, seed=8), **options)
    decoder = on("cuda", graph, lms, columns=COLUMNS, **options)
    streams = decoder.open(BATCH)
    decoder.push(streams, log_probs_on(device, seed=8), [T] * BATCH)
    assert streams.engine.lookup_statistics.misses > 0
