"""Declare records, sizes and arguments of the word-graph kernels; `kernel_abi.cuh` is generated from this file.

The same kernel sources serve cuda_wfst and, with COMPOSE=1, paged_biglm, whose tokens have an LM context in their key.
Names that begin with PLAIN belong to cuda_wfst, names that begin with LM to paged_biglm, and all others to both.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.records import dtype_of
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.graph.csr import EPSILON, GRAPH_ARC, GRAPH_STATE
from nemo_gpu_decoding.lm.on_device import lm_parameters
from nemo_gpu_decoding.lm.records import LM_STATE  # noqa: F401  (the header needs it for lm_parameters)
from nemo_gpu_decoding.search.inputs import rows_in_shared_memory
from nemo_gpu_decoding.search.word_graph import keys, records
from nemo_gpu_decoding.search.word_graph.large_lm import contexts, scorer
from nemo_gpu_decoding.search.word_graph.prune import BINS
from nemo_gpu_decoding.search.word_graph.records import token_capacity

THREADS = 512  # per block
CANDIDATES = 8192  # length of the list before recombination, at least 2 THREADS
LEAST_GROUPS = 1024  # smallest capacity for groups
SORTED_BY_WARP = 64  # most LM contexts of a group that one warp sorts, see large_lm/contexts.cuh
STATIC_SHARED_BYTES = 1024  # upper bound of the kernel's static shared memory with COMPOSE
LM_QUERIES = 4096  # LM queries per batch
CACHED_SCORES = 8192  # entries of the LM query cache, at least LM_QUERIES

ALIGNED = {"align": 16}  # one instruction loads 16 bytes of a record

# -------------------------------------------------------------------------------------- parameters

SEARCH_PARAMS = dtype_of(records.SearchParams)
STREAM_PARAMS = np.dtype(
    [
        ("boosting_states", np.int64),  # first state of its boosting automaton in the states of all
        ("boosting_arcs", np.int64),
        ("graph_states", np.int64),  # first state of its graph in `graph_states`
        *((name, kind) for name, (kind, *_) in (dtype_of(records.StreamParams).fields or {}).items()),
        ("difference_weight", np.float32),  # of the LM score difference (paged_biglm)
    ],
    align=True,
)

# ---------------------------------------------------------------------- what streams keep of frames

# The key of a token of paged_biglm
LM_KEY = np.dtype([records.KEY, records.LM], align=True)
# A token between two frames
PLAIN_TOKEN = np.dtype([records.KEY, *records.TOKEN_FIELDS], align=True)
LM_TOKEN = np.dtype([("key", LM_KEY), *records.TOKEN_FIELDS], align=True, metadata=ALIGNED)
BACK_POINTER = records.BACK_POINTER
LINK = records.LINK
# The progress of an utterance
STREAM_COUNTERS = np.dtype(
    [
        ("tokens", np.int32),
        ("back_pointers", np.int32),
        ("place", np.int32),  # 0, 1 or 2: the place that has the current tokens, see kernel.cu
        ("status", np.int32),  # `Status` of keys.cuh
        ("needed", np.int32),  # after BACK_POINTERS_FULL or LINKS_FULL: entries that the next frame may need
        ("begin", np.int32),  # next frame of the chunk
        *records.STREAM_TOTALS,
    ],
    align=True,
)


def best_path_of(token: np.dtype) -> np.dtype:
    """Return the record of a best path, for one type of tokens."""
    return np.dtype(
        [
            ("best", token),  # the cheapest token
            ("ending", token),  # the token in which the utterance ends at the lowest cost
            ("ends", np.int32),  # whether the utterance may end in any token
            ("back_pointers", np.int32),  # length of the path; it may exceed the capacity
            ("shared", np.int32),  # length of the oldest part of the path that all tokens share; 0 if final
        ],
        align=True,
    )


PLAIN_BEST_PATH = best_path_of(PLAIN_TOKEN)
LM_BEST_PATH = best_path_of(LM_TOKEN)
# Counts of LM queries and of other work of an utterance (paged_biglm)
WORK = np.dtype([*scorer.WORK_FIELDS, *scorer.PAGING_FIELDS])

# --------------------------------------------------------------------------- inside of one frame

ORIGIN = dtype_of(keys.Origin)
# A token of the next frame before recombination
_CANDIDATE = [
    ("cost", np.float32),
    ("origin", ORIGIN),
    # index of its entry in the table; during recombination its slot, ~slot if it claimed the slot, or NO_ENTRY
    ("entry", np.int32),
]
PLAIN_CANDIDATE = np.dtype([records.KEY, *_CANDIDATE], align=True, metadata=ALIGNED)
LM_CANDIDATE = np.dtype([("key", LM_KEY), *_CANDIDATE], align=True)
# The best candidate with a key
_ENTRY = [("best", np.uint64), ("cost", np.float32), ("origin", ORIGIN)]  # best: `Rank` of workspace.cuh
PLAIN_ENTRY = np.dtype([records.KEY, *_ENTRY], align=True, metadata=ALIGNED)
LM_ENTRY = np.dtype([("key", LM_KEY), *_ENTRY], align=True)
# The best way into a token group from a token with another last label than the best one (topology normal)
SECOND = np.dtype([*_ENTRY, ("unused", np.int32, 2)], align=True, metadata=ALIGNED)
# Counters that the threads of a block share
COUNTERS = np.dtype(
    [
        ("best", np.uint32),  # lowest cost of a candidate so far, as an ordered key
        ("num_candidates", np.int32),
        ("num_labels", np.int32),
        ("num_next_tokens", np.int32),
        ("num_groups", np.int32),
        ("full", np.int32),  # the keys exceed the capacity for next tokens; further keys were refused
        ("best_token", np.int32),  # index of the best token of this frame
        ("kept", np.int32),
        ("num_back_pointers", np.int32),
        ("last_bin", np.int32),
        ("num_links", np.int32),  # links of this frame; they may exceed the capacity
        ("unused", np.int32),
    ]
)

# A token in a group: in its own state or after a closure arc
GROUP_TOKEN = np.dtype(
    [
        records.KEY,  # of the group: graph state, boosting state
        records.LM,  # before `olabel`
        ("olabel", np.int32),  # word of the closure arc that the LMs were not queried for yet, or 0
        ("cost", np.float32),  # by the small LM
        ("source", np.int32),  # token
        ("epsilon", np.int32),  # closure arc, or NONE
        ("context", np.int32),  # ~t: the context of group token t
        ("next", np.int32),  # next token of the context, or NONE; for lattices only
    ],
    align=True,
)
# Tokens of one group with one LM context and one pending word
LM_CONTEXT = np.dtype(
    [
        ("best", np.int32),  # group token
        ("second", np.int32),  # best group token with another last label, or NONE (topology normal)
        ("newest", np.int32),  # newest group token; for lattices only
        ("group", np.int32),  # ~c: the group of context c
        ("queried", np.int32),  # its pending word was queried in this frame
        ("slot", np.int32),
        ("group_slot", np.int32),  # NONE: another context has it
    ]
)
# The LM contexts in one graph state and boosting state; they share the work on arcs
TOKEN_GROUP = np.dtype(
    [
        records.KEY,
        ("best", np.uint32),  # cost of its best context, as an ordered key
        ("cost", np.float32),  # the same
        ("begin", np.int32),  # first of its contexts in `order`
        ("count", np.int32),
        ("placed", np.int32),
        ("pending", np.int32),  # a context has a pending word
        ("expands", np.int32),  # it has group arcs
        ("unused", np.int32),
    ],
    align=True,
)
# An arc that may stay below the cutoff from the best context of a group
GROUP_ARC = contexts.GROUP_ARC
# A deferred LM query: an arc and an LM context
LM_QUERY = np.dtype(
    [
        records.LM,  # before `olabel`
        ("olabel", np.int32),  # the next word to query, or 0
        ("slot", np.int32),  # slot of the answer; ~slot: not looked up yet
        ("difference", np.float32),  # weighted LM score difference of the words so far
        ("arc", np.int32),
        ("context", np.int32),
        ("unused", np.int32),
    ],
    align=True,
    metadata=ALIGNED,
)
CACHED_SCORE = scorer.CACHED_SCORE
# Further counters that the threads of a block share
LM_COUNTERS = np.dtype(
    [
        ("num_group_tokens", np.int32),
        ("num_contexts", np.int32),
        ("num_groups", np.int32),
        ("num_group_arcs", np.int32),
        ("num_queries", np.int32),
        ("num_cached", np.int32),  # scores in the LM query cache
        ("num_unanswered", np.int32),  # queries whose score is not cached
        ("num_large_groups", np.int32),  # groups that all threads sort together
        ("tightened_by", ORIGIN),  # the candidate that tightened the cutoff; its source may be NONE
        # counts of this frame
        ("look_ups", np.int32),
        ("answered", np.int32),  # look-ups that the LM query cache answered
        ("arc_visits", np.int32),
        ("expanded", np.int32),
        ("cache_hits", np.uint32),  # LookupCounters of paged.cuh
        ("cache_misses", np.uint32),
        ("cache_sectors", np.uint32),
    ]
)

# ------------------------------------------------------------------------------------------- sizes


class Capacity(NamedTuple):
    """The sizes of an utterance's buffers in global memory. Only the size `tokens` affects results, as on CPUs."""

    tokens: int  # tokens of a frame before pruning
    candidates: int
    columns: int  # V + 1
    groups: int  # with a large LM also the number of group tokens and of LM contexts
    token_slots: int  # sizes of hash tables: powers of two
    group_slots: int
    seconds: int  # `groups` with topology normal without links, else 0
    group_arcs: int = 0  # from here on: with a large LM
    large_groups: int = 0
    queries: int = 0
    cached_scores: int = 0
    cache_slots: int = 0


CAPACITY = dtype_of(Capacity)


def capacity_for(max_active: int, columns: int, *, seconds: bool) -> Capacity:
    """Return the sizes of the buffers for an utterance of cuda_wfst."""
    groups = max(2 * max_active, LEAST_GROUPS)
    tokens, candidates = token_capacity(max_active), max(CANDIDATES, 2 * THREADS)
    return Capacity(
        tokens=tokens,
        candidates=candidates,
        columns=columns,
        groups=groups,
        # each candidate of the list may claim a slot before the capacity is checked
        token_slots=slots_for(tokens + candidates),
        group_slots=slots_for(groups),
        seconds=groups * seconds,
    )


def lm_capacity_for(max_active: int, columns: int, doubled: int = 0) -> Capacity:
    """Return buffer sizes for an utterance of paged_biglm; `doubled`: how often groups or group arcs did not fit."""
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
    """Return the size of a hash table, a power of two, so that the table is at most three quarters full."""
    return 1 << (entries * 4 // 3).bit_length()


def buffer_shape(tensor: Tensor, batch: int, capacity: Capacity) -> tuple[int, ...]:
    """Return the shape in bytes of a buffer of `batch` utterances."""
    sizes = (getattr(capacity, str(axis)) for axis in tensor.shape[1:])
    return batch, *sizes, tensor.layout.record_bytes or tensor.layout.dtypes[0].itemsize


def shared_bytes(columns: int, log_prob_bytes: int, most_shared: int) -> tuple[int, int]:
    """Return the bytes of dynamic shared memory of a block of `advance`, and how many rows of log-probs fit in it.

    The layout is that of `open_workspace` in kernel.cu.
    """
    scratch = 8 * 32
    fixed = -(-(COUNTERS.itemsize + scratch + 4 * (BINS + 2 * (THREADS + 1))) // 16) * 16
    rows, in_rows = rows_in_shared_memory(columns, log_prob_bytes, most_shared - fixed)
    return fixed + in_rows, rows


# --------------------------------------------------------------------------------------- arguments

_GRAPH = {
    "graph_states": Tensor(GRAPH_STATE, ("S",)),
    "graph_epsilons": Tensor(EPSILON, ("E",)),
    "graph_word_sequences": Tensor(torch.int32, ("C", 2)),
    "boosting_states": Tensor(STATE, ("S'",)),
    "boosting_arcs": Tensor(ARC, ("A'",)),
}
_TABLES = {
    "token_slots": Tensor(torch.int32, ("B", "token_slots"), written=True),
    "labels": Tensor(torch.int32, ("B", "columns"), written=True),
    "group_slots": Tensor(torch.int32, ("B", "group_slots"), written=True),
}
# The buffers of `advance`. Slots must be zeros; other contents do not matter
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
            "log_probs": Tensor(tuple(FLOAT_TYPES), ("B", "T", "V+1")),
            "lengths": Tensor(torch.int64, ("B",)),
            "utterances": Tensor(STREAM_PARAMS, ("B",)),
            "tokens": Tensor(token, ("B", 3, "tokens"), written=True),
            "counters": Tensor(STREAM_COUNTERS, ("B",)),
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
            "max_back_pointers": Scalar(np.int32),  # R
            "max_links": Scalar(np.int32),  # L
            "shared_rows": Scalar(np.int32),  # rows in shared memory; 0: rows stay in global memory
        },
    )


# Decodes the frames counters[b].begin .. lengths[b] - 1 of every utterance b
PLAIN_ADVANCE = _advance(PLAIN_TOKEN, PLAIN_BUFFERS)
LM_ADVANCE = _advance(
    LM_TOKEN,
    LM_BUFFERS,
    work=Tensor(WORK, ("B",)),
    next_work=Tensor(WORK, ("B",), written=True),
    **_LMS,
    contexts_per_group=Scalar(np.int32),  # most LM contexts of a group that are expanded
)


def _compact(token: np.dtype) -> Signature:
    return Signature(
        "compact",
        {
            "tokens": Tensor(token, ("B", 3, "held"), written=True),
            "counters": Tensor(STREAM_COUNTERS, ("B",), written=True),
            "back_pointers": Tensor(BACK_POINTER, ("B", "R")),
            "kept": Tensor(BACK_POINTER, ("B", "capacity"), written=True),
            "numbers": Tensor(torch.int32, ("B", "R"), written=True),
            "held": Scalar(np.int32),
            "max_back_pointers": Scalar(np.int32),  # R
            "capacity": Scalar(np.int32),
        },
    )


# Drops the back-pointers that no token needs
PLAIN_COMPACT = _compact(PLAIN_TOKEN)
LM_COMPACT = _compact(LM_TOKEN)


def _trace_back(token: np.dtype, best_path: np.dtype, **more: Tensor | Scalar) -> Signature:
    return Signature(
        "best_path",
        {
            "rows": Tensor(torch.int32, ("A",)),  # numbers of the utterances
            "utterances": Tensor(STREAM_PARAMS, ("B",)),
            "tokens": Tensor(token, ("B", 3, "held")),
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
            "final": Scalar(np.bool_),  # follow `ending` of the record if there is one, else `best`
        },
    )


# Finds the best token and the best end of utterances, and follows the back-pointers of one of them
PLAIN_TRACE_BACK = _trace_back(PLAIN_TOKEN, PLAIN_BEST_PATH)
LM_TRACE_BACK = _trace_back(
    LM_TOKEN,
    LM_BEST_PATH,
    **_LMS,
    large_end=Scalar(np.int64),  # label of </s>, or NO_LABEL
    small_end=Scalar(np.int64),
)
