"""A worker, without Ray: it loads a model once, and decodes partitions to one file of transcripts each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.audio import AudioPart, AudioSource, unreadable
from nemo_gpu_decoding.cache import one_process_at_a_time
from nemo_gpu_decoding.cluster.corpus import Audio, Partition, local_audio, one_line
from nemo_gpu_decoding.cluster.output import Folder, Totals, row_of
from nemo_gpu_decoding.fusion.phrases import REQUEST_KEYS
from nemo_gpu_decoding.jit import cache_folder
from nemo_gpu_decoding.manifest import FAULT, Utterance, opened
from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
from nemo_gpu_decoding.nemo_plugin.long_audio import joined, planned, segment_files
from nemo_gpu_decoding.nemo_plugin.model import Model, Outputs
from nemo_gpu_decoding.nemo_plugin.transcript import SegmentLog, Transcript
from nemo_gpu_decoding.search.rescoring import Rescoring

UNREADABLE = "cannot be read as audio"
SLOWEST = 3  # number of slowest files in a marker


class Loaded(NamedTuple):
    """A model with its decoding options."""

    model: Model
    second: Rescoring | None = None


@dataclass(frozen=True)
class Job:
    """The options that all workers of a run share.

    Args:
        out: folder of the run.
        load: loads the model; pickled by its name.
        shards: names of the manifests.
        batch_size: utterances per batch of the encoder.
        batch_seconds: seconds of audio per batch, padding included, in place of `batch_size`; None: no limit.
        cutting: where long recordings are cut.
    """

    out: str
    load: Callable[[], Loaded]
    shards: tuple[str, ...]
    batch_size: int = 8
    batch_seconds: float | None = None
    cutting: Cutting = field(default_factory=Cutting)


class Part(NamedTuple):
    """The place of a segment in its recording."""

    recording: Item
    spans: Sequence[tuple[float, float]]  # start and end of all segments, seconds
    fault: str  # why the recording cannot be read to its end
    min_confidence: float = 0.0  # see `Cutting`
    key: str = ""  # of the recording in the log of segments; "": no log


class Item(NamedTuple):
    """An utterance of a partition."""

    position: int  # from 0
    row: dict[str, Any]  # of the manifest
    utterance: Utterance  # for a segment, with its file and duration
    part: Part | None = None  # None: a whole recording


class Batch(NamedTuple):
    """Utterances that went through the encoder together."""

    items: list[Item]
    outputs: Outputs | str  # of NeMo's forward pass, or its error
    work: float = 0.0  # seconds of the forward pass
    logged: Sequence[Transcript | str] = ()  # from the log of an interrupted run, without outputs


class Transcriber:
    """Decodes partitions and writes them into the folder of the run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = Folder(job.out)
        self.loaded = job.load()
        self.model, self.second = self.loaded
        self._prepare()

    def _prepare(self) -> None:
        """Decode a second of silence, so that one worker per machine compiles kernels and builds the graph.

        The other workers wait for it and load its files from the cache. Errors of the decoding options occur here.
        """
        cache_folder().mkdir(parents=True, exist_ok=True)
        with one_process_at_a_time(cache_folder() / "workers.lock"):
            for outputs in self.model.encode([np.zeros(16000, np.float32)], batch_size=1):
                list(self.model.decode(outputs, second=self.second))

    def transcribe(self, partition: Partition) -> Totals:
        """Encode and decode a partition in batches; write its rows in their order, and its marker."""
        started = time.perf_counter()
        totals = Totals(partition.number, partition.shard)
        written: dict[int, dict[str, Any]] = {}  # by position in the partition
        shard = self.job.shards[partition.shard]
        for item, transcript in whole(
            pair for batch in self._encoded(partition) for pair in self._timed(batch, totals)
        ):
            row = row_of(item.utterance, transcript, totals)
            written[item.position] = {**row, "manifest": shard, "line": item.row["line"]}
        rows = "".join(json.dumps(written[n], ensure_ascii=False) + "\n" for n in sorted(written))
        totals.work = round(time.perf_counter() - started, 3)
        self.folder.write(self.folder.partition_file(partition), rows.encode())
        self.folder.write_json(self.folder.marker_file(partition), vars(totals))
        return totals

    def _encoded(self, partition: Partition) -> Iterator[Batch]:
        """The batches of a partition, longest utterances first. An unreadable utterance gets an error in its row."""
        lines = self.folder.read("rows.jsonl", partition.begin, partition.num_bytes).splitlines()
        with local_audio([json.loads(line) for line in lines]) as files:
            read = [with_checked_request(self.model, _opened(position, audio)) for position, audio in enumerate(files)]
            yield from (Batch([item], item.utterance.fault) for item in read if item.utterance.fault)
            ready = [item for item in read if not item.utterance.fault]
            for items in batches(ready, self.job.batch_size, self.job.batch_seconds):
                yield from encoded_cut(self.model, items, self.job.cutting, self.job.batch_size)

    def _timed(self, batch: Batch, totals: Totals) -> Iterator[tuple[Item, Transcript | str]]:
        """The transcripts or error messages of a batch; its time is added to `totals`."""
        started = time.perf_counter() - batch.work
        transcripts = self._decoded(batch)
        if not isinstance(batch.outputs, str):
            durations = [item.utterance.duration for item in batch.items]
            pace = (time.perf_counter() - started) / max(sum(durations), 1e-9)
            slowest = [*totals.slowest, (round(pace, 4), _label(batch.items[durations.index(max(durations))]))]
            totals.slowest = tuple(sorted(slowest, reverse=True)[:SLOWEST])
        yield from zip(batch.items, transcripts, strict=True)

    def _decoded(self, batch: Batch) -> list[Transcript | str]:
        """Transcripts or error messages of a batch. If the batch fails, each utterance is decoded alone."""
        items, outputs = batch.items, batch.outputs
        if isinstance(outputs, str):
            return [outputs] * len(items)
        try:
            return decoded(self.loaded, batch)
        except Exception as error:
            if _is_fatal(error):
                raise
            if len(items) == 1:
                return [_named(items[0], one_line(error))]
        alone = ({name: rows[n : n + 1] for name, rows in outputs.items()} for n in range(len(items)))
        batches = [Batch([item], outputs_of_item) for item, outputs_of_item in zip(items, alone, strict=True)]
        return [transcript for single in batches for transcript in self._decoded(single)]


def encoded_cut(
    model: Model, items: list[Item], cutting: Cutting, batch_size: int, log: SegmentLog | None = None
) -> Iterator[Batch]:
    """Run the encoder on a batch, and on the segments of recordings that are longer than the maximum.

    Args:
        log: has the segments that an interrupted run has decoded.
    """
    short = [item for item in items if item.utterance.duration <= cutting.max_segment_seconds]
    cut = [item for item in items if item.utterance.duration > cutting.max_segment_seconds]
    for batch in encoded(model, short) if short else ():
        if batch.outputs == UNREADABLE:  # what can be read is decoded as of a long recording
            cut += batch.items
        else:
            yield batch
    for item in cut:
        try:
            key = log.key(item.utterance.audio, item.utterance.request) if log else ""
            plan, done = planned(model, item.utterance.audio, cutting, batch_size, log, key)
        except Exception as error:
            if _is_fatal(error):
                raise
            yield Batch([item], _named(item, one_line(error)))
            continue
        spans = plan.spans()
        if not spans:
            yield Batch([item], _named(item, f"{UNREADABLE}: {plan.fault}"))
        part = Part(item, spans, plan.fault, cutting.min_confidence, key)

        def segments(part: Part, begin: int, files: Sequence[AudioSource]) -> list[Item]:
            recording, spans = part.recording, part.spans[begin : begin + len(files)]
            utterances = (
                replace(recording.utterance, audio=file, duration=end - start)
                for file, (start, end) in zip(files, spans, strict=True)
            )
            return [Item(recording.position, recording.row, utterance, part) for utterance in utterances]

        if done:
            yield Batch(segments(part, 0, [item.utterance.audio] * len(done)), "", logged=done)
        for number, files in enumerate(segment_files(model, item.utterance.audio, plan, batch_size, len(done))):
            yield from encoded(model, segments(part, len(done) + number * batch_size, files))


def whole(transcripts: Iterable[tuple[Item, Transcript | str]]) -> Iterator[tuple[Item, Transcript | str]]:
    """Recordings with their transcripts; segments, which come in order, are joined."""
    parts: list[Transcript | str] = []
    for item, transcript in transcripts:
        if item.part is None:
            yield item, transcript
            continue
        parts.append(transcript)
        if len(parts) == len(item.part.spans):
            recording = item.part.recording
            joint = joined(item.part.spans, parts, item.part.fault, item.part.min_confidence)
            yield recording, replace(joint, error=_named(recording, joint.error)) if joint.error else joint
            parts = []


def encoded(model: Model, items: list[Item]) -> list[Batch]:
    """Run the encoder on a batch; if that fails, on each utterance alone, with `UNREADABLE` for damaged files."""
    started = time.perf_counter()
    files = [item.utterance.audio for item in items]
    try:
        (outputs,) = model.encode(files, batch_size=len(files))
        return [Batch(items, outputs, time.perf_counter() - started)]
    except Exception as error:
        if _is_fatal(error):
            raise
        if len(items) == 1:
            return [Batch(items, UNREADABLE if unreadable(files) else _named(items[0], one_line(error)))]
    return [batch for item in items for batch in encoded(model, [item])]


def decoded(loaded: Loaded, batch: Batch) -> list[Transcript | str]:
    """Transcripts or error messages of a batch. Errors of the decoding options are raised."""
    items, outputs, _, logged = batch
    if logged:
        return list(logged)
    if isinstance(outputs, str):
        return [outputs] * len(items)
    requests = [item.utterance.request for item in items]
    transcripts = loaded.model.decode(outputs, second=loaded.second, requests=requests)
    pairs = zip(items, transcripts, strict=True)
    return [_named(item, transcript.error) if transcript.error else transcript for item, transcript in pairs]


def with_checked_request(model: Model, item: Item) -> Item:
    """The item; its utterance has a `fault` if the model cannot decode with its request."""
    utterance = item.utterance
    if utterance.request is None or utterance.fault:
        return item
    try:
        model.check_request(utterance.request)
    except ValueError as error:
        return item._replace(utterance=replace(utterance, fault=_named(item, one_line(error))))
    return item


def _named(item: Item, fault: str) -> str:
    """An error message with the name of the file."""
    return fault if _label(item) in fault else f"{_label(item)}: {fault}"


def _label(item: Item) -> str:
    """The name of the file, and the place in it."""
    return (item if item.part is None else item.part.recording).utterance.label


def _is_fatal(error: Exception) -> bool:
    """Whether the worker is unusable, so that all later utterances would fail too."""
    return isinstance(error, MemoryError) or "CUDA error" in str(error)


def _opened(position: int, audio: Audio) -> Item:
    """An utterance with the error of its audio, if there is one."""
    row, file = audio
    read = {**row.get("fields", {}), **{name: row.get(name) for name in ("text", FAULT, *REQUEST_KEYS)}}
    source = AudioPart(Path(file), *row.get("part", (0.0,)))
    utterance = opened(row["audio_filepath"], source, read, f"line {row['line']}")
    fault = row.get(FAULT) or (file if isinstance(file, str) else utterance.fault)
    if fault:
        utterance = replace(utterance, duration=row["duration"], fault=one_line(ValueError(fault)))
    return Item(position, row, utterance)


def batches(items: Sequence[Item], batch_size: int, batch_seconds: float | None) -> Iterator[list[Item]]:
    """Batches of utterances in descending order of duration: little padding, and the first batch needs most memory.

    With `batch_seconds`, a batch has at most so many seconds of audio, padding included, and at least one utterance.
    """
    ordered = sorted(items, key=lambda item: (-item.utterance.duration, item.position))
    while ordered:
        longest = ordered[0].utterance.duration
        count = batch_size if batch_seconds is None else max(1, int(batch_seconds / max(longest, 1e-3)))
        yield ordered[:count]
        ordered = ordered[count:]
