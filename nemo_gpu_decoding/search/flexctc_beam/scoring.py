"""Score new tokens with LM and boosting, and bound these scores from above, compiled."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, MOST_LOG_PROB, label_of

FEW_ARCS = 8  # the arcs of LM states with at most this many are offered one by one


@linked
def score_before(hypothesis, column):
    """Return the score that a new token adds to. A token can follow itself only after a blank."""
    return hypothesis.blank_score if column == hypothesis.last_label else hypothesis.score


@linked
def fused(base, hypothesis, column, lm_bound, floor, params, fusion):
    """Return `base` plus LM and boosting scores of a new token, and the states after it.

    Returns IMPOSSIBLE if a partial sum shows that the score is below `floor`. `lm_bound` is an upper bound of the LM
    score. Boosting trees are small and LMs are large: the cheap look-up comes first and may make the other one
    unnecessary.
    """
    label = label_of(column, params.blank_id)
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    weight, bonus = np.float32(0.0), np.float32(0.0)
    if fusion.boosting_weight > 0:
        bonus, boosting_state = lookup(fusion.boosting, params.vocab_size, boosting_state, label, ANY_WEIGHT)
        bonus *= fusion.boosting_weight
        if base + lm_bound + bonus < floor:
            return IMPOSSIBLE, lm_state, boosting_state
    if fusion.lm_weight > 0:
        least = least_lm_weight(floor, base, bonus, fusion.lm_weight)
        weight, lm_state = lookup(fusion.lm, params.vocab_size, lm_state, label, least)
        weight *= fusion.lm_weight
    return base + weight + bonus, lm_state, boosting_state


@linked
def least_lm_weight(floor, base, bonus, lm_weight):
    """Return the lowest LM weight with which base + bonus may reach the floor, with slack for float32 rounding."""
    slack = 1e-6 * (abs(np.float64(floor)) + abs(np.float64(base))) + 1e-5
    return (np.float64(floor) - base - bonus - slack) / lm_weight


@linked
def least_log_prob(floor, best):
    """Return the lowest log-probability with which a label may reach the floor, with slack for float32 rounding.

    It is at most MOST_LOG_PROB, so that a scan of the row finds every larger (invalid) value.

    Args:
        best: upper bound of the score of a label with log-probability 0.
    """
    slack = 1e-6 * (abs(np.float64(floor)) + abs(best)) + 1e-5
    return np.float32(min(np.float64(floor) - best - slack, np.float64(MOST_LOG_PROB)))


@linked
def note_bounds(beam, size, fusion):
    """Store upper bounds of the LM and boosting scores of the next token of every hypothesis.

    If the arcs of the LM state are offered one by one, the bound holds for all other labels.
    """
    for k in range(size):
        beam[k].lm_bound = beam[k].boosting_bound = 0.0
        if fusion.lm_weight > 0:
            bound = fusion.lm.states[beam[k].lm_state].upper_bound
            if offers_arcs(beam[k], fusion):
                bound = fusion.lm.states[beam[k].lm_state].backoff_bound
            beam[k].lm_bound = fusion.lm_weight * bound
        if fusion.boosting_weight > 0:
            bound = fusion.boosting.states[beam[k].boosting_state].upper_bound
            beam[k].boosting_bound = fusion.boosting_weight * bound


@linked
def offers_arcs(hypothesis, fusion):
    """Return whether the labels of the LM state's arcs are offered one by one before the row is scanned."""
    state = fusion.lm.states[hypothesis.lm_state]
    return fusion.lm_weight > 0 and state.arc_end - state.arc_begin <= FEW_ARCS


@linked
def bound_of(base, hypothesis):
    """Return an upper bound of `fused(base, ...)` for a label that was not offered; summed in the same order."""
    return base + hypothesis.lm_bound + hypothesis.boosting_bound


@linked
def best_new_score(beam, size, params):
    """Return an upper bound of the score of a new label with log-probability 0, in double."""
    best = -np.inf
    for k in range(size):
        best = max(best, np.float64(bound_of(beam[k].score + params.beam_beta, beam[k])))
    return best
