"""Search one frame of flexctc_beam on the CPU, with late pruning [FlexCTC, section 3], compiled.

The score of a hypothesis is
    log P_CTC(alignment) + alpha_LM log P_LM(text) + alpha_PB boost(text) + beta |text|
A frame keeps the K best of all K x V continuations, LM and boosting included ("late" pruning).

**Bound-pruned late fusion.** Scoring all K x V continuations with an LM takes most of the time, and nearly all of them
are pruned. A blank or a repeated label needs no LM: these candidates give a floor, a lower bound of the K-th best
score. Most LM states have only one or two arcs; the labels of these arcs are offered next, one by one. Let ub(s) be
the largest weight of any other label in LM state s (`fusion/automaton.py`). Such a label v of hypothesis k can only
enter the beam if
    score_k + log p(v) + beta + alpha ub(state_k)  reaches the floor.
Posteriors are peaked, so that only few of the K x V pairs need an LM look-up. The result is the same to the bit,
because bound and score are summed in the same order and floating-point addition is monotonic.

Hypotheses with equal text are merged in one of three ways (`merge`). "max" and "sum" select the top K first and then
recombine hypotheses with equal text and last label, by the maximum or the sum of their probabilities. "prefix" keeps
one slot per text, with separate probabilities of ending in a blank and in a token.

**merge=prefix** is textbook CTC prefix search. A text has two probabilities: of its alignments that
end in a blank, and of those that end in its last token. A frame leads to a text in three ways: by a blank, by a
repetition of the last token, or by the last token as a new token after the text without it. The third way may add to a
text that is already in the beam. Every other extension is a new text, so the bound is valid here too.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, lookup
from nemo_gpu_decoding.fusion.batch import FusionArrays, of_utterance
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search import numerics
from nemo_gpu_decoding.search.flexctc_beam.backpointers import BackPointers, new_back_pointers
from nemo_gpu_decoding.search.flexctc_beam.records import BAD_INPUT, HYPOTHESIS, MERGE_PREFIX, MERGE_SUM, NO_LABEL

FEW_ARCS = 8  # the arcs of LM states with at most this many are offered one by one

# A hypothesis extended by the label of a frame.
CANDIDATE = np.dtype(
    [
        ("score", np.float32),
        ("parent", np.int32),  # slot in the beam
        ("choice", np.int32),  # 2 * label + (1: a new token, 0: a blank or a repeated label)
        ("lm_state", np.int32),  # after it
        ("boosting_state", np.int32),
        ("blank_score", np.float32),  # this field and those below: merge=prefix only
        ("token_score", np.float32),
        ("same_text_as", np.int32),  # slot in the beam whose text this one keeps, or -1
    ],
    align=True,
)


class FlexCTCBeams(NamedTuple):
    """The state of a search of B utterances."""

    beam: np.ndarray  # [B, K] HYPOTHESIS
    sizes: np.ndarray  # [B] int32, number of live hypotheses; they are the first ones
    frames_done: np.ndarray  # [B] int64
    offsets: np.ndarray  # [B] float64, the part of the scores that is not in `beam`, see `rebased`
    back_pointers: BackPointers


def new_state(fusions: FusionArrays, beam_size: int, frames: int) -> FlexCTCBeams:
    """Return the state before frame 0 of B utterances: the empty text in slot 0, a capacity of `frames` frames."""
    n = len(fusions.utterances)
    beam = np.zeros((n, beam_size), HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = NO_LABEL
    first["lm_state"] = fusions.utterances["lm_start"]
    first["boosting_state"] = fusions.utterances["boosting_start"]
    first["token_score"] = numerics.IMPOSSIBLE
    back_pointers = new_back_pointers(n, frames, beam_size)
    return FlexCTCBeams(beam, np.ones(n, np.int32), np.zeros(n, np.int64), np.zeros(n), back_pointers)


@no_refcount
def advance(rows, log_probs, lengths, state, params, fusions, candidates, next_beam):
    """Read lengths[b] frames of log_probs[b] ([B, T, C] float32) for every b in `rows`.

    The function updates `state`, whose back-pointers have a capacity for frames_done + T frames. It stops before a
    frame with NaN or a value above MOST_LOG_PROB (sizes[b] = BAD_INPUT), or without a possible label (sizes[b] = 0).
    `candidates` and `next_beam` ([K] HYPOTHESIS) are buffers.
    """
    beam, sizes, frames_done = state.beam, state.sizes, state.frames_done
    for b in rows:
        hypotheses, fusion = beam[b], of_utterance(fusions, b)
        for i in range(lengths[b]):
            row = log_probs[b, i]
            count = _list_candidates(row, hypotheses, sizes[b], params, fusion, candidates)
            if count > 0:
                count = select(row, hypotheses, b, state, candidates, count, params, next_beam)
            sizes[b] = count
            if count <= 0:
                break
            frames_done[b] += 1
            shift = numerics.rebased(hypotheses, count)
            if shift != 0:
                state.offsets[b] += shift
                for k in range(count):
                    hypotheses[k].score -= shift
                    hypotheses[k].blank_score -= shift
                    hypotheses[k].token_score -= shift


@linked
def _list_candidates(row, beam, size, params, fusion, candidates):
    """List the best continuations of a frame; return their number, or BAD_INPUT."""
    count = _offer_without_new_token(row, beam, size, params, fusion, candidates)
    note_bounds(beam, size, fusion)
    floor = numerics.floor_of(candidates, count, params.threshold)
    for k in range(size):
        if not offers_arcs(beam[k], fusion):
            continue
        state = beam[k].lm_state
        for arc in range(fusion.lm.states[state].arc_begin, fusion.lm.states[state].arc_end):
            v = numerics.column_of(fusion.lm.arcs[arc].label, params.blank_id)
            if not row[v] <= numerics.MOST_LOG_PROB:
                return BAD_INPUT
            base = score_before(beam[k], v) + row[v] + params.beam_beta
            lm_bound = fusion.lm_weight * fusion.lm.arcs[arc].weight
            if not base + lm_bound + beam[k].boosting_bound < floor:
                count = _offer_token(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count)
                floor = numerics.floor_of(candidates, count, params.threshold)
    best = best_new_score(beam, size, params)
    v = numerics.next_label(row, 0, least_log_prob(floor, best))
    while v < row.shape[0]:
        if not row[v] <= numerics.MOST_LOG_PROB:
            return BAD_INPUT
        for k in range(0 if v == params.blank_id else size):
            base = score_before(beam[k], v) + row[v] + params.beam_beta
            if bound_of(base, beam[k]) < floor:
                continue
            lm_bound = beam[k].lm_bound
            count = _offer_token(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count)
            floor = numerics.floor_of(candidates, count, params.threshold)
        v = numerics.next_label(row, v + 1, least_log_prob(floor, best))
    return count


@linked
def _offer_without_new_token(row, beam, size, params, fusion, candidates):
    """Offer every hypothesis with a blank and with its last label repeated; return the number of candidates."""
    count, blank = 0, params.blank_id
    if params.merge == MERGE_PREFIX:
        for k in range(size):
            count = offer_same_text(row, beam, size, k, params, fusion, candidates, count)
        return count
    for repeats in range(2):  # blanks first: the list takes them in the order of the beam, without a shift
        for k in range(size):
            label = beam[k].last_label if repeats else blank
            if not repeats or (label != NO_LABEL and label != blank):
                score, lm_state, boosting_state = beam[k].score + row[label], beam[k].lm_state, beam[k].boosting_state
                _, count = numerics.insert(candidates, count, score, k, 2 * label, lm_state, boosting_state)
    return count


@linked
def _offer_token(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count):
    """Offer hypothesis k extended by the new token v; return the number of candidates."""
    is_prefix = params.merge == MERGE_PREFIX
    if is_prefix and find_text(beam, size, numerics.extended_hash(beam[k].text_hash, v), beam[k].length + 1) >= 0:
        return count  # `offer_same_text` has counted it
    score, lm_state, boosting_state = fused(base, beam[k], np.int32(v), lm_bound, floor, params, fusion)
    slot, count = numerics.insert(candidates, count, score, k, 2 * v + 1, lm_state, boosting_state)
    if is_prefix and slot >= 0:
        candidates.items[slot].blank_score = numerics.IMPOSSIBLE
        candidates.items[slot].token_score = score
        candidates.items[slot].same_text_as = -1
    return count


@linked
def select(row, beam, b, state, candidates, count, params, next_beam):
    """Build the new beam from the candidates: threshold, recombination, back-pointers. Return its size."""
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
                    next_beam[duplicate].score = numerics.log_add(next_beam[duplicate].score, new.score)
                continue
        elif params.recombines and _goes_on_alike(next_beam, size, new):
            continue
        label = candidate.choice >> 1
        back_pointers.labels[b, t, size] = ~label if candidate.choice & 1 else label
        back_pointers.parents[b, t, size] = candidate.parent
        back_pointers.log_probs[b, t, size] = row[label]
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
    new.blank_score = numerics.IMPOSSIBLE  # max, sum: a frame that repeats the last label continues it
    source, is_new = candidate.parent, candidate.choice & 1
    if params.merge == MERGE_PREFIX:
        new.blank_score = candidate.blank_score
        new.token_score = candidate.token_score
        if candidate.same_text_as >= 0:  # the text is that of this slot, for every alignment
            source, is_new = candidate.same_text_as, 0
    old = beam[source]
    new.last_label = candidate.choice >> 1
    new.text_hash = old.text_hash
    new.parent_hash = old.parent_hash
    new.length = old.length
    if is_new:
        new.text_hash = numerics.extended_hash(old.text_hash, new.last_label)
        new.parent_hash = old.text_hash
        new.length = old.length + 1
    elif params.merge == MERGE_PREFIX:
        new.last_label = old.last_label


@linked
def _find_duplicate(beam, size, hypothesis):
    """Return the slot below `size` with the same text and last label, or -1."""
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].last_label == hypothesis.last_label
            and beam[i].length == hypothesis.length
        ):
            return i
    return -1


# -------------------------------------------------------- scores of new tokens, and their upper bounds


@linked
def score_before(hypothesis, column):
    """Return the score to which a new token adds. A token can follow itself only after a blank."""
    return hypothesis.blank_score if column == hypothesis.last_label else hypothesis.score


@linked
def fused(base, hypothesis, column, lm_bound, floor, params, fusion):
    """Return `base` plus LM and boosting scores of a new token, and the states after it.

    Return IMPOSSIBLE if a partial sum shows that the score is below `floor`. `lm_bound` is an upper bound of the LM
    score. The boosting tree comes first: it may make the slower LM look-up unnecessary.
    """
    label = numerics.label_of(column, params.blank_id)
    lm_state, boosting_state = hypothesis.lm_state, hypothesis.boosting_state
    weight, bonus = np.float32(0.0), np.float32(0.0)
    if fusion.boosting_weight > 0:
        bonus, boosting_state = lookup(fusion.boosting, params.vocab_size, boosting_state, label, ANY_WEIGHT)
        bonus *= fusion.boosting_weight
        if base + lm_bound + bonus < floor:
            return numerics.IMPOSSIBLE, lm_state, boosting_state
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

    The result is at most MOST_LOG_PROB, so that a scan of the row finds every larger (invalid) value. `best` is an
    upper bound of the score of a label with log-probability 0.
    """
    slack = 1e-6 * (abs(np.float64(floor)) + abs(best)) + 1e-5
    return np.float32(min(np.float64(floor) - best - slack, np.float64(numerics.MOST_LOG_PROB)))


@linked
def note_bounds(beam, size, fusion):
    """Store upper bounds of the next token's LM and boosting scores, except for arcs that are offered one by one."""
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
    """Return whether the search offers the labels of the LM state's arcs one by one before it scans the row."""
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


# ------------------------------------------------------------------------------------ merge=prefix


@linked
def _goes_on_alike(beam, size, hypothesis):
    """Return whether a slot below `size` has the same last token and states, so that the same scores follow."""
    for i in range(size):
        is_alike = beam[i].lm_state == hypothesis.lm_state and beam[i].boosting_state == hypothesis.boosting_state
        if is_alike and beam[i].last_label == hypothesis.last_label:
            return True
    return False


@linked
def offer_same_text(row, beam, size, k, params, fusion, candidates, count):
    """Offer the unchanged text k: by a blank, by its last token repeated, or by a new token after its parent."""
    blank = beam[k].score + row[params.blank_id]
    repeat, arrival, parent = numerics.IMPOSSIBLE, numerics.IMPOSSIBLE, np.int64(-1)
    if beam[k].length > 0:
        v = beam[k].last_label
        repeat = beam[k].token_score + row[v]
        parent = find_text(beam, size, beam[k].parent_hash, beam[k].length - 1)
        if parent >= 0:
            base = score_before(beam[parent], v) + row[v] + params.beam_beta
            arrival, _, _ = fused(base, beam[parent], v, np.float32(0), numerics.IMPOSSIBLE, params, fusion)
    token = numerics.log_add(repeat, arrival)
    # the back-pointer follows the likeliest of the three
    origin, choice = np.int64(k), 2 * np.int64(params.blank_id)
    if arrival > blank and arrival > repeat:
        origin, choice = parent, 2 * np.int64(beam[k].last_label) + 1
    elif repeat > blank:
        choice = 2 * np.int64(beam[k].last_label)
    score, lm_state, boosting_state = numerics.log_add(blank, token), beam[k].lm_state, beam[k].boosting_state
    slot, count = numerics.insert(candidates, count, score, origin, choice, lm_state, boosting_state)
    if slot >= 0:
        candidates.items[slot].blank_score = blank
        candidates.items[slot].token_score = token
        candidates.items[slot].same_text_as = k
    return count


@linked
def find_text(beam, size, text_hash, length):
    """Return the slot below `size` with this text, or -1."""
    for i in range(size):
        if beam[i].text_hash == text_hash and beam[i].length == length:
            return i
    return -1
