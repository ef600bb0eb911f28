"""A decoder as the contract sees it, and what is compared of its results.

`Subject` is all that a family of decoders (over CTC's log-probs, a transducer's frames, word graphs)
tells the checks in `battery.py`; a test class adds `make`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.result import NBest

BATCH, FRAMES = 6, 24
LENGTHS = [24, 15, 0, 1, 20, 8]


def facts(nbest: NBest) -> list[Any]:
    """All of a result that can be compared exactly: every field of its paths, its frames and notes."""
    paths = [{field.name: _plain(getattr(path, field.name)) for field in fields(path)} for path in nbest]
    return [nbest.num_frames, nbest.notes, *paths]


def all_facts(results: Sequence[NBest]) -> list[list[Any]]:
    return [facts(nbest) for nbest in results]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


class Subject:
    """What the checks need to know. Inputs are [B, T, width] with B = BATCH and T up to FRAMES."""

    # ways of searching that all keep the contract; every check runs with each of them
    variants: tuple[str, ...]
    # of the input: its name and axes in messages, the size of its last axis, what it must not hold
    argument: str = "log_probs"
    axes: str = "[B, T, V + 1]"
    width: int
    forbidden: tuple[float, ...] = (float("nan"), float("inf"))
    device: str = "cpu"
    # of results: the most alternatives that `partial` gives, those that `fused` asks for, the score of
    # an utterance without frames (None: what the graph charges for it), and what `decoder` adds to a
    # score for each token
    most_partial: int
    n_best: int = 1
    score_of_nothing: float | None = 0.0
    insertion: float = 0.0
    # by which the parts of a score may miss it
    tolerance: float = 1e-3
    # decodings by each of several threads that share a decoder
    calls_per_thread: int = 5

    def make(self, *args: Any, **options: Any) -> Any:
        """A decoder; test classes say on which backend."""
        raise NotImplementedError

    def fused(self, variant: str, **options: Any) -> Any:
        """The decoder that most checks look at: with all that it can add to acoustic scores."""
        raise NotImplementedError

    def bare(self, variant: str, **options: Any) -> Any:
        """As `fused`, without phrases and with no LM but one that is part of a graph."""
        raise NotImplementedError

    def wish(self) -> Request:
        """A request that changes results."""
        raise NotImplementedError

    def random_inputs(self, batch: int, frames: int, *, seed: int) -> torch.Tensor:
        """[batch, frames, width]"""
        raise NotImplementedError

    def blank_only(self, variant: str) -> tuple[Any, torch.Tensor]:
        """A decoder, and an input [1, 20, width] in which it hears nothing but blanks."""
        raise NotImplementedError

    def without_preference(self, variant: str) -> tuple[Any, torch.Tensor]:
        """A decoder, and inputs [3, 6, width], all alike, in which all tokens fit equally well."""
        raise NotImplementedError

    def least_n_best(self, frames: int) -> int:
        """How many hypotheses `fused` has to find, at least, in random inputs of so many frames."""
        return min(2, self.n_best) if frames > 1 else 1

    def rating(self, path: Any) -> float:
        """What n-best lists are sorted by."""
        return path.score

    def text(self, path: Any) -> tuple[Any, ...]:
        """What no two hypotheses of an n-best list share."""
        return tuple(path.tokens.tolist())

    def let_threads_work(self, monkeypatch: Any) -> None:
        """Share out even the little work that the checks give."""

    # -------------------------------------------------------------------------------- for checks

    def poisoned(self, inputs: torch.Tensor, poison: float) -> torch.Tensor:
        """With twice the frames, all beyond an utterance's length `poison`."""
        padded = torch.cat([inputs, inputs], dim=1)
        for b, length in enumerate(LENGTHS):
            padded[b, length:] = poison
        return padded

    def random_chunks(
        self, inputs: torch.Tensor, rng: np.random.Generator
    ) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """The frames of all utterances in chunks of 0 .. 7 frames, NaN where a chunk has fewer."""
        done = np.zeros(BATCH, int)
        while (done < LENGTHS).any():
            sizes = np.minimum(rng.integers(0, 8, BATCH), np.array(LENGTHS) - done)
            chunk = torch.full((BATCH, 8, self.width), float("nan"), device=self.device)
            for b, size in enumerate(sizes):
                chunk[b, :size] = inputs[b, done[b] : done[b] + size]
            yield chunk, sizes.tolist()
            done += sizes

    def wrong_width(self, width: int) -> str:
        """How an input of another width is refused."""
        return f"{self.argument} has {width} columns, expected {self.width}"
