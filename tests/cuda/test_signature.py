"""What a launch refuses before any pointer reaches a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, as_records, checked_arguments

CPU = torch.device("cpu")
ARC = np.dtype([("label", np.int32), ("weight", np.float32), ("target", np.int64)])
SEARCH = Signature(
    "search",
    {
        "log_probs": Tensor(torch.float32, ("B", "T", "V")),
        "lengths": Tensor(torch.int64, ("B",)),
        "arcs": Tensor(ARC, ("A",), optional=True),
        "pair": Tensor(np.dtype(np.int32), (2,)),
        "beam": Scalar(np.int32),
        "bonus": Scalar(np.float32),
    },
)


def arguments(**changes):
    given = {
        "log_probs": torch.zeros(3, 5, 7),
        "lengths": torch.zeros(3, dtype=torch.int64),
        "arcs": as_records(np.zeros(4, ARC)),
        "pair": torch.zeros(2, dtype=torch.int32),
        "beam": 8,
        "bonus": 0.1,
    }
    return {**given, **changes}


def refusal(**changes):
    with pytest.raises(ValueError, match="kernel search") as caught:
        checked_arguments(SEARCH, CPU, arguments(**changes))
    return str(caught.value)


def test_arguments_come_in_the_kernels_order_as_numpy_scalars():
    given = arguments()
    values = checked_arguments(SEARCH, CPU, dict(reversed(given.items())))
    assert [type(value) for value in values] == [np.uint64] * 4 + [np.int32, np.float32]
    assert int(values[0]) == given["log_probs"].data_ptr()
    assert values[4:] == [8, np.float32(0.1)]


def test_none_becomes_a_null_pointer_where_that_is_allowed():
    assert checked_arguments(SEARCH, CPU, arguments(arcs=None))[2] == 0
    assert "argument lengths: is a NoneType" in refusal(lengths=None)


def test_missing_and_unknown_arguments_are_named():
    given = arguments(bean=3)
    del given["beam"]
    with pytest.raises(ValueError, match=r"missing arguments \['beam'\], unknown arguments \['bean'\]"):
        checked_arguments(SEARCH, CPU, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [1.0]}, "argument log_probs: is a list, expected a torch.Tensor"),
        (
            {"log_probs": torch.zeros(3, 5, 7).double()},
            "has dtype torch.float64, expected torch.float32",
        ),
        ({"lengths": torch.zeros(4, dtype=torch.int64)}, r"(4,), expected [B = 3 as in log_probs]"),
        ({"log_probs": torch.zeros(3, 5)}, "has shape (3, 5), expected [B, T, V]"),
        ({"pair": torch.zeros(3, dtype=torch.int32)}, "has shape (3,), expected [2]"),
        ({"log_probs": torch.zeros(3, 7, 5).mT}, "is not contiguous"),
        ({"log_probs": torch.zeros(3, 5, 7, device="meta")}, "is on meta, expected cpu"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    assert message in refusal(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arcs": torch.zeros(4, 15, dtype=torch.uint8)}, "the 16 bytes of a record"),
        ({"arcs": torch.zeros(17, dtype=torch.uint8)}, "the 16 bytes of a record"),
        ({"arcs": torch.zeros(4, 4)}, "has dtype torch.float32, expected torch.uint8"),
        ({"arcs": torch.zeros(65, dtype=torch.uint8)[1:]}, "expected a multiple of 8"),
    ],
)
def test_records_that_do_not_fit(change, message):
    assert message in refusal(**change)


def test_records_may_come_as_flat_bytes():
    flat = as_records(np.zeros(4, ARC)).flatten()
    assert int(checked_arguments(SEARCH, CPU, arguments(arcs=flat))[2]) == flat.data_ptr()


def test_as_records_keeps_every_byte():
    records = np.zeros((2, 3), ARC)
    records["label"] = np.arange(6).reshape(2, 3)
    records.setflags(write=False)
    tensor = as_records(records)
    assert tensor.shape == (2, 3, 16)
    assert (tensor.numpy().view(ARC)[..., 0] == records).all()


@pytest.mark.parametrize(
    ("dtype", "value", "seen"),
    [
        (np.int32, 2**31 - 1, 2**31 - 1),
        (np.int32, 3.0, 3),
        (np.int32, np.int64(5), 5),
        (np.int32, True, 1),
        (np.bool_, False, False),
        (np.uint64, 2**64 - 1, 2**64 - 1),
        (np.float32, 0.1, np.float32(0.1)),
        (np.float32, 7, 7.0),
        (np.float32, float("-inf"), -np.inf),
        (np.float64, np.float32(0.5), 0.5),
    ],
)
def test_numbers_are_converted(dtype, value, seen):
    signature = Signature("k", {"x": Scalar(dtype)})
    (number,) = checked_arguments(signature, CPU, {"x": value})
    assert type(number) is dtype
    assert number == seen


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (np.int32, 2**31, "expected an integer in -2147483648 .. 2147483647"),
        (np.uint32, -1, "expected an integer in 0 .. 4294967295"),
        (np.int32, 2.5, "expected an integer"),
        (np.int32, float("nan"), "expected an integer"),
        (np.bool_, 2, "expected an integer in 0 .. 1"),
        (np.float32, 2**24 + 1, "cannot hold exactly"),
        (np.float32, 1e39, "out of the range of float32"),
        (np.float16, 70000, "cannot hold exactly"),
        (np.float32, "1", "is a str, expected a number"),
        (np.int32, torch.tensor(1), "is a Tensor, expected a number"),
    ],
)
def test_numbers_that_do_not_fit(dtype, value, message):
    with pytest.raises(ValueError, match="kernel k, argument x") as caught:
        checked_arguments(Signature("k", {"x": Scalar(dtype)}), CPU, {"x": value})
    assert message in str(caught.value)


def test_pinned_tables_lie_on_the_host():
    signature = Signature("k", {"table": Tensor(torch.uint8, ("N",), pinned=True)})
    table = torch.zeros(8, dtype=torch.uint8)
    assert int(checked_arguments(signature, CPU, {"table": table})[0]) == table.data_ptr()
    with pytest.raises(ValueError, match="is pageable host memory, expected pinned"):
        checked_arguments(signature, torch.device("cuda", 0), {"table": table})
    with pytest.raises(ValueError, match="is on meta, expected pinned host memory"):
        checked_arguments(signature, CPU, {"table": table.to("meta")})


def test_a_signature_may_not_use_the_launchs_own_names():
    with pytest.raises(ValueError, match="may not be called block, grid"):
        Signature("k", {"grid": Scalar(np.int32), "block": Scalar(np.int32)})


def test_a_scalar_is_a_number():
    with pytest.raises(ValueError, match="a Scalar is of type complex64, expected"):
        Scalar(np.complex64)
