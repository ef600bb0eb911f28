"""alsd_pp on the CPU: alignment-length synchronous decoding of RNN-T and TDT models [ALSD++/AES++].

In every step each hypothesis reads the frame it has come to. All its extensions, by the blank or a
token and, in TDT, a duration, compete with those of the other hypotheses; the K best make the new
beam, and hypotheses that have become equal in text and frame are recombined by adding probabilities.
The score of a hypothesis is
    log P_transducer + alpha_LM log P_LM(text) + alpha_PB boost(text)
with blanks scored as in `search/transducer/blank_scoring.py`.

**Bound-pruned fusion.** Blanks and finished hypotheses need no LM: they give a floor under the K-th
best score at once. Let ub(s) be the largest weight that any label can get in LM state s. A token v of
hypothesis k can only enter the beam if
    score_k + log p(v) + log p(best duration) + alpha ub(state_k)  reaches the floor,
and only such tokens are looked up. The result is the same to the bit: the bound is summed in the
order of the score itself and floating-point addition is monotonic.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, log_add
from nemo_gpu_decoding.search.row_scan import next_label
from nemo_gpu_decoding.search.transducer.beam import (
    BAD_INPUT,
    HYPOTHESIS,
    STAY,
    add_node,
    begin_step,
    duration_log_prob,
    extend,
    find_twin,
    for_utterance,
    fusion_bound,
    fusion_score,
    is_bad,
    least_log_prob,
    longest_duration,
    remember,
)
from nemo_gpu_decoding.search.transducer.blank_scoring import ALSD_CEILING, fused_blank, token_offset
from nemo_gpu_decoding.search.transducer.candidates import (
    best_labels,
    insert,
    new_candidates,
    worst_score,
)


@compiled
def step(rows, joint, batch, nodes, wishes, search, durations, max_symbols, lm, boosting):
    """One step of every utterance in `rows`; changes `batch`, `nodes` and `wishes` in place.

    Leaves a size of BAD_INPUT where the joint gave NaN or +inf, and of 0 where no label is possible.
    """
    beam_size = batch.beam.shape[1]
    candidates = new_candidates(beam_size)
    labels = np.empty(min(beam_size, search.vocab_size + 1), np.int32)
    scratch = np.empty(beam_size, HYPOTHESIS)
    for b in rows:
        own = for_utterance(search, batch.lm_weights[b], batch.boosting_weights[b])
        begin_step(batch, b, wishes)
        count = _forced(joint, batch, b, own, max_symbols, candidates)
        if count == BAD_INPUT:
            batch.sizes[b] = BAD_INPUT
            continue
        for k in range(batch.sizes[b]):
            if _is_free(joint, batch, b, k, max_symbols):
                row = joint.log_probs[joint.row_of[b, k]]
                hypothesis = batch.beam[b, k]
                if own.late:
                    count = _expand_late(row, hypothesis, k, own, lm, boosting, candidates, count)
                else:
                    count = _expand_early(
                        row, hypothesis, k, own, labels, lm, boosting, candidates, count
                    )
        _merge(joint, batch, b, nodes, wishes, own, durations, candidates, count, scratch)


@inlined
def _is_free(joint, batch, b, k, max_symbols):
    """Whether hypothesis k may take any label: it is not finished and need not take a blank."""
    return joint.row_of[b, k] >= 0 and batch.beam[b, k].symbols < max_symbols


@compiled
def _forced(joint, batch, b, search, max_symbols, candidates):
    """Candidates that need no fusion: finished hypotheses, forced blanks and (late) all blanks.

    Returns how many, or BAD_INPUT.
    """
    count = 0
    alpha = search.lm_weight + search.boosting_weight
    blank = search.vocab_size * search.num_durations
    for k in range(batch.sizes[b]):
        hypothesis = batch.beam[b, k]
        lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
        if joint.row_of[b, k] < 0:
            count = insert(candidates, count, hypothesis.score, k, STAY, lm_state, boosting_state)
            continue
        row = joint.log_probs[joint.row_of[b, k]]
        if is_bad(row, search):
            return BAD_INPUT
        # where labels are narrowed down early, a forced blank keeps its plain score, as in NeMo
        blank_score = fused_blank(row[search.vocab_size], alpha, search.weighted_blank and search.late)
        if hypothesis.symbols >= max_symbols:
            d = longest_duration(row, search)
            score = hypothesis.score + (blank_score + duration_log_prob(row, search, d))
            count = insert(candidates, count, score, k, blank + d, lm_state, boosting_state)
        elif search.late:
            for d in range(search.num_durations):
                score = hypothesis.score + (blank_score + duration_log_prob(row, search, d))
                count = insert(candidates, count, score, k, blank + d, lm_state, boosting_state)
    return count


@compiled
def _expand_late(row, hypothesis, k, search, lm, boosting, candidates, count):
    """Add the tokens of hypothesis k that can be among the best with LM and boosting."""
    alpha = search.lm_weight + search.boosting_weight
    offset = token_offset(row[search.vocab_size], alpha, search.weighted_blank, ALSD_CEILING)
    longest = duration_log_prob(row, search, longest_duration(row, search))
    bound = fusion_bound(hypothesis, search, lm, boosting)
    tokens = row[: search.vocab_size]
    floor = worst_score(candidates, count)
    v = next_label(tokens, 0, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    while v < tokens.shape[0]:
        base = row[v] + offset
        if base > IMPOSSIBLE and not hypothesis.score + ((base + bound) + longest) < floor:
            fused, lm_state, boosting_state = fusion_score(
                hypothesis.lm_state, hypothesis.boosting_state, np.int32(v),
                (floor - hypothesis.score) - longest - base, search, lm, boosting,
            )  # fmt: skip
            for d in range(search.num_durations):
                score = hypothesis.score + ((base + fused) + duration_log_prob(row, search, d))
                choice = v * search.num_durations + d
                count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
            floor = worst_score(candidates, count)
        v = next_label(tokens, v + 1, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    return count


@compiled
def _expand_early(row, hypothesis, k, search, labels, lm, boosting, candidates, count):
    """Add the K labels of hypothesis k that the joint likes best, with LM and boosting."""
    alpha = search.lm_weight + search.boosting_weight
    blank_log_prob = row[search.vocab_size]
    offset = token_offset(blank_log_prob, alpha, search.weighted_blank, ALSD_CEILING)
    for label in labels[: best_labels(row[: search.vocab_size + 1], labels)]:
        lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
        if label == search.vocab_size:
            base = fused_blank(blank_log_prob, alpha, search.weighted_blank)
        else:
            fused, lm_state, boosting_state = fusion_score(
                lm_state, boosting_state, label, IMPOSSIBLE, search, lm, boosting
            )
            base = (row[label] + offset) + fused
        for d in range(search.num_durations):
            score = hypothesis.score + (base + duration_log_prob(row, search, d))
            choice = label * search.num_durations + d
            count = insert(candidates, count, score, k, choice, lm_state, boosting_state)
    return count


@compiled
def _merge(joint, batch, b, nodes, wishes, search, durations, candidates, count, scratch):
    """The candidates become the new beam: recombination, tree, memory of predictions."""
    beam = batch.beam[b]
    size = 0
    for slot in candidates.rank[:count]:
        candidate = candidates.items[slot]
        parent = beam[candidate.parent]
        scratch[size] = parent
        new = scratch[size]
        extend(new, candidate.choice, search, durations)
        new.score = candidate.score
        new.lm_state = candidate.lm_state
        new.boosting_state = candidate.boosting_state
        twin = find_twin(scratch, size, new)
        if twin >= 0:
            scratch[twin].score = log_add(scratch[twin].score, new.score)
            continue
        if candidate.choice != STAY:
            label = candidate.choice // search.num_durations
            log_prob = joint.log_probs[joint.row_of[b, candidate.parent], label]
            new.node = add_node(
                nodes, batch.node_counts, b, parent.node, candidate.choice, parent.frame, log_prob,
                search, durations,
            )  # fmt: skip
            if label < search.vocab_size:
                remember(batch, b, new, wishes)
        size += 1
    for k in range(size):
        beam[k] = scratch[k]
    batch.sizes[b] = size
