"""Density ratios: every weight against the two LMs themselves; what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.density_ratio import density_ratio
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.ngram import NOT_FINAL, load_ngram_lm
from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
from tests.assets import ASSETS
from tests.random_models import random_lm

V = 7


def assert_is_ratio(found, lm, source, ratio, *, sequences=30, length=12, tolerance=1e-5):
    """Step by step over random token sequences, and at the end of each."""
    for labels in np.random.default_rng(0).integers(0, lm.vocab_size, (sequences, length)):
        states = [automaton.start_state for automaton in (found, lm, source)]
        for label in labels.tolist():
            read = [a.advance(s, label) for a, s in zip((found, lm, source), states, strict=True)]
            states = [state for _, state in read]
            weight, of_lm, of_source = (weight for weight, _ in read)
            assert weight == pytest.approx(of_lm - ratio * of_source, abs=tolerance)
            ends = [a.arrays.states["final_weight"][s] for a, s in zip((found, lm, source), states, strict=True)]
            assert ends[0] == pytest.approx(ends[1] - ratio * ends[2], abs=tolerance)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.7])
@pytest.mark.parametrize("orders", [(1, 1), (1, 3), (2, 2), (2, 4), (3, 2), (4, 1), (4, 4)])
def test_every_weight_is_the_difference_of_both_lms(orders, ratio):
    for seed in range(3):
        lm = random_lm(V, seed=seed, order=orders[0], branching=2)
        source = random_lm(V, seed=seed + 10, order=orders[1], branching=3)
        assert_is_ratio(density_ratio(lm, source, ratio), lm, source, ratio)


def test_a_bigram_source_adds_at_most_one_state_per_token(tmp_path):
    lm = load_ngram_lm(ASSETS / "lm" / "tok6.arpa", 128)
    rng = np.random.default_rng(3)
    sentences = []
    for _ in range(300):  # random walks along the arcs of the 6-gram
        state, sentence = lm.start_state, []
        for _ in range(20):
            row = lm.arrays.states[state]
            arcs = lm.arrays.arcs[row["arc_begin"] : row["arc_end"]]
            label = int(rng.choice(arcs["label"])) if len(arcs) else int(rng.integers(128))
            sentence.append(chr(label + 100))
            _, state = lm.advance(state, label)
        sentences.append(sentence)
    write_arpa(estimate_ngram_lm(sentences, 2, symbols=[chr(i + 100) for i in range(128)]), tmp_path / "source.arpa")
    source = load_ngram_lm(tmp_path / "source.arpa", 128)
    found = density_ratio(lm, source, 0.5)
    assert lm.num_states <= found.num_states <= lm.num_states + 128 + 1
    assert_is_ratio(found, lm, source, 0.5, sequences=100, tolerance=2e-5)


def single_state(final_weight=0.0, backoff_weight=0.0, weights=(-1.0, -2.0)):
    labels = np.arange(len(weights))
    return BackoffAutomaton.from_columns(
        Columns([0], [len(weights)], [0], [backoff_weight], [final_weight], labels, weights, np.zeros(len(weights))),
        2, 0, "unigrams",
    )  # fmt: skip


def test_scores_where_one_lm_has_no_sentence_end():
    never, ends = single_state(NOT_FINAL), single_state(-2.0)
    assert density_ratio(ends, never, 0.5).score([0]) == pytest.approx(-1.0 + 0.5 - 2.0)
    assert density_ratio(never, ends, 0.5).score([0]) == pytest.approx(-1.0 + 0.5 + NOT_FINAL + 1.0)


def test_tokens_that_the_lm_forbids_stay_forbidden():
    found = density_ratio(single_state(weights=(-np.inf, -1.0)), single_state(), 2.0)
    assert found.score([0]) == -np.inf
    assert found.score([1]) == pytest.approx(-1.0 + 4.0)


@pytest.mark.parametrize("impossible", [-np.inf, -99 * np.log(10)])
def test_a_source_that_forbids_tokens_is_refused(impossible):
    with pytest.raises(ValueError, match=r"source_lm \(unigrams\) gives token 1 probability 0, expected .*<unk>"):
        density_ratio(single_state(), single_state(weights=(-1.0, impossible)), 0.5)
    with pytest.raises(ValueError, match="token 1 probability 0"):
        density_ratio(single_state(), single_state(weights=(-1.0,), backoff_weight=impossible), 0.5)


def test_lms_over_different_tokens_are_refused():
    with pytest.raises(ValueError, match=r"source_lm \(random LM 1\) was made for 6 tokens, expected 7"):
        density_ratio(random_lm(7, seed=0), random_lm(6, seed=1), 0.5)


# ------------------------------------------------------------------------------------ in a Fusion
def test_ratio_equals_source_weight_by_lm_weight():
    lm, source = random_lm(V, seed=1), random_lm(V, seed=2)
    fusion = Fusion(lm, 0.5, source_lm=source, source_lm_weight=0.2)
    assert fusion.token_lm.fingerprint == density_ratio(lm, source, 0.4).fingerprint
    assert replace(fusion, source_lm_weight=0.0).token_lm is lm
    assert Fusion(lm).token_lm is lm


def test_the_weight_of_a_request_scales_both():
    lm, source = random_lm(V, seed=1), random_lm(V, seed=2)
    fusion = Fusion(lm, 0.5, source_lm=source, source_lm_weight=0.2)
    batch = BatchFusion.resolve(fusion, 3, [None, Request(lm_weight=0.25), Request(lm_weight=0.0)], FusionLabels(V))
    assert batch.lm.score([1, 2, 3]) == pytest.approx(lm.score([1, 2, 3]) - 0.4 * source.score([1, 2, 3]), abs=1e-5)
    assert batch.lm_weights.tolist() == [0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_lm_weight": None}, "source_lm_weight is None, expected the weight of source_lm"),
        ({"source_lm_weight": -0.1}, "source_lm_weight is -0.1, expected a finite number >= 0"),
        ({"lm": None}, "lm is None, expected the LM from which source_lm is subtracted"),
        ({"lm_weight": 0.0}, "lm_weight is 0.0 with a source_lm, expected a number > 0"),
        ({"source_lm": None}, "source_lm is None with source_lm_weight 0.2, expected an LM to subtract"),
    ],
)
def test_incomplete_fusions_are_refused(options, message):
    given = {"lm": random_lm(V, seed=1), "source_lm": random_lm(V, seed=2), "source_lm_weight": 0.2}
    with pytest.raises(ValueError, match=message):
        Fusion(**(given | options))


def test_a_source_over_other_tokens_is_refused_by_the_decoder():
    fusion = Fusion(random_lm(V, seed=1), source_lm=random_lm(5, seed=2), source_lm_weight=0.2)
    with pytest.raises(ValueError, match=r"fusion.source_lm \(random LM 2\) was made for 5 tokens, expected 7"):
        check_fusion(fusion, FusionLabels(V))
