"""A corpus: the rows of manifests of any size, one after the other in one file, cut into partitions.

Manifests may be compressed, lie at any URL that fsspec reads, and be many. A worker must reach its partition without
reading what is before it; so the rows are copied once into the folder of the run, with the place of their audio, and
a partition is a range of bytes in that file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs

from nemo_gpu_decoding.manifest import audio_seconds, find_utterances, parse_row

MAX_ROWS = 2000  # of a partition: rows without duration would fill it for ever


class Partition(NamedTuple):
    """Consecutive rows of one manifest: what a worker decodes at once, and what a death costs at most."""

    number: int  # from 0
    shard: int  # which manifest
    begin: int  # first byte in the file of rows
    num_bytes: int
    rows: int
    seconds: float  # of audio, as the manifest says


class Shard(NamedTuple):
    """One manifest, or the files of `audio`."""

    name: str  # as the user wrote it
    digest: str  # of its content


class Corpus(NamedTuple):
    """What is to be transcribed. `name` of a source is a manifest's URL, or None for `audio`."""

    manifests: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()  # files, where there is no manifest
    tars: tuple[str, ...] = ()  # the k-th holds the audio of rows with shard_id k, or of the k-th manifest


def find_corpus(audio: Any, manifest: Any, tarred_audio: str | None = None) -> Corpus:
    """The manifests that `manifest` names (a path or URL, a pattern, or a list of them), or the files of `audio`.

    Raises:
        ValueError: neither or both are given, or nothing is found.
    """
    if manifest is None:
        if tarred_audio is not None:
            raise ValueError(f"tarred_audio={tarred_audio} needs manifest=..., the rows of the tar files")
        return Corpus(audio=tuple(str(utterance.path.absolute()) for utterance in find_utterances(audio, None)))
    if audio is not None:
        raise ValueError("give either audio=FILES (a file, folder, pattern or [list]) or manifest=FILE")
    tars = _expand("tarred_audio", tarred_audio) if tarred_audio is not None else []
    return Corpus(tuple(_expand("manifest", manifest)), (), tuple(tars))


def _expand(option: str, value: Any) -> list[str]:
    """Files of a path, a URL, a pattern or a list of them; {0..9}, or NeMo's _OP_0..9_CL_, is a range of numbers."""
    found = []
    for pattern in map(str, value if isinstance(value, (list, tuple)) else [value]):
        for url in _ranges(pattern):
            matches = [url]
            if glob.has_magic(url):
                fs, path = url_to_fs(url)
                is_url = "://" in url
                matches = [fs.unstrip_protocol(match) if is_url else match for match in sorted(fs.glob(path))]
                if not matches:
                    raise ValueError(f"{option}={url} matches no file")
            found += matches
    for url in found:
        fs, path = url_to_fs(url)
        if not fs.isfile(path):
            raise ValueError(f"{option}={url} is no file here")
    return found


def _ranges(pattern: str) -> list[str]:
    match = re.search(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)", pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    first, last = match.groups()
    width = len(first) if first.startswith("0") else 0
    numbers = range(int(first), int(last) + 1)
    return [rest for number in numbers for rest in _ranges(f"{head}{number:0{width}d}{tail}")]


def shards_of(corpus: Corpus) -> list[Shard]:
    """The manifests with digests of their content; of `audio`, of the list of its files."""
    if not corpus.manifests:
        return [Shard("audio", _digest(["\n".join(corpus.audio).encode()]))]
    shards = []
    for url in corpus.manifests:
        with fsspec.open(url, "rb") as file:
            shards.append(Shard(url, _digest(iter(lambda file=file: file.read(1 << 20), b""))))  # type: ignore[misc]
    return shards


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()[:16]


def write_rows(corpus: Corpus, sink: IO[bytes], partition_seconds: float) -> list[Partition]:
    """Write the rows of a corpus with the places of their audio (`audio`, and `member` of a tar), and cut them.

    A partition ends where it has `partition_seconds` of audio, and at the end of its manifest or tar file.

    Raises:
        ValueError: a row is not what it should be, or there are none.
    """
    partitions: list[Partition] = []
    position = begin = rows = 0
    seconds = 0.0
    before: tuple[int, str | None] | None = None  # manifest and tar of the row before

    def cut() -> None:
        nonlocal begin, rows, seconds
        if rows and before is not None:
            partition = Partition(len(partitions), before[0], begin, position - begin, rows, round(seconds, 3))
            partitions.append(partition)
        begin, rows, seconds = position, 0, 0.0

    for shard, row in _rows(corpus):
        tar = row["audio"] if "member" in row else None
        is_full = tar is None and (seconds >= partition_seconds or rows >= MAX_ROWS)
        if before != (shard, tar) or is_full:
            cut()
        before = shard, tar
        position += sink.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        rows += 1
        seconds += row["duration"]
    cut()
    if not partitions:
        raise ValueError(f"manifest={', '.join(corpus.manifests)} has no lines")
    return partitions


def _rows(corpus: Corpus) -> Iterator[tuple[int, dict[str, Any]]]:
    """Manifest's number and row; `duration` is that of the manifest, else of the file's header, 0 if unreadable."""
    for number, name in enumerate(corpus.audio, 1):
        yield 0, {"audio_filepath": name, "audio": name, "line": number, "duration": _seconds(name)}
    for shard, url in enumerate(corpus.manifests):
        folder = url.rsplit("/", 1)[0] if "://" in url else str(Path(url).absolute().parent)
        with fsspec.open(url, "rb", compression="infer") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"manifest={url}, line {number}"
                row = parse_row(line, where)
                row |= _place(row, folder, shard, corpus.tars, where)
                row["line"] = number
                duration = row.get("duration")
                if duration is None:
                    row["duration"] = 0.0 if "member" in row else _seconds(row["audio"])
                elif isinstance(duration, bool) or not isinstance(duration, (int, float)) or not duration >= 0:
                    raise ValueError(f"{where}: duration is {duration!r}, expected seconds >= 0")
                yield shard, row


def _place(row: dict[str, Any], folder: str, shard: int, tars: Sequence[str], where: str) -> dict[str, str]:
    """Where the audio of a row is: a path or URL, from the manifest's `folder`, or a tar file and the name in it."""
    name = str(row["audio_filepath"])
    if tars:
        index = row.get("shard_id", shard)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tars):
            raise ValueError(f"{where}: shard_id is {index!r}, expected 0 .. {len(tars) - 1}, a file of tarred_audio")
        return {"audio": tars[index], "member": name}
    is_absolute = "://" in name or name.startswith("/") or Path(name).is_absolute()
    return {"audio": name if is_absolute else f"{folder}/{name}"}


def _seconds(audio: str) -> float:
    """Duration from the header; 0 if it cannot be read, which the worker that decodes it will tell."""
    with suppress(ValueError, OSError), local_copy(audio) as path:
        return audio_seconds(path)
    return 0.0


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A file of this machine with what lies at a path or URL; a copy is removed afterwards."""
    if "://" not in url:
        yield Path(url)
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        fs, path = url_to_fs(url)
        copy = Path(folder) / Path(path).name
        fs.get_file(path, str(copy))
        yield copy
