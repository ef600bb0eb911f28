"""Which LMs go where, and what is said when they fit nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.lm.packed import PackedArrays
from nemo_gpu_decoding.lm.placement import (
    PINNABLE_SHARE,
    RESERVED_BYTES,
    RESERVED_SHARE,
    Footprint,
    Memory,
    cache_slots,
    footprint,
    free_memory,
    resolve_placement,
)
from nemo_gpu_decoding.lm.records import LM_STATE

GB = 10**9
GPU = torch.device("cuda", 1)
# an LM of 33 GB, as in [XLLM]: 11 on the GPU, 22 in the host's memory
LARGE = Footprint(tables=11 * GB, arcs=22 * GB, cache=GB // 2)


def place(placement, device_free, host_free=64 * GB, need=LARGE, total=80 * GB):
    free = Memory(int(device_free), int(total), None if host_free is None else int(host_free))
    return resolve_placement(placement, need, free, "news.lm", GPU)


@pytest.mark.parametrize(
    ("placement", "device_free", "expected"),
    [
        ("device", 33 * GB, "device"),
        ("paged", 11.5 * GB, "paged"),
        ("paged", 70 * GB, "paged"),
        ("auto", 41 * GB, "device"),
        ("auto", 41 * GB - 1, "paged"),  # a tenth of the 80 GB stays free
        ("auto", 11.5 * GB, "paged"),
    ],
)
def test_what_fits_is_placed(placement, device_free, expected):
    assert place(placement, device_free) == expected


def test_auto_leaves_room_on_small_gpus_too():
    need = Footprint(tables=GB, arcs=2 * GB, cache=GB // 2)
    assert RESERVED_SHARE * 8 * GB < RESERVED_BYTES
    assert place("auto", 3 * GB + RESERVED_BYTES, need=need, total=8 * GB) == "device"
    assert place("auto", 3 * GB + RESERVED_BYTES - 1, need=need, total=8 * GB) == "paged"


def test_host_memory_that_is_unknown_is_tried():
    assert place("paged", 20 * GB, host_free=None) == "paged"


def test_not_all_of_the_hosts_memory_is_pinned():
    least = int(np.ceil(22 * GB / PINNABLE_SHARE))
    assert place("paged", 20 * GB, host_free=least) == "paged"
    with pytest.raises(ValueError, match=r"24\.44 GB of host memory"):
        place("paged", 20 * GB, host_free=least - 2)


def refusal(*arguments, **options):
    with pytest.raises(ValueError, match=r"^placement is ") as refused:
        place(*arguments, **options)
    return str(refused.value)


def test_the_device_is_too_small():
    assert refusal("device", 24 * GB) == (
        "placement is 'device': news.lm needs 33.00 GB on cuda:1; free are 24.00 GB on cuda:1 and "
        "64.00 GB of host memory, of which 90% may be pinned; "
        "expected placement 'paged', with cache_mb at most 13000"
    )


def test_the_cache_is_too_large():
    for placement in ("paged", "auto"):
        message = refusal(placement, 11.2 * GB)
        assert "11.50 GB on cuda:1, the cache's 0.50 GB included" in message
        assert message.endswith("expected cache_mb at most 200")


def test_the_host_has_too_little_memory():
    message = refusal("paged", 35 * GB, host_free=16 * GB)
    assert "22.00 GB of pinned host memory; free are 35.00 GB on cuda:1 and 16.00 GB" in message
    assert message.endswith("expected placement 'device'")


@pytest.mark.parametrize("placement", ["device", "paged", "auto"])
def test_there_is_no_room_anywhere(placement):
    message = refusal(placement, 6 * GB, host_free=16 * GB)
    assert "free are 6.00 GB on cuda:1 and 16.00 GB of host memory" in message
    assert "layout=quantised" in message
    if placement == "auto":
        assert "33.00 GB on cuda:1, or, paged, 11.50 GB on cuda:1" in message


def arrays_of(num_arcs):
    states = np.zeros(2, LM_STATE)
    states["arc_begin"][-1] = num_arcs
    words, codes = np.zeros(10, np.uint64), np.zeros(1, np.float32)
    return PackedArrays(states, words, words[:6], codes, 4, 4, 32)


def test_the_footprint_is_that_of_the_arrays():
    assert footprint(arrays_of(10), 64) == Footprint(tables=24 + 80 + 4, arcs=48, cache=64)


def test_a_cache_is_no_larger_than_all_arcs_need():
    assert cache_slots(arrays_of(10), 10**9) == 10
    assert cache_slots(arrays_of(10), 47) == 2
    assert cache_slots(arrays_of(0), 10**9) == 1


def test_kernels_on_the_host_have_the_hosts_memory():
    free = free_memory(torch.device("cpu"))
    assert free.device_free == free.device_total > 0
