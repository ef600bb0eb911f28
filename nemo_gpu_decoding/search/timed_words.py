"""The words of a path with their times."""

from __future__ import annotations

from typing import NamedTuple

from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.word_graph.result import WordPath
from nemo_gpu_decoding.vocabulary import Vocabulary


class TimedWord(NamedTuple):
    """A word with its first frame and its end frame."""

    text: str
    start: int
    end: int


def timed_words(path: Path, vocabulary: Vocabulary) -> list[TimedWord]:
    """The words of a path."""
    if isinstance(path, WordPath):
        return [TimedWord(word.text, word.start_frame, word.end_frame) for word in path.words]
    frames, repeats = path.frames.tolist(), path.repeats.tolist()
    spans = vocabulary.words(path.tokens.tolist())
    return [
        TimedWord(span.text, frames[span.first_token], frames[span.end_token - 1] + repeats[span.end_token - 1])
        for span in spans
    ]
