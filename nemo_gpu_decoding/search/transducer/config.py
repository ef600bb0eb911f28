"""Options of alsd_pp and aes_pp, with the names and defaults of NeMo's `beam` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError, check_bool, check_choice, check_int, check_number, checked_options
from nemo_gpu_decoding.search.config import SearchConfig

MAX_BEAM_SIZE = 1024
PRUNING_MODES = ("late", "early")
BLANK_LM_SCORE_MODES = ("no_score", "lm_weighted_full")


@checked_options
@dataclass(frozen=True)
class TransducerConfig(SearchConfig):
    """Options that both searches share, in addition to `SearchConfig`.

    `n_best` is at most `beam_size`. The networks run on their own device with every backend.
    """

    # Number of hypotheses kept, 1 .. 1024.
    beam_size: int = 4
    # Rank the final hypotheses by score / (number of tokens + 1). Reported scores are not normalised.
    score_norm: bool = True
    # The joint's logits are divided by this before the softmax, > 0. > 1 flattens the distribution.
    softmax_temperature: float = 1.0
    # Score of the blank with an LM or boosting [ALSD++/AES++, eq. 2 and 3]:
    #   lm_weighted_full  the blank's LM probability is that of the joint, so that an LM causes no deletions
    #   no_score          the LM does not score the blank
    blank_lm_score_mode: str = "lm_weighted_full"
    # Bonus per token, natural log. A value > 0 offsets the deletions that an LM causes. The blank keeps its score in
    # both modes.
    beam_beta: float = 0.0
    # Whether the labels of a hypothesis are pruned with LM and boosting scores (late) or by the joint alone (early).
    pruning_mode: str = "late"
    # Keep every label of the alignment, blanks included, in `Path.alignment`.
    alignments: bool = False
    # On a GPU, run the steps of a search as a CUDA graph if possible, see cuda_graphs.py.
    allow_cuda_graphs: bool = True

    def __post_init__(self) -> None:
        check_int("beam_size", self.beam_size, 1, MAX_BEAM_SIZE)
        super().__post_init__()
        check_number("softmax_temperature", self.softmax_temperature, above_zero=True)
        check_bool("allow_cuda_graphs", self.allow_cuda_graphs)
        check_choice("blank_lm_score_mode", self.blank_lm_score_mode, BLANK_LM_SCORE_MODES)
        check_choice("pruning_mode", self.pruning_mode, PRUNING_MODES)
        check_number("beam_beta", self.beam_beta, negative=True)

    @property
    def max_n_best(self) -> int:
        return self.beam_size


@checked_options
@dataclass(frozen=True)
class ALSDConfig(TransducerConfig):
    """Options of `ALSDPlusPlus`, with NeMo's defaults for `malsd_batch`."""

    # Maximum number of tokens of a hypothesis in one frame, >= 1; then it takes a blank.
    max_symbols: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_symbols", self.max_symbols, 1, 2**30)


@checked_options
@dataclass(frozen=True)
class AESConfig(TransducerConfig):
    """Options of `AESPlusPlus`, with NeMo's defaults for `maes_batch`, except for `pruning_mode`."""

    # As in `TransducerConfig`. NeMo's default is late: gamma prunes scores that contain the LM. A large LM weight
    # increases their differences and deletes words. late suits boosting: phrases may raise tokens that the joint
    # scores below gamma.
    pruning_mode: str = "early"
    # Maximum number of tokens of a hypothesis in one frame, >= 1; then it takes a blank.
    maes_num_steps: int = 2
    # A hypothesis is expanded by at most beam_size + this many labels, >= 0.
    maes_expansion_beta: int = 2
    # A hypothesis is expanded only by labels whose score is within this of its best one, natural log, > 0 or inf.
    maes_expansion_gamma: float = 2.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("maes_num_steps", self.maes_num_steps, 1, 2**20)
        check_int("maes_expansion_beta", self.maes_expansion_beta, 0, 2**20)
        if math.isnan(self.maes_expansion_gamma) or self.maes_expansion_gamma <= 0:
            raise FieldError("maes_expansion_gamma", self.maes_expansion_gamma, "a number > 0 (or inf)")
