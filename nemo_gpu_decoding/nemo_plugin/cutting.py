"""The segments of a long recording: cut at pauses between words, near a target length, without silence around them.

Silence around speech costs accuracy: NeMo normalises features by their mean and variance over the whole segment, and
many models were trained without silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nemo_gpu_decoding.checks import check_number

SHORTEST = 1.0  # seconds of a segment; NeMo pads shorter files on both sides, which would shift times
_ROOM = 0.5  # seconds between a cut and the next word; more is not better
_LONG_PAUSE = 0.6  # seconds of silence between segments, or `min_pause` if that is longer
_KEPT = 0.16  # seconds of silence that a segment keeps at both ends


@dataclass(frozen=True)
class Cutting:
    """Where long recordings are cut. Times are in seconds.

    Args:
        segment_seconds: target length of a segment, >= 2.
        max_segment_seconds: maximum length of a segment, >= segment_seconds. Longer recordings are cut.
        min_pause: minimum time between two words for a cut, > 0.
    """

    segment_seconds: float = 30.0
    max_segment_seconds: float = 60.0
    min_pause: float = 0.3

    def __post_init__(self) -> None:
        for name in ("segment_seconds", "max_segment_seconds", "min_pause"):
            check_number(name, getattr(self, name), above_zero=True)
        if self.segment_seconds < 2 * SHORTEST:
            raise ValueError(f"segment_seconds is {self.segment_seconds}, expected a number >= {2 * SHORTEST}")
        if self.max_segment_seconds < self.segment_seconds:
            raise ValueError(
                f"max_segment_seconds is {self.max_segment_seconds}, expected a number >= segment_seconds, "
                f"{self.segment_seconds}"
            )


def choose_segments(
    words: np.ndarray, loudness: np.ndarray, cutting: Cutting, frame_seconds: float
) -> tuple[list[tuple[int, int]], list[int]]:
    """First and end frame of each segment; and the cuts that are at no pause of `min_pause`.

    Every silence of `_LONG_PAUSE` is between two segments, and only silence is between segments. A recording has at
    least one segment.

    Args:
        words: first and end frame of each word, [W, 2], in order.
        loudness: root mean square of the samples of each frame, [T].
    """
    is_sound = _sound(words, loudness)
    active = np.flatnonzero(is_sound)
    if not len(active):
        return [(0, min(len(loudness), _frames(SHORTEST, frame_seconds)))] if len(loudness) else [], []
    pause = max(_LONG_PAUSE, cutting.min_pause)
    before, after = active[:-1], active[1:]
    is_long = (after - before - 1) * frame_seconds >= pause
    edges = [0, *((before + after + 1)[is_long] // 2).tolist(), len(loudness)]
    segments, doubtful = [], []
    for begin, end in pairwise(edges):
        cuts, unsure = _cuts(words, loudness, (begin, end), cutting, frame_seconds)
        segments += [_trimmed(is_sound, own, frame_seconds) for own in pairwise(cuts)]
        doubtful += unsure
    return [own for own in segments if own[0] < own[1]], doubtful


def _frames(seconds: float, frame_seconds: float) -> int:
    return max(1, int(seconds / frame_seconds))


def _sound(words: np.ndarray, loudness: np.ndarray) -> np.ndarray:
    """Whether a frame is in a word, or louder than silence, [T] bool.

    Words that the greedy pass misses are louder than silence. The level of silence is estimated from the recording,
    and is between -34 and -20 dB of the level of words.
    """
    in_word = np.zeros(len(loudness), bool)
    for begin, end in words:
        in_word[begin:end] = True
    if not len(loudness):
        return in_word
    speech = np.median(loudness[in_word] if in_word.any() else loudness)
    return in_word | (loudness > np.clip(3 * np.percentile(loudness, 10), 0.02 * speech, 0.1 * speech))


def _trimmed(is_sound: np.ndarray, segment: tuple[int, int], frame_seconds: float) -> tuple[int, int]:
    """A segment with at most `_KEPT` seconds of silence at both ends, empty if all of it is silent.

    It has at least SHORTEST seconds, if there are so many.
    """
    begin, end = segment
    active = begin + np.flatnonzero(is_sound[begin:end])
    if not len(active):
        return begin, begin
    kept = _frames(_KEPT, frame_seconds)
    first, last = max(begin, int(active[0]) - kept), min(end, int(active[-1]) + 1 + kept)
    missing = max(0, _frames(SHORTEST, frame_seconds) - (last - first))
    first = max(begin, first - missing // 2)
    last = min(end, max(last, first + _frames(SHORTEST, frame_seconds)))
    return first, last


def _cuts(
    words: np.ndarray, loudness: np.ndarray, span: tuple[int, int], cutting: Cutting, frame_seconds: float
) -> tuple[list[int], list[int]]:
    """The ends of a span and the cuts within it; and those of the cuts that are at no pause of `min_pause`."""
    target, most, shortest = (
        _frames(seconds, frame_seconds) for seconds in (cutting.segment_seconds, cutting.max_segment_seconds, SHORTEST)
    )
    cuts, doubtful, total = [span[0]], [], span[1]
    # relative to speech: words that the greedy pass misses look like a pause, but are as loud as the others
    level = loudness / max(float(np.median(loudness)), 1e-9)
    while total - cuts[-1] > most:
        begin = cuts[-1]
        places = np.arange(begin + shortest, min(begin + most, total - shortest) + 1)
        before, after = _distances(words, places)
        pause = (before + after) * frame_seconds
        room = np.minimum(np.minimum(before, after) * frame_seconds, _ROOM) / _ROOM
        noise = np.minimum(np.maximum(level[places - 1], level[places]), 1.0)
        score = room - noise - np.abs(places - begin - target) / target
        between = np.minimum(before, after) >= 0
        is_pause = between & (pause >= cutting.min_pause)
        if is_pause.any():
            best = int(np.argmax(np.where(is_pause, score, -np.inf)))
        else:  # the longest pause; inside a word only if one fills the range
            longest = np.max(pause[between]) if between.any() else 0.0
            score = np.where(between & (pause >= longest), score, -np.inf) if between.any() else -loudness[places]
            best = int(np.argmax(score))
            doubtful.append(int(places[best]))
        reach = int(max(0, min(before[best], after[best], _ROOM / frame_seconds)) / 2)
        near = places[max(0, best - reach) : best + reach + 1]
        cuts.append(int(near[np.argmin(loudness[near - 1] + loudness[near])]))
        if doubtful and doubtful[-1] == places[best]:
            doubtful[-1] = cuts[-1]
    return [*cuts, total], doubtful


def _distances(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frames between each place and the word before it, and the word after it; negative inside a word."""
    starts = np.append(words[:, 0], np.inf)
    ends = np.insert(np.maximum.accumulate(words[:, 1]).astype(float), 0, -np.inf)
    number = np.searchsorted(words[:, 0], places, side="left")  # of words that begin before the place
    return places - ends[number], starts[number] - places
