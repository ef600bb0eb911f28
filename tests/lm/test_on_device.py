"""LMs on a device: their bytes, who shares them, how long they live, what is said if they don't fit."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.host_memory import PinningError
from nemo_gpu_decoding.lm import on_device
from nemo_gpu_decoding.lm.on_device import (
    PINNABLE_SHARE,
    RESERVED_BYTES,
    RESERVED_SHARE,
    Footprint,
    Memory,
    PlacedLM,
    cache_slots,
    copy_bytes,
    copying_bar,
    footprint,
    free_memory,
    resolve_placement,
)
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PackedArrays, load_packed_lm
from nemo_gpu_decoding.lm.records import LM_STATE
from tests.oracles.ngram import closed_table, save_packed_lm, write_arpa

CPU = torch.device("cpu")
GB = 10**9


@pytest.fixture
def lm(tmp_path):
    return pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", closed_table(seed=1, order=4)))


@pytest.fixture
def mapped(lm, tmp_path):
    save_packed_lm(lm, tmp_path / "lm.packed")
    return load_packed_lm(tmp_path / "lm.packed")


def words(tensor):
    return tensor.numpy().view(np.uint64)


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free memory of all devices and the host; plenty before its first call."""

    def set_free(*amounts):
        monkeypatch.setattr(on_device, "free_memory", lambda device: Memory(*amounts))

    set_free(100 * GB, 100 * GB, 100 * GB)
    return set_free


@pytest.mark.parametrize("placement", ["device", "paged"])
@pytest.mark.parametrize("piece", [999, 1 << 26])
def test_copy_bytes_copies_all_bytes(mapped, placement, piece, monkeypatch):
    monkeypatch.setattr(on_device, "PIECE", piece)
    arrays = mapped.arrays
    copy = PlacedLM(arrays, placement, 160).on(CPU)
    assert copy.states.numpy().tobytes() == arrays.states.tobytes()
    assert words(copy.labels).tolist() == arrays.labels.tolist()
    arcs, other = (copy.arcs, copy.host_arcs) if placement == "device" else (copy.host_arcs, copy.arcs)
    assert words(arcs).tolist() == arrays.arcs.tolist()
    assert other is None
    if placement == "device":
        assert copy.cache is None
        assert copy.host_table is None
    else:
        assert copy.cache.tolist() == [[0, 0]] * 10
        assert copy.host_table.nbytes == arrays.arcs.nbytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no Linux that says what is in memory")
def test_pages_of_a_file_are_given_back_and_can_be_read_again(tmp_path):
    """Of 32 MiB that were mapped and copied, none stays in the process, and no byte is lost."""
    content = np.random.default_rng(0).integers(0, 256, 1 << 25, np.uint8)
    content.tofile(tmp_path / "file")
    file = np.memmap(tmp_path / "file", np.uint8, "r")[4096:].view(np.ndarray)
    target = torch.empty(file.nbytes, dtype=torch.uint8)
    with copying_bar(file.nbytes, "test") as bar:
        copy_bytes(file, target, bar)
    assert mapped_bytes(tmp_path / "file") < 1 << 20
    assert np.array_equal(target.numpy(), content[4096:])
    assert np.array_equal(file, content[4096:])


def test_arrays_of_packed_lms_are_given_back(mapped):
    for table in mapped.arrays[:3]:
        assert on_device._mapped_file(table) is not None


def mapped_bytes(path):
    """How much of a mapped file is in the memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1]) * 1024


def test_memory_that_is_no_file_is_left_alone(lm):
    before = lm.arrays.arcs.copy()
    PlacedLM(lm.arrays, "paged", 160).on(CPU)
    assert np.array_equal(lm.arrays.arcs, before)


def test_decoders_share_a_copy_with_equal_options_only(lm, mapped):
    first = PlacedLM(lm.arrays, "paged", 160)
    copy = first.on(CPU)
    assert first.on(CPU) is copy
    assert PlacedLM(lm.arrays, "paged", 160).on(CPU) is copy
    assert PlacedLM(lm.arrays, "paged", 169).on(CPU) is copy  # holds 10 arcs, too
    assert PlacedLM(lm.arrays, "paged", 176).on(CPU) is not copy
    assert PlacedLM(lm.arrays, "device", 160).on(CPU) is not copy
    assert PlacedLM(mapped.arrays, "paged", 160).on(CPU) is not copy


def test_devices_share_one_copy_in_the_hosts_memory(lm, free):
    first = PlacedLM(lm.arrays, "paged", 160)
    kept = weakref.ref(first.on(CPU).host_table)
    free(100 * GB, 100 * GB, 0)
    full = PlacedLM(lm.arrays, "paged", 176)
    assert full.on(CPU) is not first.on(CPU)
    assert full.on(CPU).host_table is kept()
    del first
    gc.collect()
    assert words(full.on(CPU).host_arcs).tolist() == lm.arrays.arcs.tolist()
    del full
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("placement", ["device", "paged"])
def test_auto_takes_the_copy_that_is_there(lm, free, placement):
    """Also if there would be no room for another one."""
    existing = PlacedLM(lm.arrays, placement, 160)
    copy = existing.on(CPU)
    free(0, 0, 0)
    full = PlacedLM(lm.arrays, "auto", 160)
    assert full.on(CPU) is copy
    del existing, full, copy
    free(100 * GB, 100 * GB, 100 * GB)
    assert PlacedLM(lm.arrays, "auto", 160).on(CPU).placement == "device"


def test_concurrent_threads_share_one_device_copy(lm, monkeypatch):
    measured = []

    def measure(device):
        measured.append(device)
        return Memory(100 * GB, 100 * GB, 100 * GB)

    monkeypatch.setattr(on_device, "free_memory", measure)
    placed = [PlacedLM(lm.arrays, "paged", 160) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda one: one.on(CPU), placed))
    assert len(set(copies)) == len(measured) == 1


def test_device_copy_is_freed_with_its_last_user(lm):
    first, second = (PlacedLM(lm.arrays, "paged", 160) for _ in range(2))
    copy = weakref.ref(first.on(CPU))
    assert second.on(CPU) is copy()
    del first
    gc.collect()
    assert copy() is not None
    del second
    gc.collect()
    assert copy() is None


def test_too_little_memory_is_said_before_anything_is_copied(lm, monkeypatch, free):
    monkeypatch.setattr(on_device, "_upload", None)  # not reached
    free(0, GB, GB)
    scarce = PlacedLM(lm.arrays, "auto", 16, "news.lm")
    with pytest.raises(ValueError, match=r"placement is 'auto': news.lm needs .* 0.00 GB on cpu and 1.0"):
        scarce.on(CPU)


def test_failed_allocation_is_reported(lm, monkeypatch, free):
    def refuse(*arguments):
        raise PinningError("cudaHostRegister can't pin")

    monkeypatch.setattr(on_device, "_pinned", refuse)
    placed = PlacedLM(lm.arrays, "paged", 160, "news.lm")
    message = r"placement is 'paged': news.lm .* expected placement 'device' \(cudaHostRegister can't pin\)"
    with pytest.raises(ValueError, match=message):
        placed.on(CPU)
    monkeypatch.undo()
    assert placed.on(CPU).placement == "paged"  # nothing is left of the failure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("gpu", 16), "placement is 'gpu', expected one of auto, device, paged"),
        (("paged", 15), "cache_bytes is 15, expected at least 16"),
    ],
)
def test_placed_lm_refuses_invalid_options(lm, options, message):
    with pytest.raises(ValueError, match=message):
        PlacedLM(lm.arrays, *options)


# -- Which LMs go where, and what is said when they fit nowhere ---------------------------------------


GPU = torch.device("cuda", 1)
# an LM of 33 GB ([XLLM] measures 3 GB): 11 on the GPU, 22 in the host's memory
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
def test_lm_that_fits_is_placed_as_asked(placement, device_free, expected):
    assert place(placement, device_free) == expected


def test_auto_leaves_room_on_small_gpus_too():
    need = Footprint(tables=GB, arcs=2 * GB, cache=GB // 2)
    assert RESERVED_SHARE * 8 * GB < RESERVED_BYTES
    assert place("auto", 3 * GB + RESERVED_BYTES, need=need, total=8 * GB) == "device"
    assert place("auto", 3 * GB + RESERVED_BYTES - 1, need=need, total=8 * GB) == "paged"


def test_host_memory_that_is_unknown_is_tried_and_not_all_of_it_is_pinned():
    assert place("paged", 20 * GB, host_free=None) == "paged"
    least = int(np.ceil(22 * GB / PINNABLE_SHARE))
    assert place("paged", 20 * GB, host_free=least) == "paged"
    with pytest.raises(ValueError, match=r"24\.44 GB of host memory"):
        place("paged", 20 * GB, host_free=least - 2)


def refusal(*arguments, **options):
    with pytest.raises(ValueError, match=r"^placement is ") as refused:
        place(*arguments, **options)
    return str(refused.value)


def test_the_device_the_cache_or_the_hosts_memory_is_too_small():
    assert refusal("device", 24 * GB) == (
        "placement is 'device': news.lm needs 33.00 GB on cuda:1; free are 24.00 GB on cuda:1 and "
        "64.00 GB of host memory, of which 90% may be pinned; "
        "expected placement 'paged', with cache_mb at most 13000"
    )
    for placement in ("paged", "auto"):
        message = refusal(placement, 11.2 * GB)
        assert "11.50 GB on cuda:1, the cache's 0.50 GB included" in message
        assert message.endswith("expected cache_mb at most 200")
    message = refusal("paged", 35 * GB, host_free=16 * GB)
    assert "22.00 GB of pinned host memory; free are 35.00 GB on cuda:1 and 16.00 GB" in message
    assert message.endswith("expected placement 'device'")


@pytest.mark.parametrize("placement", ["device", "paged", "auto"])
def test_error_names_host_and_device_if_neither_has_room(placement):
    message = refusal(placement, 6 * GB, host_free=16 * GB)
    assert "free are 6.00 GB on cuda:1 and 16.00 GB of host memory" in message
    assert "expected a smaller LM (prune-lm makes one), or more free memory" in message
    if placement == "auto":
        assert "33.00 GB on cuda:1, or, paged, 11.50 GB on cuda:1" in message


def arrays_of(num_arcs):
    states = np.zeros(2, LM_STATE)
    states["arc_begin"][-1] = num_arcs
    words = np.zeros(10, np.uint64)
    return PackedArrays(states, words, words[:6], 4, 4)


def test_the_footprint_is_that_of_the_arrays():
    assert footprint(arrays_of(10), 64) == Footprint(tables=24 + 80, arcs=48, cache=64)
    assert cache_slots(arrays_of(10), 10**9) == 10
    assert cache_slots(arrays_of(10), 47) == 2
    assert cache_slots(arrays_of(0), 10**9) == 1
    free = free_memory(torch.device("cpu"))
    assert free.device_free == free.device_total > 0
