"""Lattices of the kernels, run by the emulator: link for link those of the CPU, whatever the options."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from nemo_gpu_decoding.search.word_graph.decoder import NO_END
from tests.contract.facts import all_facts
from tests.graph.test_store import fst
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import (
    assert_equal_lattices,
    assert_same_lattice,
    limit_tokens,
    on_cpu,
    on_cuda,
)
from tests.search.cuda_wfst.models import random_graph, toy_graph

pytest.importorskip("kaldifst")
pytestmark = pytest.mark.usefixtures("emulated_runtime", "small_blocks")

TOPOLOGIES = ("compact", "normal", "minimal", "graph")
COLUMNS = 12
OPTIONS = {"vocab_size": COLUMNS - 1, "blank_id": COLUMNS - 1, "beam": 8.0, "n_best": 6}


def log_probs_of(seed, frames=8, columns=COLUMNS, sharpness=1.0):
    return random_log_probs(2, frames, columns, seed=seed, sharpness=sharpness)


def graph_of(seed, topology="compact", **shape):
    blank = COLUMNS - 1 if topology == "graph" else None
    return random_graph(seed, columns=COLUMNS, blank=blank, **shape)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("lattice_beam", [1.0, 6.0])
def test_random_graphs(topology, lattice_beam):
    """Epsilon chains, arcs that share a label, costs below zero; phrases in one of two utterances."""
    links = 0
    for seed in range(2):
        graph = graph_of(seed, topology)
        found = assert_equal_lattices(
            graph, log_probs_of(seed), [8, 5], topology=topology, lattice_beam=lattice_beam,
            boosting=build_word_boosting({"w1": 1.5, "w2 w3": 2.0}, graph) if seed else None, **OPTIONS,
        )  # fmt: skip
        links += sum(nbest.lattice.num_links for nbest in found)
    assert links > 50
    assert any(len(nbest) > 1 for nbest in found)


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
def test_word_graphs(topology):
    log_probs = random_log_probs(3, 15, len(PIECES) + 1, seed=2, sharpness=2.0)
    found = assert_equal_lattices(
        toy_graph(0), log_probs, [15, 0, 9], topology=topology, beam=12.0, n_best=10, lm_weight=0.7,
        acoustic_scale=1.3,
    )  # fmt: skip
    assert all(word.confidence is not None for nbest in found for word in nbest.best.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ties_are_broken_alike(topology):
    """Costs of few different values: n best that cost the same come in the same order."""
    log_probs = torch.round(log_probs_of(3))
    graph = graph_of(3, topology, coarse=True)
    found = assert_equal_lattices(
        graph, log_probs, [8, 6], topology=topology, **{**OPTIONS, "beam": 4.0, "n_best": 20}
    )
    scores = [path.score for nbest in found for path in nbest]
    assert len(set(scores)) < len(scores)


@pytest.mark.parametrize("topology", ["compact", "normal"])
@pytest.mark.parametrize("capacity", [16, 60])
def test_tables_that_are_too_small(monkeypatch, capacity, topology):
    limit_tokens(monkeypatch, capacity)
    monkeypatch.setattr(kernel_abi, "LEAST_GROUPS", 32)
    told = 0
    for seed in range(2):
        found = assert_equal_lattices(
            graph_of(seed), log_probs_of(seed, sharpness=0.5), [8, 5], topology=topology,
            max_active=capacity // 4, **{**OPTIONS, "beam": 12.0},
        )  # fmt: skip
        told += sum("a table was full" in note for nbest in found for note in nbest.notes)
    assert told > 0


@pytest.mark.parametrize("first_links", [1, 1 << 15])
def test_chunks_and_room_for_links(monkeypatch, first_links):
    """Links that fill their room, within a chunk and from chunk to chunk; partial results on the way."""
    monkeypatch.setattr(cuda_engine, "FIRST_LINKS", first_links)
    monkeypatch.setattr(cuda_engine, "FIRST_BACK_POINTERS", 1)
    grown = []
    grow = cuda_engine.CUDAEngine._with_more_links
    monkeypatch.setattr(
        cuda_engine.CUDAEngine, "_with_more_links", lambda *given: grown.append(1) or grow(*given)
    )
    graph, log_probs, lengths = graph_of(1), log_probs_of(1), [8, 5]
    options = {**OPTIONS, "max_active": 30, "lattice": True}
    streams = (decoder := on_cuda(graph, **options)).open(2)
    for begin, end in ((0, 1), (1, 5), (5, 8)):
        sizes = np.clip(np.array(lengths) - begin, 0, end - begin).tolist()
        decoder.push(streams, log_probs[:, begin:end], sizes)
        decoder.partial(streams)
    expected = on_cpu(graph, **options).decode(log_probs, lengths)
    found = decoder.close(streams)
    assert all_facts(found) == all_facts(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)
    assert (len(grown) > 1) == (first_links == 1)


def test_a_refused_chunk_leaves_links_alone():
    graph, log_probs = graph_of(2), log_probs_of(2)
    decoder = on_cuda(graph, **OPTIONS, max_active=100, lattice=True)
    streams = decoder.open(2)
    decoder.push(streams, log_probs[:, :4], [4, 4])
    bad = log_probs[:, 4:].clone()
    bad[1, 2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"log_probs\[1, 2, 3\] is nan"):
        decoder.push(streams, bad, [4, 4])
    decoder.push(streams, log_probs[:, 4:], [4, 1])
    expected = decoder.decode(log_probs, [8, 5])
    for ours, theirs in zip(decoder.close(streams), expected, strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)


def test_without_an_end_the_lattice_ends_anywhere():
    graph = WordGraph.from_fst(fst([(0, 1, 1, 0.1, 1), (1, 2, 2, 0.1, 2)], 3, [2]), ("<eps>", "a", "b"))
    log_probs = random_log_probs(1, 1, 3, seed=0)
    (nbest,) = assert_equal_lattices(graph, log_probs, [1], vocab_size=2, blank_id=2, n_best=3)
    assert nbest.notes == (NO_END,)
    assert len(nbest) == 2
