"""Store arrays in memory-mapped safetensors files, which load at once; several processes share the memory of a file.

8 bytes    size of the header, uint64
header     JSON: "__metadata__" (below), and for each array its type, shape and range in the body; padded
           with blanks to a multiple of 4096 bytes in the file
body       the arrays, each at a multiple of 4096 bytes; dummy arrays fill the gaps, as the format forbids holes

All numbers are little-endian. A row of a structured array is stored as bytes, e.g. states [S, 12] U8. Metadata:

kind       what the file holds, "packed LM" or "word graph"
version    of the arrays and facts of this kind
header     CRC-32 of the header, with zeros in this place, 8 hexadecimal digits
body       CRC-32 of the body, likewise
facts      JSON: all other fields
"""

import errno
import glob
import json
import mmap
import os
import re
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.cache import file_key, is_held, one_process_at_a_time
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.plain_text import path_of

_PAGE = 4096
_CHUNK = 1 << 22  # bytes at a time for checksums
_LOCK = "lock"  # lock beside an unfinished file, held by the writing process
_NEW = 2.0  # grace period in seconds for an unlocked folder: its process may be about to lock it
_SIZE = struct.Struct("<Q")
_START = '{"__metadata__":{"kind":"%s",'
_VERSION = re.compile(rb'.*?"version":"(\d+)","header":"([0-9a-f]{8})",')
_TYPES = {"uint8": "U8", "int32": "I32", "uint64": "U64", "float32": "F32"}
_verified: set[tuple[str, int, int]] = set()  # files that this process has verified

Shape = tuple[int, ...]
Fill = Callable[[Mapping[str, np.ndarray]], None]


class Kind(NamedTuple):
    """The definition of a kind of file: types of its arrays, version, and texts for error messages."""

    name: str
    version: int
    dtypes: Mapping[str, np.dtype]  # of each array
    remedy: str  # advice for a damaged file

    @property
    def _mark(self) -> bytes:
        return (_START % self.name).encode()

    def is_kind_of(self, path: str | PathLike[str]) -> bool:
        """Return whether a file's first bytes show that it is of this kind."""
        with open(path, "rb") as file:
            start = file.read(_SIZE.size + len(self._mark))
        return start[_SIZE.size :] == self._mark


class Content(NamedTuple):
    """The arrays and facts that a file holds."""

    facts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]  # mapped
    checked: np.ndarray  # [bytes] uint8, the range of the checksum
    checksum: int


# -- writing ------------------------------------------------------------------------------------------


def write_container(
    path: str | PathLike[str], kind: Kind, facts: Mapping[str, Any], shapes: Mapping[str, Shape], fill: Fill
) -> int:
    """Write arrays and facts to a file; the file is created only if writing succeeds.

    Args:
        shapes: shape of each array by its name.
        fill: called with the mapped arrays of the file, all zeros, to write their contents. The arrays may be larger
            than memory.

    Returns:
        the size of the file in bytes.
    """
    layout, body_size = _layout(kind, shapes)
    metadata = {"kind": kind.name, "version": str(kind.version), "header": "0" * 8, "body": "0" * 8}
    entries = {"__metadata__": {**metadata, "facts": json.dumps(facts)}, **layout}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(_SIZE.size + len(header)) % _PAGE)
    begin = _SIZE.size + len(header)
    with written_whole(path_of(path)) as temporary:
        with open(temporary, "w+b") as file:
            data = map_zeros(file, begin + body_size, temporary)
        fill({name: _array(data[begin:], layout[name], kind.dtypes[name]) for name in shapes})
        header = _with_checksum(header, b"body", _checksum(data[begin:]))
        header = _with_checksum(header, b"header", zlib.crc32(header))
        data[:begin] = np.frombuffer(_SIZE.pack(len(header)) + header, np.uint8)
        return len(data)


def write_arrays(
    path: str | PathLike[str], kind: Kind, facts: Mapping[str, Any], contents: Mapping[str, np.ndarray]
) -> int:
    """Write arrays to a file and return the file's size in bytes."""

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in contents.items():
            arrays[name][...] = array

    shapes = {name: array.shape for name, array in contents.items()}
    return write_container(path, kind, facts, shapes, fill)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; at the end of the `with` block, this file replaces `path` atomically.

    If the program is killed within the block, `path` is unchanged and a folder stays beside it; the next write to
    `path` removes that folder. If `path` is a link, its target is replaced; devices and pipes are written directly.

    Raises:
        OSError: the file cannot be written; if the disk is full, the error names `path`.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    with (
        naming(path),
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
        one_process_at_a_time(Path(folder) / _LOCK),
    ):
        temporary = Path(folder) / path.name
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """Add this absolute path to an OSError of the `with` block: the system's error for a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(error.errno, error.strerror, str(Path(path).absolute())) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, created only if writing succeeds. Errors are as in `written_whole`."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _remove_abandoned(path: Path) -> None:
    """Remove the unfinished copies of `path` that dead processes have left beside it."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.*"):
        lock = folder / _LOCK
        with suppress(OSError):  # another process was quicker
            if {_LOCK} <= set(os.listdir(folder)) <= {_LOCK, path.name}:
                is_new = time.time() - lock.stat().st_mtime < _NEW
                if not is_new and not is_held(lock):
                    shutil.rmtree(folder)


def map_zeros(file: IO[bytes], num_bytes: int, path: str | PathLike[str]) -> np.ndarray:
    """Create a file of zeros and map it as a writable array, [num_bytes > 0] uint8.

    If the system supports it, the space is reserved now: a full disk then raises here, and does not crash a
    later write.

    Raises:
        OSError: there is not enough space; the message names `path` and the size.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:  # macOS, Windows: no reservation
            file.truncate(num_bytes)
    except OSError as error:
        size = f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3f} MB"
        need = f"{error.strerror}: {size} needed"
        raise OSError(error.errno, need, str(path)) from None
    return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)


def encode_words(words: Sequence[str]) -> np.ndarray:
    """Return words as UTF-8 with one word per line, [bytes] uint8, for storage in a file."""
    text = "".join(f"{word}\n" for word in words)
    if text.count("\n") != len(words):
        raise FieldError("a word", next(w for w in words if "\n" in w), "one without line breaks")
    return np.frombuffer(text.encode(), np.uint8)


def decode_words(text: np.ndarray) -> tuple[str, ...]:
    """Return the words in an array that `encode_words` made."""
    return tuple(text.tobytes().decode().split("\n")[:-1])


# -- reading ------------------------------------------------------------------------------------------


def map_container(path: Path, kind: Kind, verify: bool, check: Callable[[Content], None] = lambda _: None) -> Content:
    """Map a file into memory and return its facts and arrays.

    Args:
        verify: compare the checksum of the arrays, which reads the whole file once per process (about a
            second per GB). Sizes and the header's checksum are always compared.
        check: raises a ValueError if the arrays are inconsistent; called with `verify`, once per process.

    Raises:
        ValueError: the file is damaged, truncated, or of another kind or version; the message names it.
        OSError: the file cannot be read.
    """
    key = file_key(path)
    if not kind.is_kind_of(path):
        raise ValueError(f"{path} is not a {kind.name}: it does not begin like one")
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    with naming_damage(path, "its header cannot be read"):
        content = _read(data, path, kind)
    if verify and key not in _verified:
        if _checksum(content.checked) != content.checksum:
            raise ValueError(f"{path} is damaged: its checksum does not match; {kind.remedy}")
        with naming_damage(path, kind.remedy):
            check(content)
        _verified.add(key)
    return content


@contextmanager
def naming_damage(path: Path, what: str) -> Iterator[None]:
    """Convert errors that a damaged file causes in the `with` block to a ValueError that names the file and `what`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged: {reason}; {what}") from error


def _read(data: np.ndarray, path: Path, kind: Kind) -> Content:
    begin = _SIZE.size + _SIZE.unpack_from(data.data)[0]
    if begin > len(data):
        raise ValueError(f"{path} is truncated: it ends within its header")
    header = data[_SIZE.size : begin].tobytes()
    match = _VERSION.match(header)
    if match and int(match[1]) != kind.version:
        other = f"of version {match[1].decode()}, expected {kind.version}"
        raise ValueError(f"{path} is a {kind.name} {other}: {kind.remedy}")
    if not match or zlib.crc32(_with_checksum(header, b"header", 0)) != int(match[2], 16):
        raise ValueError(f"{path} is damaged: the checksum of its header does not match; {kind.remedy}")
    entries = json.loads(header)
    metadata = entries.pop("__metadata__")
    body = data[begin:]
    size, expected = len(data), begin + max(e["data_offsets"][1] for e in entries.values())
    if size != expected:
        fault, remedy = ("truncated", "") if size < expected else ("damaged", f"; {kind.remedy}")
        raise ValueError(f"{path} is {fault}: it has {size} bytes, expected {expected}{remedy}")
    dtypes = kind.dtypes
    arrays = {name: _array(body, e, dtypes[name]) for name, e in entries.items() if name in dtypes}
    return Content(json.loads(metadata["facts"]), arrays, body, int(metadata["body"], 16))


def _array(body: np.ndarray, entry: Mapping[str, Any], dtype: np.dtype) -> np.ndarray:
    begin, end = entry["data_offsets"]
    shape = entry["shape"] if dtype.names is None else entry["shape"][:-1]
    return body[begin:end].view(dtype).reshape(shape)


def _layout(kind: Kind, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], int]:
    """Return the header's entries for all arrays and the gaps between them, and the size of the body in bytes."""
    layout: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        dtype = kind.dtypes[name]
        rows = shape if dtype.names is None else (*shape, dtype.itemsize)
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        layout[name] = _entry(_TYPES.get(dtype.name, "U8"), rows, begin, end)
        if gap := -end % _PAGE:
            layout[f"gap after {name}"] = _entry("U8", (gap,), end, end + gap)
            end += gap
    return layout, end


def _entry(dtype: str, shape: Shape, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _with_checksum(header: bytes, name: bytes, checksum: int) -> bytes:
    """Return a header in which the first field called `name` has this checksum, in 8 hexadecimal digits."""
    begin = header.index(b'"%s":"' % name) + len(name) + 4
    return header[:begin] + b"%08x" % checksum + header[begin + 8 :]


def _checksum(data: np.ndarray) -> int:
    checksum = 0
    for begin in range(0, len(data), _CHUNK):
        checksum = zlib.crc32(data[begin : begin + _CHUNK].data, checksum)
    return checksum
