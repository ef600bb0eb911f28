"""Define compiled functions that all CPU searches use: scores, hashes, labels, lists of candidates, n-best lists.

Scores are natural logarithms in float32.

A candidate is a hypothesis, `parent`, extended by a `choice`. A choice is one number per extension:

    flexctc_beam   2 * column of the log-probs + 1 for a new token; 2 * column for a blank or a repeated label
    transducers    label * D + index of the duration, for D durations; KEEP leaves the hypothesis unchanged

Candidates are in a total order: descending score, then ascending parent, then ascending choice. All runs and backends
therefore keep the same hypotheses, even among hypotheses with equal scores.
"""

import math
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import LANES, compiled, linked, not_below, trailing_zeros

IMPOSSIBLE = np.float32(-np.inf)
LARGEST = np.float32(np.finfo(np.float32).max)
MOST_LOG_PROB = np.float32(0.01)  # no log-probability exceeds it; above 0 because types such as bfloat16 round
HASH_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's MMIX generator

# Larger scores are subtracted from those of a beam. A sum of so many log-probs takes hours of speech
MOST_SCORE = np.float32(4096.0)


def grown(values: np.ndarray, needed: int) -> np.ndarray:
    """Return rows [n, N, ...] with room for `needed` entries each; a buffer that is too small is at least doubled."""
    rows, capacity, *shape = values.shape
    if needed <= capacity:
        return values
    larger = np.empty((rows, max(needed, 2 * capacity), *shape), values.dtype)
    larger[:, :capacity] = values
    return larger


@compiled
def log_add(a, b):
    """Compute log(exp(a) + exp(b)) in double and round once, so that all libraries and devices agree to the bit."""
    if a < b:
        a, b = b, a
    if b == IMPOSSIBLE:
        return a
    return np.float32(a + math.log1p(math.exp(np.float64(b) - np.float64(a))))


@compiled
def extended_hash(text_hash, label):
    """Return the 64-bit hash of a text that is extended by one token; equal texts of hypotheses have equal hashes."""
    return text_hash * HASH_MULTIPLIER + np.uint64(label + 1)


@linked
def label_of(column, blank_id):
    """Convert a column of the log-probs to a label of automata. Labels are numbered without the blank."""
    return np.int32(column - 1 if column > blank_id else column)


@linked
def column_of(label, blank_id):
    """Convert a label of automata to a column of the log-probs."""
    return np.int32(label + 1 if label >= blank_id else label)


@linked
def next_label(row, v, least):
    """Return the first label >= v whose log-prob is not below `least`, or the number of labels.

    NaN is never below `least`, so the scan stops at every bad value.
    """
    while v + LANES <= row.shape[0]:
        lanes = np.uint32(not_below(row, v, least))
        if lanes != 0:
            return v + np.int64(trailing_zeros(lanes))
        v += LANES
    while v < row.shape[0] and row[v] < least:
        v += 1
    return v


# ------------------------------------------------------------------------------ lists of candidates


class Candidates(NamedTuple):
    """The N best candidates that a search has seen so far."""

    # [N] records with the arguments of `insert` as fields, and others that a search adds; in no order
    items: np.ndarray
    rank: np.ndarray  # [N] int32, the slots of `items`, best first


@linked
def insert(candidates, count, score, parent, choice, lm_state, boosting_state):
    """Insert a candidate if it is possible and among the N best; return its position, or -1, and the new count.

    A candidate that is already in the list is not inserted again.
    """
    items, rank = candidates.items, candidates.rank
    if not score > IMPOSSIBLE:
        return np.int32(-1), count
    at = count
    while at > 0 and _is_better(score, parent, choice, items[rank[at - 1]]):
        at -= 1
    if at == rank.shape[0]:
        return np.int32(-1), count
    if at > 0 and items[rank[at - 1]].choice == choice and items[rank[at - 1]].parent == parent:
        return np.int32(-1), count
    slot = np.int32(count)
    if count == rank.shape[0]:
        slot = np.int32(rank[count - 1])
        count -= 1
    for i in range(count, at, -1):
        rank[i] = rank[i - 1]
    rank[at] = slot
    items[slot].score = score
    items[slot].parent = parent
    items[slot].choice = choice
    items[slot].lm_state = lm_state
    items[slot].boosting_state = boosting_state
    return slot, count + 1


@linked
def _is_better(score, parent, choice, other):
    if score != other.score:
        return score > other.score
    if parent != other.parent:
        return parent < other.parent
    return choice < other.choice


@linked
def floor_of(candidates, count, margin):
    """Return the least score of a useful candidate: the larger of the N-th best so far and the best minus `margin`."""
    if count == 0:
        return IMPOSSIBLE
    floor = candidates.items[candidates.rank[0]].score - margin
    if count < candidates.rank.shape[0]:
        return floor
    return max(floor, candidates.items[candidates.rank[count - 1]].score)


# ------------------------------------------------------------------------------------ n-best lists

# Weighted LM and boosting scores of a text, and the offsets of its states from the start states
TEXT_SCORES = np.dtype(
    [("lm", np.float64), ("boosting", np.float64), ("lm_state", np.int32), ("boosting_state", np.int32)]
)


@linked
def rebased(beam, size):
    """Return the number to subtract from a beam's scores so that float32 can tell them apart (mostly 0)."""
    return beam[0].score if size > 0 and MOST_SCORE < abs(beam[0].score) < LARGEST else np.float32(0.0)


@linked
def merge_equal_texts(beam, scores, adds):
    """Keep one hypothesis per text; the scores of all its duplicates become IMPOSSIBLE.

    Hypotheses of a text may differ in their last label (CTC) or in their frames (TDT).

    Args:
        scores: [size] of the hypotheses; changed in place.
        adds: whether to add the probabilities of a text's hypotheses; if not, the best score is kept.
    """
    for k in range(len(scores)):
        for i in range(k):
            if beam[i].text_hash == beam[k].text_hash and beam[i].length == beam[k].length:
                keep, drop = (i, k) if scores[i] >= scores[k] else (k, i)
                if adds:
                    scores[keep] = log_add(scores[keep], scores[drop])
                scores[drop] = IMPOSSIBLE


@linked
def select_best(ratings, scores, order, best_scores):
    """Select the N possible hypotheses with the highest ratings, in the order of their slots among equal ones.

    Args:
        ratings, scores: [size] of the hypotheses; the scores of selected ones become IMPOSSIBLE.
        order, best_scores: [N] are filled with slots and scores, best first; -1 ends the list if there are fewer.
    """
    for n in range(len(order)):
        best = -1
        for k in range(len(scores)):
            if scores[k] > IMPOSSIBLE and (best < 0 or ratings[k] > ratings[best]):
                best = k
        order[n] = best
        if best < 0:
            break
        best_scores[n] = scores[best]
        scores[best] = IMPOSSIBLE


@compiled
def add_text_scores(tokens, vocab_size, blank_id, fusions, b, unit, ended, scores):
    """Add the weighted LM and boosting scores of a text's next tokens to `scores`, [1] TEXT_SCORES.

    Args:
        tokens: [n] columns of the log-probs.
        fusions: the `FusionArrays` of a batch.
        b: number of the utterance.
        unit: 1 in the type of products; sums are double.
        ended: whether to add the final weight of the LM, and that of the boosting tree.
    """
    utterance, total = fusions.utterances[b], scores[0]
    lm_weight, boosting_weight = utterance.lm_weight * unit, utterance.boosting_weight * unit
    lm_score, lm_state = total.lm, utterance.lm_start + total.lm_state
    boosting_score, boosting_state = total.boosting, utterance.boosting_start + total.boosting_state
    for column in tokens:
        label = label_of(column, blank_id)
        if lm_weight > 0:
            weight, lm_state = lookup(fusions.lm, vocab_size, lm_state, label, ANY_WEIGHT)
            lm_score += lm_weight * weight
        if boosting_weight > 0:
            weight, boosting_state = lookup(fusions.boosting, vocab_size, boosting_state, label, ANY_WEIGHT)
            boosting_score += boosting_weight * weight
    if ended[0] and lm_weight > 0:
        lm_score += lm_weight * fusions.lm.states[lm_state].final_weight
    if ended[1] and boosting_weight > 0:
        boosting_score += boosting_weight * fusions.boosting.states[boosting_state].final_weight
    total.lm, total.lm_state = lm_score, lm_state - utterance.lm_start
    total.boosting, total.boosting_state = boosting_score, boosting_state - utterance.boosting_start
