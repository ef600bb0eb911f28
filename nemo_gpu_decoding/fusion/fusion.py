"""Shallow fusion: the LM and boosting scores that a search adds to acoustic scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_number, checked_options
from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.density_ratio import density_ratio


@checked_options
@dataclass(frozen=True)
class Fusion:
    """An n-gram LM and a boosting tree with their weights (alpha_LM, alpha_PB of [FlexCTC] eq. 4).

    The score of a token is log P_acoustic + lm_weight * log P_LM + boosting_weight * boost + beta. With a source LM
    it is lower by source_lm_weight * log P_source (density ratio, see density_ratio.py).

    Raises:
        ValueError: a weight is negative or not finite; a source LM has no weight, or no LM from which to subtract it.
    """

    lm: BackoffAutomaton | None = None  # over tokens; None for word graphs, which hold their LM
    lm_weight: float = 1.0  # of natural logs, >= 0; 0 switches the LM off. Word graphs: of their costs
    boosting: BackoffAutomaton | None = None  # over tokens; for word graphs over words
    boosting_weight: float = 1.0  # >= 0; 0 switches boosting off
    source_lm: BackoffAutomaton | None = None  # over tokens, of the network's training text: subtracted from `lm`
    source_lm_weight: float | None = None  # of natural logs, >= 0; 0 switches the source LM off
    allowed: AllowedTokens | None = None  # None: all tokens may be written; not for word graphs

    def __post_init__(self) -> None:
        check_number("lm_weight", self.lm_weight)
        check_number("boosting_weight", self.boosting_weight)
        if self.source_lm is None:
            if self.source_lm_weight:
                note = f"with source_lm_weight {self.source_lm_weight}"
                raise FieldError("source_lm", None, "an LM to subtract", note)
            return
        if self.source_lm_weight is None:
            raise FieldError("source_lm_weight", None, "the weight of source_lm, a number >= 0")
        check_number("source_lm_weight", self.source_lm_weight)
        if self.lm is None:
            raise FieldError("lm", None, "the LM from which source_lm is subtracted")
        if self.source_lm_weight > 0 and self.lm_weight == 0:
            raise FieldError("lm_weight", self.lm_weight, "a number > 0", "with a source_lm")

    @cached_property
    def token_lm(self) -> BackoffAutomaton | None:
        """What `lm_weight` multiplies: `lm`, or its density ratio with `source_lm`."""
        lm, source = self.lm, self.source_lm
        if lm is None or source is None or not self.source_lm_weight:
            return lm
        ratio = self.source_lm_weight / self.lm_weight
        key = ("density ratio", lm.fingerprint, source.fingerprint, ratio)
        return cached(key, partial(density_ratio, lm, source, ratio))


@checked_options
@dataclass(frozen=True)
class Request:
    """Fusion of one utterance where it differs from the decoder's; None keeps the decoder's.

    `boosting` replaces the decoder's tree for this utterance (build it with `build_boosting_tree`). `lm_weight` scales
    the weight of the decoder's source LM in proportion.
    """

    boosting: BackoffAutomaton | None = None
    boosting_weight: float | None = None
    lm_weight: float | None = None
    allowed: AllowedTokens | None = None  # see `allowed_tokens`

    def __post_init__(self) -> None:
        if self.lm_weight is not None:
            check_number("lm_weight", self.lm_weight)
        if self.boosting_weight is not None:
            check_number("boosting_weight", self.boosting_weight)
