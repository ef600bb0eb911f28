"""Make final and partial results: final weights, n-best order, trace-back, and the parts of scores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays, of_utterance
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.committed import CommittedTokens, worth_committing
from nemo_gpu_decoding.search.flexctc_beam.backpointers import Traces, trace_back
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE_SUM, SearchParams
from nemo_gpu_decoding.search.numerics import TEXT_SCORES, add_text_scores, merge_equal_texts, select_best


class FlexCTCNBest(NamedTuple):
    """The N best hypotheses that R utterances have, as arrays, best first.

    Traces begin after the committed frames.
    """

    rows: np.ndarray  # [R] int64, numbers of the utterances
    frames: np.ndarray  # [R] int64, frames read
    order: np.ndarray  # [R, N] int32, slots in the beam; -1 where there are fewer
    scores: np.ndarray  # [R, N] float32
    without_final: np.ndarray  # [R] bool: the LM forbids the end, so scores have no final weights
    traces: Traces
    shared: np.ndarray  # [R] int64, number of first frames in which all live hypotheses share one path
    committed: list[CommittedTokens]  # [R]


def commit_shared(hypotheses: FlexCTCNBest, params: SearchParams, fusions: FusionArrays) -> None:
    """Commit the tokens before the last frame that all live hypotheses of a stream share."""
    for r, committed in enumerate(hypotheses.committed):
        end = int(hypotheses.shared[r])
        if hypotheses.order[r, 0] < 0 or not worth_committing(end - committed.frames):
            continue
        labels, *fields = (values[r, 0, : hypotheses.traces.lengths[r, 0]] for values in hypotheses.traces[1:5])
        frames, repeats = fields[:2]
        count = int(np.searchsorted(frames, end))
        if count and frames[count - 1] + repeats[count - 1] >= end:  # later frames may repeat this token
            count -= 1
            end = int(frames[count])
        names = ("tokens", "frames", "repeats", "token_confidence")
        new = {name: values[:count] for name, values in zip(names, (labels, *fields), strict=True)}
        if hypotheses.traces.alignment.size:
            part = slice(end - committed.frames)
            new |= {"alignment": hypotheses.traces.alignment[r, 0, part]}
            new |= {"alignment_log_probs": hypotheses.traces.alignment_log_probs[r, 0, part]}
        committed.columns.extend(new)
        _add_scores_of(labels[:count], params, fusions, hypotheses.rows[r], committed.scores)
        committed.frames = end


@compiled
def rank(which, rows, state, params, fusions, final, order, scores):
    """Sort the hypotheses of utterances rows[r], and keep the N best with different texts.

    Args:
        which: the indices r into rows that this thread handles.
        rows: [R] numbers of the utterances.
        final: add the final weights of LM and boosting, because the utterances have ended.
        order: [R, N] is filled with slots of the beam, best first; -1 where there are fewer.
        scores: [R, N] is filled with their scores.
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
        merge_equal_texts(beam, score, params.merge == MERGE_SUM)
        select_best(score, score, order[r], scores[r])
        scores[r] += np.float32(state.offsets[b])


@compiled
def trace_back_all(which, rows, first, state, params, order, traces):
    """Trace back the hypotheses order [R, N] of utterances rows[r] to frame first [R]; `which` as in `rank`."""
    for r in which:
        for n in range(order.shape[1]):
            if order[r, n] >= 0:
                frames_of = first[r], state.frames_done[rows[r]]
                trace_back(state.back_pointers, rows[r], frames_of, order[r, n], params.blank_id, traces, r, n)


def fusion_scores(hypotheses: FlexCTCNBest, params: SearchParams, fusions: FusionArrays, final: bool) -> np.ndarray:
    """Return LM and boosting scores of all hypotheses, [R, N] TEXT_SCORES.

    Args:
        hypotheses: the engine's hypotheses.
        params, fusions: options and fusion of the search.
        final: include final weights, except for utterances with `hypotheses.without_final`.
    """
    scores = np.zeros(hypotheses.order.shape, TEXT_SCORES)
    for r, committed in enumerate(hypotheses.committed):
        if committed.frames:
            scores[r] = committed.scores
    if fusions.utterances["lm_weight"].any() or fusions.utterances["boosting_weight"].any():
        ended = final & ~hypotheses.without_final
        _add_scores(hypotheses.rows, hypotheses.order, hypotheses.traces, params, fusions, ended, scores)
    return scores


@compiled
def _add_scores(rows, order, traces, params, fusions, ended, scores):
    for r in range(order.shape[0]):
        for n in range(order.shape[1]):
            if order[r, n] >= 0:
                tokens, sums = traces.tokens[r, n, : traces.lengths[r, n]], scores[r, n : n + 1]
                _add_scores_of(tokens, params, fusions, rows[r], sums)
                if ended[r]:
                    _add_final_weights(of_utterance(fusions, rows[r]), fusions.utterances[rows[r]], sums[0])


@compiled
def _add_scores_of(tokens, params, fusions, b, scores):
    """Run `add_text_scores` for utterance b."""
    starts = fusions.utterances[b].lm_start, fusions.utterances[b].boosting_start
    add_text_scores(tokens, params.vocab_size, params.blank_id, of_utterance(fusions, b), starts, scores)


@compiled
def _add_final_weights(fusion, utterance, sums):
    if fusion.lm_weight > 0:
        sums.lm += fusion.lm_weight * fusion.lm.states[utterance.lm_start + sums.lm_state].final_weight
    if fusion.boosting_weight > 0:
        end = fusion.boosting.states[utterance.boosting_start + sums.boosting_state]
        sums.boosting += fusion.boosting_weight * end.final_weight
