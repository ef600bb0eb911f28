"""Audio files: durations, checks of samples, and selection of a channel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK = 1 << 20  # samples read at once
_FLOATS = ("FLOAT", "DOUBLE")  # formats whose samples can be NaN or infinite


def audio_seconds(path: str | Path, name: str | None = None) -> float:
    """Duration in seconds, from the file's header.

    Args:
        name: of the file, for messages; None for its path.

    Raises:
        ValueError: the file cannot be read as audio; the message shows a command that converts it.
    """
    import soundfile

    try:
        return float(soundfile.info(str(path)).duration)
    except (RuntimeError, OSError) as error:
        name = name or str(path)
        hint = ""
        if Path(name).suffix.lower() not in (".wav", ".flac"):
            hint = f"; convert it: ffmpeg -i {name} -ac 1 -ar 16000 {Path(name).with_suffix('.wav')}"
        raise ValueError(f"{name} cannot be read as audio: {_reason(error)}{hint}") from error


def checked_seconds(path: str | Path, name: str | None = None) -> float:
    """Duration in seconds of a file, after a check of its samples (floating-point formats only).

    Raises:
        ValueError: as `audio_seconds`; the file has no samples, or samples that are NaN or infinite.
    """
    import soundfile

    name = name or str(path)
    seconds = audio_seconds(path, name)
    if not seconds:
        raise ValueError(f"{name} has no samples")
    if soundfile.info(str(path)).subtype in _FLOATS:
        for number, block in enumerate(soundfile.blocks(str(path), _BLOCK)):
            bad = np.argwhere(~np.isfinite(block))
            if len(bad):
                index = number * _BLOCK + int(bad[0][0])
                raise ValueError(
                    f"{name}: sample {index} is {block[tuple(bad[0])]}, expected finite samples; "
                    "repair the file or leave it out"
                )
    return seconds


def unreadable(files: Sequence[str | Path]) -> list[str]:
    """The files with samples that cannot be read; a damaged file may have a valid header."""
    import soundfile

    found = []
    for file in files:
        try:
            soundfile.read(file)
        except (RuntimeError, OSError):
            found.append(str(file))
    return found


def check_channel_selector(value: Any) -> None:
    """Raise a ValueError unless the value is None, "average" or a channel number >= 0."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value not in (None, "average") and not is_number:
        raise ValueError(f"channel_selector is {value!r}, expected average, or the number of a channel, from 0")


def num_channels(file: str | Path) -> int:
    """Channels of a file; 1 if its header cannot be read."""
    import soundfile

    try:
        return int(soundfile.info(str(file)).channels)
    except (RuntimeError, OSError):
        return 1


class MonoReader:
    """Reads one channel of a file, or the average of all, from the beginning to the end; a context manager.

    Args:
        channel_selector: number of the channel, from 0; "average" or None for the average.

    Raises:
        ValueError: the file cannot be read as audio, or there is no such channel.
    """

    def __init__(self, file: str | Path, channel_selector: int | str | None) -> None:
        import soundfile

        try:
            self._file = soundfile.SoundFile(str(file))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{file} cannot be read as audio: {_reason(error)}") from error
        self._channel = channel_selector if isinstance(channel_selector, int) else None
        self.rate = int(self._file.samplerate)
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
        """The next samples, [count] float32; fewer at the end of the file."""
        block = self._file.read(count, dtype="float32", always_2d=True)
        return block.mean(axis=1) if self._channel is None else block[:, self._channel]

    def skip(self, count: int) -> None:
        """Read over `count` samples, or to the end of the file."""
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


def write_mono(source: str | Path, target: Path, channel_selector: int | str | None) -> None:
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
