"""Rows of transcripts, one per utterance, with their totals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.manifest import Utterance
from nemo_gpu_decoding.metrics import WordErrors, oracle_text, word_errors
from nemo_gpu_decoding.search.result import places_as_json

if TYPE_CHECKING:
    from nemo_gpu_decoding.live.recognizer import Word
    from nemo_gpu_decoding.nemo_plugin.transcript import Transcript


@dataclass
class Totals:
    """The content of a marker: totals of its partition. Times are in seconds."""

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
    with_oracle: int = 0
    oracle_errors: int = 0
    slowest: tuple[tuple[float, str], ...] = ()  # seconds of work per second of audio, and the file

    @property
    def word_errors(self) -> WordErrors:
        return WordErrors(self.words, self.substitutions, self.deletions, self.insertions)

    @property
    def oracle_wer(self) -> float | None:
        """The lowest WER of the alternatives; None if an utterance with a reference has none."""
        has_oracle = self.scored and self.with_oracle == self.scored
        return self.oracle_errors / max(self.words, 1) if has_oracle else None

    def count(self, errors: WordErrors, oracle: WordErrors | None) -> None:
        """Add the word errors of an utterance with a reference, and those of its best alternative."""
        self.scored += 1
        for name, value in vars(errors).items():
            setattr(self, name, getattr(self, name) + value)
        if oracle is not None:
            self.with_oracle += 1
            self.oracle_errors += oracle.total


def row_of(utterance: Utterance, transcript: Transcript | str, totals: Totals) -> dict[str, Any]:
    """The output row of an utterance, with the other fields of its manifest row; also adds it to `totals`.

    Args:
        transcript: of the utterance, or the reason why it has none.
    """
    row: dict[str, Any] = {"audio_filepath": utterance.name, "duration": round(utterance.duration, 3)}
    row |= utterance.fields
    totals.rows += 1
    text = {} if utterance.text is None else {"text": utterance.text}
    if isinstance(transcript, str):
        totals.errors, totals.last_error = totals.errors + 1, transcript
        return {**row, **text, "error": transcript}
    if transcript.error:  # of a part of a long recording; a transcript with gaps is not scored
        totals.errors, totals.last_error = totals.errors + 1, transcript.error
        return {**row, **text, "pred_text": transcript.text, **details_of(transcript), "error": transcript.error}
    totals.audio = round(totals.audio + utterance.duration, 3)
    row |= {"pred_text": transcript.text, **details_of(transcript)}
    if utterance.text is not None:
        best = oracle_of(utterance.text, transcript)
        errors = word_errors([utterance.text], [transcript.text])
        oracle = None if best is None else word_errors([utterance.text], [best])
        totals.count(errors, oracle)
        row |= {**text, "wer": _rate(errors)}
        row |= {} if oracle is None else {"oracle_wer": _rate(oracle)}
    return row


def _rate(errors: WordErrors) -> float | None:
    """The word error rate for a row; None if it is infinite, because JSON has no such number."""
    return round(errors.wer, 4) if math.isfinite(errors.wer) else None


def details_of(transcript: Transcript) -> dict[str, Any]:
    """Fields of a row besides the text: the score, and those that the options select."""
    details: dict[str, Any] = {"score": transcript.score}
    if transcript.outside_share is not None:
        details["outside_share"] = round(transcript.outside_share, 4)
    if transcript.in_grammar is not None:
        details["in_grammar"] = transcript.in_grammar
    if transcript.phrases:
        details["found_phrases"] = [phrase._asdict() for phrase in transcript.phrases]
    if transcript.n_best:
        details["n_best"] = [{"text": text, "score": score} for text, score in transcript.n_best]
    if transcript.words:
        details["words"] = [_as_row(word) for word in transcript.words]
    if transcript.alternatives:
        details["word_alternatives"] = places_as_json(transcript.alternatives)
    if transcript.segments:
        details["segments"] = [
            {**segment._asdict(), "n_best": [{"text": text, "score": score} for text, score in segment.n_best]}
            for segment in transcript.segments
        ]
    return details


def _as_row(word: Word) -> dict[str, Any]:
    rounded = None if word.confidence is None else round(word.confidence, 4)
    return word._replace(confidence=rounded)._asdict()


def oracle_of(reference: str, transcript: Transcript) -> str | None:
    """The text of the lattice, or of the n-best list, with the fewest word errors; None without alternatives."""
    if transcript.lattice is None and not transcript.n_best:
        return None
    return oracle_text(reference, [text for text, _ in transcript.n_best], transcript.lattice)
