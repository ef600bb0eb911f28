"""The kernels under the race and bounds checker: clean on any schedule, and no barrier is idle."""

import itertools

import pytest

from nemo_gpu_decoding.search.transducer import cuda_engine, cuda_workspace, records
from tests.cuda_emulator.fixtures import on_any_schedule
from tests.cuda_emulator.mutations import assert_needed, barriers_of
from tests.search.transducer.table_networks import (
    STRATEGIES,
    TableNetworks,
    assert_equal,
    random_frames,
    random_fusion,
)

pytestmark = pytest.mark.slow

V = 40


def search_everything(strategy: str) -> None:
    make, config = STRATEGIES[strategy]
    for pruning, durations in itertools.product(("late", "early"), ((), (0, 1, 2))):
        networks = TableNetworks(V, durations, seed=1, sharpness=1.0, blank_bias=0.0)
        options = config(beam_size=5, n_best=5, pruning_mode=pruning, alignments=True)
        assert_equal(make, networks, options, random_frames(2, 4, seed=1), [4, 2], random_fusion(V))


def search_on_the_device(strategy: str) -> None:
    """Flat posteriors, so that lists are pruned and frames end by force; at last, more durations than a
    block has threads."""
    make, config = STRATEGIES[strategy]

    def decode(networks, pruning, batch):
        options = config(beam_size=5, n_best=5, pruning_mode=pruning, alignments=True, backend="cuda")
        fusion = random_fusion(networks.vocab_size)
        make(networks, options, fusion).decode(random_frames(batch, 2, seed=1), [2, 1][:batch])

    for pruning in ("late", "early"):
        decode(TableNetworks(V, (0, 1, 2), seed=1, sharpness=0.5, blank_bias=0.0), pruning, batch=2)
    decode(TableNetworks(2, range(70), seed=1), "late", batch=1)


@pytest.fixture
def short_lists(monkeypatch):
    """Lists so short that every row goes through each of the kernels' loops."""
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(records, name, 64)
    monkeypatch.setattr(cuda_engine, "MOST_LABELS", 12)
    monkeypatch.setattr(cuda_workspace, "NODE_CAPACITY", 1)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@on_any_schedule
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, strategy):
    search_everything(strategy)


@pytest.mark.parametrize("threads", [32, 256])
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True)
def test_no_races_in_blocks_of_any_size(emulated_runtime, monkeypatch, threads):
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(records, name, threads)
    for make, config in STRATEGIES.values():
        options = config(beam_size=3, n_best=3)
        networks = TableNetworks(V, (0, 1), seed=1, sharpness=1.0)
        assert_equal(make, networks, options, random_frames(1, 2, seed=1), [2], random_fusion(V))


AES_FILES = ("search/transducer/aes.cu", "search/transducer/pool.cuh")
BARRIERS = [  # what the strategies share is tried with one of them
    *(("alsd_pp", barrier) for barrier in barriers_of("search/transducer/alsd.cu")),
    *(("aes_pp", barrier) for barrier in barriers_of("search/transducer/aes.cu", AES_FILES)),
    *(("alsd_pp", barrier) for barrier in barriers_of("search/transducer/schedule.cu")),
]


@pytest.mark.parametrize(("strategy", "barrier"), BARRIERS, ids=str)
def test_every_barrier_is_needed(request, tmp_path, short_lists, strategy, barrier):
    cache = request.config.cache.mkdir("cuda_emulator")
    assert_needed(barrier, lambda: search_on_the_device(strategy), tmp_path, cache)
