"""What the large LM makes of a word: the LM score difference, and the LM context after it.

A path through the small LM's graph has paid the small LM's costs. At each word w the search adds

    lm_weight * large_lm_weight * (cost_large(w | h_large) - cost_small(w | h_small))

and at the end the same for </s> [LET, section II; XLLM]. Words that an LM does not list are its <unk>.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedArrays, lookup
from nemo_gpu_decoding.search.word_graph.keys import hash_of
from nemo_gpu_decoding.search.word_graph.records import COUNTERS, LM

# A score of the LMs, in the LM query cache
CACHED_SCORE = np.dtype([LM, ("lm_after", np.int64), ("olabel", np.int32), ("cost", np.float32)], align=True)
# What the search of an utterance took
WORK_FIELDS = [
    ("look_ups", np.int64),  # LM queries
    ("query_hits", np.int64),  # of these, answered by the LM query cache
    ("arc_visits", np.int64),
    ("groups", np.int64),  # that were expanded
    ("expanded", np.int64),  # LM contexts that were
]
# What it took to read the LMs' arcs from the host's memory, on a GPU; see `lm/on_device.py`
PAGING_FIELDS = [("cache_hits", np.int64), ("cache_misses", np.int64), ("cache_sectors", np.int64)]
LM_COUNTERS = np.dtype([*COUNTERS.descr, *WORK_FIELDS, *PAGING_FIELDS])


class LmPair(NamedTuple):
    """Both LMs as compiled code sees them. W words of the graph."""

    large: PackedArrays  # or the difference of both, if there is one
    small: PackedArrays  # not looked at where `large` is the difference
    is_difference: bool
    large_labels: np.ndarray  # [W] int64, the large LM's label of each word
    small_labels: np.ndarray  # [W] int64
    large_end: int  # label of </s>, or NO_LABEL: ending costs nothing then
    small_end: int
    start: int  # LM context that an utterance begins with, see `lm_of`


class LmScorer(NamedTuple):
    """The LMs of an utterance, and how much their difference counts. `lm` in compiled code."""

    lms: LmPair
    difference_weight: np.float32  # lm_weight * large_lm_weight
    group_size: int  # LM contexts of a group that are expanded


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
def difference_of_word(word, context, lms):
    """cost_large - cost_small of one word, unweighted, and the LM context after it; of no word nothing."""
    if lms.large_labels[word] == NO_LABEL:
        return np.float32(0.0), context
    cost, large = lookup(lms.large, large_of(context), lms.large_labels[word])
    if lms.is_difference:
        return cost, lm_of(large, 0)
    small_cost, small = lookup(lms.small, small_of(context), lms.small_labels[word])
    return cost - small_cost, lm_of(large, small)


@linked
def query(olabel, context, search, lm, work):
    """LM score difference of an output label, weighted, and the LM context after it.

    Scores are kept in the LM query cache, one for each slot: the same query comes again and again.
    """
    frame, cache = work.frame[0], work.lm.cache
    frame.look_ups += 1
    slot = np.int64((hash_of(olabel, context) >> np.uint64(32)) & np.uint64(len(cache) - 1))
    cached = cache[slot]
    if cached.lm != context or cached.olabel != olabel:
        cached.lm, cached.olabel = context, olabel
        cached.cost, cached.lm_after = difference_of_label(olabel, context, search, lm)
    else:
        frame.query_hits += 1
    if lm.difference_weight == 0:  # an infinite difference would make it NaN
        return np.float32(0.0), cached.lm_after
    return lm.difference_weight * cached.cost, cached.lm_after


@linked
def difference_of_label(olabel, context, search, lm):
    """LM score difference of an output label, unweighted, and the LM context after it."""
    graph, num_words, total = search.graph, search.params.num_words, np.float32(0.0)
    for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
        word = word_from_end(olabel, n, graph, num_words)
        cost, context = difference_of_word(word, context, lm.lms)
        total += cost
    return total, context
