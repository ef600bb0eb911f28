"""Allowed tokens: which tokens belong to a script, and what prices do to automata."""

import math

import numpy as np
import pytest

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.allowed import PRICE_WEIGHT, AllowedTokens, allowed_tokens, with_costs
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.random_models import random_boosting

PIECES = ("▁the", "▁", "é", "▁да", "ко", "7", ".", "aб", "ゴ", "ー", "漢", "々", "́", "ª", "№", "<unk>", "Ａ", "<0xD0>")
VOCABULARY = Vocabulary(PIECES, "bpe")
SHARED = {"▁", "7", ".", "́", "№", "<unk>"}
V = 6


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (["Latin"], {"▁the", "é", "ª", "Ａ"}),
        (["cyrillic"], {"▁да", "ко"}),
        (["Latin", "Cyrillic"], {"▁the", "é", "ª", "Ａ", "▁да", "ко", "aб"}),
        (["Han"], {"漢", "々"}),
        (["Katakana"], {"ゴ", "ー"}),
        ([], set()),
    ],
)
def test_scripts_allow_their_tokens(scripts, expected):
    found = allowed_tokens(VOCABULARY, scripts=scripts)
    assert {piece for piece, own in zip(PIECES, found.is_allowed, strict=True) if own} == expected | SHARED


def test_tokens_and_texts_are_added():
    vocabulary = Vocabulary(("▁", "a", "b", "▁ab", "д", "а", "1"), "bpe")
    found = allowed_tokens(vocabulary, tokens=["a"], texts=["да", " "], price=2.5)
    assert found == AllowedTokens((True, True, False, False, True, True, True), 2.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scripts": ["Latn"]}, "scripts is 'Latn', expected scripts of the vocabulary's letters: .*CYRILLIC.*LATIN"),
        ({"scripts": ["Small"]}, "scripts is 'Small'"),
        ({"tokens": ["the"]}, "tokens is 'the', expected pieces of the vocabulary"),
        ({"price": -1.0}, "price is -1.0"),
        ({"price": math.nan}, "price is nan"),
    ],
)
def test_unknown_script_or_token_is_named(given, message):
    with pytest.raises(FieldError, match=message):
        allowed_tokens(VOCABULARY, **given)


def test_no_token_at_all_is_an_error():
    with pytest.raises(FieldError, match="at least one token"):
        AllowedTokens((False, False))


@pytest.mark.parametrize("price", [0.7, 3.0, math.inf])
@pytest.mark.parametrize("weight", [0.0, 0.4, 3.0])
def test_a_path_costs_the_prices_of_its_tokens(price, weight):
    rng = np.random.default_rng(0)
    tree = random_boosting(V, seed=3)
    allowed = AllowedTokens((True, False, True, True, False, True), price)
    found, own = with_costs(tree, weight, allowed.costs)
    assert own == (weight or PRICE_WEIGHT)
    for tokens in rng.integers(0, V, (50, 6)).tolist():
        before = weight * tree.score(tokens)
        cost = sum(price for token in tokens if not allowed.is_allowed[token])
        assert own * found.score(tokens) == pytest.approx(before - cost, abs=1e-4)
    for number, state in enumerate(found.arrays.states):
        assert state["upper_bound"] >= max(found.advance(number, label)[0] for label in range(V))


def test_lock_that_allows_all_changes_nothing():
    tree = random_boosting(V, seed=3)
    for allowed in (AllowedTokens((True,) * V), AllowedTokens((True, False) * 3, 0.0)):
        assert with_costs(tree, 0.5, allowed.costs) == (tree, 0.5)
        assert with_costs(None, 0.5, allowed.costs) == (None, 0.5)


def test_weight_of_prices_vanishes_in_the_sum_of_weights():
    for lm_weight in (0.0, 1e-6, 0.3):
        one = np.float32(1.0) + (np.float32(lm_weight) + np.float32(PRICE_WEIGHT))
        assert one == np.float32(1.0) + np.float32(lm_weight)


def test_outside_share_counts_tokens_that_are_not_allowed():
    allowed = AllowedTokens((True, False, False))
    texts = [np.array(text, np.int32) for text in ([], [0, 1, 2, 0], [], [1], [1, 1, 0])]
    assert [allowed.outside_share(text, 3) for text in texts] == [0.0, 0.5, 0.0, 1.0, 1.0 - 1 / 3]
    assert allowed.outside_share(np.array([1, 2, 3, 1]), 0) == 0.5  # the blank is the first column
    assert allowed.outside_share(np.array([0, 2, 3, 0]), 1) == 0.5  # or between the tokens


def test_equal_requests_share_a_tree():
    allowed = AllowedTokens((True, False) * 3)
    requests = [None, Request(allowed=allowed), Request(allowed=AllowedTokens((True, False) * 3))]
    batch = BatchFusion.resolve(Fusion(boosting=random_boosting(V, seed=1)), 3, requests, FusionLabels(V))
    assert len(batch.trees) == 2
    assert batch.tree_of.tolist() == [0, 1, 1]
    assert [rules.allowed for rules in batch.rules] == [None, allowed, allowed]


def test_lock_of_another_vocabulary_or_search_is_named():
    fusion = Fusion(allowed=AllowedTokens((True, False)))
    with pytest.raises(ValueError, match=r"fusion.allowed is for 2 tokens, expected 3 \(vocab_size\)"):
        check_fusion(fusion, FusionLabels(3))
    with pytest.raises(ValueError, match=r"fusion\.allowed is given, expected None: it is late"):
        check_fusion(fusion, FusionLabels(2, unlocked="it is late"))
    with pytest.raises(ValueError, match=r"requests\[0\].allowed is for 2 tokens"):
        BatchFusion.resolve(Fusion(), 1, [Request(allowed=fusion.allowed)], FusionLabels(3))


def test_lines_that_cannot_be_spelled_are_left_out_and_forms_of_unicode_are_equal(caplog):
    vocabulary = Vocabulary(("▁", "é", "b"), "bpe")
    assert allowed_tokens(vocabulary, texts=["e\u0301", "x"], tokens=["e\u0301"]).is_allowed == (True, True, False)
    assert "allowed texts: 1 of 2 lines left out: phrase 'x'" in caplog.text
