"""`python -m tools.compare`: compares transcripts of the same audio word by word on an HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from omegaconf import MISSING

from nemo_gpu_decoding.audio import AudioPart
from nemo_gpu_decoding.checks import check_choice, check_number
from nemo_gpu_decoding.cli.decoding import load_phrase_file, writable_file
from nemo_gpu_decoding.manifest import parse_row, part_in
from nemo_gpu_decoding.metrics import PhraseScore, PhraseWords, phrase_score, rate_name, word_errors
from nemo_gpu_decoding.plain_text import format_table, read_lines
from nemo_gpu_decoding.words import words_of
from tools.compare.collation import Passage, Reading, Transcript, collate, difference

EXAMPLES = (
    "greedy.jsonl beam.jsonl lm.jsonl",
    "greedy.jsonl lm.jsonl manifest=dev.json phrases=names.txt out=page.html",
    "monday/ tuesday/ audio=none",
)
POSITIONAL = "files"
AUDIO = ("auto", "embed", "link", "none")
TYPES = {".wav": "audio/wav", ".flac": "audio/flac", ".mp3": "audio/mpeg", ".m4a": "audio/mp4"}  # others: audio/ogg
MEGABYTE = 10**6


@dataclass
class CompareOptions:
    """Options of `compare`."""

    # Outputs of `transcribe` or of NeMo's scripts: files of JSON lines with audio_filepath and pred_text, or folders
    # with partitions. Give two or more, or one with references. `files=` may be omitted.
    files: list[str] = MISSING
    # Output file: the HTML page.
    out: str = "compare.html"
    # NeMo manifest with references, phrases per utterance, and paths of the audio, for outputs without them.
    manifest: str | None = None
    # Text file of phrases to mark and score, one per line.
    phrases: str | None = None
    # Audio of the page: embed (part of the page), link (files, relative to the page), none, or auto: embed up to
    # embed_mb, otherwise link.
    audio: str = "auto"
    # Maximum megabytes of embedded audio with audio=auto.
    embed_mb: float = 20.0

    def __post_init__(self) -> None:
        check_choice("audio", self.audio, AUDIO)
        check_number("embed_mb", self.embed_mb)
        if not self.files:
            raise ValueError("files is empty, expected outputs of transcribe")


OPTIONS = CompareOptions


class Line(NamedTuple):
    """One line of an output."""

    text: str  # empty if it has an error
    error: str | None
    starts: tuple[float, ...]  # of the words, in seconds, where it has them
    duration: float | None


@dataclass(frozen=True)
class Output:
    """One file or folder to compare."""

    path: Path
    lines: dict[Key, Line]
    seconds: float | None  # processing time, if the output contains it


@dataclass
class Compared:
    """An utterance with its lines of all outputs."""

    name: str
    audio: Path | None
    offset: float  # seconds, of its beginning in `audio`
    duration: float | None
    reference: str | None
    phrases: tuple[str, ...]
    lines: list[Line | None]  # by output; None if it lacks the utterance

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have a text; the totals count only such utterances."""
        return all(line is not None and line.error is None for line in self.lines)


class Key(NamedTuple):
    """Identifies an utterance: its audio, the offset in it, and its number among utterances with both."""

    audio: str
    offset: float  # seconds, of a part of a file
    occurrence: int


@dataclass
class Material:
    """References, phrases and audio of utterances, collected from outputs and manifest."""

    folders: tuple[Path, ...]  # where audio files are looked for
    names: dict[Key, str] = field(default_factory=dict)
    references: dict[Key, str] = field(default_factory=dict)
    phrases: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    audio: dict[Key, Path] = field(default_factory=dict)

    def read(self, path: Path) -> Iterator[tuple[Key, dict[str, Any], str]]:
        """The rows of a file of JSON lines; their references, phrases and audio are collected.

        Raises:
            ValueError: a line is invalid, or its reference differs from that of another file.
        """
        seen: Counter[tuple[str, float]] = Counter()
        for number, text in enumerate(read_lines(path), 1):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            row = parse_row(text, where)
            name = row["audio_filepath"]
            candidates = [folder / name for folder in (path.parent, *self.folders)]
            found = next((file for file in candidates if os.path.isfile(file)), None)
            audio = str(found.resolve() if found else name), part_in(row)[0]
            key = Key(*audio, seen[audio])
            seen[audio] += 1
            self.names.setdefault(key, f"{name}{AudioPart(Path(name), key.offset).place}")
            if found:
                self.audio[key] = found
            reference = row.get("text")
            if reference is not None and self.references.setdefault(key, reference) != reference:
                raise ValueError(f"{where}: text is {reference!r}, elsewhere {self.references[key]!r}")
            if row.get("phrases") is not None:
                self.phrases[key] = tuple(row["phrases"])
            yield key, row, where


def run(options: CompareOptions) -> int:
    """Write the page; the table of totals goes to stdout."""
    target = writable_file("out", options.out)
    phrases = load_phrase_file(options.phrases)
    folders = [Path.cwd()]
    if options.manifest is not None:
        if not Path(options.manifest).is_file():
            raise ValueError(f"manifest={options.manifest} is no file here")
        folders.insert(0, Path(options.manifest).absolute().parent)
    material = Material(tuple(folders))
    if options.manifest is not None:
        for _ in material.read(Path(options.manifest)):
            pass
    outputs = [read_output(Path(file).expanduser(), material) for file in options.files]
    if len(outputs) < 2 and not material.references:
        raise ValueError(f"files holds {len(outputs)} output without references, expected two or more")
    utterances = put_together(outputs, material, phrases)
    labels = labels_of([output.path for output in outputs])
    rows = [totals(utterances, number, outputs[number]) for number in range(len(outputs))]
    print(table(labels, rows))
    note_incomplete(utterances)
    data = {
        "outputs": [{"name": label, **row} for label, row in zip(labels, rows, strict=True)],
        "utterances": [described(utterance) for utterance in utterances],
    }
    for own, source in zip(data["utterances"], audio_sources(utterances, options, target), strict=True):
        own["audio"] = source
    target.write_text(page(data), encoding="utf-8", errors="replace")
    print(f"{len(utterances)} utterances side by side: {target}")
    return 0


# ------------------------------------------------------------------------------------------------ reading


def read_output(path: Path, material: Material) -> Output:
    """The lines of a file, or of a folder's partitions, by utterance.

    Raises:
        ValueError: there is no such output, or a line has neither pred_text nor error.
    """
    parts = sorted(path.glob("part-*.jsonl")) if path.is_dir() else [path]
    if not parts or not parts[0].is_file():
        raise ValueError(f"files: {path} is neither a file nor a folder with part-*.jsonl")
    lines: dict[Key, Line] = {}
    seconds: list[float] = []
    for part in parts:
        for key, row, where in material.read(part):
            text, error = row.get("pred_text"), row.get("error")
            if not isinstance(text, str) and not isinstance(error, str):
                raise ValueError(f"{where}: has no pred_text, expected an output of transcribe")
            lines[key] = Line(text or "", None if text is not None else error, _starts(row), _number(row, "duration"))
            seconds += [s for s in [_number(row, "seconds")] if s is not None]
        marker = part.with_suffix(".done")
        if marker.is_file():
            seconds.append(float(json.loads(marker.read_bytes())["work"]))
    if not lines:
        raise ValueError(f"files: {path} has no lines")
    return Output(path, lines, sum(seconds) if seconds else None)


def _starts(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Start times of the words, if all words have one."""
    words = row.get("words")
    if not isinstance(words, list) or not all(isinstance(w, dict) and _number(w, "start") is not None for w in words):
        return ()
    texts = [word.get("word") for word in words]
    return tuple(float(word["start"]) for word in words) if texts == words_of(str(row.get("pred_text"))) else ()


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def put_together(outputs: Sequence[Output], material: Material, phrases: Sequence[str]) -> list[Compared]:
    """The utterances of all outputs, in the order of their first occurrence."""
    keys = dict.fromkeys(key for output in outputs for key in output.lines)
    found = []
    for key in keys:
        lines = [output.lines.get(key) for output in outputs]
        durations = [line.duration for line in lines if line is not None and line.duration is not None]
        found.append(
            Compared(
                material.names[key],
                material.audio.get(key),
                key.offset,
                durations[0] if durations else None,
                material.references.get(key),
                material.phrases.get(key, tuple(phrases)),
                lines,
            )
        )
    return found


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Distinct labels of the outputs: the names, with as many parent folders as needed."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = [str(Path(*path.parts[-length:]).with_suffix("")) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path}, {number}" for number, path in enumerate(paths, 1)]


def note_incomplete(utterances: Sequence[Compared]) -> None:
    left_out = sum(not utterance.is_complete for utterance in utterances)
    if left_out:
        print(f"{left_out} utterances that an output lacks or has no text for: not in the totals", file=sys.stderr)
    unscored = sum(utterance.is_complete and utterance.reference is None for utterance in utterances)
    if 0 < unscored < len(utterances):
        print(f"{unscored} utterances without a reference: not in the totals", file=sys.stderr)


# ------------------------------------------------------------------------------------------------ scores


def totals(utterances: Sequence[Compared], number: int, output: Output) -> dict[str, Any]:
    """WER, phrase scores and times of one output, over the utterances of all outputs."""
    pairs = [
        (utterance.reference, line.text, utterance.phrases)
        for utterance in utterances
        if utterance.is_complete and utterance.reference is not None and (line := utterance.lines[number]) is not None
    ]
    audio = sum(line.duration or 0.0 for line in output.lines.values())
    row: dict[str, Any] = {"utterances": len(output.lines), "errors": None, "phrases": None, "seconds": output.seconds}
    row["rtfx"] = audio / output.seconds if output.seconds and audio else None
    if pairs:
        errors = word_errors([reference for reference, _, _ in pairs], [text for _, text, _ in pairs])
        rate = rate_name(reference for reference, _, _ in pairs)
        row["errors"] = {**vars(errors), "rate": rate, "wer": errors.wer if errors.words else None}
    if any(own for _, _, own in pairs):
        parts = [
            phrase_score([r for r, _, p in pairs if p == own], [t for _, t, p in pairs if p == own], own)
            for own in dict.fromkeys(own for _, _, own in pairs)
        ]
        counts = zip(*((p.true_positives, p.false_positives, p.false_negatives) for p in parts), strict=True)
        score = PhraseScore(*map(sum, counts))
        row["phrases"] = {"precision": score.precision, "recall": score.recall, "fscore": score.fscore}
    return row


def table(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["output", "utterances"]
    scored = [row["errors"] for row in rows if row["errors"] is not None]
    header += [f"{scored[0]['rate']} %", "sub", "del", "ins"] if scored else []
    header += ["precision", "recall", "F-score"] * any(row["phrases"] is not None for row in rows)
    header += ["seconds", "RTFx"] * any(row["seconds"] is not None for row in rows)
    cells: list[list[Any]] = []
    for label, row in zip(labels, rows, strict=True):
        line: list[Any] = [label, row["utterances"]]
        if errors := row["errors"]:
            line += [_shown(errors["wer"], 100), errors["substitutions"], errors["deletions"], errors["insertions"]]
        if phrases := row["phrases"]:
            line += [f"{phrases[name]:.3f}" for name in ("precision", "recall", "fscore")]
        if "RTFx" in header:
            line += [_shown(row["seconds"]), _shown(row["rtfx"])]
        cells.append(line)
    return format_table(header, cells)


def _shown(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else f"{factor * value:.2f}"


# ------------------------------------------------------------------------------------------------ the page


def described(utterance: Compared) -> dict[str, Any]:
    """The page's data of an utterance; its passages contain the outputs with a text."""
    wanted = PhraseWords.of(utterance.phrases)
    present = [n for n, line in enumerate(utterance.lines) if line is not None and line.error is None]
    texts = [_transcript(line.text, wanted, line.starts) for n in present if (line := utterance.lines[n]) is not None]
    reference = None if utterance.reference is None else _transcript(utterance.reference, wanted)
    passages = collate(reference, texts) if texts else []
    errors: list[int | None] = [None] * len(utterance.lines)
    if utterance.reference is not None:
        for number in present:
            line = utterance.lines[number]
            errors[number] = None if line is None else word_errors([utterance.reference], [line.text]).total
    return {
        "name": utterance.name,
        "offset": utterance.offset,
        "duration": utterance.duration,
        "errors": errors,
        "faults": [
            "not in this output" if line is None else line.error for line in utterance.lines
        ],
        "difference": difference(passages, len(texts)),
        "phrases": any(mark.in_phrase for p in passages for reading in p.readings for mark in reading.words),
        "passages": [_passage(passage, present) for passage in passages],
    }  # fmt: skip


def _transcript(text: str, wanted: PhraseWords, starts: Sequence[float] = ()) -> Transcript:
    words = words_of(text)
    return Transcript(words, wanted.covered(words), starts)


def _passage(passage: Passage, present: Sequence[int]) -> list[Any]:
    """[start, [[outputs, [[word, kind, is in a phrase], ...]], ...]]; outputs are -1 for the reference, 0, 1, ..."""

    def one(reading: Reading) -> list[Any]:
        numbers = [number if number < 0 else present[number] for number in reading.transcripts]
        return [numbers, [[mark.text, mark.kind, int(mark.in_phrase)] for mark in reading.words]]

    return [passage.start, [one(reading) for reading in passage.readings]]


def audio_sources(utterances: Sequence[Compared], options: CompareOptions, target: Path) -> list[str | None]:
    """Audio sources for the page's player: a data URI or a link relative to the page, per utterance."""
    if options.audio == "none":
        return [None] * len(utterances)
    missing = sum(utterance.audio is None for utterance in utterances)
    if missing:
        print(f"{missing} utterances cannot be played: their audio files are not here", file=sys.stderr)
    files = {utterance.audio for utterance in utterances if utterance.audio is not None}
    is_embedded = options.audio == "embed" or (
        options.audio == "auto" and sum(file.stat().st_size for file in files) <= options.embed_mb * MEGABYTE
    )
    make = _data_uri if is_embedded else lambda file: _link(file, target)
    return [None if utterance.audio is None else make(utterance.audio) for utterance in utterances]


def _data_uri(file: Path) -> str:
    kind = TYPES.get(file.suffix.lower(), "audio/ogg")
    return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def _link(file: Path, target: Path) -> str:
    return quote(Path(os.path.relpath(file.resolve(), target.resolve().parent)).as_posix())


def page(data: Mapping[str, Any]) -> str:
    """The page with its data; the data is escaped, so that only the page's own script runs."""
    template = Path(__file__).with_name("compare.html").read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", template, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    hashes = [
        "sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)
    ]
    rules = f"default-src 'none'; style-src '{hashes[0]}'; script-src '{hashes[1]}'; media-src data: file: 'self'; "
    rules += "base-uri 'none'; form-action 'none'"
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{rules}}", rules).replace("{{data}}", text)
