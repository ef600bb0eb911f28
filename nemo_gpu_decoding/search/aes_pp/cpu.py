"""aes_pp on the CPU: adaptive expansion search of RNN-T and TDT models [ALSD++/AES++].

Frame by frame. The hypotheses that have come to a frame are its open ones. First, prefix search: if an
open text is another's first part, less one token, the probability of emitting that token here is added
to the longer one. Then, up to maes_num_steps times, every open hypothesis is expanded by its few best
labels, those within gamma of its best one; the K best of these and of the hypotheses that have left
the frame make the new beam. Those with a new token in this frame stay open. What is still open in the
end is given a blank.

An expansion in the frame that leads to a text of the beam is dropped: prefix search has counted it. In
RNN-T that is any text of the beam, as in NeMo; in TDT one at the same frame. Texts that become equal
in TDT, at the same later frame, are recombined by adding probabilities.

The score is that of `alsd_pp/cpu.py`, and so is the bound that saves look-ups: here the floor is the
best label of the hypothesis less gamma, or the last of the labels that may be kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, log_add
from nemo_gpu_decoding.search.row_scan import next_label
from nemo_gpu_decoding.search.text_hash import extended_hash
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
from nemo_gpu_decoding.search.transducer.blank_scoring import AES_CEILING, fused_blank, token_offset
from nemo_gpu_decoding.search.transducer.candidates import (
    CANDIDATE,
    insert,
    new_candidates,
    worst_score,
)


class Limits(NamedTuple):
    """How far a hypothesis is expanded."""

    steps: int  # maes_num_steps
    expansions: int  # labels per hypothesis at most
    gamma: np.float32


class Pool(NamedTuple):
    """All that competes for the beam in a step, in the order in which it was found."""

    items: np.ndarray  # CANDIDATE
    keys: np.ndarray  # uint64, equal for equal text and frame


@compiled
def step(rows, joint, batch, nodes, wishes, search, durations, limits, lm, boosting):
    """One step of every utterance in `rows`; changes `batch`, `nodes` and `wishes` in place.

    Leaves a size of BAD_INPUT where the joint gave NaN or +inf, and of 0 where no label is possible.
    """
    beam_size = batch.beam.shape[1]
    pool_size = beam_size * (limits.expansions + 1)
    pool = Pool(np.empty(pool_size, CANDIDATE), np.empty(pool_size, np.uint64))
    row_best = new_candidates(limits.expansions)
    best = new_candidates(beam_size)
    scratch = np.empty(beam_size, HYPOTHESIS)
    for b in rows:
        own = for_utterance(search, batch.lm_weights[b], batch.boosting_weights[b])
        begin_step(batch, b, wishes)
        if _any_bad(joint, batch, b, own):
            batch.sizes[b] = BAD_INPUT
            continue
        if batch.expansions[b] == limits.steps:
            _force_blanks(joint, batch, b, nodes, own, durations)
            _next_frame(batch, b)
            continue
        if batch.expansions[b] == 0:
            _prefix_search(joint, batch, b, own, durations, lm, boosting)
        count = _compete(joint, batch, b, own, durations, limits, lm, boosting, row_best, scratch, pool)
        count = _best_of(pool, count, best)
        _merge(joint, batch, b, nodes, wishes, own, durations, best, count, scratch)
        batch.expansions[b] += 1
        if not batch.beam[b, : batch.sizes[b]]["open"].any():
            _next_frame(batch, b)


@compiled
def _any_bad(joint, batch, b, search):
    for k in range(batch.sizes[b]):
        if batch.beam[b, k].open and is_bad(joint.log_probs[joint.row_of[b, k]], search):
            return True
    return False


@compiled
def _next_frame(batch, b):
    """Go to the next frame that a hypothesis has come to, and open those that have."""
    frame = np.iinfo(np.int32).max
    for k in range(batch.sizes[b]):
        frame = min(frame, batch.beam[b, k].frame)
    for k in range(batch.sizes[b]):
        batch.beam[b, k].open = batch.beam[b, k].frame == frame
    batch.expansions[b] = 0


@compiled
def _prefix_search(joint, batch, b, search, durations, lm, boosting):
    """Add to every open text what its prefix, one token shorter and open too, contributes here."""
    beam, size = batch.beam[b], batch.sizes[b]
    stay = -1  # index of duration 0
    for d in range(search.num_durations):
        if durations[d] == 0:
            stay = d
    if stay < 0:
        return
    gains = np.full(size, IMPOSSIBLE, np.float32)
    for i in range(size):
        if not beam[i].open or beam[i].length == 0:
            continue
        for j in range(size):
            if beam[j].open and beam[j].text_hash == beam[i].prefix_hash:
                row = joint.log_probs[joint.row_of[b, j]]
                score = _token_score(row, beam[j], beam[i].last_label, search, lm, boosting)
                score = beam[j].score + (score + duration_log_prob(row, search, stay))
                gains[i] = log_add(gains[i], score)
    for i in range(size):  # all at once: what a prefix gains here does not count for its longer text
        beam[i].score = log_add(beam[i].score, gains[i])


@compiled
def _token_score(row, hypothesis, label, search, lm, boosting):
    """Score of a token after a hypothesis, with LM and boosting."""
    alpha = search.lm_weight + search.boosting_weight
    offset = token_offset(row[search.vocab_size], alpha, search.weighted_blank, AES_CEILING)
    fused, _, _ = fusion_score(
        hypothesis.lm_state, hypothesis.boosting_state, label, IMPOSSIBLE, search, lm, boosting
    )
    return (row[label] + offset) + fused


@compiled
def _compete(joint, batch, b, search, durations, limits, lm, boosting, row_best, scratch, pool):
    """Fill the pool with the hypotheses that have left the frame and the expansions of the others."""
    beam = batch.beam[b]
    n = 0
    for k in range(batch.sizes[b]):
        if not beam[k].open:
            pool.items[n].score = beam[k].score
            pool.items[n].parent = k
            pool.items[n].choice = STAY
            pool.keys[n] = _key(beam[k])
            n += 1
            continue
        row = joint.log_probs[joint.row_of[b, k]]
        if search.late:
            count = _expand_late(row, beam[k], k, search, limits, lm, boosting, row_best)
        else:
            count = _expand_early(row, beam[k], k, search, limits, lm, boosting, row_best)
        for slot in row_best.rank[:count]:
            candidate = row_best.items[slot]
            scratch[0] = beam[k]
            extend(scratch[0], candidate.choice, search, durations)
            if candidate.score > IMPOSSIBLE and not _is_counted(batch, b, k, scratch[0], search):
                pool.items[n] = candidate
                pool.keys[n] = _key(scratch[0])
                n += 1
    return n


@inlined
def _key(hypothesis):
    return extended_hash(hypothesis.text_hash, hypothesis.frame)


@compiled
def _is_counted(batch, b, k, new, search):
    """Whether an expansion of hypothesis k that stays in the frame leads to a text of the beam."""
    if new.length == batch.beam[b, k].length or new.frame > batch.beam[b, k].frame:
        return False
    for i in range(batch.sizes[b]):
        other = batch.beam[b, i]
        if other.text_hash == new.text_hash and (not search.timed or other.frame == new.frame):
            return True
    return False


@compiled
def _expand_late(row, hypothesis, k, search, limits, lm, boosting, best):
    """The expansions of hypothesis k by score with LM and boosting; returns how many."""
    alpha = search.lm_weight + search.boosting_weight
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    blank = fused_blank(row[search.vocab_size], alpha, search.weighted_blank)
    count = 0
    for d in range(search.num_durations):
        score = hypothesis.score + (blank + duration_log_prob(row, search, d))
        choice = search.vocab_size * search.num_durations + d
        count = insert(best, count, score, k, choice, lm_state, boosting_state)
    offset = token_offset(row[search.vocab_size], alpha, search.weighted_blank, AES_CEILING)
    longest = duration_log_prob(row, search, longest_duration(row, search))
    bound = fusion_bound(hypothesis, search, lm, boosting)
    tokens = row[: search.vocab_size]
    floor = _floor(best, count, limits)
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
                count = insert(best, count, score, k, choice, lm_state, boosting_state)
            floor = _floor(best, count, limits)
        v = next_label(tokens, v + 1, least_log_prob(floor, hypothesis.score, offset, bound, longest))
    return _within_gamma(best, count, limits)


@compiled
def _expand_early(row, hypothesis, k, search, limits, lm, boosting, best):
    """The expansions of hypothesis k by the joint alone, then scored in full; returns how many."""
    count = 0
    labels = row[: search.vocab_size + 1]
    longest = duration_log_prob(row, search, longest_duration(row, search))
    v = next_label(labels, 0, IMPOSSIBLE)
    while v < labels.shape[0]:
        for d in range(search.num_durations):
            score = hypothesis.score + (row[v] + duration_log_prob(row, search, d))
            choice = v * search.num_durations + d
            count = insert(best, count, score, k, choice, hypothesis.lm_state, hypothesis.boosting_state)
        floor = _floor(best, count, limits)
        none = np.float32(0.0)
        v = next_label(labels, v + 1, least_log_prob(floor, hypothesis.score, none, none, longest))
    count = _within_gamma(best, count, limits)
    alpha = search.lm_weight + search.boosting_weight
    offset = token_offset(row[search.vocab_size], alpha, search.weighted_blank, AES_CEILING)
    for slot in best.rank[:count]:
        candidate = best.items[slot]
        label = candidate.choice // search.num_durations
        duration = duration_log_prob(row, search, candidate.choice % search.num_durations)
        if label == search.vocab_size:
            score = fused_blank(row[label], alpha, search.weighted_blank)
        else:
            fused, lm_state, boosting_state = fusion_score(
                candidate.lm_state, candidate.boosting_state, label, IMPOSSIBLE, search, lm, boosting
            )
            score = (row[label] + offset) + fused
            candidate.lm_state = lm_state
            candidate.boosting_state = boosting_state
        candidate.score = hypothesis.score + (score + duration)
    return count


@inlined
def _floor(best, count, limits):
    """What an expansion must reach: the best less gamma, and the last that may be kept."""
    if count == 0:
        return IMPOSSIBLE
    return max(best.items[best.rank[0]].score - limits.gamma, worst_score(best, count))


@compiled
def _within_gamma(best, count, limits):
    """How many of the sorted expansions are better than the best less gamma."""
    if count > 0:
        floor = best.items[best.rank[0]].score - limits.gamma
        while count > 0 and not best.items[best.rank[count - 1]].score > floor:
            count -= 1
    return count


@compiled
def _best_of(pool, n, best):
    """Add up what is equal in text and frame, and insert the K best of the pool into `best`."""
    keys = pool.keys[:n]
    order = np.argsort(keys, kind="mergesort")
    count = 0
    begin = 0
    while begin < n:
        end = begin + 1
        leader = order[begin]
        while end < n and keys[order[end]] == keys[leader]:
            if pool.items[order[end]].score > pool.items[leader].score:
                leader = order[end]
            end += 1
        score = pool.items[leader].score
        for i in order[begin:end]:
            if i != leader:
                score = log_add(score, pool.items[i].score)
        item = pool.items[leader]
        count = insert(best, count, score, item.parent, item.choice, item.lm_state, item.boosting_state)
        begin = end
    return count


@compiled
def _merge(joint, batch, b, nodes, wishes, search, durations, best, count, scratch):
    """The best of the pool become the new beam; those with a new token in this frame stay open."""
    beam = batch.beam[b]
    for i in range(count):
        candidate = best.items[best.rank[i]]
        parent = beam[candidate.parent]
        scratch[i] = parent
        new = scratch[i]
        new.score = candidate.score
        if candidate.choice == STAY:
            continue
        extend(new, candidate.choice, search, durations)
        label = candidate.choice // search.num_durations
        log_prob = joint.log_probs[joint.row_of[b, candidate.parent], label]
        new.node = add_node(
            nodes, batch.node_counts, b, parent.node, candidate.choice, parent.frame, log_prob,
            search, durations,
        )  # fmt: skip
        new.open = new.frame == parent.frame
        if label < search.vocab_size:
            new.lm_state = candidate.lm_state
            new.boosting_state = candidate.boosting_state
            remember(batch, b, new, wishes)
    for k in range(count):
        beam[k] = scratch[k]
    batch.sizes[b] = count


@compiled
def _force_blanks(joint, batch, b, nodes, search, durations):
    """Give every open hypothesis a blank (by the joint's plain score, as in NeMo) and recombine."""
    beam = batch.beam[b]
    size = 0
    for k in range(batch.sizes[b]):
        hypothesis = beam[k]
        if hypothesis.open:
            row = joint.log_probs[joint.row_of[b, k]]
            d = longest_duration(row, search)
            choice = search.vocab_size * search.num_durations + d
            blank = row[search.vocab_size]
            hypothesis.score += blank + duration_log_prob(row, search, d)
            hypothesis.node = add_node(
                nodes, batch.node_counts, b, hypothesis.node, choice, hypothesis.frame, blank,
                search, durations,
            )  # fmt: skip
            extend(hypothesis, choice, search, durations)
        if not hypothesis.score > IMPOSSIBLE:
            continue
        twin = find_twin(beam, size, hypothesis)
        if twin < 0:
            beam[size] = hypothesis
            size += 1
            continue
        total = log_add(beam[twin].score, hypothesis.score)
        if hypothesis.score > beam[twin].score:
            beam[twin] = hypothesis
        beam[twin].score = total
    batch.sizes[b] = size
