"""A seeded, made-up language: pieces, words spelled with them, sentences from a word bigram source.

Its figures are those of English transcripts with 1024 BPE pieces and a 6-gram of other texts: about 1.5
pieces per word, since frequent words have a piece of their own, and about 3.5 nats per piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.vocabulary import WORD_START

SUCCESSORS = 24  # likely next words of each word
FOLLOW = 0.58  # probability that a sentence goes on with one of them
_ONSETS, _VOWELS, _CODAS = "bcdfghjklmnprstvwz", "aeiou", ("", "n", "r", "s", "l", "t")


@dataclass(frozen=True)
class Language:
    """Pieces, words, and how words follow each other. V pieces, W words."""

    pieces: list[str]  # V spellings, no two alike; the first half begin a word
    lexicon: dict[str, tuple[int, ...]]  # word -> its piece ids
    word_probabilities: np.ndarray  # [W] of a word without context
    successors: np.ndarray  # [W, SUCCESSORS] likely next words

    def sentences(self, count: int, rng: np.random.Generator, words: tuple[int, int]) -> list[list[str]]:
        """`count` sentences whose number of words is uniform in the given range, both ends included."""
        vocabulary = list(self.lexicon)
        lengths = rng.integers(words[0], words[1] + 1, count)
        current = rng.choice(len(vocabulary), count, p=self.word_probabilities)
        columns = [current]
        rank = zipf(SUCCESSORS)
        for _ in range(words[1] - 1):
            likely = self.successors[current, rng.choice(SUCCESSORS, count, p=rank)]
            anything = rng.choice(len(vocabulary), count, p=self.word_probabilities)
            current = np.where(rng.random(count) < FOLLOW, likely, anything)
            columns.append(current)
        table = np.stack(columns, 1)
        return [
            [vocabulary[word] for word in row[:length]]
            for row, length in zip(table, lengths, strict=True)
        ]

    def spell(self, words: list[str]) -> list[int]:
        return [piece for word in words for piece in self.lexicon[word]]


def make_language(vocab_size: int, rng: np.random.Generator, *, words: int | None = None) -> Language:
    """A language with `vocab_size` pieces.

    Args:
        words: how many; None for four times as many as pieces. The short ones are frequent.

    Raises:
        ValueError: so few pieces don't make so many words.
    """
    starts = (vocab_size + 1) // 2
    wanted = 4 * vocab_size if words is None else words
    most = starts * sum((vocab_size - starts) ** n for n in range(4))
    if wanted > most // 2:  # the last ones would hardly ever be drawn
        raise ValueError(
            f"vocab_size is {vocab_size}, which makes {most} words, expected a size with twice {wanted}"
        )
    sounds = list(itertools.islice(_syllables(), starts))
    pieces = [WORD_START + sound for sound in sounds] + sounds[: vocab_size - starts]
    lexicon: dict[str, tuple[int, ...]] = {}
    while len(lexicon) < wanted:
        length = int(rng.choice([1, 2, 3, 4], p=[0.04, 0.4, 0.35, 0.21]))
        first, rest = rng.integers(starts), rng.integers(starts, vocab_size, length - 1)
        ids = (int(first), *(int(piece) for piece in rest))
        lexicon.setdefault("".join(pieces[i] for i in ids)[len(WORD_START) :], ids)
    lexicon = dict(sorted(lexicon.items(), key=lambda entry: len(entry[1])))
    probabilities = zipf(len(lexicon))
    successors = rng.choice(len(lexicon), (len(lexicon), SUCCESSORS), p=probabilities)
    return Language(pieces, lexicon, probabilities, successors)


def _syllables() -> Iterator[str]:
    """Endless, no two alike: single syllables, then pairs, and so on."""
    syllables = ["".join(parts) for parts in itertools.product(_ONSETS, _VOWELS, _CODAS)]
    for count in itertools.count(1):
        yield from ("".join(parts) for parts in itertools.product(syllables, repeat=count))


def zipf(count: int) -> np.ndarray:
    """Probabilities of `count` ranks by Zipf's law."""
    weights = 1.0 / np.arange(1, count + 1)
    return weights / weights.sum()
