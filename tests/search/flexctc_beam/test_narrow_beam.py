"""Narrow beams against the search that scores everything: bounds change nothing, to the bit."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from tests.oracles.ctc_beam import beam_search
from tests.random_models import random_boosting, random_lm, random_log_probs

problems = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "frames": st.integers(1, 12),
        "vocab_size": st.integers(2, 30),
        "sharpness": st.sampled_from([0.3, 1.0, 3.0]),
        "beam_size": st.integers(1, 6),
        "beam_beta": st.sampled_from([-0.5, 0.0, 0.7]),
        "threshold": st.sampled_from([2.0, 8.0, 100.0]),
        "branching": st.sampled_from([1, 2, 12]),  # fewer and more arcs than are offered one by one
    }
)


def hypotheses_of(problem, fusion, *, blank_id):
    """The beam after all frames from `FlexCTCBeam`, as {tokens: score}."""
    log_probs = random_log_probs(
        1, problem["frames"], problem["vocab_size"] + 1,
        seed=problem["seed"], sharpness=problem["sharpness"],
    )  # fmt: skip
    config = FlexCTCConfig(
        beam_size=problem["beam_size"], n_best=problem["beam_size"], beam_beta=problem["beam_beta"],
        beam_threshold=problem["threshold"], threads=1,
    )  # fmt: skip
    decoder = FlexCTCBeam(problem["vocab_size"], blank_id, config, fusion)
    streams = decoder.open(1)
    decoder.push(streams, log_probs, [problem["frames"]])
    found = decoder.partial(streams, problem["beam_size"])[0]
    expected = beam_search(
        log_probs[0].numpy(), blank_id, problem["beam_size"],
        fusion=fusion, beam_beta=problem["beam_beta"], threshold=problem["threshold"],
    )  # fmt: skip
    best: dict[tuple[int, ...], float] = {}
    for score, tokens in expected:  # a text may stand there twice, ending in a blank or not
        best[tokens] = max(score, best.get(tokens, -np.inf))
    return {tuple(path.tokens): path.score for path in found}, best


@pytest.mark.parametrize("parts", ["nothing", "lm", "boosting", "both"])
@settings(max_examples=80, deadline=None)
@given(problem=problems, blank_first=st.booleans())
def test_equal_to_scoring_everything(parts, problem, blank_first):
    vocab_size, seed = problem["vocab_size"], problem["seed"]
    lm = random_lm(vocab_size, seed=seed, branching=problem["branching"], order=2)
    tree = random_boosting(vocab_size, seed=seed)
    fusion = Fusion(
        lm if parts in ("lm", "both") else None, 0.6,
        tree if parts in ("boosting", "both") else None, 0.8,
    )  # fmt: skip
    found, expected = hypotheses_of(problem, fusion, blank_id=0 if blank_first else vocab_size)
    assert found == expected
