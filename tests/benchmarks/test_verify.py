"""The interval of the difference of two word error rates."""

import pytest

pytest.importorskip("kaldialign")
from benchmarks.verify import wer_difference


def test_wer_difference_is_paired():
    texts = ["a b c d"] * 50
    worse = ["a b c x"] * 50
    assert wer_difference(texts, worse, worse) == (0.0, 0.0)
    assert wer_difference(texts, texts, worse) == (25.0, 25.0)  # in each utterance, so in each draw
    low, high = wer_difference(texts, texts, worse[:25] + texts[:25])
    assert 5 < low < 12.5 < high < 20
    assert wer_difference(texts, worse[:25] + texts[:25], texts) == pytest.approx((-high, -low))
