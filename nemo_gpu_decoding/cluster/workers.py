"""A worker: a model that is loaded once and decodes partitions, one file of transcripts each. No Ray here."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import fsspec
import numpy as np

from nemo_gpu_decoding.cache import one_process_at_a_time
from nemo_gpu_decoding.cluster.corpus import Partition, local_copy
from nemo_gpu_decoding.cluster.folder import Folder
from nemo_gpu_decoding.jit import cache_folder
from nemo_gpu_decoding.manifest import Utterance, audio_seconds, phrases_of, unreadable
from nemo_gpu_decoding.metrics import oracle_text, word_errors
from nemo_gpu_decoding.nemo_plugin.model import Model, Transcript
from nemo_gpu_decoding.search.rescoring import Rescoring

SLOWEST = 3  # files of a partition that its marker names
_SHOWN = 300  # letters of an error


class Loaded(NamedTuple):
    """A model that decodes as it was asked to."""

    model: Model
    second: Rescoring | None = None


@dataclass(frozen=True)
class Job:
    """What every worker of a run does.

    Args:
        out: folder of the run.
        load: loads the model; pickled by its name.
        shards: names of the manifests.
        batch_size: utterances per batch of the encoder.
        batch_seconds: a batch has as many utterances as have so many seconds with their padding, in place of that.
    """

    out: str
    load: Callable[[], Loaded]
    shards: tuple[str, ...]
    batch_size: int = 8
    batch_seconds: float | None = None


class Ready(NamedTuple):
    """An utterance whose audio is at hand, and its row of the manifest."""

    row: dict[str, Any]
    utterance: Utterance


@dataclass
class Totals:
    """What a marker says of its partition. Times in seconds."""

    number: int
    shard: int
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


class Transcriber:
    """Decodes partitions and writes them into the folder of the run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = Folder(job.out)
        self.model, self.second = job.load()
        self._prepare()

    def _prepare(self) -> None:
        """Decode a second of silence: kernels are compiled and a graph is built by one worker of a machine.

        The others wait for it, and load what it has left on disk. What is wrong with the decoding is found here.
        """
        import soundfile

        cache_folder().mkdir(parents=True, exist_ok=True)
        with one_process_at_a_time(cache_folder() / "workers.lock"), TemporaryDirectory() as folder:
            silence = Path(folder) / "silence.wav"
            soundfile.write(silence, np.zeros(16000), 16000)
            list(self.model.transcribe([silence], batch_size=1, second=self.second))

    def transcribe(self, partition: Partition) -> Totals:
        """Decode a partition, write it and its marker. An utterance that fails costs its own row."""
        started = time.perf_counter()
        lines = self.folder.read("rows.jsonl", partition.begin, partition.num_bytes).splitlines()
        rows = [json.loads(line) for line in lines]
        totals = Totals(partition.number, partition.shard, rows=len(rows))
        written: dict[int, dict[str, Any]] = {}  # by position in the partition
        with local_audio(rows) as places:
            ready: dict[int, Ready] = {}
            for position, (row, place) in enumerate(zip(rows, places, strict=True)):
                found = _look(row, place)
                if isinstance(found, Ready):
                    ready[position] = found
                else:
                    written[position] = _error_row(row, found)
            for batch in batches(ready, self.job.batch_size, self.job.batch_seconds):
                written.update(self._batch(batch, ready, totals))
        shard = self.job.shards[partition.shard]
        content = b"".join(
            json.dumps({**written[n], "manifest": shard, "line": row["line"]}, ensure_ascii=False).encode() + b"\n"
            for n, row in enumerate(rows)
        )
        failed = [row["error"] for row in written.values() if "error" in row]
        totals.errors, totals.last_error = len(failed), failed[-1] if failed else ""
        totals.work = round(time.perf_counter() - started, 3)
        self.folder.write(self.folder.partition_file(partition), content)
        self.folder.write_json(self.folder.marker_file(partition), vars(totals))
        return totals

    def _batch(self, batch: Sequence[int], ready: dict[int, Ready], totals: Totals) -> dict[int, dict[str, Any]]:
        """The rows of a batch's utterances."""
        started = time.perf_counter()
        found = self._decode([ready[position] for position in batch])
        audio = sum(ready[position].utterance.duration for position in batch)
        pace = (time.perf_counter() - started) / max(audio, 1e-9)
        longest = max(batch, key=lambda position: ready[position].utterance.duration)
        slowest = [*totals.slowest, (round(pace, 4), ready[longest].utterance.name)]
        totals.slowest = tuple(sorted(slowest, reverse=True)[:SLOWEST])
        rows = {}
        for position, transcript in zip(batch, found, strict=True):
            row, utterance = ready[position]
            if isinstance(transcript, str):
                rows[position] = _error_row(row, transcript)
                continue
            oracle = oracle_of(utterance.text, transcript)
            rows[position] = json_row(utterance, transcript, oracle)
            _count(totals, utterance, transcript, oracle)
        return rows

    def _decode(self, batch: Sequence[Ready]) -> list[Transcript | str]:
        """Transcripts of a batch; where that fails of each utterance alone, or why it has none."""
        files = [ready.utterance.path for ready in batch]
        phrases = [ready.utterance.phrases for ready in batch]
        try:
            found = self.model.transcribe(files, batch_size=len(files), second=self.second, phrases=phrases)
            return list(found)
        except Exception as error:
            if _is_fatal(error):
                raise
            if len(batch) == 1:
                return [f"{files[0]} cannot be read as audio" if unreadable(files) else _told(error)]
        return [found for ready in batch for found in self._decode([ready])]


def _is_fatal(error: Exception) -> bool:
    """Whether the worker, and not the utterance, is at fault: all that follows would fail."""
    return isinstance(error, MemoryError) or "CUDA error" in str(error)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {lines[0]}"
    return text[:_SHOWN]


def batches(ready: dict[int, Ready], batch_size: int, batch_seconds: float | None) -> Iterator[list[int]]:
    """Positions by falling duration, in batches of similar ones: little padding, and no memory asked for later.

    With `batch_seconds` a batch has as many as have so many seconds with their padding, one at least.
    """
    ordered = sorted(ready, key=lambda position: (-ready[position].utterance.duration, position))
    while ordered:
        longest = ready[ordered[0]].utterance.duration
        count = batch_size if batch_seconds is None else max(1, int(batch_seconds / max(longest, 1e-3)))
        yield ordered[:count]
        ordered = ordered[count:]


# ------------------------------------------------------------------------------------------------ audio


@contextmanager
def local_audio(rows: Sequence[dict[str, Any]]) -> Iterator[list[Path | str]]:
    """A file of this machine with the audio of each row, or why there is none; copies are removed afterwards."""
    with ExitStack() as stack:
        if rows and "member" in rows[0]:  # a partition does not cross the end of a tar file
            yield stack.enter_context(_tar_members(rows))
            return
        places: list[Path | str] = []
        for row in rows:
            try:
                places.append(stack.enter_context(local_copy(row["audio"])))
            except Exception as error:  # of whichever file system lies behind the URL
                places.append(_told(error))
        yield places


@contextmanager
def _tar_members(rows: Sequence[dict[str, Any]]) -> Iterator[list[Path | str]]:
    """Files of a tar at any URL, which is read once from its beginning to its end."""
    url, wanted = rows[0]["audio"], {row["member"] for row in rows}
    found: dict[str, Path] = {}
    fault = f"{url} has no such member"
    with TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        try:
            with fsspec.open(url, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
                for member in archive:
                    source = archive.extractfile(member) if member.name in wanted else None
                    if source is not None:
                        path = Path(folder) / f"{len(found)}{Path(member.name).suffix}"
                        path.write_bytes(source.read())
                        found[member.name] = path
        except Exception as error:  # what came before the damage is there
            fault = f"{url}: {_told(error)}"
        yield [found.get(row["member"], fault) for row in rows]


def _look(row: dict[str, Any], place: Path | str) -> Ready | str:
    """An utterance, or what is wrong with its audio."""
    if isinstance(place, str):
        return place
    try:
        seconds = audio_seconds(place)
    except ValueError as error:
        return _told(error)
    if seconds == 0:
        return f"{row['audio_filepath']} has no samples"
    return Ready(row, Utterance(row["audio_filepath"], place, seconds, row.get("text"), phrases_of(row)))


# ------------------------------------------------------------------------------------- rows of transcripts


def json_row(utterance: Utterance, transcript: Transcript, oracle: str | None) -> dict[str, Any]:
    """One line of `out`."""
    row: dict[str, Any] = {
        "audio_filepath": utterance.name,
        "duration": round(utterance.duration, 3),
        "pred_text": transcript.text,
        "score": transcript.score,
    }
    if transcript.n_best:
        row["n_best"] = [{"text": text, "score": score} for text, score in transcript.n_best]
    if transcript.words:
        row["words"] = [vars(word) for word in transcript.words]
    if utterance.text is not None:
        row["text"] = utterance.text
        row["wer"] = round(word_errors([utterance.text], [transcript.text]).wer, 4)
        if oracle is not None:
            row["oracle_wer"] = round(word_errors([utterance.text], [oracle]).wer, 4)
    return row


def _error_row(row: dict[str, Any], error: str) -> dict[str, Any]:
    kept: dict[str, Any] = {name: row[name] for name in ("audio_filepath", "duration", "text") if name in row}
    return {**kept, "error": error}


def oracle_of(reference: str | None, transcript: Transcript) -> str | None:
    """The text of the lattice, or of the n-best list, with the fewest word errors; None if there is neither."""
    if reference is None or (transcript.lattice is None and not transcript.n_best):
        return None
    if transcript.lattice is not None:
        return transcript.lattice.oracle(reference)
    return oracle_text(reference, [text for text, _ in transcript.n_best])


def _count(totals: Totals, utterance: Utterance, transcript: Transcript, oracle: str | None) -> None:
    totals.audio = round(totals.audio + utterance.duration, 3)
    if utterance.text is None:
        return
    errors = word_errors([utterance.text], [transcript.text])
    totals.scored += 1
    totals.words += errors.words
    totals.substitutions += errors.substitutions
    totals.deletions += errors.deletions
    totals.insertions += errors.insertions
    if oracle is not None:
        totals.with_oracle += 1
        totals.oracle_errors += word_errors([utterance.text], [oracle]).total
