"""Local copies of the audio of a partition: from any URL, and from the tar files of NeMo.

Tar files are read once, sequentially. If a part cannot be read, its utterances get an error each, and the others are
decoded.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs

_SHOWN = 300  # maximum number of characters of an error
_SUB = re.compile(r"-sub\d+(\.\w+)?$")  # in NeMo's names of further parts of a member


class Audio(NamedTuple):
    """The manifest row of an utterance, and its audio."""

    row: dict[str, Any]
    file: Path | str  # a local file, or the reason why there is none


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A local file with the content of a path or URL; a temporary copy is removed afterwards."""
    if "://" not in url:
        yield Path(url)
        return
    with TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        fs, path = url_to_fs(url)
        copy = Path(folder) / Path(path).name
        fs.get_file(path, str(copy))
        yield copy


@contextmanager
def local_audio(rows: Sequence[dict[str, Any]]) -> Iterator[list[Audio]]:
    """The utterances of a partition, in order; temporary copies of their audio are removed afterwards.

    Args:
        rows: rows of `corpus.write_rows`, for single files or for one tar file.
    """
    with ExitStack() as stack:
        if rows and "member" in rows[0]:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nemo-gpu-decoding-")))
            yield _members(rows, folder)
            return
        utterances: list[Audio] = []
        copies: dict[str, Path] = {}  # one for all parts of a file
        for row in rows:
            url = row["audio"]
            try:
                if url not in copies:
                    copies[url] = stack.enter_context(local_copy(url))
                utterances.append(Audio(row, copies[url]))
            except Exception as error:  # the types depend on the file system of the URL
                utterances.append(Audio(row, one_line(error)))
        yield utterances


def one_line(error: Exception) -> str:
    """The first line of an error's message, for the field `error` of a row."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {lines[0]}"
    return text[:_SHOWN]


def _members(rows: Sequence[dict[str, Any]], folder: Path) -> list[Audio]:
    """Utterances of a tarred NeMo data set; the manifest names the members of the tar."""
    url, names = rows[0]["audio"], [_SUB.sub(r"\1", row["member"]) for row in rows]
    wanted = {*names, *(row["member"] for row in rows)}
    copies: dict[str, Path] = {}  # by the name of the member
    fault = f"{url} has no such member"
    try:
        with fsspec.open(url, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name in wanted else None
                if content is not None:  # a file, and no folder
                    path = folder / f"{len(copies)}{Path(member.name).suffix}"
                    path.write_bytes(content.read())
                    copies[member.name] = path
    except Exception as error:  # members before the damage are read
        fault = f"{url}: {one_line(error)}"
    files = (copies.get(row["member"], copies.get(name, fault)) for row, name in zip(rows, names, strict=True))
    return [Audio(row, file) for row, file in zip(rows, files, strict=True)]
