"""A transducer that needs no training: networks and encoder output that say what was drawn.

It is made of codes, vectors that are nearly orthogonal to each other: one per label, one per duration.

    encoder frame       sum of the codes of the labels that the frame may be, each times its logit
    prediction network  minus the codes of the last token and of what it is mistaken for, so that a token
                        that was emitted is not emitted again; older tokens fade
    joint               the product of the sum with every code: the logit of each label

That is how trained transducers behave: peaky, right most of the time, and with a memory of more than
one token. Widths, and with them the cost of a step, are those of a real model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.synthetic import draw_language, synthetic_task
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.transducer.task import TDT, TransducerTask
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks

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


def synthetic_transducer(options: BenchOptions, kind: str) -> TransducerTask:
    """The utterances of the synthetic CTC task, as RNN-T or TDT encoder output.

    Raises:
        ValueError: the prediction network is narrower than the encoder.
    """
    if options.prediction_width < options.encoder_width:
        raise ValueError(
            f"prediction_width is {options.prediction_width}, expected at least "
            f"{options.encoder_width} (encoder_width)"
        )
    task = synthetic_task(options, mutual=True)
    durations = DURATIONS if kind == TDT else ()
    _, confusions = draw_language(options, np.random.default_rng(options.seed), mutual=True)
    rng = np.random.default_rng(options.seed + 2)
    codes = draw_codes(task.vocab_size, len(durations), options.encoder_width, rng)
    networks = make_networks(codes, confusions, durations, options.prediction_width, rng)
    from nemo_gpu_decoding.bench.peers.nemo_transducer import nemo_modules

    return TransducerTask(
        name=f"{task.name}-{kind}",
        lengths=task.lengths,
        frame_seconds=task.frame_seconds,
        texts=task.texts,
        tokens=task.tokens,
        vocabulary=task.vocabulary,
        lexicon=task.lexicon,
        lm=task.lm,
        word_lm=task.word_lm,
        encoder_output=encoder_output(task, codes, durations, rng),
        networks=networks,
        nemo_modules=partial(nemo_modules, networks),
    )


def draw_codes(vocab_size: int, durations: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[V + 1 + durations, D] unit vectors; those of blank and durations are orthogonal to all others."""
    apart = 1 + durations
    tokens = rng.normal(size=(vocab_size, width - apart))
    if vocab_size <= tokens.shape[1]:
        tokens = np.linalg.qr(tokens.T)[0].T
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    codes = np.zeros((vocab_size + apart, width))
    codes[:vocab_size, : width - apart] = tokens
    codes[vocab_size:, width - apart :] = np.eye(apart)
    return codes


def encoder_output(
    task: Task, codes: np.ndarray, durations: Sequence[int], rng: np.random.Generator
) -> torch.Tensor:
    """[B, T, D] frames from which the joint reads the task's log-probs, and how far to go on."""
    logits = shown_logits(task.log_probs.numpy())
    frames = logits @ codes[: task.vocab_size + 1]
    if durations:
        blank = task.vocab_size
        for b, length in enumerate(task.lengths.tolist()):
            speaking = task.log_probs[b, :length].argmax(-1).numpy() != blank
            frames[b, :length] += duration_logits(speaking, durations, rng) @ codes[blank + 1 :]
    frames[np.arange(frames.shape[1]) >= task.lengths.numpy()[:, None]] = 0.0
    return torch.from_numpy(frames.astype(np.float32))


def shown_logits(log_probs: np.ndarray) -> np.ndarray:
    """[B, T, V + 1] logits of the few labels that each frame shows, zero for the others."""
    floor = np.maximum(np.sort(log_probs, axis=-1)[..., -SHOWN, None], LEAST_LOG_PROB)
    logits = np.where(log_probs >= floor, log_probs + LIFT, 0.0)
    logits[..., -1] = np.maximum(log_probs[..., -1], LEAST_BLANK) + LIFT
    return logits


def duration_logits(
    speaking: np.ndarray, durations: Sequence[int], rng: np.random.Generator
) -> np.ndarray:
    """[T, durations] that point from each frame to the next one with a token, or as far as they can."""
    frames, longest = len(speaking), max(durations)
    following = np.full(frames, longest)
    for t in range(frames - 2, -1, -1):
        following[t] = 1 if speaking[t + 1] else min(following[t + 1] + 1, longest)
    distance = np.abs(np.asarray(durations) - following[:, None])
    logits = np.select([distance == 0, distance == 1], [RIGHT_DURATION, NEAR_DURATION], 0.0)
    return logits + rng.normal(0, DURATION_NOISE, logits.shape)


def make_networks(
    codes: np.ndarray,
    confusions: Sequence[np.ndarray],
    durations: Sequence[int],
    width: int,
    rng: np.random.Generator,
) -> LSTMNetworks:
    """Prediction network and joint of this width H over codes [V + 1 + durations, D].

    Args:
        confusions: per token, the tokens that it is mistaken for.
    """
    vocab_size, encoder_width = len(confusions), codes.shape[1]
    spread = np.linalg.qr(rng.normal(size=(width, encoder_width)))[0]  # [H, D], keeps lengths
    suppressed = np.zeros((vocab_size + 1, encoder_width))
    for token, others in enumerate(confusions):
        suppressed[token] = LIFT * codes[token] + SUPPRESSED_CONFUSION * codes[others].sum(0)
    heard = 1.0 / (1.0 + np.exp(-OPEN)) ** 2  # what the gates let through
    gates = np.zeros((4, width, width))
    gates[2] = np.eye(width)  # in torch's order: input, forget, cell, output
    bias = np.repeat([OPEN, FORGETTING, 0.0, OPEN], width)
    read = codes @ spread.T
    embedding, lstm = nn.Embedding(vocab_size + 1, width), nn.LSTM(width, width)
    encoder_projection, prediction_projection = nn.Linear(encoder_width, width), nn.Linear(width, width)
    output = nn.Linear(width, len(codes))
    _set(embedding.weight, QUIET * suppressed @ spread.T)
    _set(lstm.weight_ih_l0, gates.reshape(4 * width, width))
    _set(lstm.weight_hh_l0, rng.normal(0, RECURRENT, (4 * width, width)))
    _set(lstm.bias_ih_l0, bias)
    _set(lstm.bias_hh_l0, np.zeros(4 * width))
    _set(encoder_projection.weight, spread)
    _set(encoder_projection.bias, np.full(width, SHIFT))
    _set(prediction_projection.weight, -np.eye(width) / (QUIET * heard))
    _set(prediction_projection.bias, np.zeros(width))
    _set(output.weight, read)
    _set(output.bias, -SHIFT * read.sum(1))
    return LSTMNetworks(
        embedding,
        lstm,
        encoder_projection,
        prediction_projection,
        nn.Sequential(nn.ReLU(), output).eval(),
        durations=durations,
    )


def _set(parameter: nn.Parameter, values: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))
