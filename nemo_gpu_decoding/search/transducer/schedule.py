"""Who reads which frame in a step on the CPU, and the joint's log-probs for them.

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
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks
from nemo_gpu_decoding.search.transducer.prediction_cache import Frames, Predictions


class Numbered(NamedTuple):
    """Hypotheses that are given the joint, numbered: rows of its output."""

    row_of: np.ndarray  # [n, K] int32, row of a hypothesis, or -1
    utterances: np.ndarray  # [n * K] int64, of each row
    hypotheses: np.ndarray  # [n * K] int64


def new_numbered(n: int, beam_size: int) -> Numbered:
    """Room for n utterances of K hypotheses."""
    utterances, hypotheses = (np.empty(n * beam_size, np.int64) for _ in range(2))
    return Numbered(np.empty((n, beam_size), np.int32), utterances, hypotheses)


@compiled
def schedule(rows, beam, sizes, ends, ended, numbered):
    """Number the hypotheses of the utterances `rows` that can be given the joint now; returns how many.

    An utterance waits while one of its open hypotheses needs a frame that has not come yet (the order
    of steps must not depend on how the frames come). If it has `ended`, such a hypothesis is finished.
    """
    count = 0
    for b in rows:
        numbered.row_of[b] = -1
        blocked = False
        for k in range(sizes[b]):
            if beam[b, k].open and beam[b, k].frame >= ends[b] and not ended:
                blocked = True
        if blocked:
            continue
        for k in range(sizes[b]):
            if beam[b, k].open and beam[b, k].frame < ends[b]:
                numbered.row_of[b, k] = count
                numbered.utterances[count] = b
                numbered.hypotheses[count] = k
                count += 1
    return count


@compiled
def collect_pending(pending, rows, entries, labels, sources, targets):
    """Collect the `PendingPredictions` of all `rows` into flat arrays; returns how many.

    Utterance b has the entries b * `entries` .. of the cache.
    """
    count = 0
    for b in rows:
        for i in range(pending.counts[b]):
            labels[count] = pending.labels[b, i]
            sources[count] = b * entries + pending.sources[b, i]
            targets[count] = b * entries + pending.targets[b, i]
            count += 1
    return count


class KeptRows(NamedTuple):
    """What each hypothesis read in the last step.

    An entry of the prediction cache stands for a text there: a step that reads an entry does not give
    it to another text.
    """

    rows: np.ndarray  # [n, K] int32, row of log-probs, or -1
    entries: np.ndarray  # [n, K] int32
    frames: np.ndarray  # [n, K] int32


class RowSources(NamedTuple):
    """What the rows of a step are made of: the new ones, in front, and those of the last step."""

    frames: np.ndarray  # [n * K] int64, number in the flat frames
    texts: np.ndarray  # [n * K] int64, entry in the prediction cache of all
    old_rows: np.ndarray  # [n * K] int64, row of the last step


class JointRows:
    """The joint's log-probs for n utterances with K hypotheses each, in one run.

    Args:
        networks: see `TransducerNetworks`.
        temperature: softmax_temperature.
        predictions: the prediction cache.
        frames: that may be read.
        shape: n and K.
    """

    def __init__(
        self,
        networks: TransducerNetworks,
        temperature: float,
        predictions: Predictions,
        frames: Frames,
        shape: tuple[int, int],
    ) -> None:
        self._networks = networks
        self._temperature = temperature
        self._predictions = predictions
        self._first_frames = frames.first
        self._flat_frames = frames.values.flatten(0, 1)
        # per utterance: frames, and entries of the cache
        self._strides = frames.values.shape[1], len(predictions.outputs) // max(1, shape[0])
        self._kept = KeptRows(*(np.full(shape, -1, np.int32) for _ in range(3)))
        most = shape[0] * shape[1]
        self._sources = RowSources(*(np.empty(most, np.int64) for _ in range(3)))
        width = networks.vocab_size + 1 + len(networks.durations)
        # of this step and of the last one
        self._log_probs, self._before = (np.empty((most, width), np.float32) for _ in range(2))

    def read(self, beam: np.ndarray, count: int, numbered: Numbered) -> np.ndarray:
        """Log-probs [count, V + 1 (+ D)] of hypotheses as `schedule` has numbered them.

        Renumbers them in `row_of`. The log-probs hold until the next call but one.
        """
        self._log_probs, self._before = self._before, self._log_probs
        new = _find_sources(beam, count, numbered, self._kept, self._first_frames, self._strides, self._sources)
        if new:
            self._compute(new)
        if new < count:
            old_rows = self._sources.old_rows[new:count]
            np.take(self._before, old_rows, axis=0, out=self._log_probs[new:count])
        return self._log_probs[:count]

    def _compute(self, count: int) -> None:
        """Fill the first rows: labels and durations are normalised apart."""
        device = self._flat_frames.device
        frame, text = (torch.from_numpy(values[:count]).to(device) for values in self._sources[:2])
        logits = self._networks.join(
            self._flat_frames.index_select(0, frame), self._predictions.outputs.index_select(0, text)
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
def _find_sources(beam, count, numbered, kept, first_frames, strides, sources):
    """Number the rows that have to be computed first; returns how many. The others were kept."""
    beam_size = beam.shape[1]
    new = 0
    repeated = count  # old_rows is filled from the end on, for the number of new ones is not known yet
    for i in range(count):
        b, k = numbered.utterances[i], numbered.hypotheses[i]
        hypothesis = beam[b, k]
        old = -1
        for j in range(beam_size):
            if (
                kept.rows[b, j] >= 0
                and kept.entries[b, j] == hypothesis.cache_entry
                and kept.frames[b, j] == hypothesis.frame
            ):
                old = kept.rows[b, j]
        if old >= 0:
            repeated -= 1
            sources.old_rows[repeated] = old
            numbered.row_of[b, k] = repeated
        else:
            sources.frames[new] = b * strides[0] + hypothesis.frame - first_frames[b]
            sources.texts[new] = b * strides[1] + hypothesis.cache_entry
            numbered.row_of[b, k] = new
            new += 1
    kept.rows[:] = numbered.row_of
    kept.entries[:] = beam["cache_entry"]
    kept.frames[:] = beam["frame"]
    return new
