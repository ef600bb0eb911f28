"""Every primitive of common.cuh against numpy, under random schedules and the race checker."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda import nvrtc
from nemo_gpu_decoding.cuda.compile import Architecture, compiler_options
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, as_records
from tests.cuda.marks import needs_nvrtc
from tests.cuda_emulator.build import PACKAGE

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.cuda_emulator.fixtures"]
SOURCE = str(Path(__file__).with_name("common_primitives.cu"))
CPU = torch.device("cpu")
BLOCKS = [32, 64, 96, 128, 256]
PLAIN_AND_CHECKED = pytest.mark.parametrize(
    "emulated_runtime", [{}, {"check": True}], indirect=True, ids=["plain", "checked"]
)
CHECKED = pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])
RECORD = np.dtype([("score", np.float32), ("parent", np.int32), ("label", np.int32)], align=True)


def ints(*axes):
    return Tensor(torch.int32, axes)


def floats(*axes):
    return Tensor(torch.float32, axes)


def number(dtype=np.int32):
    return Scalar(dtype)


def launch(runtime, name, parameters, *, block, grid=1, shared_bytes=0, **arguments):
    module = runtime.load(SOURCE, CPU)
    module.launch(Signature(name, parameters), grid=grid, block=block, shared_bytes=shared_bytes, **arguments)


def test_floats_are_rounded_as_torch_rounds_them(emulated_runtime):
    """All halves and bfloat16s, what lies half-way between neighbours and just beside that, and random numbers."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits.view(kind).float() for kind in (torch.float16, torch.bfloat16)])
    half_way = [(values.view(torch.int32) + step).view(torch.float32) for step in (0xFFF, 0x1000, 0x1001, 0x8000)]
    random = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = torch.cat([values, *half_way, random, torch.tensor([65519.9, 65520.0, 2.0**-25, 2.0**-24, 3.4e38])])
    half, brain = (torch.zeros(len(x), dtype=kind) for kind in (torch.float16, torch.bfloat16))
    parameters = {
        "x": floats("N"),
        "half": Tensor(torch.float16, ("N",), written=True),
        "brain": Tensor(torch.bfloat16, ("N",), written=True),
        "count": number(),
    }
    launch(emulated_runtime, "rounded", parameters, block=128, grid=16, x=x, half=half, brain=brain, count=len(x))
    for found in (half, brain):
        torch.testing.assert_close(found, x.to(found.dtype), rtol=0, atol=0, equal_nan=True)


def test_every_half_and_bfloat16_becomes_the_float_it_stands_for(emulated_runtime):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    half, brain = bits.view(torch.float16), bits.view(torch.bfloat16)
    from_half, from_brain = torch.zeros(2**16), torch.zeros(2**16)
    launch(
        emulated_runtime,
        "half_to_float",
        {
            "half": Tensor(torch.float16, ("N",)),
            "brain": Tensor(torch.bfloat16, ("N",)),
            "from_half": floats("N"),
            "from_brain": floats("N"),
            "count": number(),
        },
        block=128,
        grid=4,
        half=half,
        brain=brain,
        from_half=from_half,
        from_brain=from_brain,
        count=2**16,
    )
    for got, expected in ((from_half, half.float()), (from_brain, brain.float())):
        nan = expected.isnan()
        assert (got.isnan() == nan).all()
        assert (got.view(torch.int32) == expected.view(torch.int32))[~nan].all()


def test_keys_of_floats_sort_as_the_floats(emulated_runtime):
    x = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], np.float32([0, -0.0, np.inf, -np.inf, 1e-45, -1e-45])])
    keys, back = torch.zeros(len(x), dtype=torch.int32), torch.zeros(len(x))
    parameters = {"x": floats("N"), "keys": ints("N"), "back": floats("N"), "count": number()}
    launch(
        emulated_runtime, "keys_of_floats", parameters, block=64, x=torch.from_numpy(x), keys=keys,
        back=back, count=len(x),
    )  # fmt: skip
    assert (np.diff(x[np.argsort(keys.numpy().view(np.uint32))]) >= 0).all()
    assert (back.numpy().view(np.uint32) == x.view(np.uint32)).all()


@PLAIN_AND_CHECKED
@pytest.mark.parametrize("block", BLOCKS)
def test_reductions_and_scans(emulated_runtime, block):
    grid, random = 3, np.random.default_rng(block)
    x = random.integers(-100, 100, (grid, block), np.int32)
    size = (grid, block)
    sums, extremes = torch.zeros(*size, 2, dtype=torch.int32), torch.zeros(*size, 2)
    before, totals = torch.zeros(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
    two = ("B", "T", 2)
    launch(
        emulated_runtime,
        "reductions",
        {
            "x": ints("B", "T"),
            "sums": ints(*two),
            "before": ints("B", "T"),
            "totals": ints("B", "T"),
            "extremes": floats(*two),
        },
        block=block,
        grid=grid,
        x=torch.from_numpy(x),
        sums=sums,
        before=before,
        totals=totals,
        extremes=extremes,
    )
    assert (before.numpy() == np.cumsum(x, 1) - x).all()
    assert (totals.numpy() == x.sum(1, keepdims=True)).all()
    assert (sums[..., 0].numpy() == x.sum(1, keepdims=True)).all()
    assert (sums[..., 1].numpy().reshape(-1, 32) == np.cumsum(x.reshape(-1, 32), 1)).all()
    assert (extremes[..., 0].numpy() == x.max(1, keepdims=True)).all()
    assert (extremes[..., 1].numpy() == x.min(1, keepdims=True)).all()


@PLAIN_AND_CHECKED
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("n", [1, 31, 300])
@pytest.mark.parametrize("floor", [-9.0, 0.0, 1.0, 9.0])
def test_appending_keeps_what_passes_and_counts_all(emulated_runtime, block, n, floor):
    x = torch.from_numpy(np.random.default_rng(n).normal(size=n).astype(np.float32))
    capacity = 100
    kept, count = torch.full((capacity,), torch.nan), torch.zeros(1, dtype=torch.int32)
    launch(
        emulated_runtime,
        "compaction",
        {
            "x": floats("N"),
            "n": number(),
            "floor": number(np.float32),
            "kept": floats("C"),
            "capacity": number(),
            "count": ints(1),
        },
        block=block, x=x, n=n, floor=floor, kept=kept, capacity=capacity, count=count,
    )  # fmt: skip
    expected = x[x > floor].tolist()
    assert count.item() == len(expected)
    got = kept[~kept.isnan()].tolist()
    assert len(got) == min(len(expected), capacity)
    assert set(got) <= set(expected)
    assert len(set(got)) == len(got)


def sorted_by_kernel(runtime, keys, block):
    keys = torch.from_numpy(keys.view(np.int64).copy())
    parameters = {"keys": Tensor(torch.int64, ("B", "N")), "count": number()}
    n = keys.shape[1]
    launch(runtime, "sort_keys", parameters, block=block, grid=len(keys), shared_bytes=8 * n, keys=keys, count=n)
    return keys.numpy().view(np.uint64)


COUNTS = [1, 2, 3, 31, 33, 64, 65, 100, 128, 200, 257, 700, 1024, 2048]
COUNTED = pytest.mark.parametrize(
    ("emulated_runtime", "count"),
    [*(({}, n) for n in COUNTS), *(({"check": True}, n) for n in (1, 33, 64, 65, 200, 520))],
    indirect=["emulated_runtime"],
)


@pytest.mark.parametrize("block", BLOCKS)
@COUNTED
def test_sorting_in_place(emulated_runtime, block, count):
    random = np.random.default_rng(count)
    for most in (2**64 - 1, 5):  # few and many equal keys
        keys = random.integers(0, most, (2, count), np.uint64)
        assert (sorted_by_kernel(emulated_runtime, keys, block) == -np.sort(-keys.astype(object), 1)).all()


def random_records(random, blocks, count):
    """Scores with many ties, and no two records equal."""
    numbers = np.stack([random.permutation(count) for _ in range(blocks)])
    records = np.zeros((blocks, count), RECORD)
    records["score"] = random.integers(-3, 3, (blocks, count)) / 4
    records["score"][random.random((blocks, count)) < 0.1] = -np.inf
    records["parent"] = numbers % 4
    records["label"] = numbers // 4
    return records


@pytest.mark.parametrize("block", BLOCKS)
@COUNTED
def test_ordering_records_by_a_comparator(emulated_runtime, block, count):
    records = random_records(np.random.default_rng(count), 2, count)
    order = torch.full((2, count), -1, dtype=torch.int32)
    parameters = {"records": Tensor(RECORD, ("B", "N")), "count": number(), "order": ints("B", "N")}
    launch(
        emulated_runtime, "order_records", parameters, block=block, grid=2,
        shared_bytes=count * (RECORD.itemsize + 2), records=as_records(records), count=count,
        order=order,
    )  # fmt: skip
    expected = np.stack([np.lexsort((row["label"], row["parent"], -row["score"])) for row in records])
    assert (order.numpy() == expected).all()


@PLAIN_AND_CHECKED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 7, 8, 33, 129])
@pytest.mark.parametrize("skip", [0, 1, 5])
def test_rows_fetched_ahead_arrive_whole(emulated_runtime, dtype, columns, skip):
    """`skip` numbers before the first row: rows start at any alignment, and nothing outside is read."""
    rows = 9
    x = torch.randint(-8, 9, (skip + rows * columns,)).to(dtype)[skip:].view(rows, columns)
    first, sums = torch.zeros(rows), torch.zeros(rows)
    kernel = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16"}[dtype]
    parameters = {"x": Tensor(dtype, ("R", "C")), "rows": number(), "columns": number()}
    parameters |= {"first": floats("R"), "sums": floats("R")}
    buffer_bytes = (columns * dtype.itemsize + 15) // 16 * 16 + 16
    launch(
        emulated_runtime, f"row_sums_{kernel}", parameters, block=32, shared_bytes=2 * buffer_bytes,
        x=x, rows=rows, columns=columns, first=first, sums=sums,
    )  # fmt: skip
    assert (first == x[:, 0].float()).all()
    assert (sums == x.float().sum(1)).all()


@needs_nvrtc
@pytest.mark.parametrize("arch", [75, 80, 90], ids="sm_{}".format)
def test_nvrtc_compiles_every_primitive(arch):
    """sm_75 has no asynchronous copies: rows are copied by plain loads there."""
    if arch not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not compile for sm_{arch}")
    headers = {"cuda/common.cuh": (PACKAGE / "cuda" / "common.cuh").read_text()}
    text = Path(SOURCE).read_text()
    compiled = nvrtc.compile_program("common_primitives.cu", text, headers, compiler_options(Architecture(arch)))
    assert len(compiled.code) > 0
    assert "warning" not in compiled.log
