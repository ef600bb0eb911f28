"""The hypotheses of a frame ("tokens"), the tables that find them, and what they leave behind.

A token is known by its key: state of the graph, state of the boosting automaton, last label. Of several
ways to the same key the cheapest survives; equal costs are decided by the arc, then by what the way cost
before that, then by the key of the token that it came from. So the result depends on no order of work.

A token's past is a chain of records, one for each token of the text ("new label"), each pointing to the
one before. Example: "▁hel" in frame 3, "lo" in frame 5, two frames long:

    record    0                          1
    previous  -1                         0
    arc       that with label "▁hel"     that with label "lo"
    frame     3                          5
    run       0                          1 (frames of "▁hel")      the 2 of "lo" are in the token
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined, no_refcount

BLANK_MOVE, REPEAT_MOVE = -2, -1  # in place of an arc
NEW_TOKEN = 0  # a move that begins a token or tells a word, and leaves a record
NONE = -1
BINS = 256  # of the histogram of costs
CANDIDATES = 4096  # collected before they are recombined
LABEL_BITS, BOOST_BITS = 16, 16  # in a key; the graph state has the upper 32 bits
MAX_EPSILONS = 1023  # of a graph state: it and all that they lead to find room among the groups
MAX_LABELS, MAX_BOOST_STATES = (1 << LABEL_BITS) - 1, 1 << BOOST_BITS
HASH_BITS = 31  # of a key, in a rank
SLOT_SHIFT = np.uint64(40)  # bits of a hash from here on depend on all bits of the key
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing [Knuth, 6.4]

TOKEN = np.dtype(
    [
        ("key", np.int64),  # graph state, boosting state, last label + 1 (0 after a blank)
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
RECORD = np.dtype(
    [
        ("previous", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),  # taken before the arc, or NONE
        ("frame", np.int32),  # counted from the start of the stream
        ("run", np.int32),  # of the label before
        ("probability", np.float32),  # of the label before
    ]
)
# All tokens of a graph state and a boosting state, seen as one: arcs are looked at once for all
GROUP = np.dtype(
    [
        ("key", np.int64),  # graph state, boosting state
        ("cost", np.float32),
        ("source", np.int32),
        ("epsilon", np.int32),
        ("label", np.int32),  # last label of the best token
        ("other_cost", np.float32),  # of the best token with another last label
        ("other_source", np.int32),
        ("other_epsilon", np.int32),
        ("members", np.int32),  # newest of the group's MEMBERs, or NONE; only if links are kept
    ],
    align=True,
)
MEMBER = np.dtype(
    [("cost", np.float32), ("source", np.int32), ("epsilon", np.int32), ("next", np.int32)]
)
# A way into the next frame, before it is known whether another one with its key is better
CANDIDATE = np.dtype(
    [
        ("key", np.int64),
        ("cost", np.float32),
        ("source", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),
    ],
    align=True,
)
# An arc between two tokens of consecutive frames, for lattices
LINK = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),
        ("cost", np.float32),  # of this step
        ("acoustic_cost", np.float32),  # part of it; in the frame being worked on: of the whole way
        ("label", np.int32),  # column that it reads
        (
            "move",
            np.int32,
        ),  # BLANK_MOVE, REPEAT_MOVE, or NEW_TOKEN; arcs of ready-made graphs may be any
        ("frame", np.int32),  # that the step reads
    ]
)
_SLOT = np.dtype([("stamp", np.int32), ("entry", np.int32)])

# What a stream remembers besides tokens and records
PROGRESS = np.dtype(
    [
        ("tokens", np.int64),
        ("records", np.int64),
        ("frames", np.int64),
        ("cost", np.float64),  # of the best token; the tokens' own costs are above it
        ("links", np.int64),
        ("limited", np.int64),  # frames in which max_active left hypotheses out
        ("overflowed", np.int64),  # times that a table was full and the cutoff was raised
    ]
)


# The frame that is being worked on
FRONT = np.dtype(
    [
        ("tokens", np.int64),  # in `following`
        ("candidates", np.int64),
        ("groups", np.int64),
        ("members", np.int64),
        ("labels", np.int64),
        ("links", np.int64),  # of this frame, beyond those of the stream
        ("best", np.float32),  # cost of the best way into the next frame that is known
        ("cutoff", np.float32),  # ways that cost more are dropped: best + beam
        ("last", np.int64),  # ways that rank after are dropped, see `rank_of`; lowered if too many fit
        ("full", np.bool_),  # there were more keys than room, so new ones are refused
    ],
    align=True,
)
ANY_RANK = np.int64(np.iinfo(np.int64).max)


class Workspace(NamedTuple):
    """Room for one utterance at a time; its contents mean nothing between calls."""

    current: np.ndarray  # [capacity] TOKEN
    following: np.ndarray  # [capacity] TOKEN
    token_slots: np.ndarray  # [power of 2] _SLOT
    candidates: np.ndarray  # [CANDIDATES] CANDIDATE
    groups: np.ndarray  # [capacity] GROUP
    group_slots: np.ndarray  # [power of 2] _SLOT
    members: np.ndarray  # [capacity or 1] MEMBER
    labels: np.ndarray  # [V + 1] int32, those that may matter in a frame, likely ones first
    histogram: np.ndarray  # [BINS] int64
    renumbered: np.ndarray  # [capacity] int32, place of each token in the next frame, or NONE
    front: np.ndarray  # [1] FRONT
    stamps: np.ndarray  # [2] int32, of tokens and groups: table entries with another one are void


def token_capacity(max_active: int) -> int:
    """Room for four times `max_active` tokens: what is beyond cannot survive the frame."""
    return max(4 * max_active, MAX_EPSILONS + 1)


def new_workspace(max_active: int, columns: int, keeps_links: bool) -> Workspace:
    """Room for the tokens of one utterance."""
    capacity = token_capacity(max_active)
    slots = 1 << (2 * capacity - 1).bit_length()
    return Workspace(
        np.empty(capacity, TOKEN),
        np.empty(capacity, TOKEN),
        np.zeros(slots, _SLOT),
        np.empty(CANDIDATES, CANDIDATE),
        np.empty(capacity, GROUP),
        np.zeros(slots, _SLOT),
        np.empty(4 * capacity if keeps_links else 1, MEMBER),
        np.empty(columns, np.int32),
        np.empty(BINS, np.int64),
        np.empty(capacity, np.int32),
        np.zeros(1, FRONT),
        np.zeros(2, np.int32),
    )


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
def find_slot(slots, entries, stamp, key):
    """The slot of a key: its own, or the void one in which it would go. Linear probing."""
    mask = np.uint64(len(slots) - 1)
    at = ((np.uint64(key) * _GOLDEN) >> SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and entries[slots[at].entry].key != key:
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def rank_of(cost, key):
    """A number that orders ways by cost, and keys of equal cost somehow, but always alike."""
    bits = np.int64(np.float32(cost + np.float32(0.0)).view(np.int32))  # -0 becomes +0
    if bits < 0:
        bits = -(bits & 0x7FFFFFFF)  # floats below 0 are ordered the other way round
    return (bits << HASH_BITS) + np.int64((np.uint64(key) * _GOLDEN) >> np.uint64(64 - HASH_BITS))


@no_refcount
def cheapest(tokens, count, best, beam, most, histogram, renumbered):
    """Choose tokens within the beam, about `most` at most, in their order.

    Costs are counted in 256 steps of beam / 256, and steps are taken from the best on while their sum
    is not above `most`; the first step always is. `renumbered` gets each token's place, or NONE.

    Returns:
        the number of tokens chosen, and whether `most` left any out.
    """
    last, scale = BINS - 1, np.float32(BINS) / beam
    if count > most:
        last = _last_step(tokens, count, best, beam, most, histogram)
    kept, within = 0, 0
    for i in range(count):
        renumbered[i] = NONE
        if tokens[i].cost <= best + beam:
            within += 1
            if _bin(tokens[i].cost, best, scale) <= last:
                renumbered[i] = kept
                kept += 1
    return kept, kept < within


@no_refcount
def _last_step(tokens, count, best, beam, most, histogram):
    histogram[:] = 0
    scale = np.float32(BINS) / beam
    for i in range(count):
        if tokens[i].cost <= best + beam:
            histogram[_bin(tokens[i].cost, best, scale)] += 1
    total, last = histogram[0], 0
    while last < BINS - 1 and total + histogram[last + 1] <= most:
        last += 1
        total += histogram[last]
    return last


@inlined
def _bin(cost, best, scale):
    return min(np.int64((cost - best) * scale), BINS - 1)


@compiled
def compact_records(records, count, tokens, num_tokens, kept):
    """Copy the records that tokens still point to, in order, to `kept`; tokens get the new numbers.

    Returns:
        the number of records copied.
    """
    number = np.full(count, NONE, np.int32)
    for i in range(num_tokens):
        if tokens[i].record >= 0:
            number[tokens[i].record] = 0
    for i in range(count - 1, -1, -1):
        if number[i] == 0 and records[i].previous >= 0:
            number[records[i].previous] = 0
    size = 0
    for i in range(count):
        if number[i] == 0:
            kept[size] = records[i]
            if records[i].previous >= 0:
                kept[size].previous = number[records[i].previous]
            number[i] = size
            size += 1
    for i in range(num_tokens):
        if tokens[i].record >= 0:
            tokens[i].record = number[tokens[i].record]
    return size
