"""Declare the options of flexctc_beam. Options of NeMo's `beam` section keep NeMo's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.config import SearchConfig

MAX_BEAM_SIZE = 4096  # parents are stored as int16
MERGE_MODES = ("max", "sum", "prefix")


@checked_options
@dataclass(frozen=True)
class FlexCTCConfig(SearchConfig):
    """Options of `FlexCTCBeam`, in addition to `SearchConfig`. `n_best` is at most `beam_size`."""

    # Number of hypotheses kept per frame (K of [FlexCTC] section 3), 1 .. 4096.
    beam_size: int = option(8, low=1, high=MAX_BEAM_SIZE, cli=True)
    # beta of [FlexCTC] eq. 1: bonus per token, natural log. A value > 0 offsets the deletions that an LM causes.
    beam_beta: float = option(0.0, cli=True)
    # theta: hypotheses whose score is lower than the best of the frame by more than this are dropped, natural log, > 0
    # or inf.
    beam_threshold: float = option(20.0, above=0, infinite=True)
    # How hypotheses with equal text are merged:
    #   max     keep the better one, after the top K are selected (NeMo's beam_batch)
    #   sum     add their probabilities, after the top K are selected
    #   prefix  textbook CTC prefix search: one slot per text with separate scores for blank and token
    merge: str = option("max", choices=MERGE_MODES)
    # Keep the label of every frame in `Path.alignment`.
    alignments: bool = option(False, nemo=None)

    def check_rules(self) -> None:
        if self.alignments and self.merge == "prefix":
            note = "with merge='prefix', which sums over alignments and has none of its own"
            raise FieldError("alignments", True, "merge='max' or 'sum'", note)
