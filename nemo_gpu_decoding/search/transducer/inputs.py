"""Checks of what transducer decoders are given, before any work."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.search.inputs import check_batch, check_rows
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


def check_encoder_output(encoder_output: Tensor, *, batch: int | None, size: int) -> None:
    """Check type and shape of an encoder's output [B, T, size].

    Args:
        batch: the B that is expected, if one is.

    Raises:
        ValueError: names the argument, what was seen and what was expected.
    """
    check_rows(encoder_output, "encoder_output", "[B, T, D]")
    shape = tuple(encoder_output.shape)
    if shape[2] != size:
        hint = " (NeMo's encoders give [B, D, T]: transpose(1, 2))" if shape[1] == size else ""
        raise ValueError(
            f"encoder_output has shape {shape}, expected [B, T, {size}], as the joint takes it{hint}"
        )
    check_batch(encoder_output, "encoder_output", batch)


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
