"""Resolve file names that users give, read text files with errors that name the line, and format tables."""

import codecs
import os
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from urllib.parse import unquote

from nemo_gpu_decoding.checks import FieldError, warn_once


def path_of(name: str | PathLike[str], what: str = "path") -> Path:
    """Return the path for a file name that a user gives; resolve ~ and file:// unless a file has that exact name.

    Raises:
        FieldError: the name is no text and no path; the message begins with `what`.
    """
    if not isinstance(name, str | PathLike):
        raise FieldError(what, name, "the name of a file")
    text = os.fspath(name)
    if os.path.lexists(text):
        return Path(text)
    is_url = re.match(r"(?i:file):(//(localhost)?)?(?=/)", text)
    return Path(unquote(text[is_url.end() :]) if is_url else os.path.expanduser(text))


def read_lines(path: str | PathLike[str], name: str | None = None) -> list[str]:
    r"""Return the lines of a UTF-8 file, without line breaks ("\n", "\r\n" or "\r") and byte-order mark.

    Characters that only Python's `splitlines` treats as line breaks, such as U+2028, stay in the text.

    Args:
        name: name of the file in messages, such as "manifest=train.json"; None for its path.

    Raises:
        ValueError: a line is not UTF-8.
        OSError: the file cannot be read.
    """
    shown = path if name is None else name
    return [decoded(line, f"{shown}, line {i}: ") for i, line in enumerate(lines_of(path), 1)]


def lines_of(path: str | PathLike[str]) -> list[bytes]:
    r"""Return the lines of a UTF-8 or UTF-16 file as UTF-8 bytes, without byte-order mark and "\n"."""
    content = path_of(path).read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16, as Windows programs save it
        content = content.decode("utf-16", "replace").encode()
    content = content.removeprefix(b"\xef\xbb\xbf")
    if b"\n" not in content:  # line ends of old macOS programs
        content = content.replace(b"\r", b"\n")
    return content.removesuffix(b"\n").split(b"\n") if content else []


def decoded(line: bytes, where: str = "") -> str:
    r"""Return a line as text without "\r"; raise a ValueError that begins with `where` if it is not UTF-8."""
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = line[error.start]
        raise ValueError(f"{where}byte {wrong:#04x} at {error.start + 1}, expected UTF-8 text") from None


def as_utf8(content: bytes, name: str) -> bytes:
    """Return a text in UTF-8. Bytes that are not UTF-8 are read as Latin-1, with one warning for the file `name`."""
    try:
        content.decode()
    except UnicodeDecodeError:
        warn_once(f"{name} is not UTF-8: its other bytes are read as Latin-1")
        return content.decode("utf-8", "latin-1").encode()
    return content


def _latin_1(error: UnicodeError) -> tuple[str, int]:
    """Return bytes that are not UTF-8 as Latin-1 text, and the position after them."""
    assert isinstance(error, UnicodeDecodeError)
    return error.object[error.start : error.end].decode("latin-1"), error.end


codecs.register_error("latin-1", _latin_1)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table with minimal column widths; numbers are right-aligned, text left-aligned.

    >>> print(format_table(["decoder", "WER"], [["greedy", 14.4], ["beam", ""], ["beam", 7.0]]))
    decoder   WER
    -------  ----
    greedy   14.4
    beam
    beam      7.0
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [len(column) > 1 and all(map(_is_number, column[1:])) for column in columns]
    forms = [f"{'>' if number else '<'}{width}" for number, width in zip(numeric, widths, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(map(format, row, forms)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def _is_number(cell: str) -> bool:
    """Return whether a table cell is a number or empty, so that its column may be right-aligned."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
