"""Decode recordings of any length: cut at pauses, write the segments to files, and join their transcripts.

The first pass runs the encoder and NeMo's greedy decoding on windows with context at both ends, and returns the frames
of every word. Cuts are between words, so that segments need no overlap. The second pass decodes the segments with the
model's strategy. Both passes read the file once, from beginning to end, and hold one batch of windows or segments in
memory.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from nemo_gpu_decoding.audio import AudioPart, AudioSource, MonoReader, open_wav
from nemo_gpu_decoding.cache import return_memory
from nemo_gpu_decoding.nemo_plugin.cutting import MIN_PAUSE, SHORTEST, Cutting, choose_segments, onset
from nemo_gpu_decoding.nemo_plugin.model import Model
from nemo_gpu_decoding.search.result import Place
from nemo_gpu_decoding.transcript import BoostedPhrase, Segment, Transcript, Word, clock, error_of
from nemo_gpu_decoding.words import joined as joined_texts

_CONTEXT = 2.0  # seconds of audio on both sides of a window
_STEP = 0.01  # seconds, about: an encoder frame is a whole number of steps

Position = Callable[[float], int]
T = TypeVar("T")

logger = logging.getLogger("nemo_gpu_decoding")


class Plan(NamedTuple):
    """The segments into which a recording is cut."""

    segments: list[tuple[float, int]]  # first and end step of each; silence is between them
    step_seconds: float
    seconds: float  # that can be read
    fault: str = ""  # why the recording cannot be read to its end

    def spans(self) -> list[tuple[float, float]]:
        """Return the start and end of each segment, in seconds since the recording began."""
        times = [[round(min(step * self.step_seconds, self.seconds), 3) for step in span] for span in self.segments]
        return [(start, end) for start, end in times]


def find_cuts(model: Model, file: AudioSource, cutting: Cutting, batch_size: int) -> Plan:
    """Choose the segments of a recording, which begin and end at pauses between the words of a greedy pass.

    If no pause of `MIN_PAUSE` is within the maximum length, the cut is at the longest pause, with a warning.
    """
    steps = max(1, round(model.frame_seconds / _STEP))
    step_seconds = model.frame_seconds / steps
    with MonoReader(file, model.channel_selector) as reader:
        position = positions(step_seconds, reader.rate)
        core, context = (steps * round(length / model.frame_seconds) for length in (cutting.window_seconds, _CONTEXT))
        windows = _Windows(reader, position, core, context)
        tokens: list[tuple[int, int, int]] = []
        loudness: list[np.ndarray] = []
        bar = tqdm(total=reader.seconds, unit="s", unit_scale=True, desc="finding pauses", leave=False, disable=None)
        with bar, model.using({"strategy": "greedy_batch"}) as head, TemporaryDirectory() as folder:
            for batch in grouped(windows, batch_size):
                names = [Path(folder) / f"{n}.wav" for n in range(len(batch))]
                for name, window in zip(names, batch, strict=True):
                    _write(name, window.samples, reader.rate)
                (outputs,) = model.encode([AudioPart(name, 0.0, is_mono=True) for name in names], len(names))
                for window, hypothesis in zip(batch, model.hypotheses(outputs), strict=True):
                    first = window.begin - window.before
                    tokens += [
                        (first + start * steps, first + end * steps, token)
                        for start, end, token in head.greedy_tokens(hypothesis)
                        if window.begin <= first + start * steps < window.end
                    ]
                    loudness.append(window.loudness(position))
                    bar.update(len(loudness[-1]) * step_seconds)
                return_memory()
            words = head.vocabulary().words([token for _, _, token in tokens])
    spans = np.array([(tokens[w.first_token][0], tokens[w.end_token - 1][1]) for w in words], int).reshape(-1, 2)
    levels = np.concatenate(loudness) if loudness else np.zeros(0)
    loudness.clear()
    segments, doubtful = choose_segments(spans, levels, cutting.limits(model.trained_seconds), step_seconds)
    if doubtful:
        times = ", ".join(clock(step * step_seconds) for step in doubtful[:5])
        times += "" if len(doubtful) <= 5 else f" and {len(doubtful) - 5} more"
        logger.warning("%s: no pause of %g s at %s; the cut is at the longest pause there", file, MIN_PAUSE, times)
    begun = list(_begun(model, file, segments, levels, position)) if segments else []
    return Plan(begun, step_seconds, windows.seconds, windows.fault)


def _begun(
    model: Model, file: AudioSource, segments: list[tuple[int, int]], loudness: np.ndarray, position: Position
) -> Iterator[tuple[float, int]]:
    """Yield first step (with fraction) and end step of each segment, which begins with sound."""
    silence, at = 2 * float(np.percentile(loudness, 10)), 0
    with MonoReader(file, model.channel_selector) as reader:
        for begin, end in segments:
            first, next_step = position(begin), position(begin + 1)
            reader.skip(first - at)
            samples, _ = reader.read_readable(next_step - first)
            at = next_step
            yield begin + onset(samples, reader.rate, silence) / (next_step - first), end


class _Window(NamedTuple):
    """A window of a recording that the first pass decodes, with context on both sides."""

    begin: int  # first step without context
    end: int
    before: int  # steps of context before `begin`
    samples: np.ndarray  # context included

    def loudness(self, position: Position) -> np.ndarray:
        """Return the root mean square of the samples in each step, without context, [steps] float16."""
        first = position(self.begin - self.before)
        edges = [position(step) - first for step in range(self.begin, self.end + 1)]
        end = min(edges[-1], len(self.samples))
        edges = [*(edge for edge in edges if edge < end), end]
        squares = np.square(self.samples, dtype=np.float64)
        return np.sqrt(np.add.reduceat(squares[:end], edges[:-1]) / np.diff(edges)).astype(np.float16)


class _Windows:
    """The consecutive windows of a recording, `core` steps each, with up to `context` steps on both sides."""

    def __init__(self, reader: MonoReader, position: Position, core: int, context: int) -> None:
        self.reader, self.position, self.core, self.context = reader, position, core, context
        self.seconds = 0.0  # that have been read
        self.fault = ""  # why the recording cannot be read to its end

    def __iter__(self) -> Iterator[_Window]:
        at, begin, kept = self.position, 0, np.zeros(0, np.float32)
        while True:
            first = max(begin - self.context, 0)
            missing = at(begin + self.core + self.context) - at(first) - len(kept)
            more = np.zeros(0, np.float32)
            if not self.fault:
                more, self.fault = self.reader.read_readable(missing)
            kept = np.concatenate([kept, more])
            self.seconds += len(more) / self.reader.rate
            if at(first) + len(kept) <= at(begin):
                return
            yield _Window(begin, begin + self.core, begin - first, kept)
            begin += self.core
            kept = kept[at(max(begin - self.context, 0)) - at(first) :]


def segment_files(model: Model, file: AudioSource, plan: Plan, size: int, first: int = 0) -> Iterator[list[Path]]:
    """Write segments from number `first` on to WAV files and yield a batch of paths, valid until the next batch."""
    with MonoReader(file, model.channel_selector) as reader, TemporaryDirectory() as folder:
        position, at = positions(plan.step_seconds, reader.rate), 0
        for batch in grouped(plan.segments[first:], size):
            read = []
            for begin, end in batch:
                reader.skip(position(begin) - at)
                at = position(end)
                read.append(reader.read_readable(at - position(begin))[0])
            yield [_write(Path(folder) / f"{n}.wav", samples, reader.rate) for n, samples in enumerate(read)]
            return_memory()


def joined(
    spans: list[tuple[float, float]], transcripts: list[Transcript | str], fault: str = "", min_confidence: float = 0.0
) -> Transcript:
    """Join the transcripts of segments to the recording's transcript; its `error` names the times of failed segments.

    Args:
        spans: start and end of each segment, seconds.
        transcripts: transcript or error message of each segment.
        fault: why the recording cannot be read to its end.
        min_confidence: see `Cutting`.
    """
    segments: list[Segment] = []
    words: list[Word] = []
    errors: list[str] = []
    places: list[Place] = []
    phrases: list[BoostedPhrase] = []
    for (start, stop), transcript in zip(spans, transcripts, strict=True):
        if isinstance(transcript, str) or transcript.error:
            errors.append(f"{error_of(transcript)} (segment {clock(start)} - {clock(stop)})")
            segments.append(Segment(start, stop))
            continue
        confidences = [word.ranked for word in transcript.words if word.ranked is not None]
        if confidences and np.mean(confidences) < min_confidence:
            continue
        segments.append(Segment(start, stop, transcript.text, transcript.score, transcript.n_best))
        later = transcript.later(start)
        for place in later.alternatives:
            index = place.word_index
            places.append(place._replace(word_index=None if index is None else index + len(words)))
        words += later.words
        phrases += later.phrases
    if fault:
        errors.append(f"cannot be read after {clock(spans[-1][1])}: {fault}")
    scores = [segment.score for segment in segments if segment.score is not None]
    return Transcript(
        text=joined_texts([segment.text for segment in segments if segment.text]),
        score=round(sum(scores), 4) if scores else None,
        words=tuple(words),
        error="; ".join(errors),
        segments=tuple(segments),
        alternatives=tuple(places),
        phrases=tuple(phrases),
    )


def positions(step_seconds: float, rate: int) -> Position:
    """Return a function from a step (or fraction of a step) to its first sample."""
    return lambda step: round(step * step_seconds * rate)


def _write(path: Path, samples: np.ndarray, rate: int) -> Path:
    """Write samples to a WAV file, padded with zeros to NeMo's minimum length, and return the path."""
    with open_wav(path, rate) as sink:
        sink.write(np.pad(samples, (0, max(0, round(SHORTEST * rate) - len(samples)))))
    return path


def grouped(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Divide items into consecutive lists of up to `size` items."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
