"""Options of cuda_wfst and paged_biglm."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_choice, check_int, check_number, checked_options
from nemo_gpu_decoding.graph.topology import DEFAULT_TOPOLOGY, TOPOLOGIES, topology_number
from nemo_gpu_decoding.lm.placement import PLACEMENTS
from nemo_gpu_decoding.search.config import SearchConfig

MAX_ACTIVE_LIMIT = 1 << 22
COMPOSITIONS = ("lazy", "let")
POSTERIORS = ("n_best", "lattice")
DIFFERENCES = ("auto", "always", "never")


@checked_options
@dataclass(frozen=True)
class WFSTConfig(SearchConfig):
    """Options of `CudaWFST`; the rest is in `SearchConfig`. The search keeps a lattice for `n_best` > 1, `lattice`
    and `posteriors` "lattice".

    Scores are natural log; a cost is a negative score.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # How tokens spread over frames: compact, normal (NeMo's "default"), minimal, or graph for a
    # ready-made T o L o G file; see `graph/topology.py`.
    topology: str = DEFAULT_TOPOLOGY
    # Hypotheses whose cost exceeds that of the best of the frame by more are dropped, > 0. In units of
    # the whole score: with acoustic_scale 8 a beam of 16 allows for what 2 does with acoustic_scale 1.
    beam: float = 16.0
    # At most about so many hypotheses per frame are expanded, the best ones. They are counted in 256
    # steps of beam / 256: the last step that would exceed the number is left out as a whole.
    max_active: int = 10000
    # Factor of the acoustic log-probs, > 0 (Kaldi's acoustic scale).
    acoustic_scale: float = 1.0
    # Alternatives whose cost exceeds that of the best path by more are not in the lattice, > 0.
    lattice_beam: float = 8.0
    # Keep the lattice of each utterance in its result.
    lattice: bool = False
    # Confidence of words: over the n_best different texts, if there are more than one (n_best); or over all texts
    # of the lattice, determinised to 50,000 states at most, with the risk of each path (lattice).
    posteriors: str = "n_best"

    def __post_init__(self) -> None:
        super().__post_init__()
        topology_number(self.topology)
        for name in ("beam", "acoustic_scale", "lattice_beam"):
            check_number(name, getattr(self, name), above_zero=True)
        check_int("max_active", self.max_active, 1, MAX_ACTIVE_LIMIT)
        check_choice("posteriors", self.posteriors, POSTERIORS)

    @property
    def keeps_links(self) -> bool:
        """Whether the search keeps the links between its tokens, for a lattice."""
        return self.lattice or self.n_best > 1 or self.posteriors == "lattice"

    @property
    def is_ready_made(self) -> bool:
        return TOPOLOGIES[topology_number(self.topology)] == "graph"


@checked_options
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
    # How the large LM is composed with the graph; with a wide beam the results are the same. lazy, the faster one: the
    # LM is queried for words within the beam by the small LM's costs. let: the same, and hypotheses get their LM
    # contexts only where a word is emitted [LET, III]; on a CPU, 1.0 to 1.4 times the time of lazy.
    composition: str = "lazy"
    # Of the hypotheses in one graph state that differ by LM context, at most so many are expanded by new tokens, the
    # cheapest (the heap of a token group in [LET]); 0 = all.
    group_size: int = 16
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
