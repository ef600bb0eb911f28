"""Options of cuda_wfst."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_gpu_decoding.graph.topology import TOPOLOGIES, topology_number

MAX_ACTIVE_LIMIT = 1 << 22
BACKENDS = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class WFSTConfig:
    """Options of `CudaWFST`. Scores are natural log; a cost is a negative score.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    # How tokens spread over frames: compact, normal (NeMo's "default"), minimal, or graph for a
    # ready-made T o L o G file; see `graph/topology.py`.
    topology: str = "compact"
    # Hypotheses whose cost exceeds that of the best of the frame by more are dropped, > 0. In units of
    # the whole score: with acoustic_scale 8 a beam of 16 allows for what 2 does with acoustic_scale 1.
    beam: float = 16.0
    # At most about so many hypotheses per frame are prolonged, the best ones. They are counted in 256
    # steps of beam / 256: the last step that would exceed the number is left out as a whole.
    max_active: int = 10000
    # Factor of the acoustic log-probs, > 0 (Kaldi's acoustic scale).
    acoustic_scale: float = 1.0
    # Factor of the graph's costs, applied in the search, >= 0.
    lm_weight: float = 1.0
    # Number of hypotheses returned per utterance; their words differ. More than 1 keeps a lattice.
    n_best: int = 1
    # Alternatives whose cost exceeds that of the best path by more are not in the lattice, > 0.
    lattice_beam: float = 8.0
    # Keep the lattice of each utterance in its result.
    lattice: bool = False
    # auto: cuda for tensors on a GPU when kernels can be had, else cpu.
    backend: str = "auto"
    # CPU threads of one call; 0 = torch.get_num_threads().
    threads: int = 0

    def __post_init__(self) -> None:
        topology_number(self.topology)
        for name in ("beam", "acoustic_scale", "lattice_beam"):
            _check_number(name, getattr(self, name), above_zero=True)
        _check_number("lm_weight", self.lm_weight, above_zero=False)
        _check_int("max_active", self.max_active, 1, MAX_ACTIVE_LIMIT)
        _check_int("n_best", self.n_best, 1, 10000)
        _check_int("threads", self.threads, 0, 4096)
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, expected one of {', '.join(BACKENDS)}")

    @property
    def keeps_links(self) -> bool:
        """Whether the search has to remember how its hypotheses hang together."""
        return self.lattice or self.n_best > 1

    @property
    def is_ready_made(self) -> bool:
        return TOPOLOGIES[topology_number(self.topology)] == "graph"


def _check_number(name: str, value: float, *, above_zero: bool) -> None:
    wanted = "> 0" if above_zero else ">= 0"
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ValueError(f"{name} is {value}, expected a finite number {wanted}")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, expected an integer {low} .. {high}")
