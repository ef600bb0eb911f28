"""Recordings through OpenAI's endpoint, POST /v1/audio/transcriptions; each is a stream of the batcher.

A form has the fields of OpenAI's API, and those of a stream's first message (`session.Start`):

    file                       the recording, in a format of libsndfile
    model                      any; the server has one
    response_format            json, text, verbose_json, srt or vtt
    timestamp_granularities    of verbose_json: segment, word; segments are utterances
    phrases, or keywords       boosted as `phrases` of a stream
    boosting_weight, language, end_silence, n_best
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from nemo_gpu_decoding.checks import FieldError, check_choice
from nemo_gpu_decoding.live.batcher import Batcher, ServerFullError
from nemo_gpu_decoding.live.interface import Limits, Word
from nemo_gpu_decoding.live.session import Session, Start, checked_start, read_json
from nemo_gpu_decoding.live.subtitles import subtitles

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
GRANULARITIES = ("segment", "word")
OWN_FIELDS = ("file", "model", "response_format", "timestamp_granularities", "temperature", "prompt", "stream")
LISTS = ("phrases", "keywords", "timestamp_granularities")  # may have "[]" at the end of their names
# values of fields that only name the default; others are refused
ONLY = {"temperature": ("0", "0.0"), "prompt": ("",), "stream": ("false", "False")}
BLOCK_SECONDS = 0.5  # read from the file at once
LINE_PAUSE = 0.6  # seconds; a pause of so many ends a line of subtitles


class Upload(NamedTuple):
    """The form of a client."""

    file: UploadFile
    options: dict[str, Any]  # of `Start`
    response_format: str = "json"
    granularities: tuple[str, ...] = ("segment",)


class Stopped(Exception):  # noqa: N818
    """The server stopped before the recording was decoded."""


async def answer(request: Request, batcher: Batcher) -> tuple[str, Response]:
    """Decode the recording of a request.

    Returns:
        The outcome for the metrics, as of a stream, and the response.
    """
    try:
        if batcher.is_full:
            raise ServerFullError
        async with _timely(request, batcher.limits).form(
            max_files=1, max_fields=batcher.limits.max_phrases + 20
        ) as form:
            upload = _read(form, batcher.limits)
            return "end", await _transcribed(request, batcher, upload)
    except ServerFullError:
        return "streams", failure(503, f"no more than {batcher.limits.max_streams} streams are served at a time")
    except Stopped:
        return "restart", failure(503, "the server stops")
    except ClientDisconnect:
        return "disconnect", Response(status_code=499)
    except asyncio.TimeoutError:
        return "idle_seconds", failure(408, f"nothing arrived for {batcher.limits.idle_seconds:g} seconds")
    except ValueError as error:
        field = getattr(error, "field", "message")
        return field, failure(400, str(error), field)


def failure(status: int, message: str, field: str | None = None) -> Response:
    """An error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": None}}, status)


def _timely(request: Request, limits: Limits) -> Request:
    """The request, with a limit of its size and of the time between two messages.

    Raises:
        FieldError: the size is not known, or too large.
    """
    size = request.headers.get("content-length", "")
    if not size.isdigit() or int(size) > limits.max_upload_bytes:
        raise FieldError("file", f"{size or 'an unknown number of'} bytes", f"at most {limits.max_upload_bytes} bytes")

    async def receive() -> Any:
        return await asyncio.wait_for(request.receive(), limits.idle_seconds)

    return Request(request.scope, receive)


# ------------------------------------------------------------------------------------------ the form


def _read(form: FormData, limits: Limits) -> Upload:
    """The fields of a form.

    Raises:
        FieldError: names the wrong field.
    """
    fields: dict[str, list[Any]] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]") if key.removesuffix("[]") in LISTS else key
        fields.setdefault(name, []).append(value)
    known = (*OWN_FIELDS, "keywords", *(key for key in Start._fields if key not in ("sample_rate", "partials")))
    for name, values in fields.items():
        if name not in known:
            raise FieldError(name[:80], str(values[0])[:80], f"none; the fields are {', '.join(known)}")
        if name in ONLY and values[-1] not in ONLY[name]:
            raise FieldError(name, values[-1][:80], f"{ONLY[name][0] or 'none'}: the server has no other")
    file = fields.pop("file", [None])[-1]
    if not isinstance(file, UploadFile):
        raise FieldError("file", file, "a recording")
    response_format = fields.pop("response_format", ["json"])[-1]
    check_choice("response_format", response_format, FORMATS)
    granularities = tuple(fields.pop("timestamp_granularities", ["segment"]))
    for granularity in granularities:
        check_choice("timestamp_granularities", granularity, GRANULARITIES)
    phrases = [*fields.pop("phrases", []), *fields.pop("keywords", [])]
    if len(phrases) == 1 and isinstance(listed := read_json(phrases[0]), list):
        phrases = listed
    options = {key: _value(key, values[-1]) for key, values in fields.items() if key not in OWN_FIELDS}
    options = options | ({"phrases": phrases} if phrases else {})
    checked_start(options, limits)  # before the recording is read
    return Upload(file, options, response_format, granularities)


def _value(key: str, text: str) -> Any:
    """A field as its JSON value; texts need no quotes."""
    value = None if key == "language" else read_json(text)
    return text if value is None else value


# ---------------------------------------------------------------------------------------- the stream


async def _transcribed(request: Request, batcher: Batcher, upload: Upload) -> Response:
    """The response for a recording, which is decoded as a stream."""
    sound = await asyncio.to_thread(_opened, upload.file.file, batcher.limits)
    start = checked_start(upload.options | {"sample_rate": sound.samplerate, "partials": False}, batcher.limits)
    session = await batcher.open(start)
    feeding = asyncio.create_task(_feed(sound, session, batcher))
    watching = asyncio.create_task(_watch(request.receive, session, batcher))
    finals: list[dict[str, Any]] = []
    try:
        is_over = False
        while not is_over:
            await session.changed.wait()
            is_over = session.is_over or session.is_dead
            finals += session.messages()
    finally:
        session.kill()
        batcher.wake()
        watching.cancel()
    if session.has_left:
        raise ClientDisconnect
    if session.error is not None:
        field, message = session.error
        if field == "server":
            return failure(500, message)
        return failure(400, message, "file" if field == "audio" else field)
    if not await feeding:
        raise Stopped
    return _response(finals, sound.frames / sound.samplerate, upload)


def _opened(file: BinaryIO, limits: Limits) -> Any:
    """The recording as a `soundfile.SoundFile`.

    Raises:
        FieldError: it cannot be read, or is too long.
    """
    import soundfile

    try:
        sound = soundfile.SoundFile(file)
    except (RuntimeError, OSError) as error:
        raise FieldError("file", str(error), "a recording in a format of libsndfile: wav, flac, ogg, mp3") from error
    seconds = sound.frames / sound.samplerate
    if seconds > limits.max_upload_seconds:
        raise FieldError("file", f"{seconds:g} seconds", f"at most {limits.max_upload_seconds:g} seconds")
    return sound


async def _feed(sound: Any, session: Session, batcher: Batcher) -> bool:
    """Feed the mean of a recording's channels to a stream; returns whether all of it was fed."""
    try:
        while not session.is_ending:
            await session.read_on.wait()
            block = int(BLOCK_SECONDS * sound.samplerate)
            samples = await asyncio.to_thread(sound.read, block, dtype="float32", always_2d=True)
            if session.is_ending:
                break
            if not len(samples):
                session.end()
                batcher.wake()
                return True
            pcm = np.rint(samples.mean(axis=1) * 32768).clip(-32768, 32767)
            if not np.isfinite(pcm).all():
                raise FieldError("file", "samples that are NaN or infinite", "finite samples")
            session.feed(pcm.astype("<i2").tobytes())
            batcher.wake()
    except (RuntimeError, OSError, ValueError) as error:
        session.fail("file", str(error))
        batcher.wake()
    except Exception as error:
        batcher.crash(session, error)
    return False


async def _watch(receive: Callable[[], Awaitable[Any]], session: Session, batcher: Batcher) -> None:
    """End a stream when its client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    session.leave()
    batcher.wake()


# -------------------------------------------------------------------------------------- the response


def _response(finals: list[dict[str, Any]], seconds: float, upload: Upload) -> Response:
    """The transcript in the format of a request; times are seconds since the beginning of the recording."""
    segments: list[dict[str, Any]] = []
    words: list[Word] = []
    text = ""
    for final in finals:
        new_words = [Word(**word) for word in final["words"]]
        is_joined = "is_joined" in final  # the utterance before was cut within a word
        if is_joined and words and new_words:
            first = new_words.pop(0)
            words[-1] = words[-1]._replace(word=words[-1].word + first.word, end=first.end)
        words += new_words
        text += ("" if is_joined or not text else " ") + final["text"]
        segments.append(_segment(len(segments), final, segments, seconds))
    if upload.response_format == "json":
        return JSONResponse({"text": text})
    if upload.response_format == "verbose_json":
        content = {
            "task": "transcribe",
            "language": upload.options.get("language", ""),
            "duration": seconds,
            "text": text,
        }
        if "segment" in upload.granularities:
            content["segments"] = segments
        if "word" in upload.granularities:
            content["words"] = [word.shown() for word in words]
        return JSONResponse(content)
    return PlainTextResponse(
        f"{text}\n" if upload.response_format == "text" else subtitles([words], upload.response_format, LINE_PAUSE)
    )


def _segment(number: int, final: dict[str, Any], before: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """An utterance; without times of words it lasts from the end of the one before to the end of its audio."""
    words = final["words"]
    start = words[0]["start"] if words else before[-1]["end"] if before else 0.0
    end = words[-1]["end"] if words else min(final["audio_seconds"], seconds)
    n_best = {"n_best": final["n_best"]} if "n_best" in final else {}
    phrases = {"found_phrases": final["found_phrases"]} if "found_phrases" in final else {}
    return {"id": number, "start": start, "end": end, "text": final["text"], **n_best, **phrases}
