"""Expansion of a hypothesis: a sorted list of its best extensions by blank and tokens.

**Bound-pruned fusion.** Blanks and finished hypotheses need no LM and give a floor: the score of the N-th best
candidate, or that of the best minus gamma. Let ub(s) be the largest weight of any label in LM state s. A token v of
hypothesis k can only be kept if
    score_k + log p(v) + log p(best duration) + alpha ub(state_k)  reaches the floor.
Only such tokens are looked up. The result is the same to the bit: the bound is summed in the order of the score, and
floating-point addition is monotonic.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, Candidates, floor_of, insert, next_label
from nemo_gpu_decoding.search.transducer import scoring
from nemo_gpu_decoding.search.transducer.records import CANDIDATE


@compiled
def new_candidates(capacity):
    return Candidates(np.empty(capacity, CANDIDATE), np.empty(capacity, np.int32))


@linked
def count_within_gamma(candidates, count, params):
    """Number of the sorted candidates that are better than the best minus gamma."""
    if count > 0:
        floor = candidates.items[candidates.rank[0]].score - params.gamma
        while count > 0 and not candidates.items[candidates.rank[count - 1]].score > floor:
            count -= 1
    return count


@linked
def least_log_prob(floor, score, offset, bound, longest):
    """Lower bound of the log-probability of labels that can reach the floor, with slack for float32 rounding."""
    rest = np.float64(score) + offset + bound + longest
    return np.float32(floor - rest - 1e-6 * (abs(np.float64(floor)) + abs(rest)) - 1e-5)


@linked
def offer_blanks(row, hypothesis, k, params, fusion, candidates, count):
    """Offer the blank of hypothesis k with every duration."""
    blank_score = scoring.fused_blank(row[params.vocab_size], fusion, params.blank_mode)
    for d in range(params.num_durations):
        score = hypothesis.score + (blank_score + scoring.duration_log_prob(row, params, d))
        choice = params.vocab_size * params.num_durations + d
        _, count = insert(candidates, count, score, k, choice, hypothesis.lm_state, hypothesis.boosting_state)
    return count


@linked
def offer_tokens(row, hypothesis, k, params, fusion, candidates, count):
    """Offer the tokens of hypothesis k that can be among the best with LM and boosting."""
    offset = scoring.token_offset(row, params, fusion)
    longest = scoring.duration_log_prob(row, params, scoring.longest_duration(row, params))
    bound = scoring.fusion_bound(hypothesis, fusion)
    tokens = row[: params.vocab_size]
    floor = floor_of(candidates, count, params.gamma)
    v = next_label(tokens, 0, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    while v < tokens.shape[0]:
        base = row[v] + offset
        if base > IMPOSSIBLE and not hypothesis.score + ((base + bound) + longest) < floor:
            fused, lm_state, boosting_state = scoring.fused_token(
                hypothesis.lm_state, hypothesis.boosting_state, np.int32(v),
                (floor - hypothesis.score) - longest - base, params, fusion,
            )  # fmt: skip
            for d in range(params.num_durations):
                score = hypothesis.score + ((base + fused) + scoring.duration_log_prob(row, params, d))
                choice = v * params.num_durations + d
                _, count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
            floor = floor_of(candidates, count, params.gamma)
        v = next_label(tokens, v + 1, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    return count


@linked
def best_labels(row, labels):
    """Fill `labels` with the columns of the largest values of a row, in descending order; returns their number.

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
