"""Options of flexctc_beam. Names and defaults are those of NeMo's `beam` section where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError, check_choice, check_int, check_number, checked_options
from nemo_gpu_decoding.search.config import SearchConfig

MAX_BEAM_SIZE = 4096  # parents are stored as int16
MERGE_MODES = ("max", "sum", "prefix")


@checked_options
@dataclass(frozen=True)
class FlexCTCConfig(SearchConfig):
    """Options of `FlexCTCBeam`, in addition to `SearchConfig`. `n_best` is at most `beam_size`."""

    # Number of hypotheses kept per frame (K of [FlexCTC] section 3), 1 .. 4096.
    beam_size: int = 8
    # beta of [FlexCTC] eq. 4: bonus per token, natural log. A value > 0 offsets the deletions that an LM causes.
    beam_beta: float = 0.0
    # theta: hypotheses whose score is lower than the best of the frame by more than this are dropped, natural log, > 0
    # or inf.
    beam_threshold: float = 20.0
    # How hypotheses with equal text are merged:
    #   max     keep the better one, after the top K are selected (NeMo's beam_batch)
    #   sum     add their probabilities, after the top K are selected
    #   prefix  textbook CTC prefix search: one slot per text with separate scores for blank and token
    merge: str = "max"
    # Keep the label of every frame in `Path.alignment`.
    alignments: bool = False

    def __post_init__(self) -> None:
        check_int("beam_size", self.beam_size, 1, MAX_BEAM_SIZE)
        super().__post_init__()
        check_number("beam_beta", self.beam_beta, negative=True)
        if not self.beam_threshold > 0:
            raise FieldError("beam_threshold", self.beam_threshold, "a number > 0 (or inf)")
        check_choice("merge", self.merge, MERGE_MODES)
        if self.alignments and self.merge == "prefix":
            note = "with merge='prefix', which sums over alignments and has none of its own"
            raise FieldError("alignments", True, "merge='max' or 'sum'", note)

    @property
    def max_n_best(self) -> int:
        return self.beam_size
