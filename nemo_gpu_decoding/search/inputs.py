"""Checks that every decoder makes before any work, and the form in which the search gets its input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_gpu_decoding.search.engine import BadRow


def check_log_probs(log_probs: torch.Tensor, *, batch: int | None, columns: int) -> None:
    """Check type and shape of log-probs [B, T, columns]; contents are checked where they are read.

    Args:
        batch: the B that is expected, if one is.
        columns: vocabulary size plus one for the blank.

    Raises:
        ValueError: names the argument, what was seen and what was expected.
    """
    check_rows(log_probs, "log_probs", "[B, T, V + 1]")
    if log_probs.shape[2] != columns:
        raise ValueError(
            f"log_probs has {log_probs.shape[2]} columns, expected {columns}: "
            f"vocab_size {columns - 1} and one for the blank"
        )
    check_batch(log_probs, "log_probs", batch)


def check_rows(inputs: torch.Tensor, name: str, axes: str) -> None:
    """Check that inputs are a floating point tensor with three axes, which messages call `axes`."""
    if not isinstance(inputs, torch.Tensor):
        raise ValueError(f"{name} is a {type(inputs).__name__}, expected a torch.Tensor {axes}")
    if inputs.ndim != 3:
        raise ValueError(f"{name} has shape {tuple(inputs.shape)}, expected {axes}")
    if not inputs.is_floating_point():
        raise ValueError(f"{name} has dtype {inputs.dtype}, expected a floating point type")


def check_batch(inputs: torch.Tensor, name: str, batch: int | None) -> None:
    """Check the number of rows, if one is expected."""
    if batch is not None and inputs.shape[0] != batch:
        raise ValueError(f"{name} has {inputs.shape[0]} rows, expected {batch}, one per stream")


def checked_lengths(
    lengths: torch.Tensor | Sequence[int], batch: int, frames: int, *, of: str = "log_probs"
) -> np.ndarray:
    """`lengths` as int64 numpy array [batch] with values in 0 .. frames; `of`: what they belong to."""
    values = np.asarray(lengths.detach().cpu() if isinstance(lengths, torch.Tensor) else lengths)
    if values.size == 0 and batch == 0:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or len(values) != batch:
        raise ValueError(f"lengths has shape {values.shape}, expected ({batch},): one per row of {of}")
    whole = values.dtype.kind in "iu" or (values.dtype.kind == "f" and (values == np.floor(values)).all())
    if not whole:
        raise ValueError(f"lengths holds {values.tolist()}, expected integers")
    values = values.astype(np.int64)
    bad = np.flatnonzero((values < 0) | (values > frames))
    if len(bad):
        raise ValueError(f"lengths[{bad[0]}] is {values[bad[0]]}, expected 0 .. {frames} (T of {of})")
    return values


def as_float32(log_probs: torch.Tensor) -> np.ndarray:
    """The log-probs as contiguous float32 numpy array on the CPU; a view where they already are that."""
    return log_probs.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()


def raise_bad_frame(log_probs: np.ndarray, utterance: int, frame: int) -> None:
    """Say what is wrong with a frame in which a search has met NaN or +inf, or nothing but -inf."""
    row = log_probs[utterance, frame]
    bad = np.flatnonzero(~(row <= np.finfo(np.float32).max))
    if len(bad):
        raise BadRow(
            utterance,
            f"log_probs[{utterance}, {frame}, {bad[0]}] is {row[bad[0]]}, expected a log-probability: "
            "valid frames must hold no NaN and no +inf",
        )
    raise BadRow(
        utterance,
        f"log_probs[{utterance}, {frame}] leaves no label possible, expected at least one finite "
        "log-probability in every valid frame",
    )
