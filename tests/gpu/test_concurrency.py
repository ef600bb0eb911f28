"""CUDA streams, threads and several GPUs: work is ordered with torch's, and nobody disturbs anybody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

from tests.contract.facts import facts
from tests.gpu.rehearsal import sized
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda, random_fusion

V, T, BATCH = sized(300, 20), sized(100, 8), sized(16, 2)
LENGTHS = [T] * (BATCH - 1) + [T // 2]
A_WHILE = 100_000_000  # clock cycles, some 50 ms


@pytest.fixture(params=["max", "prefix"])
def decoder(request):
    return on_cuda(V, V, random_fusion(V), beam_size=sized(16, 4), n_best=2, merge=request.param)


def inputs(count, device):
    return [random_log_probs(BATCH, T, V + 1, seed=seed).to(device) for seed in range(count)]


def all_facts(nbests):
    return [facts(nbest) for nbest in nbests]


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run all at once; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    barrier = threading.Barrier(len(works))
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_work_follows_what_its_stream_did_before(gpu, decoder):
    """The log-probs are written late, on a stream that doesn't wait for the default stream."""
    (wanted,) = inputs(1, gpu)
    expected = all_facts(decoder.decode(wanted, LENGTHS))
    lengths = torch.tensor(LENGTHS, device=gpu)
    side = torch.cuda.Stream(gpu)
    given = torch.zeros_like(wanted)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE)
        given.copy_(wanted)
        found = decoder.decode(given, lengths)
    assert all_facts(found) == expected


def test_streams_of_utterances_may_live_on_a_stream_of_their_own(gpu, decoder):
    (wanted,) = inputs(1, gpu)
    expected = all_facts(decoder.decode(wanted, LENGTHS))
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        streams = decoder.open(BATCH)
        for begin in range(0, T, 10):
            torch.cuda._sleep(A_WHILE // 100)
            lengths = (torch.tensor(LENGTHS, device=gpu) - begin).clamp(0, 10)
            decoder.push(streams, wanted[:, begin : begin + 10], lengths)
        found = decoder.close(streams)
    assert all_facts(found) == expected


def test_two_cuda_streams_at_once(gpu, decoder):
    """Both are busy before either is waited for."""
    batches = inputs(2, gpu)
    expected = [all_facts(decoder.decode(batch, LENGTHS)) for batch in batches]
    sides = [torch.cuda.Stream(gpu) for _ in batches]
    found: list = [None, None]

    def decode(i: int) -> None:
        with torch.cuda.stream(sides[i]):
            torch.cuda._sleep(A_WHILE // 10)
            for _ in range(20):
                found[i] = all_facts(decoder.decode(batches[i], LENGTHS))
                assert found[i] == expected[i]

    torch.cuda.synchronize()
    in_threads([lambda: decode(0), lambda: decode(1)])
    assert found == expected


def test_threads_at_once_on_one_stream(device, decoder):
    batches = inputs(sized(4, 2), device)
    expected = [all_facts(decoder.decode(batch, LENGTHS)) for batch in batches]

    def decode(i: int) -> None:
        for _ in range(sized(10, 2)):
            assert all_facts(decoder.decode(batches[i], LENGTHS)) == expected[i]

    in_threads([lambda i=i: decode(i) for i in range(len(batches))])


def test_threads_may_meet_at_the_first_use(device):
    """Kernels and automata that nobody has loaded yet are loaded once, whoever comes first."""
    fusion = random_fusion(V, seed=77)
    (batch,) = inputs(1, device)
    found: list = []

    def decode() -> None:
        decoder = on_cuda(V, V, fusion, beam_size=4, merge="sum")
        found.append(all_facts(decoder.decode(batch.to(torch.bfloat16), LENGTHS)))

    in_threads([decode] * sized(8, 2))
    assert all(one == found[0] for one in found)


def test_another_gpu(gpu, decoder):
    """Tensors on cuda:1 are decoded there while cuda:0 is the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    other = torch.device("cuda", 1)
    (batch,) = inputs(1, gpu)
    expected = all_facts(decoder.decode(batch, LENGTHS))
    before = torch.cuda.memory_allocated(gpu)
    with torch.cuda.device(gpu):
        assert all_facts(decoder.decode(batch.to(other), LENGTHS)) == expected
        side = torch.cuda.Stream(other)
        side.wait_stream(torch.cuda.current_stream(other))
        with torch.cuda.stream(side), torch.cuda.device(gpu):
            moved = batch.to(other)
            assert all_facts(decoder.decode(moved, LENGTHS)) == expected
    assert torch.cuda.memory_allocated(gpu) == before


def test_log_probs_on_the_host_go_to_the_current_gpu(device, decoder):
    (batch,) = inputs(1, device)
    with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        found = decoder.decode(batch.cpu(), LENGTHS)
    assert all_facts(found) == all_facts(decoder.decode(batch, LENGTHS))
