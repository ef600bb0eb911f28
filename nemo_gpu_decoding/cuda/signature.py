"""Declare names, types and shapes of a kernel's arguments, and check them at every launch.

A kernel gets pointers and numbers without types. With a wrong dtype or a transposed tensor, it would read
outside of the tensor and may crash the process. Every launch of a kernel therefore calls `checked_arguments`.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

DType: TypeAlias = "torch.dtype | np.dtype | tuple[torch.dtype, ...]"
Axis: TypeAlias = "str | int"

# floating-point types that kernels read without conversion, and their names in CUDA C++
FLOAT_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
# largest number of forms of arguments that a signature stores
MOST_FORMS = 256
# parameter names of `Module.launch`
RESERVED = frozenset({"signature", "grid", "block", "shared_bytes"})


class Layout(NamedTuple):
    """The dtype, record size and alignment that the elements of a tensor have."""

    dtypes: tuple[torch.dtype, ...]  # the tensor has one of these
    record_bytes: int  # 0 if the elements are not records
    alignment: int  # bytes

    @staticmethod
    def of(dtype: DType) -> Layout:
        """Return the layout of torch types, a plain numpy type or a record type."""
        if isinstance(dtype, torch.dtype):
            return Layout((dtype,), 0, dtype.itemsize)
        if isinstance(dtype, tuple):
            return Layout(dtype, 0, min(kind.itemsize for kind in dtype))
        dtype = np.dtype(dtype)
        if dtype.fields is None:
            return Layout((torch.from_numpy(np.empty(0, dtype)).dtype,), 0, dtype.itemsize)
        return Layout((torch.uint8,), dtype.itemsize, alignment_of(dtype))


@dataclass(frozen=True)
class Tensor:
    """A pointer parameter: the kernel gets the address of the first element of a contiguous tensor."""

    # A structured numpy dtype means records: the tensor holds their bytes, see `as_records`. With several
    # torch types, the kernel is compiled for each of them.
    dtype: DType
    # Sizes; a name means any size, which must be equal in all arguments of one launch.
    shape: tuple[Axis, ...]
    # Whether the kernel writes to it.
    written: bool = False
    # Name of the type in a kernel that is compiled for several types; set by the macro LOG_PROB.
    type_name: str = "LogProb"
    # Whether None is allowed; the kernel gets a null pointer.
    optional: bool = False
    # Whether the tensor is in host memory, which the kernel reads over the bus. It is pinned (`host_memory.py`).
    pinned: bool = False
    # The layout of `dtype`, computed once for all launches.
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.dtype))


@dataclass(frozen=True)
class Scalar:
    """A number that is passed by value, converted to `dtype`; with a structured dtype, a record given as a tuple."""

    dtype: type[np.generic] | np.dtype  # np.int32, np.float32, ..., or records

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.fields is None and dtype.kind not in "biuf":
            raise ValueError(f"a Scalar is of type {dtype}, expected a bool, integer or floating point type")


@dataclass(frozen=True)
class Signature:
    """The name and parameters of a kernel; the parameters are the fields of a struct that the kernel takes by value.

    `records.py` prints that struct with the layout of C++.
    """

    name: str
    parameters: Mapping[str, Tensor | Scalar]
    # Forms of arguments that have been checked, because a check of every axis would take longer than the kernel.
    checked_forms: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)
    # The tensors of the last launch on each device, see `_known`.
    last: dict[torch.device, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken = sorted(RESERVED & set(self.parameters))
        if taken:
            raise ValueError(f"{self.name}: parameters may not be called {', '.join(taken)}")

    @cached_property
    def places(self) -> tuple[tuple[int, str, Tensor], ...]:
        """Return the pointer parameters and their positions."""
        numbered = enumerate(self.parameters.items())
        return tuple((place, name, given) for place, (name, given) in numbered if isinstance(given, Tensor))

    @cached_property
    def scalars(self) -> tuple[tuple[int, str, Scalar, Callable[[Scalar, Any], Any]], ...]:
        """Return the positions of scalar parameters, and the functions that convert their arguments."""
        return tuple(
            (i, name, scalar, _record if np.dtype(scalar.dtype).fields else _number)
            for i, (name, scalar) in enumerate(self.parameters.items())
            if isinstance(scalar, Scalar)
        )

    @cached_property
    def struct(self) -> np.dtype:
        """Return the NumPy dtype of the arguments' struct, aligned like a C++ struct."""
        dtypes = [np.uint64 if isinstance(given, Tensor) else given.dtype for given in self.parameters.values()]
        return np.dtype([(f"_{n}", dtype) for n, dtype in enumerate(dtypes)], align=True)

    def packed(self, values: Sequence[Any]) -> tuple[np.ndarray, ctypes.Array[Any]]:
        """Pack checked arguments for a launch.

        Returns:
            [1] the struct, and [1] its address. The caller must keep both results alive until the launch returns.
        """
        memory: Any = (ctypes.c_char * self.struct.itemsize)()
        packed = np.frombuffer(memory, self.struct)
        packed[0] = tuple(values)
        return packed, (ctypes.c_uint64 * 1)(ctypes.addressof(memory))


def checked_arguments(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> list[Any]:
    """Return the arguments in the kernel's order: pointers as int, numbers as numpy scalars, records as tuples.

    Args:
        signature: the kernel's signature.
        device: device that runs the kernel and holds the tensors.
        arguments: arguments by name: a tensor (or None) per `Tensor`, a number per `Scalar`.

    Raises:
        ValueError: names the kernel and the argument that is missing, unknown, of the wrong type,
            shape or device, or not contiguous.
    """
    if arguments.keys() != signature.parameters.keys():
        missing = [name for name in signature.parameters if name not in arguments]
        unknown = [name for name in arguments if name not in signature.parameters]
        raise ValueError(
            f"kernel {signature.name}: missing arguments {missing}, unknown arguments {unknown}, "
            f"expected {list(signature.parameters)}"
        )
    values = [arguments[name] for name in signature.parameters]
    for (place, _, _), address in zip(signature.places, _addresses(signature, device, arguments), strict=True):
        values[place] = address
    try:
        for place, name, scalar, read in signature.scalars:  # noqa: B007 (the message names it)
            values[place] = read(scalar, values[place])
    except ValueError as error:
        raise ValueError(f"kernel {signature.name}, argument {name}: {error}") from None
    return values


def _addresses(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> list[int]:
    """Return the addresses of the tensors, and 0 for None. Check tensors that the previous launch did not have.

    The same tensor at the same address still has memory of the same size, so that it needs no check.
    """
    known = signature.last.get(device) or [(0, object, ())] * len(signature.places)  # no tensor
    launched, is_new = list(known), False
    for n, (_, name, expected) in enumerate(signature.places):
        tensor, (address, reference, _) = arguments[name], known[n]
        if reference() is not tensor or address != (0 if tensor is None else tensor.data_ptr()):
            launched[n], is_new = _known(tensor, expected, device), True
    if is_new:
        form = device, *[form for _, _, form in launched]
        if form not in signature.checked_forms:
            _check_forms(signature, device, arguments)
            if len(signature.checked_forms) >= MOST_FORMS:  # batches have many different sizes
                signature.checked_forms.clear()
            signature.checked_forms.add(form)
        signature.last[device] = launched  # at once: they were checked together
    return [address for address, _, _ in launched]


def _known(tensor: Any, expected: Tensor, device: torch.device) -> tuple[int, Callable[[], Any], tuple[Any, ...]]:
    """Return the address of a tensor (0: None), a weak reference to it, and all properties that are checked."""
    if not isinstance(tensor, torch.Tensor):
        return 0, type(None), (type(tensor),)
    address = tensor.data_ptr()
    form = type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()
    place = address % expected.layout.alignment, expected.pinned and _is_pageable(tensor, device)
    return address, weakref.ref(tensor), (*form, *place)


def _check_forms(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> None:
    axes: dict[str, tuple[int, str]] = {}
    for _, name, expected in signature.places:
        try:
            _check_form(name, expected, device, arguments[name], axes)
        except ValueError as error:
            raise ValueError(f"kernel {signature.name}, argument {name}: {error}") from None


def as_records(array: np.ndarray) -> torch.Tensor:
    """Return a structured array as a uint8 tensor [*array.shape, itemsize], without a copy if possible."""
    array = np.ascontiguousarray(array)
    flat = array.reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat).view(*array.shape, array.dtype.itemsize)


def _check_form(name: str, expected: Tensor, device: torch.device, tensor: Any, axes: dict[str, Any]) -> None:
    if tensor is None and expected.optional:
        return
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"is a {type(tensor).__name__}, expected a torch.Tensor")
    _check_place(tensor, expected, device)
    shape = _shape_in_elements(tensor, expected)
    if len(shape) != len(expected.shape):
        raise ValueError(f"has shape {tuple(shape)}, expected {_sizes(expected, axes)}")
    for size, axis in zip(shape, expected.shape, strict=True):
        wanted = axes.setdefault(axis, (size, name))[0] if isinstance(axis, str) else axis
        if size != wanted:
            raise ValueError(f"has shape {tuple(shape)}, expected {_sizes(expected, axes)}")
    if not tensor.is_contiguous():
        raise ValueError(f"is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    address, alignment = tensor.data_ptr(), expected.layout.alignment
    if address % alignment:
        raise ValueError(f"starts at address {address:#x}, expected a multiple of {alignment}")


def _check_place(tensor: torch.Tensor, expected: Tensor, device: torch.device) -> None:
    place = "pinned host memory" if expected.pinned else f"{device}, where the kernel runs"
    if tensor.device != (torch.device("cpu") if expected.pinned else device):
        raise ValueError(f"is on {tensor.device}, expected {place}")
    if expected.pinned and _is_pageable(tensor, device):
        raise ValueError("is pageable host memory, expected pinned host memory")


def _is_pageable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a kernel on the device cannot read the tensor's host memory."""
    return device.type == "cuda" and not tensor.is_pinned()


def _shape_in_elements(tensor: torch.Tensor, expected: Tensor) -> tuple[int, ...]:
    """Return the tensor's shape, in records for record types."""
    dtypes, itemsize, _ = expected.layout
    if tensor.dtype not in dtypes:
        raise ValueError(f"has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if itemsize == 0:
        return tensor.shape
    if tensor.ndim == 1 and len(expected.shape) == 1 and tensor.numel() % itemsize == 0:
        return (tensor.numel() // itemsize,)  # records given as flat bytes
    if tensor.ndim == 0 or tensor.shape[-1] != itemsize:
        raise ValueError(f"has shape {tuple(tensor.shape)}, expected the {itemsize} bytes of a record as last axis")
    return tensor.shape[:-1]


def alignment_of(dtype: np.dtype) -> int:
    """Return the alignment of a type in C++; for a record, the strictest of the record and its fields."""
    base = dtype.base
    if base.fields is None:
        return base.itemsize
    alignment = dict(base.metadata or {}).get("align", 1)
    return max(alignment, *(alignment_of(field[0]) for field in base.fields.values()))


def _sizes(expected: Tensor, axes: dict[str, tuple[int, str]]) -> str:
    """Return the expected shape for a message: [B = 4 as in log_probs, T, 3]."""
    known = {axis: f"{axis} = {size} as in {source}" for axis, (size, source) in axes.items()}
    return f"[{', '.join(known.get(str(axis), str(axis)) for axis in expected.shape)}]"


def _record(expected: Scalar, value: Any) -> tuple[Any, ...]:
    fields = np.dtype(expected.dtype).names or ()
    if not isinstance(value, tuple) or getattr(value, "_fields", fields) != fields or len(value) != len(fields):
        raise ValueError(f"is {value!r}, expected a tuple of {', '.join(fields)}")
    return value


def _number(expected: Scalar, value: Any) -> np.generic:
    """Convert a number; a float is rounded to a floating-point type, all else must be exact."""
    dtype: Any = expected.dtype
    if type(value) is dtype or (dtype is np.int32 and type(value) is int and abs(value) < 1 << 31):
        return dtype(value)
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise ValueError(f"is a {type(value).__name__}, expected a number for {np.dtype(dtype)}")
    is_rounded = issubclass(dtype, np.floating) and isinstance(value, (float, np.floating))
    try:
        converted = dtype(value)
        fits = (is_rounded or int(converted) == value) and math.isfinite(converted) == math.isfinite(value)
    except (OverflowError, ValueError):  # too large, or no number
        fits = False
    if fits:
        return converted
    if issubclass(dtype, np.floating):
        raise ValueError(f"is {value}, which {np.dtype(dtype)} cannot hold")
    low, high = (0, 1) if dtype is np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    raise ValueError(f"is {value}, expected an integer in {low} .. {high} ({np.dtype(dtype)})")
