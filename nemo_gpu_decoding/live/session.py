"""Check the messages of one client, convert its audio to chunks, and make its messages with transcripts.

    client                                             server
    {"sample_rate": 48000, "phrases": ["Castellano"]}  {"type": "ready", ...}
    PCM, int16, little-endian, one channel             {"type": "partial", "text": ..., "words": [...], ...}
    ...                                                {"type": "final", ...}      an utterance is over
    {"type": "end"}                                    {"type": "final", ...}      and the connection closes

After a wrong message the server sends {"type": "error", "field": ..., "message": ...} and ends the stream.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.phrases import REQUEST_KEYS, written_request
from nemo_gpu_decoding.live.interface import MAX_LETTERS, Chunk, Limits, StepOutput, StreamOptions
from nemo_gpu_decoding.transcript import Transcript, details_of

PHRASE_CHARACTERS = 200  # maximum in one phrase
MEAN_PHRASE_CHARACTERS = 50  # of all phrases together, for each of `Limits.max_phrases`
SHOWN = 80  # characters of a client's text in a message
PENDING_FINALS = 100  # final transcripts not sent yet


_OWN_KEYS = [key for key in REQUEST_KEYS if key != "biasing_request"]  # which may name files of the server
START_KEYS = (*(field.name for field in fields(StreamOptions)[1:]), *_OWN_KEYS)


def read_start(text: str, limits: Limits) -> StreamOptions:
    """Parse and check the first message of a client, and return the options of its stream.

    Raises:
        FieldError: a value is invalid; the error names its key.
    """
    message = read_json(text)
    if not isinstance(message, dict):
        raise FieldError("message", text[:SHOWN], "a JSON object")
    kind = message.pop("type", "start")
    if kind != "start":
        raise FieldError("type", _short(kind), "start or end in the first message")
    return checked_start(message, limits)


def checked_start(message: dict[str, Any], limits: Limits) -> StreamOptions:
    """Check the options in a client's message or form, and return them.

    Raises:
        FieldError: a value is invalid; the error names its key.
    """
    for key, value in message.items():
        if key not in START_KEYS:
            raise FieldError(key[:SHOWN], _short(value), f"none; the keys are {', '.join(START_KEYS)}")
    given = {key: _short(value) for key, value in message.items() if key not in REQUEST_KEYS}
    phrases, weight = message.get("phrases", ()), _short(message.get("boosting_weight"))
    _check_phrases(phrases, limits)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0 < weight <= limits.max_boosting_weight):
        raise FieldError("boosting_weight", weight, f"a number > 0, at most {limits.max_boosting_weight:g}")
    if len(str(message.get("lm"))) > SHOWN:
        raise FieldError("lm", _short(message["lm"]), "the name of an LM")
    _check_grammar(message)
    try:
        request = written_request(message | {"phrases": phrases or None})
    except FieldError as error:
        raise FieldError(error.field, _short(error.value), error.expected) from None
    return StreamOptions(request, **given)


def read_json(text: str) -> Any:
    """Parse a JSON text; return None if the text is no JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _short(value: Any) -> Any:
    """Shorten a value for error messages: cut long texts, replace lists and objects by their length."""
    if isinstance(value, str):
        return value[:SHOWN]
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return value


def _check_grammar(message: dict[str, Any]) -> None:
    for name in ("allowed_scripts", "allowed_tokens", "grammar"):
        texts = message.get(name)
        letters = sum(map(len, map(str, texts if isinstance(texts, list) else [texts or ""])))
        if letters > MAX_LETTERS:
            raise FieldError(name, f"{letters} characters", f"at most {MAX_LETTERS}")


def _check_phrases(phrases: Any, limits: Limits) -> None:
    if not isinstance(phrases, list | tuple):
        raise FieldError("phrases", _short(phrases), "a list of texts")
    texts: list[str] = []
    for number, phrase in enumerate(phrases):
        for text in _texts_of(number, phrase):
            if not isinstance(text, str) or not text.strip() or len(text) > PHRASE_CHARACTERS:
                raise FieldError(f"phrases[{number}]", _short(text), f"a text of 1 .. {PHRASE_CHARACTERS} characters")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise FieldError(f"phrases[{number}]", _short(text), "a text without lone surrogates")
            texts.append(text)
    if len(texts) > limits.max_phrases:
        raise FieldError("phrases", f"a list of {len(texts)}", f"at most {limits.max_phrases} phrases and aliases")
    total, most = sum(map(len, texts)), MEAN_PHRASE_CHARACTERS * limits.max_phrases
    if total > most:
        raise FieldError("phrases", f"{total} characters", f"at most {most} in all phrases together")


def _texts_of(n: int, phrase: Any) -> list[Any]:
    """Return the texts of an unchecked phrase and its aliases."""
    if not isinstance(phrase, dict):
        return [phrase]
    aliases = phrase.get("aliases")
    if phrase.keys() - {"phrase", "aliases"} or not isinstance(aliases, list | None):
        raise FieldError(f"phrases[{n}]", _short(phrase), "a text, or an object with phrase and a list of aliases")
    return [phrase.get("phrase"), *(aliases or ())]


class Resampler:
    """A streaming resampler for float32 samples. The output does not depend on how messages divide the audio."""

    def __init__(self, rate: int, target: int) -> None:
        self._stream = None
        if rate != target:
            import soxr

            self._stream = soxr.ResampleStream(rate, target, 1, dtype="float32")

    def __call__(self, samples: np.ndarray, *, is_last: bool = False) -> np.ndarray:
        return samples if self._stream is None else self._stream.resample_chunk(samples, last=is_last)


class Session:
    """The state of one client's stream. Only the event loop's thread uses a session; chunks go to the recognizer.

    Args:
        start: first message of the client.
        options: result of `Recognizer.prepare` for this message.
        shape: sample rate of the model in hertz, and samples of a chunk.
        limits: limits of the server.
        new_stream: returns a new number of a recognizer's stream.
    """

    def __init__(
        self, start: StreamOptions, options: Any, shape: tuple[int, int], limits: Limits, new_stream: Callable[[], int]
    ) -> None:
        self.start, self.limits = start, limits
        self.rate, self.chunk_samples = shape
        self.is_ending = False  # no audio will follow
        self.is_dead = False  # the results are not needed
        self.has_left = self.is_stuck = False  # the client has disconnected, or does not read its messages
        self.is_over = False  # all audio is decoded
        self.error: tuple[str, str] | None = None  # field and message
        self.left_out: list[str] = []  # phrases that cannot be boosted
        self.read_on = asyncio.Event()  # more audio may be read
        self.read_on.set()
        self.changed = asyncio.Event()  # set if there is something to send
        self.audio_seconds = 0.0  # decoded audio
        self._options, self._new_stream = options, new_stream
        self._stream: int | None = None  # number of the recognizer's stream, if there is one
        self._resample = Resampler(start.sample_rate, self.rate)
        self._audio: list[np.ndarray] = []  # not decoded yet
        self._pending = 0  # samples in `_audio`
        self._utterance_samples = 0  # decoded samples of the present utterance
        self._offset = 0.0  # seconds of the client's audio before the recognizer's stream began
        self._arrivals: deque[tuple[int, float]] = deque()  # samples so far and time of arrival, per message
        self._arrived = self._taken = 0  # samples
        self._finals: deque[dict[str, Any]] = deque()
        self._partial: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------ audio in

    def feed(self, pcm: bytes) -> None:
        """Append the int16 samples of one message to the stream's audio.

        Raises:
            FieldError: the message is no int16 PCM.
        """
        if len(pcm) % 2:
            raise FieldError("audio", f"{len(pcm)} bytes", "int16 samples, two bytes each")
        self.feed_samples(np.frombuffer(pcm, "<i2").astype(np.float32) / 32768)

    def feed_samples(self, samples: np.ndarray) -> None:
        """Append samples, [n] float32 in -1 .. 1, to the stream's audio."""
        self._append(self._resample(samples))
        if self._pending > self.limits.pending_seconds * self.rate + self.chunk_samples:
            self.read_on.clear()

    def end(self) -> None:
        """Mark the end of the stream's audio; audio that has arrived is still decoded."""
        if not self.is_ending:
            self._append(self._resample(np.zeros(0, np.float32), is_last=True))
            self.is_ending = True
            self.read_on.set()

    def leave(self) -> None:
        """Mark the client as disconnected, and end the stream."""
        self.has_left = True
        self.kill()
        self.changed.set()

    def kill(self) -> None:
        """End the stream without results, and discard audio that is not decoded yet."""
        self.is_ending = self.is_dead = True
        self._audio, self._pending = [], 0
        self.read_on.set()

    def _append(self, samples: np.ndarray) -> None:
        if len(samples):
            self._audio.append(samples)
            self._pending += len(samples)
            self._arrived += len(samples)
            self._arrivals.append((self._arrived, asyncio.get_running_loop().time()))

    @property
    def is_ready(self) -> bool:
        """Return whether the stream has a whole chunk to decode, or its last audio."""
        return not self.is_over and (self.is_ending or self._pending >= self.chunk_samples)

    def take(self) -> Chunk | None:
        """Return the next chunk of the stream, or None if the stream ends and no audio is left."""
        is_end = self.is_ending and self._pending <= self.chunk_samples
        if is_end and not self._pending and self._stream is None:
            self.is_over = True
            self.changed.set()
            return None
        is_first = self._stream is None
        if self._stream is None:
            self._stream = self._new_stream()
        samples, rest = np.split(np.concatenate([np.zeros(0, np.float32), *self._audio]), [self.chunk_samples])
        self._audio, self._pending = [rest], len(rest)
        if self._pending <= self.limits.pending_seconds * self.rate:
            self.read_on.set()
        self._taken += len(samples)
        self._utterance_samples += len(samples)
        is_cut = self._utterance_samples + self.chunk_samples > self.limits.utterance_seconds * self.rate
        return Chunk(self._stream, samples, is_first, is_end or is_cut, self._options)

    # ------------------------------------------------------------------------------ transcripts out

    def receive(self, chunk: Chunk, step: StepOutput) -> float:
        """Store the transcripts of a decoded chunk; return the seconds since the chunk's last sample arrived."""
        if step.error:
            self.fail("audio", step.error)
            self.kill()
        self.audio_seconds = self._taken / self.rate
        self._partial = None
        if step.final is not None:
            self._finals.append(self._message("final", step.final))
            if len(self._finals) > PENDING_FINALS:
                self.is_stuck = True
                self.kill()
            self._utterance_samples = 0
        elif step.partial is not None and self.start.partials:
            self._partial = self._message("partial", step.partial)
        if chunk.is_last:
            self._stream, self._utterance_samples, self._offset = None, 0, self.audio_seconds
            self.is_over = self.is_ending and not self._pending
        self.changed.set()
        return asyncio.get_running_loop().time() - self._arrival()

    def fail(self, field: str, message: str) -> None:
        """End the stream after its audio is decoded, with this error as the last message to the client."""
        if self.error is None:
            self.error = field, message
        self.end()

    def crash(self) -> int | None:
        """End the stream after an internal error, with a message about it as the last message to the client.

        Returns:
            The number of the recognizer's stream, which the caller drops; None if the recognizer has no such stream.
        """
        stream, self._stream = self._stream, None
        self.error = "server", "the server failed in this stream; its log has the reason"
        self.is_over = True
        self.kill()
        self.changed.set()
        return stream

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages to send to the client, without partial transcripts that are outdated."""
        self.changed.clear()
        out = list(self._finals)
        self._finals.clear()
        if self._partial is not None:
            out.append(self._partial)
            self._partial = None
        return out

    def _message(self, kind: str, transcript: Transcript) -> dict[str, Any]:
        """Return the JSON message with a transcript; times are seconds since the client's audio began."""
        message: dict[str, Any] = {"type": kind, "text": transcript.text}
        if kind == "partial":
            message["committed"] = transcript.committed
        message |= {"words": [], "audio_seconds": round(self.audio_seconds, 3)}
        if self.start.n_best > 1:
            message["n_best"] = []
        return message | details_of(transcript.later(self._offset))

    def _arrival(self) -> float:
        """Return the event loop's time, in seconds, at which the last decoded sample arrived."""
        while len(self._arrivals) > 1 and self._arrivals[0][0] < self._taken:
            self._arrivals.popleft()
        return self._arrivals[0][1] if self._arrivals else asyncio.get_running_loop().time()
