"""Maps of word confidence, against the definition of logistic regression and against known measures."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from nemo_gpu_decoding.metrics import ConfidenceMap, calibrated, fit_map, measure, right_words


@pytest.mark.parametrize("seed", range(10))
def test_fitted_map_recovers_the_probabilities(seed):
    """Words whose probability of being right is a logistic function of the logit of their confidence."""
    rng = np.random.default_rng(seed)

    def draw():
        confidence = rng.random(4000)
        return confidence, (rng.random(4000) < probability(confidence)).tolist()

    def probability(confidence):
        return 1 / (1 + np.exp(-(1.5 * np.log(confidence / (1 - confidence)) + 2)))

    confidence, right = draw()
    fitted = fit_map(confidence.tolist(), right)
    assert fitted == pytest.approx((1.5, 2), abs=0.25)
    probes = np.linspace(0.05, 0.95, 19)
    assert np.abs(np.array(calibrated(probes.tolist(), fitted)) - probability(probes)).max() < 0.05
    others, right = draw()
    before, after = measure(others, right), measure(calibrated(others.tolist(), fitted), right)
    assert before.ece > 0.1
    assert after.ece < 0.03
    assert after.nce > before.nce
    assert after.auc == pytest.approx(before.auc, abs=1e-9)


def test_the_map_has_the_largest_likelihood_of_its_targets():
    rng = np.random.default_rng(0)
    confidence = rng.random(50)
    right = rng.random(50) < confidence
    targets = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))

    def likelihood(slope, intercept):
        own = np.array(calibrated(confidence.tolist(), ConfidenceMap(slope, intercept)))
        return (targets * np.log(own) + (1 - targets) * np.log(1 - own)).sum()

    slope, intercept = fit_map(confidence.tolist(), right.tolist())
    for change in ((0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)):
        assert likelihood(slope, intercept) > likelihood(slope + change[0], intercept + change[1])


@pytest.mark.parametrize("right", [True, False])
def test_no_probability_is_zero_or_one(right):
    fitted = fit_map([0.0, 0.5, 1.0] * 20, [right] * 60)
    assert fitted.slope >= 0
    for probability in calibrated([0.0, 0.3, 1.0], fitted):
        assert abs(probability - right) == pytest.approx(1 / 62, abs=1e-3)


def test_decreasing_confidence_gives_a_constant_map():
    fitted = fit_map([0.2] * 30 + [0.8] * 30, [True] * 30 + [False] * 30)
    assert fitted.slope == 0
    assert calibrated([0.1, 0.9], fitted) == pytest.approx([0.5, 0.5])


def test_measures_of_useless_and_of_perfect_confidences_are_exact():
    right = [True] * 60 + [False] * 40
    assert measure([0.6] * 100, right) == pytest.approx((0.0, 0.0, 0.5), abs=1e-9)
    assert measure([1.0] * 60 + [0.0] * 40, right) == pytest.approx((0.0, 1.0, 1.0), abs=1e-4)
    ece, nce, _ = measure([0.9] * 100, right)
    assert ece == pytest.approx(0.3)
    assert nce < 0
    assert np.isnan(measure([0.9, 0.8], [True, True]).nce)


def test_equal_confidences_have_one_probability():
    fitted = fit_map([0.5] * 40, [True] * 30 + [False] * 10)
    assert calibrated([0.5], fitted) == pytest.approx([(30 * 31 / 32 + 10 / 12) / 40], abs=1e-4)
    with pytest.raises(ValueError, match="19 words have a confidence, expected at least 20"):
        fit_map([0.5] * 19, [True] * 19)


def test_right_words_are_those_of_the_alignment():
    assert right_words("a b c", ["a", "x", "b", "c"]) == [True, False, True, True]
    assert right_words("a b", ["a"]) == [True]
    assert right_words("", ["a"]) == [False]
    assert right_words("a", []) == []
