"""The same words and costs as kaldi_decoder, Kaldi's decoders as a Python package."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.graph.build import load_fst_graph
from tests.graph.ready_made import write_tlg
from tests.graph.toy import BLANK, PIECES
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import WIDE, fst_of, make, toy_graph

kaldifst = pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")
FRAMES = 25


def faster(tlg, frames, beam=WIDE):
    kaldi = pytest.importorskip("kaldi_decoder")
    options = kaldi.FasterDecoderOptions(beam=beam, max_active=50000, min_active=0)
    decoder = kaldi.FasterDecoder(tlg, options)
    decoder.decode(kaldi.DecodableCtc(frames))
    found, path = decoder.get_best_path()
    assert found
    return words_and_cost(path)


def lattice_simple(tlg, frames, beam=WIDE):
    kaldi = pytest.importorskip("kaldi_decoder")
    decoder = kaldi.LatticeSimpleDecoder(
        tlg, kaldi.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=8.0)
    )
    decoder.decode(kaldi.DecodableCtc(frames))
    found, path = decoder.get_best_path(use_final_probs=True)
    assert found
    return words_and_cost(path)


def words_and_cost(path):
    _, _, words, weight = kaldifst.get_linear_symbol_sequence(path)
    return list(words), weight.value1 + weight.value2


@pytest.mark.parametrize("decode", [faster, lattice_simple])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_words_and_costs_are_kaldis(tmp_path, decode, topology, seed):
    graph = toy_graph(seed)
    tlg = write_tlg(fst_of(graph), topology, BLANK, len(PIECES), tmp_path / "tlg.fst")
    log_probs = random_log_probs(3, FRAMES, len(PIECES) + 1, seed=seed)
    for b, nbest in enumerate(make(graph, topology=topology).decode(log_probs, [FRAMES] * 3)):
        words, cost = decode(tlg, np.ascontiguousarray(log_probs[b].numpy()))
        assert [word.label for word in nbest.best.words] == words
        assert nbest.best.score == pytest.approx(-cost, abs=1e-3)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_ready_made_graph_gives_what_the_native_topology_gives(tmp_path, topology):
    graph, path = toy_graph(1), tmp_path / "tlg.fst"
    write_tlg(fst_of(graph), topology, BLANK, len(PIECES), path)
    log_probs = random_log_probs(4, FRAMES, len(PIECES) + 1, seed=7)
    lengths = [FRAMES, 12, 5, 20]
    native = make(graph, topology=topology).decode(log_probs, lengths)
    loaded = make(load_fst_graph(path, graph.words), topology="graph").decode(log_probs, lengths)
    for ours, theirs in zip(native, loaded, strict=True):
        assert theirs.best.score == pytest.approx(ours.best.score, abs=1e-4)
        assert theirs.best.text == ours.best.text
        assert theirs.notes == ours.notes
        if topology == "normal":  # elsewhere a token may last or come again at equal cost
            assert theirs.best.tokens.tolist() == ours.best.tokens.tolist()
            assert theirs.best.frames.tolist() == ours.best.frames.tolist()
            assert theirs.best.repeats.tolist() == ours.best.repeats.tolist()


def test_a_const_fst_loads_as_a_vector_fst_does(tmp_path):
    graph = toy_graph(1)
    tlg = write_tlg(fst_of(graph), "compact", BLANK, len(PIECES), tmp_path / "vector.fst")
    kaldifst.StdConstFst(tlg).write(str(tmp_path / "const.fst"))
    kinds = [load_fst_graph(tmp_path / f"{kind}.fst", graph.words) for kind in ("vector", "const")]
    assert kinds[0].fingerprint == kinds[1].fingerprint


@pytest.mark.parametrize("beam", [4.0, 8.0])
def test_a_narrow_beam_scores_no_worse_than_kaldis(tmp_path, beam):
    graph = toy_graph(0)
    tlg = write_tlg(fst_of(graph), "compact", BLANK, len(PIECES), tmp_path / "tlg.fst")
    log_probs = random_log_probs(3, FRAMES, len(PIECES) + 1, seed=4)
    for b, nbest in enumerate(make(graph, beam=beam).decode(log_probs, [FRAMES] * 3)):
        _, cost = faster(tlg, np.ascontiguousarray(log_probs[b].numpy()), beam)
        assert nbest.best.score >= -cost - 1e-3
