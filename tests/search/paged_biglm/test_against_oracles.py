"""The search against all texts rescored by definition, and against a graph of the large LM."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from tests.graph.toy import BLANK, WORDS
from tests.oracles.rescoring import rescored
from tests.oracles.viterbi import all_texts
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import fst_of
from tests.search.paged_biglm.models import ALL, LM, VOCAB, WIDE, make, nested_pair, random_lm

pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")
COMPOSITIONS = ("lazy", "eager")
FRAMES = 6


def expected_texts(small, large, log_probs, topology, weight=1.0, lm_weight=1.0, **scales):
    """{words: cost}, cheapest first."""
    graph = small.graph
    labelled = all_texts(
        fst_of(graph), log_probs.numpy(), BLANK, topology, lm_weight=lm_weight, **scales
    )
    texts = {tuple(graph.words[w] for w in text): cost for text, cost in labelled.items()}
    return rescored(texts, small.table, large.table, lm_weight * weight)


def assert_best(nbest, expected):
    text, cost = next(iter(expected.items()))
    assert not nbest.notes
    assert nbest.best.score == pytest.approx(-cost, abs=2e-4)
    assert tuple(nbest.best.text.split()) == text


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_best_of_all_texts_is_found(topology, composition):
    scales = {"lm_weight": 0.8, "acoustic_scale": 1.3}
    for seed in range(3):
        small, large = random_lm(seed), random_lm(seed + 10, keep=0.7)
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        decoder = make(
            small, large, topology=topology, composition=composition, large_lm_weight=0.6, **scales
        )
        expected = expected_texts(small, large, log_probs[0], topology, weight=0.6, **scales)
        assert_best(decoder.decode(log_probs, [FRAMES])[0], expected)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("difference", ["always", "never"])
def test_nested_lms_are_one_automaton_or_two(difference, composition):
    for seed in range(3):
        small, large = nested_pair(seed)
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        decoder = make(small, large, difference=difference, composition=composition)
        nbest = decoder.decode(log_probs, [FRAMES])[0]
        assert_best(nbest, expected_texts(small, large, log_probs[0], "compact"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("large_seed", [20, 21])
def test_static_eager_and_lazy_composition_agree(topology, large_seed):
    small, large = random_lm(1), random_lm(large_seed, keep=0.8)
    log_probs = random_log_probs(16, 25, VOCAB + 1, seed=large_seed)
    config = WFSTConfig(topology=topology, beam=WIDE, max_active=ALL, threads=1)
    static = CudaWFST(large.graph, VOCAB, BLANK, config).decode(log_probs, [25] * 16)
    for composition in COMPOSITIONS:
        decoder = make(small, large, topology=topology, composition=composition)
        results = decoder.decode(log_probs, [25] * 16)
        for ours, theirs in zip(results, static, strict=True):
            assert ours.best.score == pytest.approx(theirs.best.score, abs=2e-4)
            assert ours.best.text == theirs.best.text
            assert ours.best.parts.lm == pytest.approx(theirs.best.parts.lm, abs=2e-4)
    plain = CudaWFST(small.graph, VOCAB, BLANK, config).decode(log_probs, [25] * 16)
    assert [n.best.text for n in plain] != [n.best.text for n in static]


@pytest.mark.parametrize("beam", [3.0, 8.0, WIDE])
def test_the_same_lm_twice_changes_nothing(beam):
    small = random_lm(3)
    log_probs = random_log_probs(6, 30, VOCAB + 1, seed=4)
    config = WFSTConfig(beam=beam, max_active=ALL, threads=1)
    expected = CudaWFST(small.graph, VOCAB, BLANK, config).decode(log_probs, [30] * 6)
    for difference in ("always", "never"):
        results = make(small, small, beam=beam, difference=difference).decode(log_probs, [30] * 6)
        for ours, theirs in zip(results, expected, strict=True):
            assert ours.best.score == pytest.approx(theirs.best.score, abs=1e-4)
            assert ours.best.text == theirs.best.text


def test_weight_0_is_the_small_lm_alone():
    small, large = random_lm(3), random_lm(4)
    log_probs = random_log_probs(4, 20, VOCAB + 1, seed=4)
    config = WFSTConfig(beam=WIDE, max_active=ALL, threads=1)
    expected = CudaWFST(small.graph, VOCAB, BLANK, config).decode(log_probs, [20] * 4)
    results = make(small, large, large_lm_weight=0.0).decode(log_probs, [20] * 4)
    assert [n.best.text for n in results] == [n.best.text for n in expected]
    assert [n.best.score for n in results] == pytest.approx([n.best.score for n in expected], abs=1e-4)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_words_that_the_large_lm_lacks_are_its_unk(composition):
    small = random_lm(5)
    large = LM(random_lm(6, words=tuple(w for w in WORDS if w not in ("a", "bb"))).table)
    for seed in range(3):
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        nbest = make(small, large, composition=composition).decode(log_probs, [FRAMES])[0]
        assert_best(nbest, expected_texts(small, large, log_probs[0], "compact"))


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_an_lm_without_sentence_ends_ends_for_nothing(composition):
    small = random_lm(5)
    table = {gram: value for gram, value in random_lm(7).table.items() if "</s>" not in gram}
    log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=2)
    nbest = make(small, LM(table), composition=composition).decode(log_probs, [FRAMES])[0]
    assert_best(nbest, expected_texts(small, LM(table), log_probs[0], "compact"))


def test_the_end_of_the_sentence_is_rescored():
    """Two LMs that differ in </s> alone."""
    small = random_lm(8)
    table = dict(small.table)
    for gram, (prob, backoff) in small.table.items():
        if gram[-1] == "</s>":
            table[gram] = prob - 5.0 * (gram[-2:-1] != ("cab",)), backoff
    log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=5)
    nbest = make(small, LM(table)).decode(log_probs, [FRAMES])[0]
    expected = expected_texts(small, LM(table), log_probs[0], "compact")
    assert_best(nbest, expected)
    plain = expected_texts(small, small, log_probs[0], "compact")
    assert next(iter(expected)) != next(iter(plain))


def test_lattices_hold_every_text_within_their_beam_at_its_true_cost():
    small, large = random_lm(1), random_lm(22, keep=0.7)
    for seed in range(3):
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        expected = expected_texts(small, large, log_probs[0], "compact")
        least = next(iter(expected.values()))
        near = {text: cost for text, cost in expected.items() if cost < least + 5.9}
        decoder = make(small, large, n_best=400, lattice_beam=6.0)
        nbest = decoder.decode(log_probs, [FRAMES])[0]
        found = {tuple(path.text.split()): -path.score for path in nbest}
        assert len(near) > 5
        for text, cost in near.items():
            assert found[text] == pytest.approx(cost, abs=2e-4)
        assert [path.score for path in nbest] == sorted((p.score for p in nbest), reverse=True)


def test_words_told_by_one_epsilon_after_the_other():
    """a, then the words one and two told without a frame: one look-up each, in their order."""
    from nemo_gpu_decoding.graph.csr import WordGraph
    from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig
    from nemo_gpu_decoding.search.word_graph.decoder import PagedBigLM
    from tests.graph.test_store import fst
    from tests.oracles.rescoring import sentence_cost
    from tests.search.paged_biglm.models import lm_table

    words = ("zero", "one", "two")
    arcs = [(0, 1, 1, 0.1, 1), (1, 0, 2, 0.2, 2), (2, 0, 3, 0.3, 3), (3, 2, 0, 0.0, 4)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), ("<eps>", *words))
    assert len(graph.arrays.compounds) == 1
    small, large = (LM(lm_table(seed=seed, words=words)) for seed in (1, 2))
    log_probs = random_log_probs(1, 6, 4, seed=0)
    plain = CudaWFST(graph, 3, 3).decode(log_probs, [6])[0].best
    difference = sentence_cost(large.table, words) - sentence_cost(small.table, words)
    for composition in COMPOSITIONS:
        config = PagedBigLMConfig(composition=composition)
        decoder = PagedBigLM(graph, 3, 3, large.packed, small.packed, config)
        best = decoder.decode(log_probs, [6])[0].best
        assert best.text == "zero one two"
        assert best.score == pytest.approx(plain.score - difference, abs=1e-4)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_ready_made_graphs_are_rescored_too(tmp_path, topology, composition):
    from nemo_gpu_decoding.graph.build import load_fst_graph
    from tests.graph.ready_made import write_tlg

    small, large = random_lm(1), random_lm(20, keep=0.8)
    write_tlg(fst_of(small.graph), topology, BLANK, VOCAB, tmp_path / "tlg.fst")
    ready_made = load_fst_graph(tmp_path / "tlg.fst", small.graph.words)
    log_probs = random_log_probs(4, 15, VOCAB + 1, seed=6)
    native = make(small, large, topology=topology, composition=composition)
    loaded = make(small, large, graph=ready_made, topology="graph", composition=composition)
    expected = native.decode(log_probs, [15] * 4)
    for ours, theirs in zip(loaded.decode(log_probs, [15] * 4), expected, strict=True):
        assert ours.best.score == pytest.approx(theirs.best.score, abs=2e-4)
        assert ours.best.text == theirs.best.text
