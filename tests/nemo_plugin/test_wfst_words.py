"""Words as NeMo writes them, and what phrases of words are worth."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

from types import SimpleNamespace

import numpy as np

from nemo_gpu_decoding import BoostingConfig
from nemo_gpu_decoding.fusion.boosting import Phrase
from nemo_gpu_decoding.graph.word_boosting import configured_phrases, word_boosting, words_of
from nemo_gpu_decoding.nemo_plugin.adapters import WrittenWord, written_words
from nemo_gpu_decoding.search.word_graph.result import Word

WORDS = ("<eps>", "new", "New", "york", "york's", "acme")
GRAPH = SimpleNamespace(words=WORDS, word_ids={word: label for label, word in enumerate(WORDS)})


def bonus(text, phrases, **options):
    """What an utterance of some words earns in all."""
    phrases = [p if isinstance(p, Phrase) else Phrase(p) for p in phrases]
    config = BoostingConfig(**options)
    automaton = word_boosting(phrases, config, GRAPH, missing="error", name="phrases")
    return automaton.score([GRAPH.word_ids[word] for word in text.split()], final=True)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("acme", {}, 1.0),
        ("acme", {"context_score": 3.0}, 3.0),
        ("new york", {}, 1.0 + 2.0 + np.log(2)),  # NeMo's formula, a word for a token
        ("new york", {"depth_scaling": 1.0}, 1.0 + 1.0 + np.log(2)),
        ("new york", {"uniform_weights": True}, 2.0),
        ("new york", {"score_per_phrase": 5.0}, 5.0),
        ("new acme", {"score_per_phrase": 5.0}, 5.0),  # "new" alone earns nothing
        ("new", {}, 0.0),
        ("york", {}, 0.0),
    ],
)
def test_the_bonus_of_a_phrase(text, options, expected):
    assert bonus(text, ["acme", "new york"], **options) == pytest.approx(expected, abs=1e-5)


def test_weights_of_phrases():
    phrases = [Phrase("acme", 2.5), Phrase("york", 0.0)]
    assert bonus("acme york", phrases) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="phrases has no phrase with a bonus > 0"):
        bonus("york", [Phrase("york", 0.0)])


def test_of_a_phrase_given_twice_the_larger_bonus_counts():
    assert bonus("acme", [Phrase("acme", 1.0), Phrase("acme", 3.0)]) == pytest.approx(3.0)


def test_letter_cases():
    for text in ("new york", "New york"):
        assert bonus(text, ["NEW York"], ignore_case=True, uniform_weights=True) == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"the graph has not all words of 'NEW York'; wfst\.added"):
        bonus("new york", ["NEW York"])


def test_phrases_of_a_config(tmp_path):
    file = tmp_path / "names.txt"
    file.write_text("new  york\t2\nacme\n")
    from_file = configured_phrases(BoostingConfig(key_phrases_file=str(file)))
    assert from_file == [Phrase("new york", 2.0), Phrase("acme")]
    assert words_of(from_file) == ["new", "york", "acme"]
    items = [{"phrase": "acme", "lang": "en", "weight": 3.0}]
    lists = configured_phrases(BoostingConfig(key_phrases_list=["new"], key_phrase_items_list=items))
    assert lists == [Phrase("new"), Phrase("acme", 3.0, "en")]
    with pytest.raises(ValueError, match="expected one source"):
        configured_phrases(BoostingConfig(key_phrases_file=str(file), key_phrases_list=["new"]))


def words_at(*texts):
    """Words of two frames and one token each."""
    return [Word(text, 1, 3 * n, 3 * n + 2, n, n + 1) for n, text in enumerate(texts)]


def test_punctuation_is_written_after_its_word():
    words = words_at("so", ",", "yes", "!", "?")
    assert written_words(words, {",", "!", "?"}) == [
        WrittenWord("so,", 0, 2, 0, 2),
        WrittenWord("yes!?", 6, 8, 2, 5),
    ]


def test_without_punctuation_in_the_vocabulary_words_stay_words():
    assert [word.text for word in written_words(words_at("so", ","), ())] == ["so", ","]
    assert [word.text for word in written_words(words_at("-", "so"), {"-"})] == ["-", "so"]
