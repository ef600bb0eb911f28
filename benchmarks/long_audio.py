"""Long recordings against their utterances: word errors, words doubled at cuts, times, and memory.

Utterances of a manifest are joined with pauses and noise to one recording.
`python -m benchmarks.long_audio --help` lists the options.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
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
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.report import format_table

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Model

PROGRAM = "python -m benchmarks.long_audio"
SUMMARY = "long recordings against their utterances"
EXAMPLES = ("model=assets/self/models/self_ctc.nemo manifest=assets/self/speech/test.json minutes=5",)
RATE = 16000


@dataclass
class LongAudioOptions:
    """Options of the table."""

    # A .nemo file.
    model: str = MISSING
    # NeMo manifest of utterances, 16 kHz.
    manifest: str = MISSING
    # Length of the recording, minutes.
    minutes: float = 5.0
    # Strategies.
    strategies: list[str] = field(default_factory=lambda: ["greedy_batch"])
    # Root mean square of the white noise in the whole recording.
    noise: float = 0.001
    # Shortest and longest pause between two utterances, seconds.
    pauses: list[float] = field(default_factory=lambda: [0.1, 3.0])
    # Target and maximum length of a segment, seconds.
    segments: list[float] = field(default_factory=lambda: [30.0, 60.0])


OPTIONS = LongAudioOptions


class Recording(NamedTuple):
    """Joined utterances."""

    file: Path
    utterances: list[Utterance]
    starts: list[float]  # seconds


def join(utterances: Sequence[Utterance], options: LongAudioOptions, folder: Path) -> Recording:
    """A recording of utterances in random order, with silence between them and noise everywhere."""
    import soundfile

    rng, at = np.random.default_rng(0), 0
    found = Recording(folder / "joined.wav", [], [])
    with soundfile.SoundFile(str(found.file), "w", RATE, 1, "FLOAT") as sink:
        while at < options.minutes * 60 * RATE:
            utterance = utterances[int(rng.integers(len(utterances)))]
            samples, rate = soundfile.read(str(utterance.path), dtype="float32")
            if rate != RATE:
                raise ValueError(f"{utterance.name} has {rate} Hz, expected {RATE}")
            part = np.pad(samples, (0, int(rng.uniform(options.pauses[0], options.pauses[1]) * RATE)))
            sink.write(part + options.noise * rng.standard_normal(len(part)).astype(np.float32))
            found.utterances.append(utterance)
            found.starts.append(at / RATE)
            at += len(part)
    return found


def run(options: LongAudioOptions) -> int:
    """Print the table of one model and set."""
    from nemo_gpu_decoding.nemo_plugin.model import Model

    model = Model.load(options.model, device="cpu")
    with TemporaryDirectory() as folder:
        recording = join(read_manifest(Path(options.manifest)), options, Path(folder))
        rows = [row_of(model, strategy, recording, options.segments) for strategy in options.strategies]
    columns = ["alone, WER %", "deleted", "joined, WER %", "deleted", "segments", "doubled", "within 80 ms, %"]
    print(format_table(["strategy", *columns], rows))
    print(f"peak of memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    return 0


def row_of(model: Model, strategy: str, recording: Recording, segments: Sequence[float]) -> list[object]:
    """The row of a strategy."""
    from nemo_gpu_decoding.nemo_plugin.long_audio import transcribe_long
    from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES

    config = decoding_config(strategy, None, {})
    config.compute_timestamps = True
    model.head(STRATEGIES[strategy].family if strategy in STRATEGIES else model.default_head).use(config)
    files = list(dict.fromkeys(utterance.path for utterance in recording.utterances))
    found = [transcript for outputs in model.encode(files, 8) for transcript in model.decode(outputs)]
    alone = dict(zip(files, found, strict=True))
    target, most = segments
    long = transcribe_long(model, recording.file, segment_seconds=target, max_segment_seconds=most, timestamps=True)
    expected = [
        (word.word, word.start + start)
        for utterance, start in zip(recording.utterances, recording.starts, strict=True)
        for word in alone[utterance.path].words
    ]
    reference = [str(utterance.text) for utterance in recording.utterances]
    row: list[object] = [strategy]
    for texts in ([alone[utterance.path].text for utterance in recording.utterances], [long.text]):
        errors = word_errors(reference if len(texts) > 1 else [" ".join(reference)], texts)
        row += [f"{100 * errors.wer:.1f}", errors.deletions]
    spoken = [segment.text.split() for segment in long.segments if segment.text]
    doubled = sum(before[-1] == after[0] for before, after in pairwise(spoken))
    times = differences(expected, [(word.word, word.start) for word in long.words])
    return [*row, len(long.segments), doubled, f"{100 * np.mean(times <= 0.08 + 1e-6):.1f}" if len(times) else "-"]


def differences(expected: Sequence[tuple[str, float]], found: Sequence[tuple[str, float]]) -> np.ndarray:
    """Seconds between the times of equal words, [n]."""
    from kaldialign import align

    pairs = align([word for word, _ in expected], [word for word, _ in found], "*")
    own, others = iter(expected), iter(found)
    times = []
    for a, b in pairs:
        first = next(own) if a != "*" else None
        second = next(others) if b != "*" else None
        if first and second and a == b:
            times.append(abs(first[1] - second[1]))
    return np.array(times)


def main() -> int:
    """The exit code of the program."""
    return guarded(PROGRAM, lambda: run_program(PROGRAM, SUMMARY, sys.modules[__name__], sys.argv[1:]), __name__)


if __name__ == "__main__":
    sys.exit(main())
