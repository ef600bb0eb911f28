"""Pack the keys of tokens, and define constants: moves and the status of a frame.

The key of a token packs the state of the graph, the state of the boosting automaton and the last label. With a large
LM the LM context is a second part of the key. The LM context packs the states of both LMs, the large LM's in the upper
32 bits. If several candidates have one key, the cheapest survives. Ties are broken by the arc, then by the cost before
the arc, then by the key of the source. Results therefore do not depend on the order of work.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import linked

BLANK_MOVE, REPEAT_MOVE = -2, -1  # in place of an arc
NEW_TOKEN = 0  # a move that begins a token or emits a word; it adds a back-pointer
NONE = -1
HASH_BITS = 31  # bits of the key's hash in a rank
ANY_RANK = np.int64(np.iinfo(np.int64).max)
SLOT_SHIFT = np.uint64(40)  # the bits of a hash above it depend on all bits of the key
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing [Knuth, 6.4]
OTHER_HASH = np.uint64(0xC2B2AE3D27D4EB4F)  # any odd number without a pattern

# The status of a frame. After one of the last three, the caller grows the array and repeats the frame.
DONE, BAD_FRAME, NO_TOKEN, BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL = range(6)


class Origin(NamedTuple):
    """The last step on the path of a candidate."""

    arc: int  # index of an arc of the graph, or BLANK_MOVE, REPEAT_MOVE
    source: int  # index of a token of the previous frame
    epsilon: int  # closure arc taken before the arc, or NONE


@linked
def key_of(state, boost, label):
    """Pack a key; `label` is the last label + 1, or 0 after a blank."""
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
    """Return the LM context of a token, or 0 without a large LM."""
    if lm is None:
        return np.int64(0)
    else:  # numba removes a branch of this form before it infers types
        return token.lm


@linked
def hash_of(key, context):
    return (np.uint64(key) ^ (np.uint64(context) * OTHER_HASH)) * _GOLDEN


@linked
def ordered_bits(value):
    """Convert a float32 to an integer of 32 bits, as int64; the integers have the order of the floats."""
    bits = np.int64(np.float32(value + np.float32(0.0)).view(np.int32))  # -0 becomes +0
    return -(bits & 0x7FFFFFFF) if bits < 0 else bits  # the bits of negative floats have the reverse order


@linked
def rank_of(cost, key, context):
    """Return a number with the order of candidates: by cost, then by the hash of the key."""
    return (ordered_bits(cost) << HASH_BITS) + np.int64(hash_of(key, context) >> np.uint64(64 - HASH_BITS))


@linked
def precedes(token, other, lm):
    """Return whether a token's key is lower than the other's. Keys, unlike indices, ignore the order of work."""
    if lm is None:
        return token.key < other.key
    else:
        return token.key < other.key or (token.key == other.key and token.lm < other.lm)
