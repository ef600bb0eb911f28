"""Options of aes_pp. Names and, but for `pruning_mode`, defaults are NeMo's for `maes_batch`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_gpu_decoding.checks import FieldError, check_int
from nemo_gpu_decoding.search.transducer.config import TransducerConfig


@dataclass(frozen=True)
class AESConfig(TransducerConfig):
    """Options of `AESPlusPlus`; the rest is in `TransducerConfig`."""

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
