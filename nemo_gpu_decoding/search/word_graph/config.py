"""Declare the options of cuda_wfst and paged_biglm."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.graph.csr import DEFAULT_TOPOLOGY, topology_number
from nemo_gpu_decoding.lm.on_device import PLACEMENTS
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.config import SearchConfig

MAX_ACTIVE_LIMIT = 1 << 22
COMPOSITIONS = ("lazy", "let")
DIFFERENCES = ("auto", "always", "never")


@checked_options
@dataclass(frozen=True)
class WFSTConfig(SearchConfig):
    """Options of `CudaWFST`, in addition to those of `SearchConfig`.

    Scores are natural logarithms; a cost is a negative score. The search builds a lattice if `n_best` > 1 or `lattice`
    is True.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # CTC topology: compact, normal (NeMo's "default"), minimal, or graph for a ready-made T o L o G file, which
    # contains its topology; see `graph/csr.py`.
    topology: str = DEFAULT_TOPOLOGY
    # Hypotheses that cost more than the best one of the frame plus beam are pruned, > 0. The unit is that of the
    # scaled score: a beam of 16 with acoustic_scale 8 is as narrow as a beam of 2 with acoustic_scale 1.
    beam: float = option(16.0, above=0, nemo="beam_width")
    # Approximate maximum of hypotheses per frame, >= 1. A histogram of costs has 256 bins of beam / 256. The best
    # bins survive as long as they have at most max_active hypotheses together; the first bin always survives.
    max_active: int = option(10000, low=1, high=MAX_ACTIVE_LIMIT)
    # Minimum of hypotheses per frame, 0 .. max_active (Kaldi's min_active, k2's min_active_states). If fewer are
    # within the beam, the search widens the beam of the frame by a quarter, repeatedly, up to 16 times the beam. A
    # wider beam keeps only as many of the cheapest bins as min_active hypotheses need.
    min_active: int = option(0, low=0, high="max_active")
    # Factor of the log-probs, > 0 (Kaldi's acoustic scale).
    acoustic_scale: float = option(1.0, above=0)
    # The lattice contains the paths that cost at most this much more than the best path, > 0.
    lattice_beam: float = option(8.0, above=0)
    # Keep the lattice of each utterance in its result.
    lattice: bool = option(False, nemo=None)

    def check_rules(self) -> None:
        topology_number(self.topology)

    @property
    def keeps_links(self) -> bool:
        """Return whether the search keeps the links between tokens, for a lattice."""
        return self.lattice or self.n_best > 1


@checked_options
@dataclass(frozen=True)
class PagedBigLMConfig(WFSTConfig):
    """Options of `PagedBigLM`: those of `WFSTConfig`, and options of the large LM.

    `Fusion.lm_weight` is the weight of both LMs. The LM cost of a path is
    lm_weight * ((1 - large_lm_weight) * small LM + large_lm_weight * large LM).

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # Share of the large LM, >= 0. 1 replaces the small LM's costs by the large LM's. Values between 0 and 1
    # interpolate both log-linearly. Above 1 the small LM is subtracted (density ratio).
    large_lm_weight: float = option(1.0, low=0)
    # On-the-fly composition of the large LM with the graph. Both give the same results with a wide beam. lazy, the
    # faster one: the LM is queried for words that are within the beam by the small LM's costs. let: in addition, LM
    # contexts are expanded only where a word is emitted [LET, III]; CPU only, slower than lazy.
    composition: str = option("lazy", choices=COMPOSITIONS)
    # Maximum number of LM contexts per graph state that are expanded, the cheapest ones (the heap of a token group in
    # [LET]), >= 0; 0 = all.
    group_size: int = option(16, low=0, high=1 << 20)
    # Whether to build one automaton of the large LM minus the small LM, so that one look-up serves both. always:
    # build it in memory, at least 8 bytes per n-gram; the large LM must contain all n-grams of the small LM. never:
    # look up both LMs. auto: always if that condition holds and the large LM has at most 10 million n-grams.
    difference: str = option("auto", choices=DIFFERENCES)
    # Location of the large LM for a GPU; results are the same. device: the GPU's memory. paged: the arcs (two thirds
    # of the LM) are in pinned host memory, and kernels read them through a cache. auto: device if a tenth of the GPU's
    # memory and 2 GB stay free, else paged. On a CPU the search reads the memory map with every placement.
    placement: str = option("auto", choices=PLACEMENTS)
    # Size of the cache for paged in each GPU's memory, MB (10^6 bytes), >= 1; 62,500 arcs per MB. A CPU
    # does not use it, because the operating system caches the file.
    cache_mb: int = option(512, low=1, high=1 << 20)
