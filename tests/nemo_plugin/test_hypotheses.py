"""Results in NeMo's form; the vocabulary as NeMo's tokenizers have it, and what is loaded for it."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecoding
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer

from nemo_gpu_decoding.nemo_plugin.hypotheses import NBestList, TimedNBestList, from_labels, from_path
from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary
from nemo_gpu_decoding.search.result import Path, ScoreParts

BLANK = 5


def a_path(tokens=(1, 2), frames=(0, 3), repeats=(2, 1)):
    return Path(
        tokens=np.array(tokens, np.int32),
        frames=np.array(frames, np.int32),
        repeats=np.array(repeats, np.int32),
        token_confidence=np.ones(len(tokens), np.float32),
        score=-1.5,
        parts=ScoreParts(-2.0, insertion=0.5),
    )


def test_a_path_becomes_a_hypothesis():
    hypothesis = from_path(a_path(), num_frames=7)
    assert hypothesis.y_sequence.tolist() == [1, 2]
    assert str(hypothesis.y_sequence.dtype) == "torch.int64"
    assert hypothesis.timestamp == [0, 3]
    assert hypothesis.length == 7
    assert hypothesis.score == -1.5
    assert hypothesis.score_parts.insertion == 0.5
    assert hypothesis.text is None


def test_confidence_of_the_frames_that_emit_tokens():
    hypothesis = from_path(a_path(), num_frames=5)
    assert hypothesis.non_blank_frame_confidence == []
    hypothesis.frame_confidence = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert hypothesis.non_blank_frame_confidence == [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("labels", "tokens", "frames", "repeats"),
    [
        ([5, 1, 1, 5, 1, 2, 2, 5], [1, 1, 2], [1, 4, 5], [2, 1, 2]),
        ([0, 0, 0], [0], [0], [3]),
        ([5, 5], [], [], []),
        ([], [], [], []),
        ([3], [3], [0], [1]),
    ],
)
def test_labels_collapse(labels, tokens, frames, repeats):
    hypothesis = from_labels(np.array(labels, np.int64), BLANK)
    assert hypothesis.y_sequence.tolist() == tokens
    assert hypothesis.timestamp == hypothesis.token_frames == frames
    assert hypothesis.token_repeats == repeats
    assert hypothesis.length == len(labels)


def hypothesis(text, score=0.0, **fields):
    return Hypothesis(score=score, y_sequence=[], text=text, **fields)


def test_an_n_best_list_reads_like_its_best():
    hypotheses = [hypothesis("a", score=2.0), hypothesis("b", score=1.0)]
    n_best = NBestList(hypotheses)
    assert (n_best.text, n_best.score) == ("a", 2.0)
    assert n_best == hypotheses
    assert (n_best.y_sequence, n_best.alignments) == (None, None)
    assert not isinstance(n_best, Hypothesis)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda n_best: pickle.loads(pickle.dumps(n_best))])
def test_n_best_lists_survive_copies(duplicate):
    n_best = TimedNBestList([hypothesis("a", timestamp={"word": [{"end": 1}]})])
    n_best.y_sequence = "log-probs"
    other = duplicate(n_best)
    assert type(other) is TimedNBestList
    assert (other.text, other.y_sequence, other.timestamp) == ("a", "log-probs", {"word": [{"end": 1}]})


def test_a_timed_n_best_list_shows_the_entries_of_all_its_hypotheses():
    first, second = {"word": "a"}, {"word": "b"}
    n_best = TimedNBestList(
        hypothesis(entry["word"], timestamp={"timestep": [1], "word": [entry]})
        for entry in (first, second)
    )
    assert isinstance(n_best, Hypothesis)
    for entry in n_best.timestamp["word"]:  # as NeMo does to add seconds
        entry["start"] = 0.08
    assert first["start"] == second["start"] == 0.08
    assert "timestep" not in n_best.timestamp


# --------------------------------------------------------------------------------------- vocabulary


def test_characters():
    vocabulary = nemo_vocabulary("char", ["a", "b", " "], None)
    assert vocabulary.tokenize("ab a") == [0, 1, 2, 0]
    assert vocabulary.text([1, 2, 0]) == "b a"


def test_sentencepiece_ids_are_those_of_the_models_tokenizer(ctc_model):
    tokenizer = ctc_model.tokenizer
    vocabulary = nemo_vocabulary("subword", [], tokenizer)
    assert len(vocabulary) == 128
    assert vocabulary.kind == "bpe"
    ids = tokenizer.text_to_ids("the budget of teresa")
    assert vocabulary.tokenize("the budget of teresa") == ids
    assert vocabulary.text(ids) == tokenizer.ids_to_text(ids)
    assert vocabulary == nemo_vocabulary("subword", [], tokenizer)  # and so found in caches


@pytest.fixture
def aggregate(ctc_model):
    return AggregateTokenizer({"en": ctc_model.tokenizer, "es": ctc_model.tokenizer})


def test_aggregates_take_the_language_of_a_phrase(ctc_model, aggregate):
    vocabulary = nemo_vocabulary("subword", [], aggregate)
    assert len(vocabulary) == 256
    ids = ctc_model.tokenizer.text_to_ids("page")
    assert vocabulary.tokenize("page", language="en") == ids
    assert vocabulary.tokenize("page", language="es") == [128 + i for i in ids]
    assert vocabulary == nemo_vocabulary("subword", [], aggregate)


def test_phrases_of_a_language_are_boosted_in_its_tokens(ctc_model, aggregate):
    items = [{"phrase": "t", "lang": "es"}]
    beam = {"boosting_tree": {"key_phrase_items_list": items}, "boosting_tree_alpha": 9.0}
    decoding = CTCBPEDecoding({"strategy": "flexctc_beam", "beam": beam}, aggregate)
    ids = [language_start + ctc_model.tokenizer.text_to_ids("t")[0] for language_start in (0, 128)]
    log_probs = torch.full((1, 1, 257), -20.0)
    log_probs[0, 0, ids] = torch.tensor(np.log([0.6, 0.4]), dtype=torch.float32)
    (hypothesis,) = decoding.decoding(decoder_output=log_probs, decoder_lengths=torch.tensor([1]))[0]
    assert hypothesis.y_sequence.tolist() == ids[1:]


class WordPieces:
    """What NeMo's tokenizers of WordPiece models offer."""

    pieces = ("[UNK]", "pa", "##ge", "two")
    tokenizer = type("", (), {"vocab_size": 4})

    def ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]

    def text_to_ids(self, text):
        return {"page": [1, 2], "page two": [1, 2, 3]}[text]


def test_word_pieces():
    vocabulary = nemo_vocabulary("subword", [], WordPieces())
    assert vocabulary.kind == "wpe"
    assert vocabulary.tokenize("page two") == [1, 2, 3]
    assert vocabulary.text([1, 2, 3]) == "page two"
