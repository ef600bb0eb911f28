"""CUDA streams, threads, several GPUs, memory: nobody disturbs anybody, nothing is kept."""

import gc
import resource
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.lm.on_device import SLOT_BYTES, PlacedLM, free_memory
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from tests.contract.subject import all_facts
from tests.gpu import sized
from tests.lm.paged_lookups import answers, look_up, questions
from tests.oracles.ngram import closed_table, write_arpa
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


def in_threads(works: list[Callable[[], None]]) -> None:
    """Run all at once; raises what one of them raised."""
    barrier = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as pool:
        list(pool.map(lambda work: (barrier.wait(), work()), works))


def test_kernels_wait_for_earlier_work_of_their_stream(gpu, decoder):
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


def test_threads_decode_at_first_use_at_once(device):
    """Kernels and automata that nobody has loaded yet are loaded once, whoever comes first."""
    fusion = random_fusion(V, seed=77)
    (batch,) = inputs(1, device)
    found: list = []

    def decode() -> None:
        decoder = on_cuda(V, V, fusion, beam_size=4, merge="sum")
        found.append(all_facts(decoder.decode(batch.to(torch.bfloat16), LENGTHS)))

    in_threads([decode] * sized(8, 2))
    assert all(one == found[0] for one in found)


def test_results_on_another_gpu_are_the_same(gpu, decoder):
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


# ---------------- A steady state asks the driver for no memory, and nothing is kept that nobody needs
MEMORY_V, MEMORY_T, MEMORY_BATCH = 128, 64, 16
MIB = 1 << 20


@pytest.fixture
def memory_decoder():
    return on_cuda(MEMORY_V, MEMORY_V, random_fusion(MEMORY_V), beam_size=8, n_best=2)


@pytest.fixture
def pool(device):
    return random_log_probs(MEMORY_BATCH, MEMORY_T, MEMORY_V + 1, seed=0).to(device)


def allocations(device) -> int:
    return torch.cuda.memory_stats(device)["num_device_alloc"]


def test_the_same_shape_again_takes_no_memory_from_the_driver(gpu, memory_decoder, pool):
    lengths = [MEMORY_T] * MEMORY_BATCH
    for _ in range(3):
        memory_decoder.decode(pool, lengths)
    torch.cuda.synchronize()
    before, held = allocations(gpu), torch.cuda.memory_allocated(gpu)
    for _ in range(200):
        memory_decoder.decode(pool, lengths)
    assert allocations(gpu) == before
    assert torch.cuda.memory_allocated(gpu) == held


def test_streams_take_no_memory_from_the_driver_chunk_by_chunk(gpu, memory_decoder, pool):
    lengths = torch.full((MEMORY_BATCH,), 4, device=gpu)

    def run() -> None:
        streams = memory_decoder.open(MEMORY_BATCH, capacity=MEMORY_T, device=gpu)
        for begin in range(0, MEMORY_T, 4):
            memory_decoder.push(streams, pool[:, begin : begin + 4], lengths)
        memory_decoder.close(streams)

    run()
    torch.cuda.synchronize()
    before = allocations(gpu)
    for _ in range(20):
        run()
    assert allocations(gpu) == before


def random_batch(pool, rng):
    batch, frames = int(rng.integers(1, MEMORY_BATCH + 1)), int(rng.integers(1, MEMORY_T + 1))
    return pool[:batch, :frames], rng.integers(0, frames + 1, batch).tolist()


def host_bytes() -> int:
    """Memory of the process that is in use now; its peak where the system tells no more."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_many_batches_of_random_shapes_leak_no_memory(gpu, memory_decoder, pool):
    """10,000 of them; what torch's allocator holds for us stays within a small multiple of one batch."""
    rng = np.random.default_rng(0)
    memory_decoder.decode(pool, [MEMORY_T] * MEMORY_BATCH)
    for _ in range(1000):
        memory_decoder.decode(*random_batch(pool, rng))
    gc.collect()
    torch.cuda.synchronize()
    held, reserved, host = (torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu), host_bytes())
    for _ in range(9000):
        memory_decoder.decode(*random_batch(pool, rng))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(gpu) == held
    assert torch.cuda.memory_reserved(gpu) <= reserved + 8 * MIB
    assert host_bytes() <= host + 32 * MIB


def test_deleted_decoder_frees_its_automata(device):
    """On the host nothing can be counted, but the way there is the same."""
    pool = random_log_probs(2, 8, MEMORY_V + 1, seed=0).to(device)

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    before = held()
    for seed in range(sized(5, 1)):
        fusion = random_fusion(MEMORY_V, seed=1000 + seed)
        on_cuda(MEMORY_V, MEMORY_V, fusion).decode(pool, [8, 5])
        assert device.type == "cpu" or held() > before
        del fusion
    assert held() == before


# ------ LMs whose arcs kernels read over the bus: right answers from any cache, shared by any streams
WORDS = [f"w{i}" for i in range(sized(12, 3))]
SIZES = {"grid": sized(64, 2), "block": sized(256, 32)}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    path = write_arpa(tmp_path_factory.mktemp("lm") / "lm.arpa", closed_table(seed=1, words=WORDS, keep=0.5))
    return pack_arpa_in_memory(path)


@pytest.fixture(scope="module")
def asked(lm):
    return questions(lm)


@pytest.fixture(scope="module")
def expected(lm, asked):
    return answers(lm, asked)


def placed(lm, slots=0, placement="paged"):
    return PlacedLM(lm.arrays, placement, max(slots, 1) * SLOT_BYTES)


@pytest.mark.parametrize("slots", [1, 100, 10**6])
def test_lookups_over_the_bus_are_those_of_the_cpu(device, lm, asked, expected, slots):
    copies = placed(lm, slots)
    for _ in range(sized(20, 1)):  # whatever the last run left in the cache
        found, statistics = look_up(runtime(), copies.on(device), asked, **SIZES)
        assert found == expected
        assert statistics.hits + statistics.misses == len(asked)


def test_threads_with_streams_of_their_own_share_a_small_cache(gpu, lm, asked, expected):
    copies = placed(lm, 64)

    def work():
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            for _ in range(20):
                assert look_up(runtime(), copies.on(gpu), asked, **SIZES)[0] == expected

    in_threads([work] * 4)


def test_table_is_pinned_while_it_is_used(gpu, lm):
    before = torch.cuda.memory_allocated(gpu)
    copies = placed(lm, 100)
    table = copies.on(gpu)
    assert table.host_arcs.is_pinned()
    parts = (table.states, table.labels, table.cache)
    assert torch.cuda.memory_allocated(gpu) - before >= sum(part.nbytes for part in parts)
    gone = weakref.ref(table)
    del copies, table
    gc.collect()
    assert gone() is None
    assert torch.cuda.memory_allocated(gpu) == before


def test_placement_auto_fits_into_free_memory(gpu, lm):
    free = free_memory(gpu)
    assert 0 < free.device_free <= free.device_total
    assert placed(lm, placement="auto").on(gpu).placement == "device"
    filler = torch.empty(free.device_free - 2 * 10**9, dtype=torch.uint8, device=gpu)
    assert placed(lm, placement="auto").on(gpu).placement == "paged"
    del filler
    torch.cuda.empty_cache()
