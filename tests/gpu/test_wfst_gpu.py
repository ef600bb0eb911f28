"""cuda_wfst on a GPU finds what it finds on the CPU: words, times, scores and notes, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import kernel_abi
from tests.contract.facts import all_facts
from tests.gpu.rehearsal import REHEARSAL, sized
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import assert_equal, assert_equal_lattices, on_cpu, on_cuda
from tests.search.cuda_wfst.models import random_graph

COLUMNS, T = sized(200, 12), sized(80, 8)
BATCH = sized(150, 3)
TOPOLOGIES = ("compact", "normal", "minimal", "graph")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    if REHEARSAL:
        for name, size in {"THREADS": 32, "CANDIDATES": 128, "LEAST_GROUPS": 64}.items():
            monkeypatch.setattr(kernel_abi, name, size)


def graph_of(seed, topology="compact", coarse=False):
    blank = COLUMNS - 1 if topology == "graph" else None
    return random_graph(seed, columns=COLUMNS, blank=blank, states=sized(3000, 30), coarse=coarse)


def log_probs_on(device, batch=BATCH, *, seed, sharpness=2.0, dtype=torch.float32):
    return random_log_probs(batch, T, COLUMNS, seed=seed, sharpness=sharpness).to(device, dtype)


def lengths_for(batch=BATCH):
    lengths = np.random.default_rng(0).integers(0, T + 1, batch)
    lengths[0], lengths[-1] = T, 0
    return lengths.tolist()


def options_of(topology):
    return {"vocab_size": COLUMNS - 1, "blank_id": COLUMNS - 1, "topology": topology, "threads": 0}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_topologies_and_types(device, topology, dtype):
    for seed, max_active in enumerate(sized((10_000, 700, 50), (50,))):
        assert_equal(
            graph_of(seed, topology), log_probs_on(device, seed=seed, dtype=dtype), lengths_for(),
            beam=10.0, max_active=max_active, **options_of(topology),
        )  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ties_are_broken_alike(device, topology):
    log_probs = torch.round(log_probs_on(device, seed=3))
    assert_equal(
        graph_of(3, topology, coarse=True), log_probs, lengths_for(), beam=5.0, max_active=300,
        **options_of(topology),
    )  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_requests_of_single_utterances(device, topology):
    graph = graph_of(1, topology)
    trees = [
        build_word_boosting(phrases, graph)
        for phrases in ({"w1": 2.0, "w2 w3": 3.0}, {"w4 w1 w2": 4.0}, {"w3": 0.5})
    ]
    wishes = [Request(boosting=tree, lm_weight=0.5 * i) for i, tree in enumerate(trees)] + [None]
    requests = [wishes[b % 4] for b in range(BATCH)]
    assert_equal(
        graph, log_probs_on(device, seed=4), lengths_for(), requests, beam=8.0, max_active=300,
        boosting=trees[0], **options_of(topology),
    )  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_lattices(device, topology):
    """Link for link, with ties."""
    for coarse in (False, True):
        log_probs = log_probs_on(device, sized(20, 2), seed=6)
        assert_equal_lattices(
            graph_of(6, topology, coarse), torch.round(log_probs) if coarse else log_probs,
            lengths_for(len(log_probs)), beam=6.0, lattice_beam=5.0, n_best=10, max_active=300,
            **options_of(topology),
        )  # fmt: skip


def test_streams(device):
    """Chunks of random sizes; partial results on the way are equal too."""
    rng, log_probs, totals = np.random.default_rng(0), log_probs_on(device, seed=2), lengths_for()
    decoders = [
        build(graph_of(2), beam=9.0, max_active=400, **options_of("compact"))
        for build in (on_cpu, on_cuda)
    ]
    streams = [decoder.open(BATCH) for decoder in decoders]
    done = np.zeros(BATCH, int)
    while (done < totals).any():
        sizes = np.minimum(rng.integers(0, sized(25, 5), BATCH), np.array(totals) - done)
        chunk = torch.full((BATCH, max(1, sizes.max()), COLUMNS), float("nan"), device=device)
        for b, size in enumerate(sizes):
            chunk[b, :size] = log_probs[b, done[b] : done[b] + size]
        early = []
        for decoder, own in zip(decoders, streams, strict=True):
            decoder.push(own, chunk, sizes.tolist())
            early.append(all_facts(decoder.partial(own)))
        assert early[0] == early[1]
        done += sizes
    last = [all_facts(d.close(own)) for d, own in zip(decoders, streams, strict=True)]
    assert last[0] == last[1]


def test_bad_frames_are_named_and_leave_streams_alone(device):
    log_probs, decoder = log_probs_on(device, seed=5), on_cuda(graph_of(5), **options_of("compact"))
    bad = log_probs.clone()
    bad[1, 2, 3] = float("inf")
    streams = decoder.open(BATCH)
    with pytest.raises(ValueError, match=r"log_probs\[1, 2, 3\] is inf"):
        decoder.push(streams, bad, [T] * BATCH)
    decoder.push(streams, log_probs, [T] * BATCH)
    assert all_facts(decoder.close(streams)) == all_facts(decoder.decode(log_probs, [T] * BATCH))
