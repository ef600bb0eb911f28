"""What the kernels of cuda_wfst take: their parameters, their records, their memory.

The twins of this file are `kernel.cu`, `compact.cu`, `leading.cu` and the headers beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.graph.csr import EPSILON, GRAPH_ARC, GRAPH_STATE
from nemo_gpu_decoding.search.word_graph.tokens import BINS, LINK, RECORD, token_capacity

# What an utterance wants of its own; `Utterance` of graph.cuh.
UTTERANCE = np.dtype(
    [
        ("boosting_states", np.int64),  # where its automaton begins among all
        ("boosting_arcs", np.int64),
        ("lm_weight", np.float32),
        ("least_cost", np.float32),
        ("boosting_weight", np.float32),
        ("most_bonus", np.float32),
        ("boosts", np.int32),
        ("unused", np.int32),
    ]
)
# A token between two frames; `Token` of graph.cuh.
TOKEN = np.dtype(
    [
        ("key", np.int64),
        ("cost", np.float32),
        ("record", np.int32),
        ("run", np.int32),
        ("probability", np.float32),
    ]
)
# How far an utterance has come; `Progress` of graph.cuh.
PROGRESS = np.dtype(
    [
        ("tokens", np.int32),
        ("records", np.int32),
        ("half", np.int32),  # of the room for tokens, in which they are
        ("status", np.int32),  # of ways.py: DONE, BAD_FRAME, NO_TOKEN, RECORDS_FULL, LINKS_FULL
        ("wanted", np.int32),  # RECORDS_FULL, LINKS_FULL: records or links that the next frame may need
        ("begin", np.int32),  # frames of the chunk that were read
        ("frames", np.int64),
        ("cost", np.float64),
        ("limited", np.int64),
        ("overflowed", np.int64),
        ("links", np.int64),
    ]
)
# What is known of a best path without its past; `Leading` of leading.cu.
LEADING = np.dtype([("best", TOKEN), ("ending", TOKEN), ("ends", np.int32), ("records", np.int32)])
WAY_BYTES, ENTRY_BYTES = 32, 32  # `Way`; `Entry` and `Second` of tables.cuh

# The types of log-probs that the kernel reads as they are, and their names in CUDA C++.
LOG_PROB_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

THREADS = 512  # per block
WAYS = 8192  # that are compared together; at least 2 THREADS
LEAST_GROUPS = 1024


@dataclass(frozen=True)
class Room:
    """Sizes of what an utterance needs in global memory; what its results are does not depend on them,
    but for that of `tokens`, which is the CPU's."""

    tokens: int  # of a frame, those that do not survive included
    groups: int
    seconds: bool  # topology normal without links: groups have second places
    ways: int
    columns: int

    @property
    def follower_slots(self) -> int:
        return _slots(
            self.tokens + self.ways
        )  # each way of a list may claim one before there is no room

    @property
    def group_slots(self) -> int:
        return _slots(self.groups)

    @property
    def working_bytes(self) -> int:
        """Global memory of one utterance while a chunk is read, beside what it keeps (`records`,
        `links`)."""
        tokens = self.tokens * (2 * TOKEN.itemsize + ENTRY_BYTES)
        groups = self.groups * ENTRY_BYTES * (1 + self.seconds)
        slots = 4 * (self.follower_slots + self.group_slots)
        return tokens + groups + slots + self.ways * WAY_BYTES + 4 * self.columns


def room_for(max_active: int, columns: int, *, seconds: bool) -> Room:
    """What an utterance needs that keeps about `max_active` tokens."""
    groups = max(2 * max_active, LEAST_GROUPS)
    return Room(token_capacity(max_active), groups, seconds, max(WAYS, 2 * THREADS), columns)


def _slots(entries: int) -> int:
    """Slots of a hash table that is at most three quarters full, a power of two."""
    return 1 << (entries * 4 // 3).bit_length()


def shared_bytes(columns: int, item_bytes: int, most_shared: int) -> tuple[int, int]:
    """Dynamic shared memory of a block of `advance`, and the part of it that one row takes; 0: rows do
    not fit and are read where they lie. The order is that of kernel.cu."""
    tally, scratch = 48, 8 * 32
    own = -(-(tally + scratch + 4 * (BINS + 2 * (THREADS + 1))) // 16) * 16
    in_shared = -(-columns * item_bytes // 16) * 16 + 16  # RowFetch::buffer_bytes
    row_bytes = in_shared if own + 2 * in_shared <= most_shared else 0
    return own + 2 * row_bytes, row_bytes


_TABLES = {
    "graph_states": Tensor(GRAPH_STATE, ("S",)),
    "graph_arcs": Tensor(GRAPH_ARC, ("A",)),
    "graph_epsilons": Tensor(EPSILON, ("E",)),
    "graph_compounds": Tensor(torch.int32, ("C", 2)),
    "boosting_states": Tensor(STATE, ("S'",)),
    "boosting_arcs": Tensor(ARC, ("A'",)),
}
_INTEGERS = (
    "frames", "columns", "held", "max_tokens", "max_groups", "max_ways", "max_records",
    "max_links", "follower_slot_count", "group_slot_count", "num_words", "blank_id", "topology",
)  # fmt: skip


@lru_cache(maxsize=len(LOG_PROB_TYPES))
def advance_signature(dtype: torch.dtype) -> Signature:
    """Parameters of `advance` in kernel.cu for log-probs of this type."""
    return Signature(
        "advance",
        {
            "log_probs": Tensor(dtype, ("B", "T", "V+1")),
            "lengths": Tensor(torch.int64, ("B",)),
            "utterances": Tensor(UTTERANCE, ("B",)),
            "tokens": Tensor(TOKEN, ("B", "H")),
            "progress": Tensor(PROGRESS, ("B",)),
            "next_tokens": Tensor(TOKEN, ("B", 2, "N")),
            "next_progress": Tensor(PROGRESS, ("B",)),
            "records": Tensor(RECORD, ("B", "R")),
            "links": Tensor(LINK, ("B", "L"), optional=True),
            **_TABLES,
            "follower_slots": Tensor(torch.int32, ("B", "N slots")),
            "follower_entries": Tensor(torch.int64, ("B", "N", ENTRY_BYTES // 8)),
            "group_slots": Tensor(torch.int32, ("B", "G slots")),
            "group_entries": Tensor(torch.int64, ("B", "G", ENTRY_BYTES // 8)),
            "group_seconds": Tensor(torch.int64, ("B", "G", ENTRY_BYTES // 8), optional=True),
            "ways": Tensor(torch.int64, ("B", "W", WAY_BYTES // 8)),
            "labels": Tensor(torch.int32, ("B", "V+1")),
            **{name: Scalar(np.int32) for name in _INTEGERS},
            "beam": Scalar(np.float32),
            "max_active": Scalar(np.int32),
            "acoustic_scale": Scalar(np.float32),
            "lattice_beam": Scalar(np.float32),
            "row_bytes": Scalar(np.int32),
        },
    )


COMPACT = Signature(
    "compact",
    {
        "tokens": Tensor(TOKEN, ("B", "H")),
        "progress": Tensor(PROGRESS, ("B",)),
        "records": Tensor(RECORD, ("B", "R")),
        "kept": Tensor(RECORD, ("B", "room")),
        "numbers": Tensor(torch.int32, ("B", "R")),
        "held": Scalar(np.int32),
        "max_records": Scalar(np.int32),
        "room": Scalar(np.int32),
    },
)

LEADING_SIGNATURE = Signature(
    "leading",
    {
        "rows": Tensor(torch.int32, ("A",)),
        "utterances": Tensor(UTTERANCE, ("B",)),
        "tokens": Tensor(TOKEN, ("B", "H")),
        "progress": Tensor(PROGRESS, ("B",)),
        "records": Tensor(RECORD, ("B", "R")),
        **{name: tensor for name, tensor in _TABLES.items() if name != "graph_arcs"},
        "found": Tensor(LEADING, ("A",)),
        "pasts": Tensor(RECORD, ("A", "room")),
        "held": Scalar(np.int32),
        "max_records": Scalar(np.int32),
        "room": Scalar(np.int32),
        "num_words": Scalar(np.int32),
        "final": Scalar(np.bool_),
    },
)
