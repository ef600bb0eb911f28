"""`CPUEngine`: repeats joint, step and prediction network until all frames are read.

The utterances of a batch run in lockstep, so that each network runs once per step for all of them. The results of an
utterance do not depend on the others.

`JointRows` lists the pairs of frame and text that the joint evaluates in a step. In TDT the same text may reach the
same frame twice, in different numbers of steps: "4" with a blank of two frames, and "4" with two blanks of one frame.
The joint's output is the same. 10-40 % of all rows are such repeats, and 99 % of them repeat a row of the previous
step, so the rows of one step are kept for the next one. RNN-T has no such repeats in a run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.transducer.beam import StepData, grown_nodes, new_pending
from nemo_gpu_decoding.search.transducer.engine import StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

# With fewer log-probs per step, threads cost more time than they save.
WORK_PER_THREAD = 200_000


class CPUEngine(TransducerEngine):
    """The search on the CPU; the networks run on their own device."""

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        algorithm, beams = self._algorithm, state.beams
        n, beam_size = beams.beam.shape
        pending = new_pending(n, beam_size)
        joint = JointRows(algorithm.networks, algorithm.config.softmax_temperature, state)
        rows = np.arange(n)

        def step(share: np.ndarray) -> None:
            data = StepData(joint.log_probs, joint.row_of, beams, state.nodes, pending)
            algorithm.step(share, data, algorithm.params, algorithm.durations, state.fusions)

        while count := joint.read(rows, ended):
            costs = np.zeros(n)
            costs[rows] = (joint.row_of[rows] >= 0).sum(axis=1)
            rows = np.flatnonzero(costs)  # an utterance that waits once must wait for new frames
            state.nodes = grown_nodes(state.nodes, int(beams.counters["node_count"].max()) + beam_size)
            if count * joint.log_probs.shape[1] < WORK_PER_THREAD:
                step(rows)
            else:
                for_each_share(step, costs, algorithm.config.threads)
            if (beams.counters["size"][rows] <= 0).any():
                return
            state.predictions.extend(algorithm.networks, pending, rows)


class KeptRows(NamedTuple):
    """The rows that each hypothesis read in the last step.

    An entry of the prediction cache identifies a text, because a step does not reassign the entries that it reads.
    """

    rows: np.ndarray  # [n, K] int32, row of log-probs, or -1
    entries: np.ndarray  # [n, K] int32
    frames: np.ndarray  # [n, K] int32


class RowSources(NamedTuple):
    """Sources of the R rows of a step: new rows from the front, rows of the last step from the end."""

    frames: np.ndarray  # [R] int64, row of the flattened frames
    texts: np.ndarray  # [R] int64, entry in the flattened prediction cache
    old_rows: np.ndarray  # [R] int64, row of the last step


class JointRows:
    """The joint's log-probs for the n utterances of a state, K hypotheses each, in one run.

    Args:
        networks: see `TransducerNetworks`.
        temperature: softmax_temperature.
        state: the beams, the frames that may be read, the prediction cache.
    """

    def __init__(self, networks: TransducerNetworks, temperature: float, state: StreamState) -> None:
        self._networks, self._temperature, self._state = networks, temperature, state
        self._flat_frames = state.frames.values.flatten(0, 1)
        # frames and cache entries per utterance
        self._strides = state.frames.values.shape[1], state.beams.cache_hashes.shape[1]
        shape = state.beams.beam.shape
        most = shape[0] * shape[1]
        self._kept = KeptRows(*(np.full(shape, -1, np.int32) for _ in range(3)))
        self._sources = RowSources(*(np.empty(most, np.int64) for _ in range(3)))
        self.row_of = np.empty(shape, np.int32)  # row of a hypothesis in `log_probs`, or -1
        width = networks.vocab_size + 1 + len(networks.durations)
        # [n * K, V + 1 (+ D)] of this step and of the last one
        self.log_probs, self._before = (np.empty((most, width), np.float32) for _ in range(2))

    def read(self, rows: np.ndarray, ended: bool) -> int:
        """Fill `log_probs` and `row_of` for the utterances `rows`; returns the number of hypotheses with a row.

        The values are valid until the second next call.
        """
        self.log_probs, self._before = self._before, self.log_probs
        state, sources = self._state, self._sources
        new, repeated = _schedule(
            rows, state.beams, ended, self.row_of, self._kept, state.frames.first, self._strides, sources
        )
        if new:
            self._compute(new)
        if repeated:
            np.take(self._before, sources.old_rows[-repeated:], axis=0, out=self.log_probs[-repeated:])
        return new + repeated

    def _compute(self, count: int) -> None:
        """Fill the first `count` rows; labels and durations are normalised separately."""
        outputs = self._state.predictions.outputs
        frame, text = (torch.from_numpy(values[:count]).to(outputs.device) for values in self._sources[:2])
        logits = self._networks.join(self._flat_frames.index_select(0, frame), outputs.index_select(0, text))
        log_probs = torch.from_numpy(self.log_probs[:count])
        labels = self._networks.vocab_size + 1
        for begin, end in ((0, labels), (labels, logits.shape[1])):
            if begin < end:
                log_probs[:, begin:end] = normalised(logits[:, begin:end], self._temperature)


def normalised(logits: Tensor, temperature: float) -> Tensor:
    """[N, columns] logits as log-probs, in double.

    The caller rounds them to float32 once, so that the order of a sum has no effect and all backends agree.
    """
    logits = logits.double()
    if temperature != 1.0:
        logits = logits * (1.0 / temperature)
    return torch.log_softmax(logits, dim=-1)


@compiled
def _schedule(rows, beams, ended, row_of, kept, first_frames, strides, sources):
    """Number the hypotheses of the utterances `rows` that the joint can read now.

    An utterance waits while one of its open hypotheses needs a frame that has not arrived, because the order of steps
    must not depend on the chunks. If it has `ended`, such a hypothesis is finished.

    Returns the number of rows to compute, and the number of kept rows.
    """
    new, repeated, last = 0, 0, sources.old_rows.shape[0] - 1
    for b in rows:
        row_of[b] = -1
        hypotheses, end = beams.beam[b, : beams.counters[b].size], beams.ends[b]
        blocked = False
        for k in range(len(hypotheses)):
            if hypotheses[k].open and hypotheses[k].frame >= end and not ended:
                blocked = True
        for k in range(0 if blocked else len(hypotheses)):
            hypothesis = hypotheses[k]
            if not hypothesis.open or hypothesis.frame >= end:
                continue
            old = _kept_row(kept, b, hypothesis)
            if old >= 0:
                row_of[b, k] = last - repeated
                sources.old_rows[last - repeated] = old
                repeated += 1
            else:
                row_of[b, k] = new
                sources.frames[new] = b * strides[0] + hypothesis.frame - first_frames[b]
                sources.texts[new] = b * strides[1] + hypothesis.cache_entry
                new += 1
    kept.rows[:] = row_of
    kept.entries[:] = beams.beam["cache_entry"]
    kept.frames[:] = beams.beam["frame"]
    return new, repeated


@linked
def _kept_row(kept, b, hypothesis):
    """The row of the same text at the same frame in the last step, or -1."""
    old = -1
    for j in range(kept.rows.shape[1]):
        if (
            kept.rows[b, j] >= 0
            and kept.entries[b, j] == hypothesis.cache_entry
            and kept.frames[b, j] == hypothesis.frame
        ):
            old = kept.rows[b, j]
    return old
