"""Options of paged_biglm."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError, check_choice, check_int, check_number
from nemo_gpu_decoding.lm.placement import PLACEMENTS
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig

COMPOSITIONS = ("lazy", "eager")
DIFFERENCES = ("auto", "always", "never")


@dataclass(frozen=True)
class PagedBigLMConfig(WFSTConfig):
    """Options of `PagedBigLM`: those of cuda_wfst, and what is said about the large LM.

    `Fusion.lm_weight` is the factor of both LMs: a path costs lm_weight times
    (1 - large_lm_weight) * small LM + large_lm_weight * large LM.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # lambda, the share of the large LM, >= 0: with 1 its costs take the place of the small LM's; between
    # 0 and 1 both are interpolated (log-linearly).
    large_lm_weight: float = 1.0
    # lazy: the large LM is asked only for words that are within the beam by the small LM's costs [LET].
    # eager: for every word that a hypothesis could go on with, before anything is pruned (BigLM); slow,
    # the baseline of benchmarks.
    composition: str = "lazy"
    # Of the hypotheses in one graph state that differ by LM history, so many at most are prolonged by
    # new tokens, the cheapest (the heap of a token group in [LET]); 0 = all. Lazy composition only.
    group_size: int = 0
    # always: make one automaton of large minus small LM, so that one look-up serves both. It is made in
    # memory, 8 bytes per n-gram and more, and needs all n-grams of the small LM to be in the large one.
    # never: look both up. auto: always where that is so and the large LM has 10 million n-grams at most.
    difference: str = "auto"
    # Where a GPU finds the large LM: device, all in its memory; paged, the arcs (two thirds of it) in
    # pinned host memory, read by the kernels through a cache; auto, device if that leaves a tenth of the
    # GPU's memory and 2 GB free, else paged. Results are the same. On a CPU every placement reads the
    # memory map directly.
    placement: str = "auto"
    # Size of that cache, MB (10^6 bytes) of each GPU's memory, >= 1: 62,500 arcs per MB. A CPU has no
    # such cache: the system caches the file's pages.
    cache_mb: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("large_lm_weight", self.large_lm_weight)
        check_int("group_size", self.group_size, 0, 1 << 20)
        check_int("cache_mb", self.cache_mb, 1, 1 << 20)
        for name, choices in (
            ("composition", COMPOSITIONS), ("difference", DIFFERENCES), ("placement", PLACEMENTS),
        ):  # fmt: skip
            check_choice(name, getattr(self, name), choices)
        if self.group_size and self.composition == "eager":
            note = "with composition 'eager', which has no groups"
            raise FieldError("group_size", self.group_size, "0", note)
