"""Minimum Bayes risk (MBR) and word confidence, from an n-best list or from a whole lattice.

The posterior of a text is exp(score), normalised over the texts. The MBR result is the path with the least expected
number of word errors. The confidence of a word is the posterior of the texts that have it in the same place, by
Levenshtein alignment.

In an n-best list, each text is aligned separately. A determinised lattice may hold billions of texts, so alignment
goes from state to state [Xu, Povey, Mangu & Zhu 2011]. e(s, q) is the expected number of errors between the texts
that lead to state s and the first q words. It is the mean, over the arcs to s, of the least number of errors after
each arc. Texts that lead to the same state share one alignment, so the risk is an upper bound. It is exact where only
one text leads to each state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice
from nemo_gpu_decoding.search.word_graph.result import Word, WordPath


class Places(NamedTuple):
    """Where the words of a lattice are aligned with a text of Q words."""

    times: np.ndarray  # [2, A] float64, first and end frame of each arc
    # [2 Q + 1, W, 3] float64, summed up: posterior of a word, and its product with the first and the end frame. Row
    # 2 q + 1: words aligned with word q; row 2 q: words inserted before it. Empty: not counted
    found: np.ndarray


NO_PLACES = Places(np.zeros((2, 0)), np.zeros((0, 0, 3)))


def posteriors(scores: Sequence[float]) -> np.ndarray:
    """Softmax of scores: exp(scores), normalised to sum 1, [n] float64."""
    values = np.exp(np.asarray(scores, np.float64) - max(scores))
    return values / values.sum()


def with_confidence(paths: Sequence[WordPath], lattice: WordLattice | None = None) -> tuple[WordPath, ...]:
    """Add word confidences to paths: over the paths themselves, or over a lattice, which also adds the risk."""
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
    """The path with the least expected number of word errors; of equal ones, the path with the best score.

    The expectation is over the lattice if all paths have a `risk`, and over the paths otherwise.

    Raises:
        ValueError: paths is empty.
    """
    if not paths:
        raise ValueError("paths is empty, expected the n-best list of an utterance")
    risks = [path.risk for path in paths if path.risk is not None]
    if len(risks) < len(paths):
        risks = _risks(paths)
    best = min(range(len(paths)), key=lambda n: (round(risks[n], 9), -paths[n].score))
    return paths[best]


def _risks(paths: Sequence[WordPath]) -> list[float]:
    """The expected number of word errors of each path, over all paths."""
    shares, texts = posteriors([path.score for path in paths]), _texts(paths)
    return [
        sum(
            share * align(own, other, np.zeros(len(own), np.bool_)) for share, other in zip(shares, texts, strict=True)
        )
        for own in texts
    ]


def _rated(path: WordPath, lattice: WordLattice) -> WordPath:
    """Add to a path its risk and the confidence of its words over a lattice."""
    confidence = np.zeros(len(path.words))
    own = np.array([word.label for word in path.words], np.int64)
    risk = expected_errors(lattice.arcs, lattice.costs, lattice.num_states, own, confidence, NO_PLACES)
    values = np.minimum(confidence, 1.0).tolist()
    words = tuple(word._replace(confidence=value) for word, value in zip(path.words, values, strict=True))
    return replace(path, words=words, risk=float(risk))


def _texts(paths: Sequence[WordPath]) -> list[np.ndarray]:
    return [np.array([word.label for word in path.words], np.int64) for path in paths]


def matches(own: Sequence[int], other: Sequence[int]) -> np.ndarray:
    """Which words of `own` are aligned with the same word of `other`, [len(own)] bool."""
    found = np.zeros(len(own), np.bool_)
    align(np.array(own, np.int64), np.array(other, np.int64), found)
    return found


@compiled
def align(own, other, found):
    """Word errors between two texts; sets `found` for words of `own` aligned with the same word of `other`."""
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
def expected_errors(arcs, costs, num_states, own, confidence, places):
    """Expected number of word errors between a text and the texts of a lattice.

    Args:
        arcs: [A] WORD_ARC, sorted by source.
        costs: [A] float64, cost of each arc, natural log.
        num_states: number of states of the lattice.
        own: [Q] int64, the words of the text.
        confidence: [Q] float64, filled: the posterior of each word in its place.
        places: `found` is filled, unless it is empty.
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
    mass = np.zeros((num_states, size))  # [s, q]: posterior of the alignment of state s with the first q words
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
                _count(places, 2 * q - 1, word, i, rest[q])
                if word == own[q - 1]:
                    confidence[q - 1] += rest[q]
            elif q > 0 and row[q] == row[q - 1] + 1:
                rest[q - 1] += rest[q]
            else:
                here[q] += rest[q]
                _count(places, 2 * q, word, i, rest[q])
    return errors[num_states - 1, size - 1]


@compiled
def _count(places, row, word, arc, mass):
    """Add the word of an arc to a row of `places`."""
    if len(places.found):
        cell = places.found[row, word]
        cell[0] += mass
        cell[1] += mass * places.times[0, arc]
        cell[2] += mass * places.times[1, arc]


@compiled
def _errors_after(before, word, own, row):
    """Fill row [Q + 1]: expected errors against the first q words after an arc; `before` [Q + 1]: before the arc."""
    if word == 0:
        row[:] = before
        return
    row[0] = before[0] + 1
    for q in range(1, len(row)):
        row[q] = min(before[q - 1] + (word != own[q - 1]), row[q - 1] + 1, before[q] + 1)
