"""An artificial language, drawn from a seed, and synthetic CTC posteriors of its sentences.

The language has the statistics of English transcripts with 1024 BPE pieces and a 6-gram of other texts: about 1.5
pieces per word, because frequent words are single pieces, and about 3.5 nats per piece. The posteriors imitate a
trained, imperfect model. Most frames are blank. A token lasts one or two frames and shares its mass with a few similar
tokens. Some frames are flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.vocabulary import WORD_START

SUCCESSORS = 24  # likely next words of each word
FOLLOW = 0.58  # probability that a sentence goes on with one of them
FRAME_SECONDS = 0.08  # the encoders this imitates subsample 10 ms features by 8
BLANKS_PER_TOKEN = 2.25  # mean of a Poisson distribution; gives about 3.5 frames per token
TWO_FRAMES = 0.25  # probability that a token lasts two frames
FLAT_TOKEN_FRAME = 0.01  # probability that a token's frame is flat
FLAT_BLANK_FRAME = 0.02  # the same for a blank's
GROUP = 8  # tokens that are mistaken for each other
PEAK = (0.3, 0.9)  # range of a token's own posterior
TAIL = (-13.0, 2.0)  # mean and deviation of the log-posterior of all other tokens
_ONSETS, _VOWELS, _CODAS = "bcdfghjklmnprstvwz", "aeiou", ("", "n", "r", "s", "l", "t")


@dataclass(frozen=True)
class Language:
    """Pieces, words, and how words follow each other. V pieces, W words."""

    pieces: Sequence[str]  # V spellings, no two alike
    lexicon: Mapping[str, tuple[int, ...]]  # word -> its piece ids
    word_probabilities: np.ndarray  # [W] of a word without context
    successors: np.ndarray  # [W, SUCCESSORS] likely next words

    def sentences(self, count: int, rng: np.random.Generator, words: tuple[int, int]) -> list[list[str]]:
        """`count` sentences whose number of words is uniform in the given range, both ends included."""
        vocabulary = list(self.lexicon)
        lengths = rng.integers(words[0], words[1] + 1, count)
        current = rng.choice(len(vocabulary), count, p=self.word_probabilities)
        columns, rank = [current], zipf(SUCCESSORS)
        for _ in range(words[1] - 1):
            likely = self.successors[current, rng.choice(SUCCESSORS, count, p=rank)]
            anything = rng.choice(len(vocabulary), count, p=self.word_probabilities)
            current = np.where(rng.random(count) < FOLLOW, likely, anything)
            columns.append(current)
        rows = zip(np.stack(columns, 1), lengths, strict=True)
        return [[vocabulary[word] for word in row[:length]] for row, length in rows]

    def spell(self, words: Sequence[str]) -> list[int]:
        return [piece for word in words for piece in self.lexicon[word]]


def make_language(vocab_size: int, rng: np.random.Generator, *, words: int | None = None) -> Language:
    """A language with `vocab_size` pieces, of which the first half begin a word.

    Args:
        words: how many; None for four times as many as pieces. The short ones are frequent.

    Raises:
        ValueError: so few pieces don't make so many words.
    """
    starts = (vocab_size + 1) // 2
    wanted = 4 * vocab_size if words is None else words
    most = starts * sum((vocab_size - starts) ** n for n in range(4))
    if wanted > most // 2:  # the last ones would hardly ever be drawn
        raise ValueError(f"vocab_size is {vocab_size}, which makes {most} words, expected a size with twice {wanted}")
    sounds = list(itertools.islice(_syllables(), starts))
    pieces = [WORD_START + sound for sound in sounds] + sounds[: vocab_size - starts]
    drawn: dict[str, tuple[int, ...]] = {}
    while len(drawn) < wanted:
        length = int(rng.choice([1, 2, 3, 4], p=[0.04, 0.4, 0.35, 0.21]))
        first, rest = rng.integers(starts), rng.integers(starts, vocab_size, length - 1)
        ids = (int(first), *(int(piece) for piece in rest))
        drawn.setdefault("".join(pieces[i] for i in ids)[len(WORD_START) :], ids)
    lexicon = dict(sorted(drawn.items(), key=lambda entry: len(entry[1])))
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


def draw_confusions(pieces: Sequence[str], rng: np.random.Generator) -> list[np.ndarray]:
    """For every piece the up to 7 pieces of its group, all of its own kind (beginning a word or not),
    that it is mistaken for."""
    starts_word = np.array([piece.startswith(WORD_START) for piece in pieces])
    confusions = [np.array([(token + 1) % len(pieces)]) for token in range(len(pieces))]
    for kind in (False, True):
        shuffled = rng.permutation(np.flatnonzero(starts_word == kind))
        for start in range(0, len(shuffled), GROUP):
            group = shuffled[start : start + GROUP]
            for token in group[: len(group) if len(group) > 1 else 0]:
                confusions[token] = group[group != token]
    return confusions


class EmissionModel:
    """Draws [T, V+1] log-posteriors for token sequences; the blank is the last column.

    Args:
        confusions: per token, the tokens that it shares its mass with (see `draw_confusions`).
    """

    def __init__(self, confusions: Sequence[np.ndarray], rng: np.random.Generator) -> None:
        self._confusions, self._rng = confusions, rng
        self._blank = len(confusions)

    def emit(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-posteriors of one utterance, [T, V+1] float32, normalised; T is drawn."""
        rows = [self._blank_frame([]) for _ in range(self._rng.integers(1, 6))]
        for token, after in itertools.zip_longest(tokens, tokens[1:]):
            rows += self._token_frames(token) + self._blank_frames(token, after)
        posteriors = np.stack(rows)
        return np.log(posteriors / posteriors.sum(1, keepdims=True)).astype(np.float32)

    def _token_frames(self, token: int) -> list[np.ndarray]:
        rng, others = self._rng, self._confusions[token]
        peak = rng.uniform(*PEAK)
        blank = rng.uniform(0.0, 0.25) * (1 - peak)
        shares = rng.dirichlet(np.full(len(others), 0.4)) * (1 - peak - blank)
        frames = []
        for _ in range(1 + (rng.random() < TWO_FRAMES)):
            if rng.random() < FLAT_TOKEN_FRAME:
                frames.append(self._flat_frame())
                continue
            frame = self._tail()
            frame[token] += peak * np.exp(rng.normal(0, 0.1))
            frame[others] += shares * np.exp(rng.normal(0, 0.25, len(others)))
            frame[self._blank] += blank
            frames.append(frame)
        return frames

    def _blank_frames(self, token: int, after: int | None) -> list[np.ndarray]:
        """Frames between two tokens: the first and the last still show the neighbours."""
        count = int(self._rng.poisson(BLANKS_PER_TOKEN))
        if token == after:
            count = max(count, 1)  # CTC needs a blank between equal tokens
        frames = []
        for index in range(count):
            if self._rng.random() < FLAT_BLANK_FRAME:
                frames.append(self._flat_frame())
                continue
            neighbours = [token] if index == 0 else []
            if index == count - 1 and after is not None:
                neighbours.append(after)
            frames.append(self._blank_frame(neighbours))
        return frames

    def _blank_frame(self, neighbours: list[int]) -> np.ndarray:
        rng, frame = self._rng, self._tail()
        taken = rng.beta(1, 25)
        for token in neighbours:
            others = self._confusions[token]
            leak = rng.beta(1, 9) if rng.random() < 0.5 else 0.001
            frame[token] += leak * 0.7
            frame[others] += leak * 0.3 / len(others)
            taken += leak
        frame[self._blank] += max(1 - taken, 0.2)
        return frame

    def _flat_frame(self) -> np.ndarray:
        logits = self._rng.normal(0, 1.0, self._blank + 1)
        logits[self._blank] += 3.0
        return np.exp(logits)

    def _tail(self) -> np.ndarray:
        return np.exp(self._rng.normal(*TAIL, self._blank + 1))
