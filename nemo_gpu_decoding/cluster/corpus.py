"""Cut manifests of any size into partitions, and keep the transcripts of a run in a folder.

Manifests may be compressed, and at any URL that fsspec reads. All rows are copied once to `rows.jsonl` in the folder
of the run, with the path or URL of their audio. A partition is a byte range of `rows.jsonl`, so that a worker reads
only the rows of its partition. An utterance whose audio cannot be read gets an error; other utterances are decoded.

    run.json           the options of the run; a run with other options is rejected
    rows.jsonl         the corpus
    plan.json          its partitions
    part-00000.jsonl   transcripts of a partition, in the order of the manifest
    part-00000.done    marker of a finished partition, with its totals

Files are written atomically, and a marker is written after its partition. A run may therefore be killed at any time.
If two workers write the same partition, they write the same content.
"""

import glob
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.manifest import FAULT, check_one_given, find_audio, located, numbered_rows, part_in
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.transcript import one_line

MAX_ROWS = 2000  # limit of rows per partition; needed for rows without duration


class Partition(NamedTuple):
    """Consecutive rows of one manifest, the unit of work: if a worker dies, its partition is decoded again."""

    number: int  # from 0
    shard: int  # number of the manifest
    begin: int  # first byte in the file of rows
    num_bytes: int
    rows: int
    seconds: float  # of audio, by the manifest; 0 if unknown

    def file(self, kind: str) -> str:
        """Return the name of the partition's file: its transcripts (jsonl) or its marker (done)."""
        return f"part-{self.number:05d}.{kind}"


class Corpus(NamedTuple):
    """The input of a run: manifests, or audio files."""

    manifests: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()  # files, if there is no manifest
    tars: tuple[str, ...] = ()  # the k-th one holds the audio of rows with shard_id k, or of the k-th manifest


def find_corpus(audio: Any, manifest: Any, tarred_audio: str | None = None) -> Corpus:
    """Return the corpus that the options of `transcribe` name.

    Args:
        audio: files, folders or patterns.
        manifest: a path or URL, a pattern, or a list of them.
        tarred_audio: tar files with the audio of the manifests.
    """
    check_one_given(audio, manifest)
    if tarred_audio is not None and manifest is None:
        raise ValueError(f"tarred_audio={tarred_audio} needs the manifest of the tar files, manifest is null")
    if audio is not None:
        return Corpus(audio=tuple(str(path.absolute()) for path in find_audio(audio)))
    tars = _expand("tarred_audio", tarred_audio) if tarred_audio is not None else []
    return Corpus(tuple(_expand("manifest", manifest)), (), tuple(tars))


def _expand(option: str, value: Any) -> list[str]:
    """Return the files that a path, URL, pattern or list names; {0..9} and NeMo's _OP_0..9_CL_ are number ranges."""
    urls = []
    for pattern in map(str, value if isinstance(value, (list, tuple)) else [value]):
        file = path_of(pattern)
        for url in [str(file)] if file.is_file() else _ranges(pattern):
            matches = [url]
            if glob.has_magic(url) and not file.is_file():
                fs, path = url_to_fs(url)
                is_url = "://" in url
                matches = [fs.unstrip_protocol(match) if is_url else match for match in sorted(fs.glob(path))]
                if not matches:
                    raise ValueError(f"{option}={url} matches no file")
            urls += matches
    for url in urls:
        fs, path = url_to_fs(url)
        if not fs.isfile(path):
            raise ValueError(f"{option}={url} is no file here")
    return urls


def _ranges(pattern: str) -> list[str]:
    match = re.search(r"(?:\{|_OP_)(\d+)\.\.(\d+)(?:\}|_CL_)", pattern)
    if match is None:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    first, last = match.groups()
    width = len(first) if first.startswith("0") else 0
    numbers = range(int(first), int(last) + 1)
    return [rest for number in numbers for rest in _ranges(f"{head}{number:0{width}d}{tail}")]


def shards_of(corpus: Corpus) -> list[tuple[str, str]]:
    """Return the names of the manifests with digests of their content, or for `audio` a digest of the file list."""
    if corpus.audio:
        return [("audio", _digest(BytesIO("\n".join(corpus.audio).encode(errors="surrogateescape"))))]
    shards = []
    for url in corpus.manifests:
        with fsspec.open(url, "rb") as file:
            shards.append((url, _digest(file)))
    return shards


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()[:16]


def write_rows(corpus: Corpus, sink: IO[bytes], partition_seconds: float) -> list[Partition]:
    """Write all rows of a corpus, with `audio` (path) and `member` (of a tar file); return the partitions.

    A partition ends when it has `partition_seconds` of audio, and at the end of its manifest or tar file.
    """
    partitions: list[Partition] = []
    last, last_tar = Partition(0, -1, 0, 0, 0, 0.0), ""  # of the previous row
    for shard, row in _rows(corpus):
        tar = row["audio"] if "member" in row else ""
        is_full = not tar and (last.seconds >= partition_seconds or last.rows >= MAX_ROWS)
        if (shard, tar) != (last.shard, last_tar) or is_full:
            last = Partition(len(partitions), shard, last.begin + last.num_bytes, 0, 0, 0.0)
            partitions.append(last)
        last_tar = tar
        num_bytes, seconds = sink.write(json.dumps(row).encode() + b"\n"), last.seconds + row["seconds"]
        last = last._replace(num_bytes=last.num_bytes + num_bytes, rows=last.rows + 1, seconds=seconds)
        partitions[-1] = last
    if not partitions:
        raise ValueError(f"manifest={', '.join(corpus.manifests)} has no lines")
    return [partition._replace(seconds=round(partition.seconds, 3)) for partition in partitions]


def _rows(corpus: Corpus) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield for each row the number of its manifest and an entry with row, audio file and `seconds`.
    `seconds` is the duration in the manifest or the file's header, or 0 if the file is unreadable."""
    for number, name in enumerate(corpus.audio, 1):
        yield 0, {"row": {"audio_filepath": name}, "audio": name, "line": number, "seconds": _seconds(name)}
    tars = [_absolute(tar) for tar in corpus.tars]
    for shard, name in enumerate(corpus.manifests):
        url = _absolute(name)
        with fsspec.open(url, "rb", compression="infer") as lines:
            for number, where, row in numbered_rows(lines, name):
                place, seconds = _location(row, url, shard, tars, where), row.get("duration")
                if seconds is None:
                    seconds = 0.0 if "member" in place else _seconds(place["audio"], part_in(row)[0])
                yield shard, {"row": row, **place, "line": number, "seconds": seconds}


def _location(row: dict[str, Any], url: str, shard: int, tars: Sequence[str], where: str) -> dict[str, str]:
    """Return the path or URL of a row's audio or tar file; a relative path begins at the manifest's folder."""
    name = str(row["audio_filepath"])
    if tars:
        index = row.get("shard_id", shard)
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tars):
            expected = f"0 .. {len(tars) - 1}, a file of tarred_audio"
            row.setdefault(FAULT, f"{where}: shard_id is {index!r}, expected {expected}")
            return {"audio": name}
        return {"audio": tars[index], "member": name}
    if "://" not in url and (name[:5].lower() == "file:" or "://" not in name):
        return {"audio": str(located(Path(url).parent, name))}
    return {"audio": name if "://" in name or name.startswith("/") else f"{url.rsplit('/', 1)[0]}/{name}"}


def _absolute(url: str) -> str:
    """Return a path as an absolute path, because workers run in other folders; return a URL unchanged."""
    return url if "://" in url else str(Path(url).absolute())


def _seconds(audio: str, offset: float = 0.0) -> float:
    """Return the seconds in an audio file's header, or 0 if the file is unreadable, which the worker reports."""
    import soundfile

    with suppress(RuntimeError, ValueError, OSError), local_copy(audio) as path:
        return max(0.0, float(soundfile.info(str(path)).duration) - offset)
    return 0.0


_SUB = re.compile(r"-sub\d+(\.\w+)?$")  # in NeMo's names of further parts of a member


# the entry of an utterance, and a local file with its audio or the reason why there is none
Audio = tuple[dict[str, Any], Path | str]


@contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """Open a path, or a temporary local copy of a URL that is removed at the end of the block."""
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
    """Yield the utterances of a partition, in order; remove temporary copies of their audio afterwards.

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
                utterances.append((row, copies[url]))
            except Exception as error:  # the types depend on the file system of the URL
                utterances.append((row, one_line(error)))
        yield utterances


def _members(rows: Sequence[dict[str, Any]], folder: Path) -> list[Audio]:
    """Return the utterances in a tar file of a NeMo data set; rows of the manifest name members of the tar file."""
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
    return list(zip(rows, files, strict=True))


_PARTIAL = {"rows.jsonl", "plan.json"}  # files of a run that was killed before it wrote run.json


class Folder(NamedTuple):
    """A folder of a run, at a local path or at a URL."""

    url: str

    @property
    def fs(self) -> DirFileSystem:
        """Return an fsspec file system whose file names are relative to the folder."""
        fs, path = url_to_fs(self.url)
        return DirFileSystem(path, fs)

    def names(self) -> set[str]:
        """Return the names of the files in the folder, or none if the folder does not exist."""
        fs = self.fs
        fs.invalidate_cache()
        return {name.rstrip("/") for name in fs.ls("", detail=False)} if fs.exists("") else set()

    def read(self, name: str, begin: int = 0, num_bytes: int | None = None) -> bytes:
        """Return the bytes of a file in the folder, or a range of them."""
        return self.fs.cat_file(name, start=begin, end=None if num_bytes is None else begin + num_bytes)

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    @contextmanager
    def open_whole(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file that becomes visible when it is closed.

        A local file is written under a temporary name and renamed; object stores show an object when it is complete.
        """
        fs = self.fs
        if isinstance(fs.fs, LocalFileSystem):
            with written_whole(Path(fs.path) / name) as temporary, temporary.open("wb") as file:
                yield file
        else:
            fs.makedirs("", exist_ok=True)
            with fs.open(name, "wb") as file:
                yield file

    def write(self, name: str, content: bytes) -> None:
        with self.open_whole(name) as file:
            file.write(content)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, ensure_ascii=False, indent=1).encode())


class RunPlan(NamedTuple):
    """The plan of a run: the partitions and the names of the manifests."""

    partitions: list[Partition]
    shards: list[str]


def open_run(folder: Folder, corpus: Corpus, partition_seconds: float, options: Mapping[str, Any]) -> RunPlan:
    """Begin a run in a folder, or resume the interrupted run in that folder.

    Args:
        options: the options on which transcripts depend; values are JSON types.

    Raises:
        ValueError: the folder holds a run with another corpus or other options, or other files; or a row of the corpus
            is invalid.
    """
    names = folder.names()
    shards = shards_of(corpus)
    given = {**options, "partition_seconds": partition_seconds}
    if "run.json" in names:
        run = folder.read_json("run.json")
        _check_same(folder, run, given, [list(shard) for shard in shards])
    elif names - _PARTIAL:
        example = sorted(names - _PARTIAL)[0]
        raise ValueError(
            f"out={folder.url} holds {example} and no run.json, expected a new or empty folder, or that of a run"
        )
    else:
        with folder.open_whole("rows.jsonl") as sink:
            partitions = write_rows(corpus, sink, partition_seconds)
        folder.write_json("plan.json", partitions)
        folder.write_json("run.json", {"options": given, "shards": shards})
    plan = [Partition(*entry) for entry in folder.read_json("plan.json")]
    return RunPlan(plan, [name for name, _ in shards])


def _check_same(folder: Folder, run: Mapping[str, Any], given: dict[str, Any], shards: list[list[str]]) -> None:
    """Raise a ValueError that names the first option that differs from the options of the run to resume."""
    before, now = run["options"], json.loads(json.dumps(given))  # in the form of the file
    changes = [
        f"with {name}={_shown(old)}, this one has {name}={_shown(new)}; expected the same, or another folder"
        for name in sorted(now.keys() | before.keys())
        if (old := before.get(name)) != (new := now.get(name))
    ]
    for old, new in zip(run["shards"], shards, strict=False):
        if old != new:
            changed = "its content has changed" if old[0] == new[0] else f"this one has {new[0]}"
            changes.append(f"of {old[0]}, {changed}; expected the same corpus")
    if len(run["shards"]) != len(shards):
        changes.append(f"of {len(run['shards'])} manifests, this one has {len(shards)}; expected the same corpus")
    if changes:
        raise ValueError(f"out={folder.url} holds a run {changes[0]}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
