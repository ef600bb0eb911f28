"""merge=prefix: the steps of textbook CTC prefix search with one slot per text [FlexCTC, section 3].

A text has two probabilities: of its alignments that end in a blank, and of those that end in its last token. A frame
leads to a text in three ways: by a blank, by a repetition of the last token, or by the last token as a new token after
the text without it. The third way may add to a text that is already in the beam. Every other extension is a new text,
so the bound of `frame.py` is valid here too.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.flexctc_beam.scoring import fused, score_before
from nemo_gpu_decoding.search.numerics import IMPOSSIBLE, insert, log_add


@linked
def offer_same_text(row, beam, size, k, params, fusion, candidates, count):
    """Offer the unchanged text k: by a blank, by its last token repeated, or by a new token after its parent."""
    blank = beam[k].score + row[params.blank_id]
    repeat, arrival, parent = IMPOSSIBLE, IMPOSSIBLE, np.int64(-1)
    if beam[k].length > 0:
        v = beam[k].last_label
        repeat = beam[k].token_score + row[v]
        parent = find_text(beam, size, beam[k].parent_hash, beam[k].length - 1)
        if parent >= 0:
            base = score_before(beam[parent], v) + row[v] + params.beam_beta
            arrival, _, _ = fused(base, beam[parent], v, np.float32(0), IMPOSSIBLE, params, fusion)
    token = log_add(repeat, arrival)
    # the back-pointer follows the likeliest of the three
    origin, choice = np.int64(k), 2 * np.int64(params.blank_id)
    if arrival > blank and arrival > repeat:
        origin, choice = parent, 2 * np.int64(beam[k].last_label) + 1
    elif repeat > blank:
        choice = 2 * np.int64(beam[k].last_label)
    score, lm_state, boosting_state = log_add(blank, token), beam[k].lm_state, beam[k].boosting_state
    slot, count = insert(candidates, count, score, origin, choice, lm_state, boosting_state)
    if slot >= 0:
        candidates.items[slot].blank_score = blank
        candidates.items[slot].token_score = token
        candidates.items[slot].same_text_as = k
    return count


@linked
def find_text(beam, size, text_hash, length):
    """The slot below `size` with this text, or -1."""
    for i in range(size):
        if beam[i].text_hash == text_hash and beam[i].length == length:
            return i
    return -1
