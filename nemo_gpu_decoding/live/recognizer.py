"""`Recognizer`: the interface between the live server and its model. A step reads a chunk of several streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nemo_gpu_decoding.fusion.written import WrittenRequest
from nemo_gpu_decoding.search.slots import Slot

MAX_N_BEST = 1000  # hypotheses of a transcript; each recognizer has its own lower limit
MAX_GRAMMAR_LETTERS = 20_000  # of a stream's grammar
MAX_END_SILENCE = 60.0  # seconds; NeMo keeps a list with one entry per frame of it


class StreamOptions(NamedTuple):
    """Options of a client for its stream; None: the server's values."""

    request: WrittenRequest | None = None  # LM, phrases, language lock and grammar
    boosting_weight: float | None = None  # of these phrases, natural log
    end_silence: float | None = None  # seconds of silence that end an utterance, <= MAX_END_SILENCE; < 0: none does
    language: str | None = None  # for models with a language option
    n_best: int = 1  # hypotheses of each transcript


class Chunk(NamedTuple):
    """Audio of one stream."""

    stream: int  # number of the stream; never reused
    samples: np.ndarray  # [n] float32 in -1 .. 1; `chunk_samples` of them, up to that many in the last chunk
    is_first: bool = False
    is_last: bool = False
    options: Any = None  # from `prepare`, with the first chunk


class Word(NamedTuple):
    """A word of a transcript, with NeMo's names: times in seconds since the audio began, confidence in [0, 1]."""

    word: str
    start: float
    end: float
    confidence: float | None = None  # None if the strategy has none


class Alternative(NamedTuple):
    """One of the best hypotheses."""

    text: str
    score: float  # natural log, as `Path.score`


class BoostedPhrase(NamedTuple):
    """A boosted phrase of a transcript."""

    phrase: str  # as in the list of phrases
    probability: float  # smallest posterior of its tokens, 0 .. 1


class Words(NamedTuple):
    """A transcript."""

    text: str
    words: tuple[Word, ...] = ()
    is_joined: bool = False  # the text continues the last word of the previous transcript
    committed: str = ""  # of a partial transcript: the beginning of `text` that will not change
    n_best: tuple[Alternative, ...] = ()  # with n_best > 1: the hypotheses, best first, for the decoded audio
    alternatives: tuple[Slot, ...] = ()  # of a final transcript with n_best > 1: the confusion network
    phrases: tuple[BoostedPhrase, ...] = ()  # of a final transcript, in their order
    outside_share: float | None = None  # of a final transcript with a language lock: share of tokens outside
    in_grammar: bool | None = None  # of a final transcript with a grammar; False: no sentence fits, the text is empty


class StepOutput(NamedTuple):
    """The results of a chunk."""

    partial: Words | None = None  # of the utterance that continues; None after the last chunk
    final: Words | None = None  # of the utterance that ended in this chunk, if any
    error: str | None = None  # the reason why the stream cannot continue


class Recognizer(Protocol):
    """A model that decodes many streams together. All methods except `prepare` are called from one thread."""

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
        """`Chunk.options` for the options of a client. Raises a FieldError for options that are not supported."""

    def step(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        """Read chunks of different streams, any number of them.

        Raises:
            Exception: the streams are unchanged. The caller passes each of these chunks to another step, or drops its
                stream.
        """

    def drop(self, streams: Iterable[int]) -> None:
        """Drop streams without results; unknown numbers are ignored."""


def warm_up(recognizer: Recognizer) -> None:
    """Decode two chunks of noise, so that code is compiled before the first client connects."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=(2, recognizer.chunk_samples)).astype(np.float32)
    for stream, n_best in enumerate(sorted({1, recognizer.max_n_best}), -2):  # numbers below 0 are unused
        options = recognizer.prepare(StreamOptions(n_best=n_best))
        for is_last, samples in zip((False, True), noise, strict=True):
            recognizer.step([Chunk(stream, samples, not is_last, is_last, options)])
