"""Records and kernel arguments as C++ structs: the same layout in both languages."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.cuda.launch import Scalar, Signature, Tensor
from nemo_gpu_decoding.cuda.records import dtype_of, header_of, struct_name
from nemo_gpu_decoding.cuda.sources import PACKAGE, kernel_files, read_source
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


def module_of(source: str) -> str:
    """A module with this text, to be printed."""
    name = f"records_{abs(hash(source))}"
    module = ModuleType(name)
    module.__dict__["__file__"] = name
    exec(source, module.__dict__)
    sys.modules[name] = module
    import linecache

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


def test_the_header_of_this_module():
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('[("a", np.int8), ("b", np.int32)]', "BAD.b is at byte 1, expected 4"),
        ('[("a", np.int64), ("b", np.int32)]', "BAD takes 12 bytes, expected 16"),
    ],
)
def test_fields_that_lie_elsewhere_in_cpp_are_refused(fields, message):
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


def test_nothing_is_mirrored_by_hand():
    """What a record says is said once: C++ has neither its fields nor its size a second time."""
    printed = {
        struct
        for module in printed_modules()
        for struct in re.findall(r"^struct (?:__align__\(16\) )?(\w+) \{", header_of(module), re.M)
    }
    assert len(printed) > 30
    for path in [*PACKAGE.rglob("*.cuh"), *PACKAGE.rglob("*.cu")]:
        text = path.read_text()
        assert not re.search(r"static_assert\(sizeof\(\w+\) ==", text), path
        by_hand = set(re.findall(r"^struct (\w+)[ :{]", text, re.M))
        assert not by_hand & printed, path


# What only CUDA has: entry points of kernels, memory of a block, and steps that are loops on the CPU
ONLY_CUDA = {
    "cuda": {"common", "graph_condition"},
    "lm": {"paged"},
    "search": {"rank_key", "rows"},
    "search/flexctc_beam": {"beam", "frame", "kernel", "select"},
    "search/transducer": {"loop_condition", "pool", "prediction"},
    "search/word_graph": {
        "arc_ranges", "compact", "expand", "graph", "group_arcs", "kernel", "keys", "links", "lm_cache",
        "lm_frame", "lm_queries", "lm_workspace", "sort", "tighten_cutoff", "workspace",
    },
}  # fmt: skip


def test_counterparts_have_one_name():
    """A CUDA file has the stem of its counterpart on the CPU."""
    without: dict[str, set[str]] = {}
    for path in [*PACKAGE.rglob("*.cuh"), *PACKAGE.rglob("*.cu")]:
        if not path.with_suffix(".py").exists():
            without.setdefault(path.parent.relative_to(PACKAGE).as_posix(), set()).add(path.stem)
    assert without == ONLY_CUDA


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_puts_every_field_where_numpy_does(tmp_path):
    modules = [__name__, *printed_modules()]
    assert len(modules) > 2
    for number, name in enumerate(modules):
        module, lines = importlib.import_module(name), []
        for constant, value in list(vars(module).items()):
            is_own = re.search(
                rf"^struct (__align__\(16\) )?{struct_name(constant)} ", header_of(name), re.M
            )
            if isinstance(value, np.dtype) and value.fields and is_own:
                struct = struct_name(constant)
                lines.append(f'static_assert(sizeof({struct}) == {value.itemsize}, "{struct}");')
                lines += [
                    f'static_assert(offsetof({struct}, {field}) == {offset}, "{struct}.{field}");'
                    for field, (_, offset, *_) in value.fields.items()
                ]
            if isinstance(value, Signature):
                struct = f"{struct_name(constant)}Args"
                lines.append(f'static_assert(sizeof({struct}) == {value.size}, "{struct}");')
        assert lines
        path = "/".join(name.split(".")[1:]) if name.startswith(PACKAGE.name) else None
        source = tmp_path / f"layout{number}.cu"
        include = f'#include "{path}.cuh"' if path else header_of(name).replace("#pragma once", "")
        source.write_text("\n".join(["#include <stddef.h>", include, *lines]))
        EmulatedRuntime(cache=tmp_path).load(str(source), torch.device("cpu"))


def test_a_struct_is_packed_as_its_declaration_says():
    values = [np.uint64(1), np.uint64(2), np.array([(3, 0.5, True)], OPTIONS).tobytes(), np.int32(4)]
    slots, addresses = MOVE.packed(values)
    record = slots.view(
        np.dtype([("points", "u8"), ("inputs", "u8"), ("options", OPTIONS), ("count", "i4")], align=True)
    )[0]
    assert (record["points"], record["inputs"], record["count"]) == (1, 2, 4)
    assert record["options"].tolist() == (3, 0.5, True)
    assert addresses.tolist() == [slots.ctypes.data]
    assert MOVE.size == len(slots)
