"""Read lines of text files, with errors that name file and line, and format tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path


def read_lines(path: str | PathLike[str], name: str | None = None) -> list[str]:
    r"""The lines of a UTF-8 file, without line breaks ("\n" or "\r\n") and byte-order mark.

    Other line separators of Python, such as U+2028, are part of the text.

    Args:
        name: of the file in messages, such as "manifest=train.json"; None for its path.

    Raises:
        ValueError: a line is not UTF-8.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # no text after the last line break
    return [_decoded(line, f"{path if name is None else name}, line {i}") for i, line in enumerate(lines, 1)]


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = line[error.start]
        raise ValueError(f"{where}: byte {wrong:#04x} at {error.start + 1}, expected UTF-8 text") from None


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

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def _is_number(cell: str) -> bool:
    """Whether a cell is a number or empty, and so fits into a column of numbers."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
