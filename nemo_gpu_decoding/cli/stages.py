"""The points that `tune` tries, in stages: options that are null get values around the best point so far.

With phrases, token-level strategies first try all weights with the smallest beam and one segmentation per phrase.
Then they try larger beams and more segmentations with the best weights, and then the other ways of paying phrases
(`refund`, `overlapping`). Word graphs try the LM weights without phrases, then the boosting weights with the best LM
weights, then the LM weights next to the best ones. With a limit of false phrases, both try thresholds of a phrase's
probability at last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.cli.decoding import LARGE_LM_STRATEGY, section_of
from nemo_gpu_decoding.cli.grid import Point, combinations
from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

if TYPE_CHECKING:
    from nemo_gpu_decoding.cli.tune import TuneOptions

Stage = Callable[[Point], list[Point]]  # the best point so far -> points to try next

# section of the options -> weights to try; wfst weights are larger, because a word of a graph is several tokens
LM_WEIGHTS = {"beam": [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "wfst": [0.3, 0.5, 0.7, 1.0, 1.3]}
BEAM_BETAS = {"ctc": [0.0, 0.5, 1.0, 1.5], "rnnt": [0.0, 1.0]}
SOURCE_LM_WEIGHTS = [0.0, 0.1, 0.2, 0.3, 0.4]
LARGE_LM_WEIGHTS = [0.5, 1.0]  # of paged_biglm; 0 is cuda_wfst
# bonuses add up over the tokens or words of a phrase (five words earn 14 times the weight): small weights suit these
BOOSTING_WEIGHTS = {"beam": [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0], "wfst": [0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0]}
BEAM_SIZES, SEGMENTATIONS = [8, 32], [1, 8]  # more than the first only with phrases
AC_THRESHOLDS = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03]  # tried with false_phrases_per_hour
BEAM_WIDTHS = [16.0, 40.0]  # 40 if a word's bonus may exceed half of 16


def points_of(
    options: TuneOptions, strategy: str, *, has_lm: bool, has_phrases: bool, most_bonus: float = 0.0
) -> list[Point]:
    """The points of the first stage; weights of an absent LM or absent phrases are None.

    Args:
        most_bonus: the most that a word of a graph earns with a boosting weight of 1, natural log.
    """
    section, head = section_of(strategy), STRATEGIES[strategy].family
    is_fused, in_graph = has_lm or has_phrases, section == "wfst"
    for name, is_used in (
        ("beam_width", in_graph),
        ("large_lm_weight", strategy == LARGE_LM_STRATEGY),
        ("pruning_mode", head == "rnnt" and is_fused),
        ("score_norm", head == "rnnt" and is_fused),
        ("segmentations", has_phrases and not in_graph),
        ("refund", has_phrases and not in_graph),
        ("overlapping", has_phrases and not in_graph),
        ("ac_threshold", has_phrases),
    ):
        if getattr(options, name) and not is_used:
            how = strategy if is_fused or in_graph else f"{strategy} without lm or phrases"
            raise ValueError(f"{name} is {getattr(options, name)}, which has no effect with {how}")
    lm_weights = options.lm_weight or LM_WEIGHTS[section]
    if in_graph:
        large = strategy == LARGE_LM_STRATEGY
        points = combinations(
            lm_weight=lm_weights,
            boosting_weight=(options.boosting_weight or [0.0]) if has_phrases else (),
            beam_width=options.beam_width or BEAM_WIDTHS,
            large_lm_weight=(options.large_lm_weight or LARGE_LM_WEIGHTS) if large else (),
        )
        return points if options.beam_width else [p for p in points if p.beam_width == _beam_width(p, most_bonus)]
    bonuses = options.beam_beta or BEAM_BETAS[head]
    ranks = options.score_norm or ([True] if max(bonuses) > 0 else [])
    points = combinations(
        beam_size=options.beam_size or BEAM_SIZES[:1],
        beam_beta=bonuses if head == "ctc" or is_fused else (),
        lm_weight=lm_weights if has_lm else (),
        source_lm_weight=(options.source_lm_weight or SOURCE_LM_WEIGHTS) if options.source_lm else (),
        boosting_weight=(options.boosting_weight or BOOSTING_WEIGHTS[section]) if has_phrases else (),
        blank_lm_score_mode=options.blank_lm_score_mode if head == "rnnt" and is_fused else (),
        pruning_mode=options.pruning_mode or (),
        score_norm=ranks if head == "rnnt" and is_fused else (),
        segmentations=(options.segmentations or SEGMENTATIONS[:1]) if has_phrases else (),
    )
    first = ways_of(options)[0] if has_phrases else {}
    points = [point._replace(**first) for point in points]
    # an LM weight of 0 is tried once: there is nothing from which a source LM is subtracted
    sourced = [point if point.lm_weight else point._replace(source_lm_weight=0.0) for point in points]
    return list(dict.fromkeys(sourced)) if options.source_lm else points


def ways_of(options: TuneOptions, refunds: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The values of `refund` and `overlapping` to try. NeMo's refunds count all phrases.

    Args:
        refunds: the values that the phrases and the preset permit; None: all.
    """
    from nemo_gpu_decoding.fusion.boosting import REFUNDS

    return [
        {"refund": refund, "overlapping": overlapping}
        for refund in options.refund or (REFUNDS if refunds is None else refunds)
        for overlapping in ([True] if refund == "nemo" else options.overlapping or [False, True])
    ]


def later_stages(
    options: TuneOptions,
    strategy: str,
    points: Sequence[Point],
    *,
    has_phrases: bool,
    most_bonus: float = 0.0,
    refunds: Sequence[str] | None = None,
) -> list[Stage]:
    """The stages after the first one. A stage may repeat points that were tried before.

    Args:
        most_bonus: as in `points_of`.
        refunds: as in `ways_of`.
    """
    is_ranked = points[0].score_norm is not None and not options.score_norm
    unranked: list[Stage] = [partial(_unranked, points)] if is_ranked else []
    if not has_phrases:
        return unranked
    section = section_of(strategy)
    thresholds = options.ac_threshold or (AC_THRESHOLDS if options.false_phrases_per_hour is not None else [])
    last: list[Stage] = [partial(_heard, options, thresholds, section, most_bonus)] if thresholds else []
    if section == "beam":
        weights = sorted({point.boosting_weight or 0.0 for point in points})
        sizes = options.beam_size or BEAM_SIZES
        larger = partial(_larger, sizes, options.segmentations or SEGMENTATIONS, weights)
        return [*unranked, larger, partial(_paid, ways_of(options, refunds), weights), *last]
    if options.boosting_weight:
        return last
    return [partial(_boosted, options.beam_width or (), most_bonus), partial(_neighbours, points), *last]


def _unranked(points: Sequence[Point], best: Point) -> list[Point]:
    """Ranking by score instead of score per token, with bonuses per token and the LM weights next to the best one.

    A bonus offsets the preference of plain scores for short hypotheses.
    """
    bonuses = sorted({bonus for point in points if (bonus := point.beam_beta or 0.0) > 0})
    beside = _neighbours(points, best) or [best]
    return [point._replace(score_norm=False, beam_beta=bonus) for point in beside for bonus in bonuses]


def _larger(sizes: Sequence[int], segmentations: Sequence[int], weights: Sequence[float], best: Point) -> list[Point]:
    """Other beam sizes and segmentations with the best weights and all boosting weights."""
    fixed: dict[str, Sequence[Any]] = {k: [value] for k, value in best._asdict().items() if value is not None}
    fixed |= {"beam_size": sizes, "segmentations": segmentations, "boosting_weight": weights}
    points = combinations(**fixed)
    return [point for point in points if point.boosting_weight or point.segmentations == segmentations[0]]


def _paid(ways: Sequence[dict[str, Any]], weights: Sequence[float], best: Point) -> list[Point]:
    """The ways of paying phrases with all boosting weights above 0."""
    return [best._replace(**way, boosting_weight=weight) for way in ways for weight in weights if weight]


def _heard(
    options: TuneOptions, thresholds: Sequence[float], section: str, most_bonus: float, best: Point
) -> list[Point]:
    """Thresholds of a phrase's probability, with the best boosting weight and larger ones."""
    weights = [w for w in options.boosting_weight or BOOSTING_WEIGHTS[section] if w >= (best.boosting_weight or 0) > 0]
    points = [best._replace(ac_threshold=value, boosting_weight=weight) for value in thresholds for weight in weights]
    if section == "beam" or options.beam_width:
        return points
    return [point._replace(beam_width=_beam_width(point, most_bonus)) for point in points]


def _boosted(widths: Sequence[float], most_bonus: float, best: Point) -> list[Point]:
    """The boosting weights with the best LM weights."""
    points = [best._replace(boosting_weight=weight) for weight in BOOSTING_WEIGHTS["wfst"]]
    if widths:
        return [point._replace(beam_width=width) for point in points for width in widths]
    return [point._replace(beam_width=_beam_width(point, most_bonus)) for point in points]


def _neighbours(points: Sequence[Point], best: Point) -> list[Point]:
    """The LM weights next to the best ones, one by one."""
    found = []
    for name in ("lm_weight", "large_lm_weight"):
        values = sorted({getattr(point, name) for point in points} - {None})
        if values:
            at = values.index(getattr(best, name))
            found += [best._replace(**{name: value}) for value in values[max(at - 1, 0) : at + 2]]
    return found


def _beam_width(point: Point, most_bonus: float) -> float:
    """The smallest beam width of which a word's bonus is at most half, or else the largest width."""
    bonus = (point.boosting_weight or 0.0) * most_bonus
    return next((width for width in BEAM_WIDTHS if bonus <= width / 2), BEAM_WIDTHS[-1])
