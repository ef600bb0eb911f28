"""Latency against the number of streams, beside the M/D/1 formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_LABELS = {
    "none": "reading only",
    "own": "with the partial result of the stream",
    "all": "with partial results of all streams",
}


def plot_streams(rows: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """Draw mean and p99 of the total latency; the suffix of `path` chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot= needs matplotlib: pip install 'nemo-gpu-decoding[bench]'") from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for index, (label, of_label) in enumerate(_lines(rows).items()):
        color = f"C{index}"
        streams = [row["streams"] for row in of_label]
        for name, line in (("p99", "-"), ("mean", "--")):
            values = [1000 * row["latency"]["total"][name] for row in of_label]
            axes.plot(streams, values, line, color=color, marker="o", label=f"{label}: {name}")
        formula = [(row["streams"], row["md1"]["alone"]["total"]) for row in of_label]
        stable = [(n, 1000 * total) for n, total in formula if total is not None]
        if stable:
            text = "   M/D/1 mean, one by one"
            axes.plot(*zip(*stable, strict=True), ":", color=color, marker="x", label=text)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    ticks = sorted({row["streams"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("live streams")
    chunk_ms = 1000 * rows[0]["chunk_seconds"]
    axes.set_ylabel(f"latency of a {chunk_ms:g} ms chunk, ms: waiting and decoding (lower is better)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=130)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Label -> its rows, by number of streams."""
    lines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["streams"]):
        networks = f"{row['networks']}, " if "networks" in row else ""
        lines[networks + _LABELS[row["texts"]]].append(row)
    return lines
