"""Generate C++ structs from numpy record types and kernel arguments, so that each is declared once.

A Python module declares records and kernels; kernels include a header with the module's name:

    # fusion/automaton.py                       // fusion/fusion.cuh
    ARC = np.dtype([                            #include "fusion/automaton.cuh"
        ("label", np.int32),
        ("weight", np.float32),                 struct Arc { int label; float weight; int target; };
        ("target", np.int32),
    ])

The file automaton.cuh does not exist: `compile.py` generates it in memory, and `scripts/check_kernels.py --headers`
writes all such headers to a folder. A header contains, in the order of the module:

    UPPER_CASE = np.dtype([...])     struct UpperCase, its fields at the same offsets as in numpy; with
                                     metadata={"align": 16} aligned to 16 bytes
    UPPER_CASE = Signature("kernel", ...)
                                     struct UpperCaseArgs, the one argument of the kernel, by value
    UPPER_CASE: Final = -1           constexpr int UPPER_CASE
"""

import ast
import importlib
import inspect
import re
from functools import lru_cache
from types import ModuleType
from typing import get_type_hints

import numpy as np
import torch

from nemo_gpu_decoding.cuda.signature import Scalar, Signature, Tensor, alignment_of

# names of scalar types in common.cuh, by kind and size
_SCALARS = {
    "b1": "bool", "i1": "signed char", "i2": "short", "i4": "int", "i8": "int64", "u1": "uint8",
    "u2": "unsigned short", "u4": "uint32", "u8": "uint64", "f4": "float", "f8": "double",
}  # fmt: skip
# A macro selects the input type of a kernel that is compiled for several types.
_TYPE_CHOICE = """#ifndef {macro}
#define {macro} float
#endif
typedef {macro} {name};"""


@lru_cache(maxsize=64)
def header_of(module_name: str) -> str:
    """Return the structs of a module's records and kernel arguments.

    Raises:
        ValueError: the offset of a record's field differs from that in C++.
    """
    module = importlib.import_module(module_name)
    body, structs = ast.parse(inspect.getsource(module)).body, []
    for name in _assigned_names(body):
        value = getattr(module, name)
        if isinstance(value, np.dtype) and value.fields:
            structs.append(_record(module, name, value))
        elif isinstance(value, Signature):
            structs.append(_arguments(module, name, value))
        elif isinstance(value, int) and name in module.__annotations__:
            structs.append(f"constexpr int {name} = {int(value)};")
    includes = ['#include "cuda/common.cuh"', *_includes(module, body)]
    head = ["#pragma once", f"// Printed from {module_name}.", *includes, ""]
    return "\n".join([*head, *structs, ""])


def struct_name(constant: str) -> str:
    """Return the name of the C++ struct for a record type: `GraphState` for `GRAPH_STATE`."""
    return "".join(part.capitalize() for part in constant.strip("_").split("_"))


def _includes(module: ModuleType, body: list[ast.stmt]) -> list[str]:
    """Return the headers of the package's modules from which the module imports records."""
    package = __name__.split(".")[0] + "."
    found = []
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(package):
            values = [getattr(module, alias.asname or alias.name) for alias in node.names]
            if any(isinstance(value, np.dtype) and value.fields for value in values):
                found.append(f'#include "{node.module.removeprefix(package).replace(".", "/")}.cuh"')
    return found


def _assigned_names(body: list[ast.stmt]) -> list[str]:
    """Return the constants that the module declares, without those that it imports."""
    names = []
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def _record(module: ModuleType, name: str, dtype: np.dtype) -> str:
    lines, end, align = [], 0, alignment_of(dtype)
    for field, (kind, offset, *_) in (dtype.fields or {}).items():
        base, shape = kind.subdtype or (kind, ())
        expected = -(-end // alignment_of(base)) * alignment_of(base)
        if offset != expected:
            raise ValueError(
                f"{name}.{field} is at byte {offset}, expected {expected}, where C++ puts it: "
                "make the dtype with align=True"
            )
        size = "".join(f"[{n}]" for n in shape)
        lines.append(f"  {_element(module, base)} {field}{size};")
        end = offset + kind.itemsize
    if dtype.itemsize != -(-end // align) * align:
        raise ValueError(
            f"{name} takes {dtype.itemsize} bytes, expected {-(-end // align) * align}, as in C++: make "
            "the dtype with align=True"
        )
    keyword = f"struct __align__({align})" if dtype.metadata else "struct"
    return "\n".join([f"{keyword} {struct_name(name)} {{", *lines, "};"])


def _arguments(module: ModuleType, constant: str, signature: Signature) -> str:
    lines, choices = [], []
    for name, parameter in signature.parameters.items():
        if isinstance(parameter, Scalar):
            lines.append(f"  {_element(module, np.dtype(parameter.dtype))} {name};")
        else:
            if isinstance(parameter.dtype, tuple):
                macro = re.sub("(?<=[a-z])(?=[A-Z])", "_", parameter.type_name).upper()
                choice = _TYPE_CHOICE.format(macro=macro, name=parameter.type_name)
                choices += [choice] if choice not in choices else []
            const = "" if parameter.written else "const "
            axes = ", ".join(map(str, parameter.shape))
            lines.append(f"  {const}{_pointee(module, parameter)}* {name};  // [{axes}]")
    return "\n".join([*choices, f"struct {struct_name(constant)}Args {{", *lines, "};"])


def _pointee(module: ModuleType, parameter: Tensor) -> str:
    if isinstance(parameter.dtype, tuple):
        return parameter.type_name
    if isinstance(parameter.dtype, torch.dtype):
        return _SCALARS[torch.empty(0, dtype=parameter.dtype).numpy().dtype.str[1:]]
    return _element(module, np.dtype(parameter.dtype))


def _element(module: ModuleType, dtype: np.dtype) -> str:
    """Return the C++ name of a scalar type, or of a record that the module declares or imports."""
    if dtype.fields is None:
        return _SCALARS[dtype.str[1:]]
    for name, value in vars(module).items():
        if isinstance(value, np.dtype) and value is dtype:
            return struct_name(name)
    raise ValueError(f"{module.__name__} uses a record that has no name there: {dtype}")


def dtype_of(fields: type[tuple]) -> np.dtype:
    """Return the record type of a NamedTuple of numbers: int, bool and numpy scalar types; int is 32 bits."""
    kinds = {int: np.int32, bool: np.bool_, float: np.float32}
    hints = get_type_hints(fields)
    return np.dtype([(name, kinds.get(hint, hint)) for name, hint in hints.items()], align=True)
