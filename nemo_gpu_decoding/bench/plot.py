"""WER against speed: one line per decoder and setting, one point per beam size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

HEADROOM = 1.1  # above the largest error rate, for the numbers there
Point = tuple[float, float, int]  # RTFx, WER %, beam size


def plot_rows(rows: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """Draw the measured rows; the suffix of `path` chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: no row was measured.
        ImportError: matplotlib is not installed.
    """
    lines = _lines(rows)
    if not lines:
        raise ValueError("rows hold nothing to plot, expected at least one measured peer")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot= needs matplotlib: pip install 'nemo-gpu-decoding[bench]'") from error
    what = "beam" if "graph" in rows[0] else "beam size"
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    for index, (label, points) in enumerate(sorted(lines.items())):
        ours = label.startswith(rows[0]["strategy"])
        _draw_line(axes, label, points, color=f"C{index}", ours=ours)
    axes.set_xscale("log")
    highest = max(error for points in lines.values() for _, error, _ in points)
    axes.set_ylim(0, HEADROOM * highest or 1)
    axes.set_xlabel("RTFx: seconds of audio decoded per second (log scale; right is faster)")
    axes.set_ylabel("word error rate, % (lower is better)")
    axes.set_title(f"{title}\nnumbers at the points: {what}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_line(axes: Any, label: str, points: list[Point], *, color: str, ours: bool) -> None:
    """One decoder: a point per beam size, joined; ours drawn thick."""
    speeds, errors, beams = zip(*sorted(points, key=lambda point: point[2]), strict=True)
    marker, line, width = ("o", "-", 2.2) if ours else ("s", "--", 1.5)
    axes.plot(speeds, errors, color=color, label=label, marker=marker, linestyle=line, linewidth=width)
    for speed, error, beam in zip(speeds, errors, beams, strict=True):
        if beam:  # greedy has none
            axes.annotate(
                str(beam),
                (speed, error),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=color,
            )


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Label -> points. Our decoder is measured beside every peer: its first measurement is shown.

    Rows that set our decoder beside itself are about cost, not about errors, and stay out.
    """
    points: dict[str, dict[int, Point]] = defaultdict(dict)
    for row in rows:
        if row["skipped"] or row["peer"] == row["strategy"]:
            continue
        for side, name, params in (
            ("ours", row["strategy"], row["params"]),
            ("peer", row["peer"], row["peer_params"]),
        ):
            beam = params["beam_size"]
            point = (row["rtfx"][side], row["wer"][side], beam)
            networks = f" {row['networks']}" if "networks" in row else ""
            points[_label(name + networks, params)].setdefault(beam, point)
    return {label: list(by_beam.values()) for label, by_beam in points.items()}


def _label(name: str, params: Mapping[str, Any]) -> str:
    parts = [name]
    if params["lm"]:
        parts.append("LM")
    if params["phrases"]:
        parts.append(f"{params['phrases']} phrases")
    return " + ".join(parts)
