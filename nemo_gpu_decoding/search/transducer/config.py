"""Declare the options of alsd_pp and aes_pp, with the names and defaults of NeMo's `beam` section."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.search.config import SearchConfig

MAX_BEAM_SIZE = 1024
PRUNING_MODES = ("late", "early")
BLANK_LM_SCORE_MODES = ("no_score", "lm_weighted_full")


@checked_options
@dataclass(frozen=True)
class TransducerConfig(SearchConfig):
    """Options that both searches share, in addition to `SearchConfig`.

    `n_best` is at most `beam_size`. With every backend, the networks run on the device of their weights.
    """

    # Number of hypotheses kept, 1 .. 1024.
    beam_size: int = option(4, low=1, high=MAX_BEAM_SIZE, cli=True)
    # Rank the final hypotheses by score / (number of tokens + 1). Reported scores are not normalised.
    score_norm: bool = option(True, cli="tune")
    # The joint's logits are divided by this before the softmax, > 0. > 1 flattens the distribution.
    softmax_temperature: float = option(1.0, above=0)
    # Score of the blank with an LM or boosting [ALSD++/AES++, eq. 2 and 3]:
    #   lm_weighted_full  the blank's LM probability is that of the joint, so that an LM causes no deletions
    #   no_score          the LM does not score the blank
    blank_lm_score_mode: str = option("lm_weighted_full", choices=BLANK_LM_SCORE_MODES, cli="tune")
    # Bonus per token, natural log. A value > 0 offsets the deletions that an LM causes. The blank keeps its score in
    # both modes.
    beam_beta: float = option(0.0, cli=True)
    # Whether the labels of a hypothesis are pruned with LM and boosting scores (late) or by the joint alone (early).
    pruning_mode: str = option("late", choices=PRUNING_MODES, cli="tune")
    # Keep every label of the alignment, blanks included, in `Path.alignment`.
    alignments: bool = option(False, nemo=None)
    # On a GPU, run the steps of a search as a CUDA graph if possible, see cuda_graphs.py.
    allow_cuda_graphs: bool = True


@checked_options
@dataclass(frozen=True)
class ALSDConfig(TransducerConfig):
    """Options of `ALSDPlusPlus`, with NeMo's defaults for `malsd_batch`."""

    # Maximum number of tokens of a hypothesis in one frame, >= 1; then it takes a blank.
    max_symbols: int = option(10, low=1, high=2**30)


@checked_options
@dataclass(frozen=True)
class AESConfig(TransducerConfig):
    """Options of `AESPlusPlus`, with NeMo's defaults for `maes_batch`, except for `pruning_mode`."""

    # As in `TransducerConfig`. NeMo's default is late: gamma prunes scores that contain the LM. A large LM weight
    # increases their differences and deletes words. late suits boosting: phrases may raise tokens that the joint
    # scores below gamma.
    pruning_mode: str = option("early", choices=PRUNING_MODES, cli="tune")
    # Maximum number of tokens of a hypothesis in one frame, >= 1; then it takes a blank.
    maes_num_steps: int = option(2, low=1, high=2**20)
    # A hypothesis is expanded by at most beam_size + this many labels, >= 0.
    maes_expansion_beta: int = option(2, low=0, high=2**20)
    # A hypothesis is expanded only by labels whose score is within this of its best one, natural log, > 0 or inf.
    maes_expansion_gamma: float = option(2.3, above=0, infinite=True)
