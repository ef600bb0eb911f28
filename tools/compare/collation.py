"""Alignment of the transcripts of one utterance: passages on which they agree, and their different readings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

REFERENCE = -1  # the number of the reference among transcripts 0, 1, ...
AGREED, WRONG, EXTRA, MISSING = "", "wrong", "extra", "missing"
GAP = ""  # no word of a text


class Mark(NamedTuple):
    """One word of a transcript. `kind` is WRONG for a substitution, EXTRA for an insertion, MISSING for a deletion,
    and AGREED for all other words, and without a reference."""

    text: str
    kind: str = AGREED
    in_phrase: bool = False


class Reading(NamedTuple):
    """The words of some transcripts in one passage."""

    transcripts: tuple[int, ...]
    words: tuple[Mark, ...]


class Passage(NamedTuple):
    """A part of the text: one reading of all transcripts, or several readings."""

    readings: tuple[Reading, ...]
    start: float | None = None  # seconds

    @property
    def is_agreed(self) -> bool:
        return len(self.readings) == 1


class Transcript(NamedTuple):
    """A transcript to align. Both sequences have one element per word, or are empty."""

    words: Sequence[str]
    in_phrase: Sequence[bool] = ()
    starts: Sequence[float] = ()  # seconds


class _Slot(NamedTuple):
    """A word of the first text with the aligned words of the others; without such a word, their insertions."""

    cells: list[list[Mark]]  # by text
    starts: list[float]

    @property
    def is_agreed(self) -> bool:
        return len({tuple(mark.text for mark in cell) for cell in self.cells}) == 1


def collate(reference: Transcript | None, transcripts: Sequence[Transcript]) -> list[Passage]:
    """The passages of an utterance, in order.

    Words are aligned with the reference, or with the first transcript if there is none, with the fewest substitutions,
    deletions and insertions.

    >>> for passage in collate(Transcript(["a", "b", "c"]), [Transcript(["a", "c"]), Transcript(["a", "b", "c"])]):
    ...     print([(reading.transcripts, [mark.text for mark in reading.words]) for reading in passage.readings])
    [((-1, 0, 1), ['a'])]
    [((-1, 1), ['b']), ((0,), [''])]
    [((-1, 0, 1), ['c'])]
    """
    texts = transcripts if reference is None else [reference, *transcripts]
    first = 0 if reference is None else REFERENCE
    slots = [slot for slot in _slots(texts, is_scored=reference is not None) if any(slot.cells)]
    passages = []
    for _, group in groupby(slots, key=lambda slot: slot.is_agreed):
        run = list(group)
        readings: dict[tuple[str, ...], tuple[list[int], tuple[Mark, ...]]] = {}
        for number in range(len(texts)):
            words = tuple(mark for slot in run for mark in slot.cells[number])
            words = tuple(mark for mark in words if mark.text) or words[:1]
            numbers, _ = readings.setdefault(tuple(mark.text for mark in words), ([], words))
            numbers.append(number + first)
        starts = [start for slot in run for start in slot.starts]
        found = tuple(Reading(tuple(numbers), words) for numbers, words in readings.values())
        passages.append(Passage(found, min(starts, default=None)))
    return passages


def difference(passages: Sequence[Passage], count: int) -> int:
    """Number of words in passages on which the `count` transcripts differ; the longest reading of each passage
    counts."""
    return sum(
        max(sum(mark.kind != MISSING and mark.text != GAP for mark in reading.words) for reading in passage.readings)
        for passage in passages
        if all(len(set(reading.transcripts) - {REFERENCE}) < count for reading in passage.readings)
    )


def _slots(texts: Sequence[Transcript], *, is_scored: bool) -> list[_Slot]:
    """2n + 1 slots for the n words of the first text: insertions before a word, the word, and so on."""
    from kaldialign import align

    first = texts[0].words
    slots = [_Slot([[] for _ in texts], []) for _ in range(2 * len(first) + 1)]
    for number, text in enumerate(texts):
        at = taken = 0
        for mine, theirs in align(list(first), list(text.words), GAP):
            slot = slots[2 * at + (mine != GAP)]
            at += mine != GAP
            kind = AGREED
            if is_scored and mine != theirs:
                kind = EXTRA if mine == GAP else MISSING if theirs == GAP else WRONG
            in_phrase = theirs != GAP and bool(text.in_phrase) and text.in_phrase[taken]
            slot.cells[number].append(Mark(theirs, kind, in_phrase))
            if theirs != GAP:
                slot.starts.extend(text.starts[taken : taken + 1])
                taken += 1
    return slots
