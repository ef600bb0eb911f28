"""What the kernel of paged_biglm takes: its parameters, its records, its memory.

The twins of this file are `kernel.cu` and the headers beside it; what they share with cuda_wfst is in
the file of that name there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.lm.on_device import lm_parameters
from nemo_gpu_decoding.search.word_graph import launch_shape as shapes
from nemo_gpu_decoding.search.word_graph.tokens import LINK, RECORD

# What an utterance wants of its own; `BigUtterance` of space.cuh.
UTTERANCE = np.dtype([*shapes.UTTERANCE.descr, ("correction_weight", np.float32), ("padding", np.int32)])
# A token between two frames; `Token` of word_graph/graph.cuh with a `HistoryKey`.
TOKEN = np.dtype(
    [
        ("key", np.int64),
        ("lm", np.int64),
        ("cost", np.float32),
        ("record", np.int32),
        ("run", np.int32),
        ("probability", np.float32),
    ]
)
# What the search took so far; `Work` of space.cuh.
WORK = np.dtype(
    [
        ("look_ups", np.int64),  # questions to the LMs
        ("memo_hits", np.int64),  # of these, answered by what was asked before or by another history
        ("arc_visits", np.int64),
        ("groups", np.int64),
        ("prolonged", np.int64),
        ("cache_hits", np.int64),  # arcs of the LMs, see `lookup_statistics.py`
        ("cache_misses", np.int64),
        ("cache_sectors", np.int64),
    ]
)

# Records of word_graph/tables.cuh with a `HistoryKey`, and of space.cuh
WAY_BYTES, ENTRY_BYTES = 40, 40
MEMBER_BYTES, HISTORY_BYTES, GROUP_BYTES = 40, 28, 40
VISIT_BYTES, ERRAND_BYTES, ANSWER_BYTES = 8, 32, 24

SORTED_BY_WARP = 64  # of sort.cuh
STATIC_SHARED_BYTES = 1024  # what the kernel takes for itself, at most
ERRANDS = 4096  # that ask together
ANSWERS = 8192  # that are kept, at least ERRANDS


@dataclass(frozen=True)
class Room:
    """Sizes of what an utterance needs in global memory; what its results are does not depend on them,
    but for that of `tokens`, which is the CPU's."""

    tokens: int  # of a frame, those that do not survive included
    members: int  # tokens in their own state and after each epsilon record; also histories, groups
    visits: int  # arcs that groups may take
    ways: int
    errands: int
    answers: int
    columns: int

    @property
    def follower_slots(self) -> int:
        return shapes._slots(self.tokens + self.ways)

    @property
    def member_slots(self) -> int:
        return shapes._slots(self.members)

    @property
    def answer_slots(self) -> int:
        return shapes._slots(self.answers)

    @property
    def large_groups(self) -> int:
        return self.members // SORTED_BY_WARP + 1

    @property
    def working_bytes(self) -> int:
        """Global memory of one utterance while a chunk is read, beside what it keeps (`records`,
        `links`)."""
        tokens = self.tokens * (2 * TOKEN.itemsize + ENTRY_BYTES)
        members = self.members * (MEMBER_BYTES + HISTORY_BYTES + GROUP_BYTES + 8)
        slots = 4 * (self.follower_slots + 2 * self.member_slots + self.answer_slots)
        lists = self.ways * WAY_BYTES + self.visits * VISIT_BYTES + self.errands * (ERRAND_BYTES + 4)
        rest = self.answers * ANSWER_BYTES + 4 * self.large_groups + 4 * self.columns
        return tokens + members + slots + lists + rest


def room_for(max_active: int, columns: int, doubled: int = 0) -> Room:
    """What an utterance needs that keeps about `max_active` tokens.

    Args:
        doubled: how often the room for members and visits has turned out to be too small.
    """
    members = max(2 * max_active, shapes.LEAST_GROUPS) << doubled
    return Room(
        tokens=shapes.token_capacity(max_active),
        members=members,
        visits=2 * members,
        ways=max(shapes.WAYS, 2 * shapes.THREADS),
        errands=max(ERRANDS, shapes.THREADS),
        answers=max(ANSWERS, ERRANDS, shapes.THREADS),
        columns=columns,
    )


def shared_bytes(columns: int, item_bytes: int, most_shared: int) -> tuple[int, int]:
    """Dynamic shared memory of a block, and the part of it that one row takes; as in cuda_wfst."""
    return shapes.shared_bytes(columns, item_bytes, most_shared - STATIC_SHARED_BYTES)


_ROOMS = {
    "follower_slots": Tensor(torch.int32, ("B", "N slots")),
    "follower_entries": Tensor(torch.int64, ("B", "N", ENTRY_BYTES // 8)),
    "ways": Tensor(torch.int64, ("B", "W", WAY_BYTES // 8)),
    "labels": Tensor(torch.int32, ("B", "V+1")),
    "members": Tensor(torch.int64, ("B", "M", MEMBER_BYTES // 8)),
    "histories": Tensor(torch.int32, ("B", "M", HISTORY_BYTES // 4)),
    "groups": Tensor(torch.int64, ("B", "M", GROUP_BYTES // 8)),
    "order": Tensor(torch.int64, ("B", "M")),
    "large_groups": Tensor(torch.int32, ("B", "large groups")),
    "member_slots": Tensor(torch.int32, ("B", "M slots")),
    "history_slots": Tensor(torch.int32, ("B", "M slots")),
    "visits": Tensor(torch.int32, ("B", "visits", VISIT_BYTES // 4)),
    "errands": Tensor(torch.int64, ("B", "errands", ERRAND_BYTES // 8)),
    "asked": Tensor(torch.int32, ("B", "errands")),
    "answers": Tensor(torch.int64, ("B", "answers", ANSWER_BYTES // 8)),
    "answer_slots": Tensor(torch.int32, ("B", "answer slots")),
}
_INTEGERS = (
    "frames", "columns", "held", "max_tokens", "max_ways", "max_records", "max_links", "max_members",
    "max_visits", "max_errands", "max_answers", "follower_slot_count", "member_slot_count",
    "answer_slot_count",
)  # fmt: skip


@lru_cache(maxsize=len(shapes.LOG_PROB_TYPES))
def advance_signature(dtype: torch.dtype) -> Signature:
    """Parameters of `advance` in kernel.cu for log-probs of this type."""
    return Signature(
        "advance",
        {
            "log_probs": Tensor(dtype, ("B", "T", "V+1")),
            "lengths": Tensor(torch.int64, ("B",)),
            "utterances": Tensor(UTTERANCE, ("B",)),
            "tokens": Tensor(TOKEN, ("B", "H")),
            "progress": Tensor(shapes.PROGRESS, ("B",)),
            "work_before": Tensor(WORK, ("B",)),
            "next_tokens": Tensor(TOKEN, ("B", 2, "N")),
            "next_progress": Tensor(shapes.PROGRESS, ("B",)),
            "next_work": Tensor(WORK, ("B",)),
            "records": Tensor(RECORD, ("B", "R")),
            "links": Tensor(LINK, ("B", "L"), optional=True),
            **shapes._TABLES,
            **lm_parameters("large"),
            **lm_parameters("small"),
            "labels_in_large": Tensor(torch.int64, ("words",)),
            "labels_in_small": Tensor(torch.int64, ("words",)),
            **_ROOMS,
            **{name: Scalar(np.int32) for name in _INTEGERS},
            "is_difference": Scalar(np.bool_),
            **{name: Scalar(np.int32) for name in ("group_size", "num_words", "blank_id", "topology")},
            "beam": Scalar(np.float32),
            "max_active": Scalar(np.int32),
            "acoustic_scale": Scalar(np.float32),
            "lattice_beam": Scalar(np.float32),
            "row_bytes": Scalar(np.int32),
        },
    )


COMPACT = Signature("compact", {**shapes.COMPACT.parameters, "tokens": Tensor(TOKEN, ("B", "H"))})
