"""Copying an LM's arrays, many GB that may be mapped from a file, piece by piece."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

PIECE = 1 << 26  # bytes
SHOWN_FROM = 10**9  # smaller copies take about a second and are not announced


class Copier:
    """Copies with one progress bar for all; use it in a `with` block.

    Args:
        total: bytes that there will be.
        what: for the bar, which is on stderr if that is a terminal.
    """

    def __init__(self, total: int, what: str) -> None:
        hidden = None if total >= SHOWN_FROM else True  # None: unless stderr is no terminal
        self._bar = tqdm(
            total=total, desc=what, unit="B", unit_scale=True, disable=hidden, file=sys.stderr
        )

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def copy(self, source: np.ndarray, target: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of an array to a uint8 tensor [nbytes] of any device, which is returned.

        Pages of a mapped file are given back after each piece: else the process would hold the file's
        copy of an array besides its own.
        """
        content = source.reshape(-1).view(np.uint8)
        mapping = _mapped_file(source)
        for begin in range(0, len(content), PIECE):
            piece = content[begin : begin + PIECE]
            end = begin + len(piece)
            if target.device.type == "cpu":
                np.copyto(target.numpy()[begin:end], piece)
            else:
                target[begin:end].copy_(torch.from_numpy(piece.copy()))
            if mapping is not None:
                _give_back(piece, mapping)
            self._bar.update(len(piece))
        return target


def _mapped_file(array: np.ndarray) -> mmap.mmap | None:
    """The mapping that an array is part of, if it maps a file for reading only."""
    base: Any = array
    reads_file = False
    while isinstance(base, np.ndarray):
        reads_file |= isinstance(base, np.memmap) and base.mode == "r"
        base = base.base
    return base if reads_file and isinstance(base, mmap.mmap) else None


def _give_back(piece: np.ndarray, mapping: mmap.mmap) -> None:
    """Drop the whole pages of a piece from the process; a later look reads them from the file again."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    begin = -(-(piece.ctypes.data - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (piece.ctypes.data + piece.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
