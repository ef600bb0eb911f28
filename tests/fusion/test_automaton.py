"""The automaton layout: the example of the module, and what its checks refuse."""

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, BackoffAutomaton, Columns, empty_automaton, lookup
from tests.random_models import random_boosting, random_lm

A, B = 0, 1
EXAMPLE = {  # p(a) p(b) p(b|a) over {a, b}, states root, start, "a", "b"
    "vocab_size": 2,
    "start_state": 1,
    "arc_begin": [0, 2, 2, 3],
    "arc_end": [2, 2, 3, 3],
    "backoff_to": [0, 0, 0, 0],
    "backoff_weights": [0.0, -0.25, -0.5, -0.125],
    "final_weights": [-1.0, -2.0, -3.0, -4.0],
    "arc_labels": [A, B, B],
    "arc_weights": [-1.0, -2.0, -0.75],
    "arc_targets": [2, 3, 3],
}


def make(**changes):
    columns = {k: np.array(v) if isinstance(v, list) else v for k, v in (EXAMPLE | changes).items()}
    size, start = columns.pop("vocab_size"), columns.pop("start_state")
    return BackoffAutomaton.from_columns(Columns(**columns), size, start, "example")


def test_example_of_the_module_and_empty_automaton():
    example = make()
    assert example.score([A, B]) == (-0.25 - 1.0) + -0.75 - 4.0
    assert example.score([B, A], final=False) == (-0.25 - 2.0) + (-0.125 - 1.0)
    assert example.arrays.states["upper_bound"] == pytest.approx([-1.0, -1.25, -0.75, -1.125], abs=1e-4)
    assert make().fingerprint == make().fingerprint
    assert make(arc_weights=[-1.0, -2.0, -0.5]).fingerprint != make().fingerprint
    assert make(start_state=0).fingerprint != make().fingerprint
    assert empty_automaton(5).score([0, 4, 2]) == 0


def test_compiled_look_up_equals_the_readable_one():
    sparse_root = {"arc_end": [1, 2, 3, 3], "arc_begin": [0, 2, 2, 3], "backoff_weights": [0.5, -0.25, 0, 1]}
    for automaton in (make(), make(**sparse_root), empty_automaton(2)):
        for state in range(automaton.num_states):
            for label in (A, B):
                assert lookup(automaton.arrays, 2, state, label, ANY_WEIGHT) == automaton.advance(state, label)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_state": 4}, r"start_state is 4, expected 0 \.\. 3"),
        ({"arc_targets": [2, 3]}, "arc_targets has 2 entries, expected 3"),
        ({"arc_targets": [2, 3, 4]}, r"arc_targets holds 4, expected 0 \.\. 3"),
        ({"arc_labels": [A, 2, B]}, r"arc_labels holds 2, expected 0 \.\. 1"),
        ({"arc_labels": [B, A, B]}, r"arc 1 \(label 0\) breaks the order"),
        ({"arc_labels": [A, A, B]}, r"arc 1 \(label 0\) breaks the order"),
        ({"arc_end": [2, 1, 3, 3]}, "arc_end is before its arc_begin"),
        ({"backoff_to": [0, 2, 1, 0]}, "the back-off arcs from state 1 form a cycle"),
        ({"arc_weights": [np.nan, -2.0, -0.75]}, r"arc_weights holds NaN or \+inf"),
        ({"final_weights": [np.inf, 0, 0, 0]}, r"final_weights holds NaN or \+inf"),
    ],
)
def test_contradictory_columns_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"example: .*{message}"):
        make(**changes)


# -- The two bounds of a state, against the weight of every label -------------------------------------
def bounds_by_trying(automaton, state):
    """Largest weight of any label, and of those that the state has no arc for."""
    weights = {label: automaton.advance(state, label)[0] for label in range(automaton.vocab_size)}
    row = automaton.arrays.states[state]
    own = set(automaton.arrays.arcs["label"][row["arc_begin"] : row["arc_end"]].tolist())
    others = [weight for label, weight in weights.items() if label not in own]
    return max(weights.values()), max(others, default=-np.inf)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [random_lm, random_boosting])
def test_bound_of_a_state_is_never_exceeded(make, seed):
    automaton = make(6, seed=seed)
    for state, row in enumerate(automaton.arrays.states):
        upper, backoff = bounds_by_trying(automaton, state)
        assert row["upper_bound"] >= upper
        assert row["backoff_bound"] >= backoff
        if backoff == -np.inf:
            assert row["backoff_bound"] == -np.inf


@pytest.mark.parametrize("seed", range(8))
def test_likely_successor_does_not_loosen_the_bound_of_other_labels(seed):
    """Where a state's labels are labels of what it backs off to, as in n-gram LMs, bounds are exact."""
    lm = random_lm(6, seed=seed, order=2, branching=2)
    for state, row in enumerate(lm.arrays.states):
        upper, backoff = bounds_by_trying(lm, state)
        assert row["upper_bound"] == pytest.approx(upper, abs=1e-4)
        assert row["backoff_bound"] == pytest.approx(backoff, abs=1e-4)


def test_bounds_of_states_without_arcs_and_impossible_labels():
    assert empty_automaton(3).arrays.states["upper_bound"][0] >= 0
    columns = Columns(
        arc_begin=[0, 2], arc_end=[2, 2], backoff_to=[0, 0], backoff_weights=[0.0, -np.inf], final_weights=[0.0, 0.0],
        arc_labels=[0, 1], arc_weights=[-np.inf, -1.0], arc_targets=[0, 0],
    )  # fmt: skip
    lm = BackoffAutomaton.from_columns(columns, vocab_size=2, start_state=1)
    assert lm.arrays.states["upper_bound"].tolist() == pytest.approx([-1.0, -np.inf], abs=1e-4)
    assert lm.arrays.states["backoff_bound"].tolist() == [-np.inf, -np.inf]
