"""Audio files and parts of them: durations, checks of samples, and selection of a channel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError

_BLOCK = 1 << 20  # samples read at once
_FLOATS = ("FLOAT", "DOUBLE")  # formats whose samples can be NaN or infinite


class AudioPart(NamedTuple):
    """A part of a file, from `offset` for `duration` seconds, or to the end of the file if that is earlier."""

    path: Path
    offset: float
    duration: float | None = None  # None: to the end of the file

    @property
    def is_whole(self) -> bool:
        """Whether the part is the file."""
        return self.offset == 0 and self.duration is None

    @property
    def place(self) -> str:
        """The place in the file, for messages: " at 3.2 - 7.7 s"; "" for the file."""
        if self.is_whole:
            return ""
        end = "" if self.duration is None else f" - {round(self.offset + self.duration, 3)}"
        return f" at {self.offset}{end} s"

    def __str__(self) -> str:
        return f"{self.path}{self.place}"


AudioSource = str | Path | AudioPart


def part_of(audio: AudioSource) -> AudioPart:
    """The audio as a part of its file, or as the file."""
    return audio if isinstance(audio, AudioPart) else AudioPart(Path(audio), 0.0)


def audio_seconds(audio: AudioSource, name: str | None = None) -> float:
    """Duration in seconds, from the file's header.

    Args:
        name: of the file, for messages; None for its path.

    Raises:
        ValueError: the file cannot be read as audio; the message shows a command that converts it.
        FieldError: the part begins after the end of the file.
    """
    import soundfile

    path, offset, duration = part_of(audio)
    try:
        info = soundfile.info(str(path))
        if offset and round(offset * info.samplerate) >= info.frames:
            expected = f"a number < {info.frames / info.samplerate}, the seconds of {name or path}"
            raise FieldError("offset", offset, expected)
        rest = info.frames - round(offset * info.samplerate)
        asked = rest if duration is None else round(duration * info.samplerate)
        return float(min(rest, asked) / info.samplerate)
    except (RuntimeError, OSError) as error:
        name, hint = name or str(path), ""
        if Path(name).suffix.lower() not in (".wav", ".flac"):
            hint = f"; convert it: ffmpeg -i {name} -ac 1 -ar 16000 {Path(name).with_suffix('.wav')}"
        raise ValueError(f"{name}{part_of(audio).place} cannot be read as audio: {_reason(error)}{hint}") from error


def checked_seconds(audio: AudioSource, name: str | None = None) -> float:
    """Duration in seconds, after a check of the samples (floating-point formats only).

    Raises:
        ValueError: as `audio_seconds`; the file has no samples, or samples that are NaN or infinite.
    """
    import soundfile

    path, offset, _ = part_of(audio)
    name = name or str(path)
    seconds = audio_seconds(audio, name)
    if not seconds:
        raise ValueError(f"{name}{part_of(audio).place} has no samples")
    info = soundfile.info(str(path))
    if info.subtype in _FLOATS:
        first, count = round(offset * info.samplerate), round(seconds * info.samplerate)
        for number, block in enumerate(soundfile.blocks(str(path), _BLOCK, start=first, frames=count)):
            bad = np.argwhere(~np.isfinite(block))
            if len(bad):
                index = first + number * _BLOCK + int(bad[0][0])
                raise ValueError(
                    f"{name}: sample {index} is {block[tuple(bad[0])]}, expected finite samples; "
                    "repair the file or leave it out"
                )
    return seconds


def unreadable(files: Sequence[AudioSource]) -> list[str]:
    """The files with samples that cannot be read; a damaged file may have a valid header."""
    found = []
    for file in files:
        try:
            with MonoReader(file, None) as reader:
                reader.skip(sys.maxsize)
        except (ValueError, RuntimeError, OSError):
            found.append(str(file))
    return found


def check_channel_selector(value: Any) -> None:
    """Raise a ValueError unless the value is None, "average" or a channel number >= 0."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value not in (None, "average") and not is_number:
        raise ValueError(f"channel_selector is {value!r}, expected average, or the number of a channel, from 0")


def num_channels(file: AudioSource) -> int:
    """Channels of a file; 1 if its header cannot be read."""
    import soundfile

    try:
        return int(soundfile.info(str(part_of(file).path)).channels)
    except (RuntimeError, OSError):
        return 1


class MonoReader:
    """Reads one channel of a file or of a part, or the average of all, in order; a context manager.

    Args:
        channel_selector: number of the channel, from 0; "average" or None for the average.

    Raises:
        ValueError: the file cannot be read as audio, or there is no such channel.
    """

    def __init__(self, file: AudioSource, channel_selector: int | str | None) -> None:
        import soundfile

        path, offset, duration = part_of(file)
        try:
            self._file = soundfile.SoundFile(str(path))
            if offset:
                self._file.seek(round(offset * self._file.samplerate))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{file} cannot be read as audio: {_reason(error)}") from error
        self._channel = channel_selector if isinstance(channel_selector, int) else None
        self.rate = int(self._file.samplerate)
        self._left = sys.maxsize if duration is None else round(duration * self.rate)  # samples of the part
        if self._channel is not None and self._channel >= self._file.channels:
            channels = "1 channel" if self._file.channels == 1 else f"{self._file.channels} channels"
            expected = f"average or 0 .. {self._file.channels - 1}"
            self._file.close()
            raise ValueError(f"channel_selector is {channel_selector}, but {file} has {channels}, expected {expected}")

    def __enter__(self) -> MonoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int) -> np.ndarray:
        """The next samples, [count] float32; fewer at the end."""
        block = self._file.read(min(count, self._left), dtype="float32", always_2d=True)
        self._left -= len(block)
        return block.mean(axis=1) if self._channel is None else block[:, self._channel]

    def skip(self, count: int) -> None:
        """Read over `count` samples, or to the end."""
        while count > 0 and len(block := self.read(min(count, _BLOCK))):
            count -= len(block)

    def read_readable(self, count: int) -> tuple[np.ndarray, str]:
        """As `read`, of a file whose end may be damaged: the samples before the damage, and its reason or ""."""
        blocks, fault = [np.zeros(0, np.float32)], ""
        while count > 0 and not fault:
            try:
                blocks.append(self.read(min(count, self.rate // 4)))
            except (RuntimeError, OSError) as error:
                fault = _reason(error)
            if fault or not len(blocks[-1]):
                break
            count -= len(blocks[-1])
        return np.concatenate(blocks), fault


def write_mono(source: AudioSource, target: Path, channel_selector: int | str | None) -> None:
    """Write the samples of `MonoReader` as WAV with float32 samples at the file's rate.

    Raises:
        ValueError: the samples cannot be read, or there is no such channel.
    """
    try:
        with MonoReader(source, channel_selector) as reader, open_wav(target, reader.rate) as sink:
            while len(block := reader.read(_BLOCK)):
                sink.write(block)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{source} cannot be read as audio: {_reason(error)}") from error


def open_wav(target: Path, rate: int) -> Any:
    """A WAV file of one channel with float32 samples, open for writing."""
    import soundfile

    return soundfile.SoundFile(str(target), "w", rate, 1, "FLOAT", format="WAV")


def _reason(error: Exception) -> str:
    """The message of libsndfile, without the path before it."""
    return str(getattr(error, "error_string", None) or error)
