"""The output of a run: the folder with the rows of transcripts and the state of the run.

    run.json           the options of the run; a run with other options is rejected
    rows.jsonl         the corpus, see `corpus`
    plan.json          its partitions
    part-00000.jsonl   transcripts of a partition, in the order of the manifest
    part-00000.done    marker of a finished partition, with its totals

Files are written atomically, and a marker is written after its partition. A run may therefore be killed at any time.
If a partition is written twice, the content is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from nemo_gpu_decoding.cluster.corpus import Corpus, Partition, shards_of, write_rows
from nemo_gpu_decoding.container import written_whole

_PARTIAL = {"rows.jsonl", "plan.json"}  # files of a run that was killed before it wrote run.json


class Folder(NamedTuple):
    """A folder at a path or URL."""

    url: str

    @property
    def fs(self) -> DirFileSystem:
        """Its file system, with names relative to the folder."""
        fs, path = url_to_fs(self.url)
        return DirFileSystem(path, fs)

    def partition_file(self, partition: Partition) -> str:
        return f"part-{partition.number:05d}.jsonl"

    def marker_file(self, partition: Partition) -> str:
        return f"part-{partition.number:05d}.done"

    def names(self) -> set[str]:
        """The names of its files; empty if the folder does not exist."""
        fs = self.fs
        fs.invalidate_cache()
        return {name.rstrip("/") for name in fs.ls("", detail=False)} if fs.exists("") else set()

    def read(self, name: str, begin: int = 0, num_bytes: int | None = None) -> bytes:
        """A file, or a range of its bytes."""
        return self.fs.cat_file(name, start=begin, end=None if num_bytes is None else begin + num_bytes)

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    @contextmanager
    def open_whole(self, name: str) -> Iterator[IO[bytes]]:
        """A new file that becomes visible when it is closed.

        On local disks it is renamed into place; object stores show an object when it is complete.
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
    """A run: its partitions, and the names of its manifests."""

    partitions: list[Partition]
    shards: list[str]

    @property
    def seconds(self) -> float:
        return sum(partition.seconds for partition in self.partitions)


def open_run(folder: Folder, corpus: Corpus, partition_seconds: float, options: Mapping[str, Any]) -> RunPlan:
    """Begin a run in a folder, or resume the run that began there.

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
    """Raise a ValueError that names the first option that has changed."""
    now = json.loads(json.dumps(given))  # in the form in which the file holds it
    for name in sorted(now.keys() | run["options"].keys()):
        old, new = run["options"].get(name), now.get(name)
        if old != new:
            raise ValueError(
                f"out={folder.url} holds a run with {name}={_shown(old)}, this one has {name}={_shown(new)}; "
                "expected the same, or another folder"
            )
    for old, new in zip(run["shards"], shards, strict=False):
        if old != new:
            changed = "its content has changed" if old[0] == new[0] else f"this one has {new[0]}"
            raise ValueError(f"out={folder.url} holds a run of {old[0]}, {changed}; expected the same corpus")
    if len(run["shards"]) != len(shards):
        raise ValueError(
            f"out={folder.url} holds a run of {len(run['shards'])} manifests, this one has {len(shards)}; "
            "expected the same corpus"
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
