"""Options of cuda_wfst."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_int, check_number
from nemo_gpu_decoding.graph.topology import DEFAULT_TOPOLOGY, TOPOLOGIES, topology_number
from nemo_gpu_decoding.search.config import SearchConfig

MAX_ACTIVE_LIMIT = 1 << 22


@dataclass(frozen=True)
class WFSTConfig(SearchConfig):
    """Options of `CudaWFST`; the rest is in `SearchConfig`. More than one of `n_best` keeps a lattice.

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
    # At most about so many hypotheses per frame are prolonged, the best ones. They are counted in 256
    # steps of beam / 256: the last step that would exceed the number is left out as a whole.
    max_active: int = 10000
    # Factor of the acoustic log-probs, > 0 (Kaldi's acoustic scale).
    acoustic_scale: float = 1.0
    # Alternatives whose cost exceeds that of the best path by more are not in the lattice, > 0.
    lattice_beam: float = 8.0
    # Keep the lattice of each utterance in its result.
    lattice: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        topology_number(self.topology)
        for name in ("beam", "acoustic_scale", "lattice_beam"):
            check_number(name, getattr(self, name), above_zero=True)
        check_int("max_active", self.max_active, 1, MAX_ACTIVE_LIMIT)

    @property
    def keeps_links(self) -> bool:
        """Whether the search has to remember how its hypotheses hang together."""
        return self.lattice or self.n_best > 1

    @property
    def is_ready_made(self) -> bool:
        return TOPOLOGIES[topology_number(self.topology)] == "graph"
