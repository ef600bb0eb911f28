"""Linear layers for the few rows of a search step, with results that do not depend on the number of rows.

torch's BLAS repacks the weight in every matrix product. With eight rows this takes about as long as the product
itself. oneDNN can store packed weights, so a search packs each weight once, and again when it has changed. oneDNN also
rounds all rows alike; the BLAS works on blocks of rows and rounds the remaining rows differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

ROW_BLOCK = 8  # largest number of rows in a block of the BLAS; oneDNN packs weights for this number of rows

T = TypeVar("T")

# (address, version counter) of a tensor; a different value means a different weight
Versions = list[tuple[int, int]]


def versions(sources: Sequence[Tensor]) -> Versions | None:
    """A value that changes when one of the tensors changes; None if changes cannot be detected."""
    if any(source.is_inference() for source in sources):
        return None
    return [(source.data_ptr(), source._version) for source in sources]


def whole_blocks(rows: Tensor) -> Tensor:
    """Rows [N, ...] on a CPU followed by zeros up to a multiple of ROW_BLOCK.

    Without the zeros, the rounding of a row in a matrix product depends on the number of rows.
    """
    missing = -len(rows) % ROW_BLOCK
    if missing == 0 or rows.device.type != "cpu":
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def product_dtype(weight: Tensor) -> torch.dtype:
    """The type in which torch multiplies by a weight: that of autocast if it is on, else that of the weight."""
    device = weight.device.type
    if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class MadeOfWeights(Generic[T]):
    """A value computed from weights, and recomputed when one of them has changed."""

    _seen: Versions | None = None
    _sources: Sequence[Tensor] = ()  # the weights; the references keep their addresses from being reused
    _value: T | None = None

    def current(self, sources: Sequence[Tensor], make: Callable[[], T]) -> T | None:
        """The value for these weights; None if their changes cannot be detected."""
        now = versions(sources)
        if now is not None and now != self._seen:
            self._value = make()
            self._seen, self._sources = now, [source.detach() for source in sources]
        return None if now is None else self._value

    def __getstate__(self) -> None:
        """A copy recomputes the value, because oneDNN's tensors cannot be copied."""


class OneDNNLinear:
    """`functional.linear` for one weight [outputs, inputs], packed on CPUs if oneDNN is available."""

    def __init__(self) -> None:
        self._packed: MadeOfWeights[Tensor] = MadeOfWeights()

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rows [N, inputs] to [N, outputs], of type `product_dtype`."""
        dtype = product_dtype(weight)
        if rows.dtype != dtype:  # streams that were opened in another precision
            rows = rows.to(dtype)
        packed = self._packed.current([weight], lambda: _packed(weight)) if _can_pack(rows, weight) else None
        if packed is None:
            return functional.linear(whole_blocks(rows), weight, bias)[: len(rows)]
        return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROW_BLOCK)


def _can_pack(rows: Tensor, weight: Tensor) -> bool:
    return (
        HAS_ONEDNN
        and weight.device.type == "cpu"
        and weight.dtype == rows.dtype == torch.float32
        and not torch.is_grad_enabled()
    )


def _has_onednn() -> bool:
    """Whether torch has the oneDNN operators that torch.compile uses for linear layers."""
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


HAS_ONEDNN = _has_onednn()
