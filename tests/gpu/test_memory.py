"""A steady state asks the driver for no memory, and nothing is kept that nobody needs."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.rehearsal import sized
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import on_cuda, random_fusion

V, T, BATCH = 128, 64, 16
MIB = 1 << 20


@pytest.fixture
def decoder():
    return on_cuda(V, V, random_fusion(V), beam_size=8, n_best=2)


@pytest.fixture
def pool(device):
    return random_log_probs(BATCH, T, V + 1, seed=0).to(device)


def allocations(device) -> int:
    return torch.cuda.memory_stats(device)["num_device_alloc"]


def test_the_same_shape_again_takes_no_memory_from_the_driver(gpu, decoder, pool):
    lengths = [T] * BATCH
    for _ in range(3):
        decoder.decode(pool, lengths)
    torch.cuda.synchronize()
    before, held = allocations(gpu), torch.cuda.memory_allocated(gpu)
    for _ in range(200):
        decoder.decode(pool, lengths)
    assert allocations(gpu) == before
    assert torch.cuda.memory_allocated(gpu) == held


def test_streams_take_no_memory_from_the_driver_chunk_by_chunk(gpu, decoder, pool):
    lengths = torch.full((BATCH,), 4, device=gpu)

    def run() -> None:
        streams = decoder.open(BATCH, capacity=T, device=gpu)
        for begin in range(0, T, 4):
            decoder.push(streams, pool[:, begin : begin + 4], lengths)
        decoder.close(streams)

    run()
    torch.cuda.synchronize()
    before = allocations(gpu)
    for _ in range(20):
        run()
    assert allocations(gpu) == before


def random_batch(pool, rng):
    """Part of the pool, with lengths of its own."""
    batch, frames = int(rng.integers(1, BATCH + 1)), int(rng.integers(1, T + 1))
    return pool[:batch, :frames], rng.integers(0, frames + 1, batch).tolist()


def host_bytes() -> int:
    """Memory of the process that is in use now; its peak where the system tells no more."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_many_batches_of_random_shapes_leave_nothing_behind(gpu, decoder, pool):
    """10,000 of them; what torch's allocator holds for us stays within a small multiple of one batch."""
    rng = np.random.default_rng(0)
    decoder.decode(pool, [T] * BATCH)
    for _ in range(1000):
        decoder.decode(*random_batch(pool, rng))
    gc.collect()
    torch.cuda.synchronize()
    held, reserved, host = (
        torch.cuda.memory_allocated(gpu),
        torch.cuda.memory_reserved(gpu),
        host_bytes(),
    )
    for _ in range(9000):
        decoder.decode(*random_batch(pool, rng))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(gpu) == held
    assert torch.cuda.memory_reserved(gpu) <= reserved + 8 * MIB
    assert host_bytes() <= host + 32 * MIB


def test_a_decoder_that_is_gone_takes_its_automata_along(device):
    """On the host nothing can be counted, but the way there is the same."""
    pool = random_log_probs(2, 8, V + 1, seed=0).to(device)

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    before = held()
    for seed in range(sized(5, 1)):
        fusion = random_fusion(V, seed=1000 + seed)
        on_cuda(V, V, fusion).decode(pool, [8, 5])
        assert device.type == "cpu" or held() > before
        del fusion
    assert held() == before
