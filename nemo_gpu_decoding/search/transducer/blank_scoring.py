"""How a blank is scored when an LM is fused into a transducer [ALSD++/AES++, eq. 2 and 3].

An LM knows no blank. If only tokens pay for it, every token loses against the blank and an LM deletes
words. `alpha` is the sum of the fusion weights, p the joint's posterior, b the blank:

    no_score (eq. 2)            blank   log p(b)
                                token v log p(v)                            + alpha log P_LM(v)
    lm_weighted_full (eq. 3)    blank   log p(b) + alpha log p(b)
                                token v log p(v) + alpha log (1 - p(b))     + alpha log P_LM(v)

So in eq. 3 the LM gives the blank the joint's own probability, and shares the rest among the tokens.
"""

from __future__ import annotations

import math

import numpy as np

from nemo_gpu_decoding.jit import inlined

BLANK_LM_SCORE_MODES = {"no_score": False, "lm_weighted_full": True}

# 1 - p(b) is kept above zero by clipping p(b), where NeMo's searches clip it
ALSD_CEILING = np.float32(1.0 - 1e-2)
AES_CEILING = np.float32(1.0 - 1e-6)


@inlined
def fused_blank(blank_log_prob, alpha, weighted):
    """Score of the blank: of eq. 3 if `weighted`, else of eq. 2. All float32, natural log."""
    if weighted:
        return blank_log_prob * (np.float32(1.0) + alpha)
    return blank_log_prob


@inlined
def token_offset(blank_log_prob, alpha, weighted, ceiling):
    """What every token's score gets on top of log p(v) and the weighted LM score.

    Computed in double and rounded, so that libraries and devices agree to the last bit.
    """
    if weighted and alpha > 0:
        blank = min(np.float32(math.exp(np.float64(blank_log_prob))), ceiling)
        return np.float32(math.log1p(-np.float64(blank))) * alpha
    return np.float32(0.0)
