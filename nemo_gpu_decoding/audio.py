"""Read audio files or sections of them, measure durations, check samples, and select a channel."""

import io
import mmap
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.cache import file_key
from nemo_gpu_decoding.checks import FieldError, check_kind, warn_once

_BLOCK = 1 << 20  # samples read at once
_FLOATS = ("FLOAT", "DOUBLE")  # formats whose samples can be NaN or infinite
_UNKNOWN = 0x7FFFF000  # headers of streamed files give this size or more
_HEADER = 4096  # bytes; a larger file has samples
_SPARE = 0.1  # seconds by which MP3 decoders differ in length
_NOTHING = np.zeros((0, 1), np.float32)
_CANCELLED = 0.1  # share of the energy that averaged unrelated channels have
# what ffmpeg may read: no playlists, which name other files
_FORMATS = "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dsf,dts,eac3,flac,flv,matroska,mov,mp3,mpc,mpc8,mpeg,mpegts,ogg"
_FORMATS += ",rm,tta,voc,w64,wav,wv"
# how recordings begin: in formats without a size, in all but MP3, and in MP3 with the number of its bytes
_MARKED = re.compile(rb"OggS\0\x02|fLaC[\0\x80]\0\0\x22|\.snd\0\0|RF64\xff{4}WAVE|caff\0\x01\0\0desc")
_BEGINNING = re.compile(_MARKED.pattern + rb"|(?s:RIFF....WAVE|FORM....AIF)")
_MP3 = re.compile(rb"(?s)\xff[\xe2-\xff].{11,34}(?:Xing|Info)\0\0\0[\3\7\x0b\x0f]....(....)")


class AudioPart(NamedTuple):
    """A section of an audio file, `duration` seconds from `offset` on, or less if the file ends earlier."""

    path: Path
    offset: float
    duration: float | None = None  # None: to the end of the file
    is_mono: bool = False  # whether the file has the selected channel alone

    @property
    def is_whole(self) -> bool:
        """Return whether this `AudioPart` is the whole file."""
        return self.offset == 0 and self.duration is None

    @property
    def place(self) -> str:
        """Return the start and end of the section for messages, such as " at 3.2 - 7.7 s", or "" for a whole file."""
        if self.is_whole:
            return ""
        end = "" if self.duration is None else f" - {round(self.offset + self.duration, 3)}"
        return f" at {self.offset}{end} s"

    def __str__(self) -> str:
        return f"{self.path}{self.place}"


AudioSource = str | Path | AudioPart


def part_of(audio: AudioSource) -> AudioPart:
    """Return an `AudioPart` unchanged, and the path of a file as the `AudioPart` of the whole file."""
    check_kind("audio", audio, AudioSource)
    return audio if isinstance(audio, AudioPart) else AudioPart(Path(audio), 0.0)


def checked_seconds(audio: AudioSource, name: str | None = None) -> float:
    """Check that floating-point samples are finite, and return the duration of a file or section in seconds.

    Args:
        name: name of the file for messages; None for its path.

    Raises:
        ValueError: the file cannot be read as audio, and the message shows a command that converts it; or it has no
            samples, or samples that are NaN or infinite.
        FieldError: the part begins after the end of the file.
    """
    part = part_of(audio)
    name = name or str(part.path)
    try:
        sound = Sound(part.path)
    except (RuntimeError, OSError) as error:
        hint, suffix = "", Path(name).suffix.lower()
        if suffix in (".json", ".jsonl"):
            hint = f"; of a manifest it is manifest={name}"
        elif suffix not in (".wav", ".flac"):
            hint = f"; convert it: ffmpeg -i {name} -ac 1 -ar 16000 {Path(name).with_suffix('.wav')}"
        raise ValueError(f"{name}{part.place} cannot be read as audio: {_reason(error)}{hint}") from error
    with sound:
        first, count = sound.span_of(part)
        if part.offset and first >= sound.frames:
            expected = f"a number < {sound.frames / sound.samplerate}, the seconds of {name}"
            raise FieldError("offset", part.offset, expected)
        if not count:
            raise ValueError(f"{name}{part.place} has no samples")
        if sound.subtype in _FLOATS:
            sound.seek(first)
        while sound.subtype in _FLOATS and len(block := sound.read_channels(min(_BLOCK, first + count - sound.at))):
            bad = np.argwhere(~np.isfinite(block))
            if len(bad):
                index = sound.at - len(block) + int(bad[0][0])
                raise ValueError(
                    f"{name}: sample {index} is {block[tuple(bad[0])]}, expected finite samples; "
                    "repair the file or leave it out"
                )
        return count / sound.samplerate


def unreadable(files: Sequence[AudioSource]) -> list[str]:
    """Read all samples and return the files that cannot be read; a damaged file may have a valid header."""
    found = []
    for file in files:
        fault = "no audio"
        with suppress(ValueError), MonoReader(file, None) as reader:
            reader.skip(sys.maxsize)
            fault = reader.fault
        found += [str(file)] if fault else []
    return found


def check_channel_selector(value: Any) -> None:
    """Raise a ValueError unless `channel_selector` is None, "average" or a channel number >= 0."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value not in (None, "average") and not is_number:
        raise ValueError(f"channel_selector is {value!r}, expected average, or the number of a channel, from 0")


class Sound:
    """An audio file, read from beginning to end, as a context manager with the attributes of `soundfile.SoundFile`.

    If a file is a concatenation of recordings, all are read. ffmpeg decodes files that libsndfile cannot read.

    Raises:
        RuntimeError: the file cannot be read as audio.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._gap = path, ""
        self._parts, self._fault = _recordings(path)
        first = self._parts[0]
        self.samplerate, self.channels, self.subtype = int(first.samplerate), int(first.channels), str(first.subtype)
        if len({(part.samplerate, part.channels) for part in self._parts}) > 1:
            self._parts, self._fault = [first], "a recording of another sample rate or other channels is joined to it"
        self.frames = sum(part.frames for part in self._parts)
        is_file = first.name == str(path) and first.format in ("WAV", "FLAC")
        self.is_plain = is_file and len(self._parts) == 1 and not self._fault  # NeMo reads the same
        self.at = 0  # the next sample
        self.fault = ""  # why the file breaks off, as far as it was read; "": it does not

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.close()

    def span_of(self, part: AudioPart) -> tuple[int, int]:
        """Return the first sample of a section and the number of its samples."""
        first = round(part.offset * self.samplerate)
        rest = self.frames - first
        return first, rest if part.duration is None else min(rest, round(part.duration * self.samplerate))

    def seek(self, frame: int) -> None:
        self.at = frame
        for part in self._parts:
            part.seek(min(frame, part.frames))
            frame = max(0, frame - part.frames)

    def read_channels(self, count: int) -> np.ndarray:
        """Return n <= `count` float32 samples [n, channels]; n is smaller at a recording's end, 0 at the end."""
        for part in self._parts:
            rest = min(count, part.frames - part.tell())
            try:
                block = part.read(rest, dtype="float32", always_2d=True) if rest > 0 else _NOTHING
            except RuntimeError as error:
                self._fault, block, rest = _reason(error), _NOTHING, sys.maxsize
            self.at += len(block)
            if rest - len(block) > _SPARE * self.samplerate:
                self._go_on()  # libsndfile would go on at a wrong place
                return block if len(block) else self.read_channels(count)
            if len(block):
                return block
        missing = (self.frames - self.at) / self.samplerate
        if count:
            self.fault = self._fault or (f"{missing:.1f} s of audio are missing" if missing > _SPARE else self._gap)
        return np.zeros((0, self.channels), np.float32)

    def _go_on(self) -> None:
        """Replace what follows by the samples that ffmpeg decodes behind damage where libsndfile stops."""
        import soundfile

        file, _ = (None, "") if self._gap else _converted(*file_key(self._path))
        self._parts, self._gap = [], f"it is damaged at {self.at / self.samplerate:.1f} s"
        if file is not None and soundfile.info(file.name).samplerate == self.samplerate:
            self._parts = [soundfile.SoundFile(file.name)]
            self.seek(self.at)


def _recordings(path: Path) -> tuple[list[Any], str]:
    """Return all recordings that are concatenated in a file, and the reason why the file's end is missing, or ""."""
    import soundfile

    begins = _beginnings(*file_key(path))
    try:
        sounds = [soundfile.SoundFile(str(path))] if len(begins) == 1 else []
        if not any(sound.frames for sound in sounds):
            content = path.read_bytes()
            parts = [content[begin:end] for begin, end in pairwise([*begins, len(content)])]
            sounds = [soundfile.SoundFile(_with_size(part)) for part in parts]
        if any(sound.frames >= 1 << 62 or (not sound.frames and path.stat().st_size > _HEADER) for sound in sounds):
            raise RuntimeError("its header has no length")
        if not all(sound.seekable() for sound in sounds):
            raise RuntimeError("libsndfile cannot read parts of it")
        if len(sounds) == 1 and "mode   : constant" in sounds[0].extra_info and _frames(*file_key(path))[0]:
            raise RuntimeError("it has no length, and frames of several bit rates")
    except (RuntimeError, OSError, TypeError) as error:  # TypeError: the name ends with .raw
        file, said = _converted(*file_key(path))
        if file is None:
            raise RuntimeError(f"{_reason(error)} ({said})" if said else _reason(error)) from error
        return [soundfile.SoundFile(file.name)], said or _unread(path)
    # the log of libsndfile compares sizes in headers with the size of the file
    said = sounds[-1].extra_info
    found = re.findall(r"^ *([^:/\n]*?) *: (\d+) \(should be (\d+)\)", said, re.MULTILINE)
    sizes = [(name, int(promised), int(there)) for name, promised, there in found]
    is_unknown = sounds[-1].name != str(path) or any(promised >= _UNKNOWN for _, promised, _ in sizes)
    for name, promised, there in sizes:
        if (name != "RIFF" or is_unknown) and there + 8 < promised < _UNKNOWN:
            return sounds, f"the file is cut short: its header promises {promised} bytes and it has {there}"
    with path.open("rb") as file:
        counted = re.search(rb"^NIST_1A\n(?s:.*)\nsample_count -i (\d+)", file.read(1024))
    if "truncated" in said or (counted and sounds[0].frames < int(counted[1])):
        return sounds, "the file is cut short"
    named = re.search(r"(?s)^data : (\d+)$.*(?:Exiting parser|Resynching)", said, re.MULTILINE)
    if named and "WAV" in sounds[-1].format and path.stat().st_size > int(named[1]) + _HEADER:
        return sounds, f"its header names {named[1]} bytes of samples, and more follows"
    if len(sounds) == 1 and "mode   : constant" in said and _frames(*file_key(path))[1]:
        return sounds, "the file is cut short: its last frame is incomplete"
    return sounds, _unread(path) if sounds[0].format == "OGG" else ""


def _unread(path: Path) -> str:
    """Return why a file is read in part without an error by libsndfile or ffmpeg, or "" if it is read whole."""
    content = path.read_bytes()
    at = content.find(b"data") + 4
    if content[:4] == b"caff" and len(content) - at - 8 < int.from_bytes(content[at : at + 8], "big") < 1 << 62:
        return "the file is cut short"
    end = content[-1 << 17 :]
    page = end[end.rfind(b"OggS") :].ljust(27, b"\0")
    if content[:4] == b"OggS" and (not page[5] & 4 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])):
        return "the file is cut short: its last page is missing"
    if content[:1] == content[188:189] == content[376:377] == b"G" and len(content) % 188:
        return "the file is cut short: its last packet is incomplete"
    is_joined = content[4:8] == b"ftyp" or content[:4] in (b"0&\xb2u", b"TTA1", b"FLV\1")
    is_joined = is_joined and content.find(content[:8], 8) > 0
    is_joined |= content[:4] in (b"RIFF", b"FORM") and len(_beginnings(*file_key(path))) > 1
    return "a recording is joined to it, which is not read" * is_joined


@lru_cache(4096)
def _frames(path: str, _size: int, _time: int) -> tuple[bool, bool]:
    """Return whether frames of an MPEG audio file have several bit rates, and whether the last one is incomplete."""
    content = Path(path).read_bytes()
    found = [(match.start(), match[0]) for match in re.finditer(rb"(?s)(?<!\xff)\xff[\xe2-\xfe].", content)]
    ((kind, count),) = Counter(head[:2] for _, head in found).most_common(1)
    of_kind = [(at, head[2] >> 2) for at, head in found if head[:2] == kind]
    ((rate, most),) = Counter(rate for _, rate in of_kind).most_common(1)
    places = np.array([at for at, other in of_kind if other == rate])
    sizes = np.diff(places)
    size = np.bincount(sizes).argmax() if len(sizes) else 0
    last = places[1:][np.abs(sizes - size) < 2]
    return most < 0.9 * count, bool(len(last) and len(content) - last[-1] < size - 1)


@lru_cache(4096)
def _beginnings(path: str, size: int, _time: int) -> tuple[int, ...]:
    """Return the byte offset of each recording that is concatenated in a file."""
    if not size:
        return (0,)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return tuple(_chain(content))


def _chain(content: Any) -> Iterator[int]:
    """Yield the byte offsets of the recordings in a file, from the sizes in their headers or the next beginning."""
    at = 0
    while True:
        yield at
        begin = content[at : at + 4]
        is_mp3 = begin not in (b"RIFF", b"FORM") and not _MARKED.match(content, at)
        at = _behind_tag(content, at)
        if begin in (b"RIFF", b"FORM"):
            at += 8 + int.from_bytes(content[at + 4 : at + 8], "little" if begin == b"RIFF" else "big")
        elif match := _MP3.match(content, at):
            at += max(1, int.from_bytes(match[1], "big"))
            at += 128 * (content[at : at + 3] == b"TAG")
        else:  # the streams of one Ogg file begin together
            match = _BEGINNING.search(content, at + 512) if content[at : at + 1] in b"\xffOf.Rc" else None
            at = match.start() if match else len(content)
        is_more = is_mp3 and re.match(rb"ID3|\xff[\xe2-\xff]", content[at : at + 4])
        if not (is_more or _BEGINNING.match(content, at) or _MP3.match(content, _behind_tag(content, at))):
            return


def _behind_tag(content: Any, at: int) -> int:
    """Return the byte offset of the MP3 frame behind the ID3 tag, if any, at a byte offset."""
    sizes = content[at + 6 : at + 10] if content[at : at + 3] == b"ID3" else b""
    return at + 10 * bool(sizes) + sum(byte << 7 * (3 - n) for n, byte in enumerate(sizes))


def _with_size(content: bytes) -> io.BytesIO:
    """Return a WAV file with the correct size in its header, where programs that stream samples write 0."""
    content = content.replace(b"RF64", b"RIFF", content.startswith(b"RF64"))  # for samples of unknown number
    at = content.find(b"data", 12) + 4
    if content[:4] == b"RIFF" and content[at : at + 4] == bytes(4) and not content[at + 4 : at + 8].strip().isalnum():
        content = content[:at] + (len(content) - at - 4).to_bytes(4, "little") + content[at + 4 :]
    return io.BytesIO(content)


@lru_cache(4)
def _converted(path: str, _size: int, _time: int) -> tuple[Any, str]:
    """Decode a file by ffmpeg to a temporary CAF file; return that file, or None on failure, and ffmpeg's message."""
    if shutil.which("ffmpeg") is None:
        return None, ""
    import soundfile

    target = NamedTemporaryFile(suffix=".caf")  # noqa: SIM115  (removed with the entry of the cache)
    given = ["-nostdin", "-nostats", "-v", "level+info", "-y", "-format_whitelist", _FORMATS]
    given += ["-protocol_whitelist", "file", "-i", f"file:{path}"]
    command = ["ffmpeg", *given, "-vn", "-c:a", "pcm_f32le", "-f", "caf", target.name]
    done = subprocess.run(command, capture_output=True, check=False)
    said = done.stderr.decode(errors="replace").replace(f"file:{path}: ", "")
    fault = re.search(r"\[(?:error|fatal)\] (.*)|\[warning\] (.*corrupt.*)", said)
    if fault or done.returncode:
        return (None if done.returncode else target), f"ffmpeg: {fault[1] or fault[2]}" if fault else ""
    promised = re.search(r"Input #0, (?:asf|avi|flv),(?s:.*?)Duration: (\d+):(\d+):([\d.]+)", said)
    hours, minutes, seconds = map(float, promised.groups()) if promised and "Stream #0:1" not in said else (0, 0, 0)
    missing = 3600 * hours + 60 * minutes + seconds - soundfile.info(target.name).duration
    return target, f"{missing:.1f} s of audio are missing" if missing > 2 * _SPARE else ""


class MonoReader(Sound):
    """A context manager that reads one channel of an audio file or section, or the average of all its channels.

    Args:
        channel_selector: number of the channel, from 0; "average" or None for the average.

    Raises:
        ValueError: the file cannot be read as audio, or there is no such channel.
    """

    def __init__(self, file: AudioSource, channel_selector: int | str | None) -> None:
        part = part_of(file)
        self.name = str(file)
        try:
            super().__init__(part.path)
            first, count = self.span_of(part)
            if first:
                self.seek(first)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{file} cannot be read as audio: {_reason(error)}") from error
        self._channel = channel_selector if isinstance(channel_selector, int) else None
        self.rate, self.seconds = self.samplerate, max(0, count) / self.samplerate
        self._left = sys.maxsize if part.duration is None else round(part.duration * self.rate)  # samples of the part
        self._energies = np.zeros(2)  # energy of the average, and of all channels
        if self._channel is not None and self._channel >= self.channels:
            channels = "1 channel" if self.channels == 1 else f"{self.channels} channels"
            expected = f"average or 0 .. {self.channels - 1}"
            self.__exit__()
            raise ValueError(f"channel_selector is {channel_selector}, but {file} has {channels}, expected {expected}")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self.doubt:
            warn_once(f"{self.name}: {self.doubt}; channel_selector=0 takes one")

    @property
    def doubt(self) -> str:
        """Return a warning if the average of the channels is nearly silent because they cancel out, otherwise ""."""
        average, channels = self._energies
        is_silent = bool(average * self.channels < _CANCELLED * channels)
        return "the average of its channels is almost silent, because they have opposite signs" * is_silent

    def read(self, count: int) -> np.ndarray:
        """Return n <= `count` float32 samples [n]; n is smaller at a recording's end, and 0 at the file's end."""
        block = self.read_channels(min(count, self._left))
        self._left -= len(block)
        if self._channel is not None or self.channels == 1:
            return block[:, self._channel or 0]
        average = block.mean(axis=1)
        self._energies += np.square(average).sum(), np.square(block).sum() / block.shape[1]
        return average

    def skip(self, count: int) -> None:
        """Skip `count` samples, or all samples up to the end of the file."""
        while count > 0 and len(block := self.read(min(count, _BLOCK))):
            count -= len(block)

    def read_readable(self, count: int) -> tuple[np.ndarray, str]:
        """Return up to `count` float32 samples [n] before any damage, and a message about the damage or ""."""
        blocks = [np.zeros(0, np.float32)]
        while count > 0 and len(block := self.read(min(count, max(1, self.rate // 4)))):
            blocks.append(block)
            count -= len(block)
        return np.concatenate(blocks), self.fault


def write_mono(source: AudioSource, target: Path, channel_selector: int | str | None) -> None:
    """Write the channel that `MonoReader` reads to a WAV file, as float32 samples at the source's sample rate.

    Raises:
        ValueError: the samples cannot all be read, or there is no such channel.
    """
    with MonoReader(source, channel_selector) as reader, open_wav(target, reader.rate) as sink:
        while len(block := reader.read(_BLOCK)):
            sink.write(block)
        if reader.fault:
            raise ValueError(f"{source} cannot be read as audio to its end: {reader.fault}")


def open_wav(target: Path, rate: int) -> Any:
    """Open a new WAV file for writing, with one channel of float32 samples."""
    import soundfile

    return soundfile.SoundFile(str(target), "w", rate, 1, "FLOAT", format="WAV")


def _reason(error: Exception) -> str:
    """Return libsndfile's message without the file's path at its beginning."""
    text = str(getattr(error, "error_string", None) or error)
    return "no audio is found in it" if "not a regular file" in text else text  # as it says of MP3 files
