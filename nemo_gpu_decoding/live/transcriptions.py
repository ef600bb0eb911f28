"""Serve OpenAI's endpoint POST /v1/audio/transcriptions; the batcher decodes each recording as a stream.

A form has the fields of OpenAI's API, and the fields of a stream's first message (`StreamOptions`):

    file                       the recording, in a format of libsndfile or of ffmpeg, if it is installed
    model                      any; the server has one
    stream                     true: the text as server-sent events, which come at the end
    temperature, prompt, chunking_strategy, include; language, if the model has one: ignored, with a note in the log
    response_format            json, text, verbose_json, srt or vtt
    timestamp_granularities    of verbose_json: segment, word; segments are utterances
    phrases, or keywords       boosted as `phrases` of a stream
    boosting_weight, language, end_silence, n_best
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from nemo_gpu_decoding.audio import MonoReader
from nemo_gpu_decoding.checks import FieldError, check_choice, warn_once
from nemo_gpu_decoding.live.batcher import Batcher, ServerFullError
from nemo_gpu_decoding.live.interface import Limits
from nemo_gpu_decoding.live.session import START_KEYS, Session, checked_start, read_json
from nemo_gpu_decoding.live.subtitles import subtitles
from nemo_gpu_decoding.transcript import Transcript, Word
from nemo_gpu_decoding.words import has_unspaced, is_border

logger = logging.getLogger("nemo_gpu_decoding")

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
GRANULARITIES = ("segment", "word")
_SPEAKERS = ("known_speaker_names", "known_speaker_references")
IGNORED = ("temperature", "prompt", "chunking_strategy", "include", "user", "seed", *_SPEAKERS)  # without effect
OWN_FIELDS = ("file", "model", "response_format", "timestamp_granularities", "stream", *IGNORED)
# lists, whose names may end with "[]" or "[key]"
LISTS = ("phrases", "keywords", "timestamp_granularities", "chunking_strategy", "include", *_SPEAKERS)
BLOCK_SECONDS = 0.5  # read from the file at once
UPLOADING = "uploading"  # the name of a task that reads a form
LINE_PAUSE = 0.6  # a pause of so many seconds ends a line of subtitles


class Upload(NamedTuple):
    """The checked form of a client's request, with the uploaded recording."""

    file: UploadFile
    options: dict[str, Any]  # of `StreamOptions`
    response_format: str = "json"
    granularities: tuple[str, ...] = ("segment",)
    is_streamed: bool = False


class Stopped(Exception):  # noqa: N818
    """An error for a recording that was not decoded before the server stopped."""


async def answer(request: Request, batcher: Batcher) -> tuple[str, Response]:
    """Decode the recording in a request.

    Returns:
        The outcome for the metrics (see `server._outcome`), and the HTTP response.
    """
    limits = batcher.limits
    try:
        if batcher.is_full:
            raise ServerFullError
        task: Any = asyncio.current_task()
        task.set_name(UPLOADING)
        async with _timely(request, limits).form(max_files=1, max_fields=limits.max_phrases + 20) as form:
            task.set_name("decoding")
            upload = _read(form, limits)
            if not batcher.recognizer.languages and (language := upload.options.pop("language", None)):
                warn_once(f"language={language} of a request is ignored, because the model has no choice of languages")
            with (
                TemporaryDirectory() as folder,
                await asyncio.to_thread(_opened, upload.file, Path(folder), limits) as sound,
            ):
                return "end", await _transcribed(request, batcher, upload, sound)
    except ServerFullError:
        return "streams", failure(503, f"no more than {limits.max_streams} streams are served at a time")
    except (Stopped, asyncio.CancelledError):
        return "restart", failure(503, "the server stops")
    except ClientDisconnect:
        return "disconnect", Response(status_code=499)
    except asyncio.TimeoutError:
        return "idle_seconds", failure(408, f"nothing arrived for {limits.idle_seconds:g} seconds")
    except HTTPException as error:  # of the parser of forms
        return "message", failure(error.status_code, error.detail)
    except ValueError as error:
        field = getattr(error, "field", "message")
        return field, failure(400, str(error), field)


def failure(status: int, message: str, field: str | None = None) -> Response:
    """Return an HTTP response with an error in the JSON form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": None}}, status)


async def refusal(request: Request, error: Any) -> Response:
    """Return the error response to a request for a path or method that the server lacks."""
    return failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def _timely(request: Request, limits: Limits) -> Request:
    """Return a request that raises a TimeoutError if the upload, or a pause in the upload, takes too long.

    Raises:
        FieldError: the size of the upload is not known, or too large.
    """
    size = request.headers.get("content-length", "")
    if not size.isdigit() or int(size) > limits.max_upload_bytes:
        raise FieldError("file", f"{size or 'an unknown number of'} bytes", f"at most {limits.max_upload_bytes} bytes")

    latest = time.monotonic() + max(limits.idle_seconds, limits.max_upload_seconds)

    async def receive() -> Any:
        return await asyncio.wait_for(request.receive(), min(limits.idle_seconds, latest - time.monotonic()))

    return Request(request.scope, receive)


# ------------------------------------------------------------------------------------------ the form


def _read(form: FormData, limits: Limits) -> Upload:
    """Check the fields of a form and return them as an `Upload`.

    Raises:
        FieldError: a field is invalid; the error names it.
    """
    fields: dict[str, list[Any]] = {}
    for key, value in form.multi_items():
        name = key.partition("[")[0] if key.partition("[")[0] in LISTS else key
        if value != "":
            fields.setdefault(name, []).append(value)
    known = (*OWN_FIELDS, "keywords", *(key for key in START_KEYS if key not in ("sample_rate", "partials")))
    for name, values in fields.items():
        if name not in known:
            value = str(getattr(values[0], "filename", values[0]))
            raise FieldError(name[:80], value[:80], f"none; the fields are {', '.join(known)}")
        if name in IGNORED:
            warn_once(f"{name} of a request is ignored, because it changes nothing here")
    file = fields.pop("file", [None])[-1]
    if not isinstance(file, UploadFile):
        raise FieldError("file", file and str(file)[:80], "a recording")
    response_format = fields.pop("response_format", ["json"])[-1]
    check_choice("response_format", response_format, FORMATS)
    is_streamed = fields.pop("stream", ["false"])[-1].lower()
    check_choice("stream", is_streamed, ("true", "false", "1", "0") if response_format == "json" else ("false", "0"))
    granularities = tuple(fields.pop("timestamp_granularities", ["segment"]))
    for granularity in granularities:
        check_choice("timestamp_granularities", granularity, GRANULARITIES)
    phrases = [*fields.pop("phrases", []), *fields.pop("keywords", [])]
    if len(phrases) == 1 and isinstance(listed := read_json(phrases[0]), list):
        phrases = listed
    options = {key: _value(key, values[-1]) for key, values in fields.items() if key not in OWN_FIELDS}
    options = options | ({"phrases": phrases} if phrases else {})
    checked_start(options, limits)  # before the recording is read
    return Upload(file, options, response_format, granularities, is_streamed in ("true", "1"))


def _value(key: str, text: str) -> Any:
    """Return the JSON value of a form field, or its text if the field is not valid JSON."""
    value = None if key == "language" else read_json(text)
    return text if value is None else value


# ---------------------------------------------------------------------------------------- the stream


async def _transcribed(request: Request, batcher: Batcher, upload: Upload, sound: MonoReader) -> Response:
    """Decode a recording as a stream of the batcher, and return the HTTP response with the transcript."""
    start = checked_start(upload.options | {"sample_rate": sound.rate, "partials": False}, batcher.limits)
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
        fault = await feeding  # which reads the recording
    if session.has_left:
        raise ClientDisconnect
    if session.error is not None:
        field, message = session.error
        if field == "server":
            return failure(500, message)
        return failure(400, message, "file" if field == "audio" else field)
    if fault is None:
        raise Stopped
    notes: dict[str, Any] = {"left_out": session.left_out} if session.left_out else {}
    notes |= {"warning": sound.doubt} if sound.doubt else {}
    return _response(finals, sound.seconds, upload, fault, notes)


def _opened(file: UploadFile, folder: Path, limits: Limits) -> MonoReader:
    """Copy an uploaded recording to a file in `folder` and open it.

    Raises:
        FieldError: the recording cannot be read, or is too long.
    """
    name, path = file.filename or "a recording", folder / "upload"
    with path.open("wb") as copy:
        shutil.copyfileobj(file.file, copy)
    try:
        sound = MonoReader(path, None)
    except ValueError as error:
        expected = "a recording in a format of libsndfile: wav, flac, ogg, mp3, or of ffmpeg, if the server has it"
        expected += f"; convert it: ffmpeg -i {name} -ac 1 -ar 16000 a.wav"
        raise FieldError("file", name, expected, f"({error.__cause__})") from error
    sound.name = name
    if sound.seconds > limits.max_upload_seconds:
        sound.__exit__()
        raise FieldError("file", f"{sound.seconds:g} seconds", f"at most {limits.max_upload_seconds:g} seconds")
    return sound


async def _feed(sound: MonoReader, session: Session, batcher: Batcher) -> str | None:
    """Feed a recording to a stream. Return "", why its end is unreadable, or None if the stream ended early."""
    try:
        while not session.is_ending:
            await session.read_on.wait()
            samples, fault = await asyncio.to_thread(sound.read_readable, int(BLOCK_SECONDS * sound.rate))
            if session.is_ending:
                break
            if not np.isfinite(samples).all():
                raise FieldError("file", "samples that are NaN or infinite", "finite samples")
            session.feed_samples(samples)
            if fault or not len(samples):
                session.end()
            batcher.wake()
            if session.is_ending:
                return fault
    except ValueError as error:
        session.fail("file", str(error))
        batcher.wake()
    except Exception as error:
        batcher.crash(session, error)
    return None


async def _watch(receive: Callable[[], Awaitable[Any]], session: Session, batcher: Batcher) -> None:
    """End the stream of an upload when its client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    session.leave()
    batcher.wake()


# -------------------------------------------------------------------------------------- the response


def _response(
    finals: list[dict[str, Any]], seconds: float, upload: Upload, fault: str, notes: dict[str, Any]
) -> Response:
    """Return the response in the requested format, with `notes`; times are seconds since the recording began."""
    if fault:
        notes["error"] = f"{upload.file.filename} cannot be read to its end: {fault}"
        logger.warning("%s", notes["error"])
    segments: list[dict[str, Any]] = []
    words: list[Word] = []
    text = ""
    for final in finals:
        new_words = [Word(**word) for word in final["words"]]
        is_joined = "is_joined" in final  # the utterance before was cut within a word
        if is_joined and words and new_words and not is_border(words[-1].word[-1], new_words[0].word[0]):
            first = new_words.pop(0)
            words[-1] = words[-1]._replace(word=words[-1].word + first.word, end=first.end)
        words += new_words
        is_continued = is_joined or not text or has_unspaced(text[-1] + final["text"][:1])
        text += ("" if is_continued else " ") + final["text"]
        segments.append(_segment(len(segments), final, segments, seconds))
    if upload.is_streamed:
        done = {"type": "transcript.text.done", "text": text, **notes}
        events = [{"type": "transcript.text.delta", "delta": text}, done]
        body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        return Response(body, media_type="text/event-stream")
    if upload.response_format == "json":
        return JSONResponse({"text": text, **notes})
    if upload.response_format == "verbose_json":
        language, lists = upload.options.get("language", ""), {"segment": segments, "word": [w.shown() for w in words]}
        content = {"task": "transcribe", "language": language, "duration": seconds, "text": text, **notes}
        listed = {f"{name}s": entries for name, entries in lists.items() if name in upload.granularities}
        return JSONResponse(content | listed)
    spoken = Transcript(text, words=tuple(words))
    return PlainTextResponse(
        f"{text}\n" if upload.response_format == "text" else subtitles([spoken], upload.response_format, LINE_PAUSE)
    )


def _segment(number: int, final: dict[str, Any], before: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return an utterance as a segment of OpenAI's API; without word times, it begins where the previous one ends."""
    words = final["words"]
    start = words[0]["start"] if words else before[-1]["end"] if before else 0.0
    end = words[-1]["end"] if words else min(final["audio_seconds"], seconds)
    more: dict[str, Any] = {key: final[key] for key in ("n_best", "found_phrases") if key in final}
    return {"id": number, "start": start, "end": end, "text": final["text"], **more}
