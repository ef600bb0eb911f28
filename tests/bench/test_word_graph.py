"""Rows of word graphs: the graph as other decoders read it, equality with Kaldi, and what is skipped."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.kaldi_decoder import KaldiDecoder, WordHypothesis
from nemo_gpu_decoding.bench.run import run
from nemo_gpu_decoding.bench.verify import Errors
from nemo_gpu_decoding.bench.word_graph.cases import make_word_graph_cases
from nemo_gpu_decoding.bench.word_graph.graphs import (
    as_transducer,
    decoding_graph,
    topology_fst,
    word_graph,
)
from nemo_gpu_decoding.bench.word_graph.settings import graph_setting
from nemo_gpu_decoding.bench.word_graph.sources import word_graph_task
from nemo_gpu_decoding.bench.word_graph.strategies import WordGraphSearch
from nemo_gpu_decoding.bench.word_graph.verify import equal_to_kaldi
from nemo_gpu_decoding.graph.csr import WordGraph
from tests.graph.ready_made import topology_fst as kaldifst_topology
from tests.graph.toy import PIECES
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import make, toy_graph

kaldifst = pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")
VOCAB, FRAMES = len(PIECES), 25


@pytest.fixture
def options(tiny_options):
    return replace(
        tiny_options,
        strategy="cuda_wfst",
        peers=["kaldi_decoder"],
        graph_beams=[12],
        graph_sentences=300,
    )


@pytest.fixture
def task(options):
    return word_graph_task(options)


@pytest.fixture
def decoders(task, options):
    """Kaldi's and ours, with the same settings."""
    pytest.importorskip("kaldi_decoder")
    both = KaldiDecoder(options), WordGraphSearch(options)
    for decoder in both:
        decoder.prepare(task, graph_setting(options, 12))
    return both


# --------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("seed", range(3))
def test_chains_of_epsilons_come_back_as_single_arcs(seed):
    graph = toy_graph(seed)
    transducer = as_transducer(graph)
    assert (transducer.arcs["input"] == 0).sum() < len(graph.arrays.epsilons)
    again = WordGraph.from_fst(transducer, graph.words)
    for ours, theirs in zip(graph.arrays, again.arrays, strict=True):
        assert ours.shape == theirs.shape
        for name in ours.dtype.names or ():
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_topologies_are_those_that_nemo_makes(name):
    ours, theirs = topology_fst(name, VOCAB), kaldifst_topology(name, VOCAB, VOCAB)
    arcs = {
        (state, arc.ilabel, arc.olabel, arc.nextstate)
        for state in range(theirs.num_states)
        for arc in kaldifst.ArcIterator(theirs, state)
    }
    columns = (ours.sources(), ours.arcs["input"], ours.arcs["output"], ours.arcs["target"])
    assert set(zip(*(column.tolist() for column in columns), strict=True)) == arcs
    assert [theirs.final(s).value for s in range(theirs.num_states)] == ours.final_costs.tolist()


def test_a_ready_made_topology_has_no_transducer():
    with pytest.raises(ValueError, match="topology is 'graph', expected compact, normal or minimal"):
        topology_fst("graph", VOCAB)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kaldi_finds_our_words_in_it(topology):
    kaldi = pytest.importorskip("kaldi_decoder")
    graph = toy_graph(1)
    log_probs = random_log_probs(3, FRAMES, VOCAB + 1, seed=3)
    ours = make(graph, topology=topology).decode(log_probs, [FRAMES] * 3)
    options = kaldi.FasterDecoderOptions(beam=1e4, min_active=0)
    for frames, nbest in zip(log_probs.numpy(), ours, strict=True):
        decoder = kaldi.FasterDecoder(decoding_graph(graph, topology, VOCAB), options)
        decoder.decode(kaldi.DecodableCtc(np.ascontiguousarray(frames)))
        _, path = decoder.get_best_path()
        _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
        assert [word.label for word in nbest.best.words] == list(words)
        assert nbest.best.score == pytest.approx(-weight.value1 - weight.value2, abs=1e-3)


def test_the_graph_is_made_of_more_text_than_a_token_lm_needs(options, task):
    assert task.lm is None
    assert task.word_lm is not None
    assert "-300-word3" in task.word_lm.name
    fewer = word_graph_task(replace(options, graph_sentences=100))
    assert fewer.word_lm.stat().st_size < task.word_lm.stat().st_size


def test_without_a_lexicon_the_tokenizer_spells(task):
    with_lexicon, without = word_graph(task), word_graph(replace(task, lexicon={}))
    assert without.fingerprint == with_lexicon.fingerprint


# ---------------------------------------------------------------------------------------- the rows


def test_rows_are_verified_beside_kaldi(options, tmp_path, capsys):
    pytest.importorskip("kaldi_decoder")
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    (row,) = run(replace(options, out=str(out), plot=str(plot), probes=True))
    assert json.loads(out.read_text())["rows"] == [row]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert row["verified"], row["verified_by"]
    assert row["verified_by"].startswith("equal words and costs: 2 of 2")
    assert row["params"] == row["peer_params"]
    assert row["params"]["beam_size"] == 12
    assert row["params"]["max_active"] == 10_000
    assert row["wer"]["ours"] == row["wer"]["peer"]
    assert row["graph"]["ngrams"] > 1000
    assert row["graph"]["words"] == 4 * options.vocab_size
    assert row["target"] == 2.0
    printed = capsys.readouterr().out
    assert f'graph: {{"ngrams": {row["graph"]["ngrams"]},' in printed
    assert "beam" in printed


def test_kaldi_not_installed_gives_the_reason(options, monkeypatch):
    monkeypatch.setattr(KaldiDecoder, "needs", ("a_module_that_nobody_has",))
    (row,) = run(options)
    assert "a_module_that_nobody_has not installed: pip install" in row["skipped"]
    assert row["ratio"] is None


def test_no_word_lm_gives_the_reason(options, task):
    from nemo_gpu_decoding.bench.run import measure_case

    pytest.importorskip("kaldi_decoder")
    (case,) = make_word_graph_cases(options)
    row = measure_case(case, replace(task, word_lm=None), options)
    assert row["skipped"] == "no word_lm= given"


def test_peers_that_do_not_fit_are_named(options, capsys):
    assert run(replace(options, peers=["nemo"])) == []
    assert "no row for nemo with strategy=cuda_wfst" in capsys.readouterr().err


def test_default_rows_cover_the_beams_of_the_promise():
    cases = list(make_word_graph_cases(BenchOptions(strategy="cuda_wfst")))
    assert [case.ours.beam_size for case in cases] == [10, 13, 17, 25]
    assert all(case.ours == case.theirs for case in cases)


# ------------------------------------------------------------------------------------ the verdicts


def test_both_decode_most_words(decoders, task):
    for decoder in decoders:
        assert Errors.of(task, decoder.decode(task.inputs, task.lengths)).wer < 50


@pytest.mark.parametrize(
    ("change", "verified", "seen"),
    [
        (lambda h: h, True, "costs: 2 of 2"),
        (lambda h: h._replace(cost=h.cost + 1), True, "costs: 0, 2 better of 2"),
        (lambda h: h._replace(words=[*h.words, 1]), True, "costs: 0, 2 tied of 2"),
        (lambda h: h._replace(cost=h.cost - 1), False, "costs: 0 of 2"),
        (lambda h: WordHypothesis([], float("inf")), True, "costs: 0, 2 better of 2"),
    ],
    ids=["equal", "better", "tied", "worse", "nothing found"],
)
def test_verdicts(decoders, task, monkeypatch, change, verified, seen):
    theirs, ours = decoders
    found = theirs.hypotheses(task.inputs, task.lengths)
    monkeypatch.setattr(theirs, "hypotheses", lambda *_: [change(hypothesis) for hypothesis in found])
    verdict, how = equal_to_kaldi(task, theirs, ours)
    assert verdict is verified
    assert seen in how


def test_kaldi_hears_another_batch(decoders, task):
    """Scaled log-probs are kept for the batch that they belong to."""
    theirs, _ = decoders
    whole = theirs.decode(task.inputs, task.lengths)
    swapped = theirs.decode(task.inputs.flip(0).contiguous(), task.lengths.flip(0))
    assert swapped == whole[::-1]
    assert theirs.decode(task.inputs, task.lengths) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph_beams": []}, "graph_beams is"),
        ({"max_active": 0}, "max_active is 0"),
        ({"acoustic_scale": 0.0}, "acoustic_scale is 0.0, expected a number > 0"),
        ({"topology": "graph"}, "topology is 'graph', expected compact, normal, minimal"),
        ({"graph_sentences": 0}, "graph_sentences is 0"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        BenchOptions(strategy="cuda_wfst", **changes)
