"""Minimum Bayes risk against all texts of a list or of a lattice, one by one."""

import math
from functools import cache

import numpy as np
import pytest

from nemo_gpu_decoding.search.result import ScoreParts
from nemo_gpu_decoding.search.word_graph.lattice.determinize import WORD_ARC
from nemo_gpu_decoding.search.word_graph.lattice.mbr import align, matches, minimum_bayes_risk, with_confidence
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import Word, WordPath

WORDS = ("<eps>", "a", "b", "c")


@cache
def edit_distance(own, other):
    """By definition [Levenshtein]."""
    if not own or not other:
        return len(own) + len(other)
    replaced = edit_distance(own[:-1], other[:-1]) + (own[-1] != other[-1])
    return min(replaced, edit_distance(own[:-1], other) + 1, edit_distance(own, other[:-1]) + 1)


def random_texts(seed, n=6):
    """{text: probability}, different texts of 0 .. 5 words."""
    rng = np.random.default_rng(seed)
    texts = {tuple(rng.integers(1, len(WORDS), rng.integers(0, 6)).tolist()) for _ in range(n)}
    return dict(zip(sorted(texts), rng.dirichlet(np.ones(len(texts))).tolist(), strict=True))


def path_of(text, score, risk=None):
    none = np.zeros(0, np.int32)
    words = tuple(Word(WORDS[label], label, n, n + 1, n, n + 1) for n, label in enumerate(text))
    return WordPath(none, none, none, none, score, ScoreParts(score), words=words, risk=risk)


def text_of(path):
    return tuple(word.label for word in path.words)


def prefix_tree(texts):
    """The lattice in which each state but the last one has one past; the end of a text is an arc without a word."""
    prefixes = sorted({text[:n] for text in texts for n in range(len(text) + 1)}, key=lambda text: (len(text), text))
    number, rows = {prefix: n for n, prefix in enumerate(prefixes)}, []
    for prefix in prefixes:
        if prefix:
            rows.append((number[prefix[:-1]], number[prefix], prefix[-1], 0.0))
        if prefix in texts:
            rows.append((number[prefix], len(prefixes), 0, -math.log(texts[prefix])))
    arcs = np.zeros(len(rows), WORD_ARC)
    for name, column in zip(("source", "target", "word", "graph_cost"), zip(*rows, strict=True), strict=True):
        arcs[name] = column
    arcs = arcs[np.argsort(arcs["source"], kind="stable")]
    return WordLattice(WORDS, np.zeros(len(prefixes) + 1, np.int32), arcs, np.zeros(0, np.int32), 1e3)


def assert_matches(found, errors, words, most_words):
    """How many words of two texts can stand opposite each other, in an alignment with so many errors.

    A word of a text is matched, replaced, or an error that the other text has no word for.
    """
    assert most_words - errors - 1e-9 <= found <= (words - errors) / 2 + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_word_errors_are_the_edit_distance(seed):
    texts = list(random_texts(seed))
    for own in texts:
        for other in texts:
            found = np.zeros(len(own), np.bool_)
            errors = align(np.array(own, np.int64), np.array(other, np.int64), found)
            assert errors == edit_distance(own, other)
            assert_matches(found.sum(), errors, len(own) + len(other), max(len(own), len(other)))
            assert matches(own, other).tolist() == found.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_text_with_the_least_expected_errors_is_found(seed):
    texts = random_texts(seed)
    risks = {own: sum(share * edit_distance(own, other) for other, share in texts.items()) for own in texts}
    paths = [path_of(text, math.log(share)) for text, share in texts.items()]
    assert text_of(minimum_bayes_risk(paths)) == min(risks, key=risks.get)
    rated = with_confidence(paths, prefix_tree(texts))
    assert [path.risk for path in rated] == pytest.approx(list(risks.values()))
    assert text_of(minimum_bayes_risk(rated)) == min(risks, key=risks.get)
    for own, path in zip(texts, rated, strict=True):
        found = sum(word.confidence for word in path.words)
        words = sum(share * (len(own) + len(other)) for other, share in texts.items())
        most_words = sum(share * max(len(own), len(other)) for other, share in texts.items())
        assert_matches(found, path.risk, words, most_words)


def test_a_text_that_lacks_words_has_an_error_for_each():
    """The other text has two words more: in the lattice each is an arc that no word of the text stands opposite."""
    texts = {(1,): 0.5, (2, 1, 3): 0.5}
    (short, long) = with_confidence([path_of(text, math.log(0.5)) for text in texts], prefix_tree(texts))
    assert (short.risk, long.risk) == (1.0, 1.0)
    assert short.words[0].confidence == 1.0
    assert [word.confidence for word in long.words] == pytest.approx([0.5, 1.0, 0.5])


def test_the_better_score_decides_among_equal_risks():
    """Risks that differ by rounding alone are equal."""
    rows = [((1,), -3.0, 1.0), ((2,), -1.0, 1.0 + 1e-12), ((3,), -2.0, 1.0), ((), 0.0, 2.0)]
    paths = [path_of(*row) for row in rows]
    for shift in range(4):
        assert text_of(minimum_bayes_risk(paths[shift:] + paths[:shift])) == (2,)
