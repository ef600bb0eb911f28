"""From a beam to an n-best list: the steps that flexctc_beam and the transducers share, compiled."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, label_of, log_add

# Weighted LM and boosting scores of a text, and the offsets of its states from the start states
TEXT_SCORES = np.dtype(
    [("lm", np.float64), ("boosting", np.float64), ("lm_state", np.int32), ("boosting_state", np.int32)]
)


@linked
def merge_equal_texts(beam, scores, adds):
    """Keep one hypothesis per text; the scores of the others become IMPOSSIBLE.

    Hypotheses of a text may differ in their last label (CTC) or in their frames (TDT).

    Args:
        scores: [size] of the hypotheses; changed in place.
        adds: add the probabilities of a text's hypotheses; else the best score is kept.
    """
    for k in range(len(scores)):
        for i in range(k):
            if beam[i].text_hash == beam[k].text_hash and beam[i].length == beam[k].length:
                keep, drop = (i, k) if scores[i] >= scores[k] else (k, i)
                if adds:
                    scores[keep] = log_add(scores[keep], scores[drop])
                scores[drop] = IMPOSSIBLE


@linked
def select_best(ratings, scores, order, best_scores):
    """The N possible hypotheses with the highest ratings, in the order of their slots among equal ones.

    Args:
        ratings, scores: [size] of the hypotheses; the scores of selected ones become IMPOSSIBLE.
        order, best_scores: [N] are filled with slots and scores, best first; -1 ends the list if there are fewer.
    """
    for n in range(len(order)):
        best = -1
        for k in range(len(scores)):
            if scores[k] > IMPOSSIBLE and (best < 0 or ratings[k] > ratings[best]):
                best = k
        order[n] = best
        if best < 0:
            break
        best_scores[n] = scores[best]
        scores[best] = IMPOSSIBLE


@compiled
def add_text_scores(tokens, vocab_size, blank_id, fusion, starts, scores):
    """Add to scores [1] TEXT_SCORES the weighted LM and boosting scores of the next tokens of a text.

    Args:
        tokens: [n] columns of the log-probs.
        fusion: the `UtteranceFusion`; products have the type of its weights, sums are double.
        starts: states of LM and boosting tree before the whole text.
    """
    own = scores[0]
    lm_score, lm_state = own.lm, starts[0] + own.lm_state
    boosting_score, boosting_state = own.boosting, starts[1] + own.boosting_state
    for column in tokens:
        label = label_of(column, blank_id)
        if fusion.lm_weight > 0:
            weight, lm_state = lookup(fusion.lm, vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += fusion.lm_weight * weight
        if fusion.boosting_weight > 0:
            weight, boosting_state = lookup(fusion.boosting, vocab_size, boosting_state, label, ANY_WEIGHT)
            boosting_score += fusion.boosting_weight * weight
    own.lm, own.lm_state = lm_score, lm_state - starts[0]
    own.boosting, own.boosting_state = boosting_score, boosting_state - starts[1]
