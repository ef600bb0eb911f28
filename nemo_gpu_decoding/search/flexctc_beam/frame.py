"""flexctc_beam on the CPU: batched CTC beam search with late pruning [FlexCTC, section 3], compiled.

The score of a hypothesis is
    log P_CTC(alignment) + alpha_LM log P_LM(text) + alpha_PB boost(text) + beta |text|
and a frame keeps the K best of all K x V continuations, LM and boosting included ("late" pruning).

**Bound-pruned late fusion.** Scoring all K x V continuations with an LM takes most of the time, and nearly all of them
are pruned. A blank or a repeated label needs no LM: these candidates give a floor, a lower bound of the K-th best
score. Most LM states have one or two arcs of their own; their labels are offered next, one by one. Let ub(s) be the
largest weight of any other label in LM state s (`fusion/automaton.py`). Such a label v of hypothesis k can only enter
the beam if
    score_k + log p(v) + beta + alpha ub(state_k)  reaches the floor.
Posteriors are peaked, so only a few of the K x V pairs pass and are looked up in the LM. The result is the same to the
bit: the bound is summed in the order of the score, and floating-point addition is monotonic.

Hypotheses with equal text are merged in one of three ways (`merge`). "max" and "sum" select the top K first and then
recombine hypotheses with equal text and last label, by the maximum or the sum of their probabilities. "prefix" keeps
one slot per text, with separate probabilities of ending in a blank and in a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays, of_utterance
from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.flexctc_beam.backpointers import BackPointers, new_back_pointers
from nemo_gpu_decoding.search.flexctc_beam.candidates import (
    CANDIDATE,
    Candidates,
    floor_of,
    insert,
    least_log_prob,
    plain,
)
from nemo_gpu_decoding.search.flexctc_beam.records import BAD_INPUT, HYPOTHESIS, MERGE_PREFIX, MERGE_SUM, NO_LABEL
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, MOST_LOG_PROB, log_add
from nemo_gpu_decoding.search.row_scan import next_label
from nemo_gpu_decoding.search.text_hash import extended_hash

FEW_ARCS = 8  # the arcs of LM states with at most this many are offered one by one


class BeamState(NamedTuple):
    """State of the search of B utterances."""

    beam: np.ndarray  # [B, K] HYPOTHESIS
    sizes: np.ndarray  # [B] int32, number of live hypotheses; they are the first ones
    frames_done: np.ndarray  # [B] int64
    back_pointers: BackPointers


class Workspace(NamedTuple):
    """Buffers of one thread for a frame."""

    candidates: Candidates
    next_beam: np.ndarray  # [K] HYPOTHESIS


def new_workspace(beam_size: int) -> Workspace:
    candidates = Candidates(np.empty(beam_size, CANDIDATE), np.empty(beam_size, np.int32))
    return Workspace(candidates, np.empty(beam_size, HYPOTHESIS))


def new_state(fusions: FusionArrays, beam_size: int, frames: int) -> BeamState:
    """State before the first frame of B utterances: the empty text in slot 0, a capacity of `frames` frames."""
    n = len(fusions.lm_weights)
    beam = np.zeros((n, beam_size), HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = NO_LABEL
    first["lm_state"] = fusions.lm_starts
    first["boosting_state"] = fusions.boosting_starts
    first["token_score"] = IMPOSSIBLE
    back_pointers = new_back_pointers(n, frames, beam_size)
    return BeamState(beam, np.ones(n, np.int32), np.zeros(n, np.int64), back_pointers)


@no_refcount
def advance(rows, log_probs, lengths, state, params, fusions, workspace):
    """Read lengths[b] frames of log_probs[b] ([B, T, C] float32) for every b in `rows`.

    Updates the `BeamState` in place; its back-pointers have a capacity for frames_done + T frames. Stops before a
    frame with NaN or a value above MOST_LOG_PROB, with sizes[b] = BAD_INPUT; and before a frame in which no label is
    possible, with sizes[b] = 0.
    """
    beam, sizes, frames_done = state.beam, state.sizes, state.frames_done
    candidates, next_beam = workspace.candidates, workspace.next_beam
    for b in rows:
        own, fusion = beam[b], of_utterance(fusions, b)
        for i in range(lengths[b]):
            row = log_probs[b, i]
            count = _candidates(row, own, sizes[b], params, fusion, candidates)
            if count > 0:
                count = select(row, own, b, state, candidates, count, params, next_beam)
            sizes[b] = count
            if count <= 0:
                break
            frames_done[b] += 1


@linked
def _candidates(row, beam, size, params, fusion, candidates):
    """Fill the best continuations of a frame for merge=max and merge=sum; returns their number, or BAD_INPUT."""
    count = 0
    blank = np.int32(params.blank_id)
    for repeats in range(2):  # a blank, the last label again
        for k in range(size):
            last = beam[k].last_label
            can_repeat = last != NO_LABEL and last != blank
            if repeats == 1 and not can_repeat:
                continue
            label = blank if repeats == 0 else last
            score = beam[k].score + row[label]
            slot, count = insert(candidates.items, candidates.rank, count, score, np.int32(k), label)
            if slot >= 0:
                candidates.items[slot].lm_state = beam[k].lm_state
                candidates.items[slot].boosting_state = beam[k].boosting_state
    note_bounds(beam, size, fusion)
    floor = floor_of(candidates, count, params)
    for k in range(size):
        if not offers_arcs(beam[k], fusion):
            continue
        state = beam[k].lm_state
        for arc in range(fusion.lm.states[state].arc_begin, fusion.lm.states[state].arc_end):
            v = column_of(fusion.lm.arcs[arc].label, params.blank_id)
            if not row[v] <= MOST_LOG_PROB:
                return BAD_INPUT
            base = beam[k].score + row[v] + params.beam_beta
            lm_bound = fusion.lm_weight * fusion.lm.arcs[arc].weight
            if v != beam[k].last_label and not base + lm_bound + beam[k].boosting_bound < floor:
                count = _offer(base, beam[k], k, v, lm_bound, floor, params, fusion, candidates, count)
                floor = floor_of(candidates, count, params)
    best = best_new_score(beam, size, params)
    v = next_label(row, 0, least_log_prob(floor, best))
    while v < row.shape[0]:
        if not row[v] <= MOST_LOG_PROB:
            return BAD_INPUT
        for k in range(size):
            if v == params.blank_id or v == beam[k].last_label:
                continue
            base = beam[k].score + row[v] + params.beam_beta
            if bound_of(base, beam[k]) < floor:
                continue
            count = _offer(base, beam[k], k, v, beam[k].lm_bound, floor, params, fusion, candidates, count)
            floor = floor_of(candidates, count, params)
        v = next_label(row, v + 1, least_log_prob(floor, best))
    return count


@linked
def _offer(base, hypothesis, k, v, lm_bound, floor, params, fusion, candidates, count):
    """Score the new token v after hypothesis k and insert it if it is among the K best."""
    score, lm_state, boosting_state = fused(base, hypothesis, v, lm_bound, floor, params, fusion)
    slot, count = insert(candidates.items, candidates.rank, count, score, np.int32(k), np.int32(~v))
    if slot >= 0:
        candidates.items[slot].lm_state = lm_state
        candidates.items[slot].boosting_state = boosting_state
    return count


@linked
def best_new_score(beam, size, params):
    """Upper bound of the score of a new label with log-probability 0, in double."""
    best = -np.inf
    for k in range(size):
        best = max(best, np.float64(bound_of(beam[k].score + params.beam_beta, beam[k])))
    return best


@linked
def bound_of(base, hypothesis):
    """Upper bound of `fused(base, ...)` for a label that was not offered; summed in the same order."""
    return base + hypothesis.lm_bound + hypothesis.boosting_bound


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
    """Whether the labels of the LM state's own arcs are offered one by one, before the scan of the row."""
    state = fusion.lm.states[hypothesis.lm_state]
    return fusion.lm_weight > 0 and state.arc_end - state.arc_begin <= FEW_ARCS


@linked
def fused(base, hypothesis, column, lm_bound, floor, params, fusion):
    """`base` plus LM and boosting scores of a new token, and the states after it.

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
    """Lower bound of the LM weights with which base + bonus reaches the floor, with slack for float32 rounding."""
    slack = 1e-6 * (abs(np.float64(floor)) + abs(np.float64(base))) + 1e-5
    return (np.float64(floor) - base - bonus - slack) / lm_weight


@linked
def label_of(column, blank_id):
    """The label in automata, which number labels without the blank, of a column of the log-probs."""
    return np.int32(column - 1 if column > blank_id else column)


@linked
def column_of(label, blank_id):
    """The column of the log-probs of a label in automata."""
    return np.int32(label + 1 if label >= blank_id else label)


@linked
def select(row, beam, b, state, candidates, count, params, next_beam):
    """Build the new beam from the candidates: threshold, recombination, back-pointers. Returns its size."""
    back_pointers, t = state.back_pointers, state.frames_done[b]
    size = 0
    for slot in candidates.rank[:count]:
        candidate = candidates.items[slot]
        least = candidates.items[candidates.rank[0]].score - params.threshold
        if size > 0 and not candidate.score > least:  # the best candidate is kept with any threshold
            break
        new = next_beam[size]
        _extend(beam, candidate, params, new)
        if params.merge != MERGE_PREFIX:
            duplicate = _find_duplicate(next_beam, size, new)
            if duplicate >= 0:
                if params.merge == MERGE_SUM:
                    next_beam[duplicate].score = log_add(next_beam[duplicate].score, new.score)
                continue
        back_pointers.labels[b, t, size] = candidate.label
        back_pointers.parents[b, t, size] = candidate.parent
        back_pointers.log_probs[b, t, size] = row[plain(candidate.label)]
        size += 1
    for k in range(size):
        beam[k] = next_beam[k]
    return size


@linked
def _extend(beam, candidate, params, new):
    """Fill `new` with the hypothesis of `candidate`."""
    new.score = candidate.score
    new.lm_state = candidate.lm_state
    new.boosting_state = candidate.boosting_state
    if params.merge == MERGE_PREFIX:
        new.blank_score = candidate.blank_score
        new.token_score = candidate.token_score
        if candidate.same_text_as >= 0:  # the text is that of this slot, for every alignment
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


@linked
def _find_duplicate(beam, size, hypothesis):
    """The slot below `size` with the same text and last label, or -1."""
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].last_label == hypothesis.last_label
            and beam[i].length == hypothesis.length
        ):
            return i
    return -1
