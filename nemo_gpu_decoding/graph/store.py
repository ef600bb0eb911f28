"""Word graphs on disk: one file, memory-mapped, so that processes share it and loading takes no time.

8 bytes    mark "NGDGRAPH"
uint32     version of this layout
uint32     CRC-32 of all that follows
uint64     size of the JSON header
JSON       start, words, report, and offset and shape of each array
arrays     each at a multiple of 64 bytes
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import (
    EPSILON,
    GRAPH_ARC,
    GRAPH_STATE,
    GraphArrays,
    Spellings,
    WordGraph,
)
from nemo_gpu_decoding.graph.openfst import FILE_MARK

MAGIC, VERSION = b"NGDGRAPH", 1
_HEAD = struct.Struct("<8sIIQ")
_ALIGNMENT = 64
_DTYPES = {
    "states": GRAPH_STATE,
    "arcs": GRAPH_ARC,
    "epsilons": EPSILON,
    "compounds": np.dtype(np.int32),
    "spelling_words": np.dtype(np.int32),
    "spelling_begin": np.dtype(np.int32),
    "spelling_tokens": np.dtype(np.int32),
    "spelling_beginning": np.dtype(np.int32),
}


def save_graph(graph: WordGraph, path: str | PathLike[str]) -> None:
    """Write a graph; the file appears whole or not at all."""
    arrays: dict[str, np.ndarray] = graph.arrays._asdict()
    if graph.spellings is not None:
        for name, array in graph.spellings._asdict().items():
            arrays[f"spelling_{name}"] = array
    layout: dict[str, tuple[int, list[int]]] = {}
    end = 0
    for name, array in arrays.items():
        layout[name] = (end, list(array.shape))
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    facts = {
        "start": graph.start, "unknown": graph.unknown, "words": graph.words,
        "report": dict(graph.report), "name": graph.name, "arrays": layout,
    }  # fmt: skip
    header = json.dumps(facts, ensure_ascii=False).encode()
    header += b" " * (-(len(header) + _HEAD.size) % _ALIGNMENT)
    body = bytearray(end)
    for name, array in arrays.items():
        begin = layout[name][0]
        body[begin : begin + array.nbytes] = np.ascontiguousarray(array, _DTYPES[name]).tobytes()
    checksum = zlib.crc32(body, zlib.crc32(header))
    _write_whole(Path(path), [_HEAD.pack(MAGIC, VERSION, checksum, len(header)), header, body])


def load_graph(path: str | PathLike[str], *, verify: bool = True) -> WordGraph:
    """Map a graph into memory.

    Args:
        verify: compare the checksum, which reads the whole file once.

    Raises:
        ValueError: not a graph of this version, truncated, or damaged; names the file.
        OSError: the file cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError(f"{path} is not a word graph: it does not begin with {MAGIC.decode()!r}")
    _, version, checksum, header_size = _HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"{path} is a word graph of version {version}, expected {VERSION}: build it anew"
        )
    data = np.memmap(path, np.uint8, mode="r")
    if len(data) < _HEAD.size + header_size:
        raise ValueError(f"{path} is truncated: it ends within its header")
    if verify and _checksum(data[_HEAD.size :]) != checksum:
        raise ValueError(f"{path} is truncated or damaged: its checksum does not match")
    try:
        facts = json.loads(data[_HEAD.size : _HEAD.size + header_size].tobytes())
        arrays = _mapped(data[_HEAD.size + header_size :], facts["arrays"], path)
        return _graph(facts, arrays)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error})") from error


def is_word_graph(path: str | PathLike[str]) -> bool:
    """Whether a file is a graph, ours or OpenFst's, by its first bytes.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(MAGIC)).startswith((MAGIC, FILE_MARK))


def _checksum(data: Any) -> int:
    return zlib.crc32(data)


def _mapped(body: np.ndarray, layout: dict[str, Any], path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for name, (begin, shape) in layout.items():
        dtype = _DTYPES[name]
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if begin + size > len(body):
            raise ValueError(f"{path} is truncated: it ends within {name}")
        arrays[name] = body[begin : begin + size].view(dtype).reshape(shape)
    return arrays


def _graph(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> WordGraph:
    spellings = None
    if "spelling_words" in arrays:
        spellings = Spellings(*(arrays[f"spelling_{name}"] for name in Spellings._fields))
    return WordGraph(
        GraphArrays(*(arrays[name] for name in GraphArrays._fields)), facts["start"],
        tuple(facts["words"]), spellings, facts["unknown"], facts["report"], facts["name"],
    )  # fmt: skip


def _write_whole(path: Path, parts: list[bytes | bytearray]) -> None:
    """Write to a file beside the wanted one and replace that one at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
