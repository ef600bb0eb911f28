"""Slots of a confusion network: the words that may be at a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """A word that may be at a place."""

    word: str  # "": no word
    confidence: float  # posterior, in [0, 1]


class Slot(NamedTuple):
    """The alternatives at a place, most probable first. Times are in frames; in transcripts in seconds."""

    word_index: int | None  # of the transcript's word; None: between two words
    start: float
    end: float
    alternatives: tuple[Option, ...]


def in_seconds(slots: Sequence[Slot], words: Sequence[Any], frame_seconds: float) -> tuple[Slot, ...]:
    """Slots with the times of the transcript's words, which have `start` and `end` in seconds.

    If the transcript replaces words by other ones (aliases), a slot has the index of the word at its time.
    """
    own = [slot for slot in slots if slot.word_index is not None]
    offset = words[0].start - own[0].start * frame_seconds if words and own else 0.0
    timed = []
    for slot in slots:
        index, start, end = slot.word_index, slot.start * frame_seconds + offset, slot.end * frame_seconds + offset
        if index is not None and len(own) == len(words):
            start, end = words[index].start, words[index].end
        elif index is not None and words:
            index = min(range(len(words)), key=lambda n: abs(words[n].start + words[n].end - start - end))
        timed.append(Slot(index, round(start, 3), round(end, 3), slot.alternatives))
    return tuple(timed)


def as_json(slots: Sequence[Slot]) -> list[dict[str, Any]]:
    return [{**slot._asdict(), "alternatives": [each._asdict() for each in slot.alternatives]} for slot in slots]
