"""Options that all transducer searches share. Names and defaults are those of NeMo's `beam` section."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.checks import check_bool, check_choice, check_int, check_number
from nemo_gpu_decoding.search.config import SearchConfig
from nemo_gpu_decoding.search.transducer.blank_scoring import BLANK_LM_SCORE_MODES

MAX_BEAM_SIZE = 1024
PRUNING_MODES = ("late", "early")


@dataclass(frozen=True)
class TransducerConfig(SearchConfig):
    """Options of `ALSDPlusPlus` and `AESPlusPlus`; the rest is in `SearchConfig`.

    `n_best` is at most `beam_size`; the networks run where they are, whatever the backend.

    Raises:
        FieldError: a value is out of range; the message names the field.
    """

    # Number of hypotheses kept.
    beam_size: int = 4
    # Rank the hypotheses by score / (number of tokens + 1) at the end; scores are reported as they are.
    score_norm: bool = True
    # The joint's logits are divided by this before the softmax, > 0. > 1 flattens the distribution.
    softmax_temperature: float = 1.0
    # How a blank is scored where an LM or boosting is fused [ALSD++/AES++, eq. 2 and 3]:
    #   lm_weighted_full  the LM gives the blank the joint's own probability: an LM deletes no words
    #   no_score          the LM says nothing about the blank
    blank_lm_score_mode: str = "lm_weighted_full"
    # When the labels of a hypothesis are narrowed down to the best: with LM and boosting scores added
    # (late), or by the joint alone (early).
    pruning_mode: str = "late"
    # Keep every label of the way through the frames, blanks included, in `TransducerPath.alignment`.
    alignments: bool = False
    # Run the steps of a search on the GPU as a CUDA graph where that works, see cuda_graphs.py.
    allow_cuda_graphs: bool = True

    def __post_init__(self) -> None:
        check_int("beam_size", self.beam_size, 1, MAX_BEAM_SIZE)
        super().__post_init__()
        check_number("softmax_temperature", self.softmax_temperature, above_zero=True)
        check_bool("allow_cuda_graphs", self.allow_cuda_graphs)
        check_choice("blank_lm_score_mode", self.blank_lm_score_mode, BLANK_LM_SCORE_MODES)
        check_choice("pruning_mode", self.pruning_mode, PRUNING_MODES)

    @property
    def max_n_best(self) -> int:
        return self.beam_size
