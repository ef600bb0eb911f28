"""The kernels in CUDA graphs, played by the host: a loop and chunks find what plain launches find."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.transducer import cuda_graphs, cuda_workspace, records
from nemo_gpu_decoding.search.transducer.cuda_graphs import CHUNKS, LOOP, PLAIN
from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks, StatelessNetworks
from nemo_gpu_decoding.search.transducer.records import ACTIVE, FULL, IDLE
from tests.contract.facts import facts
from tests.cuda_emulator.graphs import captured_chunk, captured_while
from tests.random_models import random_boosting
from tests.search.transducer.both import random_fusion
from tests.search.transducer.test_kernels import STRATEGIES

pytestmark = pytest.mark.usefixtures("emulated_runtime", "small_blocks")

V, WIDTH = 12, 8
CPU = torch.device("cpu")


def lstm_networks(durations):
    output = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, V + 1 + len(durations)))
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)
    linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return LSTMNetworks(nn.Embedding(V + 1, WIDTH), lstm, *linear, output, durations=durations)


def stateless_networks(durations):
    embeddings = [nn.Embedding(V + 1, WIDTH // 2) for _ in range(2)]
    output = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, V + 1 + len(durations)))
    linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return StatelessNetworks(embeddings, nn.LayerNorm(WIDTH), *linear, output, durations=durations)


NETWORKS = {"lstm": lstm_networks, "stateless": stateless_networks}


def make_networks(kind="lstm", durations=(0, 1, 2)):
    torch.manual_seed(1)
    networks = NETWORKS[kind](durations)
    with torch.no_grad():
        networks.output[1].weight.mul_(6.0)
        networks.output[1].bias[V] += 1.5
    return networks


@pytest.fixture
def played_graphs(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "capture_while", captured_while)
    monkeypatch.setattr(cuda_graphs, "capture_chunk", captured_chunk)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def decoder_in(mode, strategy, networks, **options):
    """A decoder that launches its steps in this way."""
    make, config = STRATEGIES[strategy]
    decoder = make(networks, config(beam_size=4, n_best=4, backend="cuda", **options), random_fusion(V))
    decoder._graphs.mode = mode
    return decoder


def graphs_of(decoder):
    return [graph for work in decoder._workspaces._idle for graph in work.graphs.values()]


def frames_of(batch, frames, seed):
    return torch.randn(batch, frames, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", list(NETWORKS))
@pytest.mark.parametrize("mode", [LOOP, CHUNKS])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_graphs_find_what_plain_launches_find(played_graphs, strategy, mode, kind):
    networks = make_networks(kind)
    decoder, plain = (decoder_in(m, strategy, networks) for m in (mode, PLAIN))
    for batch, frames in ((2, 9), (2, 5), (2, 14), (1, 6), (2, 9)):
        encoded, lengths = frames_of(batch, frames, seed=frames), [frames, frames // 2][:batch]
        requests = [Request(boosting=random_boosting(V, seed=frames)), None][:batch]
        found, expected = (each.decode(encoded, lengths, requests) for each in (decoder, plain))
        assert [facts(nbest) for nbest in found] == [facts(nbest) for nbest in expected]
        assert any(len(path.tokens) for nbest in found for path in nbest)
    assert decoder._graphs.mode == mode
    assert sum(graph.replays for graph in graphs_of(decoder)) >= 2


@pytest.mark.parametrize("mode", [LOOP, CHUNKS])
def test_graphs_stop_where_the_host_is_needed(played_graphs, monkeypatch, mode):
    """Buffers of nodes that are full in the middle of a run; and streams, whose frames run out."""
    monkeypatch.setattr(cuda_workspace, "NODE_CAPACITY", 1)
    networks, frames = make_networks(), frames_of(2, 10, seed=4)
    decoder, plain = (decoder_in(m, "alsd_pp", networks, alignments=True) for m in (mode, PLAIN))
    streams = decoder.open(2)
    for begin in range(0, 10, 5):
        decoder.push(streams, frames[:, begin : begin + 5], [5, 3])
    found = decoder.close(streams)
    kept = torch.cat([frames[:1], frames[:1]])
    kept[1, :6] = frames[1, [0, 1, 2, 5, 6, 7]]
    assert [facts(nbest) for nbest in found] == [facts(n) for n in plain.decode(kept, [10, 6])]


def test_a_loop_makes_as_many_rounds_as_there_are_steps(played_graphs):
    networks, frames = make_networks(durations=()), frames_of(2, 8, seed=3)
    decoder = decoder_in(LOOP, "alsd_pp", networks, max_symbols=1)
    decoder.decode(frames, [8, 3])
    (graph,) = graphs_of(decoder)
    assert graph.replays == 2  # while frames come, and when they have ended
    steps = 1 + graph.rounds  # the first comes before capturing
    assert 8 <= steps <= 2 * 8  # a frame takes its blank, and a token before at most


def test_changed_weights_reach_the_graphs(played_graphs):
    networks, frames = make_networks(), frames_of(2, 6, seed=2)
    decoder, plain = (decoder_in(m, "aes_pp", networks) for m in (LOOP, PLAIN))
    results = []
    for _ in range(2):
        found, expected = (each.decode(frames, [6, 6]) for each in (decoder, plain))
        assert [facts(nbest) for nbest in found] == [facts(nbest) for nbest in expected]
        results.append([facts(nbest) for nbest in found])
        with torch.no_grad():
            networks.embedding.weight.neg_()
    assert results[0] != results[1]


def test_a_body_that_asks_the_host_is_not_captured(played_graphs, caplog):
    class Asking(StatelessNetworks):
        def predict(self, labels, state):
            assert (labels >= 0).all()
            return super().predict(labels, state)

    networks = make_networks("stateless")
    networks.__class__ = Asking
    decoder = decoder_in(LOOP, "alsd_pp", networks)
    with caplog.at_level(logging.WARNING, logger="nemo_gpu_decoding"):
        found = decoder.decode(frames_of(1, 5, seed=1), [5])
    expected = decoder_in(PLAIN, "alsd_pp", networks).decode(frames_of(1, 5, seed=1), [5])
    assert [facts(nbest) for nbest in found] == [facts(nbest) for nbest in expected]
    assert decoder._graphs.mode == PLAIN
    assert "gives the host a value" in caplog.text


# ---------------------------------------------------------------------- the condition itself


@pytest.mark.parametrize(
    ("activities", "condition"),
    [
        ([ACTIVE], 1),
        ([IDLE], 0),
        ([FULL, IDLE], 0),  # the host has to fetch nodes first
        ([IDLE, FULL, ACTIVE], 1),
        ([IDLE] * 299 + [ACTIVE], 1),  # more utterances than threads
        ([ACTIVE] + [IDLE] * 299, 1),
        ([IDLE] * 300, 0),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{len(value)} utterances",
)
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
def test_the_condition_is_whether_anyone_goes_on(emulated_runtime, activities, condition):
    counters = np.zeros(len(activities), records.STREAM_COUNTERS)
    counters["activity"] = activities
    arguments = {"counters": as_records(counters), "num_utterances": len(counters)}
    kernel = runtime().load("search/transducer/loop_condition.cu", CPU)
    kernel.launch(records.LOOP_CONDITION, grid=1, block=64, handle=np.uint64(5), **arguments)
    assert emulated_runtime.conditions == {5: condition}
    active = torch.zeros(1, dtype=torch.int32)
    kernel = runtime().load(cuda_workspace.SCHEDULE, CPU)
    kernel.launch(records.COUNT_ACTIVE, grid=1, block=64, active=active, **arguments)
    assert int(active) == activities.count(ACTIVE)
