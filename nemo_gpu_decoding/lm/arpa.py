"""Reading n-gram LMs in ARPA format, plain or gzipped, as KenLM and SRILM write it.

    with ArpaReader("lm.arpa.gz") as arpa:
        arpa.counts                     # {1: 1025, 2: 166736}
        for block in arpa.blocks():     # numpy columns, some ten thousand n-grams at a time
            block.symbols, block.log10_probs

Fields may be separated by tabs or blanks; a back-off weight may be absent (it is 0 then). Symbols are
split at ASCII white space only: NeMo's token LMs use characters such as U+00A0 as symbols.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import numpy as np

_BLOCK_BYTES = 1 << 22
_COUNT_LINE = re.compile(rb"ngram\s+(\d+)\s*=\s*(\d+)$")
_SECTION_LINE = re.compile(rb"\\(\d+)-grams:$")
_GZIP_MAGIC = b"\x1f\x8b"
_KENLM_MAGIC = b"mmap lm http://kheafield.com/code"
_DATA, _END = b"\\data\\", b"\\end\\"
_IS_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))  # as bytes.split()
_NEVER = b"-99"  # what SRILM writes for log10 0


@dataclass(frozen=True)
class NGramBlock:
    """M n-grams of one order, in the order of the file. Weights are log10, as in the file."""

    order: int
    symbols: np.ndarray  # [M, order] int32, indices into the symbols of the LM
    log10_probs: np.ndarray  # [M] float64
    log10_backoffs: np.ndarray  # [M] float64, 0 where the file gives none


@dataclass(frozen=True)
class Arpa:
    """A whole ARPA file."""

    symbols: tuple[str, ...]  # of the 1-grams, in the order of the file
    orders: tuple[NGramBlock, ...]  # orders[n - 1] holds all n-grams


def read_arpa(path: str | PathLike[str]) -> Arpa:
    """Read a whole ARPA file.

    Raises:
        ValueError: the file is not a well-formed ARPA; the message names file and line.
        OSError: the file cannot be read.
    """
    with ArpaReader(path) as arpa:
        blocks = list(arpa.blocks())
        orders = [_join(order, [b for b in blocks if b.order == order]) for order in arpa.counts]
        return Arpa(tuple(arpa.symbols), tuple(orders))


def _join(order: int, blocks: list[NGramBlock]) -> NGramBlock:
    return NGramBlock(
        order,
        np.concatenate([np.zeros((0, order), np.int32), *(b.symbols for b in blocks)]),
        np.concatenate([np.zeros(0), *(b.log10_probs for b in blocks)]),
        np.concatenate([np.zeros(0), *(b.log10_backoffs for b in blocks)]),
    )


class ArpaReader:
    """Reads one ARPA file from front to back; use as a context manager.

    Raises:
        ValueError: on opening (no ARPA header) or while reading blocks; names file and line.
        OSError: the file cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.symbols: list[str] = []  # complete once the first block of order 2 is read
        self._index: dict[bytes, int] = {}
        self._line_number = 0  # lines consumed so far
        self._pending: list[bytes] = []  # lines read ahead
        self._file = self._open()
        try:
            self.counts = self._read_header()  # n-grams of each order, by order
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ArpaReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def blocks(self) -> Iterator[NGramBlock]:
        """All n-grams, orders ascending, in blocks of a few MB of text."""
        for order, count in self.counts.items():
            self._expect_section(order)
            seen = 0
            for lines in self._section_lines():
                block = self._parse(order, lines)
                seen += len(block.symbols)
                self._line_number += len(lines)
                yield block
            self._check_count(order, seen, count)
        marker = self._next_line()
        if marker is None:
            raise self._error(f"truncated: {_quote(_END)} is missing")
        if marker != _END:
            raise self._error(f"found {_quote(marker)}, expected {_quote(_END)}")

    # -- lines -----------------------------------------------------------------------------------

    def _open(self) -> BinaryIO:
        with open(self.path, "rb") as file:
            magic = file.read(len(_KENLM_MAGIC))
        if magic == _KENLM_MAGIC:
            raise ValueError(f"{self.path} is a KenLM binary; give the ARPA file that it was built from")
        if magic.startswith(_GZIP_MAGIC):
            # GzipFile's own readlines is slow Python; the buffer's is not
            return cast(BinaryIO, io.BufferedReader(gzip.open(self.path, "rb"), _BLOCK_BYTES))
        return open(self.path, "rb")

    def _read_ahead(self) -> bool:
        """Fill the read-ahead; False at the end of the file."""
        try:
            self._pending = self._file.readlines(_BLOCK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._error(f"truncated or damaged gzip file ({error})") from error
        return bool(self._pending)

    def _next_line(self) -> bytes | None:
        """The next line that is not blank, stripped; None at the end of the file."""
        while self._pending or self._read_ahead():
            for skipped, line in enumerate(self._pending, 1):
                if stripped := line.strip():
                    self._pending = self._pending[skipped:]
                    self._line_number += skipped
                    return stripped
            self._line_number += len(self._pending)
            self._pending = []
        return None

    def _section_lines(self) -> Iterator[list[bytes]]:
        """Blocks of lines up to the next line with a backslash, which stays unread."""
        while self._pending or self._read_ahead():
            lines, self._pending = self._pending, []
            marker = next((i for i, line in enumerate(lines) if line.startswith(b"\\")), None)
            if marker is None:
                yield lines
                continue
            self._pending = lines[marker:]
            if marker:
                yield lines[:marker]
            return

    def _error(self, message: str, line_number: int | None = None) -> ValueError:
        return ValueError(f"{self.path}, line {line_number or self._line_number}: {message}")

    # -- header and sections ---------------------------------------------------------------------

    def _read_header(self) -> dict[int, int]:
        while (line := self._next_line()) != _DATA:
            if line is None:
                raise ValueError(f"{self.path} is not an ARPA file: it has no line {_quote(_DATA)}")
        counts: dict[int, int] = {}
        while (line := self._next_line()) is not None and not line.startswith(b"\\"):
            match = _COUNT_LINE.match(line)
            if not match:
                raise self._error(f"found {_quote(line)}, expected 'ngram <order>=<count>'")
            counts[int(match[1])] = int(match[2])
        if line is None:
            raise self._error("truncated: the file ends in the header")
        if not counts or sorted(counts) != list(range(1, len(counts) + 1)):
            raise self._error(f"the header lists the orders {sorted(counts)}, expected 1, 2, ...")
        self._pending.insert(0, line)
        self._line_number -= 1
        return dict(sorted(counts.items()))

    def _expect_section(self, order: int) -> None:
        marker, expected = self._next_line(), b"\\%d-grams:" % order
        if marker is None:
            raise self._error(f"truncated: the file ends before {_quote(expected)}")
        match = _SECTION_LINE.match(marker)
        if not match or int(match[1]) != order:
            raise self._error(f"found {_quote(marker)}, expected {_quote(expected)}")

    def _check_count(self, order: int, seen: int, count: int) -> None:
        if seen == count:
            return
        if not self._pending and seen < count:
            raise self._error(f"truncated: the file ends after {seen} of {count} {order}-grams")
        raise self._error(f"{seen} {order}-grams, but the header says {count}")

    # -- n-grams ---------------------------------------------------------------------------------

    def _parse(self, order: int, lines: list[bytes]) -> NGramBlock:
        """All lines at once; only if that fails is the line at fault looked for."""
        try:
            fields, begins, widths = _split(lines)
            if order == 1:
                fields, begins, widths = _complete_start_symbol(fields, begins, widths)
            if not np.isin(widths, (order + 1, order + 2)).all():
                raise ValueError("wrong number of fields")
            columns = [fields[begins + 1 + k] for k in range(order)]
            if order == 1:
                self._add_symbols(columns[0])
            find = self._index.__getitem__
            symbols = [np.fromiter(map(find, column), np.int32, len(column)) for column in columns]
            probs = _numbers(fields[begins])
            backoffs = np.zeros(len(begins))
            has_backoff = widths == order + 2
            backoffs[has_backoff] = _numbers(fields[begins[has_backoff] + order + 1])
        except (ValueError, KeyError):
            raise self._explain(order, lines) from None
        return NGramBlock(order, np.stack(symbols, 1), probs, backoffs)

    def _add_symbols(self, fields: np.ndarray) -> None:
        self.symbols.extend(field.decode("utf-8") for field in fields)
        self._index.update(zip(fields, range(len(self._index), len(self.symbols)), strict=True))
        if len(self._index) < len(self.symbols):
            raise ValueError("duplicate symbol")

    def _explain(self, order: int, lines: list[bytes]) -> ValueError:
        """The error of the first line at fault."""
        own: set[bytes] = set()  # 1-grams of these lines
        for number, line in enumerate(lines, self._line_number + 1):
            row = line.split()
            if order == 1 and row[:1] == [b"<s>"]:
                row.insert(0, _NEVER)
            fault = _fault(order, row) if row else None
            if fault is None and order == 1 and row:
                fault = "the symbol is listed twice" if row[1] in own else _utf8_fault(row[1])
                own.add(row[1])
            elif fault is None and row:
                unknown = [symbol for symbol in row[1 : order + 1] if symbol not in self._index]
                fault = f"{_quote(unknown[0])} is not among the 1-grams" if unknown else None
            if fault:
                return self._error(f"{fault} in {_quote(line.strip())}", number)
        return self._error("a symbol is listed twice among the 1-grams")


def _split(lines: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The fields of all lines that are not blank.

    Returns:
        all fields, [F] object (bytes); per line the index of its first field and their number, [M].
    """
    text = b"".join(lines)
    fields = np.array(text.split(), object)
    is_space = _IS_SPACE[np.frombuffer(text, np.uint8)]
    field_ends = np.flatnonzero(is_space & ~np.append(True, is_space[:-1]))
    line_ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
    ends = np.searchsorted(field_ends, line_ends)
    ends[-1] = len(fields)  # the last line may lack a newline
    widths = np.diff(ends, prepend=0)
    filled = widths > 0
    return fields, (ends - widths)[filled], widths[filled]


def _complete_start_symbol(
    fields: np.ndarray, begins: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some writers leave out the probability of <s>, which is never used: put one in."""
    bare = np.flatnonzero(fields[begins] == b"<s>")
    if not len(bare):
        return fields, begins, widths
    fields = np.insert(fields, begins[bare], _NEVER)
    widths = widths + np.isin(np.arange(len(widths)), bare)
    return fields, np.cumsum(widths) - widths, widths


def _numbers(fields: np.ndarray) -> np.ndarray:
    """Parsed as float() does; ValueError if one is no number, NaN or +inf."""
    values = np.fromiter(map(float, fields), np.float64, len(fields))
    if not (values < np.inf).all():
        raise ValueError("not a log-probability")
    return values


def _fault(order: int, row: list[bytes]) -> str | None:
    """What is wrong with the number or the form of the fields of one line, if anything."""
    if len(row) not in (order + 1, order + 2):
        return f"{len(row)} fields, expected {order + 1} or {order + 2}"
    for field in (row[0], *row[order + 1 :]):
        try:
            value = float(field)
        except ValueError:
            return f"{_quote(field)} is not a number"
        if not value < float("inf"):
            return f"{_quote(field)} is not a log-probability"
    return None


def _utf8_fault(symbol: bytes) -> str | None:
    try:
        symbol.decode("utf-8")
    except UnicodeDecodeError:
        return "the symbol is not UTF-8"
    return None


def _quote(line: bytes) -> str:
    """A line for a message, shortened; no repr(), which would double the backslashes."""
    text = line.decode("utf-8", "backslashreplace")
    return "'" + (text if len(text) <= 60 else text[:57] + "...") + "'"
