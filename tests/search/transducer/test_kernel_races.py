"""The kernels under the race and bounds checker: clean on any schedule and in blocks of any size."""

from __future__ import annotations

import itertools

import pytest

from nemo_gpu_decoding.search.transducer import cuda_workspace, launch_shape
from tests.search.transducer.both import assert_equal, random_fusion
from tests.search.transducer.table_networks import TableNetworks, random_frames
from tests.search.transducer.test_kernels import STRATEGIES

V = 40


def search_everything(strategy: str) -> None:
    make, config = STRATEGIES[strategy]
    for pruning, durations in itertools.product(("late", "early"), ((), (0, 1, 2))):
        networks = TableNetworks(V, durations, seed=1, sharpness=1.0, blank_bias=0.0)
        options = config(beam_size=5, n_best=5, pruning_mode=pruning, alignments=True)
        assert_equal(make, networks, options, random_frames(2, 4, seed=1), [4, 2], random_fusion(V))


@pytest.fixture
def short_lists(monkeypatch):
    """Lists so short that every row goes through each of the kernels' loops."""
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(launch_shape, name, 64)
    monkeypatch.setattr(launch_shape, "MOST_LABELS", 12)
    monkeypatch.setattr(cuda_workspace, "NODE_ROOM", 1)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"check": True, "seed": 0},
        {"check": True, "seed": 100, "yield_percent": 50, "resident": 1},
        {"check": True, "order": "descending"},
    ],
    indirect=True,
)
def test_no_races_and_no_stray_accesses(emulated_runtime, short_lists, strategy):
    search_everything(strategy)


@pytest.mark.parametrize("threads", [32, 256])
@pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True)
def test_no_races_in_blocks_of_any_size(emulated_runtime, monkeypatch, threads):
    for name in ("EXPAND_THREADS", "MERGE_THREADS", "MOVE_THREADS"):
        monkeypatch.setattr(launch_shape, name, threads)
    for make, config in STRATEGIES.values():
        options = config(beam_size=3, n_best=3)
        networks = TableNetworks(V, (0, 1), seed=1, sharpness=1.0)
        assert_equal(make, networks, options, random_frames(1, 2, seed=1), [2], random_fusion(V))
