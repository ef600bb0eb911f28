"""Write a transcript as subtitles, lines of words with their times, in SubRip, WebVTT, TSV or text."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from nemo_gpu_decoding.fusion.phrases import is_unspaced
from nemo_gpu_decoding.transcript import Word, clock

FORMATS = ("srt", "vtt", "tsv", "txt")
MAX_CHARACTERS = 42  # of a line, usual for subtitles
MAX_UNSPACED = 20  # of a line in a script without spaces
MAX_SECONDS = 7.0
JOINT = "\N{WORD JOINER}"  # before a piece of a word that is not its first


def subtitles(parts: Sequence[Sequence[Word]], file_format: str, min_pause: float) -> str:
    """Return the content of a file of subtitles.

    Args:
        parts: the words of each part of the transcript, in order; a line ends with its part.
        file_format: one of `FORMATS`; the times of tsv are milliseconds.
        min_pause: a pause of so many seconds, or longer, ends a line.
    """
    shown = []
    for number, line in enumerate((line for words in parts for line in lines(words, min_pause)), 1):
        text = _text(line)
        start, end = line[0].start, line[-1].end
        if file_format == "srt":
            shown.append(f"{number}\n{_time(start, ',')} --> {_time(end, ',')}\n{text}\n")
        elif file_format == "vtt":
            escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            shown.append(f"{_time(start, '.')} --> {_time(end, '.')}\n{escaped}\n")
        elif file_format == "tsv":
            shown.append(f"{round(start * 1000)}\t{round(end * 1000)}\t{text}")
        else:
            shown.append(text)
    header = {"vtt": ["WEBVTT\n"], "tsv": ["start\tend\ttext"]}.get(file_format, [])
    return "".join(f"{text}\n" for text in [*header, *shown])


def lines(words: Sequence[Word], min_pause: float) -> Iterator[Sequence[Word]]:
    """Yield the words of each line: lines end at pauses of `min_pause`, and longer ones at their longest pauses."""
    words = [piece for word in words for piece in word.pieces or _characters(word)]
    begin = 0
    for n in range(1, len(words) + 1):
        if n == len(words) or words[n].start - words[n - 1].end >= min_pause:
            yield from _fitting(words[begin:n])
            begin = n


def _characters(word: Word) -> Iterator[Word]:
    """Yield the characters of a word without pieces that is too long for a line; other words stay whole."""
    text, seconds = word.word, word.end - word.start
    is_whole = is_line(text, seconds) or not any(map(is_unspaced, text))
    begins = [0] if is_whole else [n for n in range(len(text)) if not n or not belongs_to_last(text[n])]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        start, stop = (word.start + seconds * n / len(text) for n in (begin, end))
        yield word._replace(word=JOINT * (begin > 0) + text[begin:end], start=start, end=stop)


def belongs_to_last(character: str) -> bool:
    """Return whether this is a mark or a closing sign, which stays with the character before."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Pe", "Pf", "Po")


def _fitting(words: Sequence[Word]) -> Iterator[Sequence[Word]]:
    """Yield words in lines that are short enough."""
    if is_line(_text(words), words[-1].end - words[0].start) or len(words) == 1:
        yield words
        return
    middle = len(words) / 2
    # of equal pauses the one in the middle
    n = max(range(1, len(words)), key=lambda n: (words[n].start - words[n - 1].end, -abs(n - middle)))
    yield from _fitting(words[:n])
    yield from _fitting(words[n:])


def is_line(text: str, seconds: float) -> bool:
    """Return whether a text of so many seconds is short enough for a line."""
    most = MAX_UNSPACED if any(map(is_unspaced, text)) else MAX_CHARACTERS
    return len(text) <= most and seconds <= MAX_SECONDS


def _text(words: Sequence[Word]) -> str:
    return " ".join(word.word for word in words).replace(f" {JOINT}", "").removeprefix(JOINT)


def _time(seconds: float, mark: str) -> str:
    """Format seconds as HH:MM:SS,mmm, with `mark` before the milliseconds."""
    return clock(seconds).replace(".", mark).zfill(12)
