"""merge=prefix: textbook CTC prefix search with one slot per text [FlexCTC, section 3].

A text has two probabilities: of its alignments that end in a blank, and of those that end in its last token. A frame
leads to a text in three ways: by a blank, by a repetition of the last token, or by the last token as a new token after
the text without it. The third way may add to a text that is already in the beam; every other extension is a new text,
so that the bound of `frame.py` is valid here too.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.batch import of_utterance
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.flexctc_beam.candidates import floor_of, insert, least_log_prob
from nemo_gpu_decoding.search.flexctc_beam.frame import (
    best_new_score,
    bound_of,
    column_of,
    fused,
    note_bounds,
    offers_arcs,
    select,
)
from nemo_gpu_decoding.search.flexctc_beam.records import BAD_INPUT
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, MOST_LOG_PROB, log_add
from nemo_gpu_decoding.search.row_scan import next_label
from nemo_gpu_decoding.search.text_hash import extended_hash


@no_refcount
def advance_prefix(rows, log_probs, lengths, state, params, fusions, workspace):
    """`frame.advance` for merge=prefix."""
    beam, sizes, frames_done = state.beam, state.sizes, state.frames_done
    candidates, next_beam = workspace.candidates, workspace.next_beam
    for b in rows:
        own, fusion = beam[b], of_utterance(fusions, b)
        for i in range(lengths[b]):
            row = log_probs[b, i]
            count = _prefix_candidates(row, own, sizes[b], params, fusion, candidates)
            if count > 0:
                count = select(row, own, b, state, candidates, count, params, next_beam)
            sizes[b] = count
            if count <= 0:
                break
            frames_done[b] += 1


@linked
def _prefix_candidates(row, beam, size, params, fusion, candidates):
    """Fill the best texts of a frame for merge=prefix; returns their number, or BAD_INPUT."""
    count = 0
    for k in range(size):
        count = _offer_same_text(row, beam, size, k, params, fusion, candidates, count)
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
            base = _base_of(row, beam[k], v, params)
            lm_bound = fusion.lm_weight * fusion.lm.arcs[arc].weight
            if base + lm_bound + beam[k].boosting_bound < floor:
                continue
            count = _offer_new_text(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count)
            floor = floor_of(candidates, count, params)
    best = best_new_score(beam, size, params)
    v = next_label(row, 0, least_log_prob(floor, best))
    while v < row.shape[0]:
        if not row[v] <= MOST_LOG_PROB:
            return BAD_INPUT
        for k in range(size):
            if v == params.blank_id:
                continue
            base = _base_of(row, beam[k], v, params)
            if bound_of(base, beam[k]) < floor:
                continue
            lm_bound = beam[k].lm_bound
            count = _offer_new_text(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count)
            floor = floor_of(candidates, count, params)
        v = next_label(row, v + 1, least_log_prob(floor, best))
    return count


@linked
def _base_of(row, hypothesis, v, params):
    """Score of a new token without LM and boosting. After the same token it needs a blank between them."""
    before = hypothesis.blank_score if v == hypothesis.last_label else hypothesis.score
    return before + row[v] + params.beam_beta


@linked
def _offer_new_text(base, beam, size, k, v, lm_bound, floor, params, fusion, candidates, count):
    """Offer text k extended by token v, unless that text is in the beam: `_offer_same_text` counts it then."""
    if _find_text(beam, size, extended_hash(beam[k].text_hash, v), beam[k].length + 1) < 0:
        score, lm_state, boosting_state = fused(base, beam[k], np.int32(v), lm_bound, floor, params, fusion)
        slot, count = insert(candidates.items, candidates.rank, count, score, np.int32(k), np.int32(~v))
        if slot >= 0:
            candidates.items[slot].lm_state = lm_state
            candidates.items[slot].boosting_state = boosting_state
            candidates.items[slot].blank_score = IMPOSSIBLE
            candidates.items[slot].token_score = score
            candidates.items[slot].same_text_as = -1
    return count


@linked
def _offer_same_text(row, beam, size, k, params, fusion, candidates, count):
    """Offer the unchanged text k: by a blank, by its last token repeated, or by a new token after its parent."""
    blank = beam[k].score + row[params.blank_id]
    repeat, arrival, parent = IMPOSSIBLE, IMPOSSIBLE, np.int64(-1)
    if beam[k].length > 0:
        v = beam[k].last_label
        repeat = beam[k].token_score + row[v]
        parent = _find_text(beam, size, beam[k].parent_hash, beam[k].length - 1)
        if parent >= 0:
            before = beam[parent].blank_score if v == beam[parent].last_label else beam[parent].score
            base = before + row[v] + params.beam_beta
            arrival, _, _ = fused(base, beam[parent], v, np.float32(0), IMPOSSIBLE, params, fusion)
    token = log_add(repeat, arrival)
    # the back-pointer follows the likeliest of the three
    if arrival > blank and arrival > repeat:
        origin, label = parent, ~beam[k].last_label
    elif repeat > blank:
        origin, label = k, beam[k].last_label
    else:
        origin, label = k, np.int32(params.blank_id)
    slot, count = insert(candidates.items, candidates.rank, count, log_add(blank, token), np.int32(origin), label)
    if slot >= 0:
        candidates.items[slot].lm_state = beam[k].lm_state
        candidates.items[slot].boosting_state = beam[k].boosting_state
        candidates.items[slot].blank_score = blank
        candidates.items[slot].token_score = token
        candidates.items[slot].same_text_as = k
    return count


@linked
def _find_text(beam, size, text_hash, length):
    """The slot below `size` with this text, or -1."""
    for i in range(size):
        if beam[i].text_hash == text_hash and beam[i].length == length:
            return i
    return -1
