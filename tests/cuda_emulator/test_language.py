"""Each feature of CUDA C++ that kernels may use gives what the programming guide says."""

import numpy as np
import pytest
import torch

from tests.cuda_emulator.emulator import EmulatorError
from tests.cuda_emulator.kernels import launch

PLAIN_AND_CHECKED = pytest.mark.parametrize(
    "emulated_runtime", [{}, {"check": True}], indirect=True, ids=["plain", "checked"]
)
pytestmark = [pytest.mark.slow, PLAIN_AND_CHECKED]
POINT = np.dtype([("x", np.float32), ("id", np.int32)])


def rows_of(runtime, kernel, values, columns):
    """What every thread of a block writes, [threads, columns]."""
    out = torch.zeros(len(values), columns, dtype=values.dtype)
    launch(runtime, "language.cu", kernel, block=len(values), values=values, out=out)
    return out.numpy()


def test_warp_operations_have_the_results_of_cuda(emulated_runtime):
    v = torch.randint(-3, 4, (64,), dtype=torch.int32)
    rows = rows_of(emulated_runtime, "warp_operations", v, 20)
    for start in (0, 32):
        w, got, lane = v[start : start + 32].numpy(), rows[start : start + 32].T, np.arange(32)
        half = np.stack([w[:16]] * 16 + [w[16:]] * 16)

        def bits(lanes):
            return np.array([sum(1 << int(i) for i in np.flatnonzero(row)) for row in np.atleast_2d(lanes)])

        same = bits(w[:, None] == w[None]).astype(np.uint32).view(np.int32)
        expected = [
            np.full(32, w[5]),
            w[lane // 8 * 8 + 3],
            w[np.where(lane < 3, lane, lane - 3)],
            w[np.where(lane % 16 + 3 > 15, lane, lane + 3)],
            w[lane ^ 7],
            np.full(32, w[31]),
            np.full(32, bits(w > 0).astype(np.uint32).view(np.int32)),
            np.full(32, 1 if (w == v[0].item()).any() else 0),
            np.full(32, 1 if (w == v[0].item()).all() else 0),
            same,
            np.zeros(32),
            np.full(32, w.sum()),
            np.full(32, w.min()),
            np.full(32, w.max()),
            np.full(32, np.bitwise_xor.reduce(w)),
            half.sum(1),
            (half > 0).sum(1),
            np.ones(32),
        ]
        for row, want in enumerate(expected):
            assert (got[row] == want).all(), row


def test_votes_of_a_block_have_the_results_of_cuda(emulated_runtime):
    for v in (torch.arange(96), torch.arange(96) % 5, torch.ones(96)):
        v = v.to(torch.int32)
        rows = rows_of(emulated_runtime, "votes", v, 3)
        assert (rows == [bool((v > 0).all()), bool((v > 5).any()), int((v > 0).sum())]).all()


def test_bit_intrinsics_have_the_results_of_cuda(emulated_runtime):
    v = np.concatenate([[0, 1, -1, 2**31 - 1, -(2**31)], np.random.default_rng(0).integers(-(2**31), 2**31, 59)])
    v = v.astype(np.int32)
    rows = rows_of(emulated_runtime, "bits", torch.from_numpy(v), 12).view(np.uint32)
    for value, row in zip(v.tolist(), rows.tolist(), strict=True):
        u = value % 2**32
        lowest = (u & -u).bit_length()
        expected = [
            u.bit_count(),
            lowest,
            32 - u.bit_length(),
            int(f"{u:032b}"[::-1], 2),
            ((value << 7) % 2**64).bit_count(),
            lowest + 30 if u else 0,
            64 - u.bit_length(),
            u * 0x9E3779B9 >> 32,
            u,
            u,
            int(np.isnan(np.uint32(u).view(np.float32))),
            (min(value, 7) + max(value, -7)) % 2**32,
        ]
        assert row == expected, value


def test_float_functions_have_the_results_of_cuda(emulated_runtime):
    v = torch.tensor([0.1, -2.5, 0.5, torch.inf, -torch.inf, torch.nan, -0.0, 1e30] * 4)
    rows = rows_of(emulated_runtime, "numbers", v, 8)
    x = v.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.stack(
            [
                np.fmax(x, np.float32(0.5)),  # of a number and a NaN, the number
                np.fmin(x, np.float32(0.5)),
                np.fmax(x, np.float32(0.5)),
                np.isinf(x),
                np.abs(x),
                np.floor(x),
                np.log1p(np.exp(-np.abs(x.astype(np.float64)))).astype(np.float32),
                x * np.float32(3) + np.float32(0.1),
            ],
            1,
        )
    np.testing.assert_array_equal(rows, expected.astype(np.float32))


@pytest.mark.parametrize(("kernel", "dtype"), [("int", torch.int32), ("long", torch.int64), ("float", torch.float32)])
def test_atomics_have_the_results_of_cuda(emulated_runtime, kernel, dtype):
    v = torch.randint(-50, 50, (64,)).to(dtype)
    out = torch.tensor([0, 0, 99, -99, 5, 5]).to(dtype)
    launch(emulated_runtime, "language.cu", f"atomics_on_{kernel}", v=v, out=out)
    assert out.tolist() == [v.sum(), -v.sum(), v.min(), v.max(), v[7], 5 + v[9]]


def test_atomics_on_bits_have_the_results_of_cuda(emulated_runtime):
    v = torch.randint(0, 2**31, (64,), dtype=torch.int32)
    out = torch.tensor([-1, 0, 0, 0, 0], dtype=torch.int32)
    launch(emulated_runtime, "language.cu", "bit_atomics", v=v, out=out)
    x = v.numpy()
    fold = [np.bitwise_and, np.bitwise_or, np.bitwise_xor]
    # 64 times +1 modulo 10; 64 times -1 modulo 10 from 0
    assert out.tolist() == [*(int(f.reduce(x)) for f in fold), 4, 6]


def test_a_failed_assertion_fails_the_launch(emulated_runtime):
    launch(emulated_runtime, "language.cu", "asserts", v=torch.zeros(64, dtype=torch.int32))
    with pytest.raises(EmulatorError, match=r"asserts: block 0 thread \d+: assert\(in\[threadIdx.x\] >= 0\)"):
        launch(emulated_runtime, "language.cu", "asserts", v=-torch.ones(64, dtype=torch.int32))
