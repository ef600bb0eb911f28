"""The points of a grid of options that `tune` tries, and a decoder at one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.fusion.fusion import Fusion

if TYPE_CHECKING:
    from nemo_gpu_decoding.cli.dev_set import Search


@dataclass(frozen=True)
class Point:
    """One combination. None: the strategy has no such option, or there is nothing to weight."""

    beam_size: int | None = None
    beam_beta: float | None = None
    lm_weight: float | None = None
    boosting_weight: float | None = None
    blank_scoring: str | None = None
    beam_width: float | None = None
    large_lm_weight: float | None = None
    pruning_mode: str | None = None

    def __str__(self) -> str:
        """As one would type it."""
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)

    @property
    def cost(self) -> tuple[float, ...]:
        """Smaller searches first, then smaller weights: who wins among equally good points."""
        weights = (
            self.lm_weight or 0.0,
            self.large_lm_weight or 0.0,
            self.boosting_weight or 0.0,
            abs(self.beam_beta or 0.0),
        )
        return (self.beam_size or 0, self.beam_width or 0.0, *weights)


@dataclass(frozen=True)
class Axes:
    """Values to try of each option of a `Point`; an option without values stays None."""

    beam_size: Sequence[int] = ()
    beam_beta: Sequence[float] = ()
    lm_weight: Sequence[float] = ()
    boosting_weight: Sequence[float] = ()
    blank_scoring: Sequence[str] = ()
    beam_width: Sequence[float] = ()
    large_lm_weight: Sequence[float] = ()
    pruning_mode: Sequence[str] = ()

    def points(self) -> Iterator[Point]:
        """Every combination."""
        values = [getattr(self, field.name) or [None] for field in fields(self)]
        return itertools.starmap(Point, itertools.product(*values))


def varied(points: Sequence[Point]) -> list[str]:
    """The options that the points have, in their order."""
    return [f.name for f in fields(Point) if any(getattr(point, f.name) is not None for point in points)]


def at_point(decoder: Search, point: Point) -> Search:
    """The same decoder with other weights; LM or graph and phrases are shared, not loaded again.

    The LM of a word graph is the graph itself: None keeps its weight. Without a weight for them there
    are no phrases, and no LM that is not part of a graph.
    """
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

    values = {
        "beam_size": point.beam_size,
        "beam_beta": point.beam_beta,
        "blank_lm_score_mode": point.blank_scoring,
        "pruning_mode": point.pruning_mode,
        "beam": point.beam_width,
        "large_lm_weight": point.large_lm_weight,
    }
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if point.beam_size is not None:
        changes["n_best"] = min(decoder.config.n_best, point.beam_size)
    in_graph = isinstance(decoder, CudaWFST)
    fusion = decoder.fusion
    lm_weight = fusion.lm_weight if in_graph and point.lm_weight is None else point.lm_weight
    fusion = Fusion(
        lm=None if point.lm_weight is None else fusion.lm,
        lm_weight=lm_weight or 0.0,
        boosting=None if point.boosting_weight is None else fusion.boosting,
        boosting_weight=point.boosting_weight or 0.0,
    )
    config: Any = replace(decoder.config, **changes)
    return decoder.with_options(config, fusion)
