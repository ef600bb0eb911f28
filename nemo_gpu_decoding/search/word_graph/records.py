"""Records, parameters and sizes of the word-graph search, for the CPU and for CUDA (`kernel_abi.py`).

A token's past is a chain of back-pointers, one for each token of the text ("new label"), each pointing
to the one before. Example: "▁hel" in frame 3, "lo" in frame 5, two frames long:

    back-pointer  0                          1
    previous      -1                         0
    arc           that with label "▁hel"     that with label "lo"
    frame         3                          5
    run           0                          1 (frames of "▁hel")    the 2 of "lo" are in the token

Names with LM are of the search with a large LM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import AutomatonArrays
from nemo_gpu_decoding.graph.csr import GraphArrays
from nemo_gpu_decoding.search.word_graph.keys import Origin

MAX_EPSILONS = 1023  # closure arcs of a graph state
MAX_LABELS, MAX_BOOST_STATES = (1 << 16) - 1, 1 << 16  # that fit into a key

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

KEY = ("key", np.int64)  # graph state, boosting state, last label + 1 (0 after a blank)
LM = ("lm", np.int64)  # LM context: state of the large LM in the upper half, of the small in the lower
# The fields of a token between two frames, but for what it is known by
TOKEN_FIELDS = [
    ("cost", np.float32),  # above that of the best token of the frame
    ("back_pointer", np.int32),  # newest one of its past, or NONE
    ("run", np.int32),  # frames that its last label lasted
    ("probability", np.float32),  # sum of the label's posteriors over these frames
]
_ORIGIN = [(name, np.int32) for name in Origin._fields]
# A token, and where it comes from
TOKEN = np.dtype([KEY, *TOKEN_FIELDS, *_ORIGIN], align=True)
LM_TOKEN = np.dtype([KEY, LM, *TOKEN_FIELDS, *_ORIGIN], align=True)
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
# What a stream sums up over its frames
STREAM_TOTALS = [
    ("frames", np.int64),
    ("cost", np.float64),  # of the best token; the tokens' own costs are relative to it
    ("limited", np.int64),  # frames in which max_active left tokens out
    ("overflowed", np.int64),  # frames in which there was no capacity for all tokens
    ("links", np.int64),
]
COUNTERS = np.dtype([("tokens", np.int64), ("back_pointers", np.int64), *STREAM_TOTALS])


class StreamArrays(NamedTuple):
    """What the search of an utterance goes on with, beside its tokens."""

    counters: np.ndarray  # [1] COUNTERS
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK


# -------------------------------------------------------------------------- a frame being worked on

# A token of the next frame before it is known whether another one with its key is better
CANDIDATE = np.dtype([KEY, ("cost", np.float32), *_ORIGIN], align=True)
LM_CANDIDATE = np.dtype([KEY, LM, ("cost", np.float32), *_ORIGIN], align=True)
# Tokens in one graph state and boosting state, seen as one; with a large LM these fields are an LM context's
GROUP_FIELDS = [
    ("cost", np.float32),  # of the best token
    ("source", np.int32),
    ("epsilon", np.int32),
    ("label", np.int32),  # last label of the best token
    ("other_cost", np.float32),  # of the best token with another last label; inf: there is none
    ("other_source", np.int32),
    ("other_epsilon", np.int32),
    ("newest", np.int32),  # of its GROUP_TOKENs, or NONE; only if links are kept
]
GROUP = np.dtype([KEY, *GROUP_FIELDS], align=True)  # the key is that of a token >> 16
GROUP_TOKEN = np.dtype([("cost", np.float32), ("source", np.int32), ("epsilon", np.int32), ("next", np.int32)])
SLOT = np.dtype([("stamp", np.int32), ("entry", np.int32)])
FRAME_FIELDS = [
    ("status", np.int64),  # DONE, or why the frame cannot be completed
    ("tokens", np.int64),  # in `next_tokens`
    ("candidates", np.int64),
    ("groups", np.int64),
    ("group_tokens", np.int64),
    ("labels", np.int64),
    ("links", np.int64),  # of this frame, beyond those of the stream
    ("best", np.float32),  # cost of the best candidate that is known
    ("cutoff", np.float32),  # candidates that cost more are dropped: best + beam
    ("last_rank", np.int64),  # those that rank after are dropped, see `rank_of`
    ("full", np.bool_),  # there were more keys than capacity, so new ones are refused
    ("token_mask", np.int64),  # part of each hash table that is in use, less 1
    ("group_mask", np.int64),
]
# The frame that is being worked on
FRAME_STATE = np.dtype(FRAME_FIELDS, align=True)


class Workspace(NamedTuple):
    """Buffers for one utterance at a time; their contents mean nothing between calls."""

    current: np.ndarray  # [capacity] TOKEN
    next_tokens: np.ndarray  # [capacity] TOKEN
    token_slots: np.ndarray  # [power of 2] SLOT
    candidates: np.ndarray  # [C] CANDIDATE, collected before they are recombined
    groups: np.ndarray  # [entries] GROUP; with a large LM they are in `lm`
    group_slots: np.ndarray  # [power of 2] SLOT
    group_tokens: np.ndarray  # [2 entries or 1] GROUP_TOKEN
    acoustic_costs: np.ndarray  # [V + 1] float32, of the frame's labels
    posteriors: np.ndarray  # [V + 1] float32, cache of exp(log-prob); UNKNOWN: not computed
    labels: np.ndarray  # [V + 1] int32, labels that may stay within the beam in a frame, likely ones first
    histogram: np.ndarray  # [BINS] int64
    renumbered: np.ndarray  # [capacity] int32, index of each token in the next frame, or NONE
    frame: np.ndarray  # [1] FRAME_STATE
    stamps: np.ndarray  # [3] int32, of tokens, groups, LM contexts: slots with another stamp are void
    lm: Any = None  # LmWorkspace with a large LM


def token_capacity(max_active: int) -> int:
    """Capacity for four times `max_active` tokens: what is beyond cannot survive the frame."""
    return max(4 * max_active, MAX_EPSILONS + 1)
