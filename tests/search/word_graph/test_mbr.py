"""Minimum Bayes risk against all texts of a list, one by one."""

import math
from functools import cache

import numpy as np
import pytest

from nemo_gpu_decoding.search.result import ScoreParts
from nemo_gpu_decoding.search.word_graph.lattice.determinize import WORD_ARC
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import (
    GraphWord,
    WordPath,
    align,
    matches,
    minimum_bayes_risk,
    with_posteriors,
)

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


def path_of(text, score):
    none = np.zeros(0, np.int32)
    words = tuple(GraphWord(WORDS[label], label, n, n + 1, n, n + 1) for n, label in enumerate(text))
    return WordPath(none, none, none, none, score, ScoreParts(score), words=words)


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
    """How many words of two texts can stand opposite each other in an alignment with so many errors."""
    assert most_words - errors - 1e-9 <= found <= (words - errors) / 2 + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_word_errors_equal_the_edit_distance(seed):
    texts = list(random_texts(seed))
    for text in texts:
        for other in texts:
            matched = np.zeros(len(text), np.bool_)
            errors = align(np.array(text, np.int64), np.array(other, np.int64), matched)
            assert errors == edit_distance(text, other)
            assert_matches(matched.sum(), errors, len(text) + len(other), max(len(text), len(other)))
            assert matches(text, other).tolist() == matched.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_text_with_the_least_expected_errors_is_found(seed):
    texts = random_texts(seed)
    risks = {text: sum(share * edit_distance(text, other) for other, share in texts.items()) for text in texts}
    paths = [path_of(text, math.log(share)) for text, share in texts.items()]
    assert text_of(minimum_bayes_risk(paths)) == min(risks, key=risks.get)
    for text, path in zip(texts, with_posteriors(paths), strict=True):
        matched = sum(word.posterior for word in path.words)
        words = sum(share * (len(text) + len(other)) for other, share in texts.items())
        most_words = sum(share * max(len(text), len(other)) for other, share in texts.items())
        assert_matches(matched, risks[text], words, most_words)


def test_the_better_score_decides_among_equal_risks():
    """Both texts with the higher scores have a risk of 0.7."""
    paths = [path_of(text, math.log(share)) for text, share in {(): 0.5, (1,): 0.3, (1, 1): 0.2}.items()]
    for shift in range(3):
        assert text_of(minimum_bayes_risk(paths[shift:] + paths[:shift])) == ()
    with pytest.raises(ValueError, match="paths is empty"):
        minimum_bayes_risk([])
