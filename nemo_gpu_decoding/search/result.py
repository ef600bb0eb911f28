"""What every decoder returns: plain numbers, no NeMo, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice


S = TypeVar("S", bound="Path")
T = TypeVar("T")


def made(kind: type[T], **values: Any) -> T:
    """A frozen dataclass whose fields have these values, the others their defaults. The `__init__` of one sets field
    by field, which takes longer than all else about a hypothesis."""
    result = object.__new__(kind)
    result.__dict__.update(values)
    return result


@dataclass(frozen=True)
class ScoreParts:
    """Where a score comes from; the parts add up to `Path.score`. Natural log."""

    acoustic: float
    lm: float = 0.0  # lm_weight * log P_LM, final weight included
    boosting: float = 0.0  # boosting_weight * bonus
    insertion: float = 0.0  # beam_beta * number of tokens
    second_pass: float = 0.0  # of `rescored` n-best lists


@dataclass(frozen=True)
class Path:
    """One hypothesis of one utterance. n tokens, T frames decoded."""

    tokens: np.ndarray  # [n] int32 token ids, no blanks
    frames: np.ndarray  # [n] int32, frame at which each token starts (0 = first frame of the stream)
    repeats: np.ndarray  # [n] int32, number of consecutive frames that emit the token, >= 1
    token_confidence: np.ndarray  # [n] float32 in [0, 1]: mean posterior of the token over these frames
    score: float
    parts: ScoreParts
    # [T] int32 label per frame, blanks included; if asked for. Of transducers, [m] for m steps: several
    # labels may share a frame
    alignment: np.ndarray | None = None
    alignment_log_probs: np.ndarray | None = None  # float32 log-posterior of these labels
    # of transducers only
    alignment_frames: np.ndarray | None = None  # [m] int32, frame of every label in `alignment`
    durations: np.ndarray | None = None  # [n] int32, frames moved on with each token (TDT)

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self: S, n: int) -> S:
        """What comes after the first n tokens, without alignment; of word paths with the words that end there, whose
        tokens count from the start of the stream. Of partial results it takes no time for what is committed:

            new = nbest.best.after(shown)  # shown: what nbest.committed was the last time
        """
        return self._cut(n, n)

    def _cut(self: S, begin: int, n: int) -> S:
        """The path without its first `begin` tokens, which are n of the whole path."""
        return replace(
            self,
            tokens=self.tokens[begin:],
            frames=self.frames[begin:],
            repeats=self.repeats[begin:],
            token_confidence=self.token_confidence[begin:],
            durations=None if self.durations is None else self.durations[begin:],
            alignment=None,
            alignment_log_probs=None,
            alignment_frames=None,
        )


P = TypeVar("P", bound=Path, covariant=True)


class Work(NamedTuple):
    """Counters of paged_biglm over all frames of an utterance. They do not depend on chunks, except for
    `query_hits`; `look_ups` and `groups` do not depend on the order of work either.

    The last three are of LMs that a GPU reads from the host's memory (`placement: paged`), else 0. They depend on
    the size of the GPU's cache of arcs, on what was decoded before, and on the order in which threads came.
    """

    look_ups: int  # words that the LMs were queried for
    query_hits: int  # of these, answered by the LM query cache
    arc_visits: int  # arcs of the graph that were looked at
    groups: int  # groups of tokens in one graph state; with let, tokens of the base search
    expanded: int  # tokens that took arcs; of a group those with one LM context count as one; with let, contexts
    frames: int
    cache_hits: int = 0  # arcs of an LM that were in the GPU's cache
    cache_misses: int = 0  # arcs that were read over the bus
    bus_bytes: int = 0  # that these reads fetched

    @property
    def cache_hit_rate(self) -> float:
        """Share of the arcs that were in the GPU's cache, 0 .. 1; NaN if none was read from the host's memory."""
        asked = self.cache_hits + self.cache_misses
        return self.cache_hits / asked if asked else float("nan")


@dataclass(frozen=True)
class NBest(Sequence[P]):
    """The hypotheses of one utterance, best first, no two with the same tokens, of word graphs no two with the same
    words; never empty. Different tokens may spell the same text, see `distinct`.

    What only some searches know is None from the others.
    """

    paths: tuple[P, ...]
    num_frames: int = 0
    notes: tuple[str, ...] = ()  # what a user should know, e.g. overflow of a limit
    lattice: Lattice | None = None  # of a word-graph search, if its config asks for it
    # Of partial results of a word-graph search: what the best hypothesis that may end here costs above
    # the best of all, in units of the score; inf if none may. Endpointing asks for it.
    relative_cost: float | None = None
    work: Work | None = None  # of paged_biglm
    # Of partial results: so many tokens at the beginning of the best hypothesis will not change any more, for all
    # live hypotheses have them from one common ancestor (alternatives in a lattice may differ). It never falls while
    # a stream goes on.
    committed: int | None = None

    @property
    def best(self) -> P:
        return self.paths[0]

    def distinct(self, text_of: Callable[[Any], str], n: int) -> NBest[P]:
        """The n best hypotheses with different texts, or as many as there are.

        The best hypothesis of a text stays as it is: its score is that of its tokens, and nothing is added to it.
        """
        if n == 1 or len(self.paths) == 1:
            return self if len(self.paths) == 1 else replace(self, paths=self.paths[:1])
        found: dict[str, P] = {}
        for path in self.paths:
            found.setdefault(text_of(path), path)
            if len(found) == n:
                break
        return replace(self, paths=tuple(found.values()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index]

    def __iter__(self) -> Iterator[P]:
        return iter(self.paths)
