"""The kernels under the race and bounds checker: clean on any schedule, and no barrier is idle."""

from itertools import product

import pytest

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.search.flexctc_beam import cuda_engine
from tests.cuda_emulator.fixtures import on_any_schedule
from tests.cuda_emulator.mutations import assert_needed, barriers_of
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, on_cuda, random_fusion

pytestmark = pytest.mark.slow

V = 30
MERGES = ("max", "sum", "prefix")
KERNELS = ("search/flexctc_beam/kernel.cu", "search/flexctc_beam/finish.cu")


@pytest.fixture
def short_lists(monkeypatch):
    """Lists so short that every frame goes through each of the kernel's loops."""
    for name, size in {"THREADS": 64, "FINISH_THREADS": 64, "MAX_LABELS": 20, "MAX_PAIRS": 48}.items():
        monkeypatch.setattr(cuda_engine, name, size)
    monkeypatch.setattr(cuda_engine, "TILE_BYTES", 400)


def search_everything(merge: str = "max") -> None:
    """Flat and peaked rows, several frames, several utterances, an empty one."""
    for sharpness, beam_size in ((0.3, 16), (3.0, 5)):
        assert_equal(
            random_log_probs(3, 7, V + 1, seed=1, sharpness=sharpness), [7, 0, 4],
            fusion=random_fusion(V), merge=merge, beam_size=beam_size, n_best=beam_size,
            beam_threshold=float("inf"),
        )  # fmt: skip


def search_in_chunks() -> None:
    """Beams come back from global memory. First with two rows in shared memory, then with one."""
    cuda = runtime()
    _, _, most = cuda_engine.list_sizes(16, V + 1, 4, cuda.most_shared_bytes)
    decoder = on_cuda(V, V, random_fusion(V), merge="sum", beam_size=16, n_best=16, beam_threshold=float("inf"))
    for sharpness, cuda.most_shared_bytes in product((0.3, 3.0, 8.0), (most, most - 1)):
        log_probs = random_log_probs(2, 7, V + 1, seed=1, sharpness=sharpness)
        log_probs[0, 1] -= 5000.0  # the scores of the beam are rebased
        streams = decoder.open(2)
        decoder.push(streams, log_probs[:, :5], [5, 4])
        decoder.partial(streams)
        decoder.push(streams, log_probs[:, 5:], [2, 0])
        decoder.close(streams)


@pytest.mark.parametrize("merge", MERGES)
@on_any_schedule
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, merge):
    search_everything(merge)
    assert emulated_runtime.launches == 4


@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True)
def test_no_races_in_blocks_of_any_size(emulated_runtime, monkeypatch, threads):
    monkeypatch.setattr(cuda_engine, "THREADS", threads)
    monkeypatch.setattr(cuda_engine, "FINISH_THREADS", min(threads, 256))
    for merge in MERGES:
        search_everything(merge)


@pytest.mark.parametrize("barrier", [barrier for name in KERNELS for barrier in barriers_of(name)], ids=str)
def test_every_barrier_is_needed(request, tmp_path, short_lists, barrier):
    assert_needed(barrier, search_in_chunks, tmp_path, request.config.cache.mkdir("cuda_emulator"))
