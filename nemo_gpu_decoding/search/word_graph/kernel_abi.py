"""Records, sizes and arguments of the word-graph kernels; `kernel_abi.cuh` is printed from here.

One kernel source serves two strategies: cuda_wfst, and with COMPOSE=1 paged_biglm, whose tokens have an
LM context in their key and whose names begin with LM here. Of what stands here without LM both make use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.records import dtype_of
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.graph.csr import EPSILON, GRAPH_ARC, GRAPH_STATE
from nemo_gpu_decoding.lm.on_device import lm_parameters
from nemo_gpu_decoding.lm.records import LM_STATE  # noqa: F401  of lm_parameters, to be printed
from nemo_gpu_decoding.search.word_graph import keys, records
from nemo_gpu_decoding.search.word_graph.large_lm import contexts, scorer
from nemo_gpu_decoding.search.word_graph.prune import BINS
from nemo_gpu_decoding.search.word_graph.records import SearchParams, StreamParams, token_capacity

# The types of log-probs that the kernels read as they are, and their names in CUDA C++.
LOG_PROB_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

THREADS = 512  # per block
CANDIDATES = 8192  # that are recombined together; at least 2 THREADS
LEAST_GROUPS = 1024
SORTED_BY_WARP = 64  # LM contexts of a group; of large_lm/contexts.cuh
STATIC_SHARED_BYTES = 1024  # what the kernel takes for itself with COMPOSE, at most
LM_QUERIES = 4096  # that are answered together
CACHED_SCORES = 8192  # scores that are kept, at least LM_QUERIES

# -------------------------------------------------------------------------------------- parameters


SEARCH_PARAMS = dtype_of(SearchParams)
STREAM_PARAMS = np.dtype(
    [
        ("boosting_states", np.int64),  # where its boosting automaton begins among all
        ("boosting_arcs", np.int64),
        *((name, kind) for name, (kind, *_) in (dtype_of(StreamParams).fields or {}).items()),
        ("difference_weight", np.float32),  # of the LM score difference (paged_biglm)
    ],
    align=True,
)

# ---------------------------------------------------------------------- what streams keep of frames

# What a token of paged_biglm is known by
LM_KEY = np.dtype([records.KEY, records.LM], align=True)
# A token between two frames
PLAIN_TOKEN = np.dtype([records.KEY, *records.TOKEN_FIELDS], align=True)
LM_TOKEN = np.dtype([("key", LM_KEY), *records.TOKEN_FIELDS], align=True)
# as the CPU has them
BACK_POINTER = records.BACK_POINTER
LINK = records.LINK
# How far an utterance has come
STREAM_COUNTERS = np.dtype(
    [
        ("tokens", np.int32),
        ("back_pointers", np.int32),
        ("half", np.int32),  # of the memory for tokens, in which they are
        ("status", np.int32),  # `Status` of graph.cuh
        ("needed", np.int32),  # BACK_POINTERS_FULL, LINKS_FULL: how many more the next frame may need
        ("begin", np.int32),  # frames of the chunk that were read
        *records.STREAM_TOTALS,
    ],
    align=True,
)


def _best_path(token: np.dtype) -> np.dtype:
    return np.dtype(
        [
            ("best", token),  # the cheapest
            ("ending", token),  # that with which the utterance ends best
            ("ends", np.int32),  # whether any token may end
            ("back_pointers", np.int32),  # of the path; above the capacity if there were more
            ("shared", np.int32),  # of these, the oldest, which are those of all tokens; 0 if final
        ],
        align=True,
    )


# The tokens that a best path is found with
PLAIN_BEST_PATH = _best_path(PLAIN_TOKEN)
LM_BEST_PATH = _best_path(LM_TOKEN)
# What the search of an utterance took so far (paged_biglm)
WORK = np.dtype([*scorer.WORK_FIELDS, *scorer.PAGING_FIELDS])

# -------------------------------------------------------------------------- a frame being worked on

# Where a candidate comes from
ORIGIN = dtype_of(keys.Origin)
# A token of the next frame before it is known whether another one with its key is better
_CANDIDATE = [
    ("cost", np.float32),
    ("origin", ORIGIN),
    ("entry", np.int32),  # of a table; while recombined: its slot, ~slot if it is to open it; or NO_ENTRY
]
PLAIN_CANDIDATE = np.dtype([records.KEY, *_CANDIDATE], align=True)
LM_CANDIDATE = np.dtype([("key", LM_KEY), *_CANDIDATE], align=True)
# The best candidate with a key
_ENTRY = [("best", np.uint64), ("cost", np.float32), ("origin", ORIGIN)]  # best: `Rank` of workspace.cuh
PLAIN_ENTRY = np.dtype([records.KEY, *_ENTRY], align=True)
LM_ENTRY = np.dtype([("key", LM_KEY), *_ENTRY], align=True)
# The best arc into a token group from a token with another last label than the best of all (normal)
SECOND = np.dtype([*_ENTRY, ("unused", np.int32, 2)], align=True)
# What the threads of a block count together
COUNTERS = np.dtype(
    [
        ("best", np.uint32),  # ordered key of the least cost of a candidate that is known
        ("num_candidates", np.int32),
        ("num_labels", np.int32),
        ("num_next_tokens", np.int32),
        ("num_groups", np.int32),
        ("full", np.int32),  # there were more keys than next tokens have capacity for: new ones are refused
        ("best_token", np.int32),  # of this frame
        ("kept", np.int32),
        ("num_back_pointers", np.int32),
        ("last_step", np.int32),
        ("num_links", np.int32),  # of this frame, beyond the stream's; above the capacity if there were more
        ("unused", np.int32),
    ]
)

# A token in a group: in its own state or after a closure arc
GROUP_TOKEN = np.dtype(
    [
        records.KEY,  # of the group: graph state, boosting state
        records.LM,  # before `olabel`
        ("olabel", np.int32),  # of the closure arc, or 0; the LMs were not queried for it
        ("cost", np.float32),  # by the small LM
        ("source", np.int32),  # token
        ("epsilon", np.int32),  # closure arc, or NONE
        ("context", np.int32),  # ~t: that of group token t
        ("next", np.int32),  # another token of the context, or NONE; only if links are kept
    ],
    align=True,
)
# Tokens of one group with one LM context and one pending word
LM_CONTEXT = np.dtype(
    [
        ("best", np.int32),  # group token
        ("second", np.int32),  # best with another last label, or NONE (topology normal)
        ("newest", np.int32),  # only if links are kept
        ("group", np.int32),  # ~c: that of context c
        ("queried", np.int32),  # its pending word was queried in this frame
        ("slot", np.int32),
        ("group_slot", np.int32),  # NONE: another context's
    ]
)
# LM contexts in one graph state and boosting state: arcs are looked at once for all
TOKEN_GROUP = np.dtype(
    [
        records.KEY,
        ("best", np.uint32),  # ordered key of the cost of its best context
        ("cost", np.float32),  # the same
        ("begin", np.int32),  # its contexts in `order`
        ("count", np.int32),
        ("placed", np.int32),
        ("pending", np.int32),  # a context has a pending word
        ("expands", np.int32),  # it has group arcs
        ("unused", np.int32),
    ],
    align=True,
)
# An arc that may survive at the cost of the best context of a group
GROUP_ARC = contexts.GROUP_ARC
# A deferred LM query: an arc and an LM context
LM_QUERY = np.dtype(
    [
        records.LM,  # before `olabel`
        ("olabel", np.int32),  # to be queried next, or 0
        ("slot", np.int32),  # of the answer; ~slot if it is to be looked up
        ("difference", np.float32),  # LM score difference of what was queried so far, weighted
        ("arc", np.int32),
        ("context", np.int32),
        ("unused", np.int32),
    ],
    align=True,
)
# A score of the LMs
CACHED_SCORE = scorer.CACHED_SCORE
# What the threads of a block count together, beside COUNTERS
LM_COUNTERS = np.dtype(
    [
        ("num_group_tokens", np.int32),
        ("num_contexts", np.int32),
        ("num_groups", np.int32),
        ("num_group_arcs", np.int32),
        ("num_queries", np.int32),
        ("num_cached", np.int32),  # scores, those of former frames included
        ("num_unanswered", np.int32),  # queries whose score is not cached
        ("num_large_groups", np.int32),  # that all threads sort together
        ("tightened_by", ORIGIN),  # the candidate that has tightened the cutoff; its source may be NONE
        # of this frame
        ("look_ups", np.int32),
        ("answered", np.int32),  # of these, by what the LMs have said before
        ("arc_visits", np.int32),
        ("expanded", np.int32),
        ("cache_hits", np.uint32),  # LookupCounters of paged.cuh
        ("cache_misses", np.uint32),
        ("cache_sectors", np.uint32),
    ]
)

# ------------------------------------------------------------------------------------------- sizes


class Capacity(NamedTuple):
    """Sizes of an utterance's buffers in global memory. Results depend on none of them but on that of
    `tokens`, which is the CPU's."""

    tokens: int  # of a frame, those that are pruned included
    candidates: int
    columns: int  # of the log-probs, V + 1
    groups: int  # with a large LM also group tokens and LM contexts
    token_slots: int  # of hash tables: powers of two
    group_slots: int
    seconds: int  # `groups` with topology normal without links, else 0
    group_arcs: int = 0  # what follows is for a large LM
    large_groups: int = 0
    queries: int = 0
    cached_scores: int = 0
    cache_slots: int = 0


CAPACITY = dtype_of(Capacity)


def capacity_for(max_active: int, columns: int, *, seconds: bool) -> Capacity:
    """What an utterance of cuda_wfst needs that keeps about `max_active` tokens."""
    groups = max(2 * max_active, LEAST_GROUPS)
    tokens, candidates = token_capacity(max_active), max(CANDIDATES, 2 * THREADS)
    return Capacity(
        tokens=tokens,
        candidates=candidates,
        columns=columns,
        groups=groups,
        # each candidate of a list may claim a slot before there is no capacity for it
        token_slots=slots_for(tokens + candidates),
        group_slots=slots_for(groups),
        seconds=groups * seconds,
    )


def lm_capacity_for(max_active: int, columns: int, doubled: int = 0) -> Capacity:
    """The same of paged_biglm.

    Args:
        doubled: how often groups and their arcs have turned out to be more.
    """
    groups = max(2 * max_active, LEAST_GROUPS) << doubled
    cached_scores = max(CACHED_SCORES, LM_QUERIES, THREADS)
    return capacity_for(max_active, columns, seconds=False)._replace(
        groups=groups,
        group_slots=slots_for(groups),
        group_arcs=2 * groups,
        large_groups=groups // SORTED_BY_WARP + 1,
        queries=max(LM_QUERIES, THREADS),
        cached_scores=cached_scores,
        cache_slots=slots_for(cached_scores),
    )


def slots_for(entries: int) -> int:
    """Slots of a hash table that is at most three quarters full, a power of two."""
    return 1 << (entries * 4 // 3).bit_length()


def working_bytes(token: np.dtype, buffers: Mapping[str, Tensor], capacity: Capacity) -> int:
    """Global memory of an utterance while a chunk is read, beside its back-pointers and links."""
    items = (math.prod(buffer_shape(tensor, 1, capacity)) for tensor in buffers.values())
    return 2 * capacity.tokens * token.itemsize + sum(items)


def buffer_shape(tensor: Tensor, batch: int, capacity: Capacity) -> tuple[int, ...]:
    """The shape in bytes of a buffer of `batch` utterances."""
    sizes = (getattr(capacity, str(axis)) for axis in tensor.shape[1:])
    return batch, *sizes, tensor.layout.record_bytes or tensor.layout.dtypes[0].itemsize


def shared_bytes(columns: int, log_prob_bytes: int, most_shared: int) -> tuple[int, int]:
    """Dynamic shared memory of a block of `advance`, and the part of it that one row takes; 0: rows do
    not fit and are read where they lie. The order is that of kernel.cu."""
    scratch = 8 * 32
    own = -(-(COUNTERS.itemsize + scratch + 4 * (BINS + 2 * (THREADS + 1))) // 16) * 16
    in_shared = -(-columns * log_prob_bytes // 16) * 16 + 16  # RowFetch::buffer_bytes
    row_bytes = in_shared if own + 2 * in_shared <= most_shared else 0
    return own + 2 * row_bytes, row_bytes


# --------------------------------------------------------------------------------------- arguments

_GRAPH = {
    "graph_states": Tensor(GRAPH_STATE, ("S",)),
    "graph_epsilons": Tensor(EPSILON, ("E",)),
    "graph_word_sequences": Tensor(torch.int32, ("C", 2)),
    "boosting_states": Tensor(STATE, ("S'",)),
    "boosting_arcs": Tensor(ARC, ("A'",)),
}
_TABLES = {
    "token_slots": Tensor(torch.int32, ("B", "token_slots"), written=True),  # zeros, as all slots
    "labels": Tensor(torch.int32, ("B", "columns"), written=True),
    "group_slots": Tensor(torch.int32, ("B", "group_slots"), written=True),
}
# What `advance` works in; results do not depend on what was there before, but slots must be zeros
PLAIN_BUFFERS = {
    **_TABLES,
    "token_entries": Tensor(PLAIN_ENTRY, ("B", "tokens"), written=True),
    "candidates": Tensor(PLAIN_CANDIDATE, ("B", "candidates"), written=True),
    "group_entries": Tensor(PLAIN_ENTRY, ("B", "groups"), written=True),
    "group_seconds": Tensor(SECOND, ("B", "seconds"), written=True),
}
LM_BUFFERS = {
    **_TABLES,
    "token_entries": Tensor(LM_ENTRY, ("B", "tokens"), written=True),
    "candidates": Tensor(LM_CANDIDATE, ("B", "candidates"), written=True),
    "group_tokens": Tensor(GROUP_TOKEN, ("B", "groups"), written=True),
    "contexts": Tensor(LM_CONTEXT, ("B", "groups"), written=True),
    "groups": Tensor(TOKEN_GROUP, ("B", "groups"), written=True),
    "order": Tensor(torch.int64, ("B", "groups"), written=True),
    "large_groups": Tensor(torch.int32, ("B", "large_groups"), written=True),
    "context_slots": Tensor(torch.int32, ("B", "group_slots"), written=True),
    "group_arcs": Tensor(GROUP_ARC, ("B", "group_arcs"), written=True),
    "queries": Tensor(LM_QUERY, ("B", "queries"), written=True),
    "unanswered": Tensor(torch.int32, ("B", "queries"), written=True),
    "cached_scores": Tensor(CACHED_SCORE, ("B", "cached_scores"), written=True),
    "cache_slots": Tensor(torch.int32, ("B", "cache_slots"), written=True),
}


# Both LMs, and the words of the graph in them
_LMS = {
    **lm_parameters("large"),
    **lm_parameters("small"),
    "labels_in_large": Tensor(torch.int64, ("words",)),
    "labels_in_small": Tensor(torch.int64, ("words",)),
    "is_difference": Scalar(np.bool_),
}


def _advance(token: np.dtype, buffers: Mapping[str, Tensor], **more: Tensor | Scalar) -> Signature:
    return Signature(
        "advance",
        {
            "log_probs": Tensor(tuple(LOG_PROB_TYPES), ("B", "T", "V+1")),
            "lengths": Tensor(torch.int64, ("B",)),
            "utterances": Tensor(STREAM_PARAMS, ("B",)),
            "tokens": Tensor(token, ("B", "held")),
            "counters": Tensor(STREAM_COUNTERS, ("B",)),
            "next_tokens": Tensor(token, ("B", 2, "tokens"), written=True),
            "next_counters": Tensor(STREAM_COUNTERS, ("B",), written=True),
            "back_pointers": Tensor(BACK_POINTER, ("B", "R"), written=True),
            "links": Tensor(LINK, ("B", "L"), written=True, optional=True),  # with LINKS=1
            **_GRAPH,
            "graph_arcs": Tensor(GRAPH_ARC, ("A",)),
            **more,
            **buffers,
            "params": Scalar(SEARCH_PARAMS),
            "capacity": Scalar(CAPACITY),
            "frames": Scalar(np.int32),  # T
            "held": Scalar(np.int32),
            "max_back_pointers": Scalar(np.int32),  # R
            "max_links": Scalar(np.int32),  # L
            "row_bytes": Scalar(np.int32),  # of a row in shared memory; 0: rows are read where they lie
        },
    )


# Reads the frames counters[b].begin .. lengths[b] of every utterance b.
PLAIN_ADVANCE = _advance(PLAIN_TOKEN, PLAIN_BUFFERS)
LM_ADVANCE = _advance(
    LM_TOKEN,
    LM_BUFFERS,
    work=Tensor(WORK, ("B",)),
    next_work=Tensor(WORK, ("B",), written=True),
    **_LMS,
    contexts_per_group=Scalar(np.int32),  # that are expanded
)


def _compact(token: np.dtype) -> Signature:
    return Signature(
        "compact",
        {
            "tokens": Tensor(token, ("B", "held"), written=True),
            "counters": Tensor(STREAM_COUNTERS, ("B",), written=True),
            "back_pointers": Tensor(BACK_POINTER, ("B", "R")),
            "kept": Tensor(BACK_POINTER, ("B", "capacity"), written=True),
            "numbers": Tensor(torch.int32, ("B", "R"), written=True),
            "held": Scalar(np.int32),
            "max_back_pointers": Scalar(np.int32),  # R
            "capacity": Scalar(np.int32),
        },
    )


# Drops the back-pointers that lead to no token.
PLAIN_COMPACT = _compact(PLAIN_TOKEN)
LM_COMPACT = _compact(LM_TOKEN)


def _trace_back(token: np.dtype, best_path: np.dtype, **more: Tensor | Scalar) -> Signature:
    return Signature(
        "best_path",
        {
            "rows": Tensor(torch.int32, ("A",)),  # utterances that results are wanted of
            "utterances": Tensor(STREAM_PARAMS, ("B",)),
            "tokens": Tensor(token, ("B", "held")),
            "counters": Tensor(STREAM_COUNTERS, ("B",)),
            "back_pointers": Tensor(BACK_POINTER, ("B", "R")),
            **_GRAPH,
            **more,
            "found": Tensor(best_path, ("A",), written=True),
            "paths": Tensor(BACK_POINTER, ("A", "capacity"), written=True),  # newest first
            "held": Scalar(np.int32),
            "max_back_pointers": Scalar(np.int32),  # R
            "capacity": Scalar(np.int32),
            "num_words": Scalar(np.int32),
            # follow the token that ends best, if any may end; else the best token
            "final": Scalar(np.bool_),
        },
    )


# Finds the tokens that best paths are about, and follows the back-pointers of one.
PLAIN_TRACE_BACK = _trace_back(PLAIN_TOKEN, PLAIN_BEST_PATH)
LM_TRACE_BACK = _trace_back(
    LM_TOKEN,
    LM_BEST_PATH,
    **_LMS,
    large_end=Scalar(np.int64),  # label of </s>, or NO_LABEL
    small_end=Scalar(np.int64),
)
