"""Declare records, kernel arguments and block sizes of alsd_pp and aes_pp; `records.cuh` comes from this file."""

from typing import Final, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.records import dtype_of
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.fusion.automaton import ARC, STATE

NO_LABEL = -1
KEEP: Final = -1  # the choice that leaves a hypothesis unchanged
BAD_INPUT: Final = -1  # in place of a beam's size or a number of extensions: the joint returned NaN or +inf
NO_ROW: Final = -1  # in place of a row to move, or of an entry of the prediction cache
ROOT = 0  # node of the empty text
NO_SCORE: Final = 0  # blank_lm_score_mode, in short `blank_mode`, see scoring.py
LM_WEIGHTED_FULL: Final = 1
BLANK_MODES = {"no_score": NO_SCORE, "lm_weighted_full": LM_WEIGHTED_FULL}

# One hypothesis; a batch is an array [B, K] of them. Scores are natural log.
HYPOTHESIS = np.dtype(
    [
        ("score", np.float32),
        ("last_label", np.int32),  # last token, or NO_LABEL
        ("text_hash", np.uint64),
        ("prefix_hash", np.uint64),  # of the text without its last token
        ("length", np.int32),  # tokens so far
        ("frame", np.int32),  # the frame to read next
        ("symbols", np.int32),  # tokens emitted in this frame
        ("open", np.int32),  # 1: the joint reads it at `frame`; 0: it waits for others
        ("node", np.int32),  # of its last token (or blank) in the tree
        ("cache_entry", np.int32),  # of its text in the prediction cache
        ("lm_state", np.int32),
        ("boosting_state", np.int32),
    ],
    align=True,
)
# A token (or blank) of a hypothesis, in a tree in which hypotheses share their first tokens.
NODE = np.dtype(
    [
        ("parent", np.int32),  # node before it
        ("label", np.int32),
        ("frame", np.int32),  # in which it was emitted
        ("duration", np.int32),  # frames that it advances
        ("log_prob", np.float32),  # of the label, by the joint
    ]
)
# An extension of a hypothesis, before pruning.
CANDIDATE = np.dtype(
    [
        ("score", np.float32),
        ("parent", np.int32),  # slot in the beam
        ("choice", np.int32),  # label * D + index of the duration, or KEEP
        ("lm_state", np.int32),  # after it
        ("boosting_state", np.int32),
        ("log_prob", np.float32),  # of the label, by the joint; kernels only, the CPU reads it from the row
    ]
)
# Progress of an utterance, 24 bytes.
STREAM_COUNTERS = np.dtype(
    [
        ("size", np.int32),  # live hypotheses; BAD_INPUT, or 0 where no label was possible
        ("expansions", np.int32),  # aes_pp: largest number of tokens that a hypothesis emitted in the present frame
        ("node_count", np.int32),  # of the whole tree
        ("node_base", np.int32),  # kernels: number of the first node in the buffer; the host holds earlier nodes
        ("activity", np.int32),  # kernels: IDLE, ACTIVE, FULL or WAITING
        ("new_texts", np.int32),  # kernels: texts of the last step that wait for the prediction network
    ]
)
IDLE: Final = 0  # every hypothesis waits for frames, is finished, or the input was bad
ACTIVE: Final = 1  # there is a next step
FULL: Final = 2  # the host must fetch the nodes first
WAITING: Final = 3  # the next step only passes its new texts to the prediction network
REFUSED: Final = 4  # a new frame may be NaN or infinite; the run has changed nothing


class SearchParams(NamedTuple):
    """The options of a batch; an `UtteranceFusion` has the LM, boosting tree and weights of each utterance."""

    beam_size: int  # K
    vocab_size: int  # V; also the label of the blank
    num_durations: int  # D
    zero_duration: int  # index of the duration 0, or -1
    timed: bool  # TDT: columns V + 1 .. V + D hold durations
    blank_mode: int  # NO_SCORE or LM_WEIGHTED_FULL
    late: bool  # pruning_mode
    alignments: bool  # blanks get nodes, too
    # The following differ between alsd_pp and aes_pp.
    frame_by_frame: bool  # only hypotheses in the present frame are extended
    blank_ceiling: np.float32  # upper limit of the blank's probability p(b) in 1 - p(b), see scoring.py
    max_symbols: int  # tokens of a hypothesis in one frame; then it takes a blank
    max_extensions: int  # M, of a hypothesis in one step
    gamma: np.float32  # extensions lower than the best one by more than this are dropped, natural log


SEARCH_PARAMS = dtype_of(SearchParams)

# ------------------------------------------------------------------------------------ for kernels

# Threads of a block, a multiple of 32.
EXPAND_THREADS = 256  # a block per hypothesis
FEWER_EXPAND_THREADS = 128  # if there are many hypotheses, see `expand_threads` in cuda_engine.py
MERGE_THREADS = 128  # a block per utterance
MOVE_THREADS = 128  # a block per row
FEWEST_PREDICTION_ROWS = 128  # of the prediction network's batch; products with fewer are hardly faster
MOVED_PARTS = 4  # tensors whose rows one launch moves

# Weights and frames of an utterance in one run, 56 bytes.
STREAM_PARAMS = np.dtype(
    [
        ("lm_weight", np.float32),  # 0: no LM
        ("boosting_weight", np.float32),
        ("inverse_lm_weight", np.float64),  # 1 / lm_weight; 0 where that is not finite
        ("first_row", np.int64),  # row of frame 0 in the buffer of frames; < 0 if it has been dropped
        ("new_row", np.int64),  # of the first new frame
        ("new_count", np.int32),  # new frames, `kept` rows after the utterance's first row of the buffer
        ("kept", np.int32),  # frames of earlier runs that are still needed; they move to the first row
        ("kept_from", np.int32),  # where they are: rows after the utterance's first one
        ("end", np.int32),  # frames received so far
        ("ended", np.int32),  # 1: no more frames will follow
    ],
    align=True,
)
FUSION_STATES = np.dtype([("lm", np.int32), ("boosting", np.int32)])  # after an extension
# Counters that the threads of `expand` share.
LIST_COUNTERS = np.dtype(
    [
        ("num_items", np.int32),
        ("num_labels", np.int32),
        ("floor", np.float32),  # the score that an extension must reach
        ("threshold", np.float32),  # log-probability of the labels that are looked up first
    ],
    metadata={"align": 16},
)


class ListSizes(NamedTuple):
    """The sizes (in entries) of the lists of `expand` in shared memory; results do not depend on these sizes."""

    items: int  # extensions, at least M + threads of the block
    labels: int  # columns that are scanned together, at least M
    log_probs: int  # V + 1: log-probs of all labels are stored; 0: each read computes them from logits


LIST_SIZES = dtype_of(ListSizes)

_STREAMS = Tensor(STREAM_PARAMS, ("B",))
_INT = Scalar(np.int32)


def _rows(written: bool = True) -> Tensor:
    return Tensor(torch.int64, ("B", "K"), written=written)


def _beams(written: bool) -> dict[str, Tensor]:
    return {
        "beams": Tensor(HYPOTHESIS, ("B", "K"), written=written),
        "counters": Tensor(STREAM_COUNTERS, ("B",), written=written),
    }


# The batch of the prediction network; unused rows have the label 0 and NO_ROW.
def _batch(written: bool) -> dict[str, Tensor | Scalar]:
    rows = Tensor(torch.int64, ("prediction_rows",), written=written)
    return {
        "labels": rows,  # the new token
        "sources": rows,  # entry of the text before it in the prediction cache
        "targets": rows,  # entry of the text with it
    }


_TAKEN_ROWS: dict[str, Tensor | Scalar] = {
    "taken_rows": Tensor(torch.int32, (1,), written=True),
    "prediction_rows": _INT,
}

# One block per hypothesis lists its best extensions, and empties a row of that batch.
EXPAND = Signature(
    "expand",
    {
        "logits": Tensor(tuple(FLOAT_TYPES), ("rows", "columns"), type_name="Logit"),
        "streams": _STREAMS,
        **_beams(written=False),
        "frame_rows": _rows(written=False),
        "lm_states": Tensor(STATE, ("S",)),
        "lm_arcs": Tensor(ARC, ("A",)),
        "boosting_states": Tensor(STATE, ("S'",)),
        "boosting_arcs": Tensor(ARC, ("A'",)),
        "extensions": Tensor(CANDIDATE, ("B", "K", "M"), written=True),  # best first
        "counts": Tensor(torch.int32, ("B", "K"), written=True),  # how many; or BAD_INPUT
        "params": Scalar(SEARCH_PARAMS),
        "sizes": Scalar(LIST_SIZES),
        **_batch(written=True),
        **_TAKEN_ROWS,
        "inverse_temperature": Scalar(np.float64),
        "columns": _INT,
    },
)
# One block per utterance builds the new beam from the extensions, and assigns rows of the batch to its new texts.
MERGE = Signature(
    "merge",
    {
        "extensions": Tensor(CANDIDATE, ("B", "K", "M")),
        "counts": Tensor(torch.int32, ("B", "K")),
        "durations": Tensor(torch.int32, ("D",)),  # frames
        "streams": _STREAMS,
        **_beams(written=True),
        "nodes": Tensor(NODE, ("B", "node_capacity"), written=True),
        "frame_rows": _rows(),  # frame that a hypothesis gives to the joint next, or NO_ROW
        "text_rows": _rows(),  # its entry in the prediction cache, or NO_ROW
        "new_labels": _rows(),  # of an utterance's new texts, as in the batch; they may have to wait for rows of it
        "new_sources": _rows(),
        "new_targets": _rows(),
        **_batch(written=True),
        **_TAKEN_ROWS,
        # blocks that are done (lower half) and those of them whose utterance goes on; 0 between launches
        "finished": Tensor(torch.int64, (1,), written=True),
        "handle": Scalar(np.uint64),  # of a WHILE node's condition
        "params": Scalar(SEARCH_PARAMS),
        "node_capacity": _INT,
        "cache_entries": _INT,  # of an utterance
        "sets_condition": _INT,  # 1: the last block sets the WHILE node's condition: does any utterance continue?
    },
)
# Adds new frames to the buffer, and chooses the frame that each hypothesis reads in the first step.
SCHEDULE = Signature(
    "schedule",
    {
        "streams": _STREAMS,
        **_beams(written=True),
        "frame_rows": _rows(),
        "text_rows": _rows(),
        "beam_size": _INT,
        "node_capacity": _INT,
        "cache_entries": _INT,
        "sum": Tensor(torch.float64, (1,), optional=True),  # of all new frames; if it is not finite, nothing changes
        "new_frames": Tensor(torch.uint8, ("N", "frame_bytes"), optional=True),
        "frame_store": Tensor(torch.uint8, ("F", "frame_bytes"), optional=True, written=True),
        "columns": _INT,  # rows of an utterance in `frame_store`
        "frame_bytes": _INT,
    },
)


def _moved_part(i: int) -> dict[str, Tensor | Scalar]:
    return {
        f"from{i}": Tensor(torch.uint8, (f"F{i}", f"bytes{i}"), optional=True),
        f"from_rows{i}": Tensor(torch.int64, ("rows",), optional=True),
        f"to{i}": Tensor(torch.uint8, (f"T{i}", f"bytes{i}"), optional=True, written=True),
        f"to_rows{i}": Tensor(torch.int64, ("rows",), optional=True),
        f"bytes{i}": _INT,
    }


# Moves rows of tensors of any type: states and predictions of hypotheses, and frames.
MOVE_ROWS = Signature(
    "move_rows", {name: parameter for i in range(MOVED_PARTS) for name, parameter in _moved_part(i).items()}
)

# The networks, see networks.cu. E entries of the cache, H hidden values, J joint inputs.


def _values(*shape: str, **options: bool) -> Tensor:
    """Return a tensor in the type that the networks compute in."""
    return Tensor(tuple(FLOAT_TYPES), shape, type_name="Value", **options)


# The joint without its linear layer, see networks.cu.
JOIN_ROWS = Signature(
    "join_rows",
    {
        "frames": _values("F", "J"),  # projected, of all utterances
        "outputs": _values("E", "J"),  # predictions
        "frame_rows": _rows(written=False),
        "text_rows": _rows(written=False),
        "hidden_rows": _values("rows", "J", written=True),
        "width": _INT,  # J
    },
)
_ROUTES = _batch(written=False)
LSTM_LAYER = Signature(
    "lstm_layer",
    {
        **_ROUTES,
        # contributions of labels to the gates of the first layer, bias included; null in other layers
        "table": _values("labels", "4H", optional=True),
        # hidden values below times (recurrent | input) weights, or null
        "product": _values("prediction_rows", "8H", optional=True),
        "bias": Tensor(torch.float32, ("4H",), optional=True),  # of the inputs in `product`, or null
        # hidden values below times recurrent weights, or null; and those of this layer
        "recalled_below": _values("E", "4H", optional=True, written=True),
        "recalled": _values("E", "4H"),
        "hidden": _values("E", "num_layers", "H", written=True),
        "cells": Tensor(torch.float32, ("E", "num_layers", "H"), written=True),
        "hidden_rows": _values("prediction_rows", "H", written=True),  # for the next product
        "size": _INT,  # H
        "layer": _INT,
        "num_layers": _INT,
    },
)
LSTM_OUTPUT = Signature(
    "lstm_output",
    {
        "targets": _ROUTES["targets"],
        # hidden values times (recurrent weights | projection)
        "product": _values("prediction_rows", "4H+J"),
        "bias": Tensor(torch.float32, ("J",)),  # of the projection
        "recalled": _values("E", "4H", written=True),  # of the last layer
        "outputs": _values("E", "J", written=True),
        "size": _INT,  # H
        "width": _INT,  # J
    },
)
STATELESS = Signature(
    "stateless",
    {
        **_ROUTES,
        # projected embeddings, those of the last label first
        "tables": Tensor(torch.float32, ("positions", "num_labels", "J")),
        # sum and sum of squares of each embedding; null where nothing is normalised
        "sums": Tensor(torch.float64, ("positions", "num_labels", 2), optional=True),
        "ones": Tensor(torch.float32, ("J",)),  # the projection of a vector of ones
        "bias": Tensor(torch.float32, ("J",)),
        "contexts": Tensor(torch.int64, ("E", "positions-1"), written=True),  # the oldest label first
        "outputs": _values("E", "J", written=True),
        "epsilon": Scalar(np.float64),  # of the norm
        "size": _INT,  # of all embeddings together
        "width": _INT,  # J
        "num_labels": _INT,
        "positions": _INT,
    },
)
