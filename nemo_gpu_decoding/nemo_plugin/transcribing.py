"""Turn utterances into transcripts: run batches through encoder and search, and cut long recordings.

For a recording that is longer than the maximum, a greedy pass finds the cuts. The segments are then decoded like
utterances, in separate batches, and their transcripts are joined. A log keeps the transcripts of each batch, so that
an interrupted run continues after the last batch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.audio import AudioPart, part_of, unreadable
from nemo_gpu_decoding.cache import file_key
from nemo_gpu_decoding.checks import given_or_default
from nemo_gpu_decoding.manifest import Utterance
from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
from nemo_gpu_decoding.nemo_plugin.long_audio import Plan, find_cuts, grouped, joined, segment_files
from nemo_gpu_decoding.nemo_plugin.model import Model, Outputs
from nemo_gpu_decoding.transcript import Transcript, as_json, of_json, one_line

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel

UNREADABLE = "cannot be read as audio"
_KEY = 16  # characters of a key


class Log:
    """A log file with a run's transcripts. After an interruption, the same run reads the log and continues.

    Args:
        file: file with a key and a JSON value in each line, created with the first line; None keeps nothing.
        run: everything, except the utterances, on which the logged values depend, as JSON values.
        tell: function that gets a message for each recording that the interrupted run has begun.
    """

    def __init__(self, file: Path | None = None, run: Any = None, tell: Callable[[str], Any] = lambda _: None) -> None:
        self.file, self._run, self.tell = file, json.dumps(run, sort_keys=True), tell
        self._places: dict[str, int] = {}  # first byte of the values of the interrupted run
        self.utterances = 0  # number in the interrupted run, without segments
        if file is None or not file.is_file():
            return
        end = 0
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else the run ended while it wrote the line
                    self._places[line[:_KEY].decode(errors="replace")] = end + _KEY
                    end += len(line)
        os.truncate(file, end)

    def _key(self, utterances: Sequence[Utterance], what: str) -> str:
        """Return the key of a batch in the log, a hash of the run and of each utterance's file, section and request.

        Floating-point sums depend on the batch. Therefore the key depends on all utterances in the batch.
        """
        parts = [(part_of(utterance.audio), utterance.request) for utterance in utterances]
        content = [(os.path.isfile(part.path) and file_key(part.path), part[1:], request) for part, request in parts]
        return hashlib.sha256(repr((self._run, what, content)).encode()).hexdigest()[:_KEY]

    def has(self, utterances: Sequence[Utterance]) -> bool:
        """Return whether the log has the transcripts of this batch from the interrupted run."""
        return bool(self._places) and self._key(utterances, "") in self._places

    def kept(self, utterances: Sequence[Utterance], make: Callable[[], Any], what: str = "") -> Any:
        """Return the logged value of a batch or, without one, call `make` and log the value that it returns.

        Args:
            make: returns a list of JSON values and transcripts. Transcripts with a lattice are not kept.
            what: a name, because one batch may have several values.
        """
        if self.file is None:
            return make()
        key = self._key(utterances, what)
        if key in self._places:
            with self.file.open("rb") as lines:
                lines.seek(self._places[key])
                return json.loads(lines.readline(), object_hook=of_json)
        value = make()
        if not any(isinstance(item, Transcript) and item.lattice for item in value):
            line = f"{key} {json.dumps(value, default=as_json)}\n"
            with self.file.open("ab", buffering=0) as sink:  # whole lines, also of two processes
                sink.write(line.encode())
        return value

    def remove(self) -> None:
        """Remove the log file of a complete run."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


@dataclass
class Transcriber:
    """A decoder that turns batches of utterances into transcripts, and cuts long recordings."""

    model: Model
    cutting: Cutting  # of long recordings
    batch_size: int  # segments of a long recording per batch
    log: Log = field(default_factory=Log)  # of an interrupted run, and for this one
    progress: Callable[[float], object] = lambda seconds: None  # gets the seconds of audio of each batch

    def checked(self, utterance: Utterance) -> Utterance:
        """Return the utterance; set its `fault` if the model's strategy cannot decode with its request."""
        try:
            if utterance.request is not None and not utterance.fault:
                self.model.check_request(utterance.request)
        except ValueError as error:
            return replace(utterance, fault=named(utterance, one_line(error)))
        return utterance

    def transcripts(self, utterances: Sequence[Utterance]) -> list[Transcript | str]:
        """Return a transcript or error message for each utterance; short utterances form one encoder batch."""
        longest = self.cutting.whole_seconds
        short = [utterance for utterance in utterances if not utterance.fault and utterance.duration <= longest]
        self.log.utterances += len(short) if self.log.has(short) else 0
        of_short = iter(self.batch(short, lambda: short) if short else ())
        results: list[Transcript | str] = []
        for utterance in utterances:
            result = utterance.fault or (next(of_short) if utterance.duration <= longest else UNREADABLE)
            # the readable part of a damaged file is decoded like a long recording
            results.append(self._of_long(utterance) if result == UNREADABLE else result)
        return results

    def batch(self, rows: Sequence[Utterance], read: Callable[[], Sequence[Utterance]]) -> list[Transcript | str]:
        """Return each row's transcript or error message: the logged one, or else by decoding `read()`."""
        results = self.log.kept(rows, lambda: [text for pair in self._encoded(read()) for text in self.decode(*pair)])
        self.progress(sum(row.duration for row in rows))
        return results

    def _encoded(self, utterances: Sequence[Utterance]) -> list[tuple[Sequence[Utterance], Outputs | str]]:
        """Encode a batch; if that fails, encode each utterance alone. Return encoder outputs or error messages."""
        files = [utterance.audio for utterance in utterances]
        try:
            (outputs,) = self.model.encode(files, batch_size=len(files))
            return [(utterances, outputs)]
        except Exception as error:
            if is_fatal(error):
                raise
            if len(files) == 1:
                return [(utterances, UNREADABLE if unreadable(files) else named(utterances[0], one_line(error)))]
        return [encoded for utterance in utterances for encoded in self._encoded([utterance])]

    def decode(self, utterances: Sequence[Utterance], outputs: Outputs | str) -> list[Transcript | str]:
        """Decode an encoded batch to transcripts or error messages; raise errors of the decoding options."""
        if isinstance(outputs, str):
            return [outputs] * len(utterances)
        transcripts = self.model.decode(outputs, requests=[utterance.request for utterance in utterances])
        pairs = zip(utterances, transcripts, strict=True)
        return [named(utterance, found.error) if found.error else found for utterance, found in pairs]

    def plan(self, row: Utterance) -> Plan:
        """Return the segments of a recording from the log or a greedy pass; raise an error if it is unreadable."""
        cuts = self.log.kept([row], lambda: find_cuts(self.model, row.audio, self.cutting, self.batch_size), "plan")
        return Plan(*cuts)

    def decode_segments(self, utterance: Utterance, plan: Plan) -> Transcript:
        """Decode the segments of a recording and return the joined transcript."""
        spans = plan.spans()
        rows = [_segment(utterance, start, end) for start, end in spans]
        done = sum(map(len, takewhile(self.log.has, grouped(rows, self.batch_size))))
        if done:
            self.log.tell(f"{utterance.label}: {done} segments are those of an interrupted run")
        files = segment_files(self.model, utterance.audio, plan, self.batch_size, done)
        transcripts: list[Transcript | str] = []
        for batch in grouped(rows, self.batch_size):
            transcripts += self.batch(batch, partial(_with_audio, batch, files))
        return joined(spans, transcripts, plan.fault, self.cutting.min_confidence)

    def _of_long(self, utterance: Utterance) -> Transcript | str:
        """Cut and decode a long recording; return its transcript or an error message."""
        try:
            plan = self.plan(utterance)
        except Exception as error:
            if is_fatal(error):
                raise
            return named(utterance, one_line(error))
        if not plan.segments:
            return named(utterance, f"{UNREADABLE}: {plan.fault}")
        joint = self.decode_segments(utterance, plan)
        return replace(joint, error=named(utterance, joint.error)) if joint.error else joint


def transcribe_long(
    model: ASRModel | Model,
    file: str | Path,
    *,
    timestamps: bool = False,
    batch_size: int = 8,
    cutting: Cutting | None = None,
    resume: str | Path | None = None,
) -> Transcript:
    """Transcribe a recording of any length with the model's current strategy.

    Args:
        model: a model of NeMo.
        timestamps: fill `words` of the result, with times in the whole recording.
        batch_size: number of segments per batch.
        cutting: options for the cuts; None means `Cutting()`, the defaults of `transcribe`.
        resume: a file for the segments that are decoded; it is removed at the end. After an interruption, the same
            call continues with the next segment.

    Returns:
        The transcript with its `segments`. If the end of the file cannot be read, `error` is the reason.

    Raises:
        ValueError: the file cannot be read as audio.
    """
    loaded = model if isinstance(model, Model) else Model(model)
    cutting = given_or_default("cutting", cutting, Cutting)
    section = loaded.current_head.config
    if timestamps or cutting.min_confidence:
        section.compute_timestamps = True
    if cutting.min_confidence:
        OmegaConf.update(section, "confidence_cfg.preserve_word_confidence", True, force_add=True)
    log = Log()
    if resume is not None:
        log = Log(Path(resume), [*_identity(loaded, section), asdict(cutting), batch_size])
    transcriber = Transcriber(loaded, cutting, batch_size, log)
    recording = Utterance(str(part_of(file).path), file, 0.0)
    plan = transcriber.plan(recording)
    if not plan.segments:
        raise ValueError(f"{file} {UNREADABLE}: {plan.fault or 'it has no samples'}")
    with loaded.using(section) if timestamps or cutting.min_confidence else nullcontext():
        transcript = transcriber.decode_segments(recording, plan)
    log.remove()
    return transcript


def _identity(model: Model, section: DictConfig) -> list[Any]:
    """Return JSON values that identify a run: sums of the model's weights, the decoding section, keys of files."""

    def content(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): content(item) for key, item in value.items()}
        if isinstance(value, list):
            return [content(item) for item in value]
        return file_key(value) if isinstance(value, str) and Path(value).is_file() else value

    weights = [float(parameter.double().sum()) for parameter in model.model.parameters()]
    return [weights, content(OmegaConf.to_container(section, enum_to_str=True))]


def _segment(recording: Utterance, start: float, end: float) -> Utterance:
    """Return a segment of a recording as an utterance: a section of the file, named like the recording."""
    part, seconds = part_of(recording.audio), end - start
    audio = part._replace(offset=part.offset + start, duration=seconds)
    return replace(recording, name=recording.label, audio=audio, duration=seconds)


def _with_audio(rows: Sequence[Utterance], files: Iterator[list[Path]]) -> list[Utterance]:
    """Return the segments with the next batch of WAV files as their audio."""
    return [replace(row, audio=AudioPart(wav, 0.0, is_mono=True)) for row, wav in zip(rows, next(files), strict=True)]


def named(utterance: Utterance, fault: str) -> str:
    """Return an error message that names the utterance."""
    return fault if utterance.label in fault else f"{utterance.label}: {fault}"


def is_fatal(error: Exception) -> bool:
    """Return whether an error (of memory or CUDA) would also occur for all later utterances."""
    return isinstance(error, MemoryError) or "CUDA error" in str(error)
