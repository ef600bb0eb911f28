"""What a live server asks of the model behind it: one step reads a chunk of each stream that has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

MAX_N_BEST = 1000  # hypotheses of a transcript; each recognizer has a limit of its own
MAX_END_SILENCE = 60.0  # seconds; NeMo keeps a list with one entry per frame of it


class StreamOptions(NamedTuple):
    """What a client wants for its stream; None: as the server has it."""

    phrases: tuple[str, ...] = ()  # in place of the server's; empty: the server's
    boosting_weight: float | None = None  # of these phrases, natural log
    end_silence: float | None = None  # seconds of silence that end an utterance, <= MAX_END_SILENCE; < 0: none does
    language: str | None = None  # of models that are told
    n_best: int = 1  # hypotheses of each transcript


class Chunk(NamedTuple):
    """Audio of one stream."""

    stream: int  # number; each is used once
    samples: np.ndarray  # [n] float32 in -1 .. 1; `chunk_samples` of them, up to that many in the last chunk
    is_first: bool = False
    is_last: bool = False
    options: Any = None  # from `prepare`, with the first chunk


class Word(NamedTuple):
    """A word of a transcript, under NeMo's names: times in seconds since the audio began, confidence in [0, 1]."""

    word: str
    start: float
    end: float
    confidence: float | None = None  # None where the strategy has none


class Alternative(NamedTuple):
    """One of the best hypotheses."""

    text: str
    score: float  # natural log, as `Path.score`


class Words(NamedTuple):
    """A transcript."""

    text: str
    words: tuple[Word, ...] = ()
    is_joined: bool = False  # begins inside a word whose beginning was in the transcript before
    committed: str = ""  # of a partial transcript: the beginning of `text` that will not change
    n_best: tuple[Alternative, ...] = ()  # if more than one was asked for: best first, of the audio that was decoded


class StepOutput(NamedTuple):
    """What a chunk gave."""

    partial: Words | None = None  # of the utterance that goes on; None behind the last chunk
    final: Words | None = None  # of the utterance that ended in this chunk, if one did
    error: str | None = None  # why the stream cannot go on


class Recognizer(Protocol):
    """A model that reads many streams at once. All but `prepare` is called from one thread."""

    model: str  # name
    strategy: str
    phrases: Sequence[str]  # of streams that name none
    sample_rate: int  # hertz
    chunk_samples: int
    right_context_seconds: float  # audio behind a chunk that is heard before it is decoded
    max_n_best: int  # hypotheses that a stream may ask for

    @property
    def languages(self) -> list[str]: ...

    def prepare(self, wanted: StreamOptions) -> Any:
        """`Chunk.options` for what a client wants. Raises a FieldError for what cannot be had."""

    def step(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        """Read chunks of different streams, any number of them.

        Raises:
            Exception: the streams are as before the call. The caller gives each of these chunks to another
                step, or drops its stream.
        """

    def drop(self, streams: Iterable[int]) -> None:
        """Forget streams without their results, known or not."""


def warm_up(recognizer: Recognizer) -> None:
    """Hear two chunks of noise and forget them: what gets compiled on first use is compiled before a client waits."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=(2, recognizer.chunk_samples)).astype(np.float32)
    for stream, n_best in enumerate(sorted({1, recognizer.max_n_best}), -2):  # numbers that no client's stream has
        options = recognizer.prepare(StreamOptions(n_best=n_best))
        for is_last, samples in zip((False, True), noise, strict=True):
            recognizer.step([Chunk(stream, samples, not is_last, is_last, options)])
