"""Define the transcript of an utterance or recording, convert it to JSON rows, and add up error counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_gpu_decoding.metrics import WordErrors, rate_name, word_errors
from nemo_gpu_decoding.search.result import FoundPhrase, Place, WordOption, places_as_json

if TYPE_CHECKING:
    from nemo_gpu_decoding.manifest import Utterance
    from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice


_SHOWN = 300  # maximum number of characters of an error


class Word(NamedTuple):
    """A word of a transcript, with NeMo's field names. Times are in seconds since the audio began."""

    word: str
    start: float
    end: float
    raw_confidence: float | None = None  # NeMo's, in [0, 1], without a `confidence_map`: no probability
    pieces: tuple[Word, ...] = ()  # of a word that is too long for a line of subtitles: its tokens
    confidence: float | None = None  # with a `confidence_map`: the probability that the word is right

    @property
    def ranked(self) -> float | None:
        """Return the mapped confidence if there is one, else NeMo's raw confidence, else None."""
        return self.raw_confidence if self.confidence is None else self.confidence

    def shown(self) -> dict[str, Any]:
        """Return text, times and confidence of the word as a JSON object, without its pieces."""
        values = {"confidence": self.confidence, "raw_confidence": self.raw_confidence}
        shown = {name: round(value, 4) for name, value in values.items() if value is not None}
        return {"word": self.word, "start": self.start, "end": self.end, **shown}

    def later(self, seconds: float) -> Word:
        """Return a copy of this word with times that are `seconds` later."""
        start, end = round(self.start + seconds, 3), round(self.end + seconds, 3)
        return self._replace(start=start, end=end, pieces=tuple(piece.later(seconds) for piece in self.pieces))


class Alternative(NamedTuple):
    """One hypothesis of an n-best list, as text and score."""

    text: str
    score: float  # natural log, as `Path.score`


class BoostedPhrase(NamedTuple):
    """A boosted phrase that occurs in a transcript, with the evidence for it in the log-probs."""

    phrase: str  # as in the list of phrases
    evidence: float  # smallest posterior of its tokens, 0 .. 1


class Segment(NamedTuple):
    """The part of a long recording between two cuts, with its transcript. Times are in seconds."""

    start: float
    end: float
    text: str = ""
    score: float | None = None
    n_best: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The result of decoding one utterance, or the partial result so far of a live utterance."""

    text: str
    score: float | None = None  # natural log, as the strategy defines it; None: of a stream, or without segments
    words: tuple[Word, ...] = ()  # with timestamps
    n_best: tuple[Alternative, ...] = ()  # best first, for n-best lists
    lattice: Lattice | None = None  # of a word graph, with decoding_mode lattice
    error: str = ""  # why the audio, or a part of a long recording, could not be decoded; "": decoded
    segments: tuple[Segment, ...] = ()  # of a long recording
    outside_share: float | None = None  # of tokens that are not allowed, 0 .. 1; None: all tokens are
    in_grammar: bool | None = None  # False: no sentence of the grammar fits; None: no grammar
    alternatives: tuple[Place, ...] = ()  # with timestamps: the confusion network of n-best lists and lattices
    phrases: tuple[BoostedPhrase, ...] = ()  # boosted ones in the text, in their order
    committed: str = ""  # of a partial transcript of a stream: the beginning of `text` that will not change
    is_joined: bool = False  # of a stream: the text continues the last word of the previous transcript

    def later(self, seconds: float) -> Transcript:
        """Return a copy of this transcript in which words and alternatives are `seconds` later."""
        times = [(round(place.start + seconds, 3), round(place.end + seconds, 3)) for place in self.alternatives]
        pairs = zip(self.alternatives, times, strict=True)
        places = tuple(place._replace(start=start, end=end) for place, (start, end) in pairs)
        return replace(self, words=tuple(word.later(seconds) for word in self.words), alternatives=places)


def boosted_phrases(phrases: Iterable[FoundPhrase]) -> tuple[BoostedPhrase, ...]:
    """Return the boosted phrases of a hypothesis, with their evidence rounded to four digits."""
    return tuple(BoostedPhrase(phrase.text, float(f"{phrase.evidence:.4g}")) for phrase in phrases)


def error_of(transcript: Transcript | str) -> str:
    """Return the error of a transcript; an error message in place of a transcript is the error itself."""
    return transcript if isinstance(transcript, str) else transcript.error


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 1:02:03.450."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 3600000}:{milliseconds // 60000 % 60:02}:{milliseconds / 1000 % 60:06.3f}"


def one_line(error: Exception) -> str:
    """Return the first line of an error's message, for the field `error` of an output row."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ValueError) else f"{type(error).__name__}: {lines[0]}"
    return text[:_SHOWN]


def as_json(value: Any) -> dict[str, Any]:
    """Return the fields of a transcript without its lattice, for `json.dumps(default=...)`."""
    if isinstance(value, Transcript):
        return {**vars(value), "lattice": None}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def of_json(row: Mapping[str, Any]) -> Transcript:
    """Return the transcript that `as_json` converted to this JSON object, for `json.loads(object_hook=...)`."""
    places = tuple(
        Place(index, start, end, tuple(WordOption(*option) for option in options))
        for index, start, end, options in row["alternatives"]
    )
    kinds: dict[str, Any] = {"n_best": Alternative, "phrases": BoostedPhrase}
    lists = {name: tuple(kind(*item) for item in row[name]) for name, kind in kinds.items()}
    return Transcript(**{**row, **lists, "words": _words(row["words"]), "segments": (), "alternatives": places})


def _words(rows: Iterable[Sequence[Any]]) -> tuple[Word, ...]:
    return tuple(Word(*row[:4], *map(_words, row[4:5]), *row[5:]) for row in rows)


@dataclass
class Totals:
    """The sums over the utterances of one partition, as its marker file contains them. Times are in seconds."""

    number: int = 0
    shard: int = 0
    rows: int = 0
    audio: float = 0.0  # of utterances that were decoded
    work: float = 0.0
    errors: int = 0
    last_error: str = ""
    scored: int = 0  # utterances with a reference
    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    by_characters: int = 0  # of `scored`, in scripts without spaces

    @property
    def word_errors(self) -> WordErrors:
        return WordErrors(self.words, self.substitutions, self.deletions, self.insertions)

    @property
    def rate_name(self) -> str:
        """Return "WER", "CER" or "WER/CER" for the references of this partition, as `metrics.rate_name` does."""
        return "WER" if not self.by_characters else "CER" if self.by_characters == self.scored else "WER/CER"

    def count(self, errors: WordErrors) -> None:
        """Add the word errors of one utterance that has a reference to the sums."""
        self.scored += 1
        for name, value in vars(errors).items():
            setattr(self, name, getattr(self, name) + value)


def row_of(utterance: Utterance, transcript: Transcript | str, totals: Totals) -> dict[str, Any]:
    """Return the output row of an utterance with the fields of its manifest row, and add its counts to `totals`.

    Args:
        transcript: transcript of the utterance, or the reason why it has none.
    """
    row = {"audio_filepath": utterance.name, "duration": round(utterance.duration, 3), **utterance.fields}
    text = {} if utterance.text is None else {"text": utterance.text}
    details: dict[str, Any] = {}
    if isinstance(transcript, Transcript):
        details = {"pred_text": transcript.text, "score": transcript.score, **details_of(transcript)}
    totals.rows += 1
    if isinstance(transcript, str) or transcript.error:  # a transcript with gaps is not scored
        totals.errors, totals.last_error = totals.errors + 1, error_of(transcript)
        return {**row, **text, **details, "error": totals.last_error}
    totals.audio = round(totals.audio + utterance.duration, 3)
    row |= details
    if utterance.text is not None:
        errors = word_errors([utterance.text], [transcript.text])
        totals.count(errors)
        name = rate_name([utterance.text]).lower()
        totals.by_characters += name == "cer"
        # without words in the reference the rate is infinite, which JSON cannot express
        row |= {**text, name: round(errors.wer, 4) if math.isfinite(errors.wer) else None}
    return row


def details_of(transcript: Transcript) -> dict[str, Any]:
    """Return the fields of a transcript other than text and score, for output rows and messages of the server."""
    share = transcript.outside_share
    details = {
        "outside_share": None if share is None else round(share, 4),
        "in_grammar": transcript.in_grammar,
        "found_phrases": [phrase._asdict() for phrase in transcript.phrases],
        "n_best": _listed(transcript.n_best),
        "words": [word.shown() for word in transcript.words],
        "word_alternatives": places_as_json(transcript.alternatives),
        "segments": [{**segment._asdict(), "n_best": _listed(segment.n_best)} for segment in transcript.segments],
        "is_joined": transcript.is_joined or None,
    }
    return {name: value for name, value in details.items() if value is not None and value != []}


def _listed(n_best: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"text": text, "score": score} for text, score in n_best]
