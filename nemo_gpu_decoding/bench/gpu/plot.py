"""Time per batch over batch size: decoders alone on the left, behind an encoder on the right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_gpu_decoding.bench.gpu.cases import DECODER, END_TO_END

Lines = dict[tuple[str, int], dict[int, float]]  # (label, K) -> batch size -> seconds


def plot_rows_on_gpu(rows: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """Draw the measured rows; the suffix of `path` chooses the format (.png, .svg, .pdf).

    Raises:
        ValueError: no row was measured.
        ImportError: matplotlib is not installed.
    """
    measured = [row for row in rows if not row["skipped"]]
    parts = [part for part in (DECODER, END_TO_END) if any(row["part"] == part for row in measured)]
    if not parts:
        raise ValueError("rows hold nothing to plot, expected at least one measured peer")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot= needs matplotlib: pip install 'nemo-gpu-decoding[bench]'") from error
    figure = Figure(figsize=(7 * len(parts), 7), layout="constrained")
    for i, part in enumerate(parts):
        axes = figure.add_subplot(1, len(parts), i + 1)
        _draw(axes, [row for row in measured if row["part"] == part])
        axes.set_title(part)
    figure.suptitle(f"{title}\nours thick, the others' dashed; numbers: beam size", fontsize=10)
    figure.savefig(path, dpi=130)


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = lines_of(rows)
    colors = {label: f"C{i}" for i, label in enumerate(sorted({label for label, _ in lines}))}
    for (label, beam), points in sorted(lines.items()):
        batches, seconds = zip(*sorted(points.items()), strict=True)
        ours = label.startswith(rows[0]["strategy"])
        axes.plot(
            batches, [1e3 * s for s in seconds], color=colors[label], label=None,
            marker="o" if ours else "s", linestyle="-" if ours else "--", linewidth=2.2 if ours else 1.2,
        )  # fmt: skip
        if beam:
            axes.annotate(str(beam), (batches[-1], 1e3 * seconds[-1]), fontsize=8, color=colors[label])
    for label, color in colors.items():
        axes.plot([], [], color=color, label=label)
    roofline = {row["batch"]: 1e3 * row["roofline"]["seconds"] for row in rows if row["roofline"]}
    if roofline:
        axes.plot(
            list(roofline), list(roofline.values()), color="black", linestyle=":",
            label="roofline: one read of the log-probs",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size (log scale)")
    axes.set_ylabel("milliseconds per batch (log scale; lower is faster)")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)


def lines_of(rows: Sequence[Mapping[str, Any]]) -> Lines:
    """Points of each decoder and beam; of several measurements of the same the first is shown."""
    lines: Lines = defaultdict(dict)
    for row in rows:
        for side, name, params in (
            ("ours", row["strategy"], row["params"]),
            ("peer", row["peer"], row["peer_params"]),
        ):
            fused = f" + LM + {params['phrases']} phrases" if params["phrases"] else ""
            fused = fused or (" + LM" if params["lm"] else "")
            line = lines[f"{name}{fused}", params["beam_size"]]
            line.setdefault(row["batch"], row["seconds"][side])
    return dict(lines)
