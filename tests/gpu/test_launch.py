"""Launches at the edge, a caller's CUDA graphs, and what a first use costs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.options import BenchOptions
from benchmarks.probe import measure_start, probe_process
from nemo_gpu_decoding.cuda.driver import DriverError
from nemo_gpu_decoding.cuda.host_memory import HostTable
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, runtime
from tests.contract.subject import all_facts
from tests.gpu import sized
from tests.random_models import random_log_probs
from tests.search.flexctc_beam.both import assert_equal, on_cpu, on_cuda, random_fusion

SOURCE = str(Path(__file__).with_name("kernels.cu"))
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
    table = HostTable(8 * NUMBERS)
    numbers = table.bytes.view(torch.int64)
    torch.arange(NUMBERS, out=numbers).mul_(3)
    if device.type == "cuda":
        table.pin(device)
    return numbers


def gather(device, table, grid=64):
    where = torch.randint(NUMBERS, (COUNT,), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(device)
    out = torch.zeros(COUNT, dtype=torch.int64, device=device)
    runtime().load(SOURCE, device).launch(GATHER, grid=grid, block=128, table=table, where=where, out=out, count=COUNT)
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


def test_refused_launch_is_explained(gpu, table):
    """More blocks than a grid can have: the kernel, its sizes and the driver's reason are named."""
    message = (
        r"kernel gather can't start on cuda:0 with 2147483648 blocks of 128 threads .*: "
        r"cuLaunchKernel fails with CUDA_ERROR_INVALID_VALUE"
    )
    with pytest.raises(DriverError, match=message):
        gather(gpu, table, grid=2**31)
    log_probs = random_log_probs(2, 20, 13, seed=0).to(gpu)
    assert_equal(log_probs, [20, 7], fusion=random_fusion(12))  # and the process is as well as before


def test_a_signature_that_does_not_fit_its_kernel_is_found(device, table):
    wrong = Signature("gather", {**GATHER.parameters, "more": Scalar(np.int64)})
    where = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="gather"):
        runtime().load(SOURCE, device).launch(
            wrong, grid=1, block=32, table=table, where=where, out=out, count=1, more=1
        )


# ---- A caller captures `push` in a CUDA graph of his own, and gets with replays what he gets without
V, T, CHUNK, BATCH = 200, 96, 8, 12
LENGTHS = [96, 0, 1, 8, 9, 95, 50, 40, 30, 20, 10, 64]


class Captured:
    """Streams with room for T frames, the inputs of a push of CHUNK frames, and its graph."""

    def __init__(self, decoder, device, dtype=torch.float32):
        self.chunk = torch.zeros(BATCH, CHUNK, V + 1, dtype=dtype, device=device)
        self.lengths = torch.zeros(BATCH, dtype=torch.int64, device=device)
        decoder.push(decoder.open(BATCH), self.chunk, self.lengths)  # kernels are compiled and loaded
        self.streams = decoder.open(BATCH, capacity=T, device=device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            decoder.push(self.streams, self.chunk, self.lengths)

    def replay(self, log_probs, begin):
        """Without a wait: the inputs of the next replay are copied behind this one."""
        self.chunk.copy_(log_probs[:, begin : begin + CHUNK])
        self.lengths.copy_((torch.tensor(LENGTHS) - begin).clamp(0, CHUNK))
        self.graph.replay()


@pytest.fixture
def log_probs(gpu):
    return random_log_probs(BATCH, T, V + 1, seed=1).to(gpu)


def decoder_of(merge="max", make=on_cuda):
    return make(V, V, random_fusion(V), beam_size=16, n_best=4, merge=merge)


@pytest.mark.parametrize("merge", ["max", "sum", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replays_decode_chunk_by_chunk(gpu, log_probs, merge, dtype):
    log_probs = log_probs.to(dtype)
    decoder = decoder_of(merge)
    captured = Captured(decoder, gpu, dtype)
    for begin in range(0, T, CHUNK):
        captured.replay(log_probs, begin)
    expected = decoder_of(merge, on_cpu).decode(log_probs, LENGTHS)
    assert all_facts(decoder.close(captured.streams)) == all_facts(expected)


def test_refused_capture_changes_nothing(gpu, log_probs):
    decoder = decoder_of()
    expected = all_facts(decoder.decode(log_probs, LENGTHS))
    streams = decoder.open(BATCH, capacity=T, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="lengths came from the host while a CUDA graph is captured"),
        torch.cuda.graph(graph),
    ):
        decoder.push(streams, log_probs, LENGTHS)
    torch.cuda.synchronize()
    assert all_facts(decoder.decode(log_probs, LENGTHS)) == expected


# -------------------------- What a first use costs on a machine, and the first use in a later process
FIRST_EVER, LATER = 3.0, 0.05  # seconds that issue 3 allows


def test_kernels_compile_once_and_load_at_once(gpu):
    seconds = probe_process("start", BenchOptions(device=str(gpu), tasks=["hard"], beams=[4]))
    print(seconds)
    assert seconds["first_ever"]["first_decode"] < FIRST_EVER, seconds
    assert seconds["later"]["first_decode"] < LATER, seconds


def test_every_step_is_measured(device):
    seconds = measure_start(BenchOptions(device=str(device), tasks=["hard"], beams=[4]))
    on_gpu = ["context", "libraries"] if device.type == "cuda" else []
    assert list(seconds) == ["import", "load", *on_gpu, "first_decode", "next_decode"]
    assert min(seconds.values()) >= 0
