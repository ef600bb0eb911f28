"""N-best lists of a beam: ranking, trace-back through the tree of tokens, parts of a score."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays, UtteranceFusion
from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.log_space import IMPOSSIBLE
from nemo_gpu_decoding.search.transducer.records import NODE, ROOT, SearchParams


@compiled
def rank(rows, state, fusions, final, score_norm, order, scores):
    """The N best hypotheses of the n utterances `rows` with different texts.

    Fills order [n, N] with their slots, best first, -1 where there are fewer, and scores [n, N]. `final`: the
    utterances have ended, and bonuses of unfinished phrases are subtracted. As in NeMo's searches, the LM's
    end-of-sentence weight is not added.
    """
    for r in range(order.shape[0]):
        b = rows[r]
        score = np.empty(max(0, state.counters[b].size), np.float32)
        for k in range(len(score)):
            hypothesis = state.beam[b, k]
            score[k] = hypothesis.score
            if final and fusions.boosting_weights[b] > 0:
                refund = fusions.boosting.states[hypothesis.boosting_state].final_weight
                score[k] += fusions.boosting_weights[b] * refund
        _drop_equal_texts(state.beam[b], score)
        rating = score.copy()  # the sort key
        if score_norm:
            for k in range(len(score)):
                rating[k] /= np.float32(state.beam[b, k].length + 1)
        for n in range(order.shape[1]):
            best = -1
            for k in range(len(score)):
                if score[k] > IMPOSSIBLE and (best < 0 or rating[k] > rating[best]):
                    best = k
            order[r, n] = best
            if best < 0:
                continue
            scores[r, n] = score[best]
            score[best] = IMPOSSIBLE


@compiled
def _drop_equal_texts(beam, score):
    """Keep the best hypothesis of each text; in TDT two of a text may differ in their frames."""
    for k in range(len(score)):
        for i in range(k):
            if beam[i].text_hash == beam[k].text_hash and beam[i].length == beam[k].length:
                score[k if score[i] >= score[k] else i] = IMPOSSIBLE


@compiled
def trace_back(nodes, node):
    """The nodes on the path from the root to `node`, in that order, [n] NODE."""
    count, before = 0, node
    while before != ROOT:
        count += 1
        before = nodes[before].parent
    path = np.empty(count, NODE)
    for i in range(count - 1, -1, -1):
        path[i] = nodes[node]
        node = nodes[node].parent
    return path


@compiled
def tokens_between(nodes, ancestor, node, vocab_size):
    """Number of tokens on the path from an ancestor to a node."""
    count = 0
    while node != ancestor:
        count += nodes[node].label < vocab_size
        node = nodes[node].parent
    return count


def path_fields(steps: np.ndarray, params: SearchParams) -> dict[str, np.ndarray]:
    """Fields of a `Path` from its NODEs `steps`."""
    emitted = steps[steps["label"] < params.vocab_size]
    durations = emitted["duration"].copy()
    found = {
        "tokens": emitted["label"].copy(),
        "frames": emitted["frame"].copy(),
        "repeats": np.maximum(durations, 1),
        "token_confidence": np.exp(emitted["log_prob"]),
    }
    if params.timed:
        found["durations"] = durations
    if params.alignments:
        names = {"alignment": "label", "alignment_log_probs": "log_prob", "alignment_frames": "frame"}
        found |= {name: steps[field].copy() for name, field in names.items()}
    return found


@compiled
def drop_nodes(nodes, ancestor, beam):
    """Make an ancestor of all hypotheses the root, and drop the nodes that lead to no hypothesis, in place.

    Args:
        nodes: [N] NODE.
        beam: [size] HYPOTHESIS; their node numbers are updated.

    Returns:
        The number of remaining nodes.
    """
    numbers = np.zeros(len(nodes), np.int32)  # 1: leads to a hypothesis
    for k in range(len(beam)):
        node = beam[k].node
        while node != ancestor and numbers[node] == 0:
            numbers[node] = 1
            node = nodes[node].parent
    numbers[ancestor], count = ROOT, ROOT + 1
    for node in range(ancestor + 1, len(nodes)):
        if numbers[node] == 1:
            numbers[node] = count
            nodes[count] = nodes[node]
            nodes[count].parent = numbers[nodes[count].parent]
            count += 1
    for k in range(len(beam)):
        beam[k].node = numbers[beam[k].node]
    return count


def add_scores(
    tokens: np.ndarray, params: SearchParams, fusions: FusionArrays, b: int, scores: np.ndarray, final: bool
) -> None:
    """`add_fusion_scores` of utterance b; sums in double."""
    weights: Any = float(fusions.lm_weights[b]), float(fusions.boosting_weights[b])
    starts = fusions.lm_starts[b], fusions.boosting_starts[b]
    add_fusion_scores(tokens, params, UtteranceFusion(fusions.lm, fusions.boosting, *weights), starts, scores, final)


@compiled
def add_fusion_scores(tokens, params, fusion, starts, scores, final):
    """Add to scores [1] TEXT_SCORES the weighted LM and boosting scores of the next tokens.

    Args:
        starts: states of the automata before the whole text.
        final: the text has ended; add the refunds at its end.
    """
    own = scores[0]
    lm_score, lm_state = own.lm, starts[0] + own.lm_state
    boosting_score, boosting_state = own.boosting, starts[1] + own.boosting_state
    for label in tokens:
        if fusion.lm_weight > 0:
            weight, lm_state = lookup(fusion.lm, params.vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += fusion.lm_weight * weight
        if fusion.boosting_weight > 0:
            weight, boosting_state = lookup(fusion.boosting, params.vocab_size, boosting_state, label, ANY_WEIGHT)
            boosting_score += fusion.boosting_weight * weight
    if final and fusion.boosting_weight > 0:
        boosting_score += fusion.boosting_weight * fusion.boosting.states[boosting_state].final_weight
    own.lm, own.lm_state = lm_score, lm_state - starts[0]
    own.boosting, own.boosting_state = boosting_score, boosting_state - starts[1]
