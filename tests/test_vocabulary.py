"""Tokens to text and words; text to tokens in one or in several ways."""

import itertools
import random
import unicodedata

import pytest

from nemo_gpu_decoding.vocabulary import Vocabulary, WordSpan
from nemo_gpu_decoding.words import words_of
from tests.assets import sentencepiece_processor

BPE = ("<unk>", "▁", "▁a", "▁ab", "a", "b", "c", "bc", "▁the", "N", "n", "▁N", "A", "▁A")
WPE = ("[UNK]", "a", "ab", "##b", "##bc", "##c", "the", "##s")
CHAR = (" ", "a", "b", "c", "'")


@pytest.fixture(scope="module")
def processor():
    pytest.importorskip("sentencepiece")
    return sentencepiece_processor()


@pytest.fixture(scope="module")
def vocabulary(processor):
    return Vocabulary.from_sentencepiece(processor)


def brute_force(vocabulary, text):
    """All segmentations without any cleverness, in the order that is promised."""

    def split(rest, is_first):
        if not rest:
            yield []
        for end in range(len(rest), 0, -1):
            piece = rest[:end]
            if piece in vocabulary.pieces:
                for tail in split(rest[end:], False):
                    yield [vocabulary.pieces.index(piece), *tail]

    return sorted(split("▁" + text.replace(" ", "▁"), True), key=len)


# -- kinds -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("pieces", "kind"), [(BPE, "bpe"), (WPE, "wpe"), (CHAR, "char")])
def test_kind_is_told_from_the_pieces(pieces, kind):
    assert Vocabulary.from_pieces(pieces).kind == kind
    assert len(Vocabulary.from_pieces(pieces)) == len(pieces)


def test_vocabulary_of_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="give kind, one of bpe, wpe, char"):
        Vocabulary.from_pieces(["ab", "cd"])
    assert Vocabulary.from_pieces(["ab", "cd"], kind="bpe").kind == "bpe"


@pytest.mark.parametrize(
    ("pieces", "kind", "message"),
    [((), "bpe", "pieces is empty"), (("a",), "spe", "kind is 'spe', expected one of bpe, wpe, char")],
)
def test_vocabulary_refuses_invalid_arguments(pieces, kind, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(pieces, kind)


# -- ids to text -------------------------------------------------------------------------------------
def test_text_equals_sentencepiece(processor, vocabulary):
    draw = random.Random(0)
    for _ in range(2000):
        ids = [draw.randrange(len(vocabulary)) for _ in range(draw.randrange(8))]
        assert vocabulary.text(ids) == processor.decode(ids)


def test_text_of_bytes_word_pieces_and_characters():
    vocabulary = Vocabulary(("▁a", "<0xC3>", "<0xA9>", "<0xFF>"), "bpe")
    assert vocabulary.text([0, 1, 2, 0]) == "aé a"
    assert vocabulary.text([0, 1]) == "a\ufffd"
    assert vocabulary.text([3]) == "\ufffd"
    wpe = Vocabulary(WPE, "wpe")
    assert wpe.text([6, 2, 7, 1]) == "the abs a"
    assert wpe.text([0, 1]) == "a"
    assert wpe.text([3, 1]) == "b a"
    assert Vocabulary(CHAR, "char").text([1, 0, 2, 4, 3]) == "a b'c"


@pytest.mark.parametrize(
    ("pieces", "kind", "ids", "spans"),
    [
        (BPE, "bpe", [8, 3, 6, 5], [("the", 0, 1), ("abcb", 1, 4)]),
        (BPE, "bpe", [1, 4, 1, 5, 6], [("a", 0, 2), ("bc", 2, 5)]),
        (BPE, "bpe", [1, 2, 5], [("ab", 0, 3)]),  # a lone '▁' goes with what follows
        (BPE, "bpe", [5, 2], [("b", 0, 1), ("a", 1, 2)]),
        (BPE, "bpe", [2, 1], [("a", 0, 1)]),
        (BPE, "bpe", [], []),
        (WPE, "wpe", [6, 2, 7, 1], [("the", 0, 1), ("abs", 1, 3), ("a", 3, 4)]),
        (WPE, "wpe", [5, 6], [("c", 0, 1), ("the", 1, 2)]),
        (CHAR, "char", [1, 2, 0, 3], [("ab", 0, 2), ("c", 3, 4)]),
        (CHAR, "char", [0, 0, 1, 0, 0, 0, 2, 4, 0], [("a", 2, 3), ("b'", 6, 8)]),
    ],
)
def test_words_have_tokens_and_times(pieces, kind, ids, spans):
    assert Vocabulary(pieces, kind).words(ids) == [WordSpan(*span) for span in spans]


def test_words_join_to_the_text(vocabulary):
    draw = random.Random(1)
    for _ in range(500):
        ids = [draw.randrange(1, len(vocabulary)) for _ in range(draw.randrange(12))]
        spans = vocabulary.words(ids)
        assert " ".join(span.text for span in spans) == " ".join(vocabulary.text(ids).split())
        assert all(a.end_token <= b.first_token for a, b in itertools.pairwise(spans))


# -- text to ids -------------------------------------------------------------------------------------
def test_tokenize_equals_that_of_the_tokenizer(processor, vocabulary):
    assert vocabulary.tokenize("meet  the director ") == processor.encode("meet the director")


def test_bpe_pieces_alone_are_merged_as_sentencepiece_does(processor, vocabulary):
    bare = Vocabulary.from_pieces(vocabulary.pieces)
    assert not bare.spells_by_guess
    draw = random.Random(2)
    letters = "".join(piece for piece in vocabulary.pieces if len(piece) == 1 and piece.isalpha())
    fewest = 0
    for _ in range(500):
        text = " ".join("".join(draw.choices(letters, k=draw.randrange(1, 9))) for _ in range(3))
        assert bare.tokenize(text) == processor.encode(text)
        fewest += bare.segmentations(text, limit=2)[-1] < processor.encode(text)
    for text in ("schedule the budget", "meet the director tomorrow", "doctor okonkwo called"):
        assert bare.tokenize(text) == processor.encode(text)
    assert fewest  # the rule matters


def test_merging_is_not_the_fewest_pieces():
    # "ab" comes before "bc" and "▁a": of "abc" it is merged first
    pieces = ["ab", "▁a", "bc", "▁", "a", "b", "c"]
    vocabulary = Vocabulary.from_pieces(pieces)
    assert not vocabulary.spells_by_guess
    assert vocabulary.tokenize("abc") == [3, 0, 6]
    assert Vocabulary.from_pieces(["▁abc", *pieces]).spells_by_guess  # no merge of pieces before it
    assert not Vocabulary(tuple(pieces), "bpe", encode=lambda text: [0]).spells_by_guess


@pytest.fixture(scope="module")
def tokenizers():
    return pytest.importorskip("tokenizers", reason="the tokenizers of Hugging Face are not installed")


CORPUS = ["The quick brown fox can't jump over 12 lazy dogs!", "Où est le café? Là-bas, dit-elle.", "new york's"]
SENTENCES = [*CORPUS, "the dogs' 2 cafés", "a-b_c 3d", "naïve café fox", "Ünïcödé 漢字"]


def test_byte_level_bpe_is_that_of_gpt2_and_whisper(tokenizers):
    reference = tokenizers.ByteLevelBPETokenizer(add_prefix_space=True)
    reference.train_from_iterator(CORPUS * 3, vocab_size=340, special_tokens=["<|endoftext|>"])
    pieces = [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    vocabulary = Vocabulary.from_pieces(pieces)
    assert vocabulary.kind == "byte_bpe"
    assert not vocabulary.spells_by_guess
    for text in SENTENCES:
        ids = reference.encode(text).ids
        assert vocabulary.tokenize(text) == ids
        assert vocabulary.text(ids) == text
        assert [span.text for span in vocabulary.words(ids)] == words_of(text)
        assert vocabulary.text([pieces.index("<|endoftext|>"), *ids]) == text
    assert vocabulary.text(vocabulary.tokenize("é")[-1:]).endswith("\ufffd")  # half a character
    for ids in vocabulary.segmentations("lazy fox", limit=6):
        assert vocabulary.text(ids) == "lazy fox"


def test_word_pieces_are_the_longest_matches(tokenizers):
    reference = tokenizers.BertWordPieceTokenizer(lowercase=False, strip_accents=False)
    reference.train_from_iterator(CORPUS * 3, vocab_size=120)
    vocabulary = Vocabulary.from_pieces([reference.id_to_token(i) for i in range(reference.get_vocab_size())])
    assert vocabulary.kind == "wpe"
    for text in ("quick fox dogs", "the brown york", "jump over lazy café", "dogfox boxy"):
        assert vocabulary.tokenize(text) == reference.encode(text, add_special_tokens=False).ids


def test_pieces_of_wav2vec2_are_read():
    # the tokens of facebook/wav2vec2-base-960h after its blank, <pad>, which is column 0
    vocabulary = Vocabulary.from_pieces(["<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK'XJQZ"])
    assert vocabulary.kind == "char"
    assert vocabulary.space == 3
    ids = vocabulary.tokenize("NEW YORK")
    assert [vocabulary.pieces[i] for i in ids] == list("NEW|YORK")
    assert vocabulary.text([0, *ids, 1]) == "NEW YORK"
    assert [span.text for span in vocabulary.words(ids)] == ["NEW", "YORK"]
    with pytest.raises(ValueError, match="has the character 'é'"):
        vocabulary.tokenize("CAFé")


def test_without_a_tokenizer_the_fewest_pieces_win_and_its_segmentation_comes_first():
    assert Vocabulary(BPE, "bpe").tokenize("abc a") == [3, 6, 2]
    assert Vocabulary(WPE, "wpe").tokenize("abc the") == [2, 5, 6]  # a tie with a ##bc
    assert Vocabulary(CHAR, "char").tokenize("a b") == [1, 0, 2]
    vocabulary = Vocabulary(BPE, "bpe", encode=lambda text: [2, 5, 6])
    assert vocabulary.segmentations("abc", limit=3) == [[2, 5, 6], [3, 6], [2, 7]]


@pytest.mark.parametrize("text", ["abc", "a bc", "abab cab", "the abc"])
def test_segmentations_are_all_there_and_in_order(text):
    vocabulary = Vocabulary(BPE, "bpe")
    expected = brute_force(vocabulary, text)
    assert vocabulary.segmentations(text, limit=1000) == expected
    for limit in (1, 2, 3):
        assert vocabulary.segmentations(text, limit=limit) == expected[:limit]


def test_every_segmentation_spells_the_text(vocabulary):
    for text in ("doctor okonkwo", "schedule the budget"):
        found = vocabulary.segmentations(text, limit=20)
        assert len({tuple(ids) for ids in found}) == len(found) == 20
        assert {vocabulary.text(ids) for ids in found} == {text}
        assert found[0] == vocabulary.tokenize(text)


@pytest.mark.parametrize(
    ("pieces", "text", "spellings"),
    [
        ("▁|n|v|i|d|a", "NVIDIA", {"nvidia"}),
        ("▁|n|v|i|d|a|N|V|I|D|A", "nvidia", {"nvidia", "NVIDIA", "Nvidia"}),
        ("▁|N|V|I|D|A", "nvidia", {"NVIDIA"}),
        ("▁|e|w|y|o|r|k|N|Y", "new york", {"New York"}),
        ("▁|i|P|h|o|n|e", "iPhone", {"iPhone"}),
    ],
)
def test_ignore_case_takes_the_usual_spellings_that_pieces_cover(pieces, text, spellings):
    vocabulary = Vocabulary.from_pieces(pieces.split("|"))
    found = vocabulary.segmentations(text, ignore_case=True)
    assert {vocabulary.text(ids) for ids in found} == spellings
    assert len(found) == len(spellings)


def test_character_that_is_missing_in_lower_case_too_is_named():
    vocabulary = Vocabulary.from_pieces(["▁", "t", "e", "r", "s", "a"])
    with pytest.raises(ValueError, match=r"phrase 'TERESA' has the character 'T'.* letter case matters"):
        vocabulary.segmentations("TERESA")
    with pytest.raises(ValueError, match="phrase 'RÖS' has the character 'ö'"):
        vocabulary.segmentations("RÖS", ignore_case=True)


def test_ignore_case_and_a_tokenizer_that_says_unknown(vocabulary, processor):
    assert vocabulary.segmentations("Tempest", ignore_case=True) == [processor.encode("tempest")]
    with pytest.raises(ValueError, match="phrase 'Tempest' has the character 'T'"):
        vocabulary.segmentations("Tempest")


@pytest.mark.parametrize(
    ("pieces", "kind", "text", "character"),
    [(BPE, "bpe", "a née", "é"), (BPE, "bpe", "ax", "x"), (WPE, "wpe", "az", "z"), (CHAR, "char", "a-b", "-")],
)
def test_characters_without_a_piece_are_named(pieces, kind, text, character):
    vocabulary = Vocabulary(pieces, kind)
    if character == "é":
        character = "n"  # '▁n' and 'n' exist; the first letter without a piece is what is named
        vocabulary = Vocabulary(tuple(p for p in pieces if "n" not in p), kind)
    with pytest.raises(ValueError, match=f"phrase '{text}' has the character '{character}'"):
        vocabulary.segmentations(text, limit=2)


def test_tokenizers_of_characters_that_drop_what_they_do_not_know():
    ids = {c: i for i, c in enumerate(CHAR)}
    drops = Vocabulary(CHAR, "char", encode=lambda text: [ids[c] for c in text if c in ids])
    assert drops.tokenize("a b") == [1, 0, 2]
    with pytest.raises(ValueError, match="phrase 'Abc' has the character 'A'"):
        drops.tokenize("Abc")
    lowers = Vocabulary(CHAR, "char", encode=lambda text: [ids[c] for c in text.lower() if c in ids])
    assert lowers.tokenize("Abc") == [1, 2, 3]


@pytest.mark.parametrize(
    ("encode", "text", "limit", "message"),
    [
        (None, "", 1, "text is empty"),
        (None, "  ", 1, "text is empty"),
        (lambda text: [14], "a", 1, r"the tokenizer gave id 14 for 'a', expected 0 \.\. 13"),
        (None, "a", 0, "limit is 0"),
    ],
)
def test_text_that_cannot_be_spelled_is_named(encode, text, limit, message):
    vocabulary = Vocabulary(BPE, "bpe", encode=encode)
    with pytest.raises(ValueError, match=message):
        vocabulary.tokenize(text) if limit else vocabulary.segmentations(text, limit=limit)


def test_aggregate_tokenizers_want_a_language():
    vocabulary = Vocabulary(BPE, "bpe", encode_by_language={"en": lambda text: [2], "es": lambda text: [3]})
    assert vocabulary.tokenize("a", "es") == [3]
    assert vocabulary.segmentations("a", language="en") == [[2]]
    with pytest.raises(ValueError, match="language is 'de', expected one of en, es"):
        vocabulary.tokenize("a", "de")
    with pytest.raises(ValueError, match="aggregate"):
        vocabulary.segmentations("a", limit=2, language="en")


def test_vocabularies_of_equal_content_find_the_same_cache_entry(processor, vocabulary):
    again = Vocabulary.from_sentencepiece(processor)
    assert again == vocabulary
    assert hash(again) == hash(vocabulary)
    assert Vocabulary(BPE, "bpe") != Vocabulary(BPE, "bpe", encode=processor.encode_as_ids)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["▁r", "é", "sum"], "résumé"),
        (["▁r", "e", "\u0301", "sum"], "résumé"),  # decomposed pieces
        (["▁한", "국"], "한국"),
        (["▁", *unicodedata.normalize("NFD", "한국")], "한국"),
        (["▁ガ", "か"], "ガか"),
        (["▁カ", "\u3099", "か"], "ガか"),
        (["▁fi", "n"], "\ufb01n"),  # a ligature
        (["r", "é", "s", "u", "m", " "], "résumé"),
    ],
)
def test_all_unicode_forms_of_a_text_have_the_same_tokens(pieces, text):
    vocabulary = Vocabulary.from_pieces(pieces)
    expected = vocabulary.segmentations(text, 4)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert vocabulary.segmentations(unicodedata.normalize(form, text), 4) == expected


def test_typed_apostrophes_hyphens_and_characters_of_no_width_are_spelled_as_ascii():
    vocabulary = Vocabulary.from_pieces([*"abceo'-n \u200d"])
    for typed, plain in (("o\u2019ne", "o'ne"), ("co\u2011on", "co-on"), ("\ufeffbe\u00ada\u200bn", "bean")):
        assert vocabulary.text(vocabulary.tokenize(typed)) == plain
    assert vocabulary.text(vocabulary.tokenize("a\u200db")) == "a\u200db"  # a piece of the model
    for ids in ([-1], [0, 10]):
        with pytest.raises(ValueError, match=r"ids is .*, expected numbers 0 \.\. 9"):
            vocabulary.text(ids)
