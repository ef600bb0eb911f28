"""Plain-text tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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
