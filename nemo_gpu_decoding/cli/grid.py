"""List the combinations of options ("points") that `tune` tries stage by stage, and make their decoders.

`tune` tries options that are null with values around the best point so far. With phrases, token-level strategies first
try all weights with the smallest beam and one segmentation per phrase. Then they try larger beams and more
segmentations with the best weights. Word graphs try the LM weights without phrases, then the boosting weights with the
best LM weights, then the LM weights next to the best weights. With a limit of false phrases, the last stage of all
strategies tries thresholds for the evidence of a phrase.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_gpu_decoding.cli.decoding import LARGE_LM_STRATEGY, SEARCH_KEYS, TREE, decoding_config, section_of
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.schema import key_of

if TYPE_CHECKING:
    from nemo_gpu_decoding.cli.dev_set import Search
    from nemo_gpu_decoding.cli.tune import TuneOptions
    from nemo_gpu_decoding.nemo_plugin.model import Head
    from nemo_gpu_decoding.search.decoder import Decoder


# options that are weights
WEIGHTS = ("lm_weight", "source_lm_weight", "large_lm_weight", "boosting_weight", "beam_beta", "rescore_weight")


class Axis(NamedTuple):
    """Values that the first stage of `tune` tries for an option. At most one axis of an option fits a search."""

    option: str
    facts: str  # the axis is used if all of them hold, see `facts_of`
    values: Sequence[Any] = ()  # unless the option has values; (): the option stays None


LM_WEIGHTS, BOOSTING_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
# a word is several tokens, so weights per word are larger
WORD_LM_WEIGHTS, WORD_BOOSTING_WEIGHTS = (0.3, 0.5, 0.7, 1.0, 1.3), (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
BEAM_SIZES, SEGMENTATIONS = (8, 32), (1, 8)  # more than the first only with phrases
BEAM_WIDTHS = (16.0, 40.0)  # 40 if a word's bonus may exceed half of 16
AC_THRESHOLDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)  # tried with false_phrases_per_hour
AXES: tuple[Axis, ...] = (
    Axis("beam_size", "tokens", BEAM_SIZES[:1]),
    Axis("beam_beta", "ctc tokens", (0.0, 0.5, 1.0, 1.5)),
    Axis("beam_beta", "rnnt fused", (0.0, 1.0)),
    Axis("lm_weight", "tokens lm", LM_WEIGHTS),
    Axis("lm_weight", "graph", WORD_LM_WEIGHTS),
    # bonuses add up over the tokens of a phrase (five words earn 14 times the weight): small weights suit these
    Axis("boosting_weight", "tokens phrases", BOOSTING_WEIGHTS),
    Axis("boosting_weight", "graph phrases", (0.0,)),
    Axis("blank_lm_score_mode", "rnnt fused", ("lm_weighted_full", "no_score")),
    Axis("beam_width", "graph", BEAM_WIDTHS),
    Axis("large_lm_weight", "large", (0.5, 1.0)),  # 0 is cuda_wfst
    Axis("pruning_mode", "rnnt fused"),
    Axis("rescore_weight", "rescore"),
    Axis("segmentations", "tokens phrases", SEGMENTATIONS[:1]),
    Axis("source_lm_weight", "tokens source", (0.0, 0.1, 0.2, 0.3, 0.4)),
    Axis("ac_threshold", "phrases"),
    Axis("score_norm", "rnnt fused"),
)
_tried = {axis.option for axis in AXES}
AXES += tuple(Axis(key, name) for name, keys in SEARCH_KEYS.items() for key in keys if key not in _tried)
# `tune` refuses the first three without an LM or phrases
CHECKED = ("lm_weight", "source_lm_weight", "boosting_weight", "rescore_weight")


_NAMES = list(dict.fromkeys(axis.option for axis in AXES))
_made: Any = namedtuple  # under another name, because mypy cannot read fields that are not written out
_Values: Any = _made("_Values", _NAMES, defaults=[None] * len(_NAMES))


class Point(_Values):
    """One combination of options. A value is None if the strategy lacks the option, the LM or the phrases."""

    def __str__(self) -> str:
        """Return the options of this point as a user types them: "beam_size=8 lm_weight=0.5"."""
        values = self._asdict().items()
        return " ".join(f"{name}={value}" for name, value in values if value is not None)

    @property
    def cost(self) -> tuple[float, ...]:
        """Return the sort key for ties: smaller beams come first, then smaller weights, then default values."""
        weights = (abs(getattr(self, name) or 0.0) for name in WEIGHTS)
        rest = self.ac_threshold or 0.0, self.score_norm is False
        return (self.beam_size or 0, self.beam_width or 0.0, self.segmentations or 0, *weights, *rest)


def combinations(**values: Sequence[Any]) -> list[Point]:
    """Return the points of all combinations of these values; an option without values is None."""
    return [Point(*row) for row in itertools.product(*(values.get(n) or [None] for n in Point._fields))]


def varied(points: Sequence[Point]) -> list[str]:
    """Return the names of the options that are not None in at least one point, in the order of `Point`."""
    return [name for name in Point._fields if any(getattr(point, name) is not None for point in points)]


def tried_values(points: Sequence[Point]) -> str:
    """Return the distinct values of each option over all points, as text.

    >>> tried_values([Point(beam_size=8, lm_weight=0.5), Point(beam_size=32, lm_weight=0.5)])
    'beam_size=8,32 lm_weight=0.5'
    """
    tried = {name: sorted({getattr(point, name) for point in points} - {None}) for name in varied(points)}
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in tried.items())


class Searches:
    """The decoders of a strategy, one for each boosting tree. All share one LM or word graph.

    Args:
        files: LM, phrases, and weights other than 0, so that all models are loaded.
    """

    def __init__(self, head: Head, strategy: str, preset: str | None, files: dict[str, Any]) -> None:
        self.head, self._strategy, self._preset, self._files = head, strategy, preset, files
        self._ready: dict[tuple[Any, ...], Search] = {}

    def at(self, point: Point) -> Search:
        """Return the decoder with the boosting tree of a point, but without its weights."""
        tree = {name: getattr(point, name) for name in TREE if name in Point._fields}
        key = tuple(tree.values())
        if key not in self._ready:
            config = decoding_config(self._strategy, self._preset, {**self._files, **tree})
            self._ready[key] = self.head.search(config)
        return self._ready[key]

    @property
    def most_bonus(self) -> float:
        """Return the largest bonus of a word at a boosting weight of 1, natural log."""
        boosting = self.at(Point()).fusion.boosting
        return 0.0 if boosting is None else max(0.0, float(boosting.arrays.states["upper_bound"].max()))


def at_point(decoder: Decoder[Any, Any], point: Point, n_best: int = 1) -> Decoder[Any, Any]:
    """Return a decoder with a point's weights that shares the LM, word graph and phrases of `decoder`.

    A weight of None removes the phrases or the token-level LM; the LM of a word graph keeps its weight. With `n_best`
    above 1 a beam search returns its whole beam, because several hypotheses may have the same text. A word graph
    returns `n_best` hypotheses, or more if its config says so.
    """
    from nemo_gpu_decoding.fusion.fusion import Fusion
    from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

    values = {name: value for name, value in point._asdict().items() if value is not None}
    keys = {option.name: key_of(option) for option in fields(decoder.config)}
    changes: dict[str, Any] = {name: values[key] for name, key in keys.items() if key in values}
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


Stage = Callable[[Point], list[Point]]  # the best point so far -> points to try next


def facts_of(options: TuneOptions, strategy: str, has_lm: bool, has_phrases: bool) -> set[str]:
    """Return keywords that describe a search: strategy, head, "graph" or "tokens", and its LM and phrases."""
    facts = {strategy, STRATEGIES[strategy].family, "graph" if section_of(strategy) == "wfst" else "tokens"}
    named = {"large": strategy == LARGE_LM_STRATEGY, "source": options.source_lm is not None, "lm": has_lm}
    named |= {"rescore": options.rescore is not None, "phrases": has_phrases, "fused": has_lm or has_phrases}
    return facts | {name for name, holds in named.items() if holds}


def points_of(
    options: TuneOptions, strategy: str, *, has_lm: bool, has_phrases: bool, most_bonus: float = 0.0
) -> list[Point]:
    """Return the points of the first stage; weights of an absent LM or absent phrases are None.

    Args:
        most_bonus: the most that a word of a graph earns with a boosting weight of 1, natural log.
    """
    facts = facts_of(options, strategy, has_lm, has_phrases)
    values = {axis.option: axis.values for axis in AXES if facts >= set(axis.facts.split())}
    for name in Point._fields:
        if getattr(options, name) and name not in values and name not in CHECKED:
            how = strategy if facts & {"fused", "graph"} else f"{strategy} without lm or phrases"
            raise ValueError(f"{name} is {getattr(options, name)}, which has no effect with {how}")
    values = {name: getattr(options, name) or default for name, default in values.items()} | {"ac_threshold": ()}
    if "score_norm" in values and not options.score_norm:
        values["score_norm"] = [True] if max(values["beam_beta"]) > 0 else ()
    points = combinations(**values)
    if "graph" in facts and not options.beam_width:
        points = _with_width(points, most_bonus)
    if "source" in facts:  # an LM weight of 0 is tried once: there is nothing from which a source LM is subtracted
        points = [point if point.lm_weight else point._replace(source_lm_weight=0.0) for point in points]
    return list(dict.fromkeys(points))


def later_stages(
    options: TuneOptions, strategy: str, points: Sequence[Point], *, has_phrases: bool, most_bonus: float = 0.0
) -> list[Stage]:
    """Return the later stages, functions from the best point to new points; a stage may repeat points.

    Args:
        most_bonus: as in `points_of`.
    """
    is_ranked = points[0].score_norm is not None and not options.score_norm
    unranked: list[Stage] = [partial(_unranked, points)] if is_ranked else []
    if not has_phrases:
        return unranked
    section = section_of(strategy)
    thresholds = options.ac_threshold or (AC_THRESHOLDS if options.false_phrases_per_hour is not None else ())
    last: list[Stage] = [partial(_heard, options, thresholds, section, most_bonus)] if thresholds else []
    if section == "beam":
        weights = sorted({point.boosting_weight or 0.0 for point in points})
        sizes = options.beam_size or BEAM_SIZES
        larger = partial(_larger, sizes, options.segmentations or SEGMENTATIONS, weights)
        return [*unranked, larger, *last]
    if options.boosting_weight:
        return last
    return [partial(_boosted, options.beam_width or (), most_bonus), partial(_neighbours, points), *last]


def _unranked(points: Sequence[Point], best: Point) -> list[Point]:
    """Return points near the best that rank by total score, with a bonus per token against short hypotheses."""
    bonuses = sorted({bonus for point in points if (bonus := point.beam_beta or 0.0) > 0})
    beside = _neighbours(points, best) or [best]
    return [point._replace(score_norm=False, beam_beta=bonus) for point in beside for bonus in bonuses]


def _larger(sizes: Sequence[int], segmentations: Sequence[int], weights: Sequence[float], best: Point) -> list[Point]:
    """Return points with larger beams, more segmentations and all boosting weights, near the best point."""
    fixed: dict[str, Sequence[Any]] = {k: [value] for k, value in best._asdict().items() if value is not None}
    fixed |= {"beam_size": sizes, "segmentations": segmentations, "boosting_weight": weights}
    points = combinations(**fixed)
    return [point for point in points if point.boosting_weight or point.segmentations == segmentations[0]]


def _heard(options: TuneOptions, values: Sequence[float], section: str, most_bonus: float, best: Point) -> list[Point]:
    """Return points with thresholds for a phrase's evidence, at the best boosting weight and at larger weights."""
    every = options.boosting_weight or (BOOSTING_WEIGHTS if section == "beam" else WORD_BOOSTING_WEIGHTS)
    weights = [weight for weight in every if weight >= (best.boosting_weight or 0) > 0]
    points = [best._replace(ac_threshold=value, boosting_weight=weight) for value in values for weight in weights]
    return points if section == "beam" or options.beam_width else _with_width(points, most_bonus)


def _boosted(widths: Sequence[float], most_bonus: float, best: Point) -> list[Point]:
    """Return points with all boosting weights and the best LM weights."""
    points = [best._replace(boosting_weight=weight) for weight in WORD_BOOSTING_WEIGHTS]
    if widths:
        return [point._replace(beam_width=width) for point in points for width in widths]
    return _with_width(points, most_bonus)


def _neighbours(points: Sequence[Point], best: Point) -> list[Point]:
    """Return points that replace one best LM weight by the next smaller or larger tried value."""
    neighbours = []
    for name in ("lm_weight", "large_lm_weight"):
        values = sorted({getattr(point, name) for point in points} - {None})
        if values:
            at = values.index(getattr(best, name))
            neighbours += [best._replace(**{name: value}) for value in values[max(at - 1, 0) : at + 2]]
    return neighbours


def _with_width(points: Sequence[Point], most_bonus: float) -> list[Point]:
    """Set each point's beam width: the smallest value that is at least twice a word's bonus, or else the largest."""
    bonuses = [(point.boosting_weight or 0.0) * most_bonus for point in points]
    widths = [next((width for width in BEAM_WIDTHS if bonus <= width / 2), BEAM_WIDTHS[-1]) for bonus in bonuses]
    return [point._replace(beam_width=width) for point, width in zip(points, widths, strict=True)]
