"""Declare records, parameters and sizes of the word-graph search on the CPU; the kernels' are in `kernel_abi.py`.

A chain of back-pointers has one entry for each new label on the path of a token. Each entry points to the previous
entry of the chain. Example: "▁hel" in frame 3, then "lo" in frames 5 and 6:

    back-pointer  0                          1
    previous      -1                         0
    arc           that with label "▁hel"     that with label "lo"
    frame         3                          5
    run           0                          1 (frames of "▁hel")    the token has the 2 frames of "lo"

Names that begin with LM belong to the search with a large LM.
"""

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import AutomatonArrays
from nemo_gpu_decoding.graph.csr import ArcIndex, GraphArrays
from nemo_gpu_decoding.search.word_graph.keys import Origin

MAX_EPSILONS = 1023  # most closure arcs of a graph state
MAX_LABELS, MAX_BOOST_STATES = (1 << 16) - 1, 1 << 16  # limits of the fields of a key

# -------------------------------------------------------------------------------------- parameters


class SearchParams(NamedTuple):
    """The options of a batch in the form for compiled code; see `WFSTConfig`."""

    blank_id: int
    topology: int  # see `graph/csr.py`
    beam: np.float32
    max_active: int
    min_active: int
    acoustic_scale: np.float32
    keeps_links: bool
    lattice_beam: np.float32
    num_words: int  # olabels below it are words and pieces, the others are word-sequence labels
    num_spoken: int  # words from here on are pieces of unknown words, which no LM scores


class StreamParams(NamedTuple):
    """The weights of an utterance, and bounds that follow from these weights."""

    lm_weight: np.float32
    least_cost: np.float32  # lower bound of a closure arc and an arc together; weighted, <= 0
    boosting_weight: np.float32
    boosts: bool
    most_bonus: np.float32  # upper bound of the bonus of an olabel; weighted


class Search(NamedTuple):
    """The inputs that stay constant in the search of an utterance."""

    params: SearchParams
    weights: StreamParams
    graph: GraphArrays
    arc_index: ArcIndex
    boosting: AutomatonArrays


# ---------------------------------------------------------------------- what streams keep of frames

KEY = ("key", np.int64)  # graph state, boosting state, last label + 1 (0 after a blank)
LM = ("lm", np.int64)  # LM context: state of the large LM in the upper half, of the small in the lower
# The fields of a token between two frames, without its key
TOKEN_FIELDS = [
    ("cost", np.float32),  # relative to the best token of the frame, >= 0
    ("back_pointer", np.int32),  # the newest one, or NONE
    ("run", np.int32),  # frames of its last label so far
    ("probability", np.float32),  # sum of the label's posteriors over these frames
]
_ORIGIN = [(name, np.int32) for name in Origin._fields]
# A token, and its `Origin`
TOKEN = np.dtype([KEY, *TOKEN_FIELDS, *_ORIGIN], align=True)
LM_TOKEN = np.dtype([KEY, LM, *TOKEN_FIELDS, *_ORIGIN], align=True)
BACK_POINTER = np.dtype(
    [
        ("previous", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),  # taken before the arc, or NONE
        ("frame", np.int32),  # counted from the start of the stream
        ("run", np.int32),  # of the previous label
        ("probability", np.float32),  # of the previous label
    ],
    metadata={"align": 8},
)
# An arc between two tokens of consecutive frames, for lattices
LINK = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("arc", np.int32),
        ("epsilon", np.int32),
        ("cost", np.float32),  # of this step
        ("acoustic_cost", np.float32),  # part of `cost`; before the frame is pruned: cost of the target
        ("ilabel", np.int32),  # column of the log-probs
        ("move", np.int32),  # BLANK_MOVE, REPEAT_MOVE or NEW_TOKEN, also for arcs of ready-made graphs
        ("frame", np.int32),
    ]
)
# Totals over the frames of a stream
STREAM_TOTALS = [
    ("frames", np.int64),
    ("cost", np.float64),  # of the best token; the tokens' own costs are relative to it
    ("limited", np.int64),  # frames in which max_active excluded tokens
    ("overflowed", np.int64),  # frames whose tokens exceeded the capacity
    ("links", np.int64),
]
COUNTERS = np.dtype([("tokens", np.int64), ("back_pointers", np.int64), *STREAM_TOTALS])


class StreamArrays(NamedTuple):
    """The state of an utterance between two calls of the search, without its tokens."""

    counters: np.ndarray  # [1] COUNTERS
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK


# --------------------------------------------------------------------------- inside of one frame

# A token of the next frame before recombination
CANDIDATE = np.dtype([KEY, ("cost", np.float32), *_ORIGIN], align=True)
LM_CANDIDATE = np.dtype([KEY, LM, ("cost", np.float32), *_ORIGIN], align=True)
# The tokens in one graph state and boosting state; with a large LM, the tokens of one LM context among them
GROUP_FIELDS = [
    ("cost", np.float32),  # of the best token
    ("source", np.int32),
    ("epsilon", np.int32),
    ("label", np.int32),  # last label of the best token
    ("other_cost", np.float32),  # of the best token with another last label; inf: there is none
    ("other_source", np.int32),
    ("other_epsilon", np.int32),
    ("newest", np.int32),  # its newest GROUP_TOKEN, or NONE; for lattices only
]
GROUP = np.dtype([KEY, *GROUP_FIELDS], align=True)  # the key is a token's key >> 16
GROUP_TOKEN = np.dtype([("cost", np.float32), ("source", np.int32), ("epsilon", np.int32), ("next", np.int32)])
SLOT = np.dtype([("stamp", np.int32), ("entry", np.int32)])
FRAME_FIELDS = [
    ("status", np.int64),  # see `keys.py`
    ("tokens", np.int64),  # in `next_tokens`
    ("candidates", np.int64),
    ("groups", np.int64),
    ("group_tokens", np.int64),
    ("labels", np.int64),
    ("links", np.int64),  # of this frame; they follow those of the stream
    ("best", np.float32),  # cost of the best candidate so far
    ("beam", np.float32),  # of this frame; `min_active` may widen it
    ("cutoff", np.float32),  # best + beam; candidates above it are dropped
    ("last_rank", np.int64),  # candidates with a higher rank are dropped, see `rank_of`
    ("full", np.bool_),  # the keys exceed the capacity; further keys were refused
    ("token_mask", np.int64),  # size of the part in use of each hash table, minus 1
    ("group_mask", np.int64),
]
FRAME_STATE = np.dtype(FRAME_FIELDS, align=True)


class Workspace(NamedTuple):
    """The buffers for the search of one utterance. The contents of the buffers are not used after a call."""

    current: np.ndarray  # [capacity] TOKEN
    next_tokens: np.ndarray  # [capacity] TOKEN
    token_slots: np.ndarray  # [power of 2] SLOT
    candidates: np.ndarray  # [C] CANDIDATE, the list before recombination
    groups: np.ndarray  # [entries] GROUP; with a large LM `lm` has the groups
    group_slots: np.ndarray  # [power of 2] SLOT
    group_tokens: np.ndarray  # [2 entries or 1] GROUP_TOKEN
    posteriors: np.ndarray  # [V + 1] float32, cache of exp(log-prob); UNKNOWN: not computed
    labels: np.ndarray  # [V + 1] int32, labels that may stay within the beam, likely ones first
    histogram: np.ndarray  # [BINS] int64
    renumbered: np.ndarray  # [capacity] int32, new index of each next token, or NONE
    frame: np.ndarray  # [1] FRAME_STATE
    stamps: np.ndarray  # [3] int32, current stamps of the tables of tokens, groups and LM contexts
    lm: Any = None  # LmWorkspace; with a large LM


def token_capacity(max_active: int) -> int:
    """Return the capacity for next tokens: four times `max_active`, because at most about `max_active` survive."""
    return max(4 * max_active, MAX_EPSILONS + 1)
