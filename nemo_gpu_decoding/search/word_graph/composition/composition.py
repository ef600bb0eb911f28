"""What the large LM makes of a word: the difference of both LMs, and the state of both after it.

A path through the small LM's graph has paid the small LM's costs. At each word w the search adds

    lm_weight * large_lm_weight * (cost_large(w | h_large) - cost_small(w | h_small))

and at the end the same for </s> [LET, section II; XLLM]. Words that an LM does not list are its <unk>.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined, no_refcount
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedArrays, lookup
from nemo_gpu_decoding.search.word_graph.composition.tokens import (
    MEMO_SLOTS,
    hash_of,
    large_of,
    lm_of,
    small_of,
)


class Rescoring(NamedTuple):
    """Both LMs as compiled code sees them. W words of the graph."""

    large: PackedArrays  # or the difference of both, if there is one
    small: PackedArrays  # not looked at where `large` is the difference
    is_difference: bool
    large_labels: np.ndarray  # [W] int64, the large LM's label of each word
    small_labels: np.ndarray  # [W] int64
    large_end: int  # label of </s>, or NO_LABEL: ending costs nothing then
    small_end: int
    start: int  # where an utterance begins, see `tokens.lm_of`


@inlined
def _difference(large_label, small_label, lm, rescoring):
    """cost_large - cost_small of one label, unweighted, and both states after it."""
    cost, large = lookup(rescoring.large, large_of(lm), large_label)
    if rescoring.is_difference:
        return cost, lm_of(large, 0)
    small_cost, small = lookup(rescoring.small, small_of(lm), small_label)
    return cost - small_cost, lm_of(large, small)


@inlined
def ask(word, lm, front, search, graph, rescoring, memo):
    """Correction of a word label, weighted, and the LM states after it; `word` may be a compound.

    Answers are kept in `memo`, one for each slot: the same question comes again and again.
    """
    front.look_ups += 1
    slot = np.int64((hash_of(word, lm) >> np.uint64(32)) & np.uint64(MEMO_SLOTS - 1))
    answer = memo[slot]
    if answer.lm != lm or answer.word != word:
        _answer(answer, word, lm, search.num_words, graph, rescoring)
    else:
        front.memo_hits += 1
    if search.correction_weight == 0:  # an infinite difference would make it NaN
        return np.float32(0.0), answer.lm_after
    return search.correction_weight * answer.cost, answer.lm_after


@no_refcount
def _answer(answer, word, lm, num_words, graph, rescoring):
    answer.lm, answer.word = lm, word
    if word < num_words:
        labels = rescoring.large_labels[word], rescoring.small_labels[word]
        answer.cost, answer.lm_after = _difference(labels[0], labels[1], lm, rescoring)
    else:
        answer.cost, answer.lm_after = cost_of_label(word, lm, num_words, graph, rescoring)


@no_refcount
def cost_of_label(word, lm, num_words, graph, rescoring):
    """Difference of costs of a word label, and the LM states after it."""
    depth, first = 0, word  # a chain of words is compounded from the left
    while first >= num_words:
        first = graph.compounds[first - num_words, 0]
        depth += 1
    labels = rescoring.large_labels, rescoring.small_labels
    total, lm = _difference(labels[0][first], labels[1][first], lm, rescoring)
    for level in range(depth - 1, -1, -1):
        compound = word
        for _ in range(level):
            compound = graph.compounds[compound - num_words, 0]
        second = graph.compounds[compound - num_words, 1]
        cost, lm = _difference(labels[0][second], labels[1][second], lm, rescoring)
        total += cost
    return total, lm


@inlined
def _end_cost(lm, state, label):
    if label == NO_LABEL:
        return np.float32(0.0)
    cost, _ = lookup(lm, state, label)
    return cost


@no_refcount
def final_correction(lm, search, rescoring):
    """What the LMs' ends of sentence add, weighted."""
    if search.correction_weight == 0:
        return np.float32(0.0)
    cost = _end_cost(rescoring.large, large_of(lm), rescoring.large_end)
    if not rescoring.is_difference:
        cost -= _end_cost(rescoring.small, small_of(lm), rescoring.small_end)
    return search.correction_weight * cost


@compiled
def correction_of(words, final, search, rescoring):
    """The weighted sum of all corrections along words [N] int64 of the graph, float64."""
    total, lm = 0.0, np.int64(rescoring.start)
    for word in words:
        cost, lm = _difference(rescoring.large_labels[word], rescoring.small_labels[word], lm, rescoring)
        total += cost
    if search.correction_weight == 0:
        return 0.0
    total *= search.correction_weight
    if final:
        total += final_correction(lm, search, rescoring)
    return total
