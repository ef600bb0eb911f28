"""Kernels of the kind that decoders are made of, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.cuda_emulator.kernels import launch

SEEDS = pytest.mark.parametrize(
    "emulated_runtime",
    [
        {"seed": 1},
        {"seed": 2},
        {"order": "ascending"},
        {"order": "descending", "resident": 1},
        {"seed": 3, "check": True},
        {"seed": 4, "check": True, "order": "ascending"},
    ],
    indirect=True,
    ids=str,
)


@SEEDS
def test_block_scan(emulated_runtime):
    a = torch.randint(-9, 9, (2900,), dtype=torch.int32)
    out = torch.zeros_like(a)
    launch(
        emulated_runtime, "block_scan.cu", "block_scan", grid=3, block=1024, shared_bytes=128,
        a=a, out=out, n=2900,
    )  # fmt: skip
    expected = torch.cat([part.cumsum(0) for part in a.split(1024)])
    assert (out == expected).all()


@SEEDS
def test_top_k(emulated_runtime):
    x = torch.randn(3, 700).mul(10).round().div(10)  # many ties
    values, indices = torch.zeros(3, 100), torch.zeros(3, 100, dtype=torch.int32)
    launch(
        emulated_runtime, "top_k.cu", "top_k", grid=3, block=256, x=x, n=700, k=100,
        values=values, indices=indices,
    )  # fmt: skip
    expected = x.sort(dim=1, descending=True, stable=True)
    assert (values == expected.values[:, :100]).all()
    assert (indices == expected.indices[:, :100]).all()


@SEEDS
def test_hash_table(emulated_runtime):
    keys = np.random.default_rng(0).integers(1, 700, 2000) * 0x1E3779B97F4A7C15
    table, first = torch.zeros(1024, dtype=torch.int64), torch.full((1024,), -1, dtype=torch.int32)
    distinct = torch.zeros(1, dtype=torch.int32)
    launch(
        emulated_runtime, "hash_table.cu", "insert", grid=16, block=128,
        keys=torch.from_numpy(keys), n=2000, table=table, first=first, mask=np.uint32(1023),
        distinct=distinct,
    )  # fmt: skip
    expected = dict(zip(*np.unique(keys, return_index=True), strict=True))
    got = {key: item for key, item in zip(table.tolist(), first.tolist(), strict=True) if key}
    assert distinct.item() == len(expected)
    assert got == {int(key): int(item) for key, item in expected.items()}


@SEEDS
def test_loop_of_a_conditional_graph(emulated_runtime):
    limits = torch.randint(0, 9, (128,), dtype=torch.int32)
    counts = torch.zeros_like(limits)
    active, steps = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    handle = 42
    emulated_runtime.conditions[handle] = 1
    while emulated_runtime.conditions[handle]:  # what the graph's WHILE node does on a GPU
        launch(
            emulated_runtime, "graph_loop.cu", "step", block=128,
            limits=limits, counts=counts, active=active, steps=steps,
        )  # fmt: skip
        launch(
            emulated_runtime, "graph_loop.cu", "decide", block=32,
            handle=np.uint64(handle), active=active,
        )  # fmt: skip
    assert (counts == limits).all()
    assert steps.item() == limits.max() + 1
