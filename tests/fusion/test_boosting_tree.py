"""Phrases of a boosting tree: where a hypothesis has them, and the tree of some of them."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
from nemo_gpu_decoding.vocabulary import Vocabulary

VOCABULARY = Vocabulary.from_pieces(("<unk>", "▁", *"abcdeABC'", "▁ab", "▁abc", "bc"))
LETTERS = Vocabulary((" ", *"abcde"), "char")


def found(phrases, text, vocabulary=VOCABULARY, **options):
    tree = build_boosting_tree(phrases, vocabulary, BoostingConfig(**options))
    tokens = vocabulary.tokenize(text)
    spans = [(tree.table.texts[n], vocabulary.text(tokens[begin:end])) for n, begin, end in tree.occurrences(tokens)]
    return [(name, text.strip()) for name, text in spans]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, LETTERS])
def test_whole_words_are_found_in_their_order(vocabulary):
    assert found(["de", "abc"], "abc de abcd", vocabulary) == [("abc", "abc"), ("de", "de")]
    assert found(["abc"], "abc", vocabulary) == [("abc", "abc")]
    assert found(["abc"], "ab", vocabulary) == []


@settings(max_examples=150, deadline=None)
@given(
    phrases=st.sets(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=12),
    text=st.text("abc", min_size=1, max_size=12),
)
def test_found_phrases_equal_a_comparison_at_every_token(phrases, text):
    """Phrases that begin others, and phrases with a long end of their own."""
    letters = Vocabulary(("a", "b", "c"), "char")
    tree = build_boosting_tree(sorted(phrases), letters, BoostingConfig(whole_words=False))
    expected, covered = [], 0
    for begin in range(len(text)):
        ends = [begin + len(phrase) for phrase in phrases if text.startswith(phrase, begin)]
        if max(ends, default=0) > covered:
            covered = max(ends)
            expected.append((text[begin:covered], begin, covered))
    occurrences = tree.occurrences(letters.tokenize(text))
    assert [(tree.table.texts[number], begin, end) for number, begin, end in occurrences] == expected


def test_parts_of_words_count_without_whole_words_and_penalties_do_not():
    assert found(["abc"], "abcd", whole_words=False) == [("abc", "abc")]
    assert found([Phrase("abc", -1.0), "de"], "abc de") == [("de", "de")]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_copied_tree_finds_the_same_phrases(copied):
    tree = build_boosting_tree(["abc", "abc de", "abc de cab"], VOCABULARY)
    tokens = VOCABULARY.tokenize("abc de abc")
    expected = list(tree.occurrences(tokens))
    assert len(expected) == 2
    assert list(copied(tree).occurrences(tokens)) == expected


def test_subtree_equals_a_tree_built_from_its_phrases():
    phrases = ["abc", "abc de", Phrase("de", 2.0), Phrase("cab", -1.0)]
    tree = build_boosting_tree(phrases, VOCABULARY, BoostingConfig(ac_threshold=0.1))
    keys = dict(zip(tree.table.texts, tree.table.keys, strict=True))
    some, expected = tree.only({keys["de"]}), build_boosting_tree(phrases[2:], VOCABULARY)
    assert some.fingerprint == expected.fingerprint
    assert (some.ac_threshold, some.num_phrases, tree.num_phrases) == (0.1, 1, 3)
    assert tree.only(()).num_phrases == 0  # the penalty
    assert build_boosting_tree(["abc"], VOCABULARY).only(()) is None
