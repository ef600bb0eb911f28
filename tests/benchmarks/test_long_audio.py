"""The threshold of `min_confidence`, and the sounds between utterances."""

import numpy as np
import pytest

from benchmarks.long_audio import _SOUNDS, RATE, Recording, confidences, threshold
from nemo_gpu_decoding.transcript import Segment, Transcript, Word


@pytest.mark.parametrize(
    ("sounds", "speech", "expected"),
    [
        ([0.1, 0.2], [0.4, 0.8], ["0.300", 2, 0, 2, 0, "1.000"]),
        ([0.1, 0.35], [0.3, 0.4, 0.8, 0.82], ["0.200", 2, 1, 4, 0, "0.875"]),  # of two with one error, the wider gap
        ([0.1, 0.2, 0.5], [0.3, 0.6, 0.9], ["0.250", 3, 1, 3, 0, "0.889"]),
        ([0.9], [0.1], ["0.050", 1, 1, 1, 0, "0.000"]),
    ],
)
def test_threshold_of_confidence_has_the_fewest_errors(sounds, speech, expected):
    assert threshold([*((value, False) for value in sounds), *((value, True) for value in speech)]) == expected


def test_confidence_of_a_segment_is_the_mean_of_its_words():
    words = tuple(Word(str(n), n + 0.1, n + 0.9, n / 10) for n in range(6))
    segments = (Segment(0, 2), Segment(2, 4), Segment(4, 5), Segment(5, 6), Segment(7, 8))
    found = confidences(Recording(None, [], [(0.0, 2.0), (5.5, 7.0)]), Transcript("", None, words, segments=segments))
    assert list(found) == [
        (pytest.approx(0.05), True),
        (pytest.approx(0.25), False),
        (pytest.approx(0.4), False),
        (pytest.approx(0.5), True),
    ]


@pytest.mark.parametrize("kind", _SOUNDS)
def test_made_sounds_are_audible_and_finite(kind):
    sound = _SOUNDS[kind](np.random.default_rng(0))
    assert 2 * RATE - 1 <= len(sound) <= 10 * RATE
    assert np.isfinite(sound).all()
    assert np.sqrt(np.mean(sound**2)) > 0.01
    power = np.abs(np.fft.rfft(sound[: 2 * RATE])) ** 2  # bins of 0.5 Hz
    assert (np.sort(power)[-RATE // 10 :].sum() / power.sum() > 0.9) == (kind in ("music", "melody"))
