"""Score the extensions of a hypothesis by blank and tokens, and keep a sorted list of the best ones.

An LM and a boosting tree are fused as in [ALSD++/AES++, eq. 2 and 3]. An LM has no probability of the blank. If an LM
lowers the scores of tokens only, the blank wins more often and words are deleted. `alpha` is the sum of the fusion
weights, p the joint's posterior, b the blank:

    no_score (eq. 2)            blank   log p(b)
                                token v log p(v)                            + alpha log P_LM(v)
    lm_weighted_full (eq. 3)    blank   log p(b) + alpha log p(b)
                                token v log p(v) + alpha log (1 - p(b))     + alpha log P_LM(v)

In eq. 3 the LM probability of the blank is that of the joint, and the tokens share the rest.

A source LM (density ratio) has no blank. It estimates which label the network expects where the network emits a label.
In p(v) = (1 - p(b)) P(v | not b), the source LM is a prior of the second factor, and divides this factor alone. The
blank and 1 - p(b), the sum of all labels, keep their scores. `alpha` does not include the source LM's weight:

    token v     log p(v) + alpha log (1 - p(b)) + lm_weight log P_LM(v) - source_lm_weight log P_source(v)

A bonus per token (`beam_beta`) is in the boosting automaton, see fusion/allowed.py. The bonus is no LM probability:
`alpha` does not include it, and the blank keeps its score in both modes.

All scores are float32, natural log. A row holds the joint's log-probs for one hypothesis, [V + 1 (+ D)]: the blank is
column V, followed by the durations.

**Bound-pruned fusion.** Blanks and finished hypotheses need no LM and give a floor: the score of the N-th best
candidate, or that of the best minus gamma. Let ub(s) be the largest weight of any label in LM state s. A token v of
hypothesis k can only be kept if
    score_k + log p(v) + log p(best duration) + alpha ub(state_k)  reaches the floor.
Only such tokens are looked up. The result is the same to the bit, because bound and score are summed in the same order
and floating-point addition is monotonic.
"""

import math

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, Candidates, floor_of, insert, next_label
from nemo_gpu_decoding.search.transducer.records import CANDIDATE, LM_WEIGHTED_FULL

# p(b) is clipped, as in NeMo's searches, so that 1 - p(b) is above zero
ALSD_CEILING = np.float32(1.0 - 1e-2)
AES_CEILING = np.float32(1.0 - 1e-6)


@linked
def fused_blank(blank_log_prob, fusion, blank_mode):
    """Return the score of the blank by eq. 2 (NO_SCORE) or eq. 3 (LM_WEIGHTED_FULL)."""
    if blank_mode == LM_WEIGHTED_FULL:
        return blank_log_prob * (np.float32(1.0) + (fusion.lm_weight + fusion.boosting_weight))
    return blank_log_prob


@linked
def token_offset(row, params, fusion):
    """Return the term that is added to log p(v) and the weighted LM score of every token.

    The term is computed in double and rounded once, so that all libraries and devices agree to the bit.
    """
    alpha = fusion.lm_weight + fusion.boosting_weight
    if params.blank_mode == LM_WEIGHTED_FULL and alpha > 0:
        blank_log_prob = row[params.vocab_size]
        blank = min(np.float32(math.exp(np.float64(blank_log_prob))), params.blank_ceiling)
        return np.float32(math.log1p(-np.float64(blank))) * alpha
    return np.float32(0.0)


@linked
def duration_log_prob(row, params, d):
    """Return the log-probability of the d-th duration."""
    return row[params.vocab_size + 1 + d] if params.timed else np.float32(0.0)


@linked
def longest_duration(row, params):
    """Return the index of the most probable duration, the first of equal ones."""
    best = 0
    for d in range(1, params.num_durations):
        if duration_log_prob(row, params, d) > duration_log_prob(row, params, best):
            best = d
    return best


@linked
def is_bad(row, params):
    """Return whether the logits had NaN or +inf. Both make all log-probs NaN, so a check of two columns is enough."""
    blank = row[params.vocab_size]
    duration = duration_log_prob(row, params, 0)
    return not (blank == blank and duration == duration)


@linked
def fusion_bound(hypothesis, fusion):
    """Return an upper bound of the weighted LM and boosting scores of the next token of a hypothesis."""
    bound = np.float32(0.0)
    if fusion.lm_weight > 0:
        bound += fusion.lm_weight * fusion.lm.states[hypothesis.lm_state].upper_bound
    if fusion.boosting_weight > 0:
        bound += fusion.boosting_weight * fusion.boosting.states[hypothesis.boosting_state].upper_bound
    return bound


@linked
def fused_token(lm_state, boosting_state, label, least, params, fusion):
    """Return weighted LM and boosting scores of a token, and the states after it.

    The score is IMPOSSIBLE if a partial sum shows that it is below `least`. The boosting tree comes first: it may make
    the slower LM look-up unnecessary.
    """
    weight, bonus = np.float32(0.0), np.float32(0.0)
    if fusion.boosting_weight > 0:
        bonus, boosting_state = lookup(fusion.boosting, params.vocab_size, boosting_state, label, ANY_WEIGHT)
        bonus *= fusion.boosting_weight
    if fusion.lm_weight > 0:
        slack = 1e-6 * abs(np.float64(least)) + 1e-5  # for rounding in float32
        least_weight = (np.float64(least) - bonus - slack) / fusion.lm_weight
        weight, lm_state = lookup(fusion.lm, params.vocab_size, lm_state, label, least_weight)
        weight *= fusion.lm_weight
    return weight + bonus, lm_state, boosting_state


@linked
def fused_label(row, label, offset, hypothesis, params, fusion):
    """Return the score of a label, blank or token, after a hypothesis, and the states of LM and boosting after it.

    `offset`: the row's `token_offset`.
    """
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    if label == params.vocab_size:
        return fused_blank(row[label], fusion, params.blank_mode), lm_state, boosting_state
    fused, lm_state, boosting_state = fused_token(lm_state, boosting_state, label, IMPOSSIBLE, params, fusion)
    return (row[label] + offset) + fused, lm_state, boosting_state


@linked
def forced_blank(row, hypothesis, blank_mode, params, fusion):
    """Return the score and choice of a forced blank, with the most probable duration."""
    d = longest_duration(row, params)
    blank = fused_blank(row[params.vocab_size], fusion, blank_mode)
    score = hypothesis.score + (blank + duration_log_prob(row, params, d))
    return score, params.vocab_size * params.num_durations + d


# -------------------------------------------------------------------- lists of the best extensions


@compiled
def new_candidates(capacity):
    return Candidates(np.empty(capacity, CANDIDATE), np.empty(capacity, np.int32))


@linked
def count_within_gamma(candidates, count, params):
    """Return the number of the sorted candidates that are better than the best minus gamma."""
    if count > 0:
        floor = candidates.items[candidates.rank[0]].score - params.gamma
        while count > 0 and not candidates.items[candidates.rank[count - 1]].score > floor:
            count -= 1
    return count


@linked
def least_log_prob(floor, score, offset, bound, longest):
    """Return the lowest log-probability with which a label may reach the floor, with slack for float32 rounding."""
    rest = np.float64(score) + offset + bound + longest
    return np.float32(floor - rest - 1e-6 * (abs(np.float64(floor)) + abs(rest)) - 1e-5)


@linked
def offer_blanks(row, hypothesis, k, params, fusion, candidates, count):
    """Offer the blank of hypothesis k with every duration."""
    blank_score = fused_blank(row[params.vocab_size], fusion, params.blank_mode)
    for d in range(params.num_durations):
        score = hypothesis.score + (blank_score + duration_log_prob(row, params, d))
        choice = params.vocab_size * params.num_durations + d
        _, count = insert(candidates, count, score, k, choice, hypothesis.lm_state, hypothesis.boosting_state)
    return count


@linked
def offer_tokens(row, hypothesis, k, params, fusion, candidates, count):
    """Offer the tokens of hypothesis k that can be among the best with LM and boosting."""
    offset = token_offset(row, params, fusion)
    longest = duration_log_prob(row, params, longest_duration(row, params))
    bound = fusion_bound(hypothesis, fusion)
    tokens = row[: params.vocab_size]
    floor = floor_of(candidates, count, params.gamma)
    v = next_label(tokens, 0, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    while v < tokens.shape[0]:
        base = row[v] + offset
        if base > IMPOSSIBLE and not hypothesis.score + ((base + bound) + longest) < floor:
            fused, lm_state, boosting_state = fused_token(
                hypothesis.lm_state, hypothesis.boosting_state, np.int32(v),
                (floor - hypothesis.score) - longest - base, params, fusion,
            )  # fmt: skip
            for d in range(params.num_durations):
                score = hypothesis.score + ((base + fused) + duration_log_prob(row, params, d))
                choice = v * params.num_durations + d
                _, count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
            floor = floor_of(candidates, count, params.gamma)
        v = next_label(tokens, v + 1, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    return count


@linked
def best_labels(row, labels):
    """Fill `labels` with the columns of the largest values of a row, in descending order; return their number.

    Equal values are in the order of their columns.
    """
    count = 0
    v = 0
    while v < row.shape[0]:
        index = count
        while index > 0 and row[v] > row[labels[index - 1]]:
            index -= 1
        if index < labels.shape[0] and row[v] > IMPOSSIBLE:
            count = min(count + 1, labels.shape[0])
            for i in range(count - 1, index, -1):
                labels[i] = labels[i - 1]
            labels[index] = v
        least = row[labels[count - 1]] if count == labels.shape[0] else IMPOSSIBLE
        v = next_label(row, v + 1, least)
    return count
