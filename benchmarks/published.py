"""Published speeds of decoders on GPUs, with those of the benchmarks beside them where the setting is the same.

    python -m benchmarks.published FOLDER

prints the table of `published.yaml` with the results that `python -m benchmarks device=cuda out=FOLDER` has written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_gpu_decoding.plain_text import format_table

FILE = Path(__file__).with_name("published.yaml")
HEADER = ("published by", "GPU", "setting", "unit", "published", "ours here", "theirs here")
NOT_MEASURED = "not measured"


def published_table(results: Sequence[Mapping[str, Any]], strategy: str | None = None) -> str:
    """Return the table of all published figures, or of those that are compared with one strategy.

    Args:
        results: headers of results with their `rows`, as `write_result` writes them.
    """
    measured = [
        (setting_of(result, row), row)
        for result in results
        for row in result["rows"]
        if row["verified"] and row["seconds"]["ours"] is not None
    ]
    shown = []
    for table, figure in figures():
        if strategy not in (None, table["strategy"]):
            continue
        setting = {name: value for name, value in figure.items() if name != "value"}
        row = {**table.get("row", {}), **setting}
        wanted = {"strategy": table["strategy"], **row}
        same = [other for seen, other in measured if "row" in table and wanted.items() <= seen.items()]
        theirs = [other for other in same if other["peer"] == table.get("peer")]
        shown.append([
            table["source"], table["gpu"], ", ".join([*map(_words, row.items()), table["setting"]]), table["unit"],
            str(figure["value"]), _cell(same, "ours", table["unit"]), _cell(theirs, "peer", table["unit"]),
        ])  # fmt: skip
    return format_table(HEADER, shown)


def figures() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the tables of `published.yaml` with each of their figures."""
    for table in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        for figure in table["figures"]:
            yield table, figure


def setting_of(result: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a row, with the keys of `published.yaml`."""
    params, options = row["params"], result["options"]
    return {
        **{name: row[name] for name in ("strategy", "part", "batch", "networks")},
        **{name: params.get(name) for name in ("lm", "boosting", "max_active")},
        "beam": params["beam_size"],
        "frames": options["max_frames"],
        "precision": options["encoder_precision"],
    }


def _words(item: tuple[str, Any]) -> str:
    """A setting in words: "batch 32", "no lm", "end to end"."""
    name, value = item
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return str(value) if isinstance(value, str) else f"{name} {value}"


def _cell(rows: Sequence[Mapping[str, Any]], side: str, unit: str) -> str:
    """The figure of one side, of each task that has been measured."""
    first = {row["task"]: row for row in reversed(rows)}
    values = {task: _in_unit(row, side, unit) for task, row in sorted(first.items())}
    shown = [f"{value:.0f} ({task})" if value >= 100 else f"{value:.3g} ({task})" for task, value in values.items()]
    return ", ".join(shown) or NOT_MEASURED


def _in_unit(row: Mapping[str, Any], side: str, unit: str) -> float:
    seconds, rtfx = row["seconds"][side], row["rtfx"][side]
    return {"RTFx": rtfx, "RTFx / 10": rtfx / 10, "RTF": 1 / rtfx, "ms": 1e3 * seconds}[unit]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of the benchmarks in a folder; other JSON files are left out."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [result for result in read if isinstance(result, dict) and result.get("mode") == "batch"]


if __name__ == "__main__":
    print(published_table(read_results(Path(sys.argv[1]))))
