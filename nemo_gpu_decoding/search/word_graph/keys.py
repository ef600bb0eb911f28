"""Keys of tokens, and the numbers that stand for moves and for how a frame ends.

A token is known by its key: state of the graph, state of the boosting automaton, last label; with a
large LM by its LM context as well: the states of both LMs in one number, that of the large LM in the
upper 32 bits. Of several candidates for one key the cheapest survives; equal costs are decided by the
arc, then by the cost before it, then by the key of the source. So no order of work matters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import linked

BLANK_MOVE, REPEAT_MOVE = -2, -1  # in place of an arc
NEW_TOKEN = 0  # a move that begins a token or emits a word, and leaves a back-pointer
NONE = -1
HASH_BITS = 31  # of a key, in a rank
ANY_RANK = np.int64(np.iinfo(np.int64).max)
SLOT_SHIFT = np.uint64(40)  # bits of a hash from here on depend on all bits of the key
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing [Knuth, 6.4]
OTHER_HASH = np.uint64(0xC2B2AE3D27D4EB4F)  # any odd number without a pattern

# What a frame may end with; with one of the last three, grow the array that is full and go on there.
DONE, BAD_FRAME, NO_TOKEN, BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL = range(6)


class Origin(NamedTuple):
    """Where a candidate comes from."""

    arc: int  # of the graph, or BLANK_MOVE, REPEAT_MOVE
    source: int  # token of the frame before
    epsilon: int  # closure arc taken before the arc, or NONE


@linked
def key_of(state, boost, label):
    """`label` is the last label + 1, 0 after a blank."""
    return (np.int64(state) << 32) | (np.int64(boost) << 16) | np.int64(label)


@linked
def state_of(key):
    return np.int64(key) >> 32


@linked
def boost_of(key):
    return (np.int64(key) >> 16) & 0xFFFF


@linked
def label_of(key):
    return np.int64(key) & 0xFFFF


@linked
def context_of(token, lm):
    """The LM context of a token; 0 without a large LM."""
    if lm is None:
        return np.int64(0)
    else:  # numba drops a branch of this form before it looks at types
        return token.lm


@linked
def hash_of(key, context):
    return (np.uint64(key) ^ (np.uint64(context) * OTHER_HASH)) * _GOLDEN


@linked
def ordered_bits(value):
    """An int64 of 32 bits that orders values as float32 does."""
    bits = np.int64(np.float32(value + np.float32(0.0)).view(np.int32))  # -0 becomes +0
    return -(bits & 0x7FFFFFFF) if bits < 0 else bits  # floats below 0 are ordered the other way round


@linked
def rank_of(cost, key, context):
    """Total order of candidates: cost, then hash of the key. Deterministic."""
    return (ordered_bits(cost) << HASH_BITS) + np.int64(hash_of(key, context) >> np.uint64(64 - HASH_BITS))


@linked
def precedes(token, other, lm):
    """Whether a token comes before another one of its frame, in an order that does not depend on their indices."""
    if lm is None:
        return token.key < other.key
    else:
        return token.key < other.key or (token.key == other.key and token.lm < other.lm)
