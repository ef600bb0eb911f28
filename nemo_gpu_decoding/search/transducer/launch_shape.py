"""What the kernels of all transducer searches are launched with: records, signatures, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.search.transducer.beam import HYPOTHESIS, NODE

DEFINES: dict[str, int | str] = {"HYPOTHESIS_BYTES": HYPOTHESIS.itemsize}

# What an utterance is decoded with in one run; `Utterance` of beam.cuh.
UTTERANCE = np.dtype(
    [
        ("lm_weight", np.float32),
        ("boosting_weight", np.float32),
        ("inverse_lm_weight", np.float64),  # 0 where that is not finite
        ("first_row", np.int64),  # row of frame 0 in the buffer of frames
        ("end", np.int32),  # frames known so far
        ("ended", np.int32),
    ]
)
# How far it has come; `Progress` of beam.cuh.
PROGRESS = np.dtype(
    [
        ("size", np.int32),
        ("expansions", np.int32),
        ("node_count", np.int32),
        ("node_base", np.int32),
        ("activity", np.int32),
    ]
)
# One extension of a hypothesis; `Extension` of beam.cuh.
EXTENSION = np.dtype(
    [
        ("score", np.float32),
        ("choice", np.int32),
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
        ("log_prob", np.float32),
    ]
)
IDLE, GOING, FULL = 0, 1, 2  # `Activity` of beam.cuh
NOTHING = -1  # instead of a row that is to be moved

# The types of logits that the kernels read as they are, and their names in CUDA C++.
LOGIT_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

EXPAND_THREADS = 256  # per block, one block per hypothesis
MERGE_THREADS = 128  # per block, one block per utterance
MOVE_THREADS = 128  # per block, one block per row
MOST_LABELS = 4096  # columns that are scanned together; 4 bytes each
PARTS = 4  # tensors whose rows one launch moves

_ROWS = Tensor(torch.int64, ("B", "K"))
_STATE_OF_A_RUN = {
    "utterances": Tensor(UTTERANCE, ("B",)),
    "beams": Tensor(HYPOTHESIS, ("B", "K")),
    "progress": Tensor(PROGRESS, ("B",)),
}
_EXTENSIONS = {
    "extensions": Tensor(EXTENSION, ("B", "K", "M")),
    "counts": Tensor(torch.int32, ("B", "K")),
}
_AUTOMATA = {
    "lm_states": Tensor(STATE, ("S",)),
    "lm_arcs": Tensor(ARC, ("A",)),
    "boosting_states": Tensor(STATE, ("S'",)),
    "boosting_arcs": Tensor(ARC, ("A'",)),
}


def integers(*names: str) -> dict[str, Scalar]:
    """Parameters of type int."""
    return {name: Scalar(np.int32) for name in names}


@cache
def expand_signature(dtype: torch.dtype, own: tuple[tuple[str, type[np.generic]], ...]) -> Signature:
    """Parameters of a strategy's `expand` for logits of this type; `own`: those that only it has."""
    return Signature(
        "expand",
        {
            "logits": Tensor(dtype, ("rows", "columns")),
            **_STATE_OF_A_RUN,
            "frame_rows": _ROWS,
            **_AUTOMATA,
            **_EXTENSIONS,
            "inverse_temperature": Scalar(np.float64),
            **integers("columns", "beam_size", "vocab_size", "num_durations", "timed", "weighted_blank"),
            **integers("late"),
            **{name: Scalar(kind) for name, kind in own},
            **integers("per_hypothesis", "max_items", "max_labels"),
        },
    )


@cache
def merge_signature(own: tuple[str, ...]) -> Signature:
    """Parameters of a strategy's `merge`; `own`: integers that only it has."""
    return Signature(
        "merge",
        {
            **_EXTENSIONS,
            "durations": Tensor(torch.int32, ("D",)),
            **_STATE_OF_A_RUN,
            "nodes": Tensor(NODE, ("B", "room")),
            "frame_rows": _ROWS,
            "text_rows": _ROWS,
            "labels": _ROWS,
            "sources": _ROWS,
            "targets": _ROWS,
            **integers("room", "entries", "beam_size", "vocab_size", "num_durations", "alignments"),
            **integers(*own),
            **integers("per_hypothesis"),
        },
    )


BEGIN = Signature(
    "begin",
    {
        **_STATE_OF_A_RUN,
        "frame_rows": _ROWS,
        "text_rows": _ROWS,
        **integers("beam_size", "entries", "room"),
    },
)

COUNT_GOING = Signature(
    "count_going",
    {
        "progress": Tensor(PROGRESS, ("B",)),
        "going": Tensor(torch.int32, (1,)),
        **integers("num_utterances"),
    },
)

DECIDE = Signature(
    "decide",
    {
        "handle": Scalar(np.uint64),
        "progress": Tensor(PROGRESS, ("B",)),
        **integers("num_utterances"),
    },
)


def _part(i: int) -> dict[str, Tensor]:
    return {
        f"from{i}": Tensor(torch.uint8, (f"F{i}", f"bytes{i}"), optional=True),
        f"from_rows{i}": Tensor(torch.int64, ("rows",), optional=True),
        f"to{i}": Tensor(torch.uint8, (f"T{i}", f"bytes{i}"), optional=True),
        f"to_rows{i}": Tensor(torch.int64, ("rows",), optional=True),
    }


MOVE_ROWS = Signature(
    "move_rows",
    {
        **{name: tensor for i in range(PARTS) for name, tensor in _part(i).items()},
        **integers(*(f"bytes{i}" for i in range(PARTS))),
    },
)


_ROUTES = {name: Tensor(torch.int64, ("rows",)) for name in ("labels", "sources", "targets")}

LSTM_LAYER = Signature(
    "lstm_layer",
    {
        **_ROUTES,
        "table": Tensor(torch.float32, ("labels", "gates"), optional=True),
        "product": Tensor(torch.float32, ("rows", "inputs and gates"), optional=True),
        "bias": Tensor(torch.float32, ("gates",), optional=True),
        "recalled_below": Tensor(torch.float32, ("E", "gates"), optional=True),
        "recalled": Tensor(torch.float32, ("E", "gates")),
        "hidden": Tensor(torch.float32, ("E", "num_layers", "size")),
        "memory": Tensor(torch.float32, ("E", "num_layers", "size")),
        "hidden_rows": Tensor(torch.float32, ("rows", "size")),
        **integers("size", "layer", "num_layers"),
    },
)

LSTM_OUTPUT = Signature(
    "lstm_output",
    {
        "targets": _ROUTES["targets"],
        "product": Tensor(torch.float32, ("rows", "gates and J")),
        "bias": Tensor(torch.float32, ("J",)),
        "recalled": Tensor(torch.float32, ("E", "gates")),
        "outputs": Tensor(torch.float32, ("E", "J")),
        **integers("size", "width"),
    },
)

STATELESS = Signature(
    "stateless",
    {
        **_ROUTES,
        "tables": Tensor(torch.float32, ("positions", "num_labels", "J")),
        "sums": Tensor(torch.float64, ("positions", "num_labels", 2), optional=True),
        "ones": Tensor(torch.float32, ("J",)),
        "bias": Tensor(torch.float32, ("J",)),
        "contexts": Tensor(torch.int64, ("E", "positions - 1")),
        "outputs": Tensor(torch.float32, ("E", "J")),
        "epsilon": Scalar(np.float64),
        **integers("size", "width", "num_labels", "positions"),
    },
)


@dataclass(frozen=True)
class ExpandShape:
    """Sizes of a launch of `expand`; what its results are does not depend on them."""

    threads: int  # per block, a multiple of 32
    items: int  # entries of the list of extensions, at least M + threads
    labels: int  # columns scanned together, at least M

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the order is that of `Workspace` in expand.cuh."""
        scratch, tally, key, states = 32 * 8, 16, 8, 8
        return scratch + tally + self.items * 2 * (key + states) + 4 * (self.threads + self.labels)


def expand_shape(per_hypothesis: int, num_labels: int) -> ExpandShape:
    """A shape for M extensions per hypothesis of V + 1 labels."""
    labels = max(per_hypothesis, min(num_labels, MOST_LABELS))
    return ExpandShape(EXPAND_THREADS, 2 * per_hypothesis + EXPAND_THREADS, labels)


def merge_bytes(beam_size: int, per_hypothesis: int, pooled: bool) -> int:
    """Dynamic shared memory of a block; the order is that of `MergeWorkspace` in merge.cuh.

    `pooled`: aes_pp, whose `Pool` comes behind it.
    """
    key, choice, numbers, pool = 8, 24, 3 * 4, 8 + 4
    beams = beam_size * (2 * HYPOTHESIS.itemsize + choice + numbers)
    lists = beam_size * per_hypothesis * (key + pool * pooled)
    return beams + lists + 8 * pooled  # for the alignment of the pool


def why_not(
    beam_size: int,
    per_hypothesis: int,
    num_labels: int,
    num_durations: int,
    pooled: bool,
    most_shared: int,
) -> str | None:
    """None if the kernels can search with such a beam, else why not, in one line."""
    choices = num_labels * num_durations + 1
    if beam_size * choices > 2**32:
        return f"beam {beam_size} x {choices} choices exceed the 2^32 that kernels can number"
    needed = max(
        merge_bytes(beam_size, per_hypothesis, pooled),
        expand_shape(per_hypothesis, num_labels).shared_bytes,
    )
    if needed > most_shared:
        return (
            f"a beam of {beam_size} needs {needed} bytes of shared memory per block of threads, "
            f"of which there are {most_shared}"
        )
    return None
