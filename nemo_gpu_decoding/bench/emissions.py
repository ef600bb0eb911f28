"""Synthetic CTC posteriors: what a trained, imperfect model would say about a known token sequence.

Peaky as real CTC models are: most frames are blank, a token lasts one or two frames and shares its
mass with the few tokens it is confused with, some frames are flat.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FRAME_SECONDS = 0.08  # the encoders this imitates subsample 10 ms features by 8
BLANKS_PER_TOKEN = 2.25  # mean of a Poisson distribution; gives about 3.5 frames per token
TWO_FRAMES = 0.25  # probability that a token lasts two frames
FLAT_TOKEN_FRAME = 0.01  # probability that a token's frame tells nothing
FLAT_BLANK_FRAME = 0.02  # the same for a blank's
GROUP = 8  # tokens that are mistaken for each other, see `draw_groups`
PEAK = (0.3, 0.9)  # range of a token's own posterior
TAIL = (-13.0, 2.0)  # mean and deviation of the log-posterior of all other tokens


def draw_confusions(word_starts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """For every token the 5 to 10 tokens it is mistaken for, half of them of its own kind.

    Args:
        word_starts: [V] bool, whether the token begins a word.
    """
    kinds = {kind: np.flatnonzero(word_starts == kind) for kind in (False, True)}
    everything = np.arange(len(word_starts))
    confusions = []
    for token, starts_word in enumerate(word_starts):
        count = int(rng.integers(5, 11))
        near = rng.choice(kinds[bool(starts_word)], (count + 1) // 2)
        far = rng.choice(everything, count // 2)
        drawn = np.unique(np.concatenate([near, far]))
        others = drawn[drawn != token]
        confusions.append(others if len(others) else np.array([(token + 1) % len(word_starts)]))
    return confusions


def draw_groups(word_starts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """For every token the up to 7 tokens of its group, all of its own kind, that it is mistaken for.

    Args:
        word_starts: as in `draw_confusions`.
    """
    confusions = [np.array([(token + 1) % len(word_starts)]) for token in range(len(word_starts))]
    for kind in (False, True):
        shuffled = rng.permutation(np.flatnonzero(word_starts == kind))
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
        self._confusions = confusions
        self._rng = rng
        self._blank = len(confusions)

    def emit(self, tokens: Sequence[int]) -> np.ndarray:
        """Log-posteriors of one utterance, [T, V+1] float32, normalised; T is drawn."""
        rows = [self._blank_frame([]) for _ in range(self._rng.integers(1, 6))]
        for position, token in enumerate(tokens):
            rows += self._token_frames(token)
            following = tokens[position + 1] if position + 1 < len(tokens) else None
            rows += self._blank_frames(token, following)
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

    def _blank_frames(self, token: int, following: int | None) -> list[np.ndarray]:
        """Frames between two tokens: the first and the last still show the neighbours."""
        count = int(self._rng.poisson(BLANKS_PER_TOKEN))
        if token == following:
            count = max(count, 1)  # CTC needs a blank between equal tokens
        frames = []
        for index in range(count):
            if self._rng.random() < FLAT_BLANK_FRAME:
                frames.append(self._flat_frame())
                continue
            neighbours = [token] if index == 0 else []
            if index == count - 1 and following is not None:
                neighbours.append(following)
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
