"""Records and kernel arguments as C++ structs: the same layout in both languages."""

import importlib
import re
import shutil
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.compile import PACKAGE, kernel_files, read_source
from nemo_gpu_decoding.cuda.driver import CudaRuntime
from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor, as_records, runtime, use_runtime
from nemo_gpu_decoding.cuda.records import dtype_of, header_of, struct_name
from nemo_gpu_decoding.cuda.signature import MOST_FORMS, checked_arguments
from tests.cuda_emulator.emulator import EmulatedRuntime

PRINTED = re.compile(r"^// Printed from (\S+)\.$", re.MULTILINE)


class Options(NamedTuple):
    width: int
    scale: np.float32
    exact: bool


POINT = np.dtype([("x", np.int16), ("y", np.float64), ("tags", np.uint8, 3)], align=True)
OPTIONS = dtype_of(Options)
WIDE = np.dtype([("pair", POINT), ("rest", np.int32, (2, 2))], align=True)
QUAD = np.dtype([("a", np.int32, 4)], metadata={"align": 16})
MOVE = Signature(
    "move",
    {
        "points": Tensor(POINT, ("N",), written=True),
        "inputs": Tensor((torch.float32, torch.float16), ("N", 3)),
        "options": Scalar(OPTIONS),
        "count": Scalar(np.int32),
    },
)
NOT_A_RECORD = np.dtype(np.int32)
NO_POINT: Final = -1
ON_THE_HOST = 7


def module_of(source: str) -> str:
    name = f"records_{abs(hash(source))}"
    module = ModuleType(name)
    module.__dict__["__file__"] = name
    exec(source, module.__dict__)
    sys.modules[name] = module
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


def test_header_has_structs_arguments_and_constants():
    text = header_of(__name__)
    assert "struct Point {\n  short x;\n  double y;\n  uint8 tags[3];\n};" in text
    assert "struct Options {\n  int width;\n  float scale;\n  bool exact;\n};" in text
    assert "  Point pair;\n  int rest[2][2];" in text
    assert "struct __align__(16) Quad {" in text
    assert (
        "struct MoveArgs {\n  Point* points;  // [N]\n  const LogProb* inputs;  // [N, 3]\n"
        "  Options options;\n  int count;\n};"
    ) in text
    assert "NotARecord" not in text
    assert "constexpr int NO_POINT = -1;" in text
    assert "ON_THE_HOST" not in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('[("a", np.int8), ("b", np.int32)]', "BAD.b is at byte 1, expected 4"),
        ('[("a", np.int64), ("b", np.int32)]', "BAD takes 12 bytes, expected 16"),
    ],
)
def test_record_with_another_layout_in_cpp_is_refused(fields, message):
    name = module_of(f"import numpy as np\n\nBAD = np.dtype({fields})\n")
    with pytest.raises(ValueError, match=message):
        header_of(name)


def printed_modules() -> list[str]:
    """All modules whose records kernels include."""
    found = set()
    for name in kernel_files():
        for text in read_source(name).headers.values():
            found |= set(PRINTED.findall(text))
    return sorted(found)


def test_no_struct_of_cuda_repeats_a_record_by_hand():
    printed = {
        struct
        for module in printed_modules()
        for struct in re.findall(r"^struct (?:__align__\(16\) )?(\w+) \{", header_of(module), re.M)
    }
    assert len(printed) > 30
    for path in [*PACKAGE.rglob("*.cuh"), *PACKAGE.rglob("*.cu")]:
        text = path.read_text()
        assert not re.search(r"static_assert\(sizeof\(\w+\) ==", text), path
        assert not set(re.findall(r"^struct (\w+)[ :{]", text, re.M)) & printed, path


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_compiler_puts_every_field_where_numpy_does(tmp_path):
    modules = [__name__, *printed_modules()]
    assert len(modules) > 2
    for number, name in enumerate(modules):
        module, lines = importlib.import_module(name), []
        for constant, value in list(vars(module).items()):
            is_own = re.search(rf"^struct (__align__\(16\) )?{struct_name(constant)} ", header_of(name), re.M)
            if isinstance(value, np.dtype) and value.fields and is_own:
                struct = struct_name(constant)
                lines.append(f'static_assert(sizeof({struct}) == {value.itemsize}, "{struct}");')
                lines += [
                    f'static_assert(offsetof({struct}, {field}) == {offset}, "{struct}.{field}");'
                    for field, (_, offset, *_) in value.fields.items()
                ]
            if isinstance(value, Signature):
                struct = f"{struct_name(constant)}Args"
                lines.append(f'static_assert(sizeof({struct}) == {value.struct.itemsize}, "{struct}");')
        assert lines
        path = "/".join(name.split(".")[1:]) if name.startswith(PACKAGE.name) else None
        source = tmp_path / f"layout{number}.cu"
        include = f'#include "{path}.cuh"' if path else header_of(name).replace("#pragma once", "")
        source.write_text("\n".join(["#include <stddef.h>", include, *lines]))
        EmulatedRuntime(cache=tmp_path).load(str(source), torch.device("cpu"))


def test_arguments_are_packed_as_the_struct_says():
    struct, addresses = MOVE.packed([1, 2, Options(3, 0.5, True), np.int32(4)])
    assert struct.item() == (1, 2, (3, 0.5, True), 4)
    assert list(addresses) == [struct.ctypes.data]
    assert struct.tobytes()[25:28] == bytes(3)  # padding


# ------------------------------------------ What a launch refuses before any pointer reaches a kernel
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


def test_arguments_come_in_the_order_of_the_kernel():
    given = arguments()
    values = checked_arguments(SEARCH, CPU, dict(reversed(given.items())))
    assert [type(value) for value in values] == [int] * 4 + [np.int32, np.float32]
    assert int(values[0]) == given["log_probs"].data_ptr()
    assert values[4:] == [8, np.float32(0.1)]


def test_changed_arguments_of_a_later_launch_are_checked_again():
    same = arguments()
    addresses = checked_arguments(SEARCH, CPU, same)[:4]
    assert checked_arguments(SEARCH, CPU, same)[:4] == addresses
    bytes_ = torch.zeros(64 * 4, dtype=torch.uint8)
    start = 1 + -bytes_.data_ptr() % 16
    odd = bytes_[start : start + 4 * ARC.itemsize].view(4, ARC.itemsize)  # of the same form
    for change, message in (
        ({"lengths": torch.zeros(4, dtype=torch.int64)}, "argument lengths: has shape (4,)"),
        ({"log_probs": torch.zeros(3, 7, 5).transpose(1, 2)}, "argument log_probs: is not contiguous"),
        ({"arcs": odd}, "argument arcs: starts at address"),
        ({"beam": 2**31}, "argument beam"),
        ({"lengths": None}, "argument lengths: is a NoneType"),
    ):
        assert message in refusal(**{**same, **change})
    assert checked_arguments(SEARCH, CPU, {**same, "arcs": None})[:4] == [*addresses[:2], 0, addresses[3]]
    checked_arguments(SEARCH, CPU, same)
    same["arcs"] = None  # the tensor is gone, and so is the object of its reference
    assert checked_arguments(SEARCH, CPU, same)[2] == 0
    with pytest.raises(ValueError, match="expected cuda:0"):
        checked_arguments(SEARCH, torch.device("cuda", 0), same)
    same["log_probs"].resize_(4, 5, 70)  # another place in memory
    assert "argument lengths: has shape (3,), expected [B = 4 as in log_probs]" in refusal(**same)


def test_launches_keep_no_tensor_alive_and_signatures_few_forms():
    given = arguments()
    checked_arguments(SEARCH, CPU, given)
    kept = weakref.ref(given.pop("log_probs"))
    assert kept() is None
    signature = Signature("k", {"x": Tensor(torch.float32, ("N",))})
    for n in range(3 * MOST_FORMS):
        checked_arguments(signature, CPU, {"x": torch.zeros(n)})
    assert len(signature.checked_forms) <= MOST_FORMS


def test_missing_and_unknown_arguments_are_named():
    given = arguments(bean=3)
    del given["beam"]
    with pytest.raises(ValueError, match=r"missing arguments \['beam'\], unknown arguments \['bean'\]"):
        checked_arguments(SEARCH, CPU, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [1.0]}, "argument log_probs: is a list, expected a torch.Tensor"),
        ({"log_probs": torch.zeros(3, 5, 7).double()}, "has dtype torch.float64, expected torch.float32"),
        ({"lengths": torch.zeros(4, dtype=torch.int64)}, r"(4,), expected [B = 3 as in log_probs]"),
        ({"log_probs": torch.zeros(3, 5)}, "has shape (3, 5), expected [B, T, V]"),
        ({"pair": torch.zeros(3, dtype=torch.int32)}, "has shape (3,), expected [2]"),
        ({"log_probs": torch.zeros(3, 7, 5).mT}, "is not contiguous"),
        ({"log_probs": torch.zeros(3, 5, 7, device="meta")}, "is on meta, expected cpu"),
        ({"arcs": torch.zeros(4, 15, dtype=torch.uint8)}, "the 16 bytes of a record"),
        ({"arcs": torch.zeros(17, dtype=torch.uint8)}, "the 16 bytes of a record"),
        ({"arcs": torch.zeros(4, 4)}, "has dtype torch.float32, expected torch.uint8"),
        ({"arcs": torch.zeros(65, dtype=torch.uint8)[1:]}, "expected a multiple of 8"),
    ],
)
def test_tensor_that_does_not_fit_is_refused(change, message):
    assert message in refusal(**change)


def test_records_keep_every_byte_and_may_come_as_flat_bytes():
    records = np.zeros((2, 3), ARC)
    records["label"] = np.arange(6).reshape(2, 3)
    records.setflags(write=False)
    tensor = as_records(records)
    assert tensor.shape == (2, 3, 16)
    assert (tensor.numpy().view(ARC)[..., 0] == records).all()
    flat = as_records(np.zeros(4, ARC)).flatten()
    assert int(checked_arguments(SEARCH, CPU, arguments(arcs=flat))[2]) == flat.data_ptr()


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
def test_numbers_are_converted_to_the_type_of_the_parameter(dtype, value, seen):
    (number,) = checked_arguments(Signature("k", {"x": Scalar(dtype)}), CPU, {"x": value})
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
        (np.float32, 2**24 + 1, "which float32 cannot hold"),
        (np.float32, 1e39, "which float32 cannot hold"),
        (np.float16, 70000, "which float16 cannot hold"),
        (np.float32, "1", "is a str, expected a number"),
        (np.int32, torch.tensor(1), "is a Tensor, expected a number"),
    ],
)
def test_number_that_does_not_fit_is_refused(dtype, value, message):
    with pytest.raises(ValueError, match="kernel k, argument x") as caught:
        checked_arguments(Signature("k", {"x": Scalar(dtype)}), CPU, {"x": value})
    assert message in str(caught.value)


def test_pinned_parameter_takes_pinned_host_memory_alone():
    signature = Signature("k", {"table": Tensor(torch.uint8, ("N",), pinned=True)})
    table = torch.zeros(8, dtype=torch.uint8)
    assert int(checked_arguments(signature, CPU, {"table": table})[0]) == table.data_ptr()
    with pytest.raises(ValueError, match="is pageable host memory, expected pinned"):
        checked_arguments(signature, torch.device("cuda", 0), {"table": table})
    with pytest.raises(ValueError, match="is on meta, expected pinned host memory"):
        checked_arguments(signature, CPU, {"table": table.to("meta")})


def test_signature_with_reserved_names_or_types_is_refused():
    with pytest.raises(ValueError, match="may not be called block, grid"):
        Signature("k", {"grid": Scalar(np.int32), "block": Scalar(np.int32)})
    with pytest.raises(ValueError, match="a Scalar is of type complex64, expected"):
        Scalar(np.complex64)


# ---------------------------------------------------------------------------- Which runtime is in use
def test_runtime_comes_back_after_an_exception():
    assert isinstance(runtime(), CudaRuntime)
    assert runtime() is runtime()
    before = runtime()
    with pytest.raises(KeyError), use_runtime(CudaRuntime()):
        raise KeyError
    assert runtime() is before


def seen_by_another_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(runtime).result()


def test_replaced_runtime_serves_all_threads_until_its_block_ends():
    outer, inner, before = CudaRuntime(), CudaRuntime(), runtime()
    with use_runtime(outer):
        with use_runtime(inner):
            assert runtime() is inner
            assert seen_by_another_thread() is inner
        assert seen_by_another_thread() is outer
    assert runtime() is before
