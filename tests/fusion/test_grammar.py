"""Closed grammars: the texts that the automaton accepts, and what leaving it costs."""

import itertools
import math
import re
import unicodedata

import pytest

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.allowed import PRICE_WEIGHT
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.grammar import build_grammar
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.random_models import random_boosting

BPE = Vocabulary(("▁", "▁a", "a", "b", "▁ab", ".", "▁B", "<unk>"), "bpe")
CHARACTERS = Vocabulary(("a", "b", " ", "."), "char")
PIECES = Vocabulary(("a", "b", "##a", "##b", "ab", ".", "##."), "wpe")
SEPARATELESS = Vocabulary(("a", "b"), "char")

LANGUAGES = [  # sentences, regular expression of its sentences with one space between words
    (["ab", "a b"], "ab|a b"),
    (["A, b."], "a b"),
    (["a", "a b", "b", "b b", "b b b"], "a( b)?|b( b){0,2}"),
    (["ab", "a ab", "b ab", "ba"], "((a|b) )?ab|ba"),
]


def plain(text):
    return " ".join(re.sub(r"[.,]", "", text.lower()).split())


@pytest.mark.parametrize("vocabulary", [BPE, CHARACTERS, PIECES], ids=lambda v: v.kind)
@pytest.mark.parametrize(("source", "expected"), LANGUAGES)
def test_grammar_accepts_its_texts_alone(source, expected, vocabulary):
    grammar = build_grammar(source, vocabulary)
    accepted = 0
    for length in range(6):
        for tokens in itertools.product(range(len(vocabulary)), repeat=length):
            shown = "".join(vocabulary.pieces[i] for i in tokens)
            if re.search(r"▁\.*(▁|$)| \.*( |$)|^\.* |<unk>|\.##", shown):
                continue  # separators without a word between them
            is_sentence = re.fullmatch(expected, plain(vocabulary.text(tokens))) is not None
            assert grammar.accepts(tokens, 99) == is_sentence, shown
            assert (grammar.automaton.score(tokens) == 0.0) == is_sentence
            accepted += is_sentence
    assert accepted > 0


def test_words_are_not_separated_if_the_tokens_have_no_separator():
    grammar = build_grammar(["a b"], SEPARATELESS)
    assert grammar.accepts([0, 1], 2)
    assert not grammar.accepts([0], 2)
    assert grammar.accepts([1, 2], 0)  # the blank is the first column


def test_each_token_outside_costs_the_price():
    grammar = build_grammar(["ab a"], BPE, 2.0)
    costs = {(4, 1): 0, (4,): 1, (): 1, (1, 3, 1): 0, (2,): 1, (4, 1, 3): 1, (4, 2, 2): 2, (0, 0): 1, (1, 1, 1, 1): 3}
    for tokens, count in costs.items():
        assert PRICE_WEIGHT * grammar.automaton.score(tokens) == -2.0 * count, tokens
        assert grammar.accepts(tokens, 99) == (count == 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a b", "grammar is 'a b', expected a list of sentences"),
        (["#JSGF V1.0;", "public <s> = a;"], "is '#JSGF V1.0;', expected a list of sentences, without rules of JSGF"),
        (["...", " "], "grammar: '...' has no letters; ' ' has no letters"),
        (["a", 3], "grammar is 3, expected sentences"),
        ([], "grammar has no sentence"),
        (["a c"], "grammar: 'c' has the character 'c', which is in no token"),
    ],
)
def test_unreadable_grammar_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        build_grammar(source, BPE)


def test_too_large_grammars_and_wrong_prices_are_refused():
    with pytest.raises(ValueError, match="more than 3 letters"):
        build_grammar(["a b"], BPE, most_letters=3)
    for price in (0.0, -1.0, math.nan):
        with pytest.raises(FieldError, match="price is"):
            build_grammar(["a"], BPE, price)
    with pytest.raises(ValueError, match="byte_bpe"):
        build_grammar(["a"], Vocabulary(("a", "Ġa"), "byte_bpe"))


def test_a_grammar_replaces_the_phrases_of_the_decoder_only():
    tree = random_boosting(len(BPE), seed=1)
    grammar, labels = build_grammar(["ab"], BPE), FusionLabels(len(BPE))
    batch = BatchFusion.resolve(Fusion(boosting=tree), 2, [Request(grammar=grammar), None], labels)
    assert batch.trees == (grammar.automaton, tree)
    with pytest.raises(ValueError, match=r"requests\[0\].boosting is given, expected None with a grammar"):
        BatchFusion.resolve(Fusion(), 1, [Request(tree, grammar=grammar)], labels)
    with pytest.raises(ValueError, match=r"requests\[0\].boosting is given"):
        BatchFusion.resolve(Fusion(grammar=grammar), 1, [Request(tree)], labels)
    with pytest.raises(FieldError, match=r"boosting is .* with a grammar"):
        Fusion(boosting=tree, grammar=grammar)
    with pytest.raises(ValueError, match=r"fusion.grammar \(grammar\) was made for 8 tokens, expected 9"):
        check_fusion(Fusion(grammar=grammar), FusionLabels(9))
    with pytest.raises(ValueError, match=r"fusion\.grammar is given, expected None: it is late"):
        check_fusion(Fusion(grammar=grammar), FusionLabels(8, unlocked="it is late"))


@pytest.mark.parametrize("entry", ["[unk]", "<unk>", " [UNK] "])
@pytest.mark.parametrize(("price", "expected"), [(math.inf, 4.0), (2.5, 2.5)])
def test_an_entry_for_other_speech_sets_the_price(entry, price, expected, caplog):
    grammar = build_grammar(["ab", entry], BPE, price)
    assert not grammar.accepts([2], 99)
    assert PRICE_WEIGHT * grammar.automaton.score((4, 2)) == -expected
    assert ("grammar_price is 4 in place of inf" in caplog.text) == (price == math.inf)


def test_sentences_that_tokens_cannot_spell_are_left_out(caplog):
    assert build_grammar(["ab", "a c", "a [unk]"], BPE).accepts([4], 99)
    assert "2 of 3 sentences left out: 'c' has the character 'c'" in caplog.text
    assert "'a [unk]' has '[unk]' beside words, expected it alone, or grammar_price" in caplog.text


def test_sentences_in_all_forms_of_unicode_are_equal():
    for pieces, tokens in ((("▁r", "é"), [0, 1]), (("▁r", "e", "\u0301"), [0, 1, 2])):
        for form in ("NFC", "NFD"):
            assert build_grammar([unicodedata.normalize(form, "Ré")], Vocabulary(pieces, "bpe")).accepts(tokens, 99)
