"""The kernel under the race and bounds checker: clean on any schedule.

`test_kernel.py` runs under the checker too, on one schedule.
"""

from __future__ import annotations

import pytest
import torch

from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cuda_engine, kernel_abi
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.models import random_graph
from tests.search.paged_biglm.both import assert_equal, limit_tokens, pair

pytest.importorskip("kaldifst")

COLUMNS, T = 40, 4


def search_everything(monkeypatch: pytest.MonkeyPatch, topology: str, **options) -> None:
    """Ties, full tables, boosting, paged arcs, utterances of different lengths, chunks, few records."""
    limit_tokens(monkeypatch, 48)
    for name in ("FIRST_BACK_POINTERS", "BACK_POINTERS_PER_ACTIVE", "FIRST_LINKS"):
        monkeypatch.setattr(cuda_engine, name, 1)
    graph, lms = random_graph(1, columns=COLUMNS, states=40, coarse=True), pair(1, coarse=True)
    boosting = build_word_boosting({"w1": 1.0, "w2 w3": 2.0}, graph)
    log_probs = torch.round(random_log_probs(2, T, COLUMNS, seed=1, sharpness=0.7))
    monkeypatch.setattr(kernel_abi, "THREADS", 64)
    assert_equal(
        graph, lms, log_probs, [T, 2], topology=topology, boosting=boosting, columns=COLUMNS,
        max_active=12, beam=6.0, placement="paged", chunk=3, **options,
    )  # fmt: skip


@pytest.mark.parametrize("topology", ["compact", "normal"])
@pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"check": True, "seed": 100, "yield_percent": 50, "resident": 1},
        {"check": True, "order": "descending"},
    ],
    indirect=True,
)
def test_no_races_and_no_stray_accesses(emulated_runtime, small_blocks, topology, monkeypatch):
    search_everything(monkeypatch, topology)
    search_everything(monkeypatch, topology, group_size=2)
    search_everything(monkeypatch, topology, lattice=True, n_best=3)
    search_everything(monkeypatch, topology, composition="eager")
