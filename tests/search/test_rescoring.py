"""Rescoring of n-best lists, and log-probabilities of texts by a causal LM."""

from dataclasses import astuple

import pytest
import torch

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.search.rescoring import CausalLM, Rescoring, load_scorer, rescored
from tests.oracles.ngram import sentence_cost
from tests.search.word_graph.models import random_lm

WORDS = ["a", "b", "c"]


def text_of(path):
    return " ".join(WORDS[token] for token in path.tokens)


@pytest.fixture(scope="module")
def nbests():
    log_probs = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    decoder = FlexCTCBeam(3, 3, FlexCTCConfig(n_best=6, beam_beta=0.1))
    return decoder.decode(log_probs, torch.tensor([8, 5, 0]))


def counting_scorer(texts):
    """Likes every "b"; texts come once each."""
    assert len(set(texts)) == len(texts)
    return [2.0 * text.count("b") - len(text) / 10 for text in texts]


def test_a_folder_without_a_model_is_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=rf"rescore={tmp_path} is no file here, and transformers cannot load it: .+"):
        load_scorer(str(tmp_path))


def test_rescored_order_is_that_of_the_sums(nbests):
    found = rescored(nbests, counting_scorer, text_of, weight=0.7, word_bonus=-0.2)
    for before, after in zip(nbests, found, strict=True):
        expected = {
            text_of(path): path.score + 0.7 * counting_scorer([text_of(path)])[0] - 0.2 * len(text_of(path).split())
            for path in before
        }
        assert [text_of(path) for path in after] == sorted(expected, key=lambda t: -expected[t])
        for path in after:
            assert path.score == pytest.approx(expected[text_of(path)])
            assert sum(astuple(path.parts)) == pytest.approx(path.score, abs=1e-4)
    assert [text_of(nbest.best) for nbest in found] != [text_of(nbest.best) for nbest in nbests]
    again = rescored(found, counting_scorer, text_of, weight=0.0)  # replaces the second pass
    assert [text_of(nbest.best) for nbest in again] == [text_of(nbest.best) for nbest in nbests]


def test_the_first_lm_can_be_replaced(nbests):
    parts = rescored(nbests, counting_scorer, text_of, weight=1.0, lm_share=0.0)[0].best.parts
    assert parts.lm == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1.0}, "weight is -1.0, expected a finite number >= 0"),
        ({"weight": 1.0, "lm_share": float("nan")}, "lm_share is nan"),
        ({"weight": 1.0, "scorer": lambda texts: [0.0]}, "scorer gave 1 scores, expected one for each"),
        ({"weight": 1.0, "scorer": lambda texts: [float("nan")] * len(texts)}, "scorer is nan for the text"),
    ],
)
def test_bad_arguments_of_rescoring_are_named(nbests, options, message):
    with pytest.raises(ValueError, match=message):
        rescored(nbests, options.pop("scorer", counting_scorer), text_of, **options)


def test_changes_of_scores_are_those_of_rescored_lists(nbests):
    second = Rescoring(counting_scorer, 0.7, 0.5)
    for nbest, after in zip(nbests, rescored(nbests, counting_scorer, text_of, weight=0.7, lm_share=0.5), strict=True):
        changes = second.changes([text_of(path) for path in nbest], [path.parts.lm for path in nbest])
        scores = {text_of(path): path.score + change for path, change in zip(nbest, changes, strict=True)}
        assert {text_of(path): path.score for path in after} == pytest.approx(scores)


def test_an_ngram_lm_gives_the_log_probabilities_of_texts(tmp_path):
    lm = random_lm(3)
    texts = ["a ab", "", "cab", "a ab"]
    expected = [-sentence_cost(lm.table, text.split()) for text in texts]
    assert load_scorer(str(lm.path))(texts) == pytest.approx(expected, abs=1e-4)
    pack_arpa(lm.path, tmp_path / "lm.packed")
    assert load_scorer(str(tmp_path / "lm.packed"))(texts) == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def causal_lm(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny_gpt2")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["the cat sat on the mat"] * 3, 300, special_tokens=["<|endoftext|>"])
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval(), tokenizer


def test_a_causal_lm_gives_the_log_probabilities_of_texts(causal_lm):
    model, tokenizer = causal_lm
    texts = ["the cat", "", "the mat sat on the cat", "a", "on the mat"]
    scores = CausalLM(model, tokenizer, batch_size=2)(texts)
    for text, score in zip(texts, scores, strict=True):
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text), tokenizer.eos_token_id]
        with torch.inference_mode():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(log_probs[n, token]) for n, token in enumerate(ids[1:]))
        assert score == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="tokenizer is None, expected the tokenizer of the model"):
        CausalLM(causal_lm[0])


def test_a_causal_lm_from_a_folder_rescores(causal_lm, tmp_path, nbests):
    model, tokenizer = causal_lm
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = rescored(nbests, CausalLM(str(tmp_path)), text_of, weight=0.5)
    given = rescored(nbests, CausalLM(model, tokenizer), text_of, weight=0.5)
    assert [text_of(path) for nbest in loaded for path in nbest] == [
        text_of(path) for nbest in given for path in nbest
    ]
