"""Scratch arrays for packing an LM: files mapped into memory, or plain memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np


class Scratch:
    """Arrays that the system can move out to a folder's disk; without a folder they are in memory.

    Their files have no name: nothing is left of them when the program ends, however it ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def zeros(self, length: int, dtype: Any) -> np.ndarray:
        """A new array of zeros, [length].

        Raises:
            OSError: there is not enough space on the disk; names the folder and the size.
        """
        if self.folder is None or length == 0:
            return np.zeros(length, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return map_zeros(file, length * np.dtype(dtype).itemsize, self.folder).view(dtype)


def map_zeros(file: IO[bytes], num_bytes: int, path: Path) -> np.ndarray:
    """Map a new file, filled up with zeros, as an array that can be written. [num_bytes > 0] uint8

    The space is reserved at once where the system can: a full disk is then an error here, and no crash
    in a later write.

    Raises:
        OSError: there is not enough space; names `path` and the size.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:  # macOS, Windows: the next best, without reserving
            file.truncate(num_bytes)
    except OSError as error:
        need = f"{error.strerror}: {num_bytes / 1e9:.2f} GB needed"
        raise OSError(error.errno, need, str(path)) from None
    return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
