"""What the kernels of flexctc_beam take: their parameters, their records, their shared memory.

The twins of this file are `kernel.cu`, `finish.cu` and the headers beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.search.flexctc_beam.cpu import HYPOTHESIS

# What an utterance wants, from its first frame to its last; `Utterance` of beam.cuh.
UTTERANCE = np.dtype(
    [
        ("lm_start", np.int32),  # states before the first token
        ("boosting_start", np.int32),
        ("lm_weight", np.float32),
        ("boosting_weight", np.float32),
    ]
)
# How far an utterance has come; `Progress` of beam.cuh. All zeros: nothing read yet.
PROGRESS = np.dtype([("size", np.int32), ("status", np.int32), ("frames", np.int64)], align=True)

# Why a search stands still; `Status` of beam.cuh.
BAD_INPUT, NO_LABEL_POSSIBLE, BAD_LENGTH, HISTORY_FULL = -1, -2, -3, -4

# The types of log-probs that the kernel reads as they are, and their names in CUDA C++.
LOG_PROB_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}

THREADS = 256  # per block of `advance`
FINISH_THREADS = 128
MOST_LABELS = 4096  # columns that are scanned together; 4 bytes each
PAIRS = 1024  # (label, hypothesis) pairs that are tested together; 4 bytes each
TILE_BYTES = 16 * 1024  # of the history that `finish` walks through

_HISTORY = {
    "history_labels": Tensor(torch.int32, ("B", "capacity", "K")),
    "history_parents": Tensor(torch.int16, ("B", "capacity", "K")),
    "history_log_probs": Tensor(torch.float32, ("B", "capacity", "K")),
}
_STATES = {"lm_states": Tensor(STATE, ("S",)), "boosting_states": Tensor(STATE, ("S'",))}


@lru_cache(maxsize=len(LOG_PROB_TYPES))
def advance_signature(dtype: torch.dtype) -> Signature:
    """Parameters of `advance` in kernel.cu for log-probs of this type."""
    return Signature(
        "advance",
        {
            "log_probs": Tensor(dtype, ("B", "T", "columns")),
            "lengths": Tensor(torch.int64, ("B",)),
            "utterances": Tensor(UTTERANCE, ("B",)),
            "beams": Tensor(HYPOTHESIS, ("B", "K")),
            "progress": Tensor(PROGRESS, ("B",)),
            "next_beams": Tensor(HYPOTHESIS, ("B", "K")),
            "next_progress": Tensor(PROGRESS, ("B",)),
            **_HISTORY,
            "lm_states": _STATES["lm_states"],
            "lm_arcs": Tensor(ARC, ("A",)),
            "boosting_states": _STATES["boosting_states"],
            "boosting_arcs": Tensor(ARC, ("A'",)),
            "frames": Scalar(np.int32),
            "columns": Scalar(np.int32),
            "capacity": Scalar(np.int32),
            "beam_size": Scalar(np.int32),
            "blank_id": Scalar(np.int32),
            "merge": Scalar(np.int32),
            "beam_beta": Scalar(np.float32),
            "threshold": Scalar(np.float32),
            "max_candidates": Scalar(np.int32),
            "max_labels": Scalar(np.int32),
            "max_pairs": Scalar(np.int32),
            "row_bytes": Scalar(np.int32),
        },
    )


FINISH = Signature(
    "finish",
    {
        "utterances": Tensor(UTTERANCE, ("B",)),
        "beams": Tensor(HYPOTHESIS, ("B", "K")),
        "progress": Tensor(PROGRESS, ("B",)),
        **_HISTORY,
        **_STATES,
        "reached": Tensor(PROGRESS, ("B",)),
        "without_final": Tensor(torch.int32, ("B",)),
        "order": Tensor(torch.int32, ("B", "N")),
        "scores": Tensor(torch.float32, ("B", "N")),
        "lengths": Tensor(torch.int32, ("B", "N")),
        "tokens": Tensor(torch.int32, ("B", "N", "T")),
        "frames": Tensor(torch.int32, ("B", "N", "T")),
        "repeats": Tensor(torch.int32, ("B", "N", "T")),
        "confidence": Tensor(torch.float32, ("B", "N", "T")),
        "alignment": Tensor(torch.int32, ("B", "N", "T"), optional=True),
        "alignment_log_probs": Tensor(torch.float32, ("B", "N", "T"), optional=True),
        "capacity": Scalar(np.int32),
        "beam_size": Scalar(np.int32),
        "n_best": Scalar(np.int32),
        "room": Scalar(np.int32),
        "blank_id": Scalar(np.int32),
        "merge": Scalar(np.int32),
        "final": Scalar(np.int32),
        "tile_frames": Scalar(np.int32),
    },
)


@dataclass(frozen=True)
class LaunchShape:
    """Sizes of a launch of `advance`; what its results are does not depend on them."""

    threads: int  # per block, a multiple of 32
    candidates: int  # entries of the candidate list, at least 2 K + threads
    labels: int  # columns scanned together
    pairs: int  # (label, hypothesis) pairs tested together
    row_bytes: int  # of a row of log-probs in shared memory; 0: rows are read where they lie

    def shared_bytes(self, beam_size: int) -> int:
        """Dynamic shared memory of a block; the order is that of `Workspace` in frame.cuh."""
        tally, continuation, key, kept = 48, 16, 8, 8
        lists = (self.candidates + beam_size) * (continuation + key)
        beams = beam_size * (2 * HYPOTHESIS.itemsize + kept)
        numbers = 4 * (self.labels + self.pairs + 3 * beam_size)
        return -(-(tally + lists + beams + numbers) // 16) * 16 + 2 * self.row_bytes


def launch_shape(beam_size: int, columns: int, item_bytes: int, most_shared: int) -> LaunchShape:
    """A shape for rows of `columns` numbers of `item_bytes` that needs at most `most_shared` bytes.

    Raises:
        ValueError: there is none.
    """
    in_shared = -(-columns * item_bytes // 16) * 16 + 16  # RowFetch::buffer_bytes
    for row_bytes in (in_shared, 0):
        shape = LaunchShape(
            THREADS, 2 * beam_size + THREADS, min(columns, MOST_LABELS), PAIRS, row_bytes
        )
        needed = shape.shared_bytes(beam_size)
        if needed <= most_shared:
            return shape
    raise ValueError(
        f"a beam of {beam_size} needs {needed} bytes of shared memory per block of threads, "
        f"of which there are {most_shared}"
    )


def finish_shape(beam_size: int, most_shared: int) -> tuple[int, int]:
    """Frames of a tile and bytes of shared memory for a launch of `finish`."""
    per_frame = beam_size * (4 + 4 + 2)
    hypotheses = beam_size * (HYPOTHESIS.itemsize + 3 * 4)
    tile_frames = max(1, min(TILE_BYTES, most_shared - hypotheses) // per_frame)
    return tile_frames, hypotheses + tile_frames * per_frame


def why_not(beam_size: int, columns: int, most_shared: int) -> str | None:
    """None if the kernels can search with such a beam, else why not, in one line."""
    if 2 * beam_size * columns > 2**32:
        return f"2 x beam {beam_size} x {columns} columns exceed the 2^32 that kernels can number"
    try:
        launch_shape(beam_size, columns, 2, most_shared)
    except ValueError as error:
        return str(error)
    return None
