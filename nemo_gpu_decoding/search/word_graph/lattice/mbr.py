"""Minimum Bayes risk and word confidence, from the best paths of a lattice or from all of it.

The posterior of a text is its share of exp(score). The path with the least expected number of word errors is the
MBR result; the confidence of a word is the share of the texts that have it in the same place, by Levenshtein
alignment.

Over the n best texts each is aligned by itself. Over a determinised lattice, which may hold billions of texts, the
alignment goes from state to state [Xu, Povey, Mangu & Zhu 2011]: e(s, q) is the expected number of errors between
the texts that lead to state s and the first q words, the mean over the arcs to s of the least that each arc makes
possible. A state that different texts lead to aligns them alike, so the risk is an upper bound, exact where each
state has one past.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import Word, WordPath


def posteriors(scores: Sequence[float]) -> np.ndarray:
    """exp(scores), normalized, [n] float64."""
    values = np.exp(np.asarray(scores, np.float64) - max(scores))
    return values / values.sum()


def with_confidence(paths: Sequence[WordPath], lattice: WordLattice | None = None) -> tuple[WordPath, ...]:
    """The paths, with the confidence of each word among all of them; or in a lattice, with their risk as well."""
    if lattice is not None:
        return tuple(_rated(path, lattice) for path in paths)
    shares = posteriors([path.score for path in paths])
    texts = _texts(paths)
    rated = []
    for path, own in zip(paths, texts, strict=True):
        confidence = np.zeros(len(own))
        for share, other in zip(shares, texts, strict=True):
            found = np.zeros(len(own), np.bool_)
            align(own, other, found)
            confidence += share * found
        values = np.minimum(confidence, 1.0).tolist()
        words = tuple(Word(*word[:-1], value) for word, value in zip(path.words, values, strict=True))
        rated.append(replace(path, words=words))
    return tuple(rated)


def minimum_bayes_risk(paths: Sequence[WordPath]) -> WordPath:
    """The path with the least expected number of word errors; the better score among equals.

    Errors are expected over the lattice where the paths have a `risk`, else over the paths.

    Raises:
        ValueError: no paths.
    """
    if not paths:
        raise ValueError("paths is empty, expected the n-best list of an utterance")
    risks = [path.risk for path in paths if path.risk is not None]
    if len(risks) < len(paths):
        risks = _risks(paths)
    best = min(range(len(paths)), key=lambda n: (round(risks[n], 9), -paths[n].score))
    return paths[best]


def _risks(paths: Sequence[WordPath]) -> list[float]:
    """The expected number of word errors of each path against all of them."""
    shares, texts = posteriors([path.score for path in paths]), _texts(paths)
    return [
        sum(
            share * align(own, other, np.zeros(len(own), np.bool_)) for share, other in zip(shares, texts, strict=True)
        )
        for own in texts
    ]


def _rated(path: WordPath, lattice: WordLattice) -> WordPath:
    """A path with its risk and the confidence of its words in a lattice."""
    confidence = np.zeros(len(path.words))
    own = np.array([word.label for word in path.words], np.int64)
    risk = expected_errors(lattice.arcs, lattice.costs, lattice.num_states, own, confidence)
    values = np.minimum(confidence, 1.0).tolist()
    words = tuple(word._replace(confidence=value) for word, value in zip(path.words, values, strict=True))
    return replace(path, words=words, risk=float(risk))


def _texts(paths: Sequence[WordPath]) -> list[np.ndarray]:
    return [np.array([word.label for word in path.words], np.int64) for path in paths]


def matches(own: Sequence[int], other: Sequence[int]) -> np.ndarray:
    """Which words of `own` stand opposite the same word of `other` in an alignment, [len(own)] bool."""
    found = np.zeros(len(own), np.bool_)
    align(np.array(own, np.int64), np.array(other, np.int64), found)
    return found


@compiled
def align(own, other, found):
    """Word errors between two texts; marks in `found` the words of `own` that `other` has there too."""
    rows, columns = len(own) + 1, len(other) + 1
    distances = np.empty((rows, columns), np.int64)
    for i in range(rows):
        for j in range(columns):
            if i == 0 or j == 0:
                distances[i, j] = i + j
                continue
            replaced = distances[i - 1, j - 1] + (own[i - 1] != other[j - 1])
            distances[i, j] = min(replaced, distances[i - 1, j] + 1, distances[i, j - 1] + 1)
    i, j = rows - 1, columns - 1
    while i > 0 and j > 0:
        same = own[i - 1] == other[j - 1]
        if distances[i, j] == distances[i - 1, j - 1] + (not same):
            i, j = i - 1, j - 1
            found[i] = same
        elif distances[i, j] == distances[i - 1, j] + 1:
            i -= 1
        else:
            j -= 1
    return distances[rows - 1, columns - 1]


@compiled
def expected_errors(arcs, costs, num_states, own, confidence):
    """Expected number of word errors between a text and the texts of a lattice.

    Args:
        arcs: [A] WORD_ARC, sorted by source.
        costs: [A] of each arc.
        num_states: of the lattice.
        own: [Q] int64, the words of the text.
        confidence: [Q], filled: the posterior of each word in its place.
    """
    size = len(own) + 1
    reached, shares = np.full(num_states, -np.inf), np.empty(len(arcs))
    reached[0] = 0.0
    for i in range(len(arcs)):
        reached[arcs[i].target] = np.logaddexp(reached[arcs[i].target], reached[arcs[i].source] - costs[i])
    errors, row = np.zeros((num_states, size)), np.empty(size)
    errors[0] = np.arange(size)
    for i in range(len(arcs)):
        shares[i] = np.exp(reached[arcs[i].source] - costs[i] - reached[arcs[i].target])
        _errors_after(errors[arcs[i].source], arcs[i].word, own, row)
        errors[arcs[i].target] += shares[i] * row
    mass = np.zeros((num_states, size))  # posterior of a state standing opposite the first q words
    mass[num_states - 1, size - 1] = 1.0
    confidence[:] = 0.0
    for i in range(len(arcs) - 1, -1, -1):
        before, word, here = errors[arcs[i].source], arcs[i].word, mass[arcs[i].source]
        _errors_after(before, word, own, row)
        rest = shares[i] * mass[arcs[i].target]
        for q in range(size - 1, -1, -1):
            if word == 0:
                here[q] += rest[q]
            elif q > 0 and row[q] == before[q - 1] + (word != own[q - 1]):
                here[q - 1] += rest[q]
                if word == own[q - 1]:
                    confidence[q - 1] += rest[q]
            elif q > 0 and row[q] == row[q - 1] + 1:
                rest[q - 1] += rest[q]
            else:
                here[q] += rest[q]
    return errors[num_states - 1, size - 1]


@compiled
def _errors_after(before, word, own, row):
    """Fill row [Q + 1]: expected errors against the first q words after an arc, from those before it."""
    if word == 0:
        row[:] = before
        return
    row[0] = before[0] + 1
    for q in range(1, len(row)):
        row[q] = min(before[q - 1] + (word != own[q - 1]), row[q - 1] + 1, before[q] + 1)
