"""Convert and check the inputs of all decoders."""

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB

logger = logging.getLogger("nemo_gpu_decoding")

SAMPLED_ROWS = 8  # of the first input of a decoder
NORMALISED = 0.1  # |logsumexp| of rows of log-probabilities is smaller: bfloat16 has 3 digits

Lengths: TypeAlias = Tensor | Sequence[int] | np.ndarray


def as_batch(inputs: Any, lengths: Lengths | None, *, name: str, axes: str) -> tuple[Tensor, Lengths]:
    """Convert inputs in any form to one tensor [B, T, ...], and return the valid frames of each utterance.

    Args:
        inputs: [B, T, C]; [T, C], a batch of one utterance; or a list of [T, C]. Each array is a torch tensor,
            a NumPy array, or has `__dlpack__`. A list is padded; other inputs are not copied if torch can share them.
        lengths: [B] number of valid frames of each utterance; None means that all frames are valid.
        name: name of the inputs in messages.
        axes: the names of the axes in messages, such as "T, C".

    Raises:
        ValueError: types or shapes are wrong, or the lengths do not fit the list.
    """
    if isinstance(inputs, (list, tuple)):
        return _padded(inputs, lengths, name, axes)
    values = _as_tensor(inputs, name, f"[B, {axes}]")
    if values.ndim not in (2, 3):
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}, expected [B, {axes}], [{axes}] or a list of [{axes}]"
        )
    if values.ndim == 2:
        values = values[None]
    if lengths is None:
        lengths = np.full(len(values), values.shape[1], np.int64)
    return values, lengths


def _padded(inputs: Sequence[Any], lengths: Lengths | None, name: str, axes: str) -> tuple[Tensor, np.ndarray]:
    """Return arrays [T, C] of several utterances as one [B, T, C], and the valid frames of each."""
    if not inputs:
        raise ValueError(f"{name} is an empty list, expected at least one array [{axes}]")
    parts = [_as_tensor(part, f"{name}[{i}]", f"[{axes}]").detach() for i, part in enumerate(inputs)]
    for i, part in enumerate(parts):
        if part.ndim != 2 or part.shape[1] != parts[0].shape[-1]:
            raise ValueError(
                f"{name}[{i}] has shape {tuple(part.shape)}, expected [{axes}], as wide as {name}[0], "
                f"which has shape {tuple(parts[0].shape)}"
            )
        if (part.dtype, part.device) != (parts[0].dtype, parts[0].device):
            raise ValueError(
                f"{name}[{i}] is {part.dtype} on {part.device}, expected what {name}[0] is: "
                f"{parts[0].dtype} on {parts[0].device}"
            )
    frames = np.array([len(part) for part in parts], np.int64)
    counts = frames if lengths is None else checked_lengths(lengths, len(parts), int(frames.max()), of=name)
    for i in np.flatnonzero(counts > frames)[:1]:
        raise ValueError(f"lengths[{i}] is {counts[i]}, expected 0 .. {frames[i]} (T of {name}[{i}])")
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts


def _as_tensor(array: Any, name: str, axes: str) -> Tensor:
    """Return an array as a dense floating point tensor, which shares its memory if torch can share it."""
    try:
        if isinstance(array, np.ndarray):
            # torch shares arrays that are writable, in native byte order, and have no negative strides
            if not array.flags.writeable or not array.dtype.isnative or any(step < 0 for step in array.strides):
                array = np.array(array, array.dtype.newbyteorder("="), order="C")
            array = torch.from_numpy(array)
        elif not isinstance(array, Tensor) and hasattr(array, "__dlpack__"):
            array = torch.from_dlpack(array)
    except (TypeError, RuntimeError, BufferError, ValueError) as error:
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} has dtype {kind}, expected a floating point type that torch has: {error}") from error
    if not isinstance(array, Tensor):
        raise ValueError(
            f"{name} is a {type(array).__name__}, expected a torch.Tensor, a NumPy array or one with __dlpack__ {axes}"
        )
    if array.layout is not torch.strided or array.is_meta:
        kind = "meta" if array.is_meta else str(array.layout)
        raise ValueError(f"{name} is a {kind} tensor, expected a dense one that holds values")
    if not array.is_floating_point():
        raise ValueError(f"{name} has dtype {array.dtype}, expected a floating point type")
    return array


def check_log_probs(log_probs: Tensor, *, batch: int | None, columns: int) -> None:
    """Check that log-probs are [batch, T, columns] (`batch` None: any number). The search checks their values.

    Raises:
        ValueError: names the argument, the value seen and the value expected.
    """
    if log_probs.shape[2] != columns:
        raise ValueError(
            f"log_probs has {log_probs.shape[2]} columns, expected {columns}: "
            f"vocab_size {columns - 1} and one for the blank"
        )
    check_batch(log_probs, "log_probs", batch)


def check_batch(inputs: Tensor, name: str, batch: int | None) -> None:
    """Check the number of rows of inputs; with `batch` None, any number is valid."""
    if batch is not None and inputs.shape[0] != batch:
        raise ValueError(f"{name} has {inputs.shape[0]} rows, expected {batch}, one per stream")


def checked_lengths(lengths: Lengths, batch: int, frames: int, *, of: str = "log_probs") -> np.ndarray:
    """Return `lengths` as int64 array [batch], checked for 0 .. frames; `of`: name of the inputs in messages."""
    values = np.asarray(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
    if values.size == 0 and batch == 0:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or len(values) != batch:
        raise ValueError(f"lengths has shape {values.shape}, expected ({batch},): one per row of {of}")
    is_float = values.dtype.kind == "f"
    is_fraction = is_float and frames > 1 and 0 < values.max() <= 1  # as some toolkits have them
    is_whole = is_float and np.isfinite(values).all() and (values == np.floor(values)).all()
    if is_fraction or not (values.dtype.kind in "iu" or is_whole):
        raise ValueError(
            f"lengths holds {values.tolist()}, expected integers: frames, no fractions of the longest row"
        )
    values = values.astype(np.int64)
    bad = ((values < 0) | (values > frames)).nonzero()[0]
    if len(bad):
        raise ValueError(f"lengths[{bad[0]}] is {values[bad[0]]}, expected 0 .. {frames} (T of {of})")
    return values


def as_float32(log_probs: Tensor) -> np.ndarray:
    """Return the log-probs as contiguous float32 numpy array on the CPU, without a copy if possible."""
    return log_probs.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()


def for_kernels(log_probs: Tensor, device: torch.device) -> Tensor:
    """Return the log-probs on `device`, in a type that kernels read, without a copy if possible."""
    dtype = log_probs.dtype if log_probs.dtype in FLOAT_TYPES else torch.float32
    return log_probs.detach().to(device, dtype, non_blocking=True).contiguous()


def raise_bad_frame(log_probs: np.ndarray, utterance: int, frame: int) -> None:
    """Raise a BadRow for a frame with NaN, a value above 0, or only -inf."""
    row = log_probs[utterance, frame]
    for bad in (np.flatnonzero(~(row <= LARGEST)), np.flatnonzero(row > MOST_LOG_PROB)):
        if len(bad):
            place = f"log_probs[{utterance}, {frame}, {bad[0]}] is {row[bad[0]]}"
            raise BadRow(utterance, f"{place}, expected a log-probability, at most 0: {_remedy(row)}")
    raise BadRow(
        utterance,
        f"log_probs[{utterance}, {frame}] leaves no label possible, expected at least one finite "
        "log-probability in every valid frame",
    )


def _remedy(row: np.ndarray) -> str:
    """Return advice for the user about a row that does not hold log-probabilities."""
    if not (row <= LARGEST).all():
        return "valid frames must hold no NaN and no +inf"
    if (row >= 0).all() and abs(row.sum(dtype=np.float64) - 1) < NORMALISED:
        return "these are probabilities, give log_probs.log()"
    return "if these are logits, give log_probs.log_softmax(-1)"


def may_be_padded(log_probs: Tensor) -> bool:
    """Return whether the first or last frame of an utterance [B, T, C] holds no log-probabilities."""
    both = slice(None, None, max(1, log_probs.shape[1] - 1))
    is_shared = log_probs.dtype == torch.float32 and log_probs.device.type == "cpu"  # NumPy is faster for few frames
    ends = log_probs.detach().numpy()[:, both] if is_shared else as_float32(log_probs[:, both])
    sums = np.exp(np.minimum(ends, 1.0)).sum(-1)
    return not all(abs(total - 1) <= NORMALISED for total in sums.ravel().tolist())


def warn_unless_normalised(log_probs: Tensor, lengths: Tensor | np.ndarray) -> bool | None:
    """Warn if an utterance's first or last frame, or most of a few frames of the longest, are no log-probs.

    Values that the search itself rejects give no warning.

    Returns:
        Whether it has warned; None if no frame could be read, for example during the capture of a CUDA graph.
    """
    if log_probs.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    counts = np.minimum(lengths.cpu().numpy() if isinstance(lengths, Tensor) else lengths, log_probs.shape[1])
    ends = np.flatnonzero(counts > 0)
    if not len(ends):
        return None
    longest = int(counts.argmax())
    sampled = np.unique(np.linspace(0, counts[longest] - 1, SAMPLED_ROWS).astype(np.int64))
    utterances = np.concatenate([np.full(len(sampled), longest), ends, ends])
    frames = np.concatenate([sampled, counts[ends] - 1, 0 * ends])
    index = torch.from_numpy(np.stack([utterances, frames])).to(log_probs.device)
    rows = log_probs[index[0], index[1]].detach().double().cpu()
    sums = rows.logsumexp(-1).numpy()
    is_off = (np.abs(sums) > NORMALISED) & np.isfinite(sums) & (rows.numpy() <= MOST_LOG_PROB).all(axis=1)
    if 2 * is_off[: len(sampled)].sum() <= len(sampled):
        is_off[: len(sampled)] = False
    for i in np.flatnonzero(is_off)[:1]:
        what = _remedy(rows[i].numpy()) if i < len(sampled) else "if this is padding, give lengths"
        logger.warning(
            "log_probs[%d, %d] holds no log-probabilities: their exponentials sum to %.4g, expected 1: %s",
            utterances[i], frames[i], np.exp(sums[i]), what,
        )  # fmt: skip
    return bool(is_off.any())


def rows_in_shared_memory(columns: int, item_bytes: int, room: int) -> tuple[int, int]:
    """Return how many rows of log-probs `RowReader` keeps in `room` bytes of shared memory, and their bytes."""
    row_bytes = -(-columns * item_bytes // 16) * 16 + 16  # RowFetch::buffer_bytes
    rows = max(0, min(2, room // row_bytes))
    return rows, rows * row_bytes


def why_too_large(beam_size: int, needed: int, most_shared: int) -> str | None:
    """Return None if the `needed` bytes of shared memory of a block are available, else the reason in one line."""
    if needed <= most_shared:
        return None
    return (
        f"a beam of {beam_size} needs {needed} bytes of shared memory per block of threads, "
        f"of which there are {most_shared}"
    )
