"""Text files; what is wrong with one is a ValueError that names file and line."""

from __future__ import annotations

from os import PathLike
from pathlib import Path


def read_lines(path: str | PathLike[str], name: str | None = None) -> list[str]:
    r"""The lines of a UTF-8 file, without their ends "\n" or "\r\n" and without a byte-order mark.

    Other characters that Python calls ends of lines, such as U+2028, are text.

    Args:
        name: of the file in messages, where that is not its path: "manifest=train.json".

    Raises:
        ValueError: a line is not UTF-8.
        OSError: the file cannot be read.
    """
    content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last end of line is no line
    return [_decoded(line, f"{path if name is None else name}, line {i}") for i, line in enumerate(lines, 1)]


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = line[error.start]
        raise ValueError(f"{where}: byte {wrong:#04x} at {error.start + 1}, expected UTF-8 text") from None
