"""Rows of streams as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gpu_decoding.bench.report import machine

_PARTS = ("compute", "queue", "total")
_HEAD = ("streams", "texts", "load", "batch")
_SPREADS = tuple(f"{part} {name}" for part in _PARTS for name in ("mean", "p50", "p99"))
_MD1 = ("M/D/1 alone", "M/D/1 batched")


def format_streams(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all rows, latencies in milliseconds, with what was measured where above it."""
    transducers = any("networks" in row for row in rows)
    head = ("networks",) * transducers + _HEAD + _SPREADS + _MD1 + ("verified",)
    chunk_ms = f"{1000 * rows[0]['chunk_seconds']:g} ms" if rows else "-"
    seconds = header["options"]["stream_seconds"]
    lines = [
        f"{header['strategy']} on {machine(header)}, {header['threads']['bench']} thread(s), "
        f"{header['date']}",
        f"{header['task']['name']}: streams of {chunk_ms} chunks, {seconds:g} s",
        f"latencies in ms, M/D/1: mean total; clock: {header['clock']}",
        "",
    ]
    table = [head, *(_cells(row, transducers) for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    for cells in table:
        lines.append("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], transducers: bool) -> tuple[str, ...]:
    spreads = (_ms(value) for part in _PARTS for value in row["latency"][part].values())
    return (
        *([row["networks"]] if transducers else []),
        str(row["streams"]),
        row["texts"],
        f"{row['utilisation']:.2f}",
        f"{row['batch']['mean']:.1f}",
        *spreads,
        *(_ms(row["md1"][kind]["total"]) for kind in ("alone", "batched")),
        "yes" if row["verified"] else "NO",
    )


def _ms(seconds: float | None) -> str:
    return "no end" if seconds is None else f"{1000 * seconds:.2f}"
