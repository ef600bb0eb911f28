"""The cuts of a long recording: at pauses between words, near a target length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.checks import check_number

SHORTEST = 1.0  # seconds of a segment; NeMo pads shorter files on both sides, which would shift times
_ROOM = 0.5  # seconds between a cut and the next word; more is not better


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


def choose_cuts(
    words: np.ndarray, loudness: np.ndarray, cutting: Cutting, frame_seconds: float
) -> tuple[list[int], list[int]]:
    """Frames at which segments begin, with the end of the recording; and the cuts that are at no pause of `min_pause`.

    Args:
        words: first and end frame of each word, [W, 2], in order.
        loudness: root mean square of the samples of each frame, [T].
    """
    target, most, shortest = (
        max(1, int(seconds / frame_seconds))
        for seconds in (cutting.segment_seconds, cutting.max_segment_seconds, SHORTEST)
    )
    cuts, doubtful, total = [0], [], len(loudness)
    # relative to speech: words that the greedy pass misses look like a pause, but are as loud as the others
    level = loudness / max(float(np.median(loudness)) if total else 0.0, 1e-9)
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
    return ([*cuts, total] if total else [0]), doubtful


def _distances(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Frames between each place and the word before it, and the word after it; negative inside a word."""
    starts = np.append(words[:, 0], np.inf)
    ends = np.insert(np.maximum.accumulate(words[:, 1]).astype(float), 0, -np.inf)
    number = np.searchsorted(words[:, 0], places, side="left")  # of words that begin before the place
    return places - ends[number], starts[number] - places
