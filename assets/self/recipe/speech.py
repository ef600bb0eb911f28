"""How it is said: espeak-ng voices, then reverberation, tilt, noise and a random level.

Dev and test use voices that training never hears, more disturbance, and bursts of noise in the end.

    python assets/self/recipe/speech.py MANIFEST PHRASES OUT_FOLDER

adds bursts to a split that was recorded without them.
"""

import io
import json
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16000

TRAINING_ACCENTS = ("en-us", "en-us", "en-gb", "en-gb-x-rp", "en-us-nyc")
TRAINING_VARIANTS = (
    "", "", "+m1", "+m2", "+m3", "+m4", "+m6", "+m7", "+m8", "+f1", "+f2", "+f4", "+f5", "+adam", "+andy", "+belinda",
    "+david", "+linda", "+max", "+rob", "+victor", "+zac",
)  # fmt: skip
TRAINING_VOICES = tuple(a + v for a in TRAINING_ACCENTS for v in TRAINING_VARIANTS)
HELD_OUT_VOICES = ("en-us+f3", "en-gb+m5", "en-us+steph", "en-gb-scotland+f3", "en-us+m5")

TRAINING_DISTURBANCE = 0.8
HELD_OUT_DISTURBANCE = 1.3

BURSTS_PER_SECOND = 1.0
BURST_SECONDS = (0.06, 0.14)
SPARED_SECONDS = 0.08  # around a listed name
BURST_SEEDS = {"dev": 77, "test": 1077}  # of a split's first utterance; the next ones count on


@dataclass
class Utterance:
    """One sentence, how to speak it and where to put it."""

    text: str
    voice: str
    speed: int  # words per minute
    pitch: int  # 0 to 99, espeak-ng's scale
    disturbance: float  # scales the chance of each kind of disturbance
    seed: int
    path: Path


def plan(sentences: list[str], split: str, folder: Path, seed: int) -> list[Utterance]:
    """Choose a voice, speed, pitch and seed for every sentence of a split."""
    rng = random.Random(f"{seed} speech {split}")
    training = split == "train"
    return [
        Utterance(
            text=text,
            voice=rng.choice(TRAINING_VOICES if training else HELD_OUT_VOICES),
            speed=rng.randint(145, 180),
            pitch=rng.randint(38, 62),
            disturbance=TRAINING_DISTURBANCE if training else HELD_OUT_DISTURBANCE,
            seed=rng.randrange(1 << 30),
            path=folder / split / f"{split}_{number:03d}.flac",
        )
        for number, text in enumerate(sentences)
    ]


def synthesise(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """Speak a text with espeak-ng; 16 kHz float samples."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", "--", text]
    wav = bytearray(subprocess.run(command, capture_output=True, check=True).stdout)
    # Writing to a pipe, espeak-ng cannot know the length; put it into the WAV header.
    wav[4:8] = (len(wav) - 8).to_bytes(4, "little")
    wav[40:44] = (len(wav) - 44).to_bytes(4, "little")
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    return soxr.resample(samples, rate, SAMPLE_RATE).astype(np.float32)


def trim(samples: np.ndarray, threshold: float = 0.004, margin_s: float = 0.08) -> np.ndarray:
    """Cut silence from both ends, leaving a margin."""
    loud = np.flatnonzero(np.abs(samples) > threshold)
    if not len(loud):
        return samples
    margin = int(margin_s * SAMPLE_RATE)
    return samples[max(0, loud[0] - margin) : loud[-1] + margin]


def rms(samples: np.ndarray) -> float:
    """Root mean square, never zero."""
    return float(np.sqrt(np.mean(samples**2))) + 1e-6


def reverberate(samples: np.ndarray, rng: random.Random) -> np.ndarray:
    """Convolve with an exponentially decaying burst of noise: a small room."""
    length = int(rng.uniform(0.05, 0.25) * SAMPLE_RATE)
    decay = np.exp(-6.9 * np.arange(length) / length)
    response = decay * gaussian(length, rng) * rng.uniform(0.01, 0.06)
    response[0] = 1.0
    size = 1 << (len(samples) + length - 1).bit_length()
    spectrum = np.fft.rfft(samples, size) * np.fft.rfft(response, size)
    return np.fft.irfft(spectrum, size)[: len(samples)]


def tilt(samples: np.ndarray, rng: random.Random) -> np.ndarray:
    """First-order filter that lifts or lowers the treble: another microphone."""
    tilted = samples.copy()
    tilted[1:] -= rng.uniform(-0.5, 0.7) * samples[:-1]
    return tilted


def add_noise(samples: np.ndarray, rng: random.Random) -> np.ndarray:
    """Add white or pink noise, 8 to 35 dB below the speech."""
    ratio_db = rng.uniform(8, 35)
    noise = gaussian(len(samples), rng)
    if rng.random() < 0.6:
        noise = pink(noise)
    return samples + noise * rms(samples) * 10 ** (-ratio_db / 20)


def pink(noise: np.ndarray) -> np.ndarray:
    """White noise made pink, of unit variance."""
    spectrum = np.fft.rfft(noise)
    noise = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 20.0), len(noise))
    return noise / noise.std()


def gaussian(length: int, rng: random.Random) -> np.ndarray:
    """White noise of unit variance."""
    return np.random.RandomState(rng.randrange(1 << 30)).randn(length)


def disturb(samples: np.ndarray, rng: random.Random, amount: float) -> np.ndarray:
    """Apply each disturbance by chance, then set a random level."""
    for chance, effect in ((0.3, reverberate), (0.4, tilt), (0.7, add_noise)):
        if rng.random() < chance * amount:
            samples = effect(samples, rng)
    return np.clip(samples * (rng.uniform(0.03, 0.12) / rms(samples)), -1, 1)


def record(utterance: Utterance) -> float:
    """Make one FLAC file; returns its duration in seconds."""
    u = utterance
    samples = trim(synthesise(u.text, u.voice, u.speed, u.pitch))
    samples = disturb(samples, random.Random(u.seed), u.disturbance)
    u.path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(u.path, samples, SAMPLE_RATE, subtype="PCM_16", format="FLAC")
    return len(samples) / SAMPLE_RATE


def record_split(sentences: list[str], split: str, folder: Path, seed: int, processes: int = 1) -> None:
    """Record all sentences of a split and write NeMo's JSON-lines manifest beside them."""
    utterances = plan(sentences, split, folder, seed)
    with ProcessPoolExecutor(processes) as pool:
        durations = list(pool.map(record, utterances, chunksize=16))
    with open(folder / f"{split}.json", "w", encoding="utf-8") as manifest:
        for utterance, duration in zip(utterances, durations, strict=True):
            entry = {
                "audio_filepath": utterance.path.relative_to(folder).as_posix(),
                "duration": round(duration, 4),
                "text": utterance.text,
                "voice": utterance.voice,
            }
            manifest.write(json.dumps(entry) + "\n")


def add_bursts(samples: np.ndarray, may_burst: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """Bursts of pink noise, as loud as the speech; `may_burst` [N] bool says at which samples."""
    loudness, disturbed, starts = rms(samples), samples.astype(np.float64), np.flatnonzero(may_burst)
    for _ in range(rng.poisson(BURSTS_PER_SECOND * len(starts) / SAMPLE_RATE)):
        length = int(rng.uniform(*BURST_SECONDS) * SAMPLE_RATE)
        tried = rng.choice(starts, 50)
        fitting = [a for a in tried if a + length <= len(samples) and may_burst[a : a + length].all()]
        if fitting:
            envelope = np.sqrt(np.hanning(length + 2)[1:-1])
            noise = pink(rng.randn(length)) * envelope * loudness
            disturbed[fitting[0] : fitting[0] + length] += noise
    return np.clip(disturbed, -1, 1)


def outside_names(text: str, names: set[str], length: int) -> np.ndarray:
    """[length] bool, false at the samples of listed names: where their letters stand in the text, and a margin."""
    outside, margin, at = np.ones(length, bool), SPARED_SECONDS * SAMPLE_RATE, 0
    for word in text.split():
        if word in names:
            begin, end = (letters / len(text) * length for letters in (at, at + len(word)))
            outside[int(max(0, begin - margin)) : int(end + margin)] = False
        at += len(word) + 1
    return outside


def burst_split(manifest: Path, names: set[str], folder: Path) -> None:
    """Add bursts to the utterances of a dev or test manifest, except where names are said; they are written to
    the same places under `folder`."""
    entries = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    for number, entry in enumerate(entries):
        samples, _ = soundfile.read(manifest.parent / entry["audio_filepath"], dtype="float32")
        rng = np.random.RandomState(BURST_SEEDS[manifest.stem] + number)
        samples = add_bursts(samples, outside_names(entry["text"], names, len(samples)), rng)
        path = folder / entry["audio_filepath"]
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16", format="FLAC")


def read_manifest(path: Path) -> list[dict]:
    """Read a NeMo manifest; audio paths come back complete."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for entry in entries:
        entry["audio_filepath"] = str(path.parent / entry["audio_filepath"])
    return entries


if __name__ == "__main__":
    manifest, phrase_list, out_folder = map(Path, sys.argv[1:])
    burst_split(manifest, set(phrase_list.read_text(encoding="utf-8").split()), out_folder)
