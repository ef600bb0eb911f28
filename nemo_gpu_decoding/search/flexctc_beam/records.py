"""Declare records and kernel arguments of flexctc_beam; `records.cuh` is generated from this file."""

from typing import Final, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.records import dtype_of
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.fusion.automaton import ARC, STATE
from nemo_gpu_decoding.fusion.batch import UTTERANCE

MERGE_MAX: Final = 0
MERGE_SUM: Final = 1
MERGE_PREFIX: Final = 2
MERGE = {"max": MERGE_MAX, "sum": MERGE_SUM, "prefix": MERGE_PREFIX}
NO_LABEL: Final = -1

# `status` of PROGRESS: why a search cannot continue. On the CPU, BAD_INPUT is in place of a beam's size.
FINE: Final = 0
BAD_INPUT: Final = -1  # the next frame holds NaN or a value above MOST_LOG_PROB
NO_LABEL_POSSIBLE: Final = -2  # the next frame leaves no label possible
BAD_LENGTH: Final = -3  # the length of the chunk is below 0 or above its T
BACK_POINTERS_FULL: Final = -4  # the chunk has more frames than the back-pointers can hold

# One hypothesis of the beam; a batch is an array [B, K] of them. Scores are natural log.
HYPOTHESIS = np.dtype(
    [
        ("score", np.float32),
        ("last_label", np.int32),  # of the last frame (max, sum) or last token (prefix); or NO_LABEL
        ("text_hash", np.uint64),
        ("length", np.int32),  # tokens so far
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
        # upper bounds of the weighted LM and boosting scores of the next token
        ("lm_bound", np.float32),
        ("boosting_bound", np.float32),
        # merge=prefix only: the probability of the text, split by what its alignments end in
        ("blank_score", np.float32),
        ("token_score", np.float32),
        ("parent_hash", np.uint64),  # of the text without its last token
    ],
    align=True,
)


class SearchParams(NamedTuple):
    """The options of a batch; an `UtteranceFusion` has the LM and boosting tree of each utterance."""

    blank_id: int
    vocab_size: int  # V
    merge: int
    beam_beta: np.float32
    threshold: np.float32
    # merge=prefix on the CPU: of texts with equal last tokens and equal states of LM and boosting, which go on alike,
    # only the best one is kept. The best text then needs a much smaller beam.
    recombines: bool


SEARCH_PARAMS = dtype_of(SearchParams)

# ------------------------------------------------------------------------------------ for kernels

# Progress of an utterance. All zeros: no frame has been read.
PROGRESS = np.dtype(
    [
        ("size", np.int32),  # hypotheses in the beam; its content is valid from frame 1 on
        ("status", np.int32),  # 0, or the reason for which the search has stopped
        ("frames", np.int64),  # frames read
        ("offset", np.float64),  # the part of the scores that is not in the beam
    ]
)
# A candidate without its score; the key contains the score.
CANDIDATE_ITEM = np.dtype(
    [
        ("parent", np.int32),  # slot in the beam
        ("label", np.int32),  # ~label for a new token, as in `BackPointers`
        # or ~k: the text of hypothesis k is unchanged, for every alignment (merge=prefix)
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
    ],
    metadata={"align": 16},
)
# Counters that the threads of a block share.
COUNTERS = np.dtype(
    [
        ("best_key", np.uint64),  # of the candidates seen by `keep_best` and `note_best`; 0: none
        ("kth_key", np.uint64),  # the K-th best of them; 0: there are fewer
        ("num_candidates", np.int32),
        ("num_labels", np.int32),
        ("num_pairs", np.int32),
        ("beam_size", np.int32),  # live hypotheses
        ("best_new_score", np.uint32),  # ordered bits of the upper bound of a new label with log-prob 0
        ("unused", np.int32, 3),
    ],
    metadata={"align": 16},
)
# merge=prefix: scores of an unchanged text, by a blank or by its last token.
KEPT_TEXT = np.dtype([("blank_score", np.float32), ("token_score", np.float32)])


class ListSizes(NamedTuple):
    """The capacities (in entries) of the lists in shared memory; results do not depend on the capacities."""

    candidates: int  # at least 2 K + threads of the block
    labels: int  # columns that are scanned together
    pairs: int  # (label, hypothesis) pairs that are tested together


LIST_SIZES = dtype_of(ListSizes)

BACK_POINTER_ARRAYS = {
    "back_pointer_labels": Tensor(torch.int32, ("B", "capacity", "K"), written=True),
    "back_pointer_parents": Tensor(torch.int16, ("B", "capacity", "K"), written=True),
    "back_pointer_log_probs": Tensor(torch.float32, ("B", "capacity", "K"), written=True),
}

# Reads lengths[b] frames of every utterance b.
ADVANCE = Signature(
    "advance",
    {
        "log_probs": Tensor(tuple(FLOAT_TYPES), ("B", "T", "V+1")),
        "lengths": Tensor(torch.int64, ("B",)),
        "utterances": Tensor(UTTERANCE, ("B",)),
        "beams": Tensor(HYPOTHESIS, ("B", "K")),
        "progress": Tensor(PROGRESS, ("B",)),
        "next_beams": Tensor(HYPOTHESIS, ("B", "K"), written=True),
        "next_progress": Tensor(PROGRESS, ("B",), written=True),
        **BACK_POINTER_ARRAYS,
        "lm_states": Tensor(STATE, ("S",)),
        "lm_arcs": Tensor(ARC, ("A",)),
        "boosting_states": Tensor(STATE, ("S'",)),
        "boosting_arcs": Tensor(ARC, ("A'",)),
        "params": Scalar(SEARCH_PARAMS),
        "sizes": Scalar(LIST_SIZES),
        "frames": Scalar(np.int32),  # T
        "capacity": Scalar(np.int32),  # frames of the back-pointers
        "beam_size": Scalar(np.int32),  # K
        "shared_rows": Scalar(np.int32),  # rows in shared memory; 0: rows are read from global memory
    },
)

# Writes the N best hypotheses of R utterances, with up to T tokens each after the committed tokens.
FINISH = Signature(
    "finish",
    {
        "rows": Tensor(torch.int32, ("R",)),  # numbers of the utterances
        "first": Tensor(torch.int64, ("R",)),  # frames before it are committed
        "utterances": Tensor(UTTERANCE, ("B",)),
        "beams": Tensor(HYPOTHESIS, ("B", "K")),
        "progress": Tensor(PROGRESS, ("B",)),
        **BACK_POINTER_ARRAYS,
        "lm_states": Tensor(STATE, ("S",)),
        "boosting_states": Tensor(STATE, ("S'",)),
        "reached": Tensor(PROGRESS, ("R",), written=True),  # a copy, so that all results lie together
        "shared": Tensor(np.dtype(np.int64), ("R",), written=True),  # frames that all live hypotheses share
        # 1: the LM forbids the end everywhere, so final weights were left out
        "without_final": Tensor(np.dtype(np.int32), ("R",), written=True),
        "order": Tensor(np.dtype(np.int32), ("R", "N"), written=True),  # slots, best first; -1: fewer
        "scores": Tensor(np.dtype(np.float32), ("R", "N"), written=True),
        "lengths": Tensor(np.dtype(np.int32), ("R", "N"), written=True),  # tokens of each path
        "tokens": Tensor(np.dtype(np.int32), ("R", "N", "T"), written=True),
        "frames": Tensor(np.dtype(np.int32), ("R", "N", "T"), written=True),
        "repeats": Tensor(np.dtype(np.int32), ("R", "N", "T"), written=True),
        "confidence": Tensor(np.dtype(np.float32), ("R", "N", "T"), written=True),
        "alignment": Tensor(np.dtype(np.int32), ("R", "N", "T"), written=True, optional=True),
        "alignment_log_probs": Tensor(np.dtype(np.float32), ("R", "N", "T"), written=True, optional=True),
        "params": Scalar(SEARCH_PARAMS),
        "capacity": Scalar(np.int32),
        "beam_size": Scalar(np.int32),
        "n_best": Scalar(np.int32),  # N
        "max_tokens": Scalar(np.int32),  # T
        "final": Scalar(np.bool_),
        "tile_frames": Scalar(np.int32),  # of the back-pointers in shared memory at a time
    },
)
