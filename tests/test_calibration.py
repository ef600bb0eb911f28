"""Maps of word confidence, against the definition of isotonic regression and against known measures."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.calibration import calibrated, fit_map, is_ascending, measure, right_words


@pytest.mark.parametrize("seed", range(10))
def test_the_map_finds_the_probability(seed):
    """Words that are right with the probability of the square of their confidence."""
    rng = np.random.default_rng(seed)
    confidence = rng.random(4000)
    right = rng.random(4000) < confidence**2
    points = fit_map(confidence.tolist(), right.tolist())
    assert is_ascending(points)
    probes = np.linspace(0.05, 0.95, 19)
    assert np.abs(np.array(calibrated(probes.tolist(), points)) - probes**2).max() < 0.1
    others = rng.random(4000)
    is_right = (rng.random(4000) < others**2).tolist()
    before, after = measure(others, is_right), measure(calibrated(others.tolist(), points), is_right)
    assert before.ece > 0.1
    assert after.ece < 0.04
    assert after.nce > before.nce
    assert after.auc == pytest.approx(before.auc, abs=0.02)


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_isotonic_regression_of_its_groups(seed):
    """By its min-max formula. 30 confidences with ten words each, of which one counts half."""
    rng = np.random.default_rng(seed)
    means = np.sort(rng.random(30))
    right = rng.integers(0, 11, 30)
    found = fit_map(np.repeat(means, 10).tolist(), [n < count for count in right.tolist() for n in range(10)])
    sums = np.append(0, np.cumsum((right + 0.5) / 11))
    expected = [
        max(min((sums[end] - sums[begin]) / (end - begin) for end in range(n + 1, 31)) for begin in range(n + 1))
        for n in range(30)
    ]
    assert sorted({y for _, y in found}) == pytest.approx(sorted(set(np.round(expected, 5))), abs=2e-5)
    for x, y in found:
        own = means[np.isclose(expected, y, atol=2e-5)]
        assert x == pytest.approx(own.mean(), abs=2e-5)


def test_confidences_that_say_nothing_and_those_that_say_all():
    right = [True] * 60 + [False] * 40
    assert measure([0.6] * 100, right) == pytest.approx((0.0, 0.0, 0.5), abs=1e-9)
    assert measure([1.0] * 60 + [0.0] * 40, right) == pytest.approx((0.0, 1.0, 1.0), abs=1e-4)
    ece, nce, _ = measure([0.9] * 100, right)
    assert ece == pytest.approx(0.3)
    assert nce < 0
    assert np.isnan(measure([0.9, 0.8], [True, True]).nce)


def test_equal_confidences_have_one_probability():
    points = fit_map([0.5] * 40, [True] * 30 + [False] * 10)
    assert points == ((0.5, pytest.approx(30.5 / 41, abs=1e-5)),)
    assert calibrated([0.1, 0.9], points) == [points[0][1]] * 2
    with pytest.raises(ValueError, match="19 words have a confidence, expected at least 20"):
        fit_map([0.5] * 19, [True] * 19)


def test_words_that_are_right():
    assert right_words("a b c", ["a", "x", "b", "c"]) == [True, False, True, True]
    assert right_words("a b", ["a"]) == [True]
    assert right_words("", ["a"]) == [False]
    assert right_words("a", []) == []
