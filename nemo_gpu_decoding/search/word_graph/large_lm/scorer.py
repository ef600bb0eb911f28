"""Score words by the difference of the large and the small LM; find LM contexts after words, and dominated contexts.

The arcs of the graph carry the small LM's costs. At each word w the search adds

    lm_weight * large_lm_weight * (cost_large(w | h_large) - cost_small(w | h_small))

and at the end the same term for </s> [LET, section II; XLLM]. An LM scores a word that it does not list as <unk>.
An LM context is an int64: the large LM's state in the upper 32 bits, the small LM's state in the lower 32 bits.

**Dominance.** Two tokens in one graph state and boosting state have the same ways to go on, at costs that differ only
by the LM score differences of the next words. Suppose that, for any words, their differences after the first
token's LM context exceed those after the second token's by at most D. If the first token is cheaper by more than D,
every path from the second token costs more than the same path from the first token. So the search drops the second
token (`is_dominated`): composition "lazy" before a group expands its arcs (`contexts.py`), both after a word.

D is a sum over the back-off chains of both LM contexts to their common suffix. `context_bounds` computes the terms:
`over` is how much more, at most, any words cost after a state than after its back-off state, and `under` how much
less. Only the difference automaton (`pair.py`) has bounds. A search that keeps a lattice drops no token.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedArrays, arc_cost_and_target, arc_label, lookup
from nemo_gpu_decoding.search.word_graph.keys import hash_of
from nemo_gpu_decoding.search.word_graph.records import COUNTERS, LM

# An entry of the LM query cache: the LM score difference of an output label, unweighted
CACHED_SCORE = np.dtype([LM, ("lm_after", np.int64), ("olabel", np.int32), ("cost", np.float32)], align=True)
# Work of the search of one utterance
WORK_FIELDS = [
    ("look_ups", np.int64),  # LM queries
    ("query_hits", np.int64),  # LM queries that the LM query cache answered
    ("arc_visits", np.int64),
    ("groups", np.int64),  # expanded token groups
    ("expanded", np.int64),  # expanded LM contexts
]
# On a GPU: reads of the LMs' arcs from the host's memory, see `lm/on_device.py`
PAGING_FIELDS = [("cache_hits", np.int64), ("cache_misses", np.int64), ("cache_sectors", np.int64)]
# Here and in other records of large LMs the own fields come first. numba accepts a record in the place of another one
# with whose fields it begins
LM_COUNTERS = np.dtype([*WORK_FIELDS, *PAGING_FIELDS, *COUNTERS.descr])


class LmPair(NamedTuple):
    """The two LMs in the form that compiled code reads. W: number of words of the graph."""

    large: PackedArrays  # the difference automaton if `is_difference`
    small: PackedArrays  # unused if `is_difference`
    is_difference: bool
    large_labels: np.ndarray  # [W] int64, the large LM's label of each word, or NO_LABEL
    small_labels: np.ndarray  # [W] int64
    large_end: int  # label of </s>; NO_LABEL: the end of an utterance costs nothing
    small_end: int
    start: int  # LM context at the begin of an utterance, see `lm_of`
    bounds: np.ndarray  # [states of `large`] CONTEXT_BOUNDS; empty without a difference automaton


class LmScorer(NamedTuple):
    """The LMs of an utterance, and the weight of their difference. In compiled code, its name is `lm`."""

    lms: LmPair
    difference_weight: np.float32  # lm_weight * large_lm_weight
    group_size: int  # most LM contexts that the search expands of a token group


@no_refcount
def lm_of(large, small):
    return (np.int64(large) << 32) | np.int64(small)


@linked
def large_of(context):
    return np.int64(context) >> 32


@linked
def small_of(context):
    return np.int64(context) & 0xFFFFFFFF


@linked
def is_dominated(gap, context, other, search, lm):
    """Return whether a token with LM context `other` is dominated by one with `context` that costs less by `gap`."""
    bounds, weight, most = lm.lms.bounds, lm.difference_weight, np.float32(1e-3)  # for rounding errors
    if len(bounds) == 0 or search.params.keeps_links:
        return False
    first, second = large_of(context), large_of(other)
    while first != second and gap > most:
        if first > second:  # a back-off state has a lower number
            most += weight * bounds[np.uintp(first)].over
            first = np.int64(bounds[np.uintp(first)].backoff_to)
        else:
            most += weight * bounds[np.uintp(second)].under
            second = np.int64(bounds[np.uintp(second)].backoff_to)
    return gap > most


@linked
def difference_of_word(word, context, lms):
    """Return the LM score difference of one word, unweighted.

    Args:
        word: id of the word in the graph. A word without a label in the large LM costs 0 and keeps the context.
        context: int64, the LM context before the word.

    Returns:
        cost_large - cost_small as float32; the LM context after the word.
    """
    if lms.large_labels[word] == NO_LABEL:
        return np.float32(0.0), context
    cost, large = lookup(lms.large, large_of(context), lms.large_labels[word])
    if lms.is_difference:
        return cost, lm_of(large, 0)
    small_cost, small = lookup(lms.small, small_of(context), lms.small_labels[word])
    return cost - small_cost, lm_of(large, small)


@linked
def query(olabel, context, search, lm, work):
    """Return an output label's LM score difference, weighted by `lm.difference_weight`, and the LM context after it.

    The same queries recur, so the LM query cache keeps scores. It is direct-mapped: each slot has one score. A piece
    of an unknown word, or its end, is no query: the LMs score the word as <unk>, once, where the search enters it.
    """
    if search.params.num_spoken <= olabel < search.params.num_words:
        return np.float32(0.0), context
    frame, cache = work.frame[0], work.lm.cache
    frame.look_ups += 1
    slot = np.int64((hash_of(olabel, context) >> np.uint64(32)) & np.uint64(len(cache) - 1))
    cached = cache[slot]
    if cached.lm != context or cached.olabel != olabel:
        cached.lm, cached.olabel = context, olabel
        cached.cost, cached.lm_after = difference_of_label(olabel, context, search, lm)
    else:
        frame.query_hits += 1
    if lm.difference_weight == 0:  # 0 * inf would be NaN
        return np.float32(0.0), cached.lm_after
    return lm.difference_weight * cached.cost, cached.lm_after


@linked
def difference_of_label(olabel, context, search, lm):
    """Return the LM score difference of all words of an output label, unweighted, and the LM context after them."""
    graph, num_words, total = search.graph, search.params.num_words, np.float32(0.0)
    for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
        word = word_from_end(olabel, n, graph, num_words)
        cost, context = difference_of_word(word, context, lm.lms)
        total += cost
    return total, context


# Bounds of a state of the difference automaton
CONTEXT_BOUNDS = np.dtype([("backoff_to", np.uint32), ("over", np.float32), ("under", np.float32)])


def context_bounds(lm: PackedArrays) -> np.ndarray:
    """Return the bounds [S] CONTEXT_BOUNDS of the S states of a back-off automaton."""
    bounds = np.empty(len(lm.states) - 1, CONTEXT_BOUNDS)
    bounds["backoff_to"], bounds["over"], bounds["under"] = lm.states["backoff_to"][:-1], np.inf, np.inf
    _fill_bounds(lm, bounds)
    return bounds


@compiled
def _fill_bounds(lm, bounds):
    """Fill `over` and `under`, which contain infinity before the call.

    Longer contexts have higher numbers, and the target of an arc is longer than its source by one word at most. So the
    bounds that a state needs are known.
    """
    bounds[0].over = bounds[0].under = 0
    for state in range(len(bounds) - 1, 0, -1):
        shorter = np.int64(bounds[state].backoff_to)
        backoff = np.float64(lm.states[state].backoff_cost)
        over, under = max(0.0, backoff), max(0.0, -backoff)
        for arc in range(np.int64(lm.states[state].arc_begin), np.int64(lm.states[state + 1].arc_begin)):
            cost, target = arc_cost_and_target(lm, arc)
            shorter_cost, at = lookup(lm, shorter, arc_label(lm, arc))
            more = np.float64(cost) - shorter_cost
            less = -more
            while target > at:  # the target of the shorter context is a suffix of this one
                more += bounds[target].over
                less += bounds[target].under
                target = np.int64(bounds[target].backoff_to)
            over, under = max(over, more), max(under, less)
        bounds[state].over, bounds[state].under = over, under
