"""Define the LM and boosting scores, and their weights, that a search adds to acoustic scores (shallow fusion)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from nemo_gpu_decoding.cache import cached
from nemo_gpu_decoding.checks import FieldError, check_kind, check_number, did_you_mean
from nemo_gpu_decoding.fusion.allowed import AllowedTokens
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, joined
from nemo_gpu_decoding.fusion.density_ratio import density_ratio
from nemo_gpu_decoding.fusion.grammar import Grammar
from nemo_gpu_decoding.schema import checked_options, option

NO_LM = "none"  # the name by which a request switches the LM off


@checked_options
@dataclass(frozen=True)
class Fusion:
    """An n-gram LM, a boosting tree, and their weights in a search (alpha_LM, alpha_PB of [FlexCTC] eq. 1).

    The score of a token is log P_acoustic + lm_weight * log P_LM + boosting_weight * boost + beta. A source LM
    subtracts source_lm_weight * log P_source from the score (density ratio, see density_ratio.py).

    A request may name an LM in `lm_pool`, which replaces `lm` for its utterance. All LMs form one automaton with a
    start state per LM, so that utterances of a batch may have different LMs. The source LM is subtracted from each LM.

    Raises:
        ValueError: a weight is negative or not finite; a source LM has no weight or no LM; an LM of the pool has an
            invalid name; a weight belongs to no LM of the pool.
    """

    lm: BackoffAutomaton | None = None  # over tokens; None for word graphs, which hold their LM
    lm_weight: float = option(1.0, low=0)  # of natural logs, >= 0; 0 switches the LM off. Word graphs: of their costs
    boosting: BackoffAutomaton | None = None  # over tokens; for word graphs over words
    boosting_weight: float = option(1.0, low=0)  # >= 0; 0 switches boosting off
    source_lm: BackoffAutomaton | None = None  # over tokens, of the network's training text: subtracted from `lm`
    source_lm_weight: float | None = option(None, low=0)  # of natural logs, >= 0; 0 switches the source LM off
    allowed: AllowedTokens | None = None  # None: all tokens may be written; not for word graphs
    grammar: Grammar | None = None  # of all utterances, instead of phrases; not for word graphs
    # LMs over tokens for `Request.lm`, by name; not for word graphs
    lm_pool: Mapping[str, BackoffAutomaton] = field(default_factory=dict, hash=False)
    lm_pool_weights: Mapping[str, float] = field(default_factory=dict, hash=False)  # by name, > 0; others: lm_weight

    def check_rules(self) -> None:
        check_lms(self)
        if self.grammar is not None and self.boosting is not None:
            given = getattr(self.boosting, "name", self.boosting)
            raise FieldError("boosting", given, "None", "with a grammar, which has all sentences")

    @cached_property
    def token_lm(self) -> BackoffAutomaton | None:
        """Return the automaton whose weights `lm_weight` multiplies: `lm`, or its density ratio with `source_lm`."""
        lm, source, ratio = self.lm, self.source_lm, self._ratio(self.lm_weight)
        if lm is None or source is None or not ratio:
            return lm
        key = ("density ratio", lm.fingerprint, source.fingerprint, ratio)
        return cached(key, partial(density_ratio, lm, source, ratio))

    @cached_property
    def token_lms(self) -> tuple[BackoffAutomaton | None, dict[str | None, int]]:
        """Return one automaton that contains all LMs, and the start state of each LM by name; None names `lm`."""
        if not self.lm_pool:
            return self.token_lm, {}
        lms: dict[str | None, BackoffAutomaton] = {} if self.lm is None else {None: self.lm}
        lms.update(self.lm_pool.items())
        ratios = [self._ratio(self.lm_weight_of(name)) for name in lms]
        source = None if self.source_lm is None else self.source_lm.fingerprint
        key = ("lm pool", *(lm.fingerprint for lm in lms.values()), source, *ratios)
        # one entry of the cache, which may have fewer places than there are LMs
        automaton, starts = cached(key, partial(_joined, list(lms.values()), self.source_lm, ratios))
        return automaton, dict(zip(lms, starts, strict=True))

    def lm_weight_of(self, name: str | None) -> float:
        """Return the weight of the LM with this name in the pool, or the weight of `lm` for None."""
        return self.lm_weight if name is None else self.lm_pool_weights.get(name, self.lm_weight)

    def check_lm_name(self, name: str | None) -> None:
        """Raise a FieldError for the field `lm` of a request unless it is the name of an LM in the pool, or "none"."""
        if name is None or name == NO_LM or name in self.lm_pool:
            return
        names = ", ".join([*self.lm_pool, NO_LM])
        pool = f"one of {names}" if self.lm_pool else f"{NO_LM}: the decoder has no lm_pool"
        raise FieldError("lm", name, f"{pool}{did_you_mean(name, self.lm_pool)}")

    def _ratio(self, lm_weight: float) -> float:
        """Return the weight of the source LM divided by the weight of an LM."""
        return (self.source_lm_weight or 0.0) / lm_weight if lm_weight else 0.0


@checked_options
@dataclass(frozen=True)
class Request:
    """LM, boosting tree and weights of one utterance; None keeps the value of the decoder's `Fusion`.

    `boosting` replaces the decoder's tree for this utterance (build it with `build_boosting_tree`). `lm` is the name
    of an LM in the decoder's `Fusion.lm_pool`, or "none" for no LM. `lm_weight` scales the weight of the decoder's
    source LM in proportion.
    """

    boosting: BackoffAutomaton | None = None
    boosting_weight: float | None = option(None, low=0)
    lm_weight: float | None = option(None, low=0)
    allowed: AllowedTokens | None = None  # see `allowed_tokens`
    lm: str | None = None
    grammar: Grammar | None = None  # see `build_grammar`; replaces the decoder's phrases

    def check_rules(self) -> None:
        if self.lm == NO_LM and self.lm_weight:
            raise FieldError("lm_weight", self.lm_weight, "None or 0", f"with lm '{NO_LM}'")


def check_lms(given: Any) -> None:
    """Raise a FieldError unless the LMs of a `Fusion`, or of options with its fields, have weights and valid names."""
    pool, weights = given.lm_pool, given.lm_pool_weights
    check_kind("lm_pool", pool, Mapping)
    check_kind("lm_pool_weights", weights, Mapping)
    for name in pool:
        if not isinstance(name, str) or not name.strip() or name == NO_LM:
            raise FieldError("lm_pool", name, f"names of LMs: texts that are not blank, and not '{NO_LM}'")
    for name, weight in weights.items():
        if name not in pool:
            raise FieldError("lm_pool_weights", name, f"names of LMs in lm_pool: {', '.join(pool) or 'it is empty'}")
        check_number(f"lm_pool_weights[{name}]", weight, above_zero=True)
    if given.source_lm is None:
        if given.source_lm_weight:
            note = f"with source_lm_weight {given.source_lm_weight}"
            raise FieldError("source_lm", None, "an LM to subtract", note)
        return
    if given.source_lm_weight is None:
        raise FieldError("source_lm_weight", None, "the weight of source_lm, a number >= 0")
    if given.lm is None and not pool:
        raise FieldError("lm", None, "the LM from which source_lm is subtracted")
    if given.source_lm_weight > 0 and given.lm_weight == 0:
        raise FieldError("lm_weight", given.lm_weight, "a number > 0", "with a source_lm")


def _joined(
    lms: list[BackoffAutomaton], source: BackoffAutomaton | None, ratios: list[float]
) -> tuple[BackoffAutomaton, list[int]]:
    """Return one automaton that contains each LM minus `ratio` times the source LM, and the start state of each LM."""
    pairs = zip(lms, ratios, strict=True)
    return joined([density_ratio(lm, source, ratio) if source and ratio else lm for lm, ratio in pairs])
