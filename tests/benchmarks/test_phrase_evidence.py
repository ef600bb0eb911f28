"""Measures of the evidence of phrases."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import phrase_evidence as measures
from nemo_gpu_decoding.search.result import FoundPhrase, NBest, Path, ScoreParts


def result(posteriors, score, boosting=0.0, phrases=()):
    """Tokens at the frames 0, 2, 4 and so on."""
    n = len(posteriors)
    confidence = np.array(posteriors, np.float32)
    parts = ScoreParts(score - boosting, boosting=boosting)
    path = Path(np.arange(n), 2 * np.arange(n), np.ones(n, np.int32), confidence, score, parts)
    return NBest((path,), phrases=tuple(phrases))


def test_phrases_are_compared_with_the_result_without_phrases():
    ann, bob = FoundPhrase("ann", 0, 2, 0, 3, 0.3), FoundPhrase("bob", 3, 4, 6, 7, 0.1)
    boosted = result([0.9, 0.1, 0.5, 0.1], score=-3.0, boosting=2.0, phrases=[ann, bob])
    plain = result([0.9, 0.4, 0.5, 0.8], score=-4.0)
    texts = {"default": "ann sees bob", "none": "anne sees Bob"}
    results = {"default": boosted, "none": plain}
    kind = SimpleNamespace(default=1.0)
    cell = SimpleNamespace(kind=kind, results=lambda way, _: [("ann sees rob", texts[way.name], results[way.name])])
    first, second = measures.judged(cell, "dev")
    assert first[:2] == (True, False)
    assert second[:2] == (False, True)
    logs = np.log([0.9, 0.1, 0.9, 0.4])
    assert first.evidence == pytest.approx((logs[1], logs[:2].mean(), logs[:2].mean() - logs[2:].mean(), -0.5))


def test_thresholds_lose_no_spoken_phrase():
    def judged(is_spoken, value, *, is_plain=False):
        return measures.Judged(is_spoken, is_plain, measures.Evidence(value, value, value, -value))

    dev = [judged(True, -1.0), judged(True, -3.0), judged(True, -9.0, is_plain=True), judged(False, -8.0)]
    lists = {"dev": dev, "dev-wrong": [judged(False, -2.0), judged(False, -4.0)], "test-wrong": [judged(False, -3.0)]}
    rows = list(measures.rows_of(lists))
    assert rows[0] == ["evidence", 2, "0.75", "-3.00", 2, 1, 1, 1]
    assert rows[3] == ["score difference", 2, "0.25", "1.00", 2, 2, 1, 1]
