"""Read and write OpenFst's binary files with numpy: "vector" and "const" FSTs, tropical semiring.

Kaldi, kaldifst and NeMo write such files (`TLG.fst`). This module needs no FST library. A file passes a large FST to
such a library faster than a call per arc. The layout, all little-endian:

    header   int32 magic, fst type, arc type, int32 version, int32 flags, uint64 properties,
             int64 start, int64 states, int64 arcs
    symbols  input and output symbol table, if set in the flags
    vector   per state: float32 final cost, int64 number of arcs, the arcs
    const    all states (20 bytes each), then all arcs

An arc is int32 input label, int32 output label, float32 cost, int32 target; a text is its int32 length and its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.plain_text import path_of

_FST_MAGIC, _SYMBOLS_MAGIC = 2125659606, 2125658996
_HAS_INPUT_SYMBOLS, _HAS_OUTPUT_SYMBOLS, _IS_ALIGNED = 1, 2, 4
_ALIGNMENT = 16
FILE_MARK = struct.pack("<i", _FST_MAGIC)  # first bytes of a file
_EXPANDED_AND_MUTABLE = 3  # properties of a vector FST; all others are unknown

FST_ARC = np.dtype(
    [
        ("input", np.int32),  # 0 is epsilon
        ("output", np.int32),  # 0 is epsilon
        ("cost", np.float32),
        ("target", np.int32),
    ]
)
_CONST_STATE = np.dtype(
    [
        ("final", np.float32),
        ("first_arc", np.uint32),
        ("arcs", np.uint32),
        ("input_epsilons", np.uint32),
        ("output_epsilons", np.uint32),
    ]
)
_VECTOR_STATE_BYTES = 12


@dataclass(frozen=True, eq=False)
class Fst:
    """A weighted transducer with S states and A arcs. Costs are negative natural logs."""

    start: int  # -1 for an FST without states
    final_costs: np.ndarray  # [S] float32, inf where the state is not final
    arc_begin: np.ndarray  # [S + 1] int64, the arcs of state s are arcs[arc_begin[s] : arc_begin[s + 1]]
    arcs: np.ndarray  # [A] FST_ARC
    output_symbols: dict[int, str] | None = None

    @classmethod
    def from_arcs(cls, start: int, final_costs: np.ndarray, sources: np.ndarray, *columns: np.ndarray) -> Fst:
        """Create an FST from arcs in any order; this method sorts the arcs by state and input label.

        Args:
            sources: the source of each arc.
            columns: inputs, outputs, costs and targets of the arcs.
        """
        inputs, outputs, *_ = columns
        order = np.lexsort((outputs, inputs, sources))
        arcs = np.zeros(len(order), FST_ARC)
        for name, values in zip(FST_ARC.names or (), columns, strict=True):
            arcs[name] = np.asarray(values)[order]
        begin = np.searchsorted(np.asarray(sources)[order], np.arange(len(final_costs) + 1))
        return cls(start, np.asarray(final_costs, np.float32), begin, arcs)

    @property
    def num_states(self) -> int:
        return len(self.final_costs)

    @property
    def num_arcs(self) -> int:
        return len(self.arcs)

    def sources(self) -> np.ndarray:
        """Return the source state of each arc, [A]."""
        return np.repeat(np.arange(self.num_states), np.diff(self.arc_begin))


def read_fst(path: str | PathLike[str]) -> Fst:
    """Read a binary OpenFst file.

    Raises:
        ValueError: not an OpenFst file, of another type than vector or const over the standard arc, or
            truncated; the message names the file.
        OSError: the file cannot be read.
    """
    return _Reader(path_of(path)).read()


def read_input_symbols(path: str | PathLike[str]) -> dict[int, str]:
    """Return the input symbols of a binary OpenFst file by label, or {} if it has none."""
    return _Reader(path_of(path)).inputs or {}


def write_fst(fst: Fst, path: str | PathLike[str]) -> None:
    """Write a vector FST, without symbol tables."""
    counts = np.diff(fst.arc_begin)
    begins = np.arange(fst.num_states, dtype=np.int64) * _VECTOR_STATE_BYTES
    begins += fst.arc_begin[:-1] * FST_ARC.itemsize
    body = np.empty(_VECTOR_STATE_BYTES * fst.num_states + FST_ARC.itemsize * fst.num_arcs, np.uint8)
    heads = np.zeros(fst.num_states, np.dtype([("final", np.float32), ("arcs", np.int64)]))
    heads["final"], heads["arcs"] = fst.final_costs, counts
    columns = heads.view(np.uint8).reshape(fst.num_states, _VECTOR_STATE_BYTES)
    body[begins[:, None] + np.arange(_VECTOR_STATE_BYTES)] = columns
    is_arc = np.ones(len(body), bool)
    is_arc[begins[:, None] + np.arange(_VECTOR_STATE_BYTES)] = False
    body[is_arc] = np.ascontiguousarray(fst.arcs).view(np.uint8)
    header = FILE_MARK + _text("vector") + _text("standard")
    header += struct.pack("<iiQqqq", 2, 0, _EXPANDED_AND_MUTABLE, fst.start, fst.num_states, fst.num_arcs)
    with written_whole(path_of(path)) as temporary:
        temporary.write_bytes(header + body.tobytes())


def _text(value: str) -> bytes:
    return struct.pack("<i", len(value)) + value.encode()


class _Reader:
    """A reader of a file's bytes in order; on opening it reads the header and the symbols."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = np.fromfile(path, np.uint8)
        self.at = 0
        if len(self.data) < 4 or self._take("<i")[0] != _FST_MAGIC:
            raise ValueError(f"{self.path} is not a binary OpenFst file: its first bytes are not theirs")
        self.kind, arc_type = self._take_text(), self._take_text()
        _version, flags, _properties, self.start, self.states, _arcs = self._take("<iiQqqq")
        if self.kind not in ("vector", "const") or arc_type != "standard":
            raise ValueError(
                f"{self.path} is an FST of type {self.kind!r} with arcs of type {arc_type!r}, expected "
                "'vector' or 'const' and 'standard'"
            )
        self.inputs = self._take_symbols() if flags & _HAS_INPUT_SYMBOLS else None
        self.outputs = self._take_symbols() if flags & _HAS_OUTPUT_SYMBOLS else None
        self._alignment = _ALIGNMENT if flags & _IS_ALIGNED else 1

    def read(self) -> Fst:
        finals, begin, arcs = self._take_vector() if self.kind == "vector" else self._take_const()
        return Fst(self.start, finals, begin, arcs, self.outputs)

    def _need(self, size: int) -> None:
        if size < 0 or self.at + size > len(self.data):
            raise ValueError(
                f"{self.path} is truncated or damaged: it has {len(self.data)} bytes, expected at least "
                f"{self.at + size}"
            )

    def _take_bytes(self, size: int) -> np.ndarray:
        self._need(size)
        self.at += size
        return self.data[self.at - size : self.at]

    def _take(self, layout: str) -> tuple:
        return struct.unpack(layout, self._take_bytes(struct.calcsize(layout)).tobytes())

    def _take_text(self) -> str:
        (size,) = self._take("<i")
        return self._take_bytes(size).tobytes().decode("utf-8", "replace")

    def _take_symbols(self) -> dict[int, str]:
        (magic,) = self._take("<i")
        if magic != _SYMBOLS_MAGIC:
            raise ValueError(f"{self.path} is damaged: a symbol table does not begin with its mark")
        self._take_text()
        _available, size = self._take("<qq")
        symbols = {}
        for _ in range(size):
            symbol = self._take_text()
            symbols[self._take("<q")[0]] = symbol
        return symbols

    def _take_vector(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        states = self.states
        self._need(states * _VECTOR_STATE_BYTES)
        rest = self.data[self.at :]
        offsets, begin = np.empty(states, np.int64), np.zeros(states + 1, np.int64)
        if not _find_vector_states(rest, offsets, begin):
            self._need(len(rest) + 1)
        heads = offsets[:, None] - _VECTOR_STATE_BYTES + np.arange(4)
        finals = rest[heads].view(np.float32)[:, 0]
        is_arc = np.ones(offsets[-1] + FST_ARC.itemsize * (begin[-1] - begin[-2]) if states else 0, bool)
        is_arc[offsets[:, None] - 1 - np.arange(_VECTOR_STATE_BYTES)] = False
        return finals, begin, rest[: len(is_arc)][is_arc].view(FST_ARC)

    def _take_const(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.at += -self.at % self._alignment
        table = self._take_bytes(self.states * _CONST_STATE.itemsize).view(_CONST_STATE)
        self.at += -self.at % self._alignment
        begin = np.append(0, np.cumsum(table["arcs"], dtype=np.int64))
        if (table["first_arc"] != begin[:-1])[table["arcs"] > 0].any():
            raise ValueError(f"{self.path} is damaged: the arcs of its states do not follow one another")
        arcs = self._take_bytes(int(begin[-1]) * FST_ARC.itemsize).view(FST_ARC)
        return table["final"].copy(), begin, arcs.copy()


@compiled
def _find_vector_states(data, offsets, begin):
    """Find the offsets and counts of each state's arcs in `data`; False if the data ends early."""
    at = np.int64(0)
    for state in range(len(offsets)):
        if at + 12 > len(data):
            return False
        count = np.int64(0)
        for byte in range(8):
            count |= np.int64(data[at + 4 + byte]) << (8 * byte)
        at += 12
        if count < 0 or count > (len(data) - at) // 16:
            return False
        offsets[state] = at
        begin[state + 1] = begin[state] + count
        at += 16 * count
    return True
