"""flexctc_beam against the enumeration of all alignments: a beam that never prunes finds the truth."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.oracles.ctc import ranking
from tests.random_models import random_boosting, random_lm, random_log_probs

problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "frames": st.integers(1, 5),
        "vocab_size": st.integers(1, 3),
        "sharpness": st.sampled_from([0.3, 1.0, 3.0]),
        "beam_beta": st.sampled_from([-0.5, 0.0, 0.7]),
        "lm_weight": st.sampled_from([0.0, 0.5, 1.0]),
        "boosting_weight": st.sampled_from([0.0, 0.8]),
    }
)


def fusion_of(problem):
    vocab_size, seed = problem["vocab_size"], problem["seed"]
    return Fusion(
        random_lm(vocab_size, seed=seed), problem["lm_weight"],
        random_boosting(vocab_size, seed=seed, phrases=2), problem["boosting_weight"],
    )  # fmt: skip


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@settings(max_examples=60, deadline=None)
@given(problem=problems, blank_first=st.booleans())
def test_wide_beam_finds_the_true_n_best(merge, problem, blank_first):
    vocab_size, frames = problem["vocab_size"], problem["frames"]
    blank_id = 0 if blank_first else vocab_size
    log_probs = random_log_probs(
        1, frames, vocab_size + 1, seed=problem["seed"], sharpness=problem["sharpness"]
    )
    fusion = fusion_of(problem)
    expected = ranking(
        log_probs[0].numpy().astype(np.float64), blank_id,
        add=merge != "max", fusion=fusion, beam_beta=problem["beam_beta"],
    )  # fmt: skip
    config = FlexCTCConfig(
        beam_size=2048,
        n_best=10,
        beam_beta=problem["beam_beta"],
        beam_threshold=float("inf"),
        merge=merge,
    )
    nbest = FlexCTCBeam(vocab_size, blank_id, config, fusion).decode(log_probs, [frames])[0]
    assert len(nbest) == min(10, len(expected))
    scores = {text: score for score, text in expected}
    for path, (score, _) in zip(nbest, expected, strict=False):
        assert path.score == pytest.approx(score, abs=1e-4)
        assert scores[tuple(path.tokens.tolist())] == pytest.approx(score, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(problem=problems, beam_size=st.integers(1, 8))
def test_a_beam_never_beats_the_truth(problem, beam_size):
    vocab_size, frames = problem["vocab_size"], problem["frames"]
    log_probs = random_log_probs(
        1, frames, vocab_size + 1, seed=problem["seed"], sharpness=problem["sharpness"]
    )
    fusion = fusion_of(problem)
    best, _ = ranking(
        log_probs[0].numpy().astype(np.float64), vocab_size,
        add=False, fusion=fusion, beam_beta=problem["beam_beta"],
    )[0]  # fmt: skip
    config = FlexCTCConfig(beam_size=beam_size, beam_beta=problem["beam_beta"])
    path = FlexCTCBeam(vocab_size, vocab_size, config, fusion).decode(log_probs, [frames])[0].best
    assert path.score <= best + 1e-4
