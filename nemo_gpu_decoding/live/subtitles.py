"""Divide a transcript into subtitle lines with times, and format them as SubRip, WebVTT, TSV or text."""

from collections.abc import Iterator, Sequence

from nemo_gpu_decoding.transcript import Transcript, Word, clock
from nemo_gpu_decoding.words import divided, has_unspaced

FORMATS = ("srt", "vtt", "tsv", "txt")
MAX_CHARACTERS = 42  # of a line, usual for subtitles
MAX_UNSPACED = 20  # characters of a line in a script without spaces
MAX_SECONDS = 7.0


def subtitles(parts: Sequence[Transcript], file_format: str, min_pause: float) -> str:
    """Return the content of a subtitle file.

    Args:
        parts: the transcript of each part, in order; no line spans two parts.
        file_format: one of `FORMATS`; tsv has times in milliseconds.
        min_pause: a pause of so many seconds or more ends a line.
    """
    shown = []
    for number, line in enumerate((line for part in parts for line in lines(part, min_pause)), 1):
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


def lines(part: Transcript, min_pause: float) -> Iterator[Sequence[Word]]:
    """Yield the words of each line: a line ends at a pause of `min_pause`; long lines are divided at long pauses.

    The text of a word in a line begins with the space that is before the word in the transcript.
    """
    words = [piece for word in _spaced(part) for piece in word]
    begin = 0
    for n in range(1, len(words) + 1):
        if n == len(words) or words[n].start - words[n - 1].end >= min_pause:
            yield from _fitting(words[begin:n])
            begin = n


def _spaced(part: Transcript) -> Iterator[Sequence[Word]]:
    """Yield each word, or its pieces, with the space that is before the word in the transcript."""
    text, at = part.text, 0
    for word in part.words:
        follows = at > 0 and text.startswith(word.word, at) and has_unspaced(text[at - 1] + word.word[:1])
        at = max(text.find(word.word, at), at) + len(word.word)
        first, *others = word.pieces or _characters(word)
        yield [first if follows else first._replace(word=f" {first.word}"), *others]


def _characters(word: Word) -> Iterator[Word]:
    """Divide a word without pieces into characters if it is too long for a line; yield other words whole."""
    text, seconds = word.word, word.end - word.start
    is_whole, end = is_line(text, seconds) or not has_unspaced(text), 0
    for character in [text] if is_whole else divided(text):
        begin, end = end, end + len(character)
        start, stop = (word.start + seconds * n / len(text) for n in (begin, end))
        yield word._replace(word=character, start=start, end=stop)


def _fitting(words: Sequence[Word]) -> Iterator[Sequence[Word]]:
    """Divide words into lines of valid length, at the longest pauses, and yield the words of each line."""
    if is_line(_text(words), words[-1].end - words[0].start) or len(words) == 1:
        yield words
        return
    middle = len(words) / 2
    # of equal pauses the one in the middle
    n = max(range(1, len(words)), key=lambda n: (words[n].start - words[n - 1].end, -abs(n - middle)))
    yield from _fitting(words[:n])
    yield from _fitting(words[n:])


def is_line(text: str, seconds: float) -> bool:
    """Return whether a text that lasts `seconds` is short enough for one subtitle line."""
    most = MAX_UNSPACED if has_unspaced(text) else MAX_CHARACTERS
    return len(text) <= most and seconds <= MAX_SECONDS


def _text(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words).strip()


def _time(seconds: float, mark: str) -> str:
    """Format seconds as HH:MM:SS,mmm, with `mark` in place of the comma before the milliseconds."""
    return clock(seconds).replace(".", mark).zfill(12)
