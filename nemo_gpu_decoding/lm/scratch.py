"""Arrays in memory-mapped files, for data that is larger than memory."""

from __future__ import annotations

import tempfile
from os import PathLike

import numpy as np
from numpy.typing import DTypeLike

from nemo_gpu_decoding.container import map_zeros, naming


class Scratch:
    """A folder for memory-mapped arrays; each is a file without a name that the system removes with the array.

    Args:
        folder: None keeps arrays in memory.
    """

    def __init__(self, folder: str | PathLike[str] | None = None) -> None:
        self.folder = folder

    def zeros(self, count: int, dtype: DTypeLike = np.float64) -> np.ndarray:
        """An array [count]."""
        if self.folder is None or not count:
            return np.zeros(count, dtype)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            return map_zeros(file, count * np.dtype(dtype).itemsize, self.folder).view(dtype)

    def column(self, dtype: DTypeLike, width: int | None = None) -> Column:
        """An array [rows], or [rows, width], that grows."""
        return Column(self, dtype, width)


class Column:
    """An array that grows by rows; from `Scratch.column`."""

    def __init__(self, scratch: Scratch, dtype: DTypeLike, width: int | None) -> None:
        self._dtype, self._folder = np.dtype(dtype), scratch.folder
        self._shape: tuple[int, ...] = (-1,) if width is None else (-1, width)
        self._file = None if scratch.folder is None else tempfile.TemporaryFile(dir=scratch.folder)  # noqa: SIM115  (closed in finish)
        self._parts: list[np.ndarray] = [np.zeros(0, self._dtype).reshape(0, *self._shape[1:])]
        self._size = 0

    def append(self, rows: np.ndarray) -> None:
        """Append rows."""
        rows = np.ascontiguousarray(rows, self._dtype)
        self._size += rows.size
        if self._file is None:
            self._parts.append(rows)
        else:
            with naming(self._folder or ""):
                self._file.write(rows.tobytes())

    def finish(self) -> np.ndarray:
        """All rows; `append` is not allowed afterwards."""
        if self._file is None or not self._size:
            found = np.concatenate(self._parts)
        else:
            with naming(self._folder or ""):
                self._file.flush()
            found = np.memmap(self._file, self._dtype, "r+", shape=(self._size,)).reshape(self._shape)
        self._parts.clear()
        if self._file is not None:
            self._file.close()
        return found
