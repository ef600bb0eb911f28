"""Local copies of the audio of a partition: from any URL, and from tar files of NeMo and WebDataset.

Archives are read once, sequentially. If a part cannot be read, its utterances get
an error each, and the others are decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs

from nemo_gpu_decoding.manifest import AUDIO_SUFFIXES, check_characters, check_row, split_row

NEMO_TAR, WEBDATASET = "nemo_tar", "webdataset"  # `archive` of a row
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
        rows: rows of `corpus.write_rows`, for single files or for one archive. A WebDataset has one row per archive,
            which is replaced by the samples in it.
    """
    archive = rows[0].get("archive") if rows else None
    with ExitStack() as stack:
        if archive is not None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nemo-gpu-decoding-")))
            yield _READERS[archive](rows, folder)
            return
        found: list[Audio] = []
        copies: dict[str, Path] = {}  # one for all parts of a file
        for row in rows:
            url = row["audio"]
            try:
                if url not in copies:
                    copies[url] = stack.enter_context(local_copy(url))
                found.append(Audio(row, copies[url]))
            except Exception as error:  # the types depend on the file system of the URL
                found.append(Audio(row, one_line(error)))
        yield found


def one_line(error: Exception) -> str:
    """The first line of an error's message, for the field `error` of a row."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {lines[0]}"
    return text[:_SHOWN]


def _nemo_tar(rows: Sequence[dict[str, Any]], folder: Path) -> list[Audio]:
    """Utterances of a tarred NeMo data set; the manifest names the members of the tar."""
    from webdataset.tariterators import tar_file_iterator

    url, names = rows[0]["audio"], [_SUB.sub(r"\1", row["member"]) for row in rows]
    wanted = {*names, *(row["member"] for row in rows)}
    found: dict[str, Path] = {}
    fault = f"{url} has no such member"
    try:
        with fsspec.open(url, "rb") as stream:
            for member in tar_file_iterator(stream, skip_meta=None, select_files=wanted.__contains__):
                path = folder / f"{len(found)}{Path(member['fname']).suffix}"
                path.write_bytes(member["data"])
                found[member["fname"]] = path
    except Exception as error:  # members before the damage are read
        fault = f"{url}: {one_line(error)}"
    files = (found.get(row["member"], found.get(name, fault)) for row, name in zip(rows, names, strict=True))
    return [Audio(row, file) for row, file in zip(rows, files, strict=True)]


def _webdataset(rows: Sequence[dict[str, Any]], folder: Path) -> list[Audio]:
    """Samples of a WebDataset tar: KEY.wav (or .flac ...), and KEY.txt or KEY.json with the fields of a manifest."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    url = rows[0]["audio"]
    found: list[Audio] = []
    try:
        with fsspec.open(url, "rb") as stream:
            for sample in group_by_keys(tar_file_expander([{"url": url, "stream": stream}])):
                found.append(_sample(sample, folder / str(len(found)), len(found) + 1))
    except Exception as error:  # the number of samples after the damage is unknown
        row = {"audio_filepath": url, "duration": 0.0, "line": len(found) + 1}
        found.append(Audio(row, f"{url} cannot be read further: {one_line(error)}"))
    return found


def _sample(sample: dict[str, Any], path: Path, number: int) -> Audio:
    """The manifest row of a WebDataset sample, and its audio, which is written to `path` with its suffix."""
    key = sample["__key__"]
    suffix = next((suffix for suffix in AUDIO_SUFFIXES if suffix[1:] in sample), "")
    row = {"audio_filepath": f"{key}{suffix}", "duration": 0.0, "line": number}
    if not suffix:
        return Audio(row, f"{key} has no {', '.join(AUDIO_SUFFIXES)}")
    try:
        more = json.loads(sample["json"]) if "json" in sample else {}
        if "txt" in sample:
            more["text"] = sample["txt"].decode("utf-8").strip()
        more = {**more, "audio_filepath": row["audio_filepath"]}
        check_row(more, f"{key}.json")
        check_characters(more, f"{key}.json")
    except (ValueError, TypeError) as error:
        return Audio(row, one_line(error))
    file = path.with_suffix(suffix)
    file.write_bytes(sample[suffix[1:]])
    return Audio({**split_row(more), **row}, file)


_READERS = {NEMO_TAR: _nemo_tar, WEBDATASET: _webdataset}
