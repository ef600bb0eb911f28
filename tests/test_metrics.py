"""Error rates and phrase scores, on cases that can be counted by hand."""

import pytest

from nemo_gpu_decoding.metrics import PhraseScore, WordErrors, phrase_score, word_errors
from nemo_gpu_decoding.plain_text import format_table


def test_counts_of_hand_made_alignments():
    errors = word_errors(["a b c d", "x y"], ["a q c", "x y z"])
    assert errors == WordErrors(words=6, substitutions=1, deletions=1, insertions=1)
    assert errors.total == 3
    assert errors.wer == 0.5
    assert word_errors(["Paris"], ["paris"]).substitutions == 1


@pytest.mark.parametrize(("hypothesis", "wer"), [("", 0.0), ("noise", float("inf"))])
def test_wer_without_reference_words_is_0_or_infinite(hypothesis, wer):
    assert word_errors([""], [hypothesis]).wer == wer


def test_lists_must_have_the_same_length():
    with pytest.raises(ValueError, match=r"hypotheses has 1 texts, expected 2"):
        word_errors(["a", "b"], ["a"])
    with pytest.raises(ValueError, match=r"hypotheses has 1 texts, expected 2"):
        phrase_score(["a", "b"], ["a"], ["a"])


def test_phrases_match_whole_words_ignore_case_and_count_once():
    score = phrase_score(["New York is not newark"], ["new york is not New Yorkshire"], ["new york"])
    assert score == PhraseScore(true_positives=1, false_positives=0, false_negatives=0)
    assert phrase_score(["a b"], ["a b"], ["a b", "A  B"]).true_positives == 1


def test_phrases_are_counted_per_utterance_and_as_often_as_they_occur():
    references = ["gdansk gdansk", "", "quasar"]
    score = phrase_score(references, ["gdansk", "gdansk", "quasar quasar"], ["gdansk", "Quasar", "never said"])
    assert score == PhraseScore(true_positives=2, false_positives=2, false_negatives=1)
    assert score.precision == 0.5
    assert score.recall == pytest.approx(2 / 3)
    assert score.fscore == pytest.approx(4 / 7)


def test_phrase_scores_without_phrases_are_defined():
    assert phrase_score(["x"], ["x"], ["gdansk"]).fscore == 1.0
    missed = phrase_score(["gdansk"], ["x"], ["gdansk"])
    assert (missed.precision, missed.recall, missed.fscore) == (1.0, 0.0, 0.0)
    spurious = phrase_score(["x"], ["gdansk"], ["gdansk"])
    assert (spurious.precision, spurious.recall, spurious.fscore) == (0.0, 1.0, 0.0)


# ---------------------------------------------------------------------------------------- tables
def test_tables_align_numbers_and_text():
    assert format_table(["decoder", "WER"], [["greedy", 14.4], ["beam", ""], ["beam", "7.0"]]) == (
        "decoder   WER\n-------  ----\ngreedy   14.4\nbeam\nbeam      7.0"
    )
    assert format_table(["a", "bc"], []) == "a  bc\n-  --"
