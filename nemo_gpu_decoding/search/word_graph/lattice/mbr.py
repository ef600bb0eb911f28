"""Minimum Bayes risk (MBR) and word confidence from an n-best list.

The posterior of a text is exp(score), normalised over the texts. The MBR result is the path with the least expected
number of word errors. The confidence of a word is the posterior of the texts that have it in the same place, by
Levenshtein alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.result import Word, WordPath


def posteriors(scores: Sequence[float]) -> np.ndarray:
    """Softmax of scores: exp(scores), normalised to sum 1, [n] float64."""
    values = np.exp(np.asarray(scores, np.float64) - max(scores))
    return values / values.sum()


def with_confidence(paths: Sequence[WordPath]) -> tuple[WordPath, ...]:
    """Add word confidences to paths: the posterior, among these paths, of each word in its place."""
    shares = posteriors([path.score for path in paths])
    texts = _texts(paths)
    rated = []
    for path, text in zip(paths, texts, strict=True):
        confidence = np.zeros(len(text))
        for share, other in zip(shares, texts, strict=True):
            confidence += share * matches(text, other)
        values = np.minimum(confidence, 1.0).tolist()
        words = tuple(Word(*word[:-1], value) for word, value in zip(path.words, values, strict=True))
        rated.append(replace(path, words=words))
    return tuple(rated)


def minimum_bayes_risk(paths: Sequence[WordPath]) -> WordPath:
    """The path with the least expected number of word errors; of equal ones, the path with the best score.

    Raises:
        ValueError: paths is empty.
    """
    if not paths:
        raise ValueError("paths is empty, expected the n-best list of an utterance")
    shares, texts = posteriors([path.score for path in paths]), _texts(paths)
    risks = [
        sum(
            share * align(text, other, np.zeros(len(text), np.bool_))
            for share, other in zip(shares, texts, strict=True)
        )
        for text in texts
    ]
    best = min(range(len(paths)), key=lambda n: (round(risks[n], 9), -paths[n].score))
    return paths[best]


def _texts(paths: Sequence[WordPath]) -> list[np.ndarray]:
    return [np.array([word.label for word in path.words], np.int64) for path in paths]


def matches(text: Sequence[int], other: Sequence[int]) -> np.ndarray:
    """Which words of `text` are aligned with the same word of `other`, [len(text)] bool."""
    matched = np.zeros(len(text), np.bool_)
    align(np.asarray(text, np.int64), np.asarray(other, np.int64), matched)
    return matched


@compiled
def align(text, other, matched):
    """Word errors between two texts; sets `matched` for words of `text` aligned with the same word of `other`."""
    rows, columns = len(text) + 1, len(other) + 1
    distances = np.empty((rows, columns), np.int64)
    for i in range(rows):
        for j in range(columns):
            if i == 0 or j == 0:
                distances[i, j] = i + j
                continue
            replaced = distances[i - 1, j - 1] + (text[i - 1] != other[j - 1])
            distances[i, j] = min(replaced, distances[i - 1, j] + 1, distances[i, j - 1] + 1)
    i, j = rows - 1, columns - 1
    while i > 0 and j > 0:
        same = text[i - 1] == other[j - 1]
        if distances[i, j] == distances[i - 1, j - 1] + (not same):
            i, j = i - 1, j - 1
            matched[i] = same
        elif distances[i, j] == distances[i - 1, j] + 1:
            i -= 1
        else:
            j -= 1
    return distances[rows - 1, columns - 1]
