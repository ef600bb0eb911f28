"""flexctc_beam on the CPU: batched CTC beam search with late pruning [FlexCTC, section 3], compiled.

The score of a hypothesis is
    log P_CTC(alignment) + alpha_LM log P_LM(text) + alpha_PB boost(text) + beta |text|
and a frame keeps the K best of all K x V continuations, LM and boosting included ("late" pruning).

**Bound-pruned late fusion.** Scoring K x V continuations with an LM is what costs time, and nearly
all of them are hopeless. A blank or a repeated label needs no LM: these candidates alone give a floor
under the K-th best score. Most LM states have an arc or two of their own: the labels that these
expect are offered next, one by one. Let ub(s) be the largest weight that any other label can get in
LM state s (`fusion/bounds.py`). Such a label v of hypothesis k can only enter the beam if
    score_k + log p(v) + beta + alpha ub(state_k)  reaches the floor,
and as posteriors are peaked, a handful of the K x V pairs pass. Only these are looked up. The result
is the same to the bit, since the bound is summed in the order of the score itself and floating-point
addition is monotonic.

Three ways to treat hypotheses with equal text (`merge`): "max" and "sum" take the top K first and then
recombine what is equal in text and last label, by maximum or by adding probabilities; "prefix" keeps
one slot per text with the probabilities of ending in a blank and in a token apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled, inlined
from nemo_gpu_decoding.search.flexctc_beam.candidates import (
    CANDIDATE,
    Candidates,
    floor_of,
    insert,
    least_log_prob,
    plain,
)
from nemo_gpu_decoding.search.history import trace_back
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, LARGEST, log_add
from nemo_gpu_decoding.search.row_scan import next_label
from nemo_gpu_decoding.search.text_hash import extended_hash

MERGE_MAX, MERGE_SUM, MERGE_PREFIX = 0, 1, 2
NO_LABEL = -1
BAD_INPUT = -1
FEW_ARCS = 8  # an LM state with no more has its own arcs offered one by one


# One hypothesis of the beam; a batch is an array [B, K] of them. Scores are natural log.
HYPOTHESIS = np.dtype(
    [
        ("score", np.float32),
        ("last_label", np.int32),  # of the last frame (max, sum) or last token (prefix); or NO_LABEL
        ("text_hash", np.uint64),
        ("length", np.int32),  # tokens so far
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
        # what LM and boosting can add to the next token at most, weighted; see `note_bounds`
        ("lm_bound", np.float32),
        ("boosting_bound", np.float32),
        # merge=prefix only: the probability of the text, split by what its alignments end in
        ("blank_score", np.float32),
        ("token_score", np.float32),
        ("parent_hash", np.uint64),  # of the text without its last token
    ],
    align=True,
)


class Search(NamedTuple):
    """What stays the same for a whole utterance."""

    blank_id: int
    vocab_size: int
    merge: int
    beam_beta: np.float32
    threshold: np.float32
    lm_weight: np.float32
    boosting_weight: np.float32


def new_beam(
    batch: int, beam_size: int, lm_starts: np.ndarray, boosting_starts: np.ndarray
) -> np.ndarray:
    """B utterances with nothing read, [B, K] HYPOTHESIS: the empty text in slot 0."""
    beam = np.zeros((batch, beam_size), HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = NO_LABEL
    first["lm_state"] = lm_starts
    first["boosting_state"] = boosting_starts
    first["token_score"] = IMPOSSIBLE
    return beam


@compiled
def advance(
    rows, log_probs, lengths, frames_done, beam, sizes, history,
    search, lm_weights, boosting_weights, lm, boosting,
):  # fmt: skip
    """Read lengths[b] frames of log_probs[b] ([B, T, C] float32) for every b in `rows`.

    Updates beam [B, K], sizes [B], frames_done [B] and history [B, >= frames_done + T, K] in place.
    Stops before a frame that holds NaN or +inf with sizes[b] = BAD_INPUT, before one that allows no
    label at all with sizes[b] = 0.
    """
    beam_size = beam.shape[1]
    candidates = Candidates(np.empty(beam_size, CANDIDATE), np.empty(beam_size, np.int32))
    scratch = np.empty(beam_size, HYPOTHESIS)
    for b in rows:
        own = with_weights(search, lm_weights[b], boosting_weights[b])
        for i in range(lengths[b]):
            row = log_probs[b, i]
            count = _candidates(row, beam[b], sizes[b], own, lm, boosting, candidates)
            if count > 0:
                count = select(row, beam[b], candidates, count, own, scratch, history, b, frames_done[b])
            sizes[b] = count
            if count <= 0:
                break
            frames_done[b] += 1


@inlined
def _candidates(row, beam, size, search, lm, boosting, candidates):
    """The best continuations of a frame for merge=max and merge=sum; returns how many, or BAD_INPUT."""
    count = 0
    blank = np.int32(search.blank_id)
    for way in range(2):  # a blank, the last label again
        for k in range(size):
            last = beam[k].last_label
            can_repeat = last != NO_LABEL and last != blank
            if way == 1 and not can_repeat:
                continue
            label = blank if way == 0 else last
            score = beam[k].score + row[label]
            slot, count = insert(candidates.items, candidates.rank, count, score, np.int32(k), label)
            if slot >= 0:
                candidates.items[slot].lm_state = beam[k].lm_state
                candidates.items[slot].boosting_state = beam[k].boosting_state
    note_bounds(beam, size, search, lm, boosting)
    floor = floor_of(candidates, count, search)
    for k in range(size):
        if not offers_arcs(beam[k], search, lm):
            continue
        state = beam[k].lm_state
        for arc in range(lm.states[state].arc_begin, lm.states[state].arc_end):
            v = column_of(lm.arcs[arc].label, search.blank_id)
            if not row[v] <= LARGEST:
                return BAD_INPUT
            base = beam[k].score + row[v] + search.beam_beta
            lm_bound = search.lm_weight * lm.arcs[arc].weight
            if v != beam[k].last_label and not base + lm_bound + beam[k].boosting_bound < floor:
                count = _offer(
                    base, beam[k], k, v, lm_bound, floor, search, lm, boosting, candidates, count
                )
                floor = floor_of(candidates, count, search)
    room = room_of(beam, size, search)
    v = next_label(row, 0, least_log_prob(floor, room))
    while v < row.shape[0]:
        if not row[v] <= LARGEST:
            return BAD_INPUT
        for k in range(size):
            if v == search.blank_id or v == beam[k].last_label:
                continue
            base = beam[k].score + row[v] + search.beam_beta
            if bound_of(base, beam[k]) < floor:
                continue
            count = _offer(
                base, beam[k], k, v, beam[k].lm_bound, floor, search, lm, boosting, candidates, count
            )
            floor = floor_of(candidates, count, search)
        v = next_label(row, v + 1, least_log_prob(floor, room))
    return count


@inlined
def _offer(base, hypothesis, k, v, lm_bound, floor, search, lm, boosting, candidates, count):
    """Score the new token v after hypothesis k and insert it if it is among the K best."""
    score, lm_state, boosting_state = fused(base, hypothesis, v, lm_bound, floor, search, lm, boosting)
    slot, count = insert(candidates.items, candidates.rank, count, score, np.int32(k), np.int32(~v))
    if slot >= 0:
        candidates.items[slot].lm_state = lm_state
        candidates.items[slot].boosting_state = boosting_state
    return count


@inlined
def room_of(beam, size, search):
    """What a new label of log-probability 0 could score at best, in double."""
    room = -np.inf
    for k in range(size):
        room = max(room, np.float64(bound_of(beam[k].score + search.beam_beta, beam[k])))
    return room


@inlined
def bound_of(base, hypothesis):
    """At most this is `fused(base, ...)` for a label that was not offered; summed in the same order."""
    return base + hypothesis.lm_bound + hypothesis.boosting_bound


@inlined
def note_bounds(beam, size, search, lm, boosting):
    """Note how much LM and boosting can add to the next token of every hypothesis.

    Where the few arcs of the LM state are offered one by one, the bound is that of all other labels.
    """
    for k in range(size):
        beam[k].lm_bound = beam[k].boosting_bound = 0.0
        if search.lm_weight > 0:
            bound = lm.states[beam[k].lm_state].upper_bound
            if offers_arcs(beam[k], search, lm):
                bound = lm.states[beam[k].lm_state].backoff_bound
            beam[k].lm_bound = search.lm_weight * bound
        if search.boosting_weight > 0:
            bound = boosting.states[beam[k].boosting_state].upper_bound
            beam[k].boosting_bound = search.boosting_weight * bound


@inlined
def offers_arcs(hypothesis, search, lm):
    """Whether the labels that the LM state has arcs for are offered apart from the scan of the row."""
    state = lm.states[hypothesis.lm_state]
    return search.lm_weight > 0 and state.arc_end - state.arc_begin <= FEW_ARCS


@inlined
def fused(base, hypothesis, column, lm_bound, floor, search, lm, boosting):
    """`base` plus LM and boosting for a new token, and the states after it.

    IMPOSSIBLE if that is found to be below `floor` on the way; `lm_bound` is what the LM can add at
    most. Boosting trees are small and LMs are large: the cheap look-up comes first and may save the
    other.
    """
    label = label_of(column, search.blank_id)
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    weight, bonus = np.float32(0.0), np.float32(0.0)
    if search.boosting_weight > 0:
        bonus, boosting_state = lookup(boosting, search.vocab_size, boosting_state, label, ANY_WEIGHT)
        bonus *= search.boosting_weight
        if base + lm_bound + bonus < floor:
            return IMPOSSIBLE, lm_state, boosting_state
    if search.lm_weight > 0:
        least = least_lm_weight(floor, base, bonus, search.lm_weight)
        weight, lm_state = lookup(lm, search.vocab_size, lm_state, label, least)
        weight *= search.lm_weight
    return base + weight + bonus, lm_state, boosting_state


@inlined
def least_lm_weight(floor, base, bonus, lm_weight):
    """No smaller LM weight lifts base + bonus to the floor; with slack for float32 rounding."""
    slack = 1e-6 * (abs(np.float64(floor)) + abs(np.float64(base))) + 1e-5
    return (np.float64(floor) - base - bonus - slack) / lm_weight


@inlined
def label_of(column, blank_id):
    """Automata number the labels without the blank."""
    return np.int32(column - 1 if column > blank_id else column)


@inlined
def column_of(label, blank_id):
    """The column of the log-probs that a label of an automaton stands for."""
    return np.int32(label + 1 if label >= blank_id else label)


@inlined
def select(row, beam, candidates, count, search, scratch, history, b, t):
    """Candidates become the new beam: threshold, recombination, back-pointers. Returns its size."""
    size = 0
    for slot in candidates.rank[:count]:
        candidate = candidates.items[slot]
        least = candidates.items[candidates.rank[0]].score - search.threshold
        if size > 0 and not candidate.score > least:  # the best stays, however small the threshold
            break
        new = scratch[size]
        _extend(beam, candidate, search, new)
        if search.merge != MERGE_PREFIX:
            twin = _find_twin(scratch, size, new)
            if twin >= 0:
                if search.merge == MERGE_SUM:
                    scratch[twin].score = log_add(scratch[twin].score, new.score)
                continue
        history.labels[b, t, size] = candidate.label
        history.parents[b, t, size] = candidate.parent
        history.log_probs[b, t, size] = row[plain(candidate.label)]
        size += 1
    for k in range(size):
        beam[k] = scratch[k]
    return size


@inlined
def _extend(beam, candidate, search, new):
    """Make the hypothesis that `candidate` stands for."""
    new.score = candidate.score
    new.lm_state = candidate.lm_state
    new.boosting_state = candidate.boosting_state
    if search.merge == MERGE_PREFIX:
        new.blank_score = candidate.blank_score
        new.token_score = candidate.token_score
        if candidate.same_text_as >= 0:  # whatever way led to it
            old = beam[candidate.same_text_as]
            new.last_label = old.last_label
            new.text_hash = old.text_hash
            new.parent_hash = old.parent_hash
            new.length = old.length
            return
    old = beam[candidate.parent]
    if candidate.label < 0:
        new.last_label = ~candidate.label
        new.text_hash = extended_hash(old.text_hash, ~candidate.label)
        new.parent_hash = old.text_hash
        new.length = old.length + 1
    else:
        new.last_label = candidate.label
        new.text_hash = old.text_hash
        new.parent_hash = old.parent_hash
        new.length = old.length


@inlined
def _find_twin(beam, size, hypothesis):
    """The slot below `size` with the same text and last label, or -1."""
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].last_label == hypothesis.last_label
            and beam[i].length == hypothesis.length
        ):
            return i
    return -1


@compiled
def with_weights(search, lm_weight, boosting_weight):
    return Search(
        search.blank_id, search.vocab_size, search.merge, search.beam_beta, search.threshold,
        lm_weight, boosting_weight,
    )  # fmt: skip


@compiled
def finish(
    rows, frames_done, beam, sizes, history, search, lm_weights, boosting_weights, lm, boosting,
    final, order, scores, traces,
):  # fmt: skip
    """Sort the hypotheses of every b in `rows` and trace back the N best with different texts.

    Fills order [B, N] with their slots (-1 where there are fewer), scores [B, N] and traces. `final`:
    add the final weights of LM and boosting (the utterance is over).
    """
    n_best = order.shape[1]
    for b in rows:
        score = np.empty(sizes[b], np.float32)
        for k in range(sizes[b]):
            score[k] = beam[b, k].score
            if final and lm_weights[b] > 0:
                score[k] += lm_weights[b] * lm.states[beam[b, k].lm_state].final_weight
            if final and boosting_weights[b] > 0:
                score[k] += boosting_weights[b] * boosting.states[beam[b, k].boosting_state].final_weight
        _merge_equal_texts(beam[b], score, search.merge)
        for n in range(n_best):
            best = -1
            for k in range(len(score)):
                if score[k] > IMPOSSIBLE and (best < 0 or score[k] > score[best]):
                    best = k
            order[b, n] = best
            if best < 0:
                break
            scores[b, n] = score[best]
            score[best] = IMPOSSIBLE
            trace_back(history, b, frames_done[b], best, search.blank_id, traces, n)


@compiled
def _merge_equal_texts(beam, score, merge):
    """Leave one hypothesis of each text: two may differ in whether they end in a blank."""
    for k in range(len(score)):
        for i in range(k):
            if beam[i].text_hash != beam[k].text_hash or beam[i].length != beam[k].length:
                continue
            keep, drop = (i, k) if score[i] >= score[k] else (k, i)
            if merge == MERGE_SUM:
                score[keep] = log_add(score[keep], score[drop])
            score[drop] = IMPOSSIBLE


@compiled
def fusion_parts(tokens, search, lm, boosting, lm_state, boosting_state, final):
    """What LM and boosting contributed to a text, weighted; with `final` their final weights too."""
    lm_score, boosting_score = np.float64(0.0), np.float64(0.0)
    for column in tokens:
        label = label_of(column, search.blank_id)
        if search.lm_weight > 0:
            weight, lm_state = lookup(lm, search.vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += search.lm_weight * weight
        if search.boosting_weight > 0:
            weight, boosting_state = lookup(
                boosting, search.vocab_size, boosting_state, label, ANY_WEIGHT
            )
            boosting_score += search.boosting_weight * weight
    if final and search.lm_weight > 0:
        lm_score += search.lm_weight * lm.states[lm_state].final_weight
    if final and search.boosting_weight > 0:
        boosting_score += search.boosting_weight * boosting.states[boosting_state].final_weight
    return lm_score, boosting_score
