"""The kernels, run by the emulator, find what the CPU finds: to the bit, whatever the options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.build import load_fst_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.contract.facts import all_facts
from tests.graph.ready_made import write_tlg
from tests.graph.test_store import fst
from tests.graph.toy import BLANK, PIECES
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import assert_equal, limit_tokens, on_cpu, on_cuda
from tests.search.cuda_wfst.models import fst_of, random_graph, toy_graph

pytest.importorskip("kaldifst")
pytestmark = pytest.mark.usefixtures("emulated_runtime", "small_blocks")

COLUMNS, T = len(PIECES) + 1, 20
TOPOLOGIES = ("compact", "normal", "minimal")


def log_probs_of(seed, batch=3, frames=T, columns=COLUMNS, sharpness=2.0):
    return random_log_probs(batch, frames, columns, seed=seed, sharpness=sharpness)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_word_graphs(topology, sharpness):
    for seed in range(3):
        assert_equal(
            toy_graph(seed), log_probs_of(seed, sharpness=sharpness), [T, 0, 13],
            topology=topology, beam=12.0, lm_weight=0.7, acoustic_scale=1.3,
        )  # fmt: skip


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "graph"])
@pytest.mark.parametrize("seed", range(4))
def test_random_graphs(topology, seed):
    """Any arcs, epsilon chains of several words, states with many arcs, costs below zero."""
    graph = random_graph(seed, columns=12, blank=11 if topology == "graph" else None)
    found = assert_equal(
        graph, log_probs_of(seed, 2, 12, 12, sharpness=1.5), [12, 9], vocab_size=11, blank_id=11,
        topology=topology, beam=(3.0, 6.0, 9.0, 20.0)[seed], lm_weight=0.8,
    )  # fmt: skip
    assert any(nbest.best.words for nbest in found)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ready_made_graphs(tmp_path, topology):
    graph = toy_graph(1)
    write_tlg(fst_of(graph), topology, BLANK, len(PIECES), tmp_path / "tlg.fst")
    ready_made = load_fst_graph(tmp_path / "tlg.fst", graph.words)
    assert_equal(ready_made, log_probs_of(7), [T, 12, 5], topology="graph", beam=15.0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_boosting_and_weights_of_single_utterances(topology):
    graph = toy_graph(0)
    phrases = [{"cab": 3.0, "a bb": 2.0}, {"abc abc": 5.0, "bb": 1.0}, {"AB": 1.5}]
    trees = [build_word_boosting(bonuses, graph) for bonuses in phrases]
    requests = [
        Request(boosting=trees[0], boosting_weight=1.5, lm_weight=0.3), None,
        Request(boosting=trees[1]), Request(lm_weight=0.0), Request(boosting=trees[1], lm_weight=2.0),
    ]  # fmt: skip
    lengths = [T, 11, 0, 17, T]
    for own in (None, trees[2]):
        assert_equal(
            graph, log_probs_of(4, 5), lengths, requests, topology=topology, boosting=own, beam=10.0
        )


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(2))
def test_boosting_on_random_graphs(topology, seed):
    graph = random_graph(seed, columns=12)
    boosting = build_word_boosting({"w1": 2.0, "w2 w3": 3.0, "w4 w1 w2": 4.0, "w3": 0.5}, graph)
    assert_equal(
        graph, log_probs_of(seed, 2, 10, 12), [10, 7], vocab_size=11, blank_id=11, topology=topology,
        boosting=boosting, beam=8.0,
    )  # fmt: skip


def test_chains_of_compounded_words():
    words = ("<eps>", "zero", "one", "two")
    arcs = [
        (0, 1, 1, 0.1, 1),
        (1, 0, 2, 0.2, 2),
        (2, 0, 3, 0.3, 3),
        (3, 2, 0, 0.0, 4),
        (4, 1, 0, 0.1, 1),
    ]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), words)
    assert len(graph.arrays.compounds)
    boosting = build_word_boosting({"zero one two": 2.5, "two": 1.0, "one": 0.5}, graph)
    assert_equal(
        graph, log_probs_of(0, 2, 9, 4), [9, 6], vocab_size=3, blank_id=3, boosting=boosting, beam=9.0
    )


@pytest.mark.parametrize("topology", [*TOPOLOGIES, "graph"])
def test_ties_are_broken_alike(topology):
    """Costs of few different values: most tokens have several best ways."""
    for seed in range(3):
        graph = random_graph(seed, columns=12, blank=11 if topology == "graph" else None, coarse=True)
        boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0, "w3 w1": 2.0}, graph)
        for sharpness in (0.0, 2.0):
            log_probs = torch.round(log_probs_of(seed, 2, 10, 12, sharpness))
            for wish in (None, boosting):
                assert_equal(
                    graph, log_probs, [10, 8], vocab_size=11, blank_id=11, topology=topology,
                    boosting=wish, beam=5.0,
                )  # fmt: skip


@pytest.mark.parametrize("max_active", [1, 3, 10, 40])
def test_max_active(max_active):
    for seed in range(3):
        graph = random_graph(seed, columns=12)
        assert_equal(
            graph, log_probs_of(seed, 2, 10, 12, 0.7), [10, 8], vocab_size=11, blank_id=11,
            max_active=max_active, beam=12.0,
        )  # fmt: skip


@pytest.mark.parametrize("capacity", [4, 16, 60])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_tables_that_are_too_small(monkeypatch, capacity, coarse, topology):
    limit_tokens(monkeypatch, capacity)
    told = 0
    for seed in range(3):
        log_probs = log_probs_of(seed, 2, 8, 12, 0.5)
        found = assert_equal(
            random_graph(seed, columns=12, coarse=coarse),
            torch.round(log_probs) if coarse else log_probs,
            [8, 5], vocab_size=11, blank_id=11, max_active=capacity // 4, beam=12.0, topology=topology,
        )  # fmt: skip
        told += sum("a table was full" in note for nbest in found for note in nbest.notes)
    assert told > 0


@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_more_groups_than_fit(monkeypatch, topology):
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 32)
    for seed in range(3):
        for coarse in (False, True):
            log_probs = log_probs_of(seed, 2, 8, 12, 0.7)
            assert_equal(
                random_graph(seed, columns=12, states=60, coarse=coarse), log_probs, [8, 5],
                vocab_size=11, blank_id=11, max_active=16, beam=12.0, topology=topology,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    assert_equal(toy_graph(0), log_probs_of(5).to(dtype), [T, 3, 9], beam=9.0)


@pytest.mark.parametrize("blank_id", [0, 2])
def test_blank_may_be_any_column(blank_id):
    graph = toy_graph(0)
    arcs = graph.arrays.arcs.copy()
    arcs["label"] += arcs["label"] >= blank_id
    moved = WordGraph(graph.arrays._replace(arcs=arcs), graph.start, graph.words, None, name="moved")
    for topology in TOPOLOGIES:
        assert_equal(moved, log_probs_of(2), [T, 9, 1], blank_id=blank_id, topology=topology, beam=9.0)


def test_impossible_labels():
    log_probs = log_probs_of(3)
    log_probs[:, :, 2] = -float("inf")
    log_probs[0, 3:5, BLANK] = -float("inf")
    assert_equal(toy_graph(0), log_probs, [T] * 3)


@pytest.mark.parametrize("threads", [32, 64, 160])
def test_block_sizes(monkeypatch, threads):
    monkeypatch.setattr(kernel_abi, "THREADS", threads)
    graph = random_graph(1, columns=70)
    log_probs = log_probs_of(1, 2, 6, 70)
    assert_equal(graph, log_probs, [6, 4], vocab_size=69, blank_id=69, topology="normal", beam=9.0)


def test_rows_that_exceed_shared_memory_are_read_where_they_lie():
    columns = 40_000
    assert kernel_abi.shared_bytes(columns, 4, 227 * 1024)[1] == 0
    graph = random_graph(1, columns=30)
    log_probs = log_probs_of(1, 1, 3, columns, sharpness=4.0)
    assert_equal(graph, log_probs, [3], vocab_size=columns - 1, blank_id=columns - 1, beam=9.0)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_partial_results(topology):
    log_probs, results = log_probs_of(6), []
    for build in (on_cpu, on_cuda):
        decoder = build(toy_graph(0), topology=topology, beam=9.0, max_active=200)
        streams, early = decoder.open(3), []
        for begin in range(0, T, 5):
            decoder.push(streams, log_probs[:, begin : begin + 5], [5, 3, 0])
            early.append(all_facts(decoder.partial(streams)))
        results.append((early, all_facts(decoder.close(streams))))
    assert results[0] == results[1]


def test_counts_of_limited_frames_are_equal():
    graph, log_probs = random_graph(1, columns=12), log_probs_of(1, 2, 10, 12, 0.5)
    found = []
    for build in (on_cpu, on_cuda):
        decoder = build(graph, vocab_size=11, blank_id=11, max_active=6, beam=12.0)
        streams = decoder.open(2)
        decoder.push(streams, log_probs, [10, 6])
        known = streams.engine.results(range(2), 1, final=False)
        found.append([utterance.counters["limited"].tolist() for utterance in known])
    assert found[0] == found[1]
    assert np.sum(found) > 0
