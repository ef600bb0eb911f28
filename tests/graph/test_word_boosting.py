"""Boosting per utterance against the same bonuses composed into the graph."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from tests.graph.toy import PIECES, WORDS
from tests.oracles.ngram import earned
from tests.oracles.viterbi import viterbi
from tests.random_models import random_log_probs
from tests.search.word_graph.models import fst_of, make, toy_graph

pytest.importorskip("kaldifst")
FRAMES = 20


def log_probs_of(seed):
    return random_log_probs(4, FRAMES, len(PIECES) + 1, seed=seed)


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
@pytest.mark.parametrize("seed", range(3))
def test_words_are_boosted_as_by_composition(topology, seed):
    graph, bonuses = toy_graph(seed), {"cab": 3.0, "bb": 1.5, "AB": 2.0, "a": -1.0}
    composed = fst_of(graph)
    for word, bonus in bonuses.items():
        composed.arcs["cost"][composed.arcs["output"] == graph.word_ids[word]] -= np.float32(bonus)
    static = WordGraph.from_fst(composed, graph.words)
    log_probs = log_probs_of(seed)
    request = Request(boosting=build_word_boosting(bonuses, graph))
    boosted = make(graph, topology=topology).decode(log_probs, [FRAMES] * 4, [request] * 4)
    plain = make(graph, topology=topology).decode(log_probs, [FRAMES] * 4)
    expected = make(static, topology=topology).decode(log_probs, [FRAMES] * 4)
    for ours, theirs in zip(boosted, expected, strict=True):
        assert ours.best.score == pytest.approx(theirs.best.score, abs=1e-4)
        assert ours.best.text == theirs.best.text
        counted = sum(bonuses.get(word.text, 0.0) for word in ours.best.words)
        assert ours.best.parts.boosting == pytest.approx(counted, abs=1e-6)
    assert [n.best.text for n in boosted] != [n.best.text for n in plain]


@pytest.mark.parametrize("seed", range(3))
def test_words_are_boosted_in_the_exact_search(seed):
    graph, bonuses = toy_graph(seed), {"abc": 2.5, "a": 1.0}
    by_label = {graph.word_ids[word]: bonus for word, bonus in bonuses.items()}
    decoder = make(graph, boosting=build_word_boosting(bonuses, graph))
    for b, nbest in enumerate(decoder.decode(log_probs_of(seed), [FRAMES] * 4)):
        cost, words = viterbi(fst_of(graph), log_probs_of(seed)[b].numpy(), len(PIECES), "compact", bonus=by_label)
        assert nbest.best.score == pytest.approx(-cost, abs=1e-4)
        assert tuple(word.label for word in nbest.best.words) == words


@pytest.mark.parametrize("seed", range(4))
def test_phrases_earn_their_bonus_whole_or_not_at_all(seed):
    graph = toy_graph(1)
    bonuses = {"a bb": 3.0, "bb cab": 2.0, "abc abc abc": 5.0, "cab": 1.0, "a a": -2.5, "abc": -0.5}
    boosting = build_word_boosting(bonuses, graph)
    by_labels = {tuple(graph.word_ids[word] for word in phrase.split()): bonus for phrase, bonus in bonuses.items()}
    results = make(graph, boosting=boosting).decode(log_probs_of(seed), [FRAMES] * 4)
    plain = make(graph).decode(log_probs_of(seed), [FRAMES] * 4)
    for ours, theirs in zip(results, plain, strict=True):
        labels = [word.label for word in ours.best.words]
        assert ours.best.parts.boosting == pytest.approx(earned(labels, by_labels), abs=1e-4)
        without = [word.label for word in theirs.best.words]
        least = theirs.best.score + earned(without, by_labels)
        assert ours.best.score >= least - 1e-4  # what was best before is still there, bonus included


def test_phrases_are_searched_exactly_among_all_texts():
    """The best of all texts up to three words, each scored by forced paths, against the search."""
    import itertools

    graph, bonuses = toy_graph(2), {"a bb": 4.0, "bb a a": 3.0, "a": -0.5}
    boosting = build_word_boosting(bonuses, graph)
    log_probs = random_log_probs(1, 9, len(PIECES) + 1, seed=11)
    by_labels = {tuple(graph.word_ids[word] for word in phrase.split()): bonus for phrase, bonus in bonuses.items()}
    best = max(
        (forced_score(graph, text, log_probs) + earned(text, by_labels), text)
        for n in (0, 1, 2, 3, 4)
        for text in itertools.product([graph.word_ids[word] for word in WORDS], repeat=n)
        if n < 3 or {graph.word_ids["a"], graph.word_ids["bb"]} >= set(text)
    )
    found = make(graph, boosting=boosting).decode(log_probs, [9])[0].best
    labels = tuple(word.label for word in found.words)
    assert found.score >= best[0] - 1e-4
    assert found.score == pytest.approx(forced_score(graph, labels, log_probs) + earned(labels, by_labels), abs=1e-4)


def forced_score(graph, text, log_probs):
    """Score of one text: the graph composed with it, searched exactly."""
    full = fst_of(graph)
    size = len(full.final_costs)
    arcs, begin = [], [0]
    for position in range(len(text) + 1):
        for state in range(size):
            for arc in full.arcs[full.arc_begin[state] : full.arc_begin[state + 1]]:
                word = int(arc["output"])
                if word and (position == len(text) or text[position] != word):
                    continue
                target = int(arc["target"]) + size * (position + (word > 0))
                arcs.append((arc["input"], word, arc["cost"], target))
            begin.append(len(arcs))
    final = np.full(size * (len(text) + 1), np.inf, np.float32)
    final[-size:] = full.final_costs
    composed = type(full)(full.start, final, np.array(begin), np.array(arcs, full.arcs.dtype))
    return -viterbi(composed, log_probs[0].numpy(), len(PIECES), "compact")[0]


def test_word_sequence_labels_are_boosted():
    """a, then the words one and two emitted by epsilons one after the other."""
    from tests.graph.test_store import fst

    words = ("<eps>", "zero", "one", "two")
    arcs = [(0, 1, 1, 0.1, 1), (1, 0, 2, 0.2, 2), (2, 0, 3, 0.3, 3), (3, 2, 0, 0.0, 4)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), words)
    assert len(graph.arrays.word_sequences) == 1
    log_probs = random_log_probs(1, 6, 4, seed=0)
    plain = make(graph, vocab_size=3, blank_id=3).decode(log_probs, [6])[0].best
    for phrases, bonus in (({"one": 1.0}, 1.0), ({"one two": 2.0}, 2.0), ({"zero one two": 2.5, "two": 1.0}, 3.5)):
        boosting = build_word_boosting(phrases, graph)
        best = make(graph, vocab_size=3, blank_id=3, boosting=boosting).decode(log_probs, [6])[0].best
        assert best.text == plain.text == "zero one two"
        assert best.score == pytest.approx(plain.score + bonus, abs=1e-4)


def test_bad_phrases_are_named():
    graph = toy_graph(0)
    for phrases, message in (
        ({"a zebra": 1.0}, "the graph has not all words of 'a zebra' \\('zebra'\\)"),
        ({" ": 1.0}, "an empty phrase"),
        ({"a": 0.0}, "the bonus of 'a' is 0.0"),
        ({}, "no phrase that the graph could find"),
    ):
        with pytest.raises(ValueError, match=message):
            build_word_boosting(phrases, graph)
    with pytest.raises(ValueError, match="missing is 'maybe'"):
        build_word_boosting({"a": 1.0}, graph, missing="maybe")


def test_unknown_phrases_can_be_left_out_with_a_warning(caplog):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    boosting = build_word_boosting({"a": 1.0, "zebra": 2.0}, toy_graph(0), missing="skip")
    assert boosting.score([toy_graph(0).word_ids["a"]]) == pytest.approx(1.0)
    assert "'zebra'" in caplog.text
