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
from omegaconf import MISSING, OmegaConf

from nemo_gpu_decoding.audio import AudioSource, MonoReader
from nemo_gpu_decoding.cli.decoding import decoding_config
from nemo_gpu_decoding.cli.main import guarded, run_program
from nemo_gpu_decoding.manifest import Utterance, read_manifest
from nemo_gpu_decoding.metrics import WordErrors, word_errors
from nemo_gpu_decoding.plain_text import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Model
    from nemo_gpu_decoding.transcript import Transcript, Word

PROGRAM = "python -m benchmarks.long_audio"
SUMMARY = "long recordings against their utterances"
EXAMPLES = ("model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json minutes=[5]",)
RATE = 16000
STRETCH = (2.0, 10.0)  # seconds of music or loud noise
LOUD = 0.05  # root mean square of speech
MARGIN = 0.3  # seconds of an utterance that make a segment speech


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
    # Rank transducer hypotheses by the score per token; null: the preset.
    score_norm: bool | None = None
    # A preset of `tune` for the strategies of this package; null: the shipped ones.
    preset: str | None = None
    # Root mean square of the white noise in the whole recording.
    noise: float = 0.001
    # Shortest and longest pause between two utterances, seconds.
    pauses: list[float] = field(default_factory=lambda: [0.1, 3.0])
    # Chance of a stretch of 2-10 s of a sound as loud as speech, between two utterances.
    stretches: float = 0.0
    # Its kinds: music (chords), noise (white), melody (gliding tones), wind (pink noise that swells).
    sounds: list[str] = field(default_factory=lambda: ["music", "noise"])
    # Silence at both ends of the utterances of the rows with noise, seconds.
    silence: list[float] = field(default_factory=lambda: [0.0, 0.3])
    # Usual length of a segment, seconds; null: the lengths of training.
    segment_seconds: float | None = None
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
            samples = samples_of(utterance)
            parts = [samples, _silence(rng, options)]
            if rng.random() < options.stretches:
                sound = _SOUNDS[options.sounds[int(rng.integers(len(options.sounds)))]](rng)
                loud = LOUD * sound / np.sqrt(np.mean(sound**2))
                parts += [loud.astype(np.float32), _silence(rng, options)]
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
    return np.concatenate(chords)[:total]


def _noise(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(int(rng.uniform(*STRETCH) * RATE))


def _melody(rng: np.random.Generator) -> np.ndarray:
    """One voice of four harmonics with vibrato, which glides between notes of 0.15-0.6 s."""
    total = int(rng.uniform(*STRETCH) * RATE)
    notes = [np.full(int(rng.uniform(0.15, 0.6) * RATE), rng.integers(24)) for _ in range(total // (RATE // 7) + 1)]
    steps = np.convolve(np.concatenate(notes)[:total], np.full(RATE // 20, 20 / RATE), "same")
    steps += 0.3 * np.sin(2 * np.pi * 6 * np.arange(total) / RATE)
    phase = 2 * np.pi * np.cumsum(196 * 2 ** (steps / 12)) / RATE
    return np.sum([np.sin(k * phase) / k for k in range(1, 5)], axis=0)


def _wind(rng: np.random.Generator) -> np.ndarray:
    """Pink noise that swells every 1.5 s."""
    white = _noise(rng)
    pink = np.fft.irfft(np.fft.rfft(white) / np.sqrt(np.arange(len(white) // 2 + 1) + 20.0), len(white))
    return pink * (1.1 + np.sin(2 * np.pi * np.arange(len(white)) / (1.5 * RATE)))


_SOUNDS = {"music": _music, "noise": _noise, "melody": _melody, "wind": _wind}


def run(options: LongAudioOptions) -> int:
    """Print the table of one model and set."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    if not options.sounds or not set(options.sounds) <= set(_SOUNDS):
        raise ValueError(f"sounds is {options.sounds}, expected kinds from {', '.join(_SOUNDS)}")
    model = Model.load(options.model, device="cpu")
    utterances = read_manifest(Path(options.manifest))
    rows, thresholds = [], []
    for strategy in options.strategies:
        use(model, strategy, options)
        alone = transcripts(model, utterances, 0.0, 0.0)
        separate = {"alone": alone}
        for silence in options.silence:
            name = f"alone, noise, {silence:g} s of silence"
            separate[name] = transcripts(model, utterances, options.noise, silence)
        for minutes in sorted(options.minutes):
            with TemporaryDirectory() as folder:
                recording = join(utterances, minutes, options, Path(folder))
                reference = [str(utterance.text) for utterance in recording.utterances]
                for name, found in separate.items():
                    errors = word_errors(reference, [found[each.audio].text for each in recording.utterances])
                    rows.append([strategy, minutes, name, *_counts(errors), *["-"] * 5])
                cells, segments = joined_row(model, recording, alone, options)
                rows.append([strategy, minutes, "joined", *cells])
                if options.stretches:
                    thresholds.append([strategy, minutes, *threshold(segments)])
    columns = ["minutes", "speech", "WER %", "deleted", "inserted", "segments", "doubled", "within 80 ms, %"]
    print(format_table(["strategy", *columns, "RTFx", "peak GiB"], rows))
    if thresholds:
        columns = ["sounds", "kept", "speech", "omitted", "AUC"]
        print(format_table(["strategy", "minutes", "min_confidence", *columns], thresholds))
    return 0


def use(model: Model, strategy: str, options: LongAudioOptions) -> None:
    """Switch the model to a strategy, with times of words."""
    from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

    is_ours = strategy in STRATEGIES
    names = ("lm", "lm_weight", "beam_beta", "score_norm") if is_ours else ()
    weights = {name: getattr(options, name) for name in names}
    config = decoding_config(strategy, options.preset if is_ours else None, weights)
    config.compute_timestamps = True
    if options.stretches:
        OmegaConf.update(config, "confidence_cfg.preserve_word_confidence", True, force_add=True)
    model.head(STRATEGIES[strategy].family if is_ours else options.head or model.default_head).use(config)


def joined_row(
    model: Model, recording: Recording, alone: dict[AudioSource, Transcript], options: LongAudioOptions
) -> tuple[list[object], list[tuple[float, bool]]]:
    """The cells of the whole recording; and mean confidence of the words, and whether it is speech, per segment."""
    from nemo_gpu_decoding.nemo_plugin.cutting import Cutting
    from nemo_gpu_decoding.nemo_plugin.transcribing import transcribe_long

    cutting = Cutting(options.segment_seconds, options.min_confidence)
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
            for word in alone[recording.utterances[n].audio].words
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
    cells = [*counts, len(long.segments), doubled, within, f"{pace:.0f}", f"{peak:.2f}"]
    return cells, list(confidences(recording, long)) if options.stretches else []


def confidences(recording: Recording, long: Transcript) -> Iterator[tuple[float, bool]]:
    """Mean confidence of the words of each segment, and whether an utterance is in it."""
    spans = np.array(recording.spans)
    for segment in long.segments:
        own = [word.ranked or 0 for word in long.words if segment.start <= word.start < segment.end]
        if own:
            both = np.minimum(spans[:, 1], segment.end) - np.maximum(spans[:, 0], segment.start)
            yield float(np.mean(own)), bool(both.max() > MARGIN)


def threshold(segments: Sequence[tuple[float, bool]]) -> list[object]:
    """The cells of the `min_confidence` with the fewest wrong segments; the middle of the widest gap."""
    values, speech = (np.array(each) for each in zip(*sorted(segments), strict=True))
    edges = np.concatenate([[0.0], values, [1.0]])
    omitted = np.insert(np.cumsum(speech), 0, 0)  # speech below each edge
    kept = np.append(np.cumsum(~speech[::-1])[::-1], 0)  # sounds from it on
    best = np.flatnonzero(omitted + kept == np.min(omitted + kept))
    at = best[np.argmax(np.diff(edges)[best])]
    between = (values[~speech][:, None] < values[speech]).mean()
    value = (edges[at] + edges[at + 1]) / 2
    return [f"{value:.3f}", int((~speech).sum()), int(kept[at]), int(speech.sum()), int(omitted[at]), f"{between:.3f}"]


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


def samples_of(utterance: Utterance) -> np.ndarray:
    """[N] float32."""
    with MonoReader(utterance.audio, None) as reader:
        if reader.rate != RATE:
            raise ValueError(f"{utterance.label} has {reader.rate} Hz, expected {RATE}")
        return reader.read(sys.maxsize)


def transcripts(
    model: Model, utterances: Sequence[Utterance], noise: float, silence: float
) -> dict[AudioSource, Transcript]:
    """Transcripts of the utterances alone, with white noise and seconds of silence at both ends."""
    rng = np.random.default_rng(0)
    samples = [np.pad(samples_of(utterance), round(silence * RATE)) for utterance in utterances]
    samples = [part + noise * rng.standard_normal(len(part)).astype(np.float32) for part in samples]
    found = [transcript for outputs in model.encode(samples, 8) for transcript in model.decode(outputs)]
    return dict(zip((utterance.audio for utterance in utterances), found, strict=True))


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
