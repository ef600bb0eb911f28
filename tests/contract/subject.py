"""A decoder as the contract sees it. A new strategy adds a class with `make` and a row to `subjects.py`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.boosting import BoostingTree, PhraseTable
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence, build_context_graph
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.search.result import NBest
from tests.random_models import random_boosting, random_lm, random_log_probs

BATCH, FRAMES = 6, 24
LENGTHS = [24, 15, 0, 1, 20, 8]
VOCAB = 12  # tokens of the strategies that search over tokens
WIDTH = VOCAB + 1


class Subject:
    """What the checks need to know. Inputs are [B, T, width] with B = BATCH and T up to FRAMES.

    Args:
        backend: that the decoders are made for: cpu or cuda.
        device: where inputs lie; cpu for kernels in the emulator, too.
    """

    # ways of searching that all keep the contract; every check runs with each of them
    variants: ClassVar[tuple[str, ...]]
    # variants with kernels in the emulator, which takes its time; None: all
    emulated_variants: ClassVar[tuple[str, ...] | None] = None
    # of the input: its name and axes in messages, the size of its last axis, what it must not hold
    argument: str = "log_probs"
    axes: str = "[B, T, V + 1]"
    width: int = WIDTH
    forbidden: tuple[float, ...] = (float("nan"), float("inf"))
    # of results: the most alternatives that `partial` gives, those that `fused` asks for, the score of
    # an utterance without frames (None: what the graph charges for it), and what `fused` adds to a score
    # for each token
    most_partial: int = 1
    n_best: int = 1
    score_of_nothing: float | None = 0.0
    insertion: float = 0.0
    # by which the parts of a score may miss it
    tolerance: float = 1e-3
    # whether partial results say how many tokens are committed
    tells_committed: bool = True
    # whether partial results trace back the last tokens only
    keeps_heads: bool = True

    # why checks do not apply -> their names
    exempt: ClassVar[dict[str, tuple[str, ...]]] = {}
    # the names of the only checks that run; None: all
    only: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, backend: str = "cpu", device: str = "cpu") -> None:
        self.backend, self.device = backend, device

    def make(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    def fused(self, variant: str, **options: Any) -> Any:
        """The decoder that most checks look at: with all that it can add to acoustic scores."""
        raise NotImplementedError

    def bare(self, variant: str, **options: Any) -> Any:
        """As `fused`, without phrases and with no LM but one that is part of a graph."""
        raise NotImplementedError

    def request(self) -> Request:
        raise NotImplementedError

    def random_inputs(self, batch: int, frames: int, *, seed: int) -> torch.Tensor:
        """[batch, frames, width] on the CPU."""
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

    def threads_for_little_work(self, monkeypatch: Any) -> None:
        """Share out even the little work that the checks give."""

    def wrong_width(self, width: int) -> str:
        """How an input of another width is refused."""
        return f"{self.argument} has {width} columns, expected {self.width}"

    def at(self, b: int, *place: int) -> str:
        """How messages name a frame of utterance b, or a value in it; escaped."""
        return re.escape(f"{self.argument}[{', '.join(map(str, (b, *place)))}]")

    def small_sizes(self) -> dict[str, dict[str, int]]:
        """Module -> names of sizes, made small in the emulator: a fiber per thread takes its time."""
        return {}

    # -------------------------------------------------------------------------------- for checks

    def inputs(self, *, seed: int = 3) -> torch.Tensor:
        return self.random_inputs(BATCH, FRAMES, seed=seed).to(self.device)

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


class LogProbs(Subject):
    """Decoders of log-probs; the last column is the blank's."""

    def random_inputs(self, batch, frames, *, seed):
        return random_log_probs(batch, frames, self.width, seed=seed)

    def blank_only(self, variant):
        blanks = torch.full((1, 20, self.width), -30.0, device=self.device)
        blanks[:, :, -1] = 0.0
        return self.bare(variant), blanks

    def without_preference(self, variant):
        flat = torch.full((3, 6, self.width), -float(np.log(self.width - 1)), device=self.device)
        flat[:, :, -1] = -30.0  # or word graphs would hear nothing
        return self.bare(variant), flat


class TokenFusion(Subject):
    """Decoders with an LM and phrases over tokens."""

    usual: str  # the variant with which further automata are checked
    lm_scores_the_end = True

    def with_fusion(self, variant: str, fusion: Fusion, **options: Any) -> Any:
        """A decoder with the options that `fused` has."""
        raise NotImplementedError

    def fused(self, variant, **options):
        return self.with_fusion(variant, self.fusion(), **options)

    def bare(self, variant, **options):
        return self.with_fusion(variant, Fusion(), **options)

    def fusion(self) -> Fusion:
        return Fusion(random_lm(VOCAB, seed=1), 0.4, random_boosting(VOCAB, seed=2), 0.5)

    def request(self):
        return Request(boosting=random_boosting(VOCAB, seed=9, bonus=4.0), boosting_weight=2.0, lm_weight=0.1)

    def phrases(self):
        sequences = [ScoredSequence(labels, np.full(len(labels), 2.0), 2.0) for labels in ([0, 1], [2, 3, 4], [5])]
        keys = [tuple(sequence.tokens) for sequence in sequences]
        build = partial(build_context_graph, vocab_size=VOCAB)
        return Request(BoostingTree.of(PhraseTable(sequences, keys, list(map(str, keys)), build), 0.0), 2.0)

    def requested_fusion(self) -> Fusion:
        """The fusion of a decoder without requests that is alike for `request`."""
        request = self.request()
        return Fusion(self.fusion().lm, request.lm_weight, request.boosting, request.boosting_weight)


class DensityRatio:
    """With a source LM; a request's LM weight scales that of the source LM, too."""

    source_lm_weight = 0.3

    def fusion(self):
        return replace(super().fusion(), source_lm=self.source(), source_lm_weight=self.source_lm_weight)

    def requested_fusion(self):
        requested = super().requested_fusion()
        scale = requested.lm_weight / self.fusion().lm_weight
        return replace(requested, source_lm=self.source(), source_lm_weight=scale * self.source_lm_weight)

    def source(self):
        return random_lm(VOCAB, seed=4, order=2)


class LMPool:
    """With LMs that requests name; one of them has a weight of its own."""

    def fusion(self):
        pool = {"other": random_lm(VOCAB, seed=5, order=2), "third": random_lm(VOCAB, seed=6)}
        return replace(super().fusion(), lm_pool=pool, lm_pool_weights={"third": 0.7})

    def request(self):
        return replace(super().request(), lm="third", lm_weight=None)

    def requested_fusion(self):
        fusion, request = self.fusion(), self.request()
        return Fusion(fusion.lm_pool["third"], 0.7, request.boosting, request.boosting_weight)


class Locked:
    """With a price for some tokens; a request forbids others."""

    allowed = AllowedTokens(tuple(v % 3 < 2 for v in range(VOCAB)), 1.5)

    def fusion(self):
        return replace(super().fusion(), allowed=self.allowed)

    def bare(self, variant, **options):
        return self.with_fusion(variant, Fusion(allowed=self.allowed), **options)

    def request(self):
        return replace(super().request(), allowed=AllowedTokens(tuple(v % 2 > 0 for v in range(VOCAB))))

    def requested_fusion(self):
        return replace(super().requested_fusion(), allowed=self.request().allowed)


class WordGraph(LogProbs):
    """Decoders of word graphs. The variants are CTC's topologies."""

    variants = ("compact", "normal", "minimal")
    most_partial = 1
    score_of_nothing = None
    tolerance = 1e-9

    def fused(self, variant, **options):
        return self.make(topology=variant, **{"beam": 9.0, **options})

    bare = fused

    def phrases(self):
        return replace(self.request(), lm_weight=None)

    def text(self, path):
        return tuple(word.label for word in path.words)

    def emitted(self, path, decoder):
        """The labels that boosting reads."""
        return [word.label for word in path.words]


# --------------------------------------------------------------- What is compared of results, exactly
def facts(nbest: NBest) -> list[Any]:
    """All of a result that can be compared exactly: every field of its paths, its frames and notes."""
    paths = [{field.name: _plain(getattr(path, field.name)) for field in fields(path)} for path in nbest]
    return [nbest.num_frames, nbest.notes, *paths]


def all_facts(results: Sequence[NBest]) -> list[list[Any]]:
    return [facts(nbest) for nbest in results]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
