"""Launches at the edge: what the driver refuses, and kernels that read the host's memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.driver import DriverError
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, runtime
from nemo_gpu_decoding.cuda.pinned import HostTable
from tests.gpu.rehearsal import sized
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, random_fusion

SOURCE = str(Path(__file__).parent / "kernels" / "through_the_bus.cu")
GATHER = Signature(
    "gather",
    {
        "table": Tensor(torch.int64, ("N",), pinned=True),
        "where": Tensor(torch.int32, ("count",)),
        "out": Tensor(torch.int64, ("count",)),
        "count": Scalar(np.int32),
    },
)
NUMBERS = sized(1 << 24, 1 << 10)  # 128 MiB
COUNT = sized(1 << 20, 100)


@pytest.fixture
def table(device):
    with HostTable(8 * NUMBERS) as table:
        numbers = table.bytes.view(torch.int64)
        torch.arange(NUMBERS, out=numbers).mul_(3)
        if device.type == "cuda":
            table.pin()
        yield numbers


def gather(device, table, grid=64):
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(NUMBERS, (COUNT,), generator=generator, dtype=torch.int32).to(device)
    out = torch.zeros(COUNT, dtype=torch.int64, device=device)
    runtime().load(SOURCE, device).launch(
        GATHER, grid=grid, block=128, table=table, where=where, out=out, count=COUNT
    )
    return where, out


def test_a_kernel_reads_pinned_memory_without_a_copy(device, table):
    where, out = gather(device, table)
    assert torch.equal(out.cpu(), 3 * where.cpu().long())
    table[int(where[0])] = -1  # the next launch sees it
    assert gather(device, table)[1][0].item() == -1


def test_pageable_memory_is_refused(gpu):
    pageable = torch.zeros(NUMBERS, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gather, argument table: is pageable host memory"):
        gather(gpu, pageable)


def test_what_the_driver_refuses_is_explained(gpu, table):
    """More blocks than a grid can have: the kernel, its sizes and the driver's reason are named."""
    message = (
        r"kernel gather can't start on cuda:0 with 2147483648 blocks of 128 threads .*: "
        r"cuLaunchKernel fails with CUDA_ERROR_INVALID_VALUE"
    )
    with pytest.raises(DriverError, match=message):
        gather(gpu, table, grid=2**31)
    log_probs = random_log_probs(2, 20, 13, seed=0).to(gpu)
    assert_equal(log_probs, [20, 7], fusion=random_fusion(12))  # and the process is as well as before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"grid": 1, "block": 2048}, "block is 2048, expected a multiple of 32 up to 1024"),
        ({"grid": 1, "block": 33}, "block is 33, expected a multiple of 32"),
        ({"grid": 1, "block": 32, "shared_bytes": 10**9}, "shared_bytes is 1000000000, expected"),
        ({"grid": 0, "block": 32}, "grid is 0, expected at least 1"),
    ],
)
def test_sizes_are_checked_before_the_driver_sees_them(device, table, sizes, message):
    where = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=message):
        runtime().load(SOURCE, device).launch(
            GATHER, table=table, where=where, out=out, count=1, **sizes
        )


def test_a_signature_that_does_not_fit_its_kernel_is_found(device, table):
    wrong = Signature("gather", {**GATHER.parameters, "more": Scalar(np.int64)})
    where = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="gather"):
        runtime().load(SOURCE, device).launch(
            wrong, grid=1, block=32, table=table, where=where, out=out, count=1, more=1
        )
