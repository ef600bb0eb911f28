"""Phrase boosting: what the options mean, what is refused."""

import logging
import math
import random
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_gpu_decoding import cache, load_graph, load_preset
from nemo_gpu_decoding.checks import warn_once
from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder
from nemo_gpu_decoding.fusion.allowed import allowed_tokens
from nemo_gpu_decoding.fusion.batch import FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.boosting import (
    BoostingConfig,
    Phrase,
    build_boosting_tree,
    load_boosting_tree,
    read_phrases,
    weight_of_tree,
    word_continuations,
)
from nemo_gpu_decoding.fusion.default_bonuses import weight_of_list
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.fusion.grammar import build_grammar
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.fusion.phrases import without_repetitions
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.prune import prune_ngram_lm
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.vocabulary import OTHER_CASE, Vocabulary
from tests.assets import ASSETS
from tests.fusion.test_ngram import write_nemo
from tests.oracles.ngram import class_bonus, phrase_bonus
from tests.random_models import random_boosting, random_lm

VOCABULARY = Vocabulary.from_pieces(("<unk>", "▁", *"abcdeABC'", "▁ab", "▁abc", "bc"))


@pytest.fixture(autouse=True)
def _empty_cache():
    cache._entries.clear()


def score(tree, text, **options):
    return tree.score(VOCABULARY.tokenize(text), **options)


def spelled(*pieces):
    return [VOCABULARY.pieces.index(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("options", "bonus"),
    [
        ({}, phrase_bonus(4)),  # NeMo's formula
        ({"context_score": 0.5, "depth_scaling": 3.0}, phrase_bonus(4, 0.5, 3.0)),
        ({"uniform_weights": True}, 4.0),
        ({"score_per_phrase": 12.0}, phrase_bonus(4, 2.0)),  # divided by the characters
    ],
    ids=str,
)
def test_bonus_of_a_phrase_follows_nemos_formula(options, bonus):
    tree = build_boosting_tree(["abc de"], VOCABULARY, BoostingConfig(**options))
    assert score(tree, "abc de") == pytest.approx(bonus)
    assert score(tree, "abc d") == pytest.approx(0)
    if not options:
        assert score(tree, "abc d", final=False) == pytest.approx(phrase_bonus(3))


def test_unk_score_is_paid_outside_phrases_only_by_arcs_of_the_root():
    tree = build_boosting_tree(["ab de"], VOCABULARY, BoostingConfig(unk_score=-0.5))
    assert score(tree, "ab de") == pytest.approx(phrase_bonus(4))
    assert score(tree, "ab de c") == pytest.approx(phrase_bonus(4) - 2 * 0.5)  # '▁' and 'c'
    tree = build_boosting_tree(["abc", "de"], VOCABULARY)
    root = tree.arrays.states[tree.start_state]
    assert root["arc_end"] - root["arc_begin"] == len(VOCABULARY)


def test_phrase_weights_multiply_the_bonus_whatever_else_is_listed():
    phrases = [Phrase("abc", weight=0.5), Phrase("abc de", weight=3.0), "de"]
    tree = build_boosting_tree(phrases, VOCABULARY)
    assert score(tree, "abc") == pytest.approx(0.5 * phrase_bonus(1))
    assert score(tree, "de") == pytest.approx(phrase_bonus(3))
    assert score(tree, "abc de") == pytest.approx(3.0 * phrase_bonus(4))
    tree = build_boosting_tree(phrases, VOCABULARY, BoostingConfig(overlapping=True))
    # "de" occurs inside as well
    assert score(tree, "abc de") == pytest.approx(3.0 * phrase_bonus(4) + phrase_bonus(3))


def test_by_default_each_token_counts_for_one_phrase():
    phrases = ["ab de", "de abc", "abc"]
    configs = [BoostingConfig(overlapping=value) for value in (None, False, True)]
    default, apart, every = (build_boosting_tree(phrases, VOCABULARY, config) for config in configs)
    assert default.fingerprint == apart.fingerprint != every.fingerprint
    assert score(default, "ab de abc") < score(every, "ab de abc")


def test_all_segmentations_earn_what_the_canonical_one_earns():
    tree = build_boosting_tree(["abc"], VOCABULARY, BoostingConfig(segmentations=4))
    for pieces in (["▁abc"], ["▁ab", "c"], ["▁", "a", "bc"]):
        assert tree.score(spelled(*pieces)) == pytest.approx(phrase_bonus(1))
    assert build_boosting_tree(["abc"], VOCABULARY).score(spelled("▁ab", "c")) == 0
    configs = BoostingConfig(use_bpe_dropout=True, num_of_transcriptions=3), BoostingConfig(segmentations=3)
    assert len({build_boosting_tree(["abc de"], VOCABULARY, config).fingerprint for config in configs}) == 1


def test_ignore_case_boosts_other_spellings():
    strict = build_boosting_tree(["ABC"], VOCABULARY)
    tolerant = build_boosting_tree(["ABC"], VOCABULARY, BoostingConfig(ignore_case=True))
    assert score(strict, "abc") == 0
    for text in ("ABC", "abc", "Abc"):
        assert score(tolerant, text) == pytest.approx(phrase_bonus(4))


@pytest.mark.parametrize("text", ["TERESA", "Teresa"])
def test_phrase_in_another_letter_case_than_the_pieces_is_boosted_with_a_warning(text, messages):
    vocabulary = Vocabulary.from_pieces(["▁", "t", "e", "r", "s", "a"])
    boosted = build_boosting_tree([text], vocabulary)
    assert messages == [OTHER_CASE]
    assert boosted.fingerprint == build_boosting_tree(["teresa"], vocabulary).fingerprint
    with pytest.raises(ValueError, match="phrase 'TÜS' has the character 'ü'"):
        build_boosting_tree(["TÜS"], vocabulary)


def test_whole_words_earn_nothing_in_longer_words():
    for config in (BoostingConfig(whole_words=False), BoostingConfig(refund="nemo")):
        assert build_boosting_tree(["ab"], VOCABULARY, config).score(spelled("▁ab", "e")) == pytest.approx(1.0)
    tree = build_boosting_tree(["ab"], VOCABULARY)
    assert tree.score(spelled("▁ab", "e")) == pytest.approx(0)
    for end in ([], ["▁"], ["▁abc"], ["<unk>"], ["'", "c"]):
        assert tree.score(spelled("▁ab", *end)) == pytest.approx(phrase_bonus(1))
    tree = build_boosting_tree(["ab'"], VOCABULARY)
    assert tree.score(spelled("▁ab", "'", "c")) == pytest.approx(phrase_bonus(2))


def test_phrases_in_characters_begin_and_end_with_words():
    vocabulary = Vocabulary.from_pieces((*"abc '", "東", "京"), kind="char")
    tree = build_boosting_tree(["ab", "b c", "京", "'b"], vocabulary)

    def earns(text):
        return tree.score([vocabulary.pieces.index(c) for c in text])

    for text in ("ab", "c ab c", "ab'", "ab 'c"):
        assert earns(text) == pytest.approx(phrase_bonus(2))
    for text in ("cab", "abc", "c'ab", "a", "a b", "b ca"):
        assert earns(text) == pytest.approx(0)
    assert earns("ab ab") == pytest.approx(2 * phrase_bonus(2))
    assert earns("b cab c") == pytest.approx(0)
    assert earns("ab b c") == pytest.approx(phrase_bonus(2) + phrase_bonus(3))
    assert earns("a'b") == pytest.approx(phrase_bonus(2))  # begins with no word, hence anywhere
    # a script without spaces: nothing says where words are
    assert earns("東京東") == pytest.approx(1.0)


def test_words_of_characters_and_word_pieces_are_bounded():
    vocabulary = Vocabulary.from_pieces("abc", kind="char")
    tree = build_boosting_tree(["ab"], vocabulary)
    assert tree.score([2, 0, 1]) == pytest.approx(phrase_bonus(2))
    assert tree.score([0, 1, 2]) == pytest.approx(0)
    vocabulary = Vocabulary.from_pieces(("ab", "##c", "##'", "c"))
    tree = build_boosting_tree(["ab"], vocabulary)
    assert tree.score([0, 1]) == pytest.approx(0)
    for piece in (2, 3):
        assert tree.score([0, piece]) == pytest.approx(phrase_bonus(1))


def random_phrases(count):
    draw = random.Random(0)
    phrases = {"".join(draw.choices("abcde", k=draw.randint(6, 14))) for _ in range(count * 11 // 10)}
    return draw.sample(sorted(phrases), count)


@pytest.mark.slow
def test_20000_phrases_cost_no_more_nodes_than_tokens():
    tree = build_boosting_tree(random_phrases(20_000), VOCABULARY, BoostingConfig(whole_words=False))
    assert tree.num_arcs <= tree.num_states + len(VOCABULARY)
    assert tree.num_states < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("is_weighted", [False, True])
def test_word_ends_of_20000_phrases_cost_few_states(is_weighted):
    """The refunds that phrases share are few, even where every phrase has a weight of its own."""
    draw = random.Random(1)
    phrases = [Phrase(text, draw.uniform(0.5, 3.0) if is_weighted else None) for text in random_phrases(20_000)]
    anywhere, in_words = (
        build_boosting_tree(phrases, VOCABULARY, BoostingConfig(whole_words=whole)) for whole in (False, True)
    )
    assert in_words.num_states - anywhere.num_states < (3_000 if is_weighted else 100)


# -- blank lines, duplicates, files ------------------------------------------------------------------
def test_blank_and_duplicate_phrases_are_skipped_with_one_warning(caplog):
    phrases = ["abc", "", "de", " abc ", "  ", Phrase("de", weight=2.0), Phrase("abc", weight=0.5)]
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        tree = build_boosting_tree(phrases, VOCABULARY)
    assert caplog.messages == ["phrase list: skipped 2 blank and 3 duplicate phrases"]
    assert score(tree, "abc") == pytest.approx(phrase_bonus(1))
    assert score(tree, "de") == pytest.approx(2 * phrase_bonus(3))  # the largest weight counts


def test_phrase_file_has_weights_and_duplicates_are_warned_of(tmp_path, caplog):
    path = tmp_path / "phrases.txt"
    path.write_text("\ufeffabc\r\n\nab  de\t2.5\nabc\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        phrases = read_phrases(path)
    assert phrases == [Phrase("abc"), Phrase("ab de", 2.5)]
    assert len(caplog.records) == 1
    assert "1 blank and 1 duplicate" in caplog.text
    tree = load_boosting_tree(BoostingConfig(key_phrases_file=str(path)), VOCABULARY)
    assert tree.name == str(path)
    assert score(tree, "ab de") == pytest.approx(2.5 * phrase_bonus(4))


def test_the_shipped_phrase_file_is_clean(caplog):
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        assert len(read_phrases(ASSETS / "phrases.txt")) == 34
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"de\tmuch\n", "line 1: .*'much'.*expected 'phrase<tab>weight'"),
        (b"abc\t-inf\n", "line 1: weight of phrase 'abc' is -inf"),
        (b"abc\tnan\n", "line 1: weight of phrase 'abc' is nan"),
        (b"\n\n", "has no phrases"),
        (b"", "has no phrases"),
        (b"ab\xff", "line 1: byte 0xff at 3, expected UTF-8 text"),
    ],
)
def test_invalid_phrase_file_raises_an_error_that_names_it(tmp_path, content, message):
    path = tmp_path / "phrases.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_phrases(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_phrase_file_with_windows_line_ends_is_read(tmp_path, encoding):
    (tmp_path / "phrases.txt").write_bytes("ab\t2\r\nabc\r\n".encode(encoding))
    assert read_phrases(tmp_path / "phrases.txt") == [Phrase("ab", 2.0), Phrase("abc")]


def test_changed_phrase_file_is_read_again(tmp_path):
    path = tmp_path / "phrases.txt"
    config = BoostingConfig(key_phrases_file=str(path))
    path.write_text("abc\n")
    first = load_boosting_tree(config, VOCABULARY)
    assert load_boosting_tree(config, VOCABULARY) is first
    path.write_text("abc\nde\n")
    assert load_boosting_tree(config, VOCABULARY).num_states > first.num_states


def test_phrase_lists_of_all_forms_give_the_same_tree():
    class PhraseItem:  # as NeMo's
        def __init__(self, phrase, lang):
            self.phrase, self.lang = phrase, lang

    config = BoostingConfig(
        key_phrases_list=["abc"],
        key_phrase_items_list=[PhraseItem("de", "en"), {"phrase": "ab", "lang": "en", "weight": 2.0}],
    )
    tree = load_boosting_tree(config, VOCABULARY)
    assert score(tree, "ab") == pytest.approx(2 * phrase_bonus(1))
    assert score(tree, "de") == pytest.approx(phrase_bonus(3))
    assert load_boosting_tree(config, VOCABULARY) is tree


def test_keys_of_the_nemo_development_branch_are_accepted():
    config = BoostingConfig(key_phrase_items_list=[{"phrase": "abc", "lang": None, "alpha": 2.0}], bpe_mode="var_bpe")
    plain = BoostingConfig(key_phrase_items_list=[Phrase("abc", 2.0)], segmentations=8)
    assert load_boosting_tree(config, VOCABULARY).fingerprint == load_boosting_tree(plain, VOCABULARY).fingerprint
    assert BoostingConfig(bpe_mode="case_insensitive").is_case_ignored
    assert BoostingConfig(bpe_mode="case_insensitive").sequences_per_spelling == 8
    assert BoostingConfig(bpe_mode="bpe_dropout", num_of_transcriptions=3).sequences_per_spelling == 3
    with pytest.raises(ValueError, match="weight or alpha, not both"):
        BoostingConfig(key_phrase_items_list=[{"phrase": "abc", "alpha": 2.0, "weight": 1.0}])


def test_languages_select_the_tokenizer_of_an_aggregate():
    vocabulary = Vocabulary(
        VOCABULARY.pieces,
        "bpe",
        encode_by_language={"en": lambda text: spelled("▁ab"), "es": lambda text: spelled("▁abc")},
    )
    tree = build_boosting_tree(["x", Phrase("x", lang="es", weight=2.0)], vocabulary)
    assert tree.score(spelled("▁ab")) == pytest.approx(1.0)
    assert tree.score(spelled("▁abc")) == pytest.approx(2.0)
    assert build_boosting_tree(["x"], vocabulary, BoostingConfig(source_lang="es")).score(spelled("▁ab")) == 0


def test_nemo_boosting_tree_files_load_without_their_end_of_sentence_bonus(tmp_path):
    import torch

    tensors = {
        "arcs_weights": torch.tensor([1.0, 0.0, 2.5, 0, 0]),
        "ilabels": torch.tensor([0, 1, 1, 0, 0], dtype=torch.int32),
        "to_states": torch.tensor([1, 0, 2, 0, 0], dtype=torch.int32),
        "start_end_arcs": torch.tensor([[0, 2], [2, 3], [0, 0]], dtype=torch.int32),
        "backoff_to_states": torch.zeros(3, dtype=torch.int32),
        "backoff_weights": torch.tensor([0.0, -1.0, 0.0]),
        "final_weights": torch.tensor([0.0, 0.0, 1.0]),
    }
    path = write_nemo(tmp_path / "tree.nemo", {"vocab_size": 2, "num_arcs": 3, "separate_bos_state": False}, tensors)
    tree = load_boosting_tree(BoostingConfig(model_path=str(path)), Vocabulary(("a", "b"), "char"))
    assert tree.start_state == 0
    assert tree.score([0, 1]) == 3.5
    assert tree.score([0, 0]) == 1.0


# -- what is refused ---------------------------------------------------------------------------------
def test_phrases_that_cannot_be_spelled_are_named():
    with pytest.raises(ValueError, match="phrase 'axe' has the character 'x', which is not in the model's vocabulary"):
        build_boosting_tree(["axe"], VOCABULARY)
    with pytest.raises(ValueError, match=r"'x', .*'y', .*'z', .*; and 1 more"):
        build_boosting_tree(["ax", "ay", "az", "aw"], VOCABULARY)


@pytest.mark.parametrize(
    ("phrases", "config", "message"),
    [
        ([], {}, "has no phrases"),
        (["", " "], {}, "has no phrases"),
        ("abc", {}, "phrases is a str, expected a list of phrases"),
        ({"abc": 2.0}, {}, "phrases is a dict, expected a list of phrases"),
        ([911], {}, r"phrase item is 911, expected a text \(numbers need quotes\)"),
        (["abc"], {"key_phrases_list": {"abc": 2.0}}, r"key_phrases_list is \{.*\}, expected a list of phrases"),
        (["abc"], {"key_phrases_list": ["de"]}, "config has key_phrases_list besides the phrases given"),
        (["abc"], {"key_phrases_list": "abc"}, r"key_phrases_list is '.*', expected a list of phrases"),
        ([{"phrase": "abc", "weight": "2"}], {}, "weight of phrase 'abc' is '2', expected a finite number"),
        ([{"phrase": "abc", "alpha": "b"}], {}, "weight of phrase 'abc' is 'b', expected a finite number"),
        ([{"phrase": "abc", "weight": 1e38}], {}, r"weight of phrase 'abc' is 1e\+38, expected a number -1e\+09 \.\."),
        ([{"phrase": "abc", "lang": ["en"]}], {}, "lang of phrase 'abc' is .*, expected the name of a language"),
        ([{"phrase": "abc", "aliases": 5}], {}, "aliases of phrase 'abc' is 5, expected a list of texts"),
    ],
)
def test_wrong_types_of_phrase_lists_are_named(phrases, config, message):
    with pytest.raises(ValueError, match=message):
        build_boosting_tree(phrases, VOCABULARY, BoostingConfig(**config))


@pytest.mark.parametrize("key", ["model_path", "key_phrases_file"])
def test_missing_phrase_file_raises_an_error(tmp_path, key):
    with pytest.raises(FileNotFoundError):
        load_boosting_tree(BoostingConfig(**{key: str(tmp_path / "none.nemo")}), VOCABULARY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no phrases: set model_path"),
        ({"key_phrases_file": "f", "key_phrases_list": ["a"]}, "key_phrases_file and key_phrases_list"),
        ({"model_path": "m", "key_phrases_file": "f"}, "model_path and key_phrases_file"),
    ],
)
def test_two_sources_of_phrases_are_refused(options, message):
    config = BoostingConfig(**options)
    assert config.is_empty == (not options)
    with pytest.raises(ValueError, match=message):
        load_boosting_tree(config, VOCABULARY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_score": -1.0}, "context_score is -1.0, expected a finite number >= 0"),
        ({"depth_scaling": float("nan")}, "depth_scaling is nan"),
        ({"score_per_phrase": float("inf")}, "score_per_phrase is inf"),
        ({"unk_score": float("inf")}, "unk_score is inf"),
        ({"segmentations": 0}, "segmentations is 0, expected an integer >= 1"),
        ({"use_bpe_dropout": True, "num_of_transcriptions": 0}, "num_of_transcriptions is 0"),
        ({"whole_words": "yes"}, "whole_words is 'yes', expected True, False or None"),
        ({"whole_words": 1}, "whole_words is 1, expected True, False or None"),
        ({"whole_words": True, "refund": "nemo"}, "whole_words is True, which has no effect"),
        ({"overlapping": 1}, "overlapping is 1, expected True, False or None"),
        ({"overlapping": False, "refund": "nemo"}, "overlapping is False, which has no effect"),
        ({"overlapping": False, "model_path": "tree.nemo"}, "overlapping is False, which has no effect"),
        ({"whole_words": True, "model_path": "tree.nemo"}, "whole_words is True, which has no effect"),
        ({"refund": "half"}, "refund is 'half', expected one of full, nemo"),
        ({"bpe_mode": "half"}, "bpe_mode is 'half', expected one of default, bpe_dropout, var_bpe, case_insensitive"),
        ({"var_bpe_scoring_temp": 1.0}, "var_bpe_scoring_temp is 1.0, which has no effect"),
        ({"final_eos_score": 2.0}, "final_eos_score is 2.0, which has no effect"),
        ({"bpe_alpha": 0.1}, "bpe_alpha is 0.1, which has no effect"),
        ({"num_of_transcriptions": 9}, "num_of_transcriptions is 9, .* use_bpe_dropout is False"),
        ({"key_phrase_items_list": [{"text": "abc"}]}, "or the keys phrase, lang, weight and aliases"),
        *[({"ac_threshold": value}, "ac_threshold is .*, expected") for value in (-0.1, 1.5, "high")],
        (
            {"model_path": "a.nemo", "ac_threshold": 0.1},
            r"is 0\.1 with model_path, which names no phrases, expected 0",
        ),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BoostingConfig(**options)


@pytest.mark.parametrize("weight", [-float("inf"), float("nan"), float("inf")])
def test_invalid_weight_raises_an_error_that_names_it(weight):
    with pytest.raises(ValueError, match="weight of phrase 'abc'"):
        Phrase("abc", weight)


# -- Which pieces continue a word ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "continuations", "others"),
    [
        ("bpe",
         ["a", "er", "é", "7", "ж", "가", "\N{COMBINING ACUTE ACCENT}", "\N{DEVANAGARI SIGN VIRAMA}"],
         ["▁", "▁a", "'s", "-", ",", "<unk>", "<s>", "<0x41>", "[CLS]", "東京", "カ", "ー", "ไทย"]),
        ("wpe", ["##a", "##7", "##é"], ["a", "##", "#", "##'s", "##東", "[UNK]", "'"]),
        ("byte_bpe", ["a", "7", "Ã©"], ["Ġ", "Ġa", "'s", "Ã", "-", "<|en|>"]),
        ("char", ["a", "ü", "7"], [" ", "'", "-", "東"]),
    ],
)  # fmt: skip
def test_letters_digits_and_accents_continue_a_word(kind, continuations, others):
    vocabulary = Vocabulary((*continuations, *others), kind)
    assert word_continuations(vocabulary).tolist() == [True] * len(continuations) + [False] * len(others)


def test_negative_weights_avoid_phrases():
    tree = build_boosting_tree([Phrase("abc", weight=-2.0), "de"], VOCABULARY)
    assert score(tree, "abc") == pytest.approx(-2 * score(build_boosting_tree(["abc"], VOCABULARY), "abc"))
    assert score(tree, "ab") == 0
    assert score(tree, "de") > 0
    with pytest.raises(ValueError, match=r"weight of phrase 'abc' is -2\.0 with refund 'nemo'"):
        build_boosting_tree([Phrase("abc", weight=-2.0)], VOCABULARY, BoostingConfig(refund="nemo"))


@pytest.mark.parametrize("source", ["file", "list"])
def test_bad_phrases_are_left_out_with_one_warning_and_the_others_boosted(tmp_path, caplog, source):
    texts = ["ab", "route 66", "abc", "müller"]
    if source == "file":
        (tmp_path / "phrases.txt").write_bytes("\n".join([*texts, "c\tx", ""]).encode() + b"caf\xe9")
        tree = load_boosting_tree(BoostingConfig(key_phrases_file=str(tmp_path / "phrases.txt")), VOCABULARY)
    else:
        tree = build_boosting_tree(texts, VOCABULARY)
    assert tree.table.texts == ["ab", "abc"]
    (warning,) = [message for message in caplog.messages if "phrases left out" in message]
    assert "2 of 4" in warning
    assert all(text in warning for text in ("route 66", "müller"))
    assert ("2 of 6 lines left out: line 5: could not convert" in caplog.text) == (source == "file")
    assert ("line 6: byte 0xe9 at 4, expected UTF-8" in caplog.text) == (source == "file")


@pytest.mark.parametrize(
    ("content", "weights", "message"),
    [
        ("ab\t40\nabc\t50\n", [40, 50], "the weight of 'abc' is 50, expected at most 5"),
        ("ab :2.5\nabc\n", [2.5, None], "'ab :2.5' in the format of another decoder; .* a tab and the weight"),
        ("ab 2.5\n", [None], "'ab 2.5' in the format of another decoder"),
        ("ab,2.5\n", [None], "'ab,2.5' in the format of another decoder"),
        ("ab,25\nabc => 2.5\n", [None, None], "'ab,25', 'abc => 2.5' in the format of another decoder"),
        ('ab #0.35\n"ab","2"\n', [None, None], "'ab #0.35', '\"ab\",\"2\"' in the format of another"),
        ("ab;2,5\n", [None], "'ab;2,5' in the format of another"),
        ("▁a b :2,5\n", [2.5], "'▁a b :2,5' in the format of another"),
        ("a b @AB\n", [None], "'a b @AB' in the format of another"),
        ("ab 66\rab\t5\rabc 10:30\r", [None, 5, None], ""),
        ("ab_ab_a b\n", [None], ""),
    ],
)
def test_phrase_files_of_other_decoders_are_warned_of(tmp_path, caplog, content, weights, message):
    warn_once.cache_clear()
    (tmp_path / "phrases.txt").write_text(content)
    assert [phrase.weight for phrase in read_phrases(tmp_path / "phrases.txt")] == weights
    assert len(caplog.records) == bool(message)
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("source", ["file", "list"])
@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("gpu_gpu_g p u", Phrase("gpu", aliases=("g p u",))),  # NeMo's CTC-WS
        ("nvidia_nvidia", Phrase("nvidia")),
        ("GPU_gpu_g p u", Phrase("GPU", aliases=("gpu", "g p u"))),
        ("nv link_nv link_nvlink", Phrase("nv link", aliases=("nvlink",))),
        ("snake_case", Phrase("snake_case")),
        ("_", Phrase("_")),
        ("a_", Phrase("a_")),
        ("word\t2.5", Phrase("word", 2.5)),  # flashlight, and files of this package
        ("new york  :2.5 #0.3 @NY", Phrase("new york", 2.5)),  # sherpa-onnx
        ("new york #0.3 :2,5", Phrase("new york", 2.5)),
        ("▁new ▁yo rk :2 #0.3 @NY", Phrase("new york", 2.0)),
        ("word\t2,5", Phrase("word", 2.5)),
        ("new york :-2", Phrase("new york", -2.0)),
        ("channel 66", Phrase("channel 66")),
    ],
)
def test_lines_of_other_decoders_are_read(tmp_path, source, line, phrase):
    (tmp_path / "phrases.txt").write_text(line + "\n")
    found = read_phrases(tmp_path / "phrases.txt") if source == "file" else without_repetitions([Phrase(line)], "list")
    assert found == [phrase]


def test_large_weights_of_requests_and_configs_are_warned_of_once(caplog):
    warn_once.cache_clear()
    for _ in range(2):
        decoder = FlexCTCBeam(4, 4, fusion=Fusion(boosting=random_boosting(4, seed=1), boosting_weight=30.0))
        decoder.open(1, [Request(boosting_weight=40.0)])
        BoostingConfig(context_score=20.0)
        check_fusion(Fusion(boosting_weight=35.0), FusionLabels(4, lm_in_graph=True))  # usual for words
    said = [record.getMessage().partition(", expected")[0] for record in caplog.records]
    assert said == ["boosting_weight is 30", "boosting_weight of a request is 40", "context_score is 20"]


def test_longer_lists_have_smaller_default_weights():
    weights = [weight_of_list(None, size) for size in (0, 1, 10, 100, 1000, 10_000)]
    assert weights == pytest.approx([1.0, 1.0, 0.87, 0.64, 0.41, 0.25], abs=0.005)
    assert weight_of_list(0.0, 10) == 0.0
    phrases = [Phrase("ab", aliases=("ba", "ac")), Phrase("b")]
    aliased = build_boosting_tree(phrases, VOCABULARY, BoostingConfig(segmentations=4))
    assert weight_of_tree(None, aliased) == weight_of_list(None, 2)
    assert weight_of_tree(None, random_boosting(4, seed=1)) == weight_of_list(None, 300)  # of no known list


def test_bonuses_of_an_lm_replace_its_score_of_a_phrase_by_the_prior_of_the_list():
    lm = random_lm(len(VOCABULARY), seed=3)
    phrases = ["ab", Phrase("cab", weight=2.0, aliases=("bad", "ade")), Phrase("dead", weight=-1.0), "e"]
    config = BoostingConfig(key_phrases_list=phrases, phrase_share=0.3, segmentations=2)
    tree = load_boosting_tree(config, VOCABULARY, lm)
    for sequence, text in zip(tree.table.sequences, tree.table.texts, strict=True):
        earned = [class_bonus(lm, sequence.tokens[:n], 0.3, 4) for n in range(1, len(sequence.tokens) + 1)]
        if text == "dead":
            assert sequence.scores.sum() == pytest.approx(-weight_of_list(None, 4) * phrase_bonus(5))
        else:
            assert np.cumsum(sequence.scores) == pytest.approx(
                (2 if text == "cab" else 1) * np.array(earned), abs=3e-3
            )
    assert (weight_of_tree(None, tree), weight_of_tree(0.7, tree)) == (1.0, 0.7)
    assert not load_boosting_tree(config, VOCABULARY).table.of_lm  # the cache tells them apart
    assert build_boosting_tree(phrases, VOCABULARY, replace(config, key_phrases_list=None), lm).table.of_lm
    for options, given in (({"phrase_share": 0.3}, None), ({"refund": "nemo"}, lm)):
        with pytest.raises(ValueError, match=r"^phrase_share is 0\.3 without lm, expected 0\.03$|^lm is "):
            build_boosting_tree(["ab"], VOCABULARY, BoostingConfig(**options), given)


def test_forms_of_unicode_are_one_phrase_and_one_alias():
    vocabulary = Vocabulary.from_pieces(["▁r", "é", "sum", "▁a", "b"])
    for form in ("NFC", "NFD"):
        text = unicodedata.normalize(form, "résumé")
        assert build_boosting_tree([text], vocabulary).table.keys == [(0, 1, 2, 1)]
        tree = build_boosting_tree([Phrase("a", aliases=[text])], vocabulary)
        assert tree.table.keys == [(3,), (0, 1, 2, 1)]
        assert [tree.aliases.written(unicodedata.normalize(f, "ab résumé")) for f in ("NFC", "NFD")] == ["ab a"] * 2


@pytest.mark.parametrize("make", [build_boosting_tree, build_grammar, lambda texts, v: allowed_tokens(v, texts=texts)])
def test_a_list_in_place_of_a_vocabulary_is_named(make):
    with pytest.raises(ValueError, match=r"vocabulary is \['a'\], expected a Vocabulary"):
        make(["a"], ["a"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_boosting_tree(Path("p"), VOCABULARY), "phrases is a .*Path, expected a list of phrases"),
        (lambda: build_grammar(None, VOCABULARY), "grammar is None, expected a list of sentences"),
        (lambda: Vocabulary.from_pieces([b"a"]), r"pieces is \[b'a'\], expected a list of texts"),
        (lambda: load_ngram_lm("a.arpa", VOCABULARY), "vocab_size is Vocabulary.*, expected an integer >= 1"),
        (lambda: ALSDPlusPlus("a.nemo"), "networks is 'a.nemo', expected networks of a transducer"),
        (lambda: build_word_boosting({"a": 1.0}, "a"), "graph is 'a', expected a WordGraph"),
        (lambda: VOCABULARY.tokenize(["a"]), r"text is \['a'\], expected a str"),
        (lambda: build_grammar([["a"]], VOCABULARY), r"grammar is \['a'\], expected sentences: texts"),
        (lambda: allowed_tokens(VOCABULARY, texts=[3]), r"texts is \[3\], expected a list of texts"),
        (lambda: allowed_tokens(VOCABULARY, scripts="Latin"), "scripts is 'Latin', expected a list of texts"),
        (lambda: Fusion(grammar=["a"], boosting=["b"]), r"boosting is \['b'\] with a grammar"),
        (lambda: Fusion(lm_pool_weights=[1.0]), r"lm_pool_weights is \[1.0\], expected a Mapping"),
        (lambda: FlexCTCBeam(2, 2, config={}), r"config is \{\}, expected a FlexCTCConfig"),
        (lambda: FlexCTCBeam(2, 2, fusion=[]), r"fusion is \[\], expected a Fusion"),
        (lambda: FlexCTCBeam(2, 2, fusion=["a"] * 999), r"fusion is .{200}\.\.\., expected a Fusion"),
        (lambda: FlexCTCBeam(2, 2).close(FlexCTCBeam(2, 2).open(1), rows=0), "rows is 0, expected a Iterable"),
        (lambda: FlexCTCBeam(2, 2).partial(FlexCTCBeam(2, 2).open(1), "2"), "n_best is '2', expected 1"),
        (lambda: FlexCTCBeam(1, 1).decode(np.log([[0.5, 0.5]]), [math.inf]), "lengths holds .inf., expected integers"),
        (lambda: read_arpa("a.arpa", added="ab"), "added is 'ab', expected a list of words"),
        (lambda: prune_ngram_lm("a.arpa", size=1), "arpa is 'a.arpa', expected a Arpa: read_arpa"),
        (lambda: load_graph(None), "path is None, expected the name of a file"),
        (lambda: load_preset(5), "preset is 5, expected the name of a file"),
        (lambda: build_ctcdecoder(["a", None]), r"labels is \['a', None\], expected a list of texts"),
    ],
)
def test_arguments_of_wrong_types_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
