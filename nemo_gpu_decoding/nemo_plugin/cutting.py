"""Cut a long recording at pauses between words, near a target length, without silence around the segments.

Models that were trained without silence make errors beside it. The words of a greedy pass show where cuts are allowed.
Loudness shows where sound begins and ends, because a word of the greedy pass may span a pause or be noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.schema import checked_options, option

USUAL = 30.0  # seconds of a segment, if the lengths of training are unknown
MIN_PAUSE = 0.3  # seconds without a word, for a cut and between lines of subtitles
# seconds; the largest one is the longest pause that a segment of a model that was trained on long utterances keeps
PAUSES = (1.5, 1.0, 0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.05)
_LONG_SHARE = 0.02  # share of the sound that may be in segments that are too long
SHORTEST = 1.0  # seconds of a segment; NeMo pads shorter files on both sides, which would shift times
_ROOM = 0.5  # seconds between a cut and the next word; a longer distance is no better
_WORD_SILENCE = 0.4  # seconds; a longer silence within a greedy word is a pause, closures of stops are below 0.2
Span = tuple[int, int]  # first and end step
_FAINT = 0.3  # seconds of faint sound that a segment keeps beside louder sound: fricatives, breath, reverberation


@checked_options
@dataclass
class Cutting:
    """Options for the length of segments in long recordings, and for segments to leave out."""

    topic = "long recordings"

    # Usual length of a segment, seconds, >= 2. Files that are longer than twice this length are cut, at pauses between
    # words. The LM and phrases begin anew in each segment. null: files of more than 60 seconds are cut, into segments
    # that are at most as long as the utterances that the model was trained on (train_ds.max_duration of its config).
    segment_seconds: float | None = option(None, low=2 * SHORTEST)
    # Segments of long files whose words have a lower mean confidence are left out: music and noise. A number in
    # [0, 1]; 0 keeps all. The option implies timestamps.
    min_confidence: float = option(0.0, low=0, high=1)

    @property
    def window_seconds(self) -> float:
        """Return the length of a window of the greedy pass, seconds."""
        return self.segment_seconds or USUAL

    @property
    def whole_seconds(self) -> float:
        """Return the maximum duration, in seconds, of a file that is not cut."""
        return 2 * self.window_seconds

    def limits(self, trained_seconds: float | None) -> Limits:
        """Return the maximum length of segments, and the pauses to try.

        Args:
            trained_seconds: longest utterance that the model was trained on; None means unknown.
        """
        if self.segment_seconds:
            return Limits(self.whole_seconds)
        if not trained_seconds:
            return Limits(self.whole_seconds, tuple(pause for pause in PAUSES if pause <= MIN_PAUSE))
        return Limits(max(trained_seconds, 2 * SHORTEST))


class Limits(NamedTuple):
    """The maximum length of a segment, and candidates for the pause that always ends a segment."""

    longest: float  # seconds; half of it is the usual length
    pauses: tuple[float, ...] = PAUSES


class _Levels(NamedTuple):
    """The levels (root mean square of samples) that separate speech, noise and silence in a recording."""

    speech: float  # median of words
    noise: float  # of silence, if the recording has silence
    loud: float  # sound above it is speech
    faint: float  # sound above it, beside louder sound, is speech
    quiet: float  # below it is the background noise alone


def choose_segments(
    words: np.ndarray, loudness: np.ndarray, limits: Limits, step_seconds: float
) -> tuple[list[Span], list[int]]:
    """Return first and end step of each segment, and the cuts outside pauses of `MIN_PAUSE`.

    Every pause above a threshold ends a segment. The threshold is the longest pause in `limits` with which nearly all
    sound is in segments of valid length. Segments that are too long are cut. Between segments there is only silence. A
    recording has at least one segment.

    Args:
        words: first and end step of each word, [W, 2] int, in order.
        loudness: root mean square of the samples of each step, [T].
    """
    if not len(loudness):
        return [], []
    levels = _levels(words, loudness)
    for pause in limits.pauses:
        is_sound, begins, ends = _parts(words, loudness, levels, pause, step_seconds)
        if not len(begins):
            return [(0, min(len(loudness), _steps(SHORTEST, step_seconds)))], []
        lengths = ends - begins
        if lengths[lengths * step_seconds > limits.longest].sum() <= _LONG_SHARE * lengths.sum():
            break
    edges = [0, *((ends[:-1] + begins[1:]) // 2).tolist(), len(loudness)]
    segments, doubtful = [], []
    for begin, end in pairwise(edges):
        cuts, unsure = _cuts(words, loudness, (begin, end), limits.longest, step_seconds, levels)
        for span in pairwise(cuts):
            sound = _with_faint(is_sound, loudness, span, levels, step_seconds)
            segments.append(_lengthened(sound, span, step_seconds))
        doubtful += unsure
    return [span for span in segments if span[0] < span[1]], doubtful


def _parts(
    words: np.ndarray, loudness: np.ndarray, levels: _Levels, pause: float, step_seconds: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return whether each step is sound, [T], and the first and end step of each part between long pauses, [P].

    A pause is long if background noise lasts `pause` seconds, or silence twice as long. Silence may be up to 20 dB
    below the words, as in the closure of a stop consonant.
    """
    is_quiet = _quiet(loudness, levels, pause, step_seconds)
    is_sound = _sound(words, loudness, levels, is_quiet, _steps(min(_WORD_SILENCE, 2 * pause), step_seconds))
    runs = np.flatnonzero(np.diff(np.pad(is_sound, 1))).reshape(-1, 2)  # first and end step of each sound
    before, after = runs[:-1, 1], runs[1:, 0]
    is_long = (after - before) * step_seconds >= 2 * pause - 1e-9
    is_long |= np.array([is_quiet[first:end].any() for first, end in zip(before, after, strict=True)], bool)
    return is_sound, np.append(runs[:1, 0], after[is_long]), np.append(before[is_long], runs[-1:, 1])


def onset(samples: np.ndarray, rate: int, silence: float) -> int:
    """Return the number of silent samples at the beginning of a segment's first step, in units of 1 ms.

    5 ms of silence, or a start 5 ms too late, cause errors: encoders that normalise features see an outlier.

    Args:
        samples: samples of the first step, [N].
        silence: root mean square below which samples are silent; lower in a quiet step.
    """
    size = max(1, rate // 1000)
    parts = samples[: len(samples) // size * size].reshape(-1, size)
    squares = np.mean(np.square(parts, dtype=np.float64), axis=1)
    if not len(squares):
        return 0
    return size * int(np.argmax(squares > min(silence**2, float(np.mean(squares)) / 4)))


def _steps(seconds: float, step_seconds: float) -> int:
    return max(1, int(seconds / step_seconds + 1e-9))


def _levels(words: np.ndarray, loudness: np.ndarray) -> _Levels:
    """Measure the levels of a recording. The level `loud` is 10 dB above noise, within -34 .. -20 dB of words."""
    in_word = np.zeros(len(loudness), bool)
    for begin, end in words:
        in_word[begin:end] = True
    speech = float(np.median(loudness[in_word] if in_word.any() else loudness))
    noise = float(np.percentile(loudness, 10))
    loud = float(np.clip(3 * noise, 0.02 * speech, 0.1 * speech))
    floor = float(np.percentile(loudness, 2))  # pauses may be less than a tenth of the time
    faint, quiet = (min(loud, max(level, 0.003 * speech)) for level in (1.3 * noise, 1.4 * floor))
    return _Levels(speech, noise, loud, faint, quiet)


def _sound(words: np.ndarray, loudness: np.ndarray, levels: _Levels, is_quiet: np.ndarray, longest: int) -> np.ndarray:
    """Return whether each step is louder than silence or within a word, [T] bool.

    Words that the greedy pass misses count as sound if they are louder than silence. The loudest step of a quiet word
    decides. A word that is no louder than silence is noise. Silence in a word is a pause if it has more steps
    than `longest`, or is background noise.
    """
    is_sound = loudness > levels.loud
    for begin, end in words:
        of_word = loudness[begin:end]
        active = np.flatnonzero(of_word > min(levels.loud, max(2 * levels.noise, 0.1 * np.max(of_word, initial=0))))
        is_sound[begin + active] = True
        for first, last in pairwise(active):
            if last - first <= longest:
                is_sound[begin + first + 1 : begin + last] = ~is_quiet[begin + first + 1 : begin + last]
    return is_sound


def _quiet(loudness: np.ndarray, levels: _Levels, seconds: float, step_seconds: float) -> np.ndarray:
    """Return whether each step is background noise that lasts at least `seconds`, [T] bool."""
    is_quiet = loudness <= levels.quiet
    for begin, end in np.flatnonzero(np.diff(np.pad(is_quiet, 1))).reshape(-1, 2):
        is_quiet[begin:end] = (end - begin) * step_seconds >= seconds - 1e-9
    return is_quiet


def _with_faint(is_sound: np.ndarray, loudness: np.ndarray, span: Span, levels: _Levels, step_seconds: float) -> Span:
    """Return first and end step of the sound in a span, with faint sound beside it; without sound, an empty span."""
    begin, end = span
    active = begin + np.flatnonzero(is_sound[begin:end])
    if not len(active):
        return begin, begin
    first, last, most = int(active[0]), int(active[-1]) + 1, _steps(_FAINT, step_seconds)
    begin, end = max(begin, first - most), min(end, last + most)
    quiet_before = np.flatnonzero(loudness[begin:first] <= levels.faint)
    quiet_after = np.flatnonzero(loudness[last:end] <= levels.faint)
    return (
        begin + int(quiet_before[-1]) + 1 if len(quiet_before) else begin,
        last + int(quiet_after[0]) if len(quiet_after) else end,
    )


def _lengthened(sound: Span, segment: Span, step_seconds: float) -> Span:
    """Add silence beside the sound of a segment until the segment lasts SHORTEST seconds, if there is enough."""
    (begin, end), (first, last) = segment, sound
    if first == last:
        return sound
    shortest = _steps(SHORTEST, step_seconds)
    missing = max(0, shortest - (last - first))
    first = max(begin, first - missing // 2)
    return first, min(end, max(last, first + shortest))


def _cuts(
    words: np.ndarray, loudness: np.ndarray, span: Span, longest: float, step_seconds: float, levels: _Levels
) -> tuple[list[int], list[int]]:
    """Return begin, cuts and end of a span in steps, and the cuts outside pauses of `MIN_PAUSE`."""
    target, most, shortest = (_steps(seconds, step_seconds) for seconds in (longest / 2, longest, SHORTEST))
    cuts, doubtful, total = [span[0]], [], span[1]
    while total - cuts[-1] > most:
        begin = cuts[-1]
        places = np.arange(begin + shortest, min(begin + most, total - shortest) + 1)
        before, after = _distances(words, places)
        pause = (before + after) * step_seconds
        room = np.minimum(np.minimum(before, after) * step_seconds, _ROOM) / _ROOM
        # words that the greedy pass misses look like a pause, but are as loud as the others
        level = np.maximum(loudness[places - 1], loudness[places]) / max(levels.speech, 1e-9)
        score = room - np.minimum(level, 1.0) - np.abs(places - begin - target) / target
        between = np.minimum(before, after) >= 0
        is_pause = between & (pause >= MIN_PAUSE)
        if is_pause.any():
            best = int(np.argmax(np.where(is_pause, score, -np.inf)))
        else:  # the longest pause; inside a word only if one fills the range
            most_pause = np.max(pause[between]) if between.any() else 0.0
            score = np.where(between & (pause >= most_pause), score, -np.inf) if between.any() else -loudness[places]
            best = int(np.argmax(score))
            doubtful.append(int(places[best]))
        reach = int(max(0, min(before[best], after[best], _ROOM / step_seconds)) / 2)
        near = places[max(0, best - reach) : best + reach + 1]
        cuts.append(int(near[np.argmin(loudness[near - 1] + loudness[near])]))
        if doubtful and doubtful[-1] == places[best]:
            doubtful[-1] = cuts[-1]
    return [*cuts, total], doubtful


def _distances(words: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of steps from each place to the previous and to the next word; negative inside a word."""
    starts = np.append(words[:, 0], np.inf)
    ends = np.insert(np.maximum.accumulate(words[:, 1]).astype(float), 0, -np.inf)
    number = np.searchsorted(words[:, 0], places, side="left")  # of words that begin before the place
    return places - ends[number], starts[number] - places
