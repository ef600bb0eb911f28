"""Options of alsd_pp and aes_pp; names and defaults as in NeMo's `beam` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError, check_bool, check_choice, check_int, check_number, checked_options
from nemo_gpu_decoding.search.config import SearchConfig

MAX_BEAM_SIZE = 1024
PRUNING_MODES = ("late", "early")
BLANK_LM_SCORE_MODES = {"no_score": False, "lm_weighted_full": True}  # whether the LM weighs the blank


@checked_options
@dataclass(frozen=True)
class TransducerConfig(SearchConfig):
    """Options that both searches share; the rest is in `SearchConfig`.

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
    # Keep every label of the way through the frames, blanks included, in `Path.alignment`.
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


@checked_options
@dataclass(frozen=True)
class ALSDConfig(TransducerConfig):
    """Options of `ALSDPlusPlus`; NeMo's for `malsd_batch`."""

    # After so many tokens in one frame, a hypothesis is given a blank.
    max_symbols: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_symbols", self.max_symbols, 1, 2**30)


@checked_options
@dataclass(frozen=True)
class AESConfig(TransducerConfig):
    """Options of `AESPlusPlus`; but for `pruning_mode`, NeMo's for `maes_batch`."""

    # As in `TransducerConfig`, but NeMo's default is late: gamma then compares scores with the LM, which
    # lie further apart the larger its weight is, and tokens that are dropped for that are words deleted.
    # late suits boosting: phrases may lift tokens that the joint puts below gamma.
    pruning_mode: str = "early"
    # Tokens that a hypothesis may emit in one frame; then it is given a blank.
    maes_num_steps: int = 2
    # A hypothesis is expanded by at most beam_size + this many labels.
    maes_expansion_beta: int = 2
    # ... and only by labels better than its best one less this, natural log, > 0 or inf.
    maes_expansion_gamma: float = 2.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("maes_num_steps", self.maes_num_steps, 1, 2**20)
        check_int("maes_expansion_beta", self.maes_expansion_beta, 0, 2**20)
        if math.isnan(self.maes_expansion_gamma) or self.maes_expansion_gamma <= 0:
            raise FieldError("maes_expansion_gamma", self.maes_expansion_gamma, "a number > 0 (or inf)")
