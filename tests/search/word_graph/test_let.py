"""Composition "let": its lattices are those of "lazy"; results and failures leave its streams as they were."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import TOPOLOGIES
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph.large_lm import let_engine
from tests.random_models import random_log_probs
from tests.search.word_graph.models import VOCAB, make_paged, nested_pair, random_lm

pytest.importorskip("kaldifst")
FRAMES = 14
STEPS = ["source", "target", "arc", "epsilon", "ilabel", "move", "frame"]


def pairs():
    return random_lm(1), random_lm(20, keep=0.8)


def both(lms, **options):
    """Decoders with either composition that keep a lattice. Within a narrow beam "let" keeps a little more."""
    options = {"lattice": True, "n_best": 4, "beam": 30.0, "lm_weight": 0.9, **options}
    return [make_paged(*lms, composition=name, **options) for name in ("lazy", "let")]


def assert_same_lattices(found, expected):
    """Link by link: nodes and links are numbered by the paths that lead to them."""
    for ours, theirs in zip(found, expected, strict=True):
        links, others = ours.lattice.links, theirs.lattice.links
        assert links[STEPS].tolist() == others[STEPS].tolist()
        ends = ["node", "epsilon", "state"]
        assert ours.lattice.ends[ends].tolist() == theirs.lattice.ends[ends].tolist()
        assert ours.lattice.reaches_end == theirs.lattice.reaches_end
        for name in ("cost", "acoustic_cost"):
            np.testing.assert_allclose(links[name], others[name], atol=1e-4)
        np.testing.assert_allclose(ours.lattice.ends["cost"], theirs.lattice.ends["cost"], atol=1e-4)
        assert [path.text for path in ours] == [path.text for path in theirs]
        assert [path.score for path in ours] == pytest.approx([path.score for path in theirs], abs=2e-4)


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "graph"])
@pytest.mark.parametrize("lattice_beam", [1.0, 3.0, 8.0])
def test_lattices_are_those_of_lazy_composition(topology, lattice_beam):
    links = 0
    for lms in (pairs(), nested_pair(1)):
        lazy, let = both(lms, topology=topology, lattice_beam=lattice_beam)
        boosting = build_word_boosting({"cab": 2.0, "a bb": 1.0}, lms[0].graph)
        for seed, request in enumerate((None, Request(boosting=boosting, boosting_weight=1.0), None)):
            given = random_log_probs(2, FRAMES, VOCAB + 1, seed=seed, sharpness=1.5), [FRAMES, 9], [request] * 2
            expected = lazy.decode(*given)
            assert_same_lattices(let.decode(*given), expected)
            links += sum(nbest.lattice.num_links for nbest in expected)
    assert links > 100


@pytest.mark.parametrize("group_size", [0, 2, 16])
def test_the_best_path_of_a_lattice_is_that_of_the_search(group_size):
    """Within a narrow beam, too, and with few contexts of a group."""
    log_probs, lms = random_log_probs(16, 40, VOCAB + 1, seed=6, sharpness=1.5), pairs()
    for beam in (4.0, 9.0):
        options = {"beam": beam, "composition": "let", "group_size": group_size}
        alone = make_paged(*lms, **options).decode(log_probs, [40] * 16)
        found = make_paged(*lms, n_best=3, lattice_beam=4.0, **options).decode(log_probs, [40] * 16)
        assert [nbest.best.text for nbest in found] == [nbest.best.text for nbest in alone]
        assert [nbest.best.score for nbest in found] == pytest.approx([nbest.best.score for nbest in alone], abs=1e-3)


def test_an_utterance_that_breaks_off_within_a_word_has_the_lattice_of_all_tokens():
    lazy, let = both(pairs(), lattice_beam=4.0)
    log_probs = random_log_probs(4, 9, VOCAB + 1, seed=3, sharpness=1.5)
    for frame, column in ((7, 1), (8, 2)):  # the beginning of "bb"
        log_probs[:, frame, torch.arange(VOCAB + 1) != column] = -1e4
    expected = lazy.decode(log_probs, [9] * 4)
    assert not any(nbest.lattice.reaches_end for nbest in expected)
    assert_same_lattices(let.decode(log_probs, [9] * 4), expected)


@pytest.mark.parametrize("first_nodes", [2, let_engine.LET_NODES])
def test_lattices_of_streams_are_those_of_whole_utterances(monkeypatch, first_nodes):
    monkeypatch.setattr(let_engine, "LET_NODES", first_nodes)
    frames = 60
    lazy, let = both(pairs(), lattice_beam=2.0)
    log_probs = random_log_probs(1, frames, VOCAB + 1, seed=2, sharpness=2.0)
    streams, same, listed = let.open(1), lazy.open(1), 0
    for begin in range(0, frames, 7):
        size = min(7, frames - begin)
        for decoder, opened in ((let, streams), (lazy, same)):
            decoder.push(opened, log_probs[:, begin : begin + size], [size])
        (ours,), (theirs,) = let.partial(streams, n_best=3), lazy.partial(same, n_best=3)
        assert [path.text for path in ours] == [path.text for path in theirs]
        assert [path.score for path in ours] == pytest.approx([path.score for path in theirs], abs=2e-4)
        assert ours.relative_cost == pytest.approx(theirs.relative_cost, abs=2e-4)
        assert ours.committed == theirs.committed
        (stream,) = streams.engine._streams
        listed = max(listed, len(stream.lattice.links))
    expected = lazy.decode(log_probs, [frames])
    assert_same_lattices(let.close(streams), expected)
    assert_same_lattices(let.decode(log_probs, [frames]), expected)
    assert listed > 3


def test_let_workspaces_are_kept_between_calls(monkeypatch):
    made, new_workspace = [], let_engine.new_let_workspace

    def counted(*sizes, **options):
        made.append(sizes)
        return new_workspace(*sizes, **options)

    monkeypatch.setattr(let_engine, "new_let_workspace", counted)
    decoder = make_paged(*pairs(), beam=9.0, composition="let", max_active=1000)
    log_probs = random_log_probs(1, 40, VOCAB + 1, seed=4)
    streams = decoder.open(1)
    for begin in range(0, 40, 10):
        decoder.push(streams, log_probs[:, begin : begin + 10], [10])
        decoder.partial(streams)
    decoder.close(streams)
    assert len(made) == 1


def new_work():
    return let_engine.new_let_workspace(1000, VOCAB + 1)


def test_let_silence_allocates_no_nodes():
    """An hour of it, frames of 40 ms; other labels are far off, or within the beam now and then."""
    decoder, frames = make_paged(*pairs(), beam=9.0, composition="let"), 1500
    for likely in (-1e4, -7.0):
        streams, live = decoder.open(1), []
        silence = np.full((1, frames, VOCAB + 1), -1e4, np.float32)
        silence[:, ::100] = likely
        silence[:, :, VOCAB] = 0
        for _ in range(60):
            decoder.push(streams, torch.from_numpy(silence), [frames])
            (stream,) = streams.engine._streams
            kept = let_engine.collected(replace(stream, tokens=stream.tokens.copy()), new_work())
            live.append(int(kept.arrays.counters["nodes"][0]))
            assert max(len(array) for array in stream.arrays[1:]) == let_engine.LET_NODES
        assert max(live) == live[0] <= 4 * len(stream.tokens)
