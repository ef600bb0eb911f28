"""What a search adds to acoustic scores, and how one utterance may ask for something else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton


@dataclass(frozen=True)
class Fusion:
    """An n-gram LM and a boosting tree with their weights (alpha_LM, alpha_PB of [FlexCTC] eq. 4).

    The score of a token is log P_acoustic + lm_weight * log P_LM + boosting_weight * boost + beta.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    lm: BackoffAutomaton | None = None  # over tokens
    lm_weight: float = 1.0  # natural log domain, >= 0; 0 switches the LM off
    boosting: BackoffAutomaton | None = None
    boosting_weight: float = 1.0  # >= 0; 0 switches boosting off

    def __post_init__(self) -> None:
        check_weight("lm_weight", self.lm_weight)
        check_weight("boosting_weight", self.boosting_weight)


@dataclass(frozen=True)
class Request:
    """What one utterance wants instead of the decoder's own fusion; None keeps the decoder's.

    `boosting` replaces the decoder's tree for this utterance (build it with `build_boosting_tree`).
    """

    boosting: BackoffAutomaton | None = None
    boosting_weight: float | None = None
    lm_weight: float | None = None

    def __post_init__(self) -> None:
        if self.lm_weight is not None:
            check_weight("lm_weight", self.lm_weight)
        if self.boosting_weight is not None:
            check_weight("boosting_weight", self.boosting_weight)


def check_weight(name: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}, expected a finite number >= 0")
