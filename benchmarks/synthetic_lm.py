"""An artificial trigram LM of any size, over the words of a `Language`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.language import FOLLOW, SUCCESSORS, Language, zipf
from nemo_gpu_decoding.lm.arpa import NGramBlock

SPECIALS = ("<s>", "</s>", "<unk>")  # the first symbols; the words come after them
STOP = 1
END = 0.05  # probability that a sentence ends after a word
UNKNOWN_PROBABILITY = 1e-7
BIGRAM_SHARE = 0.3  # of all n-grams, before those that are drawn twice are dropped
NOISE = 0.1  # deviation of the log10 factors of 3-grams
LOG10_BACKOFF = float(np.log10(1 - FOLLOW))  # after any word
BLOCK = 1 << 17  # n-grams at a time, about


class SyntheticLM:
    """About `ngrams` n-grams; memory: 12 bytes per 2-gram, whatever the number of 3-grams.

    A sentence ends with probability END; else with probability FOLLOW one of the word's likely
    successors comes, else any word. The LM lists every word; as 2-grams of every word its end, its likely
    successors, and other words, of frequent words more; as 3-grams of the 2-grams first in a word's list
    the first ones of the second word's list. Within a list words stand by frequency, the end first.
    1-grams and 2-grams have the source's probabilities, so that they are proper with one back-off
    weight for all; those of 3-grams are off by random factors, so that weights are as varied as those
    of an LM made of text.

    Args:
        ngrams: at least as many as the likely successors of all words.
        rng: every LM drawn from it in the same state is the same.
        continuations: maximum number of 3-grams of one 2-gram; the fewer, the more 2-grams are contexts of 3-grams.
            0: as many as a list is long.
    """

    def __init__(self, language: Language, ngrams: int, rng: np.random.Generator, continuations: int = 0) -> None:
        self.symbols = [*SPECIALS, *language.lexicon]
        self._language, self._rng = language, rng
        size, num_words = len(self.symbols), len(language.lexicon)
        # 2-grams by first, then by second symbol; a word's number of draws falls with the root of its rank
        draws = (BIGRAM_SHARE * ngrams / (2 * np.sqrt(num_words * np.arange(1, num_words + 1)))).astype(np.int64)
        parts = np.array_split(np.arange(num_words), 1 + ngrams // (8 * BLOCK))
        keys, log10_probs = zip(*(self._bigrams_of(words, draws[words]) for words in parts), strict=True)
        self._firsts, self._seconds = (part.astype(np.int32) for part in np.divmod(np.concatenate(keys), size))
        self._log10_probs = np.concatenate(log10_probs)
        self._begin = np.searchsorted(self._firsts, np.arange(size + 1))  # where a word's list begins
        self._widths = self._fit_trigrams(ngrams, continuations)
        trigrams = sum(int(self._continuations(chunk).sum()) for chunk in self._chunks())
        self.counts = (size, len(self._seconds), trigrams)

    def blocks(self) -> Iterator[NGramBlock]:
        """All n-grams, once: the weights of 3-grams are drawn on the way."""
        words = (1 - END) * self._language.word_probabilities
        log10_probs = np.log10(np.concatenate([[1.0, END, UNKNOWN_PROBABILITY], words]))
        log10_backoffs = np.where(np.arange(len(self.symbols)) < len(SPECIALS), 0.0, LOG10_BACKOFF)
        yield NGramBlock(1, np.arange(len(self.symbols))[:, None], log10_probs, log10_backoffs)
        for chunk in self._chunks():
            pairs = np.stack([self._firsts[chunk], self._seconds[chunk]], 1)
            yield NGramBlock(2, pairs, self._log10_probs[chunk], np.zeros(len(pairs)))
        for chunk in self._chunks():
            counts = self._continuations(chunk)
            contexts = np.repeat(np.arange(len(self._seconds))[chunk], counts)  # the 2-gram that each goes on from
            offset = np.arange(len(contexts)) - np.repeat(np.cumsum(counts) - counts, counts)
            suffixes = self._begin[self._seconds[contexts]] + offset  # its last two words are a 2-gram, too
            grams = np.stack([self._firsts[contexts], self._seconds[contexts], self._seconds[suffixes]], 1)
            noise = self._rng.normal(0.0, NOISE, len(contexts))
            log10_probs = np.minimum(self._log10_probs[suffixes] + noise, 0.0)
            yield NGramBlock(3, grams, log10_probs, np.zeros(len(grams)))

    def _bigrams_of(self, words: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys (first symbol * S + second symbol), ascending, and log10 probabilities."""
        language, size, shift = self._language, len(self.symbols), len(SPECIALS)
        first = (words + shift) * size
        likely = (first[:, None] + language.successors[words] + shift).ravel()
        # as often the first as the second ten words, the first as the second hundred, ...
        others = np.exp(self._rng.random(int(draws.sum())) * np.log(len(language.lexicon))).astype(np.int64) - 1
        keys = np.unique(np.concatenate([first + STOP, likely, np.repeat(first, draws) + others + shift]))
        second = keys % size
        probabilities = (1 - END) * (1 - FOLLOW) * language.word_probabilities[np.maximum(second - shift, 0)]
        shares = np.tile((1 - END) * FOLLOW * zipf(SUCCESSORS), len(words))
        np.add.at(probabilities, np.searchsorted(keys, likely), shares)
        probabilities[second == STOP] = END
        return keys, np.log10(probabilities).astype(np.float32)

    def _fit_trigrams(self, ngrams: int, continuations: int) -> np.ndarray:
        """How many 3-grams go on from the 2-gram at each place of a word's list, in all as many as wanted.

        From the end, at place 0, none; from the first ones as many as every list is long, or `continuations`; then
        fewer, then none.
        """
        degrees = np.diff(self._begin)[len(SPECIALS) :]
        lists = len(degrees) - np.cumsum(np.bincount(degrees))  # that go beyond each place
        lists[0] = 0
        most = min(degrees.min(), continuations or degrees.min())
        left = ngrams - len(self.symbols) - len(self._seconds) - most * (np.cumsum(lists) - lists)
        return np.where(lists > 0, np.clip(left // np.maximum(lists, 1), 0, most), 0)

    def _continuations(self, chunk: slice) -> np.ndarray:
        """How many 3-grams go on from each 2-gram."""
        return self._widths[np.arange(len(self._seconds))[chunk] - self._begin[self._firsts[chunk]]]

    def _chunks(self) -> Iterator[slice]:
        step = max(1, BLOCK // SUCCESSORS)
        return (slice(first, first + step) for first in range(0, len(self._seconds), step))
