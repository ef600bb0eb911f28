"""Packed LMs on disk: one file, memory-mapped, so that processes share it and loading takes no time.

8 bytes    mark "NGDNGRAM"
uint32     version of this layout
uint32     CRC-32 of the size of the header, the size of the body, the CRC-32 of the body, the header
uint64     size of the header
uint64     size of the body
uint32     CRC-32 of the body
28 bytes   zeros
header     JSON: facts about the LM; where each array is in the body and how long; blanks
body       the words as UTF-8, a line each, and the arrays of `packed.PackedArrays`, each at a multiple
           of 4096 bytes; the body itself begins at such a multiple in the file

All numbers are little-endian.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.cache import file_key
from nemo_gpu_decoding.lm.packed import LM_STATE, TABLES, PackedArrays, PackedLM
from nemo_gpu_decoding.lm.scratch import map_zeros

MAGIC, VERSION = b"NGDNGRAM", 1
_HEAD = struct.Struct("<8sII")
_SIZES = struct.Struct("<QQI28x")
_PAGE = 4096
_CHUNK = 1 << 22  # bytes at a time for checksums
_DTYPES = {
    "words": np.dtype(np.uint8),
    "states": LM_STATE,
    "labels": np.dtype(np.uint64),
    "arcs": np.dtype(np.uint64),
    "codebook": np.dtype(np.float32),
}
_BITS = ("label_bits", "target_bits", "cost_bits")
_FACTS = ("start_state", "sentence_end", "unknown", "counts", "max_error")
_verified: set[tuple[str, int, int]] = set()  # files whose checksum was compared in this process

Fill = Callable[[Mapping[str, np.ndarray]], None]


class Shape(NamedTuple):
    """What the arrays of an LM will need."""

    words: int  # bytes
    states: int  # rows
    labels: int  # 64-bit words
    arcs: int  # 64-bit words
    codebook: int  # entries

    def zeros(self) -> dict[str, np.ndarray]:
        """These arrays in memory."""
        return {name: np.zeros(length, _DTYPES[name]) for name, length in self._asdict().items()}


def write_packed(path: str | PathLike[str], facts: Mapping[str, Any], shape: Shape, fill: Fill) -> int:
    """Write a packed LM; the file appears whole or not at all.

    Args:
        facts: what the header says, see `facts_of`.
        fill: is given the arrays of the file, all zeros, to put in their contents.

    Returns:
        the size of the file in bytes.
    """
    with written_whole(Path(path)) as temporary:
        layout, body_size = _layout(shape)
        header = json.dumps({**facts, "arrays": layout}).encode()
        header += b" " * (-(_HEAD.size + _SIZES.size + len(header)) % _PAGE)
        body_begin = _HEAD.size + _SIZES.size + len(header)
        with open(temporary, "w+b") as file:
            data = map_zeros(file, body_begin + body_size, temporary)
        fill(_arrays(data[body_begin:], layout))
        sizes = _SIZES.pack(len(header), body_size, _checksum(data[body_begin:]))
        head = _HEAD.pack(MAGIC, VERSION, zlib.crc32(header, zlib.crc32(sizes)))
        data[:body_begin] = np.frombuffer(head + sizes + header, np.uint8)
        return len(data)


def save_packed_lm(lm: PackedLM, path: str | PathLike[str]) -> int:
    """Write an LM that is in memory; the size of the file in bytes."""
    words = encode_words(lm.words)
    contents = {"words": words, **{name: getattr(lm.arrays, name) for name in TABLES}}

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in contents.items():
            arrays[name][:] = array

    return write_packed(path, facts_of(lm), Shape(*map(len, contents.values())), fill)


def is_packed_lm(path: str | PathLike[str]) -> bool:
    """Whether a file is a packed LM, by its first bytes.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def load_packed_lm(path: str | PathLike[str], *, verify: bool = True) -> PackedLM:
    """Map a packed LM into memory.

    Args:
        verify: compare the checksum of the arrays too, which reads the whole file, once per process
            (about a second per GB). Sizes and the header's checksum are always compared.

    Raises:
        ValueError: not a packed LM of this version, truncated, or damaged; names the file.
        OSError: the file cannot be read.
    """
    path = Path(path)
    header, body, checksum = _read_header(path)
    try:
        facts = json.loads(header)
        arrays = _arrays(body, facts["arrays"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: its header cannot be read ({error})") from error
    key = file_key(path)
    if verify and key not in _verified:
        if _checksum(body) != checksum:
            raise ValueError(f"{path} is damaged: its checksum does not match; pack it anew")
        _verified.add(key)
    return assemble(arrays, facts, str(path))


def assemble(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> PackedLM:
    """An LM from the arrays of a file and the facts in its header, see `facts_of`."""
    tables = [arrays[part] for part in TABLES]
    bits = [int(facts[part]) for part in _BITS]
    words = tuple(arrays["words"].tobytes().decode().split("\n")[:-1])
    others = {part: facts[part] for part in _FACTS}
    return PackedLM(PackedArrays(*tables, *bits), words, name=name, **others)  # type: ignore[arg-type]


def facts_of(lm: PackedLM) -> dict[str, Any]:
    """What the header says about an LM, besides where its arrays are."""
    return {
        **{name: getattr(lm, name) for name in _FACTS},
        **{name: getattr(lm.arrays, name) for name in _BITS},
    }


def encode_words(words: Any) -> np.ndarray:
    """Words as they stand in the file: UTF-8, a line each."""
    return np.frombuffer("".join(f"{word}\n" for word in words).encode(), np.uint8)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; what is there at the end replaces `path`, in one step.

    A program that is killed meanwhile leaves the file at `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def _layout(shape: Shape) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each array begins in the body and how long it is (in entries); the size of the body."""
    layout, end = {}, 0
    for name, length in shape._asdict().items():
        layout[name] = (end, length)
        end += -(-length * _DTYPES[name].itemsize // _PAGE) * _PAGE
    return layout, end


def _arrays(body: np.ndarray, layout: Mapping[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    return {
        name: body[begin : begin + length * _DTYPES[name].itemsize].view(_DTYPES[name])
        for name, (begin, length) in layout.items()
    }


def _read_header(path: Path) -> tuple[bytes, np.ndarray, int]:
    """The header, the mapped body and its checksum."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(_HEAD.size + _SIZES.size)
        if not start.startswith(MAGIC):
            raise ValueError(f"{path} is not a packed LM: it does not begin with {MAGIC.decode()!r}")
        if len(start) < _HEAD.size + _SIZES.size:
            raise ValueError(f"{path} is truncated: it ends within its header")
        _, version, header_checksum = _HEAD.unpack(start[: _HEAD.size])
        if version != VERSION:
            raise ValueError(
                f"{path} is a packed LM of version {version}, expected {VERSION}: pack it anew"
            )
        sizes = start[_HEAD.size :]
        header_size, body_size, body_checksum = _SIZES.unpack(sizes)
        expected = len(start) + header_size + body_size
        if size < expected:
            raise ValueError(f"{path} is truncated: it has {size} bytes, expected {expected}")
        header = file.read(header_size)
    if zlib.crc32(header, zlib.crc32(sizes)) != header_checksum or size != expected:
        raise ValueError(f"{path} is damaged: the checksum of its header does not match; pack it anew")
    begin = len(start) + header_size
    return header, np.memmap(path, np.uint8, mode="r")[begin:].view(np.ndarray), body_checksum


def _checksum(data: np.ndarray) -> int:
    checksum = 0
    for begin in range(0, len(data), _CHUNK):
        checksum = zlib.crc32(data[begin : begin + _CHUNK].data, checksum)
    return checksum
