"""Lattices, n-best lists and confidence against an exhaustive search of all texts, and Kaldi's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.graph.build import load_fst_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.word_graph.lattice.lattice import lattice_of
from nemo_gpu_decoding.search.word_graph.result import matches
from tests.graph.test_store import fst
from tests.graph.toy import BLANK, PIECES, write_tlg
from tests.oracles.viterbi import all_texts
from tests.random_models import random_log_probs
from tests.search.word_graph.both import assert_same_lattice
from tests.search.word_graph.models import WIDE, fst_of, make, random_graph, toy_graph

pytestmark = pytest.mark.slow

kaldifst = pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")


def labels(path):
    return tuple(word.label for word in path.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(3))
def test_n_best_equals_that_of_all_paths(topology, seed):
    graph, frames = toy_graph(seed), 6
    log_probs = random_log_probs(2, frames, len(PIECES) + 1, seed=seed)
    decoder = make(graph, topology=topology, n_best=25, lattice_beam=WIDE, lm_weight=0.8)
    for b, nbest in enumerate(decoder.decode(log_probs, [frames] * 2)):
        texts = all_texts(fst_of(graph), log_probs[b].numpy(), BLANK, topology, lm_weight=0.8)
        expected = sorted(texts.values())[:25]
        assert [-path.score for path in nbest] == pytest.approx(expected, abs=1e-4)
        for path in nbest:
            assert -path.score == pytest.approx(texts[labels(path)], abs=1e-4)
        assert len({labels(path) for path in nbest}) == len(nbest) == len(expected)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lattice_holds_just_the_texts_within_its_beam(topology):
    graph, frames, beam = toy_graph(2), 6, 3.0
    log_probs = random_log_probs(1, frames, len(PIECES) + 1, seed=4)
    nbest = make(graph, topology=topology, n_best=500, lattice_beam=beam).decode(log_probs, [frames])[0]
    texts = all_texts(fst_of(graph), log_probs[0].numpy(), BLANK, topology)
    least = min(texts.values())
    inside = {text for text, cost in texts.items() if cost <= least + beam}
    found = {labels(path): -path.score for path in nbest}
    assert inside <= set(found)
    assert all(cost == pytest.approx(texts[text], abs=1e-4) for text, cost in found.items() if text in inside)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_first_of_n_is_the_best_path(topology):
    log_probs = random_log_probs(5, 30, len(PIECES) + 1, seed=2)
    lengths = [30, 0, 1, 12, 22]
    plain = make(toy_graph(0), topology=topology, beam=12.0).decode(log_probs, lengths)
    many = make(toy_graph(0), topology=topology, beam=12.0, n_best=5, lattice=True).decode(log_probs, lengths)
    for one, nbest in zip(plain, many, strict=True):
        assert [word._replace(posterior=None) for word in nbest.best.words] == list(one.best.words)
        assert nbest.best.score == pytest.approx(one.best.score, abs=1e-4)
        assert nbest.best.tokens.tolist() == one.best.tokens.tolist()
        assert nbest.best.frames.tolist() == one.best.frames.tolist()
        assert nbest.best.repeats.tolist() == one.best.repeats.tolist()
        assert nbest.best.token_confidence == pytest.approx(one.best.token_confidence, rel=1e-4)
        assert nbest.notes == one.notes
        for path in nbest:
            parts = path.parts
            assert parts.acoustic + parts.lm + parts.boosting == pytest.approx(path.score, abs=1e-6)
            assert parts.acoustic <= 1e-3


def test_texts_with_word_sequences_are_different():
    # two ways from 1 to 3: over the words one two, or over three; both on epsilons
    arcs = [(0, 1, 0, 0.0, 1), (1, 0, 1, 0.2, 2), (2, 0, 2, 0.3, 3), (1, 0, 3, 0.9, 3), (3, 2, 0, 0.0, 4)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), ("<eps>", "one", "two", "three"))
    log_probs = random_log_probs(1, 4, 3, seed=0)
    nbest = make(graph, vocab_size=2, blank_id=2, n_best=4, lattice=True).decode(log_probs, [4])[0]
    assert [path.text for path in nbest] == ["one two", "three"]
    assert nbest[0].score - nbest[1].score == pytest.approx(0.4, abs=1e-4)
    assert best_of_kaldi(nbest.lattice)[0] == [1, 2]


# ------------------------------------------------------------------------------------- exports
def best_of_kaldi(lattice):
    rows = lattice.arcs()
    fst, final = kaldifst.Lattice(), int(rows["target"].max())
    for _ in range(final + 1):
        fst.add_state()
    fst.start = 0
    fst.set_final(final, kaldifst.LatticeWeight(0.0, 0.0))
    for source, target, label, word, graph_cost, acoustic_cost in rows.tolist():
        weight = kaldifst.LatticeWeight(graph_cost, acoustic_cost)
        fst.add_arc(source, kaldifst.LatticeArc(label, word, weight, target))
    _, _, words, weight = kaldifst.get_linear_symbol_sequence(kaldifst.shortest_path(fst))
    return list(words), weight.value1, weight.value2


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kaldifst_finds_the_best_path_in_the_lattice(topology):
    log_probs = random_log_probs(3, 20, len(PIECES) + 1, seed=6)
    for nbest in make(toy_graph(1), topology=topology, lattice=True, beam=15.0).decode(log_probs, [20, 11, 4]):
        words, graph_cost, acoustic_cost = best_of_kaldi(nbest.lattice)
        assert words == list(labels(nbest.best))
        assert graph_cost + acoustic_cost == pytest.approx(-nbest.best.score, abs=1e-3)
        assert acoustic_cost == pytest.approx(-nbest.best.parts.acoustic, abs=1e-3)


def test_kaldi_text_reads_as_written():
    lattice = make(toy_graph(1), lattice=True).decode(random_log_probs(1, 8, len(PIECES) + 1, seed=6), [8])[0].lattice
    lines = lattice.to_kaldi_text("utt1").split("\n")
    assert lines[0] == "utt1"
    assert lines[-2:] == ["", ""]
    rows = [line.split() for line in lines[1:-3]]
    assert len(rows) == len(lattice.arcs())
    for row, (source, target, label, word, graph_cost, acoustic_cost) in zip(rows, lattice.arcs(), strict=True):
        assert [int(field) for field in row[:4]] == [source, target, label, word]
        assert list(map(float, row[4].split(","))) == pytest.approx([graph_cost, acoustic_cost], rel=1e-4, abs=1e-6)
    assert int(lines[-3]) == max(int(row[1]) for row in rows)


def test_n_best_of_a_lattice_checks_the_number():
    lattice = make(toy_graph(1), lattice=True).decode(random_log_probs(1, 5, len(PIECES) + 1, seed=6), [5])[0].lattice
    with pytest.raises(ValueError, match="n is 0"):
        lattice.n_best(0)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_search_does_not_matter(seed):
    """Tokens of each frame in another order, links in another one: the same lattice, ties included."""
    rng, frames = np.random.default_rng(seed), 8
    decoder = make(random_graph(seed, columns=12, coarse=True), vocab_size=11, blank_id=11, beam=5.0, lattice=True)
    streams = decoder.open(1)
    decoder.push(streams, torch.round(random_log_probs(1, frames, 12, seed=seed)), [frames])
    (known,) = streams.engine.results([0], 1, final=True)
    links = known.links[: int(known.counters["links"][0])].copy()
    tokens, place = known.tokens, np.zeros(1, np.int32)  # new place of each token of a frame
    for frame in range(frames):
        own = links[links["frame"] == frame]
        own["source"] = place[own["source"]]
        place = rng.permutation(int(own["target"].max()) + 1).astype(np.int32)
        own["target"] = place[own["target"]]
        links[links["frame"] == frame] = own
    shuffled = np.empty_like(tokens)
    shuffled[place] = tokens
    other = replace(known, tokens=shuffled, links=rng.permutation(links))
    lattices = [lattice_of(each, True) for each in (known, other)]
    assert_same_lattice(*lattices)
    first, second = (lattice.n_best(20) for lattice in lattices)
    assert str(first) == str(second)


# --------------------------------------------------------------------------- confidence and MBR
def test_words_that_all_paths_share_are_certain():
    log_probs = random_log_probs(1, 12, len(PIECES) + 1, seed=3)
    nbest = make(toy_graph(0), n_best=30).decode(log_probs, [12])[0]
    shares = np.exp([path.score - nbest.best.score for path in nbest])
    shares /= shares.sum()
    for path in nbest:
        for n, word in enumerate(path.words):
            same = [matches(labels(path), labels(other))[n] for other in nbest]
            assert word.posterior == pytest.approx(float(shares @ np.array(same)), abs=1e-9)
    alone = make(toy_graph(0), n_best=2, lattice_beam=1e-3).decode(log_probs, [12])[0]
    assert all(word.posterior == 1.0 for word in alone.best.words)


# -------------------- The same words and costs as kaldi_decoder, Kaldi's decoders as a Python package
FRAMES = 25


def faster(tlg, frames, beam=WIDE):
    kaldi = pytest.importorskip("kaldi_decoder")
    decoder = kaldi.FasterDecoder(tlg, kaldi.FasterDecoderOptions(beam=beam, max_active=50000, min_active=0))
    decoder.decode(kaldi.DecodableCtc(frames))
    found, path = decoder.get_best_path()
    assert found
    return words_and_cost(path)


def lattice_simple(tlg, frames, beam=WIDE):
    kaldi = pytest.importorskip("kaldi_decoder")
    decoder = kaldi.LatticeSimpleDecoder(tlg, kaldi.LatticeSimpleDecoderConfig(beam=beam, lattice_beam=8.0))
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
def test_words_and_costs_equal_those_of_kaldi(tmp_path, decode, topology, seed):
    graph = toy_graph(seed)
    tlg = write_tlg(fst_of(graph), topology, BLANK, len(PIECES), tmp_path / "tlg.fst")
    log_probs = random_log_probs(3, FRAMES, len(PIECES) + 1, seed=seed)
    for b, nbest in enumerate(make(graph, topology=topology).decode(log_probs, [FRAMES] * 3)):
        words, cost = decode(tlg, np.ascontiguousarray(log_probs[b].numpy()))
        assert [word.label for word in nbest.best.words] == words
        assert nbest.best.score == pytest.approx(-cost, abs=1e-3)


@pytest.mark.parametrize(("topology", "n_best"), [*((topology, 1) for topology in TOPOLOGIES), ("normal", 8)])
def test_a_ready_made_graph_gives_what_the_native_topology_gives(tmp_path, topology, n_best):
    graph, path = toy_graph(1), tmp_path / "tlg.fst"
    write_tlg(fst_of(graph), topology, BLANK, len(PIECES), path)
    log_probs = random_log_probs(4, FRAMES, len(PIECES) + 1, seed=7)
    lengths = [FRAMES, 12, 5, 20]
    native = make(graph, topology=topology, n_best=n_best).decode(log_probs, lengths)
    loaded = make(load_fst_graph(path, graph.words), topology="graph", n_best=n_best).decode(log_probs, lengths)
    for ours, theirs in zip(native, loaded, strict=True):
        assert [path.text for path in theirs] == [path.text for path in ours]
        assert [path.score for path in theirs] == pytest.approx([path.score for path in ours], abs=1e-4)
        assert theirs.notes == ours.notes
        if topology == "normal":  # elsewhere a token may last or come again at equal cost
            for name in ("tokens", "frames", "repeats"):
                assert getattr(theirs.best, name).tolist() == getattr(ours.best, name).tolist()


def test_a_const_fst_loads_as_a_vector_fst_does(tmp_path):
    graph = toy_graph(1)
    tlg = write_tlg(fst_of(graph), "compact", BLANK, len(PIECES), tmp_path / "vector.fst")
    kaldifst.StdConstFst(tlg).write(str(tmp_path / "const.fst"))
    kinds = [load_fst_graph(tmp_path / f"{kind}.fst", graph.words) for kind in ("vector", "const")]
    assert kinds[0].fingerprint == kinds[1].fingerprint
