"""The transcript of an utterance or of a long recording, and the log of decoded segments.

With the log, an interrupted run continues within a long recording. It is a file of JSON lines. A line has the key of a
recording and its plan; or its key, the transcripts of a batch of segments, and the number of segments before them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_gpu_decoding.audio import AudioSource, part_of
from nemo_gpu_decoding.cache import file_key
from nemo_gpu_decoding.live.interface import BoostedPhrase, Word
from nemo_gpu_decoding.search.result import Place, WordOption

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.result import FoundPhrase
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice


class Segment(NamedTuple):
    """The part of a long recording between two cuts, with its transcript. Times are in seconds."""

    start: float
    end: float
    text: str = ""
    score: float | None = None
    n_best: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The result of a strategy for one utterance."""

    text: str
    score: float | None  # natural log, as the strategy defines it
    words: tuple[Word, ...] = ()  # with timestamps
    n_best: tuple[tuple[str, float], ...] = ()  # (text, score), best first, for n-best lists
    lattice: Lattice | None = None  # of a word graph, with decoding_mode lattice
    error: str = ""  # why the audio, or a part of a long recording, could not be decoded; "": decoded
    segments: tuple[Segment, ...] = ()  # of a long recording
    outside_share: float | None = None  # of tokens that are not allowed, 0 .. 1; None: all tokens are
    in_grammar: bool | None = None  # False: no sentence of the grammar fits; None: no grammar
    alternatives: tuple[Place, ...] = ()  # with timestamps: the confusion network of n-best lists and lattices
    phrases: tuple[BoostedPhrase, ...] = ()  # boosted ones in the text, in their order


def boosted_phrases(phrases: Iterable[FoundPhrase]) -> tuple[BoostedPhrase, ...]:
    """The phrases of a hypothesis for output."""
    return tuple(BoostedPhrase(phrase.text, float(f"{phrase.probability:.4g}")) for phrase in phrases)


_FIELDS = ("text", "score", "words", "n_best", "error", "alternatives", "phrases")  # of segments


class SegmentLog:
    """The segments of a run that are decoded.

    Args:
        file: created with the first recording.
        run: all that the transcripts depend on, besides the recording; values of JSON.
    """

    def __init__(self, file: Path, run: Any) -> None:
        self.file, self._run = file, json.dumps(run, sort_keys=True)
        self._plans: dict[str, dict[str, Any]] = {}
        self._transcripts: dict[str, list[Transcript | str]] = {}
        self._count: dict[str, int] = {}  # segments of a recording that are decoded
        if not file.is_file():
            return
        whole = 0
        with file.open("rb") as lines:
            for line in lines:
                try:
                    self._read(json.loads(line if line.endswith(b"\n") else b""))
                except (ValueError, KeyError, TypeError, AttributeError):  # the run ended while it wrote the line
                    break
                whole += len(line)
        os.truncate(file, whole)

    def _read(self, row: dict[str, Any]) -> None:
        key = row["recording"]
        if "plan" in row:
            self._plans[key], self._transcripts[key] = row["plan"], []
        elif row["first"] > len(self._transcripts[key]):
            raise ValueError("another run has written to the log")
        else:
            self._transcripts[key][row["first"] :] = map(_of_json, row["found"])

    def key(self, recording: AudioSource, request: Any = None) -> str:
        """The key of a recording: another one if the file, its part, its request or the run differs."""
        part = part_of(recording)
        content = repr((self._run, file_key(part.path), request, *(() if part.is_whole else part[1:])))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def plan(self, key: str) -> dict[str, Any] | None:
        """The plan that `begin` was given in an interrupted run."""
        return self._plans.get(key)

    def transcripts(self, key: str, segments: int, batch_size: int) -> list[Transcript | str]:
        """Transcripts or error messages of all segments, or of the first batches, from an interrupted run.

        Sums of floats depend on the batch, so the batches are those of a run that is not interrupted.
        """
        transcripts = self._transcripts.get(key, [])
        if len(transcripts) < segments:
            transcripts = transcripts[: len(transcripts) // batch_size * batch_size]
        self._count[key] = len(transcripts)
        return transcripts

    def begin(self, key: str, plan: dict[str, Any]) -> None:
        """Add a recording with its plan."""
        self._write({"recording": key, "plan": plan})

    def add(self, key: str, transcripts: Sequence[Transcript | str]) -> None:
        """Add the transcripts or error messages of the next segments."""
        self._write({"recording": key, "first": self._count[key], "found": list(map(_as_json, transcripts))})
        self._count[key] += len(transcripts)

    def _write(self, row: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as sink:
            sink.write(json.dumps(row, ensure_ascii=False) + "\n")

    def remove(self) -> None:
        """Remove the file: the run is complete."""
        self.file.unlink(missing_ok=True)


def _as_json(transcript: Transcript | str) -> dict[str, Any] | str:
    return transcript if isinstance(transcript, str) else {name: getattr(transcript, name) for name in _FIELDS}


def _words(rows: Iterable[Sequence[Any]]) -> tuple[Word, ...]:
    return tuple(Word(*row[:4], *map(_words, row[4:])) for row in rows)


def _of_json(row: dict[str, Any] | str) -> Transcript | str:
    if isinstance(row, str):
        return row
    places = (
        Place(index, start, end, tuple(WordOption(*option) for option in options))
        for index, start, end, options in row["alternatives"]
    )
    return Transcript(
        text=row["text"],
        score=row["score"],
        words=_words(row["words"]),
        n_best=tuple((text, score) for text, score in row["n_best"]),
        error=row["error"],
        alternatives=tuple(places),
        phrases=tuple(BoostedPhrase(*phrase) for phrase in row["phrases"]),
    )
