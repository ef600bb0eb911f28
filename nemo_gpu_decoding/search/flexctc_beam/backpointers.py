"""Store the back-pointers of a beam search, and trace paths back through them.

Every frame writes one entry per hypothesis of the beam. A new token is stored as ~label (-1 - label); a blank or a
repeated label is stored unchanged. Example, blank = 9, beam of 2, three frames:

    frame      0          1          2
    labels     ~4   9     9   4      ~4  ~7        ~4 is -5, ~7 is -8
    parents     0   0     0   0       0   1

Slot 0 of frame 2 continues slot 0 of frame 1 (a blank), which continues slot 0 of frame 0 (token 4). The text of this
path is [4, 4]; its tokens start in frames 0 and 2. The text of slot 1 is [4, 7]; token 4 lasts two frames.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled


class BackPointers(NamedTuple):
    """The back-pointers of a batch, 10 bytes per utterance, frame and hypothesis."""

    labels: np.ndarray  # [B, T, K] int32; ~label for a new token
    parents: np.ndarray  # [B, T, K] int16, slot of the hypothesis one frame earlier
    log_probs: np.ndarray  # [B, T, K] float32, acoustic log-posterior of the label


class Traces(NamedTuple):
    """The N paths of each of R utterances after the committed frames; a path fills the first `lengths` entries."""

    lengths: np.ndarray  # [R, N] int32, tokens of the path
    tokens: np.ndarray  # [R, N, T] int32
    frames: np.ndarray  # [R, N, T] int32
    repeats: np.ndarray  # [R, N, T] int32
    confidence: np.ndarray  # [R, N, T] float32
    # labels of all frames, blanks included, and their log-posteriors; T = 0 without `alignments`
    alignment: np.ndarray  # [R, N, T] int32
    alignment_log_probs: np.ndarray  # [R, N, T] float32


def new_back_pointers(batch: int, frames: int, beam_size: int) -> BackPointers:
    shape = (batch, frames, beam_size)
    return BackPointers(np.empty(shape, np.int32), np.empty(shape, np.int16), np.empty(shape, np.float32))


def without_first(back_pointers: BackPointers, dropped: np.ndarray, counts: np.ndarray) -> None:
    """Drop the first dropped[b] of counts[b] frames of each utterance, in place."""
    for b in np.flatnonzero(dropped):
        for values in back_pointers:
            values[b, : counts[b] - dropped[b]] = values[b, dropped[b] : counts[b]]


def new_traces(rows: int, n_best: int, frames: int, *, alignments: bool = False) -> Traces:
    shape, aligned = (rows, n_best, frames), (rows, n_best, frames if alignments else 0)
    tokens, starts, repeats = np.empty((3, *shape), np.int32)
    lengths, confidence = np.zeros((rows, n_best), np.int32), np.empty(shape, np.float32)
    alignment = np.empty(aligned, np.int32), np.empty(aligned, np.float32)
    return Traces(lengths, tokens, starts, repeats, confidence, *alignment)


@compiled
def trace_back(back_pointers, b, frames_of, slot, blank_id, traces, r, n):
    """Fill traces[r, n] with utterance b's path to `slot`; `frames_of`: its first frame, and one past its last."""
    tokens, frames = traces.tokens[r, n], traces.frames[r, n]
    repeats, confidence = traces.repeats[r, n], traces.confidence[r, n]
    alignment, alignment_log_probs = traces.alignment[r, n], traces.alignment_log_probs[r, n]
    count = 0
    run = 0  # frames that repeat the next token on the way back
    run_probability = 0.0
    for t in range(frames_of[1] - 1, frames_of[0] - 1, -1):
        entry = back_pointers.labels[b, t, slot]
        log_prob = back_pointers.log_probs[b, t, slot]
        if len(alignment):
            alignment[t - frames_of[0]] = entry if entry >= 0 else ~entry
            alignment_log_probs[t - frames_of[0]] = log_prob
        probability = np.exp(np.float64(log_prob))
        slot = back_pointers.parents[b, t, slot]
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
    traces.lengths[r, n] = count
    for values in (tokens, frames, repeats):
        values[:count] = values[:count][::-1].copy()
    confidence[:count] = confidence[:count][::-1].copy()


@compiled
def shared_frames(back_pointers, b, num_frames, size):
    """Return how many frames, from the first on, all `size` hypotheses of utterance b share."""
    slots, t = np.arange(size), num_frames
    while t > 0 and (slots != slots[0]).any():
        t -= 1
        for k in range(size):
            slots[k] = back_pointers.parents[b, t, slots[k]]
    return t
