"""The search against exact Viterbi, and its result against itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.word_graph.decoder import NO_END
from tests.graph.toy import LEXICON, PIECES
from tests.oracles.viterbi import viterbi
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import limit_tokens
from tests.search.cuda_wfst.models import fst_of, make, toy_graph

pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")


def labels(path):
    return tuple(word.label for word in path.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(6))
def test_best_path_is_viterbis(topology, seed):
    graph = toy_graph(seed % 3)
    log_probs = random_log_probs(4, 14, len(PIECES) + 1, seed=seed)
    weights = {"lm_weight": 0.7, "acoustic_scale": 1.3}
    results = make(graph, topology=topology, **weights).decode(log_probs, [14, 11, 6, 3])
    for b, nbest in enumerate(results):
        frames = log_probs[b, : nbest.num_frames].numpy()
        cost, words = viterbi(fst_of(graph), frames, len(PIECES), topology, **weights)
        if np.isinf(cost):
            assert nbest.notes == (NO_END,)
            continue
        assert not nbest.notes
        assert nbest.best.score == pytest.approx(-cost, abs=1e-4)
        assert labels(nbest.best) == words


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_narrow_beam_never_scores_better(topology):
    log_probs = random_log_probs(3, 30, len(PIECES) + 1, seed=8)
    results = [
        make(toy_graph(1), topology=topology, beam=beam).decode(log_probs, [30] * 3)
        for beam in (2.0, 4.0, 8.0, 100.0)
    ]
    # a path that has not come to a final state has not paid for the end yet
    scores = [[-np.inf if n.notes else n.best.score for n in nbests] for nbests in results]
    assert np.isfinite(scores[-1]).all()
    for narrow, wide in itertools.pairwise(scores):
        assert all(a <= b + 1e-4 for a, b in zip(narrow, wide, strict=True))


def test_max_active_narrows_the_search():
    log_probs = random_log_probs(3, 30, len(PIECES) + 1, seed=8, sharpness=0.3)
    wide = make(toy_graph(1), beam=20.0).decode(log_probs, [30] * 3)
    few = make(toy_graph(1), beam=20.0, max_active=4).decode(log_probs, [30] * 3)
    assert [n.best.score for n in few] < [n.best.score for n in wide]


def test_a_full_table_is_told_and_loses_nothing_that_max_active_keeps(monkeypatch):
    log_probs = random_log_probs(2, 20, len(PIECES) + 1, seed=8, sharpness=0.3)
    expected = make(toy_graph(1), beam=20.0, max_active=6).decode(log_probs, [20] * 2)

    limit_tokens(monkeypatch, 4 * 6)
    tight = make(toy_graph(1), beam=20.0, max_active=6).decode(log_probs, [20] * 2)
    assert all("table was full" in n.notes[0] for n in tight)
    assert [n.best.score for n in tight] == [n.best.score for n in expected]


def test_flat_log_probs_fill_a_table_with_equal_costs(monkeypatch):
    limit_tokens(monkeypatch, 4)
    flat = random_log_probs(1, 12, len(PIECES) + 1, seed=8, sharpness=0.0)
    nbest = make(toy_graph(1), beam=20.0, max_active=1, lm_weight=0.0).decode(flat, [12])[0]
    assert any("table was full" in note for note in nbest.notes)
    assert nbest.num_frames == 12


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_words_are_spelled_by_their_tokens(topology):
    graph = toy_graph(2)
    log_probs = random_log_probs(6, 40, len(PIECES) + 1, seed=3)
    for nbest in make(graph, topology=topology).decode(log_probs, [40] * 6):
        path, end = nbest.best, 0
        assert path.words
        for word in path.words:
            spelled = tuple(PIECES[t] for t in path.tokens[word.first_token : word.end_token])
            assert spelled in LEXICON[word.text]
            assert word.first_token == end
            end = word.end_token
            assert word.start_frame == path.frames[word.first_token]
            last = word.end_token - 1
            assert word.end_frame == path.frames[last] + path.repeats[last]
        assert end == len(path.tokens)
        assert path.text == " ".join(word.text for word in path.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_parts_add_up_and_the_acoustic_part_is_the_alignments(topology):
    graph = toy_graph(0)
    log_probs = random_log_probs(3, 25, len(PIECES) + 1, seed=5)
    for b, nbest in enumerate(
        make(graph, topology=topology, acoustic_scale=2.0).decode(log_probs, [25] * 3)
    ):
        path = nbest.best
        alignment = np.full(25, len(PIECES))
        for token, frame, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
            alignment[frame : frame + repeats] = token
        row = log_probs[b].numpy().astype(np.float64)
        assert path.parts.acoustic == pytest.approx(2 * row[np.arange(25), alignment].sum(), abs=1e-3)
        assert path.parts.acoustic + path.parts.lm == pytest.approx(path.score, abs=1e-9)
        for token, frame, repeats, confidence in zip(
            path.tokens, path.frames, path.repeats, path.token_confidence, strict=True
        ):
            mean = np.exp(row[frame : frame + repeats, token]).mean()
            assert confidence == pytest.approx(mean, rel=1e-4)


def test_long_streams_keep_their_precision():
    log_probs = random_log_probs(1, 6000, len(PIECES) + 1, seed=5)
    path = make(toy_graph(0), beam=30.0, acoustic_scale=50.0).decode(log_probs, [6000])[0].best
    alignment = np.full(6000, len(PIECES))
    for token, frame, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
        alignment[frame : frame + repeats] = token
    acoustic = 50 * log_probs[0].numpy().astype(np.float64)[np.arange(6000), alignment].sum()
    assert path.parts.acoustic == pytest.approx(acoustic, abs=0.05)


def test_blank_may_be_any_column():
    graph = toy_graph(0)
    log_probs = random_log_probs(2, 20, len(PIECES) + 1, seed=1)
    usual = make(graph).decode(log_probs, [20, 20])
    shifted = graph.arrays.arcs.copy()
    shifted["label"] += 1
    moved = WordGraph(graph.arrays._replace(arcs=shifted), graph.start, graph.words, None, name="moved")
    first = make(moved, blank_id=0).decode(log_probs[:, :, [5, 0, 1, 2, 3, 4]], [20, 20])
    assert [n.best.score for n in first] == [n.best.score for n in usual]
    assert [n.best.text for n in first] == [n.best.text for n in usual]
