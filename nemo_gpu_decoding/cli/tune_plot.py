"""Plot the word error rate over the values of options that `tune` has tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_gpu_decoding.cli.grid import WEIGHTS, Point
from nemo_gpu_decoding.container import written_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nemo_gpu_decoding.cli.dev_set import Score
    from nemo_gpu_decoding.cli.tune import Trial

FORMATS = (".png", ".svg", ".pdf")
WER_COLOUR, FSCORE_COLOUR = "tab:blue", "tab:orange"
ROW = 4  # panels side by side
DARK = 0.6  # of the range of colours; text is white from here on


def options_of_panels(trials: Sequence[Trial]) -> list[str]:
    """Return the options with several tried values, in descending order of their effect on the WER."""

    def spread(name: str) -> float:
        wers = [trial.score.errors.wer for trial in best_by(trials, name).values()]
        return max(wers) - min(wers)

    names = [name for name in Point._fields if len({getattr(trial.point, name) for trial in trials}) > 1]
    return sorted(names, key=lambda name: -spread(name))


def best_by(trials: Sequence[Trial], *names: str) -> dict[Any, Trial]:
    """Return the best trial for each combination of values of these options; `trials` are sorted, best first."""
    best: dict[Any, Trial] = {}
    for trial in trials:
        values = tuple(getattr(trial.point, name) for name in names)
        best.setdefault(values if len(names) > 1 else values[0], trial)
    return best


def draw(trials: Sequence[Trial], greedy: Score, target: Path) -> None:
    """Plot the WER as a map over the two options with the largest effect, and as a curve over each option.

    A point of the plot is the best trial with these values, over all values of other options. `trials` are sorted,
    best first. The suffix of `target` chooses the format of the image.
    """
    from matplotlib.figure import Figure

    names = options_of_panels(trials)
    if not names:
        raise ValueError(f"trials hold {len(trials)} points alike, expected several values of an option")
    mapped = [name for name in names if name in WEIGHTS][:2]
    panels = len(names) + (len(mapped) == 2)
    rows = -(-panels // ROW)
    figure = Figure(figsize=(4.2 * min(panels, ROW), 3.8 * rows), layout="constrained")
    axes = [figure.add_subplot(rows, min(panels, ROW), n + 1) for n in range(panels)]
    if len(mapped) == 2:
        _map(axes.pop(0), trials, *sorted(mapped, key=WEIGHTS.index))
    for name, panel in zip(names, axes, strict=True):
        _curve(panel, trials, name, greedy)
    figure.suptitle(f"best: {trials[0].point}", fontsize=10)
    with written_whole(target) as temporary:
        figure.savefig(temporary, dpi=110)


def _percent(trial: Trial) -> float:
    return 100 * trial.score.errors.wer


def _map(axes: Axes, trials: Sequence[Trial], across: str, up: str) -> None:
    """Draw the WER over two options as a table of coloured cells, with a frame around the best cell."""
    from matplotlib.patches import Rectangle

    cells = best_by(trials, across, up)
    columns, rows = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    wers = [[_percent(cells[x, y]) if (x, y) in cells else float("nan") for x in columns] for y in rows]
    axes.imshow(wers, origin="lower", aspect="auto", cmap="Blues")
    shown = [wer for line in wers for wer in line if wer == wer]  # later stages leave holes
    dark = min(shown) + DARK * (max(shown) - min(shown))
    for row, line in enumerate(wers):
        for column, wer in enumerate(line):
            if wer == wer:
                colour = "white" if wer > dark else "black"
                axes.text(column, row, f"{wer:.1f}", ha="center", va="center", fontsize=7, color=colour)
    best = trials[0].point
    corner = columns.index(getattr(best, across)) - 0.5, rows.index(getattr(best, up)) - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=FSCORE_COLOUR, linewidth=2.5))
    axes.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    axes.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    axes.set(xlabel=across, ylabel=up, title="WER %")


def _curve(axes: Axes, trials: Sequence[Trial], name: str, greedy: Score) -> None:
    """Draw WER and F-score of phrases over one option, with dotted lines for greedy decoding."""
    best = best_by(trials, name)
    values = sorted(best)
    is_number = not isinstance(values[0], str | bool)
    positions = values if is_number else range(len(values))
    axes.plot(positions, [_percent(best[value]) for value in values], "o-", color=WER_COLOUR)
    axes.axhline(100 * greedy.errors.wer, linestyle=":", color=WER_COLOUR)
    axes.set_ylabel("WER % (dotted: greedy)", color=WER_COLOUR)
    if not is_number:
        axes.set_xticks(positions, [str(value) for value in values])
    axes.axvline(positions[values.index(getattr(trials[0].point, name))], color="grey", alpha=0.3, linewidth=6)
    axes.set(xlabel=name, title="best with each value")
    axes.grid(True, alpha=0.25)
    if greedy.phrases is not None:
        right = axes.twinx()
        scores = [phrases.fscore for value in values if (phrases := best[value].score.phrases) is not None]
        right.plot(positions, scores, "s--", color=FSCORE_COLOUR)
        right.axhline(greedy.phrases.fscore, linestyle=":", color=FSCORE_COLOUR)
        right.set_ylim(-0.03, 1.03)
        right.set_ylabel("F-score of phrases", color=FSCORE_COLOUR)
