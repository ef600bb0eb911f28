"""Back-off arcs that cost some labels more, against walking the chain by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.refunds import Columns, with_refunds

V, ROOT = 4, 0


def random_columns(size, seed):
    """States that back off to earlier ones, with random arcs; the root is state 0."""
    draw = np.random.default_rng(seed)
    arcs = [np.flatnonzero(draw.random(V) < 0.5) for _ in range(size)]
    ends = np.cumsum([len(labels) for labels in arcs])
    return Columns(
        arc_begin=ends - [len(labels) for labels in arcs],
        arc_end=ends,
        backoff_to=np.array([0, *(draw.integers(0, state) for state in range(1, size))]),
        backoff_weights=draw.integers(-3, 4, size).astype(float),
        final_weights=np.zeros(size),
        arc_labels=np.concatenate(arcs),
        arc_weights=draw.integers(-3, 4, ends[-1]).astype(float),
        arc_targets=draw.integers(0, size, ends[-1]),
    )


def automaton(columns):
    return BackoffAutomaton.from_arrays(vocab_size=V, start_state=ROOT, **columns._asdict())


def refund_due(columns, refunds, state, label):
    """The refunds of the states that the label leaves by back-off, except the root."""
    total = 0.0
    while state != ROOT:
        if label in columns.arc_labels[columns.arc_begin[state] : columns.arc_end[state]]:
            break
        total += refunds[state]
        state = columns.backoff_to[state]
    return total


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(0, 10**6), st.sets(st.integers(0, V - 1)))
def test_refunding_labels_pay_for_the_states_they_leave(size, seed, refunding):
    columns = random_columns(size, seed)
    refunds = np.random.default_rng(seed).choice([0.0, 1.0, 2.5], size)
    plain = automaton(columns)
    refunded = automaton(with_refunds(columns, ROOT, refunds, np.isin(np.arange(V), list(refunding))))
    for state in range(size):
        for label in range(V):
            weight, target = plain.advance(state, label)
            due = refund_due(columns, refunds, state, label) if label in refunding else 0.0
            assert refunded.advance(state, label) == (weight - due, target)


@pytest.mark.parametrize("refunding", [[], [0], [0, 1, 2], [0, 1, 2, 3]])
def test_copies_of_the_root_are_shared_and_list_the_fewer_labels(refunding):
    columns = Columns(
        arc_begin=np.zeros(101, int), arc_end=np.zeros(101, int), backoff_to=np.zeros(101, int),
        backoff_weights=np.zeros(101), final_weights=np.zeros(101), arc_labels=np.zeros(0, int),
        arc_weights=np.zeros(0), arc_targets=np.zeros(0, int),
    )  # fmt: skip
    refunds = np.array([0.0, *[1.0, 2.0] * 50])
    result = with_refunds(columns, ROOT, refunds, np.isin(np.arange(V), refunding))
    copies = 2 if refunding else 0
    assert len(result.backoff_to) == 101 + copies
    assert len(result.arc_labels) == copies * min(len(refunding), V - len(refunding))


def test_without_refunds_nothing_changes():
    columns = random_columns(5, seed=0)
    assert with_refunds(columns, ROOT, np.zeros(5), np.ones(V, bool)) is columns
    assert with_refunds(columns, ROOT, np.ones(5), np.zeros(V, bool)) is columns
