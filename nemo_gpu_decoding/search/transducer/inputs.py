"""Checks of what transducer decoders are given, before any work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.search.inputs import checked_lengths
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


def checked_encoder_output(
    encoder_output: Tensor, lengths: Tensor | Sequence[int], *, batch: int | None, size: int
) -> np.ndarray:
    """Check shapes and types; returns the lengths as int64 numpy array [B].

    Args:
        encoder_output: [B, T, size] floating point.
        lengths: [B] integers in 0 .. T.
        batch: the B that is expected, if one is.

    Raises:
        ValueError: names the argument, what was seen and what was expected.
    """
    if not isinstance(encoder_output, torch.Tensor):
        raise ValueError(
            f"encoder_output is a {type(encoder_output).__name__}, expected a torch.Tensor [B, T, D]"
        )
    shape = tuple(encoder_output.shape)
    if len(shape) != 3:
        raise ValueError(f"encoder_output has shape {shape}, expected [B, T, D]")
    if not encoder_output.is_floating_point():
        raise ValueError(
            f"encoder_output has dtype {encoder_output.dtype}, expected a floating point type"
        )
    if shape[2] != size:
        hint = " (NeMo's encoders give [B, D, T]: transpose(1, 2))" if shape[1] == size else ""
        raise ValueError(
            f"encoder_output has shape {shape}, expected [B, T, {size}], as the joint takes it{hint}"
        )
    if batch is not None and shape[0] != batch:
        raise ValueError(f"encoder_output has {shape[0]} rows, expected {batch}, one per stream")
    return checked_lengths(lengths, shape[0], shape[1], of="encoder_output")


def valid_frames(encoder_output: Tensor, lengths: np.ndarray) -> Tensor:
    """The valid frames of all utterances one after the other, [sum of lengths, D].

    Raises:
        ValueError: a valid frame holds NaN or infinity.
    """
    rows = [encoder_output[b, : lengths[b]] for b in range(len(lengths))]
    frames = torch.cat(rows) if rows else encoder_output.flatten(0, 1)
    # one pass instead of several: in double, a sum of finite float32 numbers is finite
    if not torch.isfinite(frames.sum(dtype=torch.float64)) and not torch.isfinite(frames).all():
        row, column = torch.nonzero(~torch.isfinite(frames))[0].tolist()
        b = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        frame = row - int(lengths[:b].sum())
        raise ValueError(
            f"encoder_output[{b}, {frame}, {column}] is {float(frames[row, column])}, expected a finite "
            "number in every valid frame"
        )
    return frames


def checked_networks(networks: TransducerNetworks) -> TransducerNetworks:
    """Try the networks on one frame of zeros.

    Raises:
        ValueError: the joint's output does not fit the vocabulary and the durations.
    """
    with torch.inference_mode(), networks.evaluation():
        prediction, _ = networks.start()
        frame = networks.project_encoder(torch.zeros(1, networks.encoder_size))
        columns = networks.join(frame, prediction).shape[-1]
    labels, durations = networks.vocab_size + 1, len(networks.durations)
    if columns != labels + durations:
        raise ValueError(
            f"networks give {columns} columns, expected {labels + durations}: vocab_size "
            f"{networks.vocab_size}, one for the blank and {durations} durations"
        )
    return networks
