"""Signatures of kernels: names, types and shapes of arguments, checked at every launch.

A kernel gets pointers and numbers without types. With a wrong dtype or a transposed tensor, it would read
outside of the tensor and may crash the process. So every launch calls `checked_arguments`.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

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
    """Dtype, record size and alignment of a tensor's elements."""

    dtypes: tuple[torch.dtype, ...]  # any of these
    record_bytes: int  # 0 if the elements are not records
    alignment: int  # bytes

    @staticmethod
    def of(dtype: DType) -> Layout:
        """The layout of torch types, a plain numpy type or a record type."""
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
    alignment: int = field(init=False, repr=False, compare=False)  # the layout's, in bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout.of(self.dtype))
        object.__setattr__(self, "alignment", self.layout.alignment)


@dataclass(frozen=True)
class Scalar:
    """A number passed by value: int, float, bool or numpy scalar, converted to `dtype`.

    With a structured dtype: a record, given as a tuple of its fields.
    """

    dtype: type[np.generic] | np.dtype  # np.int32, np.float32, ..., or records
    # Least and greatest value of an integer type, None for others; computed once, as above.
    limits: tuple[int, int] | None = field(init=False, repr=False, compare=False)
    # The packing of a record's fields; None if a field is a record or an array.
    layout: struct.Struct | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        object.__setattr__(self, "limits", _limits(dtype))
        object.__setattr__(self, "layout", _flat_layout(dtype))

    @property
    def is_record(self) -> bool:
        return isinstance(self.dtype, np.dtype) and self.dtype.fields is not None


@dataclass(frozen=True)
class Signature:
    """A kernel's name and parameters, which are the fields of a struct that it takes by value.

    `records.py` prints that struct with the layout of C++.
    """

    name: str
    parameters: Mapping[str, Tensor | Scalar]
    # Forms of arguments that have been checked. A launch with other addresses and numbers only then takes
    # some microseconds; a check of every axis would take longer than the kernel.
    checked_forms: set[tuple[Any, ...]] = field(default_factory=set, init=False, repr=False, compare=False)
    # The pointers of the last launch, and its device; at first None.
    last: list[tuple[torch.device, Pointers] | None] = field(
        default_factory=lambda: [None], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        taken = sorted(RESERVED & set(self.parameters))
        if taken:
            raise ValueError(f"{self.name}: parameters may not be called {', '.join(taken)}")

    @cached_property
    def pinned(self) -> tuple[tuple[str, Tensor], ...]:
        """The pointer parameters in pinned memory."""
        return tuple((name, given) for _, name, given in self.places if given.pinned)

    @cached_property
    def places(self) -> tuple[tuple[int, str, Tensor], ...]:
        """The pointer parameters and their positions."""
        found = enumerate(self.parameters.items())
        return tuple((place, name, given) for place, (name, given) in found if isinstance(given, Tensor))

    @cached_property
    def scalars(self) -> tuple[tuple[int, str, Scalar, Callable[[Scalar, Any], Any]], ...]:
        """The other parameters: their positions, and the functions that convert their arguments."""
        return tuple(
            (i, name, scalar, _record_bytes if scalar.is_record else _number)
            for i, (name, scalar) in enumerate(self.parameters.items())
            if isinstance(scalar, Scalar)
        )

    @property
    def size(self) -> int:
        """Bytes of the struct."""
        return self._layout.size

    def packed(self, values: Sequence[Any]) -> tuple[ctypes.Array[Any], ctypes.Array[Any]]:
        """Pack checked arguments for a launch.

        Returns:
            the struct's bytes, and [1] their address. Both must stay alive until the launch returns.
        """
        packed = ctypes.create_string_buffer(self._layout.pack(*values), self._layout.size)
        return packed, (ctypes.c_uint64 * 1)(ctypes.addressof(packed))

    @cached_property
    def _layout(self) -> struct.Struct:
        dtypes = [np.uint64 if isinstance(own, Tensor) else own.dtype for own in self.parameters.values()]
        return _packing(np.dtype([(f"_{n}", d) for n, d in enumerate(dtypes)], align=True))


_PACK_CODES = dict(
    zip(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"), "?bhiqBHIQefd",
        strict=True)
)  # fmt: skip


def _packing(record: np.dtype) -> struct.Struct:
    """The packing of a record's fields; fields that are records are bytes."""
    code, end = "<", 0
    for dtype, offset, *_ in (record.fields or {}).values():
        own = f"{dtype.itemsize}s" if dtype.fields else _PACK_CODES[dtype.str[1:]]
        code += f"{offset - end}x{own}"
        end = offset + dtype.itemsize
    return struct.Struct(f"{code}{record.itemsize - end}x")


def _flat_layout(dtype: np.dtype) -> struct.Struct | None:
    if dtype.fields is None or any(own.fields or own.shape for own, *_ in dtype.fields.values()):
        return None
    return _packing(dtype)


def checked_arguments(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments in the kernel's order: pointers as int, numbers as numpy scalars, records as bytes.

    Args:
        signature: of the kernel.
        device: that runs the kernel and holds the tensors.
        arguments: by name; a tensor (or None) per `Tensor`, a number per `Scalar`.

    Raises:
        ValueError: names the kernel and the argument that is missing, unknown, of the wrong type,
            shape or device, or not contiguous.
    """
    if len(arguments) != len(signature.parameters):
        _raise_names(signature, arguments)
    try:
        values = [arguments[name] for name in signature.parameters]
    except KeyError:
        _raise_names(signature, arguments)
    for (place, _, _), known in zip(signature.places, _checked_pointers(signature, device, arguments), strict=True):
        values[place] = 0 if known is None else known.address
    name = ""
    try:
        for place, name, scalar, read in signature.scalars:  # noqa: B007 (the message names it)
            values[place] = read(scalar, values[place])
        for name, expected in signature.pinned:  # forms do not include whether memory is pinned
            if arguments[name] is not None:
                _check_place(arguments[name], expected, device)
    except ValueError as error:
        raise ValueError(f"kernel {signature.name}, argument {name}: {error}") from None
    return values


def _check_forms(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> None:
    axes: dict[str, tuple[int, str]] = {}
    for _, name, expected in signature.places:
        try:
            _check_form(name, expected, device, arguments[name], axes)
        except ValueError as error:
            raise ValueError(f"kernel {signature.name}, argument {name}: {error}") from None


class Known(NamedTuple):
    """A tensor that has been checked."""

    tensor: weakref.ref[torch.Tensor]
    address: int
    form: tuple[Any, ...]  # all properties that are checked, except the address


Pointers: TypeAlias = "tuple[Known | None, ...]"  # of a launch; None for a null pointer


def _checked_pointers(signature: Signature, device: torch.device, arguments: Mapping[str, Any]) -> Pointers:
    """The tensors of the arguments; those that differ from the previous launch are checked.

    The same tensor at the same address still has memory of the same size, so it needs no check.
    """
    (before,) = signature.last  # replaced as a whole: these were checked together
    known, same = before[1] if before is not None and before[0] == device else None, True
    pointers: list[Known | None] = []
    for i, (_, name, _) in enumerate(signature.places):
        tensor, old = arguments[name], known[i] if known is not None else None
        if tensor is None:
            same &= known is not None and old is None
            pointers.append(None)
            continue
        if not isinstance(tensor, torch.Tensor):
            _check_forms(signature, device, arguments)  # raises
        address = tensor.data_ptr()
        if old is None or old.address != address or old.tensor() is not tensor:
            form = tensor.size(), tensor.dtype, tensor.device, tensor.is_contiguous()
            old, same = Known(weakref.ref(tensor), address, form), False
        pointers.append(old)
    if same and known is not None:
        return known
    form = device, *[pointer and pointer.form for pointer in pointers]
    if form not in signature.checked_forms:
        _check_forms(signature, device, arguments)
        if len(signature.checked_forms) >= MOST_FORMS:  # batches have many different sizes
            signature.checked_forms.clear()
        signature.checked_forms.add(form)
    for (_, name, expected), pointer in zip(signature.places, pointers, strict=True):
        if pointer is not None and pointer.address % expected.alignment:
            raise ValueError(
                f"kernel {signature.name}, argument {name}: starts at address {pointer.address:#x}, "
                f"expected a multiple of {expected.alignment}"
            )
    signature.last[0] = device, tuple(pointers)
    return tuple(pointers)


def as_records(array: np.ndarray) -> torch.Tensor:
    """A structured array as a tensor for kernels, uint8 [*array.shape, itemsize].

    The tensor shares the array's memory if that is contiguous and writable.
    """
    array = np.ascontiguousarray(array)
    flat = array.reshape(-1).view(np.uint8)
    if not flat.flags.writeable:
        flat = flat.copy()
    return torch.from_numpy(flat).view(*array.shape, array.dtype.itemsize)


def _raise_names(signature: Signature, arguments: Mapping[str, Any]) -> NoReturn:
    missing = [name for name in signature.parameters if name not in arguments]
    unknown = [name for name in arguments if name not in signature.parameters]
    raise ValueError(
        f"kernel {signature.name}: missing arguments {missing}, unknown arguments {unknown}, "
        f"expected {list(signature.parameters)}"
    )


def _check_form(
    name: str, expected: Tensor, device: torch.device, tensor: Any, axes: dict[str, tuple[int, str]]
) -> None:
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


def _check_place(tensor: torch.Tensor, expected: Tensor, device: torch.device) -> None:
    if not expected.pinned:
        if tensor.device != device:
            raise ValueError(f"is on {tensor.device}, expected {device}, where the kernel runs")
    elif tensor.device.type != "cpu":
        raise ValueError(f"is on {tensor.device}, expected pinned host memory")
    elif device.type == "cuda" and not tensor.is_pinned():
        raise ValueError("is pageable host memory, expected pinned host memory")


def _shape_in_elements(tensor: torch.Tensor, expected: Tensor) -> tuple[int, ...]:
    """The tensor's shape, in records for record types."""
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
    """The alignment of a type in C++; for a record, its own or the strictest of its fields."""
    base = dtype.base
    if base.fields is None:
        return base.itemsize
    own = dict(base.metadata or {}).get("align", 1)
    return max(own, *(alignment_of(field[0]) for field in base.fields.values()))


def _sizes(expected: Tensor, axes: dict[str, tuple[int, str]]) -> str:
    """The expected shape for a message: [B = 4 as in log_probs, T, 3]."""
    parts = []
    for axis in expected.shape:
        size, source = axes.get(axis, (None, "")) if isinstance(axis, str) else (None, "")
        parts.append(str(axis) if size is None else f"{axis} = {size} as in {source}")
    return f"[{', '.join(parts)}]"


def _record_bytes(expected: Scalar, value: Any) -> bytes:
    fields = np.dtype(expected.dtype).names or ()
    if not isinstance(value, tuple) or getattr(value, "_fields", fields) != fields:
        raise ValueError(f"is {value!r}, expected a tuple of {', '.join(fields)}")
    if expected.layout is not None:
        try:
            return expected.layout.pack(*value)
        except (struct.error, OverflowError):  # numpy converts more
            pass
    return np.array([tuple(value)], expected.dtype).tobytes()


def _number(expected: Scalar, value: Any) -> np.generic:
    limits, dtype = expected.limits, cast("Any", expected.dtype)
    if limits is not None and (type(value) is int or type(value) is bool) and limits[0] <= value <= limits[1]:
        return dtype(value)
    if type(value) is dtype:
        return value
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise ValueError(f"is a {type(value).__name__}, expected a number for {np.dtype(dtype)}")
    if expected.limits is None:
        return _floating(np.dtype(dtype), value)
    number = float(value) if isinstance(value, (float, np.floating)) else int(value)
    low, high = expected.limits
    if not math.isfinite(number) or number != int(number) or not low <= number <= high:
        raise ValueError(f"is {value}, expected an integer in {low} .. {high} ({np.dtype(dtype)})")
    return dtype(int(number))


def _limits(dtype: np.dtype) -> tuple[int, int] | None:
    if dtype.kind == "f" or dtype.fields:
        return None
    if dtype.kind == "b":
        return 0, 1
    if dtype.kind not in "iu":
        raise ValueError(f"a Scalar is of type {dtype}, expected a bool, integer or floating point type")
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _floating(kind: np.dtype, value: Any) -> np.generic:
    """Convert to a floating-point type; fractions are rounded, integers must be exact."""
    with np.errstate(over="ignore"):
        converted = kind.type(value)
    if isinstance(value, (bool, int, np.bool_, np.integer)):
        if not np.isfinite(converted) or int(converted) != int(value):
            raise ValueError(f"is {value}, which {kind} cannot hold exactly")
    elif math.isfinite(value) and not np.isfinite(converted):
        raise ValueError(f"is {value}, which is out of the range of {kind}")
    return converted
