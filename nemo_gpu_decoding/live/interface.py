"""Define the live server's address and limits, the options of a stream, and the interface of its model.

A `Recognizer` is a model that decodes many streams. In a step it reads one chunk of each of several streams. The help
of `serve` shows the comments of `Address`, `Limits` and `PipelineOptions`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.transcript import Transcript

MAX_N_BEST = 1000  # hypotheses of a transcript; each recognizer has its own lower limit
MAX_LETTERS = 20_000  # of a stream's grammar
MAX_END_SILENCE = 60.0  # seconds; NeMo keeps a list with one entry per frame of it


@checked_options
@dataclass(frozen=True)
class StreamOptions:
    """The options of a stream, from the client's first message; None keeps the value of the server."""

    request: WrittenRequest | None = None  # LM, phrases, language lock and grammar
    sample_rate: int = option(16000, low=8000, high=192_000)  # hertz
    partials: bool = True  # false: finals only
    # seconds of silence that end an utterance; < 0: none does
    end_silence: float | None = option(None, high=MAX_END_SILENCE, infinite=True)
    language: str | None = None  # for models with a language option
    n_best: int = option(1, low=1, high=MAX_N_BEST)  # hypotheses of each transcript


class Chunk(NamedTuple):
    """The next piece of audio of one stream, of `chunk_samples` samples."""

    stream: int  # number of the stream; never reused
    samples: np.ndarray  # [n] float32 in -1 .. 1; `chunk_samples` of them, up to that many in the last chunk
    is_first: bool = False
    is_last: bool = False
    options: Any = None  # of the stream, from `prepare`


class StepOutput(NamedTuple):
    """The transcripts of a stream after one chunk."""

    partial: Transcript | None = None  # of the utterance that continues; None after the last chunk
    final: Transcript | None = None  # of the utterance that ended in this chunk, if any
    error: str | None = None  # the reason why the stream cannot continue


class Recognizer(Protocol):
    """A model that decodes many streams in one step. All methods except `prepare` are called from one thread."""

    model: str  # name
    strategy: str
    phrases: Sequence[str]  # for streams without phrases of their own
    sample_rate: int  # hertz
    chunk_samples: int
    right_context_seconds: float  # future audio that the decoding of a chunk waits for
    max_n_best: int  # largest `n_best` of a stream

    @property
    def languages(self) -> list[str]: ...

    def prepare(self, wanted: StreamOptions) -> Any:
        """Convert a client's options to `Chunk.options`; raise a FieldError for an option that the model lacks."""

    def left_out(self, options: Any) -> list[str]:
        """Return the phrases of a client that cannot be boosted; `options` is the result of `prepare`."""

    def step(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        """Decode one chunk of each of several streams, and return an output per chunk.

        Raises:
            Exception: the step failed and all streams are unchanged. The caller passes each chunk to another step, or
                drops its stream.
        """

    def drop(self, streams: Iterable[int]) -> None:
        """Remove streams without results; ignore numbers of unknown streams."""


def warm_up(recognizer: Recognizer) -> None:
    """Decode two chunks of noise, so that code is compiled before the first client connects."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=(2, recognizer.chunk_samples)).astype(np.float32)
    for stream, n_best in enumerate(sorted({1, recognizer.max_n_best}), -2):  # numbers below 0 are unused
        options = recognizer.prepare(StreamOptions(n_best=n_best))
        for is_last, samples in zip((False, True), noise, strict=True):
            recognizer.step([Chunk(stream, samples, not is_last, is_last, options)])


@checked_options
@dataclass
class Address:
    """Network address and access control of the server.

    Raises:
        FieldError: a field is out of range, or a public address has no token.
    """

    topic = "address"

    # Address to listen on. An address that other machines can reach needs a token, or open_to_all=true.
    host: str = "127.0.0.1"
    # Port to listen on; 0: any free port.
    port: int = option(8765, low=0, high=65535)
    # Required from every client, in the header "Authorization: Bearer TOKEN" or as ?token=TOKEN. null: the
    # value of the environment variable NEMO_GPU_DECODING_TOKEN; without it no token is required.
    token: str | None = None
    # Allow an address that other machines can reach without a token.
    open_to_all: bool = False
    # Seconds at shutdown to finish open utterances.
    shutdown_seconds: float = option(10.0, low=0)

    def check_rules(self) -> None:
        if self.token is not None and not self.token.strip():
            raise FieldError("token", self.token, "a text that is not blank")
        if not (self.token or self.open_to_all or self._is_loopback):
            raise FieldError("host", self.host, "127.0.0.1 or ::1, or a token, or open_to_all=true")

    @property
    def _is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@checked_options
@dataclass
class StreamCount:
    """The limit of streams, which the server and its pipeline have in common."""

    topic = "limits of clients"

    # Maximum number of open streams.
    max_streams: int = option(64, low=1, high=100_000)


@checked_options
@dataclass
class Limits(StreamCount):
    """Limits of the server for streams, uploads and options of clients, and its timeouts.

    Raises:
        ValueError: a limit is out of range.
    """

    # Maximum size of a message, in bytes.
    max_message_bytes: int = option(1_000_000, low=1, high=1 << 31)
    # Maximum number of phrases and aliases per stream. Together they may have 50 times as many characters.
    max_phrases: int = option(1000, low=1, high=1 << 31)
    # Maximum boosting_weight of a stream, natural log.
    max_boosting_weight: float = option(100.0, above=0)
    # Maximum size of a request with a recording, in bytes.
    max_upload_bytes: int = option(25_000_000, low=1, high=1 << 31)
    # Maximum length of a recording, in seconds.
    max_upload_seconds: float = option(7200.0, above=0)
    # Seconds without a message after which the server ends a stream.
    idle_seconds: float = option(30.0, above=0)
    # Maximum length of an utterance, in seconds; a longer one is cut.
    utterance_seconds: float = option(60.0, above=0)
    # Seconds of undecoded audio per client; beyond that the server stops reading from the client until it catches up.
    pending_seconds: float = option(2.0, above=0)
    # Seconds within which a client must receive a message; a slower client is disconnected.
    send_seconds: float = option(10.0, above=0)


@checked_options
@dataclass
class PipelineOptions(StreamCount):
    """Options of NeMo's streaming pipeline. A cache-aware model's encoder defines the chunk size."""

    topic = "pipeline"

    # NeMo's pipeline: buffered for offline checkpoints, cache_aware for streaming checkpoints; auto: chosen by the
    # encoder's config.
    pipeline: str = option("auto", choices=("auto", "buffered", "cache_aware"))
    # Buffered pipeline: seconds of new audio per step.
    chunk_seconds: float = option(0.4, above=0)
    # Buffered pipeline: seconds of past audio that the encoder reads again in each step.
    left_seconds: float = option(1.6, low=0)
    # Buffered pipeline: seconds of future audio that each step waits for. Less is faster and less accurate.
    right_seconds: float = option(0.8, low=0)
    # Seconds of silence that end an utterance, at most 60; below 0: utterances end only with the stream.
    end_silence: float = option(0.8, high=MAX_END_SILENCE, infinite=True)
    # Kaldi's endpointing rules, in place of end_silence: kaldi for the defaults, or single values, such as
    # {rule2: {min_trailing_silence: 0.8}}.
    rules: Any = None
    # Maximum n_best of a stream. null: 5 for beam searches, 1 for word graphs, which keep lattices if it is more.
    max_n_best: int | None = option(None, low=1, high=MAX_N_BEST)
