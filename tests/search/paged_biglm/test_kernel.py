"""The kernel, run by the emulator, finds what the CPU finds: to the bit, whatever the options.

The race checker is on in all tests here: compiling a kernel twice takes longer than checking it.
"""

from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_composition, kernel_abi
from tests.graph.toy import BLANK, PIECES
from tests.random_models import random_log_probs
from tests.search.paged_biglm.both import (
    COLUMNS,
    WORDS,
    assert_equal,
    everything,
    limit_tokens,
    on,
    random_case,
)
from tests.search.paged_biglm.models import LM, lm_table, nested_pair, random_lm

pytest.importorskip("kaldifst")
pytestmark = [
    pytest.mark.usefixtures("emulated_runtime", "small_blocks"),
    pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"]),
]

TOPOLOGIES = ("compact", "normal", "minimal", "graph")
T = 8
PHRASES = {"w1": 2.0, "w2 w3": 3.0, "w4 w1 w2": 4.0, "w3": 0.5}


def log_probs_of(seed, frames=T, columns=COLUMNS, sharpness=1.0):
    return random_log_probs(2, frames, columns, seed=seed, sharpness=sharpness)


def case(seed, topology="compact", **options):
    return random_case(seed, blank=COLUMNS - 1 if topology == "graph" else None, **options)


@pytest.mark.parametrize("difference", ["always", "never"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_random_graphs(topology, difference):
    """Epsilon chains of several words, states with many arcs, costs below zero; whole and in chunks."""
    for seed in range(2):
        tokens, _, works, *_ = assert_equal(
            *case(seed, topology, nested=True), log_probs_of(seed), [T, T - 3], topology=topology,
            difference=difference, beam=(5.0, 8.0)[seed], lm_weight=0.8,
            large_lm_weight=(0.6, 1.0)[seed], chunk=(0, 3)[seed],
        )  # fmt: skip
        assert min(map(len, tokens)) > 1
        assert min(look_ups for look_ups, *_ in works) > 0


@pytest.mark.parametrize("topology", TOPOLOGIES[:3])
def test_word_graphs(topology):
    for lms in (nested_pair(0), (random_lm(1), random_lm(20, keep=0.8))):
        log_probs = random_log_probs(3, 16, len(PIECES) + 1, seed=2, sharpness=3.0)
        assert_equal(
            lms[0].graph, lms, log_probs, [16, 0, 11],
            topology=topology, columns=BLANK + 1, beam=9.0, acoustic_scale=1.3, chunk=5,
        )  # fmt: skip


@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_boosting_and_weights_of_single_utterances(topology):
    graph, lms = case(1)
    boosting = build_word_boosting(PHRASES, graph)
    requests = [Request(boosting=boosting, boosting_weight=1.5, lm_weight=0.3), None]
    assert_equal(graph, lms, log_probs_of(4), [T, 7], requests, topology=topology, beam=8.0)
    assert_equal(graph, lms, log_probs_of(5), [T, 7], topology=topology, boosting=boosting, beam=8.0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ties_are_broken_alike(topology):
    """Costs of few different values: most tokens have several best ways, most groups equal histories."""
    for seed, sharpness, wishes in ((0, 0.0, False), (1, 2.0, True), (2, 1.0, False)):
        graph, lms = case(seed, topology, coarse=True)
        boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0, "w3 w1": 2.0}, graph)
        assert_equal(
            graph, lms, torch.round(log_probs_of(seed, 6, sharpness=sharpness)), [6, 4],
            topology=topology, boosting=boosting if wishes else None, beam=5.0, group_size=2 * seed,
        )  # fmt: skip


@pytest.mark.parametrize("group_size", [1, 3])
def test_group_size(group_size):
    graph, lms = case(3)
    narrow, full = (
        assert_equal(graph, lms, log_probs_of(3, sharpness=0.5), [T, 5], beam=12.0, group_size=size)
        for size in (group_size, 0)
    )
    assert narrow[0] != full[0]


@pytest.mark.parametrize("max_active", [1, 12])
def test_max_active(max_active):
    graph, lms = case(2)
    _, limits, *_ = assert_equal(
        graph, lms, log_probs_of(2, sharpness=0.7), [T, 6], max_active=max_active, beam=12.0
    )
    assert sum(limited for ((limited, _),) in limits) > 0


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("capacity", [4, 16])
def test_tables_that_are_too_small(monkeypatch, capacity, coarse):
    limit_tokens(monkeypatch, capacity)
    graph, lms = case(1, coarse=coarse)
    log_probs = log_probs_of(1, sharpness=0.5)
    _, limits, *_ = assert_equal(
        graph, lms, torch.round(log_probs) if coarse else log_probs, [T, 5],
        max_active=capacity // 4, beam=12.0, topology="normal",
    )  # fmt: skip
    assert sum(overflowed for ((_, overflowed),) in limits) > 0


@pytest.mark.parametrize("lattice_beam", [1.0, 8.0])
@pytest.mark.parametrize("topology", ["compact", "normal", "graph"])
def test_lattices(topology, lattice_beam):
    for seed in range(2):
        graph, lms = case(seed, topology, coarse=seed == 1)
        boosting = build_word_boosting(PHRASES, graph) if seed else None
        *_, lattices = assert_equal(
            graph, lms, log_probs_of(seed, 6), [6, 4], topology=topology, beam=8.0, boosting=boosting,
            lattice=True, n_best=5, lattice_beam=lattice_beam, chunk=4,
        )  # fmt: skip
        assert max(map(len, lattices)) > 6


@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_eager_composition(topology):
    for seed in range(2):
        graph, lms = case(seed, coarse=seed == 1)
        _, _, works, *_ = assert_equal(
            graph, lms, log_probs_of(seed, 5), [5, 3], topology=topology, composition="eager", beam=7.0,
            boosting=build_word_boosting(PHRASES, graph) if seed else None,
        )  # fmt: skip
        assert min(look_ups for look_ups, *_ in works) > 0


def test_many_histories_in_one_state():
    """So many that all threads sort them together."""
    graph, _ = case(0, states=6)
    lms = LM(lm_table(seed=1, words=WORDS)), LM(lm_table(seed=2, words=WORDS, order=4, keep=0.9))
    log_probs = log_probs_of(1, 7, sharpness=0.2)
    tokens, *_ = assert_equal(graph, lms, log_probs, [7, 2], beam=40.0, max_active=2000)
    keys = [key >> 32 for key, *_ in tokens[0]]
    assert max(map(keys.count, keys)) > kernel_abi.SORTED_BY_WARP


@pytest.mark.parametrize("least_groups", [4, 1000])
def test_members_and_visits_get_more_room(monkeypatch, least_groups):
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", least_groups)
    graph, lms = case(2, states=60)
    options, log_probs = {"max_active": 8, "beam": 12.0}, log_probs_of(2, sharpness=0.7)
    assert_equal(graph, lms, log_probs, [T, 5], **options)
    decoder = on("cuda", graph, lms, **options)
    streams = decoder.open(2)
    decoder.push(streams, log_probs, [T, 5])
    assert (streams.engine._grown > 0) == (least_groups == 4)


@pytest.mark.parametrize("cache_bytes", [16, 10**6])
def test_paged_arcs_give_the_same(monkeypatch, cache_bytes):
    placed = cuda_composition.PlacedLM
    monkeypatch.setattr(
        cuda_composition, "PlacedLM", lambda arrays, how, _, name: placed(arrays, how, cache_bytes, name)
    )
    graph, lms = case(1)
    options = {"beam": 9.0, "placement": "paged"}
    assert_equal(graph, lms, log_probs_of(1), [T, 5], **options)
    decoder = on("cuda", graph, lms, **options)
    streams = decoder.open(2)
    decoder.push(streams, log_probs_of(1), [T, 5])
    statistics = streams.engine.lookup_statistics
    assert statistics.misses > 0
    assert (statistics.hits > statistics.misses) == (cache_bytes > 16)


def test_partial_results():
    graph, lms = case(0)
    log_probs, results = log_probs_of(6), []
    for backend in ("cpu", "cuda"):
        decoder = on(backend, graph, lms, beam=9.0)
        streams, early = decoder.open(2), []
        for begin in range(0, T, 3):
            size = min(3, T - begin)
            decoder.push(streams, log_probs[:, begin : begin + size], [size, size // 2])
            early.append(
                [(n.best.text, n.best.score, n.relative_cost) for n in decoder.partial(streams)]
            )
        results.append((early, [n.best.score for n in decoder.close(streams)]))
    assert results[0] == results[1]


def test_all_of_a_search_is_compared():
    graph, lms = case(0)
    assert everything(on("cpu", graph, lms, beam=5.0), log_probs_of(0), [T, 5]) != everything(
        on("cpu", graph, lms, beam=9.0), log_probs_of(0), [T, 5]
    )
