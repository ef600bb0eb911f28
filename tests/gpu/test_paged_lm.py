"""LMs whose arcs kernels read over the bus: right answers from any cache, shared by any streams."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.placement import SLOT_BYTES, free_memory
from tests.gpu.rehearsal import sized
from tests.gpu.test_concurrency import in_threads
from tests.lm.ngrams import closed_table, write_arpa
from tests.lm.paged_lookups import answers, look_up, questions

WORDS = [f"w{i}" for i in range(sized(12, 3))]
SIZES = {"grid": sized(64, 2), "block": sized(256, 32)}


@pytest.fixture(scope="module", params=["exact", "quantised"])
def lm(request, tmp_path_factory):
    table = closed_table(seed=1, words=WORDS, keep=0.5)
    path = write_arpa(tmp_path_factory.mktemp("lm") / "lm.arpa", table)
    return pack_arpa_in_memory(path, layout=request.param)


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


def test_lookups_on_the_device_are_those_of_the_cpu(device, lm, asked, expected):
    table = placed(lm, placement="device").on(device)
    assert look_up(runtime(), table, asked, **SIZES)[0] == expected


def test_threads_with_streams_of_their_own_share_a_small_cache(gpu, lm, asked, expected):
    copies = placed(lm, 64)

    def work():
        with torch.cuda.stream(torch.cuda.Stream(gpu)):
            for _ in range(20):
                assert look_up(runtime(), copies.on(gpu), asked, **SIZES)[0] == expected

    in_threads([work] * 4)


def test_memory_is_pinned_while_it_is_used(gpu, lm):
    before = torch.cuda.memory_allocated(gpu)
    copies = placed(lm, 100)
    table = copies.on(gpu)
    assert table.host_arcs.is_pinned()
    assert torch.cuda.memory_allocated(gpu) - before >= table.device_bytes
    gone = weakref.ref(table)
    del copies, table
    gc.collect()
    assert gone() is None
    assert torch.cuda.memory_allocated(gpu) == before


def test_auto_knows_what_is_free(gpu, lm):
    free = free_memory(gpu)
    assert 0 < free.device_free <= free.device_total
    assert placed(lm, placement="auto").on(gpu).placement == "device"
    filler = torch.empty(free.device_free - 2 * 10**9, dtype=torch.uint8, device=gpu)
    assert placed(lm, placement="auto").on(gpu).placement == "paged"
    del filler
    torch.cuda.empty_cache()
