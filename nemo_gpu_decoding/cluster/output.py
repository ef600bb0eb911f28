"""The output of a run: rows of transcripts with their totals, and the folder with them and the state of the run.

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
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from nemo_gpu_decoding.cluster.corpus import Corpus, Partition, digest_of_ends, shards_of, write_rows
from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.manifest import Utterance
from nemo_gpu_decoding.metrics import WordErrors, oracle_text, word_errors
from nemo_gpu_decoding.plain_text import path_of
from nemo_gpu_decoding.search.result import places_as_json

if TYPE_CHECKING:
    from nemo_gpu_decoding.live.interface import Word
    from nemo_gpu_decoding.nemo_plugin.transcript import Transcript


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
    return RunPlan(plan, [shard.name for shard in shards])


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


def content_of(path: str) -> str:
    """Name and digest of a file, as in `digest_of_ends`; a value that is no file is returned unchanged.

    >>> content_of("no_such_file")
    'no_such_file'
    """
    file = path_of(path)
    if not file.is_file():
        return path
    return f"{file.name} ({digest_of_ends(str(file))})"


@dataclass
class Totals:
    """The content of a marker: totals of its partition. Times are in seconds."""

    number: int = 0
    shard: int = 0
    rows: int = 0
    audio: float = 0.0  # of utterances that were decoded
    work: float = 0.0
    errors: int = 0
    last_error: str = ""
    scored: int = 0  # utterances with a reference
    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    with_oracle: int = 0
    oracle_errors: int = 0
    slowest: tuple[tuple[float, str], ...] = ()  # seconds of work per second of audio, and the file

    @property
    def word_errors(self) -> WordErrors:
        return WordErrors(self.words, self.substitutions, self.deletions, self.insertions)

    @property
    def oracle_wer(self) -> float | None:
        """The lowest WER of the alternatives; None if an utterance with a reference has none."""
        has_oracle = self.scored and self.with_oracle == self.scored
        return self.oracle_errors / max(self.words, 1) if has_oracle else None

    def count(self, errors: WordErrors, oracle: WordErrors | None) -> None:
        """Add the word errors of an utterance with a reference, and those of its best alternative."""
        self.scored += 1
        for name, value in vars(errors).items():
            setattr(self, name, getattr(self, name) + value)
        if oracle is not None:
            self.with_oracle += 1
            self.oracle_errors += oracle.total


def row_of(utterance: Utterance, transcript: Transcript | str, totals: Totals) -> dict[str, Any]:
    """The output row of an utterance, with the other fields of its manifest row; also adds it to `totals`.

    Args:
        transcript: of the utterance, or the reason why it has none.
    """
    row: dict[str, Any] = {"audio_filepath": utterance.name, "duration": round(utterance.duration, 3)}
    row |= utterance.fields
    totals.rows += 1
    text = {} if utterance.text is None else {"text": utterance.text}
    if isinstance(transcript, str):
        totals.errors, totals.last_error = totals.errors + 1, transcript
        return {**row, **text, "error": transcript}
    if transcript.error:  # of a part of a long recording; a transcript with gaps is not scored
        totals.errors, totals.last_error = totals.errors + 1, transcript.error
        return {**row, **text, "pred_text": transcript.text, **details_of(transcript), "error": transcript.error}
    totals.audio = round(totals.audio + utterance.duration, 3)
    row |= {"pred_text": transcript.text, **details_of(transcript)}
    if utterance.text is not None:
        best = oracle_of(utterance.text, transcript)
        errors = word_errors([utterance.text], [transcript.text])
        oracle = None if best is None else word_errors([utterance.text], [best])
        totals.count(errors, oracle)
        row |= {**text, "wer": _rate(errors)}
        row |= {} if oracle is None else {"oracle_wer": _rate(oracle)}
    return row


def _rate(errors: WordErrors) -> float | None:
    """The word error rate for a row; None if it is infinite, because JSON has no such number."""
    return round(errors.wer, 4) if math.isfinite(errors.wer) else None


def details_of(transcript: Transcript) -> dict[str, Any]:
    """Fields of a row besides the text: the score, and those that the options select."""
    details: dict[str, Any] = {"score": transcript.score}
    if transcript.outside_share is not None:
        details["outside_share"] = round(transcript.outside_share, 4)
    if transcript.in_grammar is not None:
        details["in_grammar"] = transcript.in_grammar
    if transcript.phrases:
        details["found_phrases"] = [phrase._asdict() for phrase in transcript.phrases]
    if transcript.n_best:
        details["n_best"] = [{"text": text, "score": score} for text, score in transcript.n_best]
    if transcript.words:
        details["words"] = [_as_row(word) for word in transcript.words]
    if transcript.alternatives:
        details["word_alternatives"] = places_as_json(transcript.alternatives)
    if transcript.segments:
        details["segments"] = [
            {**segment._asdict(), "n_best": [{"text": text, "score": score} for text, score in segment.n_best]}
            for segment in transcript.segments
        ]
    return details


def _as_row(word: Word) -> dict[str, Any]:
    rounded = None if word.confidence is None else round(word.confidence, 4)
    return word._replace(confidence=rounded).shown()


def oracle_of(reference: str, transcript: Transcript) -> str | None:
    """The text of the lattice, or of the n-best list, with the fewest word errors; None without alternatives."""
    if transcript.lattice is None and not transcript.n_best:
        return None
    return oracle_text(reference, [text for text, _ in transcript.n_best], transcript.lattice)
