"""Rows of transcripts, one per utterance, and files of them: JSON lines or Parquet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.manifest import RESULT_KEYS, Utterance
from nemo_gpu_decoding.metrics import oracle_text, word_errors

if TYPE_CHECKING:
    from nemo_gpu_decoding.nemo_plugin.model import Transcript

FORMATS = ("jsonl", "parquet")


def json_row(utterance: Utterance, transcript: Transcript, oracle: str | None) -> dict[str, Any]:
    """The output row of an utterance, with the other fields of its manifest row."""
    row: dict[str, Any] = {"audio_filepath": utterance.name, "duration": round(utterance.duration, 3)}
    row |= {**utterance.fields, "pred_text": transcript.text, **details_of(transcript)}
    if utterance.text is not None:
        row["text"] = utterance.text
        row["wer"] = round(word_errors([utterance.text], [transcript.text]).wer, 4)
        if oracle is not None:
            row["oracle_wer"] = round(word_errors([utterance.text], [oracle]).wer, 4)
    return row


def details_of(transcript: Transcript) -> dict[str, Any]:
    """Fields of a row besides the text: score, and n_best and words if the options select them."""
    details: dict[str, Any] = {"score": transcript.score}
    if transcript.n_best:
        details["n_best"] = [{"text": text, "score": score} for text, score in transcript.n_best]
    if transcript.words:
        details["words"] = [word._asdict() for word in transcript.words]
    return details


def error_row(utterance: Utterance, error: str) -> dict[str, Any]:
    """The output row of an utterance without a transcript."""
    row: dict[str, Any] = {"audio_filepath": utterance.name, "duration": round(utterance.duration, 3)}
    row |= utterance.fields
    if utterance.text is not None:
        row["text"] = utterance.text
    return {**row, "error": error}


def oracle_of(reference: str | None, transcript: Transcript) -> str | None:
    """The text of the lattice, or of the n-best list, with the fewest word errors; None without alternatives."""
    if reference is None or (transcript.lattice is None and not transcript.n_best):
        return None
    if transcript.lattice is not None:
        return transcript.lattice.oracle(reference)
    return oracle_text(reference, [text for text, _ in transcript.n_best])


def file_of(rows: Sequence[dict[str, Any]], out_format: str) -> bytes:
    """The content of a file of rows.

    All Parquet files have the same schema; missing values are null. The user's own fields of the manifest are in one
    column, `fields`, as JSON.
    """
    if out_format == "jsonl":
        return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    import pyarrow as pa
    from pyarrow import parquet

    text, number = pa.string(), pa.float64()
    n_best = pa.struct([("text", text), ("score", number)])
    word = pa.struct([("word", text), ("start", number), ("end", number), ("confidence", number)])
    columns = {
        **{"audio_filepath": text, "duration": number, "pred_text": text, "score": number},
        **{"n_best": pa.list_(n_best), "words": pa.list_(word)},
        **{"text": text, "wer": number, "oracle_wer": number, "error": text, "manifest": text, "line": pa.int64()},
        "fields": text,
    }
    sink = BytesIO()
    table = pa.Table.from_pylist([_with_fields(row) for row in rows], pa.schema(columns))
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def _with_fields(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose fields without a column are moved to `fields`, as JSON."""
    known = {key: value for key, value in row.items() if key in RESULT_KEYS}
    others = {key: value for key, value in row.items() if key not in known}
    return {**known, "fields": json.dumps(others, ensure_ascii=False)} if others else known


def check_format(out_format: str) -> None:
    """Raise an ImportError if the library for this format is not installed."""
    if out_format == "parquet":
        require("pyarrow")
