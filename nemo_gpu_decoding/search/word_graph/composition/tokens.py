"""Hypotheses with an LM history, the tables that find them, and what a stream counts.

As in `word_graph/tokens.py`, with one more part of the key: `lm`, the states of both LMs in one number,
that of the large LM in the upper 32 bits. Two tokens with the same key and `lm` have the same future.

Tokens of one graph state (and boosting state) form a group, those of a group with the same LM history
one of the group's histories. Example: three tokens in graph state 7 after "a b", "a c" (just read) and
"a c" (with a blank since) are one group with two histories, the second of which has two members.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.tokens import (
    BINS,
    CANDIDATES,
    MEMBER,
    SLOT_SHIFT,
    token_capacity,
)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing [Knuth, 6.4]
_OTHER = np.uint64(0xC2B2AE3D27D4EB4F)  # any odd number without a pattern
MEMO_SLOTS = 1 << 14  # power of 2
FEWEST_SLOTS = 256  # of a hash table in use
EMPTY = np.int64(-1)  # no history
RANK_BITS = 31  # of a hash, in a rank

TOKEN = np.dtype(
    [
        ("key", np.int64),  # graph state, boosting state, last label + 1 (0 after a blank)
        ("lm", np.int64),  # states of the large and the small LM
        ("cost", np.float32),  # above that of the best token of the frame
        ("record", np.int32),  # newest record of its past, or NONE
        ("source", np.int32),  # token of the frame before
        ("arc", np.int32),  # of the graph, or BLANK_MOVE, REPEAT_MOVE
        ("epsilon", np.int32),  # epsilon record taken before the arc, or NONE
        ("run", np.int32),  # frames that its last label lasted
        ("probability", np.float32),  # sum of the label's posteriors over these frames
    ],
    align=True,
)
# A way into the next frame, before it is known whether another one with its key is better
CANDIDATE = np.dtype(
    [
        ("key", np.int64),
        ("lm", np.int64),
        ("cost", np.float32),
        ("source", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),
    ],
    align=True,
)
GROUP = np.dtype(
    [
        ("key", np.int64),  # graph state, boosting state
        ("cost", np.float32),  # of its best history
        ("newest", np.int32),  # of its HISTORYs
        ("count", np.int32),  # of its histories
        ("ordered", np.int32),  # where they stand in `order`, cheapest first; NONE: not sorted yet
        ("asks", np.bool_),  # a history has a word that the large LM was not asked for
    ],
    align=True,
)
HISTORY = np.dtype(
    [
        ("key", np.int64),  # of the group
        ("lm", np.int64),  # before `word`
        ("lm_after", np.int64),  # after it, once the LM was asked
        ("cost", np.float32),  # of its best token, with the small LM's cost of `word`
        ("source", np.int32),
        ("epsilon", np.int32),
        ("label", np.int32),  # last label of the best token
        ("other_cost", np.float32),  # of the best token with another last label
        ("other_source", np.int32),
        ("other_epsilon", np.int32),
        ("word", np.int32),  # told by an epsilon record on the way here, or 0
        ("correction", np.float32),  # what the large LM adds for `word`; NaN: not asked yet
        ("members", np.int32),  # newest of its MEMBERs, or NONE; only if links are kept
        ("group", np.int32),
        ("next", np.int32),  # history of the group, or NONE
    ],
    align=True,
)
# A history in its group's list of them, cheapest first
ORDERED = np.dtype([("cost", np.float32), ("history", np.int32)])
# An arc to be taken by those histories of a group for which the large LM has to be asked
ERRAND = np.dtype([("group", np.int32), ("arc", np.int32)])
# An answer of the LMs
MEMO = np.dtype(
    [("lm", np.int64), ("lm_after", np.int64), ("word", np.int32), ("cost", np.float32)], align=True
)
_SLOT = np.dtype([("stamp", np.int32), ("entry", np.int32)])

_WORK = [
    ("look_ups", np.int64),  # questions to the LMs
    ("memo_hits", np.int64),  # of these, answered by the memo
    ("arc_visits", np.int64),
    ("groups", np.int64),  # that took arcs
    ("prolonged", np.int64),  # tokens that took arcs
]
# What a stream remembers besides tokens and records
PROGRESS = np.dtype(
    [
        *_WORK,
        ("tokens", np.int64),
        ("records", np.int64),
        ("frames", np.int64),
        ("cost", np.float64),  # of the best token; the tokens' own costs are above it
        ("links", np.int64),
        ("limited", np.int64),  # frames in which max_active left hypotheses out
        ("overflowed", np.int64),  # frames in which there was no room for all hypotheses
    ]
)
# The frame that is being worked on
FRONT = np.dtype(
    [
        ("tokens", np.int64),  # in `following`
        ("candidates", np.int64),
        ("histories", np.int64),
        ("members", np.int64),
        ("errands", np.int64),
        ("ordered", np.int64),  # entries of `order` in use
        ("labels", np.int64),
        ("links", np.int64),  # of this frame, beyond those of the stream
        ("best", np.float32),  # cost of the best way into the next frame that is known
        ("cutoff", np.float32),  # ways that cost more are dropped: best + beam
        ("last", np.int64),  # ways that rank after are dropped, see `rank_of`
        ("full", np.bool_),  # there were more keys than room, so new ones are refused
        ("token_mask", np.int64),  # part of each hash table that is in use, less 1
        ("group_mask", np.int64),
        ("history_mask", np.int64),
        ("ahead_source", np.int32),  # the way taken to look ahead; its token, or NONE
        ("ahead_arc", np.int32),
        ("ahead_epsilon", np.int32),
        *_WORK,
    ],
    align=True,
)


class Workspace(NamedTuple):
    """Room for one utterance at a time; its contents mean nothing between calls."""

    current: np.ndarray  # [capacity] TOKEN
    following: np.ndarray  # [capacity] TOKEN
    token_slots: np.ndarray  # [power of 2] _SLOT
    candidates: np.ndarray  # [CANDIDATES] CANDIDATE
    groups: np.ndarray  # [entries] GROUP
    group_slots: np.ndarray  # [power of 2] _SLOT
    histories: np.ndarray  # [entries] HISTORY
    history_slots: np.ndarray  # [power of 2] _SLOT
    order: np.ndarray  # [entries] ORDERED, histories of groups
    members: np.ndarray  # [entries or 1] MEMBER
    errands: np.ndarray  # [entries] ERRAND
    labels: np.ndarray  # [V + 1] int32, those that may matter in a frame, likely ones first
    histogram: np.ndarray  # [BINS] int64
    renumbered: np.ndarray  # [capacity] int32, place of each token in the next frame, or NONE
    memo: np.ndarray  # [MEMO_SLOTS] MEMO
    front: np.ndarray  # [1] FRONT
    stamps: np.ndarray  # [3] int32, of tokens, groups, histories: table entries with others are void


def new_workspace(
    max_active: int, columns: int, keeps_links: bool, entries: int | None = None
) -> Workspace:
    """Room for four times `max_active` tokens, and for so many entries in the tables of groups."""
    capacity = token_capacity(max_active)
    entries = entries or 2 * capacity
    memo = np.zeros(MEMO_SLOTS, MEMO)
    memo["lm"] = EMPTY
    return Workspace(
        current=np.empty(capacity, TOKEN),
        following=np.empty(capacity, TOKEN),
        token_slots=_slots(capacity),
        candidates=np.empty(CANDIDATES, CANDIDATE),
        groups=np.empty(entries, GROUP),
        group_slots=_slots(entries),
        histories=np.empty(entries, HISTORY),
        history_slots=_slots(entries),
        order=np.empty(entries, ORDERED),
        members=np.empty(2 * entries if keeps_links else 1, MEMBER),
        errands=np.empty(entries, ERRAND),
        labels=np.empty(columns, np.int32),
        histogram=np.empty(BINS, np.int64),
        renumbered=np.empty(capacity, np.int32),
        memo=memo,
        front=np.zeros(1, FRONT),
        stamps=np.zeros(3, np.int32),
    )


def with_more_groups(space: Workspace, max_active: int, keeps_links: bool) -> Workspace:
    """Twice the room in the tables of groups; the tokens stay."""
    larger = new_workspace(max_active, len(space.labels), keeps_links, 2 * len(space.groups))
    return larger._replace(current=space.current, memo=space.memo)


def _slots(entries: int) -> np.ndarray:
    return np.zeros(max(FEWEST_SLOTS, 1 << (2 * entries - 1).bit_length()), _SLOT)


@inlined
def lm_of(large, small):
    return (np.int64(large) << 32) | np.int64(small)


@inlined
def large_of(lm):
    return np.int64(lm) >> 32


@inlined
def small_of(lm):
    return np.int64(lm) & 0xFFFFFFFF


@inlined
def hash_of(key, lm):
    return (np.uint64(key) ^ (np.uint64(lm) * _OTHER)) * _GOLDEN


@inlined
def find_token_slot(key, lm, space):
    """The slot of a token of the next frame: its own, or the void one in which it would go.

    Linear probing, in as much of the table as the frame needs: few tokens stay in few cache lines.
    """
    slots, entries, stamp = space.token_slots, space.following, space.stamps[0]
    mask = np.uint64(space.front[0].token_mask)
    at = (hash_of(key, lm) >> SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and not (
        entries[slots[at].entry].key == key and entries[slots[at].entry].lm == lm
    ):
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def find_group_slot(key, space):
    """The same for a group."""
    slots, entries, stamp = space.group_slots, space.groups, space.stamps[1]
    mask = np.uint64(space.front[0].group_mask)
    at = (hash_of(key, 0) >> SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and entries[slots[at].entry].key != key:
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def find_history_slot(key, lm, word, space):
    """The same for a history."""
    slots, entries, stamp = space.history_slots, space.histories, space.stamps[2]
    mask = np.uint64(space.front[0].history_mask)
    at = ((hash_of(key, lm) + np.uint64(word) * _OTHER) >> SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and not (
        entries[slots[at].entry].key == key
        and entries[slots[at].entry].lm == lm
        and entries[slots[at].entry].word == word
    ):
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def fill_slot(slots, at, stamp, entry):
    slots[at].stamp, slots[at].entry = stamp, entry


@inlined
def void_tables(tokens, space):
    """Begin a frame with empty tables, of a size for twice as many tokens as the last one has."""
    front = space.front[0]
    mask: Any = FEWEST_SLOTS
    while mask < 4 * tokens:
        mask *= 2
    front.token_mask = min(mask, len(space.token_slots)) - 1
    front.group_mask = min(mask, len(space.group_slots)) - 1
    front.history_mask = min(mask, len(space.history_slots)) - 1
    for table in range(len(space.stamps)):
        space.stamps[table] += 1


@no_refcount
def widen_token_table(space):
    """Twice as much of the table."""
    front = space.front[0]
    front.token_mask = 2 * front.token_mask + 1
    space.stamps[0] += 1
    for t in range(front.tokens):
        at = find_token_slot(space.following[t].key, space.following[t].lm, space)
        fill_slot(space.token_slots, at, space.stamps[0], t)


@no_refcount
def widen_group_tables(space):
    """Twice as much of those of groups and of histories."""
    front = space.front[0]
    front.group_mask = 2 * front.group_mask + 1
    front.history_mask = 2 * front.history_mask + 1
    space.stamps[1] += 1
    space.stamps[2] += 1
    for g in range(front.groups):
        at = find_group_slot(space.groups[g].key, space)
        fill_slot(space.group_slots, at, space.stamps[1], g)
    for h in range(front.histories):
        history = space.histories[h]
        at = find_history_slot(history.key, history.lm, history.word, space)
        fill_slot(space.history_slots, at, space.stamps[2], h)


@inlined
def rank_of(cost, key, lm):
    """A number that orders ways by cost, and keys of equal cost somehow, but always alike."""
    bits = np.int64(np.float32(cost + np.float32(0.0)).view(np.int32))  # -0 becomes +0
    if bits < 0:
        bits = -(bits & 0x7FFFFFFF)  # floats below 0 are ordered the other way round
    return (bits << RANK_BITS) + np.int64(hash_of(key, lm) >> np.uint64(64 - RANK_BITS))
