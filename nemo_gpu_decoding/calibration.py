"""Calibration of word confidence: a monotone map to the probability that a word is right, and its measures.

The map is a logistic regression on the logit of the confidence [Platt 1999]:

    P(right) = sigmoid(slope * logit(confidence) + intercept).

Two numbers are as many as a dev set of a few hundred words determines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

FEWEST_WORDS = 20  # for a map
LEAST = 1e-7  # confidences are between this and 1 - this, so that logits are finite


class ConfidenceMap(NamedTuple):
    """The map of word confidence to the probability that the word is right."""

    slope: float  # >= 0
    intercept: float


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
    from sklearn.linear_model import LogisticRegression

    if len(confidence) < FEWEST_WORDS:
        raise ValueError(f"{len(confidence)} words have a confidence, expected at least {FEWEST_WORDS} to fit a map")
    right = np.asarray(correct, bool)
    count = right.sum()
    # the targets of [Platt 1999], so that no probability is 0 or 1: each word is a right and a wrong one, with weights
    targets = np.where(right, (count + 1) / (count + 2), 1 / (len(right) - count + 2))
    model = LogisticRegression(C=1e6)
    model.fit(np.tile(_logits(confidence), 2)[:, None], np.repeat([1, 0], len(right)), np.append(targets, 1 - targets))
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope < 0:  # the confidence says nothing: the share of right words
        slope, intercept = 0.0, float(_logits([targets.mean()])[0])
    return ConfidenceMap(round(slope, 5), round(intercept, 5))


def calibrated(confidence: Sequence[float], fitted: ConfidenceMap) -> list[float]:
    """Confidences mapped to probabilities."""
    logits = fitted.slope * _logits(confidence) + fitted.intercept
    return list((1 / (1 + np.exp(-logits))).tolist())


def _logits(confidence: Sequence[float]) -> np.ndarray:
    values = np.clip(np.asarray(confidence, float), LEAST, 1 - LEAST)
    return np.log(values / (1 - values))


def measure(confidence: Sequence[float], correct: Sequence[bool]) -> Calibration:
    """The measures of confidences in [0, 1]; NaN where they are not defined, if all words are right or all wrong."""
    values, right = np.asarray(confidence, float), np.asarray(correct, bool)
    bins = np.minimum((values * 10).astype(int), 9)
    gaps = [abs(values[bins == b].sum() - right[bins == b].sum()) for b in range(10)]
    share = right.mean()
    if not 0 < share < 1:
        return Calibration(float(sum(gaps)) / len(values), np.nan, np.nan)
    of_truth = np.clip(np.where(right, values, 1 - values), 1e-6, 1)
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    wrong = values[~right][:, None]
    above = (values[right][None] > wrong).mean() + 0.5 * (values[right][None] == wrong).mean()
    return Calibration(float(sum(gaps)) / len(values), float(1 + np.log(of_truth).mean() / entropy), float(above))


def right_words(reference: str, words: Iterable[str]) -> list[bool]:
    """Which words of a transcript are right, by an alignment with the fewest word errors."""
    from kaldialign import align

    return [word == said for said, word in align(reference.split(), list(words), "\0") if word != "\0"]
