"""Calibration of word confidence: a monotone map to the probability that a word is right, and its measures.

The map is an isotonic regression by pool-adjacent-violators over groups of words of similar confidence [Zadrozny &
Elkan 2002].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

GROUP = 10  # words of a group, at least

# (confidence, probability that the word is right), both ascending; linear between the points, constant outside
ConfidenceMap = tuple[tuple[float, float], ...]


class Calibration(NamedTuple):
    """How well confidences predict which words are right."""

    ece: float  # expected calibration error over 10 bins of equal width, 0 is best
    nce: float  # normalised cross entropy [NIST], 1 is best; 0: as good as the share of right words
    auc: float  # area under the ROC curve of "the word is wrong", 1 is best


def fit_map(confidence: Sequence[float], correct: Sequence[bool]) -> ConfidenceMap:
    """The map of confidences to the probability that a word is right.

    Raises:
        ValueError: there are too few words.
    """
    values, right = np.asarray(confidence, float), np.asarray(correct, float)
    if len(values) < 2 * GROUP:
        raise ValueError(f"{len(values)} words have a confidence, expected at least {2 * GROUP} to fit a map")
    order = np.argsort(values, kind="stable")
    values, right = values[order], right[order]
    begins = [0]
    for n in range(1, len(values)):
        if n - begins[-1] >= max(GROUP, len(values) // 40) and values[n] > values[n - 1] and len(values) - n >= GROUP:
            begins.append(n)
    blocks: list[list[float]] = []  # sum of confidences, right words, words
    for begin, end in zip(begins, [*begins[1:], len(values)], strict=True):
        # one word more, half right: no probability is 0 or 1
        blocks.append([values[begin:end].mean() * (end - begin + 1), right[begin:end].sum() + 0.5, end - begin + 1])
        while len(blocks) > 1 and blocks[-2][1] * blocks[-1][2] >= blocks[-1][1] * blocks[-2][2]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    return tuple((round(float(total) / n, 5), round(float(own) / n, 5)) for total, own, n in blocks)


def is_ascending(points: ConfidenceMap) -> bool:
    """Whether confidences strictly ascend, and probabilities do not descend."""
    return all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))


def calibrated(confidence: Sequence[float], points: ConfidenceMap) -> list[float]:
    """Confidences mapped to probabilities."""
    known, probabilities = np.array(points).T
    return list(np.interp(confidence, known, probabilities).tolist())


def measure(confidence: Sequence[float], correct: Sequence[bool]) -> Calibration:
    """The measures of confidences in [0, 1]; NaN where they are not defined, if all words are right or all wrong."""
    values, right = np.asarray(confidence, float), np.asarray(correct, bool)
    bins = np.minimum((values * 10).astype(int), 9)
    gaps = [abs(values[bins == b].sum() - right[bins == b].sum()) for b in range(10)]
    share = right.mean()
    if not 0 < share < 1:
        return Calibration(float(sum(gaps)) / len(values), np.nan, np.nan)
    own = np.clip(np.where(right, values, 1 - values), 1e-6, 1)
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    wrong = values[~right][:, None]
    above = (values[right][None] > wrong).mean() + 0.5 * (values[right][None] == wrong).mean()
    return Calibration(float(sum(gaps)) / len(values), float(1 + np.log(own).mean() / entropy), float(above))


def right_words(reference: str, words: Iterable[str]) -> list[bool]:
    """Which words of a transcript are right, by an alignment with the fewest word errors."""
    from kaldialign import align

    return [own == said for said, own in align(reference.split(), list(words), "\0") if own != "\0"]
