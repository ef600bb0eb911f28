"""From the final beam back to hypotheses: ranking, and the way through the tree of tokens."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE
from nemo_gpu_decoding.search.transducer.beam import NODE, ROOT


@compiled
def rank(rows, batch, boosting, final, score_norm, order, scores):
    """The N best hypotheses of the n utterances `rows` with different texts.

    Fills order [n, N] with their slots, best first, -1 where there are fewer, and scores [n, N].
    `final`: the utterance is over; phrases that were not finished give back their bonus. (As in NeMo's
    searches, the LM's end-of-sentence weight is not added.)
    """
    for r in range(order.shape[0]):
        b = rows[r]
        score = np.empty(max(0, batch.sizes[b]), np.float32)
        for k in range(len(score)):
            hypothesis = batch.beam[b, k]
            score[k] = hypothesis.score
            if final and batch.boosting_weights[b] > 0:
                refund = boosting.states[hypothesis.boosting_state].final_weight
                score[k] += batch.boosting_weights[b] * refund
        _drop_equal_texts(batch.beam[b], score)
        for n in range(order.shape[1]):
            best = -1
            for k in range(len(score)):
                if score[k] > IMPOSSIBLE and (
                    best < 0
                    or _rated(batch, b, k, score, score_norm) > _rated(batch, b, best, score, score_norm)
                ):
                    best = k
            order[r, n] = best
            if best < 0:
                continue
            scores[r, n] = score[best]
            score[best] = IMPOSSIBLE


@compiled
def _rated(batch, b, k, score, score_norm):
    """What hypotheses are compared by."""
    if score_norm:
        return score[k] / np.float32(batch.beam[b, k].length + 1)
    return score[k]


@compiled
def _drop_equal_texts(beam, score):
    """Leave the best hypothesis of each text: in TDT two may differ in how far they reach."""
    for k in range(len(score)):
        for i in range(k):
            if beam[i].text_hash == beam[k].text_hash and beam[i].length == beam[k].length:
                score[k if score[i] >= score[k] else i] = IMPOSSIBLE


@compiled
def _depth(nodes, node):
    count = 0
    while node != ROOT:
        count += 1
        node = nodes[node].parent
    return count


@compiled
def trace_back(nodes, node):
    """The nodes on the way from the root to `node`, in that order, [n] NODE."""
    count = _depth(nodes, node)
    path = np.empty(count, NODE)
    for i in range(count - 1, -1, -1):
        path[i] = nodes[node]
        node = nodes[node].parent
    return path


@compiled
def fusion_parts(tokens, search, lm, boosting, lm_state, boosting_state, final):
    """What LM and boosting contributed to a text, weighted; with `final` the refunds at its end too."""
    lm_score, boosting_score = np.float64(0.0), np.float64(0.0)
    for label in tokens:
        if search.lm_weight > 0:
            weight, lm_state = lookup(lm, search.vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += search.lm_weight * weight
        if search.boosting_weight > 0:
            weight, boosting_state = lookup(
                boosting, search.vocab_size, boosting_state, label, ANY_WEIGHT
            )
            boosting_score += search.boosting_weight * weight
    if final and search.boosting_weight > 0:
        boosting_score += search.boosting_weight * boosting.states[boosting_state].final_weight
    return lm_score, boosting_score
