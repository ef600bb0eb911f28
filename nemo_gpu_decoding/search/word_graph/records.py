"""Records, parameters and keys of the word-graph search.

A token is known by its key: state of the graph, state of the boosting automaton, last label; with a
large LM (names with LM) by its LM context as well: the states of both LMs in one number, that of the
large LM in the upper 32 bits. Of several candidates for one key the cheapest survives; equal costs are
decided by the arc, then by the cost before it, then by the key of the source. So no order of work
matters.

A token's past is a chain of back-pointers, one for each token of the text ("new label"), each pointing
to the one before. Example: "▁hel" in frame 3, "lo" in frame 5, two frames long:

    back-pointer  0                          1
    previous      -1                         0
    arc           that with label "▁hel"     that with label "lo"
    frame         3                          5
    run           0                          1 (frames of "▁hel")    the 2 of "lo" are in the token

With a large LM, tokens of one graph state (and boosting state) form a group, those of a group with the
same LM context one of its contexts. Example: three tokens in graph state 7 after "a b", "a c" (just
read) and "a c" (with a blank since) are one group with two contexts, the second with two tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import AutomatonArrays
from nemo_gpu_decoding.graph.csr import GraphArrays
from nemo_gpu_decoding.jit import inlined

BLANK_MOVE, REPEAT_MOVE = -2, -1  # in place of an arc
NEW_TOKEN = 0  # a move that begins a token or emits a word, and leaves a back-pointer
NONE = -1
BINS = 256  # of the histogram of costs
LABEL_BITS, BOOST_BITS = 16, 16  # in a key; the graph state has the upper 32 bits
MAX_EPSILONS = 1023  # closure arcs of a graph state
MAX_LABELS, MAX_BOOST_STATES = (1 << LABEL_BITS) - 1, 1 << BOOST_BITS
HASH_BITS = 31  # of a key, in a rank
ANY_RANK = np.int64(np.iinfo(np.int64).max)
SLOT_SHIFT = np.uint64(40)  # bits of a hash from here on depend on all bits of the key
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing [Knuth, 6.4]
OTHER_HASH = np.uint64(0xC2B2AE3D27D4EB4F)  # any odd number without a pattern

# What a frame may end with; with one of the last three, make room and go on there.
DONE, BAD_FRAME, NO_TOKEN, BACK_POINTERS_FULL, LINKS_FULL = range(5)
GROUPS_FULL = 100

# -------------------------------------------------------------------------------------- parameters


class SearchParams(NamedTuple):
    """Options of a batch."""

    blank_id: int
    topology: int  # see `graph/topology.py`
    beam: np.float32
    max_active: int
    acoustic_scale: np.float32
    keeps_links: bool
    lattice_beam: np.float32
    num_words: int  # output labels of words; from there on, word-sequence labels


class StreamParams(NamedTuple):
    """Weights of an utterance, and the bounds that follow from them."""

    lm_weight: np.float32
    least_cost: np.float32  # no closure arc and arc together cost less; weighted, <= 0
    boosting_weight: np.float32
    boosts: bool
    most_bonus: np.float32  # no word gets a larger one; weighted


class Search(NamedTuple):
    """All that the search of an utterance reads and never changes."""

    params: SearchParams
    weights: StreamParams
    graph: GraphArrays
    boosting: AutomatonArrays


# ---------------------------------------------------------------------- what streams keep of frames

_KEY = ("key", np.int64)  # graph state, boosting state, last label + 1 (0 after a blank)
_LM = ("lm", np.int64)  # LM context: state of the large LM in the upper half, of the small in the lower
_TOKEN = [
    ("cost", np.float32),  # above that of the best token of the frame
    ("back_pointer", np.int32),  # newest one of its past, or NONE
    ("source", np.int32),  # token of the frame before
    ("arc", np.int32),  # of the graph, or BLANK_MOVE, REPEAT_MOVE
    ("epsilon", np.int32),  # closure arc taken before the arc, or NONE
    ("run", np.int32),  # frames that its last label lasted
    ("probability", np.float32),  # sum of the label's posteriors over these frames
]
TOKEN = np.dtype([_KEY, *_TOKEN], align=True)
LM_TOKEN = np.dtype([_KEY, _LM, *_TOKEN], align=True)
BACK_POINTER = np.dtype(
    [
        ("previous", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),  # taken before the arc, or NONE
        ("frame", np.int32),  # counted from the start of the stream
        ("run", np.int32),  # of the label before
        ("probability", np.float32),  # of the label before
    ]
)
# An arc between two tokens of consecutive frames, for lattices
LINK = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),
        ("cost", np.float32),  # of this step
        ("acoustic_cost", np.float32),  # part of it; in the frame being worked on: cost of the target
        ("ilabel", np.int32),  # column that it reads
        ("move", np.int32),  # BLANK_MOVE, REPEAT_MOVE or NEW_TOKEN; of arcs of ready-made graphs, too
        ("frame", np.int32),  # that the step reads
    ]
)
_COUNTERS = [
    ("tokens", np.int64),
    ("back_pointers", np.int64),
    ("frames", np.int64),
    ("cost", np.float64),  # of the best token; the tokens' own costs are above it
    ("links", np.int64),
    ("limited", np.int64),  # frames in which max_active left tokens out
    ("overflowed", np.int64),  # frames in which there was no room for all tokens
]
_WORK = [
    ("look_ups", np.int64),  # LM queries
    ("query_hits", np.int64),  # of these, answered by the LM query cache
    ("arc_visits", np.int64),
    ("groups", np.int64),  # that were expanded
    ("expanded", np.int64),  # LM contexts that were
]
# What a stream counts
COUNTERS = np.dtype(_COUNTERS)
LM_COUNTERS = np.dtype([*_COUNTERS, *_WORK])


class StreamArrays(NamedTuple):
    """What the search of an utterance goes on with, beside its tokens."""

    counters: np.ndarray  # [1] COUNTERS
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK


# -------------------------------------------------------------------------- a frame being worked on


class Origin(NamedTuple):
    """Where a candidate comes from."""

    source: int  # token of the frame before
    arc: int  # of the graph, or BLANK_MOVE, REPEAT_MOVE
    epsilon: int  # closure arc taken before the arc, or NONE


# A token of the next frame before it is known whether another one with its key is better
_CANDIDATE = [("cost", np.float32), *((name, np.int32) for name in Origin._fields)]
CANDIDATE = np.dtype([_KEY, *_CANDIDATE], align=True)
LM_CANDIDATE = np.dtype([_KEY, _LM, *_CANDIDATE], align=True)
# Tokens in one graph state and boosting state, seen as one; with a large LM those in one LM context
_GROUP = [
    ("cost", np.float32),  # of the best token
    ("source", np.int32),
    ("epsilon", np.int32),
    ("label", np.int32),  # last label of the best token
    ("other_cost", np.float32),  # of the best token with another last label; inf: there is none
    ("other_source", np.int32),
    ("other_epsilon", np.int32),
    ("newest", np.int32),  # of its GROUP_TOKENs, or NONE; only if links are kept
]
GROUP = np.dtype([_KEY, *_GROUP], align=True)  # the key is that of a token >> 16
LM_CONTEXT = np.dtype(
    [
        _KEY,  # of the group
        _LM,  # before `olabel`
        ("lm_after", np.int64),  # after it, once the LMs were queried
        *_GROUP,  # costs are by the small LM
        ("olabel", np.int32),  # of the closure arc on the way here, or 0
        ("difference", np.float32),  # LM score difference of `olabel`, weighted; NaN: not queried yet
        ("group", np.int32),
        ("next", np.int32),  # context of the group, or NONE
    ],
    align=True,
)
LM_GROUP = np.dtype(
    [
        _KEY,
        ("cost", np.float32),  # of its best context
        ("newest", np.int32),  # of its LM_CONTEXTs
        ("count", np.int32),  # of these
        ("ordered", np.int32),  # where they stand in `order`, cheapest first; NONE: not sorted yet
        ("queries", np.bool_),  # a context has a word for which the LMs were not queried
    ],
    align=True,
)
GROUP_TOKEN = np.dtype([("cost", np.float32), ("source", np.int32), ("epsilon", np.int32), ("next", np.int32)])
# A context in its group's list of them
ORDERED = np.dtype([("cost", np.float32), ("context", np.int32)])
# An arc that LM contexts of a group take once the LMs have answered: a deferred LM query
GROUP_ARC = np.dtype([("group", np.int32), ("arc", np.int32)])
# An answer of the LMs, in the LM query cache
CACHED_SCORE = np.dtype(
    [("lm", np.int64), ("lm_after", np.int64), ("olabel", np.int32), ("cost", np.float32)], align=True
)
SLOT = np.dtype([("stamp", np.int32), ("entry", np.int32)])
_FRAME = [
    ("tokens", np.int64),  # in `next_tokens`
    ("candidates", np.int64),
    ("groups", np.int64),
    ("group_tokens", np.int64),
    ("labels", np.int64),
    ("links", np.int64),  # of this frame, beyond those of the stream
    ("best", np.float32),  # cost of the best candidate that is known
    ("cutoff", np.float32),  # candidates that cost more are dropped: best + beam
    ("last_rank", np.int64),  # those that rank after are dropped, see `rank_of`
    ("full", np.bool_),  # there were more keys than room, so new ones are refused
    ("token_mask", np.int64),  # part of each hash table that is in use, less 1
    ("group_mask", np.int64),
]
# The frame that is being worked on
FRAME_STATE = np.dtype(_FRAME, align=True)
LM_FRAME_STATE = np.dtype(
    [
        *_FRAME,
        ("lm_groups", np.int64),
        ("deferred", np.int64),
        ("ordered", np.int64),  # entries of `order` in use
        ("lm_group_mask", np.int64),
        *((f"tight_{name}", np.int32) for name in Origin._fields),  # of what has tightened the cutoff
        *(work for work in _WORK if work not in _FRAME),
    ],
    align=True,
)


class LmWorkspace(NamedTuple):
    """What the workspace has besides, with a large LM."""

    group_slots: np.ndarray  # [power of 2] SLOT, of LM groups
    order: np.ndarray  # [entries] ORDERED
    deferred: np.ndarray  # [entries] GROUP_ARC
    cache: np.ndarray  # [power of 2] CACHED_SCORE


class Workspace(NamedTuple):
    """Buffers for one utterance at a time; their contents mean nothing between calls."""

    current: np.ndarray  # [capacity] TOKEN
    next_tokens: np.ndarray  # [capacity] TOKEN
    token_slots: np.ndarray  # [power of 2] SLOT
    candidates: np.ndarray  # [C] CANDIDATE, collected before they are recombined
    groups: np.ndarray  # [entries] GROUP; LM_CONTEXT with a large LM
    expanding: np.ndarray  # [entries] the same array; LM_GROUP with a large LM
    group_slots: np.ndarray  # [power of 2] SLOT
    group_tokens: np.ndarray  # [2 entries or 1] GROUP_TOKEN
    labels: np.ndarray  # [V + 1] int32, those that may matter in a frame, likely ones first
    histogram: np.ndarray  # [BINS] int64
    renumbered: np.ndarray  # [capacity] int32, index of each token in the next frame, or NONE
    frame: np.ndarray  # [1] FRAME_STATE
    stamps: np.ndarray  # [3] int32, of tokens, groups, LM groups: slots with another one are void
    lm: LmWorkspace | None = None


def token_capacity(max_active: int) -> int:
    """Room for four times `max_active` tokens: what is beyond cannot survive the frame."""
    return max(4 * max_active, MAX_EPSILONS + 1)


# -------------------------------------------------------------------------------------------- keys


@inlined
def key_of(state, boost, label):
    """`label` is the last label + 1, 0 after a blank."""
    return (np.int64(state) << 32) | (np.int64(boost) << 16) | np.int64(label)


@inlined
def state_of(key):
    return np.int64(key) >> 32


@inlined
def boost_of(key):
    return (np.int64(key) >> 16) & 0xFFFF


@inlined
def label_of(key):
    return np.int64(key) & 0xFFFF


@inlined
def context_of(token, lm):
    """The LM context of a token; 0 without a large LM."""
    if lm is None:
        return np.int64(0)
    else:  # numba drops a branch of this form before it looks at types
        return token.lm


@inlined
def hash_of(key, context):
    return (np.uint64(key) ^ (np.uint64(context) * OTHER_HASH)) * _GOLDEN


@inlined
def rank_of(cost, key, context):
    """A number that orders candidates by cost, and keys of equal cost somehow, but always alike."""
    bits = np.int64(np.float32(cost + np.float32(0.0)).view(np.int32))  # -0 becomes +0
    if bits < 0:
        bits = -(bits & 0x7FFFFFFF)  # floats below 0 are ordered the other way round
    return (bits << HASH_BITS) + np.int64(hash_of(key, context) >> np.uint64(64 - HASH_BITS))


@inlined
def is_first(token, other, lm):
    """An order of the tokens of a frame that does not depend on where they are stored."""
    if lm is None:
        return token.key < other.key
    else:
        return token.key < other.key or (token.key == other.key and token.lm < other.lm)
