"""Aliases: what results show for them, and their phrases in the boosting tree."""

import pytest

from nemo_gpu_decoding import BoostingConfig, Phrase, Vocabulary, build_boosting_tree
from nemo_gpu_decoding.fusion.boosting import load_boosting_tree
from nemo_gpu_decoding.fusion.phrases import Aliases, aliases_of, read_phrases

TABLE = {
    "ann": "Anne",
    "phi four": "Phi-4",
    "phi four mini": "Phi-4-mini",
    "b c": "BC",
    "c d": "CD",
    "北京": "Beijing",
}
VOCABULARY = Vocabulary.from_pieces(["▁a", "▁b", "a", "b", "c", "▁"], "bpe")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("", ""),
        ("ann", "Anne"),
        ("ann's, ann. ann-ann", "Anne's, Anne. Anne-Anne"),
        ("anna joann ann2", "anna joann ann2"),
        ("e\u0301ann ann\u0301", "e\u0301ann ann\u0301"),  # accents belong to words
        ("phi four five", "Phi-4 five"),
        ("phi  four mini", "Phi-4-mini"),
        ("phi four minis", "Phi-4 minis"),
        ("a b c d", "a BC d"),
        ("我去北京了", "我去Beijing了"),
        ("Ann", "Ann"),
    ],
)
def test_aliases_are_replaced_between_word_boundaries(text, written):
    assert Aliases(TABLE).written(text) == written


def test_aliases_match_any_letter_case_if_asked():
    assert Aliases({"Ann lee": "ANN"}, ignore_case=True).written("aNN Lee ann") == "ANN ann"


@pytest.mark.parametrize(
    "text", ["ann anna phi four mini phi four", "b c d b c c d", "phi phi four minister ann", "去北京"]
)
def test_committed_tokens_stay(text):
    aliases, shown = Aliases(TABLE), ""
    for n in range(len(text) + 1):
        committed = aliases.committed(text[:n])
        assert committed.startswith(shown)
        shown = committed
        for goes_on in ("", "n", " four", " mini", " d", "x y"):
            assert aliases.written(text[:n] + goes_on).startswith(committed)
    assert Aliases(TABLE).committed("we saw phi four m") == "we saw"
    assert Aliases(TABLE).committed("we saw phi four at b") == "we saw Phi-4 at"


def test_aliases_join_and_divide_words():
    words = ["so", "ann,", "phi", "four", "mini", "phi", "four", "or", "ann-ann", "b", "c"]
    found = Aliases({**TABLE, "b c": "Bee Cee"}).words(words)
    assert [tuple(word) for word in found] == [
        (0, 1, "so"), (1, 2, "Anne,"), (2, 5, "Phi-4-mini"), (5, 7, "Phi-4"), (7, 8, "or"), (8, 9, "Anne-Anne"),
        (9, 10, "Bee"), (10, 11, "Cee"),
    ]  # fmt: skip
    assert Aliases(TABLE).words([]) == []
    assert [tuple(word) for word in Aliases({"ann": "An Ne"}).words([" ann", "ann"])] == [
        (0, 1, " An Ne"), (1, 2, "An Ne"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ lists of phrases
def test_aliases_of_phrase_files_are_read(tmp_path):
    path = tmp_path / "phrases.txt"
    path.write_text("new york\t\tnew yorck\tnu  york\nphi-4\t2.5\tphi four\nann\t3\n")
    york, phi, ann = read_phrases(path)
    assert york == Phrase("new york", None, None, ("new yorck", "nu york"))
    assert phi == Phrase("phi-4", 2.5, aliases=("phi four",))
    assert ann == Phrase("ann", 3.0)


@pytest.mark.parametrize(
    ("phrases", "ignore_case", "message"),
    [
        ([Phrase("ann", aliases=("an",)), Phrase("bob", aliases=("an",))], False, "alias 'an' of 'bob' .* of 'ann'"),
        ([Phrase("ann", aliases=("bob",)), Phrase("bob")], False, "alias 'bob' of 'ann' is a phrase itself"),
        ([Phrase("ann", aliases=("Bob",)), Phrase("bob")], True, "alias 'Bob' of 'ann' is a phrase itself"),
    ],
)
def test_alias_of_two_phrases_is_refused(phrases, ignore_case, message):
    with pytest.raises(ValueError, match=message):
        aliases_of(phrases, "list", ignore_case)


def test_alias_may_be_its_phrase_in_another_letter_case():
    phrases = [Phrase("NVIDIA", aliases=("nvidia",)), Phrase("ann"), Phrase("ann", lang="es", aliases=("anna",))]
    assert aliases_of(phrases, "list", True).written("Nvidia anna") == "NVIDIA ann"


@pytest.mark.parametrize("aliases", ["ab", [""], [3]])
def test_aliases_that_are_no_list_of_texts_are_refused(aliases):
    with pytest.raises(ValueError, match="aliases of phrase 'x'"):
        Phrase("x", aliases=aliases)


def test_alias_has_the_weight_of_its_phrase():
    tree = build_boosting_tree([Phrase("ab", 3.0, aliases=("ba", "ac"))], VOCABULARY)
    plain = build_boosting_tree([Phrase(text, 3.0) for text in ("ab", "ba", "ac")], VOCABULARY)
    assert tree.fingerprint == plain.fingerprint
    assert plain.aliases is None
    assert tree.aliases.written("ba ac ab") == "ab ab ab"


@pytest.mark.parametrize("refund", ["full", "nemo"])
def test_phrase_with_aliases_need_not_be_spelled(refund):
    config = BoostingConfig(key_phrase_items_list=[{"phrase": "A-2", "aliases": ["ab"]}], refund=refund)
    tree = build_boosting_tree(["ab"], VOCABULARY, BoostingConfig(refund=refund))
    own = load_boosting_tree(config, VOCABULARY)
    assert own.fingerprint == tree.fingerprint
    assert own.aliases.written("ab") == "A-2"
    with pytest.raises(ValueError, match="'A-2' has the character '-'"):
        build_boosting_tree(["A-2"], VOCABULARY)
    with pytest.raises(ValueError, match="'x'"):
        build_boosting_tree([Phrase("A-2", aliases=("x",))], VOCABULARY)
