"""Rescoring of n-best lists."""

from dataclasses import astuple

import pytest
import torch

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.search.rescoring import Rescoring, load_scorer, rescored
from tests.oracles.ngram import sentence_cost
from tests.search.word_graph.models import random_lm

WORDS = ["a", "b", "c"]


def text_of(path):
    return " ".join(WORDS[token] for token in path.tokens)


@pytest.fixture(scope="module")
def nbests():
    log_probs = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    return FlexCTCBeam(3, 3, FlexCTCConfig(n_best=6, beam_beta=0.1)).decode(log_probs, torch.tensor([8, 5, 0]))


def counting_scorer(texts):
    assert len(set(texts)) == len(texts)
    return [2.0 * text.count("b") - len(text) / 10 for text in texts]


def test_load_scorer_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=rf"rescore={tmp_path} is no file here, expected a word n-gram LM"):
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
    assert rescored(nbests, counting_scorer, text_of, weight=1.0, lm_share=0.0)[0].best.parts.lm == 0.0


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
