"""The joint network in a step on the CPU: a row of log-probs per hypothesis that reads a frame.

In TDT the same text may come to the same frame twice, in different numbers of steps: "4" with a blank of
two frames, and "4" with two blanks of one. The joint gives it what it gave before. As hypotheses keep
each other company, that was nearly always in the step before (99 % of repeats; they are 10-40 % of all
rows), so the rows of one step are kept for the next one. RNN-T has no such repeats in a run.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer.beam import Batch, Joint
from nemo_gpu_decoding.search.transducer.memory import Frames, Predictions
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


class KeptRows(NamedTuple):
    """What each hypothesis read in the last step.

    An entry of the memory of predictions stands for a text there: a step that reads an entry does not
    give it to another text.
    """

    rows: np.ndarray  # [n, K] int32, row of log-probs, or -1
    entries: np.ndarray  # [n, K] int32
    frames: np.ndarray  # [n, K] int32


class JointRows:
    """The joint of n utterances with K hypotheses each, for one run.

    Args:
        networks: see `TransducerNetworks`.
        temperature: softmax_temperature.
        predictions: the memory of predictions.
        frames: that may be read.
        n, beam_size: n and K.
    """

    def __init__(
        self,
        networks: TransducerNetworks,
        temperature: float,
        predictions: Predictions,
        frames: Frames,
        n: int,
        beam_size: int,
    ) -> None:
        self._networks = networks
        self._temperature = temperature
        self._predictions = predictions
        self._first_frames, self._columns = frames.first, frames.values.shape[1]
        self._flat_frames = frames.values.flatten(0, 1)
        self._kept = KeptRows(*(np.full((n, beam_size), -1, np.int32) for _ in range(3)))
        most = n * beam_size
        self._places, self._texts, self._old_rows = (np.empty(most, np.int64) for _ in range(3))
        width = networks.vocab_size + 1 + len(networks.durations)
        # of this step and of the last one
        self._log_probs, self._before = (np.empty((most, width), np.float32) for _ in range(2))

    def read(
        self, batch: Batch, count: int, row_of: np.ndarray, utterances: np.ndarray, slots: np.ndarray
    ) -> Joint:
        """The log-probs of `count` hypotheses as `readable` has numbered them; renumbers `row_of`.

        They hold until the next call but one.
        """
        self._log_probs, self._before = self._before, self._log_probs
        new = _reuse(batch, count, row_of, utterances, slots, self._kept, self._old_rows)
        if new:
            _inputs(
                batch,
                new,
                utterances,
                slots,
                self._first_frames,
                self._columns,
                self._places,
                self._texts,
            )
            self._compute(new)
        np.take(self._before, self._old_rows[new:count], axis=0, out=self._log_probs[new:count])
        return Joint(self._log_probs[:count], row_of)

    def _compute(self, count: int) -> None:
        """Fill the first rows: labels and durations are normalised apart."""
        device = self._flat_frames.device
        place, text = (
            torch.from_numpy(values[:count]).to(device) for values in (self._places, self._texts)
        )
        logits = self._networks.join(
            self._flat_frames.index_select(0, place), self._predictions.outputs.index_select(0, text)
        )
        log_probs = torch.from_numpy(self._log_probs[:count])
        labels = self._networks.vocab_size + 1
        for begin, end in ((0, labels), (labels, logits.shape[1])):
            if begin < end:
                log_probs[:, begin:end] = normalised(logits[:, begin:end], self._temperature)


def normalised(logits: Tensor, temperature: float) -> Tensor:
    """[N, columns] logits as log-probs, in double.

    Rounded once by whoever keeps them, the order of a sum no longer shows, and backends agree.
    """
    logits = logits.double()
    if temperature != 1.0:
        logits = logits * (1.0 / temperature)
    return torch.log_softmax(logits, dim=-1)


@compiled
def _reuse(batch, count, row_of, utterances, slots, kept, old_rows):
    """Number the rows that have to be computed first; returns how many.

    Rows from there on are those of the last step: row i is its row old_rows[i]. `utterances` and `slots`
    are left with the new ones in front.
    """
    beam_size = batch.beam.shape[1]
    new = 0
    repeated = count  # old_rows is filled from the end on, for the number of new ones is not known yet
    for i in range(count):
        b, k = utterances[i], slots[i]
        hypothesis = batch.beam[b, k]
        old = -1
        for j in range(beam_size):
            if (
                kept.rows[b, j] >= 0
                and kept.entries[b, j] == hypothesis.memo
                and kept.frames[b, j] == hypothesis.frame
            ):
                old = kept.rows[b, j]
        if old >= 0:
            repeated -= 1
            old_rows[repeated] = old
            row_of[b, k] = repeated
        else:
            utterances[new], slots[new] = b, k
            row_of[b, k] = new
            new += 1
    kept.rows[:] = row_of
    kept.entries[:] = batch.beam["memo"]
    kept.frames[:] = batch.beam["frame"]
    return new


@compiled
def _inputs(batch, count, utterances, slots, first_frames, columns, frames, entries):
    """Which frame and which prediction each row is made of, as flat indices."""
    memo = batch.memo_hash.shape[1]
    for i in range(count):
        b = utterances[i]
        hypothesis = batch.beam[b, slots[i]]
        frames[i] = b * columns + hypothesis.frame - first_frames[b]
        entries[i] = b * memo + hypothesis.memo
