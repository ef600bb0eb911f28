"""Measure word and character error rates, precision and recall of phrases, and the calibration of confidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from kaldialign import align, edit_distance

from nemo_gpu_decoding.words import has_unspaced, words_of


@dataclass(frozen=True)
class WordErrors:
    """Numbers of reference words, substitutions, deletions and insertions, summed over utterances."""

    words: int  # in the references; characters in scripts without spaces
    substitutions: int
    deletions: int
    insertions: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Return the errors per reference word; without reference words, 0 if there are no errors, else infinity."""
        if self.words:
            return self.total / self.words
        return float("inf") if self.total else 0.0


@dataclass(frozen=True)
class PhraseScore:
    """Counts of listed phrases that were spoken, recognised, or both."""

    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Return the share of recognised phrases that were spoken, or 1 if none was recognised."""
        count = self.true_positives + self.false_positives
        return self.true_positives / count if count else 1.0

    @property
    def recall(self) -> float:
        """Return the share of spoken phrases that were recognised, or 1 if none was spoken."""
        said = self.true_positives + self.false_negatives
        return self.true_positives / said if said else 1.0

    @property
    def fscore(self) -> float:
        """Return the harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


UNITS = {"WER": "words", "CER": "characters", "WER/CER": "words and characters"}  # by the name of the rate


def units_of(reference: str, text: str) -> list[str]:
    """Return the units that an error rate counts: words or, in scripts without spaces, characters as in NeMo's CER."""
    return list(text) if has_unspaced(reference) else text.split()


def rate_name(references: Iterable[str]) -> str:
    """Return "CER" if all references are compared by characters, "WER" if all by words, else "WER/CER"."""
    names = {"CER" if has_unspaced(reference) else "WER" for reference in references}
    return "/".join(sorted(names, reverse=True)) or "WER"


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> WordErrors:
    """Align each hypothesis with its reference and count the word errors; case and punctuation count.

    A reference in a script without spaces is compared by characters.

    Raises:
        ValueError: the two lists differ in length.
    """
    _check_pairs(references, hypotheses)
    words = substitutions = deletions = insertions = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        said = units_of(reference, reference)
        counts = edit_distance(said, units_of(reference, hypothesis))
        words += len(said)
        substitutions += counts["sub"]
        deletions += counts["del"]
        insertions += counts["ins"]
    return WordErrors(words, substitutions, deletions, insertions)


def phrase_score(references: Sequence[str], hypotheses: Sequence[str], phrases: Iterable[str]) -> PhraseScore:
    """Count the phrases in references and hypotheses as sequences of whole words, ignoring letter case.
    In scripts without spaces, a character is a word."""
    _check_pairs(references, hypotheses)
    wanted = PhraseWords.of(phrases)
    right = spurious = missed = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        said = Counter(words for _, words in wanted.found_in(words_of(reference)))
        heard = Counter(words for _, words in wanted.found_in(words_of(hypothesis)))
        for words in said.keys() | heard.keys():
            both = min(said[words], heard[words])
            right += both
            missed += said[words] - both
            spurious += heard[words] - both
    return PhraseScore(right, spurious, missed)


@dataclass(frozen=True)
class PhraseWords:
    """A set of phrases to find in texts as sequences of whole words, ignoring case."""

    phrases: frozenset[tuple[str, ...]]
    lengths: frozenset[int]  # lengths of the phrases, in words

    @classmethod
    def of(cls, phrases: Iterable[str]) -> PhraseWords:
        wanted = frozenset(words for phrase in phrases if (words := tuple(words_of(phrase.casefold()))))
        return cls(wanted, frozenset(map(len, wanted)))

    def found_in(self, words: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield the index of the first word and the words of each phrase in a text; phrases may overlap."""
        folded = [word.casefold() for word in words]
        for length in self.lengths:
            for start in range(len(folded) - length + 1):
                candidate = tuple(folded[start : start + length])
                if candidate in self.phrases:
                    yield start, candidate

    def covered(self, words: Sequence[str]) -> list[bool]:
        """Return for each word of a text whether it belongs to a phrase."""
        is_found = [False] * len(words)
        for start, phrase in self.found_in(words):
            is_found[start : start + len(phrase)] = [True] * len(phrase)
        return is_found


def _check_pairs(references: Sequence[str], hypotheses: Sequence[str]) -> None:
    if len(references) != len(hypotheses):
        raise ValueError(f"hypotheses has {len(hypotheses)} texts, expected {len(references)}, one per reference")


FEWEST_WORDS = 20  # needed to fit a map
LEAST = 1e-7  # confidences are between this and 1 - this, so that logits are finite


class ConfidenceMap(NamedTuple):
    """A logistic function that maps the confidence of a word to the probability that the word is right."""

    slope: float  # >= 0
    intercept: float


class Calibration(NamedTuple):
    """Three measures of how well word confidence predicts which words are right."""

    ece: float  # expected calibration error over 10 bins of equal width, 0 is best
    nce: float  # normalised cross entropy [NIST], 1 is best; 0: as good as the share of right words
    auc: float  # area under the ROC curve of "the word is wrong", 1 is best


def fit_map(confidence: Sequence[float], correct: Sequence[bool]) -> ConfidenceMap:
    """Fit the logistic map from word confidence to the probability that a word is right.

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
    if slope < 0:  # the confidence carries no information: use the share of right words
        slope, intercept = 0.0, float(_logits([targets.mean()])[0])
    return ConfidenceMap(round(slope, 5), round(intercept, 5))


def calibrated(confidence: Sequence[float], fitted: ConfidenceMap) -> list[float]:
    """Return the probability that each word is right, by a fitted map of its confidence."""
    logits = fitted.slope * _logits(confidence) + fitted.intercept
    return list((1 / (1 + np.exp(-logits))).tolist())


def _logits(confidence: Sequence[float]) -> np.ndarray:
    values = np.clip(np.asarray(confidence, float), LEAST, 1 - LEAST)
    return np.log(values / (1 - values))


def measure(confidence: Sequence[float], correct: Sequence[bool]) -> Calibration:
    """Return the `Calibration` of confidences in 0 .. 1; nce and auc are NaN if no word, or every word, is right."""
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
    """Return for each word of a transcript whether it is right in an alignment with the fewest word errors."""
    texts = list(words)
    if not has_unspaced(reference):
        return [word == said for said, word in align(reference.split(), texts, "\0") if word != "\0"]
    aligned = align(list("".join(reference.split())), list("".join(texts)), "\0")
    rights = [character == said for said, character in aligned if character != "\0"]
    return [all(rights[begin:end]) for begin, end in pairwise(accumulate(map(len, texts), initial=0))]
