"""Shallow fusion: the LM and boosting scores that a search adds to acoustic scores."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_number, checked_options
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton


@checked_options
@dataclass(frozen=True)
class Fusion:
    """An n-gram LM and a boosting tree with their weights (alpha_LM, alpha_PB of [FlexCTC] eq. 4).

    The score of a token is log P_acoustic + lm_weight * log P_LM + boosting_weight * boost + beta.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    lm: BackoffAutomaton | None = None  # over tokens; None for word graphs, which hold their LM
    lm_weight: float = 1.0  # of natural logs, >= 0; 0 switches the LM off. Word graphs: of their costs
    boosting: BackoffAutomaton | None = None  # over tokens; for word graphs over words
    boosting_weight: float = 1.0  # >= 0; 0 switches boosting off

    def __post_init__(self) -> None:
        check_number("lm_weight", self.lm_weight)
        check_number("boosting_weight", self.boosting_weight)


@checked_options
@dataclass(frozen=True)
class Request:
    """Fusion of one utterance where it differs from the decoder's; None keeps the decoder's.

    `boosting` replaces the decoder's tree for this utterance (build it with `build_boosting_tree`).
    """

    boosting: BackoffAutomaton | None = None
    boosting_weight: float | None = None
    lm_weight: float | None = None

    def __post_init__(self) -> None:
        if self.lm_weight is not None:
            check_number("lm_weight", self.lm_weight)
        if self.boosting_weight is not None:
            check_number("boosting_weight", self.boosting_weight)
