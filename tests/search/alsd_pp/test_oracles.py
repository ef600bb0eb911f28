"""alsd_pp against brute force on tiny problems and against its own algorithm in plain Python."""

import pytest

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.config import ALSDConfig
from tests.oracles.transducer import Scorer, alsd, brute_force
from tests.random_models import random_boosting, random_lm
from tests.search.transducer.table_networks import TableNetworks, random_frames

DURATIONS = [(), (0, 1), (0, 2, 3), (1, 2), (4, 0, 1)]
BLANK_MODES = {True: "lm_weighted_full", False: "no_score"}


def fusion_of(vocab_size, what, seed=1):
    lm = random_lm(vocab_size, seed=seed) if what in ("lm", "both") else None
    boosting = random_boosting(vocab_size, seed=seed + 1) if what in ("boosting", "both") else None
    return Fusion(lm, 0.5, boosting, 0.7)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("what", ["nothing", "lm", "both"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_a_beam_that_holds_everything_is_exact(durations, what, weighted):
    """Every text with its probability summed over all alignments."""
    networks = TableNetworks(2, durations, seed=7, max_length=3)
    frames = random_frames(1, 3, seed=2)
    fusion = fusion_of(2, what)
    expected = brute_force(Scorer(networks, frames[0], fusion, weighted_blank=weighted), max_length=3)
    config = ALSDConfig(
        beam_size=256, n_best=256, blank_lm_score_mode=BLANK_MODES[weighted], score_norm=False
    )
    nbest = ALSDPlusPlus(networks, config, fusion).decode(frames, [3])[0]
    assert {tuple(path.tokens): path.score for path in nbest} == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pruning", ["late", "early"])
@pytest.mark.parametrize("what", ["nothing", "lm", "boosting", "both"])
@pytest.mark.parametrize("durations", DURATIONS, ids=str)
def test_same_as_plain_python(durations, what, pruning, weighted):
    networks = TableNetworks(9, durations, seed=3)
    for seed, beam_size, max_symbols in ((0, 1, 10), (1, 3, 2), (2, 5, 1), (3, 8, 4)):
        frames = random_frames(1, 9, seed=seed)
        fusion = fusion_of(9, what, seed=seed)
        expected = alsd(
            Scorer(networks, frames[0], fusion, weighted_blank=weighted),
            beam_size=beam_size, max_symbols=max_symbols, early=pruning == "early",
        )  # fmt: skip
        config = ALSDConfig(
            beam_size=beam_size, n_best=beam_size, max_symbols=max_symbols, pruning_mode=pruning,
            blank_lm_score_mode=BLANK_MODES[weighted],
        )  # fmt: skip
        nbest = ALSDPlusPlus(networks, config, fusion).decode(frames, [9])[0]
        assert_same(nbest, expected, durations)


def assert_same(nbest, expected, durations):
    """Texts, scores, times and durations."""
    assert [tuple(path.tokens) for path in nbest] == [text for text, _, _ in expected]
    for path, (_, score, hypothesis) in zip(nbest, expected, strict=True):
        assert path.score == pytest.approx(score, abs=1e-3)
        assert tuple(path.frames) == hypothesis.starts
        if durations:
            assert tuple(path.durations) == hypothesis.durations


def test_temperature_as_in_plain_python():
    networks = TableNetworks(9, (0, 1, 2), seed=3)
    frames = random_frames(1, 9, seed=5)
    expected = alsd(Scorer(networks, frames[0], temperature=1.7), beam_size=4)
    config = ALSDConfig(beam_size=4, n_best=4, softmax_temperature=1.7)
    assert_same(ALSDPlusPlus(networks, config).decode(frames, [9])[0], expected, (0, 1, 2))


def test_blank_scoring_keeps_words():
    """no_score lets an LM delete tokens: every token pays for it, no blank does."""
    networks = TableNetworks(9, seed=3, blank_bias=2.0)
    frames = random_frames(8, 30, seed=4)
    counts = {}
    for mode in ("no_score", "lm_weighted_full"):
        config = ALSDConfig(beam_size=8, blank_lm_score_mode=mode)
        decoder = ALSDPlusPlus(networks, config, Fusion(random_lm(9, seed=1), 0.8))
        counts[mode] = sum(len(nbest.best) for nbest in decoder.decode(frames, [30] * 8))
    plain = sum(
        len(n.best) for n in ALSDPlusPlus(networks, ALSDConfig(beam_size=8)).decode(frames, [30] * 8)
    )
    assert counts["no_score"] < counts["lm_weighted_full"] <= 1.5 * plain
