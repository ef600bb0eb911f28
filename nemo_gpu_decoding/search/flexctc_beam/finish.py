"""Make final and partial results: final weights, n-best order, trace-back, the parts of scores; commit tokens."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import BatchFusion, of_utterance
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.committed import CommittedTokens, worth_committing
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.flexctc_beam.backpointers import Traces, shared_frames, trace_back
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE_SUM, SearchParams
from nemo_gpu_decoding.search.numerics import add_text_scores, merge_equal_texts, select_best


class FlexCTCNBest(NamedTuple):
    """The N best hypotheses of R utterances, best first, as arrays. Traces begin after the committed frames."""

    rows: np.ndarray  # [R] int64, numbers of the utterances
    frames: np.ndarray  # [R] int64, frames read
    order: np.ndarray  # [R, N] int32, slots in the beam; -1 where there are fewer
    scores: np.ndarray  # [R, N] float32
    without_final: np.ndarray  # [R] bool: the LM forbids the end, so scores have no final weights
    traces: Traces
    shared: np.ndarray  # [R] int64, number of first frames in which all live hypotheses share one path
    committed: list[CommittedTokens]  # [R]


HYPOTHESIS_PARTS = np.dtype(
    [
        *((name, np.int64) for name in ("r", "n", "begin", "end")),
        *((name, np.float64) for name in ("score", "acoustic", "lm", "boosting", "insertion")),
    ]
)


class FlexCTCEngine(Engine):
    """The base class of the engines of both backends, with options, fusion, and the committed tokens of streams."""

    def __init__(self, config: FlexCTCConfig, params: SearchParams, fusion: BatchFusion) -> None:
        self._config, self._params, self._fusion = config, params, fusion
        self._committed = [CommittedTokens() for _ in range(len(fusion))]
        self._dropped = np.zeros(len(fusion), np.int64)  # committed frames whose back-pointers are dropped

    @abstractmethod
    def _drop(self, dropped: np.ndarray) -> np.ndarray:
        """Drop the back-pointers of the first dropped[b] frames of each stream; return the remaining frames, [n]."""

    def _frames_needed(self, needed: int, capacity: int, lengths: np.ndarray) -> int:
        """Return how many frames the back-pointers must hold to read `lengths` more: at most `needed`.

        If `needed` exceeds the capacity, all streams commit tokens and drop committed frames' back-pointers.
        """
        if needed <= capacity or not worth_committing(capacity):
            return needed
        self.commit(range(len(self._committed)))
        dropped = np.array([tokens.frames for tokens in self._committed]) - self._dropped
        needed = int((self._drop(dropped) + lengths).max())
        self._dropped += dropped
        # if dropping freed less than half, it would soon be due again
        return max(needed, capacity + 1) if 2 * needed > capacity else needed

    def commit(self, rows: Sequence[int]) -> None:
        """Commit the tokens before the last frame that all live hypotheses of a stream share."""
        hypotheses: FlexCTCNBest = self.results(rows, 1, final=False)
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
            committed.extend(new)
            params, given = self._params, (self._fusion.arrays, hypotheses.rows[r], np.float32(1.0), (False, False))
            add_text_scores(labels[:count], params.vocab_size, params.blank_id, *given, committed.scores)
            committed.frames = end

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        for b in rows:
            self._committed[b] = CommittedTokens()
        self._dropped[rows] = 0
        self._fusion = fusion


@compiled
def finish(which, rows, first, state, params, fusions, final, order, scores, without_final, traces, shared):
    """Fill fields of a `FlexCTCNBest`: sort the hypotheses of utterances rows[r], keep the N best, trace them back.

    Args:
        which: the indices r into rows that this thread handles.
        rows: [R] numbers of the utterances.
        first: [R] first frame of the traces.
        final: add the final weights of LM and boosting, because the utterances have ended.
    """
    for r in which:
        b = rows[r]
        fusion = of_utterance(fusions, b)
        order[r], scores[r] = -1, 0.0
        _rank(b, state, params, fusion, final, order[r], scores[r])
        if order[r, 0] < 0:  # the LM forbids the end after every hypothesis: return them without final weights
            without_final[r] = True
            _rank(b, state, params, fusion, False, order[r], scores[r])
        for n in range(order.shape[1]):
            if order[r, n] >= 0:
                frames_of = first[r], state.frames_done[b]
                trace_back(state.back_pointers, b, frames_of, order[r, n], params.blank_id, traces, r, n)
        if not final:
            shared[r] = shared_frames(state.back_pointers, b, state.frames_done[b], state.sizes[b])


@compiled
def _rank(b, state, params, fusion, final, order, scores):
    """Fill order [N] with the positions of hypotheses with different texts, best first, and fill scores [N]."""
    beam, score = state.beam[b], np.empty(state.sizes[b], np.float32)
    for k in range(len(score)):
        score[k] = beam[k].score
        if final and fusion.lm_weight > 0:
            score[k] += fusion.lm_weight * fusion.lm.states[beam[k].lm_state].final_weight
        if final and fusion.boosting_weight > 0:
            end = fusion.boosting.states[beam[k].boosting_state]
            score[k] += fusion.boosting_weight * end.final_weight
    merge_equal_texts(beam, score, params.merge == MERGE_SUM)
    select_best(score, score, order, scores)
    scores += np.float32(state.offsets[b])


@compiled
def without_gaps(rows, order, scores, traces, fused, before, ended, beam_beta, params, fusions):
    """Return the score parts of all hypotheses, and the concatenated tokens.

    Args:
        rows, order, scores, traces: of a `FlexCTCNBest`.
        fused: [R, N] TEXT_SCORES of the committed tokens; those of the traces are added.
        before: [R] number of committed tokens.
        ended: [R] whether to include final weights.

    Returns:
        [H] HYPOTHESIS_PARTS; [3, tokens] tokens, frames and repeats; [tokens] confidence.
    """
    parts, size = np.empty(np.sum(order >= 0), HYPOTHESIS_PARTS), np.sum(np.where(order >= 0, traces.lengths, 0))
    tokens, confidence, h, end = np.empty((3, size), np.int32), np.empty(size, np.float32), 0, 0
    for r in range(order.shape[0]):
        for n in range(order.shape[1]):
            if order[r, n] >= 0:
                part, begin, count, sums = parts[h], end, traces.lengths[r, n], fused[r, n : n + 1]
                h, end = h + 1, end + count
                tokens[0, begin:end], tokens[1, begin:end] = traces.tokens[r, n, :count], traces.frames[r, n, :count]
                tokens[2, begin:end] = traces.repeats[r, n, :count]
                confidence[begin:end] = traces.confidence[r, n, :count]
                columns, of_both, unit = tokens[0, begin:end], (ended[r], ended[r]), np.float32(1.0)
                add_text_scores(columns, params.vocab_size, params.blank_id, fusions, rows[r], unit, of_both, sums)
                part.r, part.n, part.begin, part.end, part.score = r, n, begin, end, scores[r, n]
                part.lm, part.boosting = sums[0].lm, sums[0].boosting
                part.insertion = beam_beta * (before[r] + count)
                part.acoustic = part.score - part.lm - part.boosting - part.insertion
    return parts, tokens, confidence
