"""A made-up trigram LM of any size over a `Language`, drawn from a seed.

The language's own source says what follows a word: a sentence ends with probability END; else with
probability FOLLOW one of the word's likely successors comes, else any word. The LM lists

    1-grams   every word
    2-grams   of every word its likely successors, its end, and other words, of frequent words more
    3-grams   of the 2-grams first in a word's list the first ones of the second word's list

Within a list words stand by frequency. 1-grams and 2-grams have the source's probabilities, so that they
are proper with one back-off weight for all; those of 3-grams are off by random factors, so that weights
are as varied as those of an LM made of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.bench.language import FOLLOW, SUCCESSORS, Language, zipf

SPECIALS = ("<s>", "</s>", "<unk>")  # the first symbols; the words come after them
START, STOP, UNKNOWN = range(len(SPECIALS))
END = 0.05  # probability that a sentence ends after a word
UNKNOWN_PROBABILITY = 1e-7
BIGRAM_SHARE = 0.3  # of all n-grams, before those that are drawn twice are dropped
NOISE = 0.1  # deviation of the log10 factors of 3-grams
LOG10_BACKOFF = float(np.log10(1 - FOLLOW))  # after any word
BLOCK = 1 << 20  # n-grams at a time


@dataclass(frozen=True)
class Bigrams:
    """All 2-grams, by context, then by second symbol. B 2-grams, S symbols."""

    begin: np.ndarray  # [S + 1] int64, where the 2-grams of a context begin
    seconds: np.ndarray  # [B] int32, the second symbol
    log10_probs: np.ndarray  # [B] float32


class SyntheticLM:
    """The n-grams of about `ngrams` in all; memory grows by 8 bytes per 2-gram.

    Args:
        ngrams: at least as many as the likely successors of all words.
        rng: every LM drawn from it in the same state is the same.
    """

    def __init__(self, language: Language, ngrams: int, rng: np.random.Generator) -> None:
        self.symbols = [*SPECIALS, *language.lexicon]
        self._language, self._rng = language, rng
        self.log10_words = np.log10(self._word_probabilities())
        self.bigrams = self._draw_bigrams(ngrams)
        self._widest, self._breadth = self._fit_trigrams(ngrams)
        rest = sum(int(self._continuations(first, last).sum()) for first, last in self._chunks())
        self.counts = (len(self.symbols), len(self.bigrams.seconds), rest)

    def trigrams(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Blocks of all 3-grams: symbols [M, 3] int32 and log10 probabilities [M]; once."""
        begin, seconds = self.bigrams.begin, self.bigrams.seconds
        for first, last in self._chunks():
            counts = self._continuations(first, last)
            contexts = np.repeat(np.arange(first, last), counts)  # the 2-gram that each goes on from
            place = np.arange(len(contexts)) - np.repeat(np.cumsum(counts) - counts, counts)
            suffixes = begin[seconds[contexts]] + place  # its last two words are a 2-gram, too
            words = np.searchsorted(begin, contexts, "right") - 1
            symbols = np.stack([words, seconds[contexts], seconds[suffixes]], 1)
            noise = self._rng.normal(0.0, NOISE, len(contexts))
            yield symbols.astype(np.int32), self.bigrams.log10_probs[suffixes] + noise

    def _word_probabilities(self) -> np.ndarray:
        words = (1 - END) * self._language.word_probabilities
        return np.concatenate([[1.0, END, UNKNOWN_PROBABILITY], words])

    def _draw_bigrams(self, ngrams: int) -> Bigrams:
        """In blocks of contexts; a context's number of draws falls with the root of its rank."""
        language, size = self._language, len(self.symbols)
        num_words = len(language.lexicon)
        draws = BIGRAM_SHARE * ngrams / np.sqrt(np.arange(1, num_words + 1))
        draws = (draws / (2 * np.sqrt(num_words))).astype(np.int64)
        blocks = np.split(np.arange(num_words), _cuts(draws + SUCCESSORS + 1))
        seconds, log10_probs = [], []
        counts = np.zeros(size + 1, np.int64)
        for contexts in blocks:
            keys, probabilities = self._bigrams_of(contexts, draws[contexts])
            counts += np.bincount(keys // size + 1, minlength=size + 1)
            seconds.append((keys % size).astype(np.int32))
            log10_probs.append(np.log10(probabilities).astype(np.float32))
        return Bigrams(np.cumsum(counts), np.concatenate(seconds), np.concatenate(log10_probs))

    def _bigrams_of(self, contexts: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (context symbol * S + second symbol), ascending, and probabilities."""
        language, size, shift = self._language, len(self.symbols), len(SPECIALS)
        likely = language.successors[contexts] + shift
        likely_keys = ((contexts + shift)[:, None] * size + likely).ravel()
        # as often the first as the second ten words, the first as the second hundred, ...
        others = np.exp(self._rng.random(int(draws.sum())) * np.log(len(language.lexicon)))
        others = others.astype(np.int64) - 1 + shift
        other_keys = np.repeat(contexts + shift, draws) * size + others
        ends = (contexts + shift) * size + STOP
        keys = np.unique(np.concatenate([likely_keys, other_keys, ends]))
        words = np.maximum(keys % size - shift, 0)
        probabilities = (1 - END) * (1 - FOLLOW) * language.word_probabilities[words]
        shares = np.tile((1 - END) * FOLLOW * zipf(SUCCESSORS), len(contexts))
        np.add.at(probabilities, np.searchsorted(keys, likely_keys), shares)
        probabilities[keys % size == STOP] = END
        return keys, probabilities

    def _fit_trigrams(self, ngrams: int) -> tuple[int, float]:
        """(Most 3-grams of a context, how many of a context first in its word's list): both limit.

        The 2-gram at place j >= 1 of its word's list (the end is at place 0) has breadth / j.
        """
        degrees = np.diff(self.bigrams.begin)[len(SPECIALS) :]
        wanted = ngrams - len(self.symbols) - len(self.bigrams.seconds)
        widest, places = int(degrees.min()), np.arange(1, degrees.max())
        low, high = 0.0, float(widest * len(places))
        for _ in range(60):
            middle = (low + high) / 2
            totals = np.append(0, np.cumsum(np.minimum(widest, middle // places)))
            low, high = (middle, high) if totals[degrees - 1].sum() <= wanted else (low, middle)
        return widest, low

    def _continuations(self, first: int, last: int) -> np.ndarray:
        """How many 3-grams go on from each 2-gram in a range."""
        numbers = np.arange(first, last)
        begin = self.bigrams.begin
        places = numbers - begin[np.searchsorted(begin, numbers, "right") - 1]
        counts = np.minimum(self._widest, self._breadth // np.maximum(places, 1)).astype(np.int64)
        return np.where(places == 0, 0, counts)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        total = len(self.bigrams.seconds)
        for first in range(0, total, BLOCK // SUCCESSORS):
            yield first, min(first + BLOCK // SUCCESSORS, total)


def _cuts(sizes: np.ndarray) -> np.ndarray:
    """Where to cut a sequence for pieces whose sizes add up to about a block."""
    blocks = np.cumsum(sizes) // BLOCK
    return np.flatnonzero(np.diff(blocks)) + 1
