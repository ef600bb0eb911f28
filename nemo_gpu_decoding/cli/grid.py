"""The points of a grid of options that `tune` tries, and the decoders at these points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf

from nemo_gpu_decoding.cli.decoding import decoding_config

if TYPE_CHECKING:
    from nemo_gpu_decoding.cli.dev_set import Search
    from nemo_gpu_decoding.nemo_plugin.model import Head
    from nemo_gpu_decoding.search.decoder import Decoder

# options that are weights
WEIGHTS = ("lm_weight", "source_lm_weight", "large_lm_weight", "boosting_weight", "beam_beta", "rescore_weight")
TREE = ("segmentations", "refund", "overlapping", "ac_threshold")  # options of the boosting tree


class Point(NamedTuple):
    """One combination of options. None: the strategy has no such option, or there is no LM or no phrase."""

    beam_size: int | None = None
    beam_beta: float | None = None
    lm_weight: float | None = None
    boosting_weight: float | None = None
    blank_lm_score_mode: str | None = None
    beam_width: float | None = None
    large_lm_weight: float | None = None
    pruning_mode: str | None = None
    rescore_weight: float | None = None
    segmentations: int | None = None
    refund: str | None = None
    overlapping: bool | None = None
    source_lm_weight: float | None = None
    ac_threshold: float | None = None
    score_norm: bool | None = None

    def __str__(self) -> str:
        """The options in the form in which a user types them."""
        values = self._asdict().items()
        return " ".join(f"{name}={value}" for name, value in values if value is not None)

    @property
    def cost(self) -> tuple[float, ...]:
        """Sort key among equally good points: smaller searches, then smaller weights, then defaults."""
        weights = (abs(getattr(self, name) or 0.0) for name in WEIGHTS)
        way = (self.refund == "nemo", bool(self.overlapping), self.ac_threshold or 0.0, self.score_norm is False)
        return (self.beam_size or 0, self.beam_width or 0.0, self.segmentations or 0, *weights, *way)


def combinations(**values: Sequence[Any]) -> list[Point]:
    """Every combination of the values of each option; an option without values stays None."""
    return [Point(*row) for row in itertools.product(*(values.get(n) or [None] for n in Point._fields))]


def varied(points: Sequence[Point]) -> list[str]:
    """The options that the points have, in their order."""
    return [name for name in Point._fields if any(getattr(point, name) is not None for point in points)]


def tried_values(points: Sequence[Point]) -> str:
    """The values of each option that the points have.

    >>> tried_values([Point(beam_size=8, lm_weight=0.5), Point(beam_size=32, lm_weight=0.5)])
    'beam_size=8,32 lm_weight=0.5'
    """
    tried = {name: sorted({getattr(point, name) for point in points} - {None}) for name in varied(points)}
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in tried.items())


class Searches:
    """The decoders of a strategy, one for each boosting tree; LM or graph are shared.

    Args:
        files: LM, phrases, and weights other than 0, so that all models are loaded.
    """

    def __init__(self, head: Head, strategy: str, preset: str | None, files: dict[str, Any]) -> None:
        self.head, self._strategy, self._preset, self._files = head, strategy, preset, files
        self._ready: dict[tuple[Any, ...], Search] = {}

    def at(self, point: Point) -> Search:
        """The decoder with the boosting tree of a point; None: as in the preset. The weights are not set."""
        tree = {name: getattr(point, name) for name in TREE}
        key = tuple(tree.values())
        if key not in self._ready:
            self._ready[key] = self.head.search(self._config(tree))
        return self._ready[key]

    def _config(self, options: dict[str, Any]) -> Any:
        return decoding_config(self._strategy, self._preset, {**self._files, **options})

    @property
    def refunds(self) -> tuple[str, ...]:
        """The refunds that work with the phrases and the preset: NeMo's have neither penalties nor whole words."""
        from nemo_gpu_decoding.fusion.boosting import REFUNDS, read_phrases, weight_of

        if self._files["phrases"] is None:
            return ()
        whole_words = OmegaConf.select(self._config({}), "beam.boosting_tree.whole_words")
        has_penalties = any(weight_of(phrase) < 0 for phrase in read_phrases(self._files["phrases"]))
        return REFUNDS[:1] if whole_words or has_penalties else REFUNDS

    @property
    def n_best(self) -> int:
        """Hypotheses that the preset has."""
        return self.head.decoding.decoding.options.n_best

    @property
    def most_bonus(self) -> float:
        """The most that a word earns with a boosting weight of 1, natural log."""
        boosting = self.at(Point()).fusion.boosting
        return 0.0 if boosting is None else max(0.0, float(boosting.arrays.states["upper_bound"].max()))


def at_point(decoder: Decoder[Any, Any], point: Point, n_best: int = 1) -> Decoder[Any, Any]:
    """The same decoder with other weights; it shares the LM or graph and the phrases.

    A weight of None removes the phrases or the token-level LM; the LM of a word graph keeps its weight. With `n_best`
    above 1 a beam search returns its whole beam, because several hypotheses may have the same text. A word graph
    returns `n_best` hypotheses, or more if its config says so.
    """
    from nemo_gpu_decoding.fusion.fusion import Fusion
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

    names = ("beam_size", "beam_beta", "blank_lm_score_mode", "pruning_mode", "score_norm", "beam", "large_lm_weight")
    values = point._asdict() | {"beam": point.beam_width}
    changes: dict[str, Any] = {name: values[name] for name in names if values[name] is not None}
    changes["n_best"] = max(n_best, decoder.config.n_best)
    if point.beam_size is not None:
        changes["n_best"] = point.beam_size if n_best > 1 else 1
    fusion, lm_weight = decoder.fusion, point.lm_weight
    if lm_weight is None and isinstance(decoder, CudaWFST):
        lm_weight = fusion.lm_weight
    fusion = Fusion(
        lm=None if point.lm_weight is None else fusion.lm,
        lm_weight=lm_weight or 0.0,
        boosting=None if point.boosting_weight is None else fusion.boosting,
        boosting_weight=point.boosting_weight or 0.0,
        source_lm=fusion.source_lm if point.lm_weight and point.source_lm_weight else None,
        source_lm_weight=point.source_lm_weight if point.lm_weight else None,
        allowed=fusion.allowed,
        grammar=fusion.grammar,
    )
    return decoder.with_options(replace(decoder.config, **changes), fusion)
