"""Words of texts and of tokens in scripts without spaces, error rates by characters, phrases and subtitles there."""

import pytest

from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.live.subtitles import subtitles
from nemo_gpu_decoding.metrics import phrase_score, rate_name, right_words, word_errors
from nemo_gpu_decoding.transcript import Transcript, Word
from nemo_gpu_decoding.vocabulary import Vocabulary
from nemo_gpu_decoding.words import joined, words_of

# text -> its words
TEXTS = {
    "Latin": ("hello  wörld, 3.5", "hello wörld, 3.5"),
    "Korean": ("안녕 하세요", "안녕 하세요"),
    "Japanese": ("東京、に行く。", "東 京、 に 行 く。"),
    "Latin and numbers": ("3月のGPU2は1,000円", "3 月 の GPU2 は 1,000 円"),
    "brackets": ("「東京」NeMo（日本）", "「東 京」 NeMo （日 本）"),
    "long vowels": ("ラーメン", "ラ ー メ ン"),
    "half width": ("ﾊﾞﾅﾅ", "ﾊﾞ ﾅ ﾅ"),
    "decomposed": ("か\u3099き", "か\u3099 き"),
    "beyond 16 bits": ("𠮷野", "𠮷 野"),
    "Thai": ("เบื่อ น้ำ๑๒", "เบื่ อ น้ำ ๑๒"),
    "Lao": ("ນ້ຳ", "ນ້ຳ"),
    "Khmer": ("ភាសាខ្មែរ", "ភា សា ខ្មែ រ"),
    "Burmese": ("မြန်မာ", "မြ န် မာ"),
}


@pytest.mark.parametrize(("text", "words"), TEXTS.values(), ids=list(TEXTS))
def test_words_of_a_text(text, words):
    assert words_of(text) == words.split(" ")
    assert "".join(words_of(text)) == text.replace(" ", "")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["one", "two"], "one two"),
        (["één", "", "twee"], "één twee"),
        (["東京", "に", "go"], "東京にgo"),
        (["go", "東京"], "go東京"),
        (["안녕", "하세요"], "안녕 하세요"),
        ([], ""),
    ],
)
def test_words_are_joined_as_their_script_does(words, text):
    assert joined(words) == text


BYTES = ["<0xE3>", "<0x81>", "<0x82>"]  # あ
# kind -> pieces of a text, and its words with their tokens
TOKENS = {
    "characters": ("char", [*"東京、ab あ"], [("東", 0, 1), ("京、", 1, 3), ("ab", 3, 5), ("あ", 6, 7)]),
    "pieces": ("bpe", ["▁東京", "です", "。", "▁he", "llo", "は"], [
        ("東京", 0, 1), ("です。", 1, 3), ("hello", 3, 5), ("は", 5, 6)
    ]),
    "a mark before": ("bpe", ["▁", "東", "▁", "京"], [("東", 0, 2), ("京", 2, 4)]),
    "bytes": ("bpe", ["▁東", *BYTES, *BYTES, "N"], [("東", 0, 1), ("あ", 1, 4), ("あ", 4, 7), ("N", 7, 8)]),
    "bytes cut short": ("bpe", ["▁東", *BYTES[:2]], [("東\ufffd", 0, 3)]),
    "marks": ("char", ["น", "้", "ำ", "ก"], [("น้ำ", 0, 3), ("ก", 3, 4)]),
    "Latin": ("bpe", ["▁he", "llo", "<0xC3>", "<0xA9>", "▁wo"], [("helloé", 0, 4), ("wo", 4, 5)]),
    "word pieces": ("wpe", ["東", "##京", "no", "##w"], [("東", 0, 1), ("京", 1, 2), ("now", 2, 4)]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "pieces", "words"), TOKENS.values(), ids=list(TOKENS))
def test_words_of_tokens(kind, pieces, words):
    vocabulary = Vocabulary(tuple(dict.fromkeys(pieces)), kind)
    ids = [vocabulary.pieces.index(piece) for piece in pieces]
    assert [tuple(word) for word in vocabulary.words(ids)] == words
    assert "".join(word for word, *_ in words).replace(" ", "") == vocabulary.text(ids).replace(" ", "")
    assert vocabulary.has_unspaced(ids) == (words[0][0] != "helloé")


def test_a_word_ends_before_its_punctuation():
    vocabulary = Vocabulary(("東", "。", "」"), "char")
    (word,) = vocabulary.words([0, 1, 2])
    assert vocabulary.last_spoken([0, 1, 2], word) == 0


@pytest.mark.parametrize(
    ("reference", "text", "counts", "name"),
    [
        ("the cat", "the dog sat", (2, 1, 0, 1), "WER"),
        ("東京に行く", "東京へ行", (5, 1, 1, 0), "CER"),
        ("GPUを使う", "CPUを使う", (6, 1, 0, 0), "CER"),
        ("안녕 하세요", "안녕", (2, 0, 1, 0), "WER"),
        ("สวัสดี", "สวัสดี", (6, 0, 0, 0), "CER"),
    ],
)
def test_scripts_without_spaces_are_scored_by_characters(reference, text, counts, name):
    assert tuple(vars(word_errors([reference], [text])).values()) == counts
    assert rate_name([reference]) == name


def test_error_rates_of_several_scripts_have_both_names():
    assert rate_name(["東京", "the cat"]) == "WER/CER"
    assert rate_name([]) == "WER"


def test_phrases_are_counted_within_a_text_without_spaces():
    score = phrase_score(["私は東京都に行く", "東京"], ["私は東京都に行く", "京都"], ["東京都", "京都"])
    assert (score.true_positives, score.false_positives, score.false_negatives) == (2, 1, 0)


def test_a_piece_is_right_if_all_its_characters_are():
    assert right_words("東京です", ["東", "京", "でし"]) == [True, True, False]
    assert right_words("the cat", ["the", "dog"]) == [True, False]


@pytest.mark.parametrize(
    ("phrases", "texts", "written"),
    [
        ({"けいおう": "慶應"}, list("けいおう大"), [(0, 4, "慶應"), (4, 5, "大")]),
        ({"おう": "慶應"}, list("けいおう"), [(0, 1, "け"), (1, 2, "い"), (2, 3, "慶"), (3, 4, "應")]),
        ({"phi four": "Phi-4"}, ["の", "phi", "four", "は"], [(0, 1, "の"), (1, 3, "Phi-4"), (3, 4, "は")]),
    ],
)
def test_aliases_replace_characters(phrases, texts, written):
    assert [tuple(word) for word in Aliases(phrases).words(texts)] == written


def test_subtitles_keep_the_spaces_of_the_text():
    text = "สวัสดีครับ NeMoผม the cat 東京"
    words, at = [], 0.0
    for word in words_of(text):
        words.append(Word(word, at, at + 0.1))
        at += 0.1
    lines = subtitles([Transcript(text, words=tuple(words))], "txt", 0.3).splitlines()
    assert " ".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(line in text for line in lines)
    assert max(map(len, lines)) <= 20
