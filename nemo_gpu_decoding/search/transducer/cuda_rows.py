"""Rows of tensors of any type, moved by a kernel: states and predictions of hypotheses, and frames."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import Module
from nemo_gpu_decoding.search.transducer import launch_shape as shapes

# (source, from_rows, target, to_rows): without rows, row r is number r itself; where a row is below 0,
# nothing is moved
Part = tuple[Tensor, "Tensor | None", Tensor, "Tensor | None"]


def move_rows(plan: Module, rows: int, *parts: Part) -> None:
    """Move rows: of each part, row from_rows[r] of the source becomes row to_rows[r] of the target.

    Args:
        plan: the kernels of plan.cu.
        rows: number of r.
        parts: contiguous tensors [R, ...] whose rows are of one type and shape; rows int64.
    """
    for first in range(0, len(parts), shapes.PARTS):
        chosen = parts[first : first + shapes.PARTS]
        arguments: dict[str, Any] = {}
        for i in range(shapes.PARTS):
            arguments |= _arguments(i, *chosen[i]) if i < len(chosen) else _no_arguments(i)
        plan.launch(shapes.MOVE_ROWS, grid=rows, block=shapes.MOVE_THREADS, **arguments)


def _arguments(
    i: int, source: Tensor, from_rows: Tensor | None, target: Tensor, to_rows: Tensor | None
) -> dict[str, Any]:
    """What the kernel is told of its i-th part."""
    given = _as_bytes(source)
    return {
        f"from{i}": given,
        f"from_rows{i}": from_rows,
        f"to{i}": _as_bytes(target),
        f"to_rows{i}": to_rows,
        f"bytes{i}": given.shape[1],
    }


def _no_arguments(i: int) -> dict[str, Any]:
    absent = dict.fromkeys((f"from{i}", f"from_rows{i}", f"to{i}", f"to_rows{i}"))
    return {**absent, f"bytes{i}": 0}


def _as_bytes(rows: Tensor) -> Tensor:
    """[R, ...] of any type as [R, bytes]."""
    return rows.flatten(1).view(torch.uint8)
