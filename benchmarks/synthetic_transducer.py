"""A transducer without training: its networks and encoder output give the log-probs of a task.

It consists of codes, vectors that are nearly orthogonal to each other: one per label, one per duration.

    encoder frame       sum of the codes of the labels that the frame may be, each times its logit
    prediction network  minus the codes of the last token and of similar tokens, so that an emitted token is
                        not emitted again; older tokens fade
    joint               the product of the sum with every code: the logit of each label

Like trained transducers, it has peaked posteriors, is mostly correct, and depends on more than one token. Widths, and
with them the cost of a step, are those of a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.options import BenchOptions
from benchmarks.tasks import Task, transducer_of
from nemo_gpu_decoding.checks import FieldError

DURATIONS = (0, 1, 2, 3, 4)  # frames, as in published TDT models
LIFT = 10.0  # logit of a certain label; labels that are out of the question have about 0
SHOWN = 4  # labels that a frame shows; more would drown each other where codes are not orthogonal
LEAST_LOG_PROB = -6.0  # labels less likely are not shown
LEAST_BLANK = -2.5  # log-prob that a blank has in every frame: after the token there is nothing else
SUPPRESSED_CONFUSION = 5.0  # what the last token takes from the logits of those it is mistaken for
RIGHT_DURATION, NEAR_DURATION = 5.0, 2.0  # logits of the right duration and of its neighbours
DURATION_NOISE = 0.7  # standard deviation
QUIET = 0.3  # size of the prediction network's values; they stay where tanh is nearly linear
OPEN, FORGETTING = 3.0, -3.0  # LSTM biases: gates for input and output, gate of the memory
RECURRENT = 0.02  # standard deviation of the LSTM's recurrent weights
SHIFT = 10.0  # keeps the joint's ReLU out of its flat half


def as_transducer(task: Task, confusions: Sequence[np.ndarray], options: BenchOptions, kind: str) -> Task:
    """The utterances of the peaked CTC task, as RNN-T or TDT encoder output [B, T, D].

    Raises:
        ValueError: the prediction network is narrower than the encoder.
    """
    width, hidden = options.encoder_width, options.prediction_width
    if hidden < width:
        raise FieldError("prediction_width", hidden, f"at least {width} (encoder_width)")
    rng = np.random.default_rng(options.seed + 2)
    durations = DURATIONS if kind == "tdt" else ()
    codes = draw_codes(task.vocab_size, len(durations), width, rng)
    weights = draw_weights(codes, confusions, hidden, rng)
    return replace(
        task,
        name=f"{task.name}-{kind}",
        inputs=encoder_output(task, codes, durations, rng),
        transducer=transducer_of(weights, durations, kind),
    )


def draw_codes(vocab_size: int, durations: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[V + 1 + durations, D] unit vectors; those of blank and durations are orthogonal to all others."""
    apart = 1 + durations
    tokens = rng.normal(size=(vocab_size, width - apart))
    if vocab_size <= tokens.shape[1]:
        tokens = np.linalg.qr(tokens.T)[0].T
    codes = np.zeros((vocab_size + apart, width))
    codes[:vocab_size, : width - apart] = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    codes[vocab_size:, width - apart :] = np.eye(apart)
    return codes


def encoder_output(task: Task, codes: np.ndarray, durations: Sequence[int], rng: np.random.Generator) -> torch.Tensor:
    """[B, T, D] frames from which the joint reads the task's log-probs, and how far to go on."""
    log_probs, blank = task.inputs.numpy(), task.vocab_size
    floor = np.maximum(np.sort(log_probs, axis=-1)[..., -SHOWN, None], LEAST_LOG_PROB)
    logits = np.where(log_probs >= floor, log_probs + LIFT, 0.0)
    logits[..., -1] = np.maximum(log_probs[..., -1], LEAST_BLANK) + LIFT
    frames = logits @ codes[: blank + 1]
    for b, length in enumerate(task.lengths.tolist() if durations else ()):
        speaking = log_probs[b, :length].argmax(-1) != blank
        frames[b, :length] += duration_logits(speaking, durations, rng) @ codes[blank + 1 :]
    frames[np.arange(frames.shape[1]) >= task.lengths.numpy()[:, None]] = 0.0
    return torch.from_numpy(frames.astype(np.float32))


def duration_logits(speaking: np.ndarray, durations: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """[T, durations] that point from each frame to the next one with a token, or as far as they can."""
    frames, longest = len(speaking), max(durations)
    ahead = np.full(frames, longest)
    for t in range(frames - 2, -1, -1):
        ahead[t] = 1 if speaking[t + 1] else min(ahead[t + 1] + 1, longest)
    distance = np.abs(np.asarray(durations) - ahead[:, None])
    logits = np.select([distance == 0, distance == 1], [RIGHT_DURATION, NEAR_DURATION], 0.0)
    return logits + rng.normal(0, DURATION_NOISE, logits.shape)


def draw_weights(
    codes: np.ndarray, confusions: Sequence[np.ndarray], hidden: int, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Of a prediction network and joint of this width H over codes [V + 1 + durations, D].

    Args:
        confusions: per token, the tokens that it is mistaken for.
    """
    spread = np.linalg.qr(rng.normal(size=(hidden, codes.shape[1])))[0]  # [H, D], keeps lengths
    suppressed = np.zeros((len(confusions) + 1, codes.shape[1]))
    for token, others in enumerate(confusions):
        suppressed[token] = LIFT * codes[token] + SUPPRESSED_CONFUSION * codes[others].sum(0)
    heard = 1.0 / (1.0 + np.exp(-OPEN)) ** 2  # what the gates let through
    gates = np.zeros((4, hidden, hidden))
    gates[2] = np.eye(hidden)  # in torch's order: input, forget, cell, output
    read = codes @ spread.T
    weights = {
        "embedding.weight": QUIET * suppressed @ spread.T,
        "lstm.weight_ih_l0": gates.reshape(4 * hidden, hidden),
        "lstm.weight_hh_l0": rng.normal(0, RECURRENT, (4 * hidden, hidden)),
        "lstm.bias_ih_l0": np.repeat([OPEN, FORGETTING, 0.0, OPEN], hidden),
        "lstm.bias_hh_l0": np.zeros(4 * hidden),
        "encoder.weight": spread,
        "encoder.bias": np.full(hidden, SHIFT),
        "prediction.weight": -np.eye(hidden) / (QUIET * heard),
        "prediction.bias": np.zeros(hidden),
        "output.weight": read,
        "output.bias": -SHIFT * read.sum(1),
    }
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in weights.items()}
