"""Minimum Bayes risk and word confidence from the best paths of a lattice.

The posterior of a path is its share of exp(score) among the paths. The path with the least expected
number of word errors against the others is the MBR result; the confidence of a word is the share of
the paths that have it in the same place, by Levenshtein alignment. [Xu, Povey, Mangu & Zhu 2011] do the
same over the whole lattice; here it is over its n best different texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.result import Word, WordPath


def posteriors(scores: Sequence[float]) -> np.ndarray:
    """exp(scores), normalized, [n] float64."""
    values = np.exp(np.asarray(scores, np.float64) - max(scores))
    return values / values.sum()


def with_confidence(paths: Sequence[WordPath]) -> tuple[WordPath, ...]:
    """The paths, with the confidence of each word among all of them."""
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

    Raises:
        ValueError: no paths.
    """
    if not paths:
        raise ValueError("paths is empty, expected the n-best list of an utterance")
    shares = posteriors([path.score for path in paths])
    texts = _texts(paths)
    risks = [
        sum(
            share * align(own, other, np.zeros(len(own), np.bool_)) for share, other in zip(shares, texts, strict=True)
        )
        for own in texts
    ]
    best = min(range(len(paths)), key=lambda n: (round(risks[n], 9), -paths[n].score))
    return paths[best]


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
