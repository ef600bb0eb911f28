"""Long recordings against their utterances: word errors, words doubled at cuts, times, and memory.

Utterances of a manifest are joined with pauses and noise to one recording.
`python -m benchmarks.long_audio --help` lists the options.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from omegaconf import MISSING

from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.manifest import Utterance, read_manifest
from nemo_gpu_decoding.metrics import WordErrors, word_errors
from nemo_gpu_decoding.report import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.live.recognizer import Word
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.nemo_plugin.transcript import Transcript

PROGRAM = "python -m benchmarks.long_audio"
SUMMARY = "long recordings against their utterances"
EXAMPLES = ("model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json minutes=[5]",)
RATE = 16000
STRETCH = (2.0, 10.0)  # seconds of music or loud noise
LOUD = 0.05  # root mean square of speech


@dataclass
class LongAudioOptions:
    """Options of the table."""

    # A .nemo file.
    model: str = MISSING
    # NeMo manifest of utterances, 16 kHz.
    manifest: str = MISSING
    # Lengths of the recordings, minutes; a shorter one is the beginning of a longer one.
    minutes: list[float] = field(default_factory=lambda: [5.0])
    # Strategies.
    strategies: list[str] = field(default_factory=lambda: ["greedy_batch"])
    # Head of a hybrid model that greedy strategies use: ctc or rnnt. null: ctc.
    head: str | None = None
    # Token LM of the beams, its weight, and the bonus per token; null: none.
    lm: str | None = None
    lm_weight: float | None = None
    beam_beta: float | None = None
    # A preset of `tune` for the strategies of this package; null: the shipped ones.
    preset: str | None = None
    # Root mean square of the white noise in the whole recording.
    noise: float = 0.001
    # Shortest and longest pause between two utterances, seconds.
    pauses: list[float] = field(default_factory=lambda: [0.1, 3.0])
    # Chance of a stretch of 2-10 s of music, or of noise as loud as speech, between two utterances.
    stretches: float = 0.0
    # Silence at both ends of the utterances of the second row, seconds.
    silence: float = 0.3
    # Target and maximum length of a segment, seconds.
    segments: list[float] = field(default_factory=lambda: [30.0, 60.0])
    # Silence that always ends a segment, seconds.
    max_pause: float = 0.6
    # Silence that a segment keeps at both ends, seconds.
    kept_silence: float = 0.0
    # Segments whose words have a lower mean confidence are left out.
    min_confidence: float = 0.0


OPTIONS = LongAudioOptions


class Recording(NamedTuple):
    """Joined utterances."""

    file: Path
    utterances: list[Utterance]
    spans: list[tuple[float, float]]  # start and end of each, seconds


def join(utterances: Sequence[Utterance], minutes: float, options: LongAudioOptions, folder: Path) -> Recording:
    """A recording of utterances in random order, with silence between them and noise everywhere."""
    import soundfile

    rng, at = np.random.default_rng(0), 0
    found = Recording(folder / "joined.wav", [], [])
    with soundfile.SoundFile(str(found.file), "w", RATE, 1, "FLOAT") as sink:
        while at < minutes * 60 * RATE:
            utterance = utterances[int(rng.integers(len(utterances)))]
            samples, rate = soundfile.read(str(utterance.path), dtype="float32")
            if rate != RATE:
                raise ValueError(f"{utterance.name} has {rate} Hz, expected {RATE}")
            parts = [samples, _silence(rng, options)]
            if rng.random() < options.stretches:
                make = _music if rng.random() < 0.5 else _loud_noise
                parts += [make(rng), _silence(rng, options)]
            part = np.concatenate(parts)
            sink.write(part + options.noise * rng.standard_normal(len(part)).astype(np.float32))
            found.utterances.append(utterance)
            found.spans.append((at / RATE, (at + len(samples)) / RATE))
            at += len(part)
    return found


def _silence(rng: np.random.Generator, options: LongAudioOptions) -> np.ndarray:
    return np.zeros(int(rng.uniform(options.pauses[0], options.pauses[1]) * RATE), np.float32)


def _music(rng: np.random.Generator) -> np.ndarray:
    """Chords of three tones with five partials, which fade within 0.3-1 s."""
    chords: list[np.ndarray] = []
    total = int(rng.uniform(*STRETCH) * RATE)
    while sum(len(chord) for chord in chords) < total:
        seconds = np.arange(int(rng.uniform(0.3, 1.0) * RATE)) / RATE
        root = 110 * 2 ** (rng.integers(24) / 12)
        partials = [(root * ratio * k, 1 / k) for ratio in (1, 2 ** (4 / 12), 2 ** (7 / 12)) for k in range(1, 6)]
        chord = sum(share * np.sin(2 * np.pi * pitch * seconds) for pitch, share in partials)
        chords.append(chord * np.minimum(seconds / 0.01, 1) * np.exp(-3 * seconds))
    sound = np.concatenate(chords)[:total]
    return (LOUD * sound / np.sqrt(np.mean(sound**2))).astype(np.float32)


def _loud_noise(rng: np.random.Generator) -> np.ndarray:
    return LOUD * rng.standard_normal(int(rng.uniform(*STRETCH) * RATE)).astype(np.float32)


def run(options: LongAudioOptions) -> int:
    """Print the table of one model and set."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device="cpu")
    utterances = read_manifest(Path(options.manifest))
    rows = []
    for strategy in options.strategies:
        use(model, strategy, options)
        alone = transcripts(model, utterances, 0.0, 0.0)
        silent = transcripts(model, utterances, options.noise, options.silence)
        for minutes in sorted(options.minutes):
            with TemporaryDirectory() as folder:
                recording = join(utterances, minutes, options, Path(folder))
                reference = [str(utterance.text) for utterance in recording.utterances]
                for name, found in (("alone", alone), (f"alone, noise, {options.silence:g} s of silence", silent)):
                    errors = word_errors(reference, [found[each.path].text for each in recording.utterances])
                    rows.append([strategy, minutes, name, *_counts(errors), *["-"] * 5])
                rows.append([strategy, minutes, "joined", *joined_row(model, recording, alone, options)])
    columns = ["minutes", "speech", "WER %", "deleted", "inserted", "segments", "doubled", "within 80 ms, %"]
    print(format_table(["strategy", *columns, "RTFx", "peak GiB"], rows))
    return 0


def use(model: Model, strategy: str, options: LongAudioOptions) -> None:
    """Switch the model to a strategy, with times of words."""
    from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

    is_ours = strategy in STRATEGIES
    weights = {"lm": options.lm, "lm_weight": options.lm_weight, "beam_beta": options.beam_beta} if is_ours else {}
    config = decoding_config(strategy, options.preset if is_ours else None, weights)
    config.compute_timestamps = True
    model.head(STRATEGIES[strategy].family if is_ours else options.head or model.default_head).use(config)


def joined_row(
    model: Model, recording: Recording, alone: dict[Path, Transcript], options: LongAudioOptions
) -> list[object]:
    """The cells of the whole recording."""
    from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
    from nemo_gpu_decoding.nemo_plugin.long_audio import transcribe_long

    target, most = options.segments
    cutting = Cutting(
        target,
        most,
        max_pause=options.max_pause,
        kept_silence=options.kept_silence,
        min_confidence=options.min_confidence,
    )
    started = time.perf_counter()
    long = transcribe_long(model, recording.file, timestamps=True, cutting=cutting)
    pace = recording.spans[-1][1] / (time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    references, hypotheses, times = [], [], []
    for own, words in blocks(recording, long):
        references.append(" ".join(str(recording.utterances[n].text) for n in own))
        hypotheses.append(" ".join(word.word for word in words))
        expected = [
            (word.word, word.start + recording.spans[n][0])
            for n in own
            for word in alone[recording.utterances[n].path].words
        ]
        times += differences(expected, [(word.word, word.start) for word in words])
    spoken = [segment for segment in long.segments if segment.text]
    doubled = sum(  # one word of one utterance, at the end of a segment and again in the next
        before.text.split()[-1] == after.text.split()[0]
        and any(start < before.end and after.start < end for start, end in recording.spans)
        for before, after in pairwise(spoken)
    )
    within = f"{100 * np.mean(np.array(times) <= 0.08 + 1e-6):.1f}" if times else "-"
    counts = _counts(word_errors(references, hypotheses))
    return [*counts, len(long.segments), doubled, within, f"{pace:.0f}", f"{peak:.2f}"]


def _counts(errors: WordErrors) -> list[object]:
    return [f"{100 * errors.wer:.1f}", errors.deletions, errors.insertions]


def blocks(recording: Recording, long: Transcript) -> Iterator[tuple[range, list[Word]]]:
    """Utterances up to a pause of a second, and the words found there: an alignment of hours needs gigabytes."""
    spans, words, begin = recording.spans, iter([*long.words, None]), 0
    word = next(words)
    for n in range(len(spans)):
        last = n + 1 == len(spans)
        if not last and spans[n + 1][0] - spans[n][1] < 1:
            continue
        limit = np.inf if last else (spans[n][1] + spans[n + 1][0]) / 2
        found = []
        while word is not None and word.start < limit:
            found.append(word)
            word = next(words)
        yield range(begin, n + 1), found
        begin = n + 1


def transcripts(model: Model, utterances: Sequence[Utterance], noise: float, silence: float) -> dict[Path, Transcript]:
    """Transcripts of the utterances alone, with white noise and seconds of silence at both ends."""
    import soundfile

    rng = np.random.default_rng(0)
    files = [utterance.path for utterance in utterances]
    samples = [np.pad(soundfile.read(str(file), dtype="float32")[0], round(silence * RATE)) for file in files]
    samples = [part + noise * rng.standard_normal(len(part)).astype(np.float32) for part in samples]
    found = [transcript for outputs in model.encode(samples, 8) for transcript in model.decode(outputs)]
    return dict(zip(files, found, strict=True))


def differences(expected: Sequence[tuple[str, float]], found: Sequence[tuple[str, float]]) -> list[float]:
    """Seconds between the times of equal words."""
    from kaldialign import align

    pairs = align([word for word, _ in expected], [word for word, _ in found], "*")
    own, others = iter(expected), iter(found)
    times = []
    for a, b in pairs:
        first = next(own) if a != "*" else None
        second = next(others) if b != "*" else None
        if first and second and a == b:
            times.append(abs(first[1] - second[1]))
    return times


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
