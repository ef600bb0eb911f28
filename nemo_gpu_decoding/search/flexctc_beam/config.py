"""Options of flexctc_beam. Names and defaults are those of NeMo's `beam` section where it has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_BEAM_SIZE = 4096  # parents are stored as int16
MERGE_MODES = ("max", "sum", "prefix")
BACKENDS = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class FlexCTCConfig:
    """Options of `FlexCTCBeam`.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    # Number of hypotheses kept per frame (K of [FlexCTC] section 3).
    beam_size: int = 8
    # beta of [FlexCTC] eq. 4: added for every token, natural log. > 0 against deletions by an LM.
    beam_beta: float = 0.0
    # theta: hypotheses this far below the best of the frame are dropped, natural log, > 0 or inf.
    beam_threshold: float = 20.0
    # What becomes of hypotheses with equal text:
    #   max    keep the better one, after the top K were taken (NeMo's beam_batch)
    #   sum    add their probabilities, after the top K were taken
    #   prefix one slot per text with blank and token scores apart: textbook CTC prefix search
    merge: str = "max"
    # Number of hypotheses returned per utterance, at most beam_size; their texts differ.
    n_best: int = 1
    # Keep the label of every frame in `Path.alignment`.
    alignments: bool = False
    # auto: cuda for tensors on a GPU when kernels can be had, else cpu.
    backend: str = "auto"
    # CPU threads of one call; 0 = torch.get_num_threads().
    threads: int = 0

    def __post_init__(self) -> None:
        _check_int("beam_size", self.beam_size, 1, MAX_BEAM_SIZE)
        _check_int("n_best", self.n_best, 1, self.beam_size)
        _check_int("threads", self.threads, 0, 4096)
        if not math.isfinite(self.beam_beta):
            raise ValueError(f"beam_beta is {self.beam_beta}, expected a finite number")
        if not self.beam_threshold > 0:
            raise ValueError(f"beam_threshold is {self.beam_threshold}, expected a number > 0 (or inf)")
        _check_choice("merge", self.merge, MERGE_MODES)
        _check_choice("backend", self.backend, BACKENDS)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, expected an integer {low} .. {high}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
