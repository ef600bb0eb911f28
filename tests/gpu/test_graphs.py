"""A caller captures `push` in a CUDA graph of his own, and gets with replays what he gets without."""

from __future__ import annotations

import pytest
import torch

from tests.contract.facts import facts
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cpu, on_cuda, random_fusion

V, T, CHUNK, BATCH = 200, 96, 8, 12
LENGTHS = [96, 0, 1, 8, 9, 95, 50, 40, 30, 20, 10, 64]


class Captured:
    """Streams with room for T frames, the inputs of a push of CHUNK frames, and its graph."""

    def __init__(self, decoder, device, dtype=torch.float32):
        self.chunk = torch.zeros(BATCH, CHUNK, V + 1, dtype=dtype, device=device)
        self.lengths = torch.zeros(BATCH, dtype=torch.int64, device=device)
        decoder.push(decoder.open(BATCH), self.chunk, self.lengths)  # kernels are compiled and loaded
        self.streams = decoder.open(BATCH, capacity=T, device=device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            decoder.push(self.streams, self.chunk, self.lengths)

    def replay(self, log_probs, begin):
        """Without a wait: the inputs of the next replay are copied behind this one."""
        self.chunk.copy_(log_probs[:, begin : begin + CHUNK])
        lengths = (torch.tensor(LENGTHS) - begin).clamp(0, CHUNK)
        self.lengths.copy_(lengths)
        self.graph.replay()


@pytest.fixture
def log_probs(gpu):
    return random_log_probs(BATCH, T, V + 1, seed=1).to(gpu)


def decoder_of(merge="max", make=on_cuda):
    return make(V, V, random_fusion(V), beam_size=16, n_best=4, merge=merge)


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replays_decode_chunk_by_chunk(gpu, log_probs, merge, dtype):
    log_probs = log_probs.to(dtype)
    decoder = decoder_of(merge)
    captured = Captured(decoder, gpu, dtype)
    for begin in range(0, T, CHUNK):
        captured.replay(log_probs, begin)
    expected = decoder_of(merge, on_cpu).decode(log_probs, LENGTHS)
    assert [facts(n) for n in decoder.close(captured.streams)] == [facts(n) for n in expected]


def test_a_graph_may_hold_more_than_the_decoder(gpu):
    """From logits to hypotheses in one graph, as a streaming server would have it."""
    logits = 3 * torch.randn(BATCH, T, V + 1, generator=torch.Generator().manual_seed(0)).to(gpu)
    decoder = decoder_of()
    static = torch.zeros(BATCH, T, V + 1, device=gpu)
    lengths = torch.tensor(LENGTHS, device=gpu)
    warm = decoder.open(BATCH)
    decoder.push(warm, torch.log_softmax(static, -1), lengths)
    streams = decoder.open(BATCH, capacity=T, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.push(streams, torch.log_softmax(static, -1), lengths)
    static.copy_(logits)
    graph.replay()
    expected = decoder.decode(torch.log_softmax(logits, -1), LENGTHS)
    assert [facts(n) for n in decoder.close(streams)] == [facts(n) for n in expected]


def test_pushes_with_and_without_the_graph_may_alternate(gpu, log_probs):
    decoder = decoder_of()
    captured = Captured(decoder, gpu)
    captured.replay(log_probs, 0)
    rest = [max(0, length - CHUNK) for length in LENGTHS]
    decoder.push(captured.streams, log_probs[:, CHUNK:], rest)
    expected = decoder.decode(log_probs, LENGTHS)
    assert [facts(n) for n in decoder.close(captured.streams)] == [facts(n) for n in expected]


def test_what_goes_wrong_in_a_replay_is_said_at_the_end(gpu, log_probs):
    log_probs[3, 2, 7] = float("nan")
    decoder = decoder_of()
    captured = Captured(decoder, gpu)
    for begin in range(0, T, CHUNK):
        captured.replay(log_probs, begin)
    with pytest.raises(ValueError, match=r"log_probs of stream 3 held NaN or \+inf in frame 2"):
        decoder.close(captured.streams)


def test_a_capture_that_is_refused_does_no_harm(gpu, log_probs):
    decoder = decoder_of()
    expected = [facts(n) for n in decoder.decode(log_probs, LENGTHS)]
    streams = decoder.open(BATCH, capacity=T, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="lengths came from the host while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        decoder.push(streams, log_probs, LENGTHS)
    torch.cuda.synchronize()
    assert [facts(n) for n in decoder.decode(log_probs, LENGTHS)] == expected
