"""Beams of transducer searches: hypotheses, their tree of tokens, and what a choice makes of one.

RNN-T is treated as a TDT model whose only duration is 0 with probability 1: a token stays in its
frame, and a blank, whatever its duration, moves on by at least one frame. So there is one search for
both. A `choice` is what a hypothesis is extended by: label * D + index of the duration, D durations;
KEEP leaves the hypothesis as it is.

The tokens of all hypotheses form a tree: a node per token (with `alignments` also per blank) that
points to the node before it. Example with two hypotheses "4 7" and "4 2", the latter a frame later:

    node      0     1     2     3          node 0 is the root, the empty text
    parent   -1     0     1     1
    label    -1     4     7     2
    frame     -     3     3     4
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.batch import FusionArrays
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.text_hash import extended_hash
from nemo_gpu_decoding.search.transducer.records import HYPOTHESIS, KEEP, NO_LABEL, NODE, ROOT, STREAM_COUNTERS


class BeamState(NamedTuple):
    """What a search remembers of n utterances. P entries in the prediction cache."""

    beam: np.ndarray  # [n, K] HYPOTHESIS
    counters: np.ndarray  # [n] STREAM_COUNTERS
    ends: np.ndarray  # [n] int64, frames known so far
    steps: np.ndarray  # [n] int64, times that the utterance was worked on
    cache_hashes: np.ndarray  # [n, P] uint64
    cache_lengths: np.ndarray  # [n, P] int32, -1 for an entry that is free
    cache_used: np.ndarray  # [n, P] int64, step of the last use

    @property
    def live(self) -> np.ndarray:
        """[n, K] bool, the slots that hold a hypothesis."""
        return np.arange(self.beam.shape[1]) < self.counters["size"][:, None]


class PendingPredictions(NamedTuple):
    """What the prediction network has to compute after a step, at most K texts per utterance."""

    counts: np.ndarray  # [n] int32
    labels: np.ndarray  # [n, K] int64
    sources: np.ndarray  # [n, K] int64, entry of the text before the label
    targets: np.ndarray  # [n, K] int64, entry of the text with it


class StepData(NamedTuple):
    """What a step reads and changes in place."""

    log_probs: np.ndarray  # [rows, V + 1 (+ D)] float32, of the joint; blank in column V, then durations
    row_of: np.ndarray  # [n, K] int32, row of a hypothesis, or -1
    state: BeamState
    nodes: np.ndarray  # [n, N] NODE
    pending: PendingPredictions


def new_beam_state(fusions: FusionArrays, beam_size: int) -> BeamState:
    """n utterances with nothing read: the empty text in slot 0, its prediction in entry 0."""
    n = len(fusions.lm_weights)
    entries = 4 * beam_size  # at least 2 K: those of the old and of the new hypotheses
    beam = np.zeros((n, beam_size), HYPOTHESIS)
    first = beam[:, 0]
    first["last_label"] = NO_LABEL
    first["open"] = 1
    first["lm_state"] = fusions.lm_starts
    first["boosting_state"] = fusions.boosting_starts
    counters = np.zeros(n, STREAM_COUNTERS)
    counters["size"] = counters["node_count"] = 1
    cache_lengths = np.full((n, entries), -1, np.int32)
    cache_lengths[:, 0] = 0
    return BeamState(
        beam=beam,
        counters=counters,
        ends=np.zeros(n, np.int64),
        steps=np.zeros(n, np.int64),
        cache_hashes=np.zeros((n, entries), np.uint64),
        cache_lengths=cache_lengths,
        cache_used=np.full((n, entries), -1, np.int64),
    )


def new_nodes(n: int, capacity: int) -> np.ndarray:
    """Trees [n, capacity] NODE that hold their roots."""
    nodes = np.empty((n, max(1, capacity)), NODE)
    nodes[:, ROOT]["parent"] = -1
    nodes[:, ROOT]["label"] = NO_LABEL
    return nodes


def grown_nodes(nodes: np.ndarray, needed: int) -> np.ndarray:
    """The trees in buffers for `needed` nodes at least; twice as large where they do not suffice."""
    n, capacity = nodes.shape
    if needed <= capacity:
        return nodes
    larger = np.empty((n, max(needed, 2 * capacity)), NODE)
    larger[:, :capacity] = nodes
    return larger


def new_pending(n: int, beam_size: int) -> PendingPredictions:
    """Nothing to compute, for n utterances."""
    arrays = (np.empty((n, beam_size), np.int64) for _ in range(3))
    return PendingPredictions(np.zeros(n, np.int32), *arrays)


@linked
def extend(hypothesis, choice, params, durations):
    """Apply a choice to a hypothesis, all but its score and what depends on other hypotheses."""
    if choice == KEEP:
        return
    label = choice // params.num_durations
    duration = durations[choice % params.num_durations]
    if label == params.vocab_size:
        duration = max(1, duration)  # a blank always moves on
    else:
        hypothesis.prefix_hash = hypothesis.text_hash
        hypothesis.text_hash = extended_hash(hypothesis.text_hash, label)
        hypothesis.last_label = label
        hypothesis.length += 1
        hypothesis.symbols += 1
    if duration > 0:
        hypothesis.symbols = 0
    hypothesis.frame += duration


@linked
def find_duplicate(beam, size, hypothesis):
    """The slot below `size` with the same text and frame, or -1.

    In RNN-T two hypotheses of a text are always at the same frame where this is asked.
    """
    for i in range(size):
        if (
            beam[i].text_hash == hypothesis.text_hash
            and beam[i].frame == hypothesis.frame
            and beam[i].length == hypothesis.length
            and beam[i].last_label == hypothesis.last_label
        ):
            return i
    return -1
