"""List the utterances that a command decodes, from audio files or a NeMo manifest."""

import glob
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.audio import AudioPart, AudioSource, checked_seconds, part_of
from nemo_gpu_decoding.checks import FieldError, check_number, leave_out
from nemo_gpu_decoding.fusion.phrases import WrittenRequest, written_request
from nemo_gpu_decoding.plain_text import lines_of, path_of

logger = logging.getLogger("nemo_gpu_decoding")

# of libsndfile, and of ffmpeg
AUDIO_SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aiff", ".aif", ".aifc", ".au", ".snd", ".w64", ".caf"),
    *(".sph", ".nist", ".voc", ".mpga", ".m4b", ".mpg", ".mpeg", ".wv", ".spx", ".raw", ".pcm"),
    *(".rf64", ".m4a", ".mp4", ".webm", ".mka", ".mkv", ".aac", ".wma", ".amr", ".3gp", ".mov", ".avi", ".mp2"),
    *(".weba", ".flv", ".ac3", ".m4v", ".wmv", ".tta", ".ape", ".mpc", ".dsf", ".dts", ".eac3", ".rm", ".ra"),
)
NO_TEXT = "-"  # NeMo manifests have this text if a recording has no transcript
# Keys of output rows. Other fields of a manifest's rows are copied to the output.
RESULT_KEYS = (
    *("audio_filepath", "duration", "text", "pred_text", "score", "outside_share", "in_grammar", "seconds"),
    *("n_best", "words", "segments", "word_alternatives", "found_phrases"),
    *("wer", "error", "manifest", "line"),
)

FAULT = "\0fault"  # key of the reason why a row cannot be decoded; no user's field has this name


@dataclass(frozen=True)
class Utterance:
    """An utterance: an audio file or a section of one, with its reference text if the manifest has one."""

    name: str  # as given by the user, for output
    audio: AudioSource
    duration: float  # seconds
    text: str | None = None
    request: WrittenRequest | None = None  # None: no changes to the decoding config
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of its manifest row, for output
    fault: str = ""  # why its audio cannot be decoded

    @property
    def path(self) -> Path:
        """Return the path of the audio file that contains the utterance."""
        return part_of(self.audio).path

    @property
    def label(self) -> str:
        """Return the utterance's name with the times of its beginning and end in the file, for messages."""
        return self.name + part_of(self.audio).place


def find_utterances(audio: Any, manifest: str | None) -> list[Utterance]:
    """Return the utterances in `audio` (file, folder, glob or a list of them), or in a NeMo manifest.

    If the audio of an utterance cannot be read, its `fault` is the reason.

    Raises:
        ValueError: neither or both are given, no file is found, a file is missing, or no file is audio.
    """
    check_one_given(audio, manifest)
    if manifest is not None:
        utterances = read_manifest(path_of(manifest))
    else:
        utterances = [opened(str(path), path) for path in find_audio(audio)]
    if all(utterance.fault for utterance in utterances):
        raise ValueError(utterances[0].fault)
    return utterances


def check_one_given(audio: Any, manifest: Any) -> None:
    """Raise a ValueError unless exactly one of the options `audio` and `manifest` is given."""
    if (audio is None) == (manifest is None):
        raise ValueError("give either audio=FILES (a file, folder, pattern or [list]) or manifest=FILE")


def opened(name: str, audio: AudioSource, row: Mapping[str, Any] | None = None, where: str = "") -> Utterance:
    """Return the `Utterance` of an audio file and of its manifest row, if any; set `fault` if it is unreadable.

    Args:
        where: the place of the row, for messages.
    """
    row = row or {}
    seconds, fault = part_of(audio).duration or 0.0, row.get(FAULT) or ""
    if fault:
        return Utterance(name, audio, seconds, row.get("text"), None, own_fields(row), fault)
    try:
        name.encode()
        seconds = checked_seconds(audio, name)
    except UnicodeEncodeError:
        name = os.fsencode(name).decode(errors="backslashreplace")
        fault = f"{name}: the name of the file is not UTF-8; rename the file"
    except FieldError as error:
        fault = f"{where}: {error}"
    except ValueError as error:
        fault = str(error)
    fields, text = own_fields(row), row.get("text")
    if (text or "").strip() == NO_TEXT:
        fields, text = {**fields, "text": text}, None
    return Utterance(name, audio, seconds, text, written_request(row), fields, fault)


def find_audio(audio: Any) -> list[Path]:
    """Return the paths of all files in `audio`, which is a file, a folder, a glob or a list; open no file."""
    patterns = audio if isinstance(audio, (list, tuple)) else [audio]
    if not patterns:
        raise ValueError("audio is an empty list, expected at least one file, folder or pattern")
    return [path for pattern in patterns for path in _expand(str(pattern))]


def read_manifest(manifest: Path) -> list[Utterance]:
    """Return the utterances of a NeMo manifest: JSON lines with `audio_filepath`, relative to its folder.

    A row with `offset` selects `duration` seconds of its audio file from `offset` on.

    If a line is invalid, or its audio cannot be read, the `fault` of its utterance is the reason.

    Raises:
        ValueError: the manifest is missing or empty.
    """
    if not manifest.is_file():
        raise ValueError(f"manifest={manifest} is no file here")
    utterances = []
    for _, where, row in numbered_rows(lines_of(manifest), str(manifest)):
        path = located(manifest.parent, row["audio_filepath"])
        if not os.path.isfile(path):  # False for names that are too long, where Path.is_file() raises
            row.setdefault(FAULT, f"{where}: there is no file {path}")
        utterances.append(opened(row["audio_filepath"], AudioPart(path, *part_in(row)), row, where))
    if not utterances:
        raise ValueError(f"manifest={manifest} has no lines")
    return utterances


def numbered_rows(lines: Iterable[bytes], manifest: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the line number of each manifest row, the text that names the line in messages, and the row itself."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"manifest={manifest}, line {number}"
            yield number, where, read_row(line, where)


def located(folder: Path, name: str) -> Path:
    """Return the path of the audio file `name` in a manifest; a relative path begins at the manifest's folder."""
    path = folder / name
    return path if os.path.lexists(path) else folder / path_of(name)


def read_row(line: bytes, where: str) -> dict[str, Any]:
    """Return a line of a NeMo manifest; an invalid line gives its readable fields, and the reason as `FAULT`."""
    try:
        row = parse_row(line, where)
        json.dumps(row, ensure_ascii=False).encode()
        return row
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        fault = f"{where}: has {half!a}, half of a surrogate pair, expected whole characters"
    except ValueError as error:
        fault = str(error)
    row = {}
    with suppress(ValueError, RecursionError):
        row = json.loads(json.dumps(json.loads(line, parse_constant=str), ensure_ascii=False).encode(errors="replace"))
    row = row if isinstance(row, dict) else {}
    texts = {key: row[key] for key in ("audio_filepath", "text") if isinstance(row.get(key), str)}
    row.pop("offset", None)
    return {**own_fields(row), "audio_filepath": "", **texts, FAULT: fault}


def parse_row(line: str | bytes, where: str) -> dict[str, Any]:
    """Parse one line of a NeMo manifest; an invalid line raises a ValueError that begins with `where`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for numbers with too many digits and text that is not UTF-8
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("audio_filepath"), str):
        raise ValueError(f"{where}: has no audio_filepath")
    if not isinstance(row.get("text"), (str, type(None))):
        raise ValueError(f"{where}: text is {row['text']!r}, expected a text")
    try:
        for key in ("offset", "duration"):
            if row.get(key) is not None:
                check_number(key, row[key], above_zero=key == "duration" and row.get("offset") is not None)
        written_request(row)
    except FieldError as error:
        raise ValueError(f"{where}: {error}") from None
    return row


def part_in(row: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return a manifest row's offset and duration in seconds; without `offset`, the whole file, as in NeMo."""
    return (0.0, None) if row.get("offset") is None else (row["offset"], row.get("duration"))


def own_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a manifest row that the output row also gets."""
    return {key: value for key, value in row.items() if key not in (*RESULT_KEYS, FAULT) and value is not None}


def usable(utterances: Sequence[Utterance]) -> list[Utterance]:
    """Return the utterances with readable audio and a reference text; log a warning for each other utterance."""
    no_text = "has no `text` in the manifest; error rates need it"
    faults = [utterance.fault or f"{utterance.label} {no_text}" * (utterance.text is None) for utterance in utterances]
    if all(faults):
        raise ValueError(faults[0])
    for fault in filter(None, faults):
        logger.warning("left out: %s", fault)
    return [utterance for utterance, fault in zip(utterances, faults, strict=True) if not fault]


def references_of(utterances: Sequence[Utterance]) -> list[str]:
    """Return the reference text of each utterance that `usable` has returned."""
    return [utterance.text or "" for utterance in utterances]


def _expand(pattern: str) -> list[Path]:
    path = path_of(pattern)
    if path.is_file():
        return [path]
    if path.is_dir() and pattern:
        files = sorted(_files_in(path))
        found = [file for file in files if file.suffix.lower() in AUDIO_SUFFIXES]
        if not found:
            raise ValueError(f"audio={pattern}: no {', '.join(AUDIO_SUFFIXES)} in this folder")
        others = [file.name for file in files if file not in found and not file.name.startswith(".")]
        leave_out(f"audio={pattern}", others, len(found), "files")
        return found
    found = sorted(Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file())
    if not found:
        raise ValueError(f"audio={pattern}: no such file or folder, and no file matches it as a pattern")
    return found


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, links included; warn of unreadable folders."""
    seen = {os.path.realpath(folder)}
    for name, folders, files in os.walk(folder, onerror=lambda error: logger.warning("%s", error), followlinks=True):
        yield from (Path(name) / file for file in files)
        folders[:] = [inner for inner in folders if os.path.realpath(Path(name) / inner) not in seen]
        seen.update(os.path.realpath(Path(name) / inner) for inner in folders)
