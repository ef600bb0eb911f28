"""Draw a record: error rate against speed, on a GPU milliseconds per batch, of streams the latency.

python docs/results/plot.py RECORD.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HEADROOM = 1.1  # above the largest error rate, for the numbers there
TEXTS = {"none": "reading only", "own": "+ the stream's partial result", "all": "+ all partial results"}


class Point(NamedTuple):
    x: float
    y: float
    label: str = ""


Lines = dict[str, list[Point]]
Rows = Sequence[Mapping[str, Any]]


def plot_rows(header: Mapping[str, Any], rows: Rows, path: str) -> None:
    """Draw the measured rows, a panel for each task; the suffix of `path` chooses the format.

    Raises:
        ValueError: no row was measured.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if not row.get("skipped")]
    if not measured:
        raise ValueError("rows hold nothing to plot, expected at least one measured peer")
    panels: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in measured:
        part = f", {row['part']}" if row.get("batch") else ""
        panels[row["task"] + part].append(row)
    figure = Figure(figsize=(8 * len(panels), 7), layout="constrained")
    for i, (name, shown) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1)
        if header["mode"] == "stream":
            _latency(axes, shown)
        elif shown[0].get("batch"):
            _batches(axes, shown, header["strategy"])
        else:
            _errors(axes, shown, header["strategy"])
        axes.set_title(name, fontsize=10)
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    figure.suptitle(f"{header['strategy']} on {header['device']}, {header['threads']} thread(s)", fontsize=10)
    figure.savefig(path, dpi=130)


def lines_of(rows: Rows, *, by_beam: bool = False) -> Lines:
    """Label -> points: (RTFx, WER, beam), or by batch (B, milliseconds, beam) a line for every beam.

    Our decoder is measured beside every peer: its first measurement is shown. Rows that set our decoder
    beside itself are about cost, not about errors, and stay out.
    """
    found: dict[str, dict[Any, Point]] = defaultdict(dict)
    for row in rows:
        if row["peer"] == row["strategy"]:
            continue
        for side, name, params in (
            ("ours", row["strategy"], row["params"]), ("peer", row["peer"], row["peer_params"])
        ):  # fmt: skip
            beam, phrases = params["beam_size"], params["phrases"]
            label = name + " + LM" * bool(params["lm"]) + f" + {phrases} phrases" * bool(phrases)
            if by_beam:
                label += f", {beam}" * bool(beam)
                point = Point(row["batch"], 1e3 * row["seconds"][side])
                found[label].setdefault(row["batch"], point)
            else:
                point = Point(row["rtfx"][side], row["wer"][side], str(beam) if beam else "")
                found[label].setdefault(beam, point)
    return {label: [points[key] for key in sorted(points)] for label, points in sorted(found.items())}


def _draw(axes: Any, lines: Lines, strategy: str) -> None:
    for index, (label, points) in enumerate(lines.items()):
        ours, color = label.startswith(strategy), f"C{index % 10}"
        axes.plot(
            [point.x for point in points], [point.y for point in points], color=color, label=label,
            marker="o" if ours else "s", linestyle="-" if ours else "--", linewidth=2.2 if ours else 1.3,
        )  # fmt: skip
        for point in points:
            axes.annotate(
                point.label, (point.x, point.y), xytext=(0, 6), textcoords="offset points", ha="center",
                fontsize=8, color=color,
            )  # fmt: skip


def _errors(axes: Any, rows: Rows, strategy: str) -> None:
    lines = lines_of(rows)
    _draw(axes, lines, strategy)
    axes.set_xscale("log")
    axes.set_ylim(0, HEADROOM * max(point.y for points in lines.values() for point in points) or 1)
    axes.set_xlabel("RTFx: seconds of audio decoded per second (right is faster); at the points: beam")
    axes.set_ylabel("word error rate, % (lower is better)")


def _batches(axes: Any, rows: Rows, strategy: str) -> None:
    lines = lines_of(rows, by_beam=True)
    roofline = {row["batch"]: 1e3 * row["roofline"]["seconds"] for row in rows if row["roofline"]}
    if roofline:
        lines["one read of the log-probs"] = [Point(*point) for point in sorted(roofline.items())]
    _draw(axes, lines, strategy)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size")
    axes.set_ylabel("milliseconds per batch (lower is faster)")


def _latency(axes: Any, rows: Rows) -> None:
    lines: Lines = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["streams"]):
        label = TEXTS[row["texts"]]
        for name in ("p99", "mean"):
            lines[f"{label}: {name}"].append(Point(row["streams"], 1e3 * row["latency"]["total"][name]))
        if row["md1"]["alone"]["total"] is not None:
            point = Point(row["streams"], 1e3 * row["md1"]["alone"]["total"])
            lines[f"{label}: M/D/1 mean, one by one"].append(point)
    _draw(axes, lines, "")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("live streams")
    axes.set_ylabel(f"latency of a {1000 * rows[0]['chunk_seconds']:g} ms chunk, ms: waiting and decoding")


if __name__ == "__main__":
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    plot_rows(record, record["rows"], sys.argv[2])
