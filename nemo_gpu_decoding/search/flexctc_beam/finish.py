"""The end of an utterance, or a look at it on the way: final weights, n-best order, trace-back.

Also splits scores by source: what LM and boosting gave to every hypothesis that is returned.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays, of_utterance
from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.flexctc_beam.backpointers import Traces, trace_back
from nemo_gpu_decoding.search.flexctc_beam.cpu import label_of
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE_SUM, SearchParams
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE, log_add


class Found(NamedTuple):
    """The N best hypotheses of R utterances as bare numbers, best first."""

    rows: np.ndarray  # [R] int64, numbers of the utterances
    frames: np.ndarray  # [R] int64, frames read
    order: np.ndarray  # [R, N] int32, slots in the beam; -1 where there are fewer
    scores: np.ndarray  # [R, N] float32
    without_final: np.ndarray  # [R] bool: the LM forbids the end, so final weights were left out
    traces: Traces
    shared: np.ndarray  # [R] int64, frames at the beginning that all live hypotheses share
    alignment: np.ndarray | None = None  # [R, N, T] int32, if the config asks for it
    alignment_log_probs: np.ndarray | None = None  # [R, N, T] float32


@compiled
def finish(which, rows, state, params, fusions, final, order, scores, traces):
    """Sort the hypotheses of every b = rows[r], r in `which`; trace back the N best with other texts.

    Fills order [R, N] with their slots (-1 where there are fewer), scores [R, N] and traces. `final`:
    add the final weights of LM and boosting (the utterance is over).
    """
    for r in which:
        b = rows[r]
        fusion, beam = of_utterance(fusions, b), state.beam[b]
        score = np.empty(state.sizes[b], np.float32)
        for k in range(len(score)):
            score[k] = beam[k].score
            if final and fusion.lm_weight > 0:
                score[k] += fusion.lm_weight * fusion.lm.states[beam[k].lm_state].final_weight
            if final and fusion.boosting_weight > 0:
                end = fusion.boosting.states[beam[k].boosting_state]
                score[k] += fusion.boosting_weight * end.final_weight
        _merge_equal_texts(beam, score, params.merge)
        for n in range(order.shape[1]):
            best = -1
            for k in range(len(score)):
                if score[k] > IMPOSSIBLE and (best < 0 or score[k] > score[best]):
                    best = k
            order[r, n] = best
            if best < 0:
                break
            scores[r, n] = score[best]
            score[best] = IMPOSSIBLE
            trace_back(state.back_pointers, b, state.frames_done[b], best, params.blank_id, traces, r, n)


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


def fusion_scores(
    found: Found, params: SearchParams, fusions: FusionArrays, final: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted LM and boosting scores of all hypotheses, two arrays [R, N] float64.

    Args:
        found: the hypotheses.
        params, fusions: what they were decoded with.
        final: whether final weights are in their scores, where `found` doesn't say otherwise.
    """
    lm, boosting = np.zeros(found.order.shape), np.zeros(found.order.shape)
    if fusions.lm_weights.any() or fusions.boosting_weights.any():
        ended = final & ~found.without_final
        _add_scores(found.rows, found.order, found.traces, params, fusions, ended, lm, boosting)
    return lm, boosting


@compiled
def _add_scores(rows, order, traces, params, fusions, ended, lm_scores, boosting_scores):
    for r in range(order.shape[0]):
        b = rows[r]
        for n in range(order.shape[1]):
            if order[r, n] >= 0:
                tokens = traces.tokens[r, n, : traces.lengths[r, n]]
                lm_scores[r, n], boosting_scores[r, n] = _text_scores(
                    tokens, params, of_utterance(fusions, b), fusions.lm_starts[b],
                    fusions.boosting_starts[b], ended[r],
                )  # fmt: skip


@compiled
def _text_scores(tokens, params, fusion, lm_state, boosting_state, ended):
    """What LM and boosting gave to a text, weighted; if it has `ended` with their final weights."""
    lm_score, boosting_score = np.float64(0.0), np.float64(0.0)
    for column in tokens:
        label = label_of(column, params.blank_id)
        if fusion.lm_weight > 0:
            weight, lm_state = lookup(fusion.lm, params.vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += fusion.lm_weight * weight
        if fusion.boosting_weight > 0:
            weight, boosting_state = lookup(fusion.boosting, params.vocab_size, boosting_state, label, ANY_WEIGHT)
            boosting_score += fusion.boosting_weight * weight
    if ended and fusion.lm_weight > 0:
        lm_score += fusion.lm_weight * fusion.lm.states[lm_state].final_weight
    if ended and fusion.boosting_weight > 0:
        final_weight = fusion.boosting.states[boosting_state].final_weight
        boosting_score += fusion.boosting_weight * final_weight
    return lm_score, boosting_score
