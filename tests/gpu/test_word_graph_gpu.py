"""Searches in word graphs on a GPU find what they find on the CPU: all of it, to the bit."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.search.word_graph import cuda_engine
from tests.gpu import sized
from tests.random_models import random_log_probs
from tests.search.word_graph import both
from tests.search.word_graph.models import LM, lm_table, random_graph

COLUMNS, T = sized(200, 12), sized(80, 8)
BATCH = sized(150, 3)
TOPOLOGIES = ("compact", "normal", "minimal", "graph")


def graph_of(seed, topology="compact", coarse=False):
    blank = COLUMNS - 1 if topology == "graph" else None
    return random_graph(seed, columns=COLUMNS, blank=blank, states=sized(3000, 30), coarse=coarse)


def log_probs_on(device, batch=BATCH, frames=T, *, seed, sharpness=2.0, dtype=torch.float32):
    return random_log_probs(batch, frames, COLUMNS, seed=seed, sharpness=sharpness).to(device, dtype)


def lengths_for(batch=BATCH, frames=T):
    lengths = np.random.default_rng(0).integers(0, frames + 1, batch)
    lengths[0], lengths[-1] = frames, 0
    return lengths.tolist()


def options_of(topology):
    return {"vocab_size": COLUMNS - 1, "blank_id": COLUMNS - 1, "topology": topology, "threads": 0}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_word_graphs_of_any_topology_and_type_equal_the_cpu(device, topology, dtype):
    for seed, max_active in enumerate(sized((10_000, 700, 50), (50,))):
        both.assert_equal(
            graph_of(seed, topology), log_probs_on(device, seed=seed, dtype=dtype), lengths_for(),
            beam=10.0, max_active=max_active, **options_of(topology),
        )  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lattices_equal_those_of_the_cpu(device, topology):
    for coarse in (False, True):
        log_probs = log_probs_on(device, sized(20, 2), seed=6)
        both.assert_equal_lattices(
            graph_of(6, topology, coarse), torch.round(log_probs) if coarse else log_probs,
            lengths_for(len(log_probs)), beam=6.0, lattice_beam=5.0, n_best=10, max_active=300,
            **options_of(topology),
        )  # fmt: skip


# ------ paged_biglm on a GPU finds what it finds on the CPU: tokens, results and look-ups, to the bit
needs_kaldifst = pytest.mark.skipif(find_spec("kaldifst") is None, reason="needs kaldifst")
FRAMES = sized(60, 6)


def inputs_on(device, batch=BATCH, **options):
    return log_probs_on(device, batch, FRAMES, **options)


def check(graph, lms, log_probs, requests=None, **options):
    options = {"columns": COLUMNS, "threads": 0, **options}
    both.assert_equal_paged(graph, lms, log_probs, lengths_for(len(log_probs), FRAMES), requests, **options)


@needs_kaldifst
@pytest.mark.parametrize("placement", ["device", "paged"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_paged_lms_of_any_topology_and_placement_equal_the_cpu(device, topology, placement):
    for seed, max_active in enumerate(sized((10_000, 700, 50), (50,))):
        check(
            graph_of(seed, topology), both.pair(seed, nested=seed == 1), inputs_on(device, seed=seed),
            topology=topology, placement=placement, beam=10.0, max_active=max_active, chunk=FRAMES // 2,
        )  # fmt: skip


@needs_kaldifst
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_paged_lattices_equal_those_of_the_cpu(device, topology):
    check(
        graph_of(2, topology), both.pair(2), inputs_on(device, sized(20, 2), seed=6),
        topology=topology, lattice=True, n_best=10, lattice_beam=5.0, beam=6.0, max_active=300,
    )  # fmt: skip


@needs_kaldifst
def test_many_lm_histories_in_one_state_equal_the_cpu(device):
    """An LM with so many states that groups are large."""
    order, keep = sized((6, 0.9), (3, 0.9))
    lms = LM(lm_table(seed=1, words=both.WORDS)), LM(lm_table(seed=2, words=both.WORDS, order=order, keep=keep))
    log_probs = inputs_on(device, sized(20, 2), seed=7, sharpness=0.5)
    check(graph_of(4), lms, log_probs, beam=20.0, max_active=sized(5000, 200))


@needs_kaldifst
def test_small_cache_shared_by_all_blocks_gives_the_same(device, monkeypatch):
    placed = cuda_engine.PlacedLM
    monkeypatch.setattr(cuda_engine, "PlacedLM", lambda arrays, how, _, name: placed(arrays, how, 64, name))
    graph, lms = graph_of(5), both.pair(0)
    options = {"placement": "paged", "beam": 10.0, "max_active": 300}
    check(graph, lms, inputs_on(device, seed=8), **options)
    decoder = both.on("cuda", graph, lms, columns=COLUMNS, **options)
    assert all(nbest.work.cache_misses for nbest in decoder.decode(inputs_on(device, seed=8), [FRAMES] * BATCH))
