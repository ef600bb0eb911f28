"""Rows as a table for people and as JSON for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HEAD = (
    "peer",
    "K",
    "LM",
    "phrases",
    "thr",
    "s peer",
    "s ours",
    "ratio",
    "target",
    "WER peer",
    "WER ours",
    "verified",
)

_TRANSDUCER_HEAD = ("networks",)
_GPU_HEAD = ("part", "B", "x roofline")


def format_table(header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of all rows, with what was measured where above it and the probes below."""
    task, threads = header["task"], header["threads"]["bench"]
    size = f"{task['utterances']} utterances, {task['audio_seconds']} s, V={task['vocab_size']}"
    lines = [
        f"{header['strategy']} on {machine(header)}, {threads} thread(s), {header['date']}",
        f"{task['name']}: {size}",
        f"ratio = {header['ratio']}",
        "",
    ]
    on_gpu = any("part" in row for row in rows)
    transducers = any("networks" in row for row in rows)
    head = _GPU_HEAD * on_gpu + _TRANSDUCER_HEAD * transducers + _HEAD
    graphs = {json.dumps(row["graph"]) for row in rows if "graph" in row}
    if graphs:
        head = tuple("beam" if name == "K" else name for name in head)
        lines[-1:] = [*(f"graph: {graph}" for graph in sorted(graphs)), ""]

    def cells_of(row: Mapping[str, Any]) -> tuple[str, ...]:
        networks = (row["networks"],) if transducers else ()
        return (_gpu_cells(row) if on_gpu else ()) + networks + _cells(row)

    table = [head, *map(cells_of, rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
    for cells, row in zip(table, (None, *rows), strict=True):
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(line if row is None or not row["skipped"] else f"{line}  {row['skipped']}")
    probes = header.get("probes", {})
    lines += ["", *(f"{kind}: {json.dumps(result)}" for kind, result in probes.items())]
    return "\n".join(lines).rstrip()


def machine(header: Mapping[str, Any]) -> str:
    """The name of what was measured on: a GPU's, else the processor's."""
    return header["cpu"] if header["device"] == "cpu" else header["device"]


def _gpu_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands before the other cells in rows of a GPU."""
    roofline = f"{row['roofline']['ours']:.1f}" if row["roofline"] else "-"
    return row["part"], str(row["batch"]), roofline


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    params, ours = row["peer_params"], row["params"]

    def both(name: str) -> str:
        theirs, mine = params[name], ours[name]
        return f"{theirs:d}" if theirs == mine else f"{theirs:d}/{mine:d}"

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        row["peer"],
        both("beam_size"),
        both("lm"),
        both("phrases"),
        both("threads"),
        number(row["seconds"]["peer"], 4),
        number(row["seconds"]["ours"], 4),
        number(row["ratio"], 2),
        number(row["target"], 2) + ("" if row["met"] is not False else " missed"),
        number(row["wer"]["peer"], 2),
        number(row["wer"]["ours"], 2),
        "skipped" if row["skipped"] else "yes" if row["verified"] else "NO",
    )


def result_path(out: str, header: Mapping[str, Any]) -> Path:
    """The file to write: `out`, or `<strategy>-<machine>-<date>.json` in it if it is a folder.

    Those of other modes than batch are named `<strategy>-<mode>-<machine>-<date>.json`.
    """
    path = Path(out)
    if not path.is_dir():
        return path
    name = re.sub(r"[^a-z0-9]+", "-", machine(header).lower()).strip("-")
    mode = f"-{header['mode']}" if "mode" in header else ""
    return path / f"{header['strategy']}{mode}-{name}-{header['date'][:10]}.json"


def write_result(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write header and rows as JSON."""
    path.write_text(json.dumps({**header, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
