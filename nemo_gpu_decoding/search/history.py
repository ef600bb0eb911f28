"""Back-pointers of a running beam search, and the way back through them.

Every frame writes one entry per hypothesis of the beam. Example, blank = 9, beam of 2, three frames;
a new token is stored as ~label (-1 - label), a blank or a repeated label as it is:

    frame      0          1          2
    labels     ~4   9     9   4      ~4  ~7        ~4 is -5, ~7 is -8
    parents     0   0     0   0       0   1

Slot 0 of frame 2 came from slot 0 of frame 1 (a blank), that from slot 0 of frame 0 (token 4): the
text is [4, 4], its tokens start in frames 0 and 2. Slot 1 reads [4, 7]; token 4 lasts two frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled


class History(NamedTuple):
    """Entries of a batch; 10 bytes per utterance, frame and hypothesis."""

    labels: np.ndarray  # [B, T, K] int32; ~label for a new token
    parents: np.ndarray  # [B, T, K] int16, slot of the hypothesis one frame earlier
    log_probs: np.ndarray  # [B, T, K] float32, acoustic log-posterior of the label


class Traces(NamedTuple):
    """Where `trace_back` puts N paths of each utterance, each in the first `lengths` of T entries."""

    lengths: np.ndarray  # [B, N] int32, tokens of the path
    tokens: np.ndarray  # [B, N, T] int32
    frames: np.ndarray  # [B, N, T] int32
    repeats: np.ndarray  # [B, N, T] int32
    confidence: np.ndarray  # [B, N, T] float32


def new_history(batch: int, frames: int, beam_size: int) -> History:
    shape = (batch, frames, beam_size)
    return History(np.empty(shape, np.int32), np.empty(shape, np.int16), np.empty(shape, np.float32))


def grown_history(history: History, frames: int) -> History:
    """A history with room for `frames` frames, at least doubled, holding what the old one held."""
    batch, capacity, beam_size = history.labels.shape
    if frames <= capacity:
        return history
    larger = new_history(batch, max(frames, 2 * capacity), beam_size)
    for new, old in zip(larger, history, strict=True):
        new[:, :capacity] = old
    return larger


def new_traces(batch: int, n_best: int, frames: int) -> Traces:
    shape = (batch, n_best, frames)
    return Traces(
        np.zeros((batch, n_best), np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.int32),
        np.empty(shape, np.float32),
    )


@compiled
def trace_back(history, b, num_frames, slot, blank_id, traces, rank):
    """Fill traces[b, rank] with the tokens of the path that ends in `slot` after `num_frames` frames."""
    tokens, frames = traces.tokens[b, rank], traces.frames[b, rank]
    repeats, confidence = traces.repeats[b, rank], traces.confidence[b, rank]
    count = 0
    run = 0  # frames that repeat the token we are about to meet
    run_probability = 0.0
    for t in range(num_frames - 1, -1, -1):
        entry = history.labels[b, t, slot]
        probability = np.exp(np.float64(history.log_probs[b, t, slot]))
        slot = history.parents[b, t, slot]
        if entry == blank_id:
            run, run_probability = 0, 0.0
        elif entry >= 0:
            run += 1
            run_probability += probability
        else:
            tokens[count] = ~entry
            frames[count] = t
            repeats[count] = run + 1
            confidence[count] = min(1.0, (run_probability + probability) / (run + 1))
            count += 1
            run, run_probability = 0, 0.0
    traces.lengths[b, rank] = count
    for values in (tokens, frames, repeats):
        _reverse(values, count)
    _reverse(confidence, count)


@compiled
def _reverse(values, count):
    for i in range(count // 2):
        values[i], values[count - 1 - i] = values[count - 1 - i], values[i]


@compiled
def trace_alignment(history, b, num_frames, slot, labels, log_probs):
    """Fill labels[:num_frames] and log_probs[:num_frames] with what the path emits in every frame."""
    for t in range(num_frames - 1, -1, -1):
        entry = history.labels[b, t, slot]
        labels[t] = entry if entry >= 0 else ~entry
        log_probs[t] = history.log_probs[b, t, slot]
        slot = history.parents[b, t, slot]
