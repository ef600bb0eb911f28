"""Words that the LM does not list: spelled by their pieces, and never an empty result."""

from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from tests.graph.toy import BLANK, PIECES
from tests.oracles.viterbi import viterbi
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import fst_of, make, toy_graph

pytest.importorskip("kaldifst")
OPEN = OpenVocabulary(word_cost=0.5, piece_cost=0.5)
RARE = OpenVocabulary(word_cost=5.0, piece_cost=2.0)


def sharp(pieces):
    """Log-probs that all but dictate the pieces, a blank after each."""
    log_probs = torch.full((1, 2 * len(pieces), len(PIECES) + 1), -12.0)
    for n, piece in enumerate(pieces):
        log_probs[0, 2 * n, PIECES.index(piece)] = 0.0
        log_probs[0, 2 * n + 1, BLANK] = 0.0
    return log_probs


def test_unknown_words_are_spelled():
    pieces = ["▁a", "b", "▁a", "d", "c", "▁b"]  # ab, adc, b: the second is no word
    graph = toy_graph(0, open_vocabulary=RARE)
    path = make(graph, pieces=PIECES).decode(sharp(pieces), [2 * len(pieces)])[0].best
    assert path.text in ("ab adc b", "AB adc b")
    unknown = path.words[1]
    assert unknown.label == graph.unknown
    assert (unknown.first_token, unknown.end_token) == (2, 5)
    assert (unknown.start_frame, unknown.end_frame) == (4, 9)


def test_several_unknown_words_are_told_apart():
    pieces = ["▁a", "d", "▁a", "d", "c", "▁b", "d"]  # no words; bd begins cab's second spelling
    graph = toy_graph(0, open_vocabulary=OPEN)
    path = make(graph, pieces=PIECES).decode(sharp(pieces), [2 * len(pieces)])[0].best
    assert path.text == "ad adc bd"


def test_without_pieces_unknown_words_are_the_lms_symbol():
    path = make(toy_graph(0, open_vocabulary=OPEN)).decode(sharp(["▁a", "d"]), [4])[0].best
    assert path.text == "<unk>"


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
def test_open_graphs_are_searched_exactly(topology):
    graph = toy_graph(1, open_vocabulary=OPEN)
    log_probs = random_log_probs(3, 12, len(PIECES) + 1, seed=5)
    for b, nbest in enumerate(make(graph, topology=topology).decode(log_probs, [12] * 3)):
        cost, words = viterbi(fst_of(graph), log_probs[b].numpy(), BLANK, topology)
        assert nbest.best.score == pytest.approx(-cost, abs=1e-4)
        assert tuple(word.label for word in nbest.best.words) == words
