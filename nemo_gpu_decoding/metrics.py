"""Word error rate, and precision and recall of phrases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WordErrors:
    """Counts of a minimum edit alignment of words, summed over utterances."""

    words: int  # in the references
    substitutions: int
    deletions: int
    insertions: int

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Errors per reference word; without reference words, infinite or (without errors) 0."""
        if self.words:
            return self.total / self.words
        return float("inf") if self.total else 0.0


@dataclass(frozen=True)
class PhraseScore:
    """Counts of listed phrases that were spoken and recognised."""

    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Share of correct phrases among the recognised ones; 1 if none was recognised."""
        count = self.true_positives + self.false_positives
        return self.true_positives / count if count else 1.0

    @property
    def recall(self) -> float:
        """Share of recognised phrases among the spoken ones; 1 if none was spoken."""
        said = self.true_positives + self.false_negatives
        return self.true_positives / said if said else 1.0

    @property
    def fscore(self) -> float:
        """Harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> WordErrors:
    """Align word by word; texts are compared as they are (case and punctuation count).

    Raises:
        ValueError: the two lists differ in length.
    """
    _check_pairs(references, hypotheses)
    from kaldialign import edit_distance

    words = substitutions = deletions = insertions = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        counts = edit_distance(reference.split(), hypothesis.split())
        words += len(reference.split())
        substitutions += counts["sub"]
        deletions += counts["del"]
        insertions += counts["ins"]
    return WordErrors(words, substitutions, deletions, insertions)


def oracle_text(reference: str, texts: Iterable[str], lattice: Any = None) -> str:
    """The text of the lattice or, without one, of the texts, with the fewest word errors, the first of several."""
    if lattice is not None:
        return lattice.oracle(reference)
    return min(texts, key=lambda text: word_errors([reference], [text]).total)


def phrase_score(references: Sequence[str], hypotheses: Sequence[str], phrases: Iterable[str]) -> PhraseScore:
    """Count each phrase in each utterance, as a sequence of whole words, ignoring case."""
    _check_pairs(references, hypotheses)
    wanted = PhraseWords.of(phrases)
    right = spurious = missed = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        said = Counter(words for _, words in wanted.found_in(reference.split()))
        heard = Counter(words for _, words in wanted.found_in(hypothesis.split()))
        for words in said.keys() | heard.keys():
            both = min(said[words], heard[words])
            right += both
            missed += said[words] - both
            spurious += heard[words] - both
    return PhraseScore(right, spurious, missed)


@dataclass(frozen=True)
class PhraseWords:
    """Finds phrases in texts, as sequences of whole words, ignoring case."""

    phrases: frozenset[tuple[str, ...]]
    lengths: frozenset[int]  # of the phrases, in words

    @classmethod
    def of(cls, phrases: Iterable[str]) -> PhraseWords:
        wanted = frozenset(words for phrase in phrases if (words := tuple(phrase.casefold().split())))
        return cls(wanted, frozenset(map(len, wanted)))

    def found_in(self, words: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The first word's index and the words of each phrase found; phrases may overlap."""
        folded = [word.casefold() for word in words]
        for length in self.lengths:
            for start in range(len(folded) - length + 1):
                candidate = tuple(folded[start : start + length])
                if candidate in self.phrases:
                    yield start, candidate

    def covered(self, words: Sequence[str]) -> list[bool]:
        """Whether each word is part of a phrase."""
        is_found = [False] * len(words)
        for start, phrase in self.found_in(words):
            is_found[start : start + len(phrase)] = [True] * len(phrase)
        return is_found


def _check_pairs(references: Sequence[str], hypotheses: Sequence[str]) -> None:
    if len(references) != len(hypotheses):
        raise ValueError(f"hypotheses has {len(hypotheses)} texts, expected {len(references)}, one per reference")
