"""The vocabulary as NeMo's various tokenizers have it, and what is loaded for it."""
# ruff: noqa: E402 (what needs NeMo is imported after the check for it)

import numpy as np
import pytest

pytestmark = pytest.mark.nemo
pytest.importorskip("nemo.collections.asr")

import torch
from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecoding
from nemo.collections.common.tokenizers.aggregate_tokenizer import AggregateTokenizer

from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary


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
