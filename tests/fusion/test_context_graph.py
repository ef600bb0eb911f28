"""The boosting tree's weights against counting phrases by hand, and NeMo's faults one by one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, Columns, concatenate, lookup
from nemo_gpu_decoding.fusion.context_graph import (
    MAX_BONUSES,
    ScoredSequence,
    build_context_graph,
    token_scores,
    with_refunds,
)
from tests.oracles.ngram import earned, earned_apart, phrase_bonus

V = 4
A, B, C, D = range(V)
TOKENS = st.integers(0, V - 1)
PHRASES = st.dictionaries(
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple),
    st.floats(-4, 4).map(lambda weight: round(weight, 2)),
    min_size=1,
    max_size=10,
)
WHOLE_WEIGHTS = st.dictionaries(
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple), st.integers(-4, 4), min_size=1, max_size=10
)
TEXTS = st.lists(TOKENS, max_size=14)
CONTINUATIONS = st.sets(TOKENS)  # labels that continue the word before them
OUTSIDE = st.lists(st.booleans(), min_size=10, max_size=10)  # for each phrase: it ends in no word


def sequences(weights):
    return [
        ScoredSequence(tokens, weight * token_scores(len(tokens), 1.0, 2.0, uniform=False), weight)
        for tokens, weight in weights.items()
    ]


def build(phrases, refund="full", unk_score=0.0):
    weights = phrases if isinstance(phrases, dict) else dict.fromkeys(phrases, 1.0)
    return build_context_graph(sequences(weights), V, refund=refund, unk_score=unk_score)


def build_in_words(weights, continuations, outside=(), **options):
    """All occurrences are paid, overlapping or not."""
    own = [replace(s, ends_in_word=s.tokens not in outside) for s in sequences(weights)]
    return build_context_graph(own, V, is_continuation=np.isin(np.arange(V), list(continuations)), **options)


def build_apart(weights, continuations=(), outside=()):
    """No token is paid for twice; every token of a phrase is worth its weight, so that sums are exact."""
    own = [
        ScoredSequence(tokens, weight * np.ones(len(tokens)), weight, tokens not in outside)
        for tokens, weight in weights.items()
    ]
    return build_context_graph(own, V, is_continuation=np.isin(np.arange(V), list(continuations)), overlapping=False)


def bonuses(weights):
    return {phrase: weight * phrase_bonus(len(phrase)) for phrase, weight in weights.items()}


# -- properties --------------------------------------------------------------------------------------
@settings(max_examples=500, deadline=None)
@given(WHOLE_WEIGHTS, TEXTS, CONTINUATIONS, OUTSIDE)
def test_no_token_is_paid_for_twice(weights, text, continuations, outside):
    outside = [phrase for phrase, is_outside in zip(weights, outside, strict=False) if is_outside]
    tree = build_apart(weights, continuations, outside)
    expected = earned_apart(text, {p: w * len(p) for p, w in weights.items()}, continuations, outside)
    assert tree.score(text) == expected
    assert tree.score(text, final=False) >= expected


def test_first_of_equal_phrases_is_paid():
    """What begins inside of the second one can then be paid as well."""
    assert build_apart({(A, B): 1, (B, C): 1, (C, D): 1, (A, B, C, A): 1}).score((A, B, C, D)) == 4


@settings(max_examples=300, deadline=None)
@given(PHRASES, TEXTS, CONTINUATIONS, OUTSIDE)
def test_a_text_earns_the_phrases_with_which_words_end(weights, text, continuations, outside):
    outside = [phrase for phrase, is_outside in zip(weights, outside, strict=False) if is_outside]
    tree = build_in_words(weights, continuations, outside)
    expected = earned(text, bonuses(weights), continuations, outside)
    assert tree.score(text) == pytest.approx(expected, abs=1e-4)
    # while the text goes on, help for unfinished phrases comes on top
    assert tree.score(text, final=False) >= expected - 1e-4


@settings(max_examples=100, deadline=None)
@given(PHRASES, TEXTS, CONTINUATIONS)
def test_tokens_outside_of_phrases_cost_the_same_wherever_words_end(weights, text, continuations):
    """Word ends change what phrases earn, not which tokens belong to none."""
    for unk_score in (-1.0, 0.5):
        in_words, anywhere = [build_in_words(weights, labels, unk_score=unk_score) for labels in (continuations, ())]
        difference = earned(text, bonuses(weights), continuations) - earned(text, bonuses(weights))
        assert in_words.score(text) - anywhere.score(text) == pytest.approx(difference, abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(PHRASES, min_size=1, max_size=3), TEXTS)
def test_concatenated_trees_score_as_they_do_alone(lists, text):
    trees = [build(weights) for weights in lists]
    arrays, starts = concatenate(trees)
    for tree, start in zip(trees, starts, strict=True):
        state, own_state = int(start), tree.start_state
        for label in text:
            weight, state = lookup(arrays, V, state, label, ANY_WEIGHT)
            own_weight, own_state = tree.advance(own_state, label)
            assert weight == np.float32(own_weight)
            assert state - start == own_state - tree.start_state
        assert arrays.states["final_weight"][state] == tree.arrays.states["final_weight"][own_state]


# -- NeMo's faults, by name ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("phrases", "text", "final", "nemo", "ours"),
    [
        pytest.param(
            [(A, B, C)], [D, A, B], True, phrase_bonus(2), 0, id="an utterance that ends inside a phrase keeps a bonus"
        ),
        pytest.param(  # NeMo's is that of the last A alone
            [(A, B), (A, B, C, D)], [A, B, C, A], False, 1.0, phrase_bonus(2),
            id="failing in a longer phrase takes back its completed prefix",
        ),
        pytest.param(  # "A B" is kept, "B" was never paid, "C" was, and both are taken back; + the last A
            [(A, B), (B, C, D)], [A, B, C, A], False, phrase_bonus(2) - 1.0 + 1.0, phrase_bonus(2),
            id="an overlapping phrase takes back what it was not given",
        ),
        pytest.param(
            [(A, B), (B, C)], [A, B, C], True, phrase_bonus(2) + 2 + np.log(2), 2 * phrase_bonus(2),
            id="overlapping phrases are not paid in full",
        ),
    ],
)  # fmt: skip
def test_full_refund_lacks_the_faults_of_the_nemo_tree(phrases, text, final, nemo, ours):
    assert build(phrases, "nemo").score(text, final=final) == pytest.approx(nemo)
    assert build(phrases).score(text) == pytest.approx(ours)


def test_nemo_refund_does_not_raise_descendants_of_a_raised_token():
    """The second phrase raises A from 0.1 to 10. In NeMo, A B has the old A: failing there leaves most of the 10."""
    weights, text = {(A, B, C): 0.1, (A, D): 10.0}, [A, B, A]
    nemo = build(weights, "nemo").score(text, final=False)
    assert nemo > 10.0 + 5.0  # the last A's 10, and something for an unfinished phrase
    assert build(weights).score(text) == pytest.approx(0)


def test_penalty_is_paid_only_for_a_complete_phrase():
    tree, penalty = build({(A, B): -1.0}), -phrase_bonus(2)
    assert tree.score([A], final=False) == 0
    assert tree.score([A, C]) == 0
    assert tree.score([A, B], final=False) == pytest.approx(penalty)
    assert tree.score([A, B, A, B]) == pytest.approx(2 * penalty)


def test_example_of_the_module():
    ones = [ScoredSequence(tokens, np.ones(len(tokens)), 1.0) for tokens in ([A, B], [B, C], [A, B, C, D])]
    x = 4

    def weights(text, overlapping):
        tree = build_context_graph(ones, 5, overlapping=overlapping, name="example")
        state, seen = tree.start_state, []
        for label in text:
            weight, state = tree.advance(state, label)
            seen.append(weight)
        return [*seen, tree.arrays.states["final_weight"][state]]

    for overlapping in (False, True):
        assert weights([A, B, x], overlapping) == [1, 1, 0, 0]
        assert weights([A], overlapping) == [1, -1]
    assert weights([A, B, C, x], overlapping=False) == [1, 1, 1, -1, 0]
    assert weights([A, B, C, D], overlapping=False) == [1, 1, 1, 1, 0]
    assert weights([A, B, C, x], overlapping=True) == [1, 1, 3, -1, 0]


# -- word ends -----------------------------------------------------------------------------------------
def test_a_phrase_loses_its_bonus_with_the_token_that_continues_its_word():
    tree = build_in_words({(A, B): 1.0}, continuations=[B, C])
    bonus = phrase_bonus(2)
    assert tree.score([A, B], final=False) == pytest.approx(bonus)
    assert tree.score([A, B, D], final=False) == pytest.approx(bonus)
    assert tree.score([A, B, C], final=False) == pytest.approx(0)
    assert tree.score([A, B, A], final=False) == pytest.approx(bonus + 1.0)  # and the next one begins


def test_an_utterance_begins_after_the_label_before_it():
    space = D
    spaced = [ScoredSequence((space, A, B), np.array([0.0, 1.0, 2.0]), 1.0)]
    options = {"is_continuation": np.array([True, True, True, False]), "unk_score": -0.5}
    tree = build_context_graph(spaced, V, label_before=space, **options)
    assert tree.score([A, B]) == 3.0
    assert tree.score([A, B, space, A, B]) == 5.5  # the space belongs to no phrase
    assert tree.score([C, space, A, B]) == 2.0
    assert tree.score([C, A, B]) == -1.5


@pytest.mark.parametrize(("count", "tolerance"), [(MAX_BONUSES, 1e-6), (MAX_BONUSES + 1, 4e-3)])
def test_bonuses_are_rounded_only_where_there_are_too_many(count, tolerance):
    weights = 1.0 + np.arange(count) / count
    phrases = np.stack(np.unravel_index(np.arange(count), (V,) * 6), 1)
    own = [
        ScoredSequence(tuple(phrase), weight * np.ones(6), 1.0)
        for phrase, weight in zip(phrases.tolist(), weights, strict=True)
    ]
    tree = build_context_graph(own, V, is_continuation=np.arange(V) == A)
    plain = build_context_graph(own, V)
    found, exact = (np.array([each.score(sequence.tokens) for sequence in own]) for each in (tree, plain))
    assert found == pytest.approx(exact, rel=tolerance)
    assert (abs(found - exact).max() > 1e-5) == (count > MAX_BONUSES)


@pytest.mark.parametrize("refunding", [[], [0], [0, 1, 2], [0, 1, 2, 3]])
def test_copies_of_the_root_are_shared_and_list_the_fewer_labels(refunding):
    columns = Columns(
        arc_begin=np.zeros(101, int), arc_end=np.zeros(101, int), backoff_to=np.zeros(101, int),
        backoff_weights=np.zeros(101), final_weights=np.zeros(101), arc_labels=np.zeros(0, int),
        arc_weights=np.zeros(0), arc_targets=np.zeros(0, int),
    )  # fmt: skip
    result = with_refunds(columns, np.array([0.0, *[1.0, 2.0] * 50]), np.isin(np.arange(V), refunding))
    copies = 2 if refunding else 0
    assert len(result.backoff_to) == 101 + copies
    assert len(result.arc_labels) == copies * min(len(refunding), V - len(refunding))
