"""Read n-gram LMs from ARPA files, plain or gzipped, as KenLM and SRILM write them, and from KenLM's binary files.

    with ArpaReader("lm.arpa.gz") as arpa:
        arpa.counts                     # {1: 1025, 2: 166736}
        for block in arpa.blocks():     # numpy columns, some ten thousand n-grams at a time
            block.symbols, block.log10_probs

Tabs or blanks separate fields; an absent back-off weight is 0. Symbols are split at ASCII white space
only, because NeMo's token LMs use characters such as U+00A0 as symbols. Memory does not grow with the
number of n-grams: the reader holds one block of text and the symbols.

The reader can add words that are missing in the LM, such as names. An added word gets the 1-gram
probability of <unk> or, in an LM without <unk>, that of the least likely word. An added word has no longer n-grams.
With added words, probabilities sum to slightly more than 1.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import logging
import lzma
import math
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from os import PathLike
from typing import Any, BinaryIO, cast

import numpy as np

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.lm.arpa_scan import FAULT, MARKER, Scan, SymbolTable, new_scan, scan_ngrams
from nemo_gpu_decoding.lm.kenlm_binary import MAGIC, KenlmBinary
from nemo_gpu_decoding.plain_text import as_utf8, path_of

logger = logging.getLogger("nemo_gpu_decoding")

_BLOCK_BYTES = 1 << 22
_COUNT_LINE = re.compile(rb"ngram\s+(\d{1,3})\s*=\s*(\d{1,15})$")
_SECTION_LINE = re.compile(rb"\\(\d{1,3})-grams:$")
_SPACES = re.compile(rb"[ \t\r\n]+")
_COMPRESSED: Any = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open, b"]\0\0": lzma.open}
_OTHER_FILES = dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"\\\0", b"\0\\"), "text in UTF-16") | {
    b"(\xb5/\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x04\x22M\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"LZIP": "compressed by lzip",
    b"version https://git-lfs": "a pointer of Git LFS",
    b"<": "an HTML or XML page",
    b"\x1f\x8b": "compressed twice",
    b"\xf8\x0f\0\0\0\0\0\0{": "a file of pack-lm or build-graph",
    b"\xd6\xfd\xb2~": "a graph of OpenFst",
}
_DATA, _END = b"\\data\\", b"\\end\\"
TOKENIZER = b"# tokenizer "  # before the fingerprint of a vocabulary, in a line before the header; KenLM skips it
UNKNOWN_WORDS = ("<unk>", "<UNK>")
_TOO_LARGE = float(np.finfo(np.float32).max) / math.log(10)  # log10; its cost, natural log, is infinite in float32
_NEVER = -90.0  # log10; a 1-gram below it means "impossible": SRILM writes -99 for log10 0


@dataclass(frozen=True)
class NGramBlock:
    """A block of M n-grams of equal length, in the order of the file. Weights are log10, as in the file."""

    order: int
    symbols: np.ndarray  # [M, order] int32, indices into the symbols of the LM
    log10_probs: np.ndarray  # [M] float64
    log10_backoffs: np.ndarray  # [M] float64, 0 where the file gives none


@dataclass(frozen=True)
class Arpa:
    """The n-grams that an ARPA file lists."""

    symbols: tuple[str, ...]  # of the 1-grams, in the order of the file
    orders: tuple[NGramBlock, ...]  # orders[n - 1] holds all n-grams
    added: tuple[str, ...] = ()  # the first symbols: words that the file does not list
    tokenizer: str = ""  # the fingerprint of the vocabulary in an LM over tokens, if it is known


def opener_of(magic: bytes) -> Any:
    """Return the `open` of gzip, xz or bzip2 for a file with these first bytes, or Python's `open`."""
    return next((opened for start, opened in _COMPRESSED.items() if magic.startswith(start)), open)


def read_arpa(path: str | PathLike[str], added: Iterable[str] = (), *, max_order: int | None = None) -> Arpa:
    """Read a whole ARPA file, or its n-grams up to `max_order`.

    Args:
        added: words to add to the LM, see the module docstring.

    Raises:
        ValueError: the file is not a well-formed ARPA; the message names file and line.
        OSError: the file cannot be read.
    """
    with ArpaReader(path, added) as arpa:
        wanted = [order for order in arpa.counts if max_order is None or order <= max_order]
        blocks = itertools.takewhile(lambda block: block.order in wanted, arpa.blocks())
        groups = itertools.groupby(blocks, attrgetter("order"))
        by_order = {order: join_blocks(order, of_order) for order, of_order in groups}
        orders = [by_order.get(order) or join_blocks(order, ()) for order in wanted]
        return Arpa(tuple(arpa.symbols), tuple(orders), arpa.added, arpa.tokenizer)


def join_blocks(order: int, blocks: Iterable[NGramBlock]) -> NGramBlock:
    """Concatenate blocks of n-grams of the same order."""
    columns: list[list[np.ndarray]] = [[np.zeros((0, order), np.int32)], [np.zeros(0)], [np.zeros(0)]]
    for block in blocks:
        for parts, part in zip(columns, (block.symbols, block.log10_probs, block.log10_backoffs), strict=True):
            parts.append(part)
    joined = []
    for parts in columns:
        joined.append(np.concatenate(parts))
        parts.clear()  # so that only one column is in memory twice
    return NGramBlock(order, *joined)


def without_repetitions(block: NGramBlock, name: str) -> NGramBlock:
    """Return the first entry of each n-gram, as KenLM does; warn of repeated entries in the LM called `name`."""
    rows = np.sort(np.unique(block.symbols, axis=0, return_index=True)[1])
    if len(rows) < len(block.symbols):
        others = len(block.symbols) - len(rows)
        logger.warning("%s lists %d-grams more than once: %d entries are left out", name, block.order, others)
    return NGramBlock(block.order, block.symbols[rows], block.log10_probs[rows], block.log10_backoffs[rows])


class ArpaReader:
    """A reader of one ARPA file or KenLM binary from front to back; use it as a context manager.

    Args:
        added: words to add to the LM, see the module docstring. Words that the LM lists are skipped.
            Added words become the first symbols.

    Raises:
        FieldError: an added word is empty or has white space.
        ValueError: on opening (no ARPA header) or while reading blocks; the message names file and line.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | PathLike[str], added: Iterable[str] = ()) -> None:
        if isinstance(added, str):
            raise FieldError("added", added, "a list of words")
        wanted = tuple(dict.fromkeys(added))
        for word in wanted:
            if not isinstance(word, str) or word.split() != [word]:
                raise FieldError("the word to be added", word, "one without white space")
        self.path = path_of(path, "the LM")
        self.added: tuple[str, ...] = ()  # the first symbols: words that the file does not list
        self.tokenizer = ""  # see `Arpa`
        self._kind = ""  # of compression
        self._table = SymbolTable(())
        self._text = b""  # whole lines, read ahead
        self._position = 0  # in the text: everything before it is consumed
        self._line_number = 0  # lines consumed so far
        self._block = (0, 0)  # position in the text, and lines before it, of the block last yielded
        self._is_above_one = False  # whether a probability was above 1
        self.num_bytes = self.path.stat().st_size  # size of the file on disk
        self._raw, self._file = self._open()
        self.is_compressed = self._file is not self._raw
        try:
            self._binary = KenlmBinary(self.path) if self._raw.read(len(MAGIC)) == MAGIC else None
            self._raw.seek(0)
            # n-grams of each order, by order
            self.counts = self._binary.counts if self._binary else self._read_header()
            self.symbols = self._binary.symbols if self._binary else []
            listed = join_blocks(1, self._section(1))
            self._one_grams = listed if self._binary else self._without_repetitions(listed)
            if wanted:
                self._add_words(wanted)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> ArpaReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes of the (compressed) file that are read, of `num_bytes`, for a progress bar."""
        return self._raw.tell()

    def blocks(self) -> Iterator[NGramBlock]:
        """Yield all n-grams, orders ascending, in blocks of a few MB of text."""
        yield self._one_grams
        for order in range(2, len(self.counts) + 1):
            yield from self._section(order)
        if self._binary:
            return
        marker = self._next_line()
        if marker is None:
            raise self._error(f"truncated: {_quote(_END)} is missing")
        if marker != _END:
            raise self._error(f"found {_quote(marker)}, expected {_quote(_END)}")

    def fault(self, row: int, message: str) -> ValueError:
        """Return an error about n-gram `row` of the last block yielded, with its line number."""
        begin, line_number = self._block
        for line in self._text[begin:].split(b"\n"):
            line_number += 1
            row -= bool(line.strip())
            if row < 0:
                return self._error(f"{message} in {_quote(line.strip())}", line_number)
        raise IndexError("the block has no such row")

    # -- lines -----------------------------------------------------------------------------------

    def _open(self) -> tuple[BinaryIO, BinaryIO]:
        """Return the raw file and its text stream; the same object unless the file is compressed."""
        raw = open(self.path, "rb")  # noqa: SIM115  (closed in _close)
        opened = opener_of(raw.read(8))
        raw.seek(0)
        if opened is open:
            return raw, raw
        self._kind = opened.__module__
        # the readline of GzipFile is slow Python; that of the buffer is in C
        return raw, cast(BinaryIO, io.BufferedReader(opened(raw), _BLOCK_BYTES))

    def _close(self) -> None:
        self._file.close()
        self._raw.close()

    def _read_ahead(self) -> bool:
        """Read more text if the buffer is empty; return False at the end of the file."""
        if self._position < len(self._text):
            return True
        try:
            self._text = self._file.read(_BLOCK_BYTES) + self._file.readline()
        except (EOFError, zlib.error, OSError, lzma.LZMAError) as error:
            if not self._kind:
                raise
            raise self._error(f"truncated or damaged {self._kind} file ({error})") from error
        what = next((what for start, what in _OTHER_FILES.items() if self._text.startswith(start)), "")
        if what and not self._line_number:
            expected = "a file in UTF-8, plain or compressed by gzip, xz or bzip2"
            raise ValueError(f"{self.path} is {what}, expected {expected}")
        self._text = as_utf8(self._text, str(self.path))
        self._position = 0
        if self._text and not self._text.endswith(b"\n"):
            self._text += b"\n"
        return bool(self._text)

    def _next_line(self) -> bytes | None:
        """Return the next line that is not blank, stripped; None at the end of the file."""
        while self._read_ahead():
            end = self._text.index(b"\n", self._position) + 1
            line = self._text[self._position : end].strip(b" \t\r\n")
            self._position = end
            self._line_number += 1
            if line:
                return line
        return None

    def _error(self, message: str, line_number: int | None = None) -> ValueError:
        return ValueError(f"{self.path}, line {line_number or self._line_number}: {message}")

    # -- header and sections ---------------------------------------------------------------------

    def _read_header(self) -> dict[int, int]:
        while (line := self._next_line()) not in (_DATA, BOM_UTF8 + _DATA):
            if line is not None and line.startswith(TOKENIZER):
                self.tokenizer = line.removeprefix(TOKENIZER).decode("utf-8", "replace")
            if line is None:
                hint = "Of text, build-lm makes an LM over tokens, and lmplz -o 3 < text > lm.arpa one over words"
                raise ValueError(f"{self.path} is not an ARPA file: it has no line {_quote(_DATA)}. {hint}")
        counts: dict[int, int] = {}
        while (line := self._peek_line()) is not None and not line.startswith(b"\\"):
            self._next_line()
            match = _COUNT_LINE.match(line)
            if not match:
                raise self._error(f"found {_quote(line)}, expected 'ngram <order>=<count>'")
            counts[int(match[1])] = int(match[2])
        if line is None:
            raise self._error("truncated: the file ends in the header")
        if not counts or sorted(counts) != list(range(1, len(counts) + 1)):
            raise self._error(f"the header lists the orders {sorted(counts)}, expected 1, 2, ...")
        return dict(sorted(counts.items()))

    def _peek_line(self) -> bytes | None:
        """Return the next line that is not blank, without consuming it; blank lines before it are consumed."""
        line = self._next_line()
        if line is not None:
            self._position = self._text.rfind(b"\n", 0, self._position - 1) + 1
            self._line_number -= 1
        return line

    # -- n-grams ---------------------------------------------------------------------------------

    def _add_words(self, wanted: tuple[str, ...]) -> None:
        """Insert the missing words before all 1-grams."""
        log10_probs = dict(zip(self.symbols, self._one_grams.log10_probs.tolist(), strict=True))
        self.added = tuple(word for word in wanted if word not in log10_probs)
        unknown = next((log10_probs[word] for word in UNKNOWN_WORDS if word in log10_probs), -np.inf)
        if unknown <= _NEVER:
            unknown = min((p for p in log10_probs.values() if p > _NEVER), default=0.0)
        self.symbols[:0] = self.added
        self.counts[1] = len(self.symbols)
        self._table = SymbolTable(self.symbols)
        new = len(self.added)
        symbols = np.arange(len(self.symbols), dtype=np.int32)[:, None]
        probs = np.append(np.full(new, unknown), self._one_grams.log10_probs)
        self._one_grams = NGramBlock(1, symbols, probs, np.append(np.zeros(new), self._one_grams.log10_backoffs))

    def _section(self, order: int) -> Iterator[NGramBlock]:
        """Yield the n-grams of one order; the header must name the same number of n-grams."""
        if self._binary:
            for symbols, log10_probs, log10_backoffs in self._binary.next_order():
                yield NGramBlock(order, symbols + np.int32(len(self.added)), log10_probs, log10_backoffs)
            return
        seen, count, marker, expected = 0, self.counts[order], self._peek_line(), b"\\%d-grams:" % order
        if not count and marker != expected:
            return  # some programs write this
        if marker is None:
            raise self._error(f"truncated: the file ends before {_quote(expected)}")
        self._next_line()
        match = _SECTION_LINE.match(marker)
        if not match or int(match[1]) != order:
            raise self._error(f"found {_quote(marker)}, expected {_quote(expected)}")
        for block in self._section_blocks(order):
            if seen + len(block.symbols) > count:
                raise self.fault(count - seen, f"more {order}-grams than the {count} of the header,")
            seen += len(block.symbols)
            yield block
        if seen < count and not self._read_ahead():
            raise self._error(f"truncated: the file ends after {seen} of {count} {order}-grams")
        if seen < count:
            raise self._error(f"{seen} {order}-grams, but the header says {count}")

    def _section_blocks(self, order: int) -> Iterator[NGramBlock]:
        """Yield the n-grams before the next line with a backslash, without consuming that line."""
        while self._read_ahead():
            self._block = (self._position, self._line_number)
            text = np.frombuffer(self._text, np.uint8)
            scan = new_scan(text[self._position :], order)
            reason, position, lines, rows, unread = scan_ngrams(text, self._position, order, self._table.arrays, scan)
            block = self._finish(order, scan, rows, unread)
            self._position = position
            self._line_number += lines
            if reason == FAULT:
                raise self._explain(order)
            if rows:
                yield block
            if reason == MARKER:
                return

    def _finish(self, order: int, scan: Scan, rows: int, unread: int) -> NGramBlock:
        """Read numbers in unusual forms, and the symbols of 1-grams, which the compiled scan leaves to Python."""
        for target, begin, end in scan.unread[:unread].tolist():
            field = self._text[begin:end]
            row, is_backoff = divmod(target, 2)
            if number_fault := _number_fault(field):
                raise self.fault(row, number_fault)
            (scan.log10_backoffs if is_backoff else scan.log10_probs)[row] = float(field)
        if not self._is_above_one and len(above := np.flatnonzero(scan.log10_probs[:rows] > 0)):
            self._is_above_one = True  # one warning per file
            logger.warning("%s", self.fault(int(above[0]), "a probability above 1"))
        symbols = scan.symbols[:rows]
        if order == 1:
            symbols = np.arange(len(self.symbols), len(self.symbols) + rows, dtype=np.int32)[:, None]
            self.symbols += [self._text[begin:end].decode() for begin, end in scan.names[:rows].tolist()]
        return NGramBlock(order, symbols, scan.log10_probs[:rows], scan.log10_backoffs[:rows])

    def _without_repetitions(self, listed: NGramBlock) -> NGramBlock:
        """Return the 1-grams with the likeliest entry of each symbol, and warn if a symbol has several entries."""
        self._table = SymbolTable(self.symbols)
        if self._table.double < 0:
            return listed
        likeliest_last = np.argsort(-listed.log10_probs, kind="stable")[::-1].tolist()
        best = dict.fromkeys(self.symbols, 0) | {self.symbols[row]: row for row in likeliest_last}
        several = next(symbol for row, symbol in enumerate(self.symbols) if best[symbol] != row)
        logger.warning("%s lists %r more than once: the likelier entry counts", self.path, several)
        rows = np.array(list(best.values()))
        self.symbols[:] = best
        self._table = SymbolTable(self.symbols)
        self.counts[1] = len(rows)
        columns = listed.log10_probs[rows], listed.log10_backoffs[rows]
        return NGramBlock(1, np.arange(len(rows), dtype=np.int32)[:, None], *columns)

    def _explain(self, order: int) -> ValueError:
        """Return the error for the line at which the scan stopped."""
        line = self._next_line() or b""
        row = _SPACES.split(line)
        if order == 1 and row[:1] == [b"<s>"]:
            row.insert(0, b"-99")
        if len(row) not in (order + 1, order + 2):
            return self._error(f"{len(row)} fields, expected {order + 1} or {order + 2} in {_quote(line)}")
        fault = next(filter(None, map(_number_fault, (row[0], *row[order + 1 :]))), None)
        if fault is None:
            known = {symbol.encode() for symbol in self.symbols}
            unknown = next((symbol for symbol in row[1 : order + 1] if symbol not in known), b"")
            fault = f"{_quote(unknown)} is not among the 1-grams"
        return self._error(f"{fault} in {_quote(line)}")


def _number_fault(field: bytes) -> str | None:
    try:
        value = float(field)
    except ValueError:
        return f"{_quote(field)} is not a number"
    return None if value < _TOO_LARGE else f"{_quote(field)} is not a log-probability"


def _quote(line: bytes) -> str:
    """Return a shortened line for messages; repr() would double the backslashes."""
    text = line.decode("utf-8", "backslashreplace")
    return "'" + (text if len(text) <= 60 else text[:57] + "...") + "'"
