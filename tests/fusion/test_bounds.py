"""The two bounds of a state, against the weight of every label."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, empty_automaton
from tests.random_models import random_boosting, random_lm


def own_labels(automaton, state):
    row = automaton.arrays.states[state]
    return set(automaton.arrays.arcs["label"][row["arc_begin"] : row["arc_end"]].tolist())


def bounds_by_trying(automaton, state):
    """Largest weight of any label, and of those that the state has no arc for."""
    weights = {label: automaton.advance(state, label)[0] for label in range(automaton.vocab_size)}
    own = own_labels(automaton, state)
    others = [weight for label, weight in weights.items() if label not in own]
    return max(weights.values()), max(others, default=-np.inf)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [random_lm, random_boosting])
def test_no_label_gets_more(make, seed):
    automaton = make(6, seed=seed)
    for state, row in enumerate(automaton.arrays.states):
        upper, backoff = bounds_by_trying(automaton, state)
        assert row["upper_bound"] >= upper
        assert row["backoff_bound"] >= backoff
        if backoff == -np.inf:
            assert row["backoff_bound"] == -np.inf


@pytest.mark.parametrize("seed", range(8))
def test_the_likely_successor_does_not_loosen_the_bound_of_the_others(seed):
    """Where a state's labels are labels of what it backs off to, as in n-gram LMs, bounds are exact."""
    lm = random_lm(6, seed=seed, order=2, branching=2)
    for state, row in enumerate(lm.arrays.states):
        upper, backoff = bounds_by_trying(lm, state)
        assert row["upper_bound"] == pytest.approx(upper, abs=1e-4)
        assert row["backoff_bound"] == pytest.approx(backoff, abs=1e-4)


def test_states_without_arcs_and_labels_without_probability():
    assert empty_automaton(3).arrays.states["upper_bound"][0] >= 0
    lm = BackoffAutomaton.from_arrays(
        vocab_size=2, start_state=1,
        arc_begin=np.array([0, 2]), arc_end=np.array([2, 2]), backoff_to=np.array([0, 0]),
        backoff_weights=np.array([0.0, -np.inf]), final_weights=np.zeros(2),
        arc_labels=np.array([0, 1]), arc_weights=np.array([-np.inf, -1.0]), arc_targets=np.array([0, 0]),
    )  # fmt: skip
    assert lm.arrays.states["upper_bound"].tolist() == pytest.approx([-1.0, -np.inf], abs=1e-4)
    assert lm.arrays.states["backoff_bound"].tolist() == [-np.inf, -np.inf]
