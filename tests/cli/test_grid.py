"""A decoder at a point of the grid is the decoder that one would have made with these options."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.cli.grid import Point, at_point
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from tests.random_models import random_log_probs

pytest.importorskip("kaldifst")
from tests.search.paged_biglm.models import VOCAB, make, random_lm

FRAMES = 30


def decoded(decoder):
    log_probs = random_log_probs(3, FRAMES, VOCAB + 1, seed=3)
    return [(n.best.text, n.best.score) for n in decoder.decode(log_probs, [FRAMES] * 3)]


def test_both_lms_get_the_weights_of_the_point():
    lms = random_lm(1), random_lm(20, keep=0.8)
    decoder = make(*lms, beam=20.0)
    first = decoded(decoder)
    point = Point(beam_width=12.0, lm_weight=0.5, large_lm_weight=0.25)
    at = decoded(at_point(decoder, point))
    assert at == decoded(make(*lms, beam=12.0, lm_weight=0.5, large_lm_weight=0.25)) != first
    assert decoded(at_point(decoder, Point())) == first == decoded(decoder)


def test_phrases_are_weighted_or_taken_away():
    decoder = make(random_lm(1), random_lm(20, keep=0.8), beam=20.0)
    plain = decoded(decoder)
    boosting = build_word_boosting(dict.fromkeys(decoder.graph.words[1:3], 1.0), decoder.graph)
    decoder = decoder.with_options(decoder.config, Fusion(boosting=boosting))
    assert decoded(at_point(decoder, Point(boosting_weight=9.0))) != plain
    assert decoded(at_point(decoder, Point())) == plain


@pytest.mark.parametrize(
    "point", [Point(boosting_weight=-1.0), Point(large_lm_weight=-0.5), Point(beam_width=0.0)]
)
def test_values_out_of_range_are_refused(point):
    decoder = make(random_lm(1), random_lm(20, keep=0.8))
    with pytest.raises(ValueError, match=r"is -?\d\.\d, expected"):
        at_point(decoder, point)
