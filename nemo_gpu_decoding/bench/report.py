"""Rows as a table for people and as JSON for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.report import format_table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _both(name: str) -> Callable[[Row], str]:
    """A setting, of the peer and of ours where they differ."""

    def cell(row: Row) -> str:
        theirs, ours = row["peer_params"][name], row["params"][name]
        return f"{theirs:d}" if theirs == ours else f"{theirs:d}/{ours:d}"

    return cell


def _verified(row: Row) -> str:
    return f"skipped: {row['skipped']}" if row.get("skipped") else "yes" if row["verified"] else "NO"


BATCH: tuple[Column, ...] = (
    ("task", lambda row: row["task"]),
    ("peer", lambda row: row["peer"]),
    ("beam", _both("beam_size")),
    ("LM", _both("lm")),
    ("phrases", _both("phrases")),
    ("threads", _both("threads")),
    ("s peer", lambda row: _number(row["seconds"]["peer"], 4)),
    ("s ours", lambda row: _number(row["seconds"]["ours"], 4)),
    ("ratio", lambda row: _number(row["ratio"], 2)),
    ("WER peer", lambda row: _number(row["wer"]["peer"], 2)),
    ("WER ours", lambda row: _number(row["wer"]["ours"], 2)),
)
ON_GPU: tuple[Column, ...] = (
    ("part", lambda row: row["part"]),
    ("B", lambda row: str(row["batch"])),
    ("x roofline", lambda row: _number(row["roofline"] and row["roofline"]["ours"], 1)),
)


def _ms(part: str, name: str) -> Callable[[Row], str]:
    return lambda row: f"{1000 * row['latency'][part][name]:.2f}"


def _md1(kind: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        total = row["md1"][kind]["total"]
        return "no end" if total is None else f"{1000 * total:.2f}"

    return cell


STREAM: tuple[Column, ...] = (
    ("task", lambda row: row["task"]),
    ("streams", lambda row: str(row["streams"])),
    ("texts", lambda row: row["texts"]),
    ("load", lambda row: _number(row["utilisation"], 2)),
    ("batch", lambda row: _number(row["batch"]["mean"], 1)),
    *(
        (f"{part} {name}", _ms(part, name))
        for part in ("compute", "queue", "total")
        for name in ("mean", "p50", "p99")
    ),
    ("M/D/1 alone", _md1("alone")),
    ("M/D/1 batched", _md1("batched")),
)


def _gigabytes(name: str) -> Callable[[Row], str]:
    return lambda row: _number(row["memory"][name] and row["memory"][name] / 1e9, 2)


def _found(row: Row) -> str:
    """What a stage of mode=scale is about, in words."""
    if "counts" in row:
        return f"{sum(row['counts'])} n-grams, {row['bytes'] / 1e9:.3f} GB"
    if "paged" in row:
        share = 100 * row["paged"]["device_share"]
        size = f"{row['bytes'] / 1e9:.3f} GB, {row['bytes_per_ngram']:.1f} bytes per n-gram"
        return f"{size}; {share:.0f} % of it on a GPU if paged"
    if "graph" in row:
        return ", ".join(f"{count} {name}" for name, count in row["graph"].items())
    speed = f"{row['frames_per_second']:.0f} frames/s, WER {row['wer']:.2f} %"
    asked = row["work_per_frame"].get("look_ups")
    asked = "" if asked is None else f", {asked} look-ups per frame"
    return f"{speed}{asked}, verified: {'yes' if row['verified'] else 'NO'}"


SCALE: tuple[Column, ...] = (
    ("task", lambda row: row["task"]),
    ("stage", lambda row: row["stage"]),
    ("layout", lambda row: row.get("layout", "-")),
    ("beam", lambda row: str(row.get("beam", "-"))),
    ("CPU s", lambda row: _number(row["seconds"]["cpu"], 1)),
    ("peak GB", _gigabytes("peak_rss")),
    ("anonymous GB", _gigabytes("peak_anonymous")),
    ("found", _found),
)
CLOCKS = {
    "batch": "ratio = peer / ours, medians of {clock} over up to {repeats} repetitions, warm",
    "stream": "latencies in ms, M/D/1: mean total; event-driven, fed with the {clock} of the decoder",
    "scale": "every stage in a process of its own; CPU seconds",
}


def line_of(row: Row) -> str:
    """One row while others are still measured."""
    what = [str(row[name]) for name in ("task", "part", "peer", "stage", "layout") if row.get(name)]
    if "stage" in row:
        return f"{', '.join(what)}: {_found(row)}"
    settings = f"{row['params']}" if "peer" in row else f"{row['streams']} streams, texts: {row['texts']}"
    seen = row.get("skipped") or f"{row['verified_by']}: {_verified(row)}"
    ratio = f"{row['ratio']:.1f}x, " if row.get("ratio") else ""
    return f"{', '.join(what)}, {settings}: {ratio}{seen}"


def format_rows(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table of all rows, with what was measured where above it and the probes below."""
    mode, threads = header["mode"], header["threads"]
    lines = [f"{header['strategy']} on {header['device']}, {threads} thread(s), {header['date']}"]
    for task in header["tasks"]:
        size = f"{task['utterances']} utterances, {task['audio_seconds']} s, V={task['vocab_size']}"
        lines.append(f"{task['name']}: {size}")
    lines.append(CLOCKS[mode].format(clock=header["clock"], repeats=header["options"]["repeats"]))
    graphs = {f"graph of {row['task']}: {json.dumps(row['graph'])}" for row in rows if row.get("graph")}
    lines += [*(sorted(graphs) if mode == "batch" else []), ""]
    columns = {"batch": BATCH, "stream": STREAM, "scale": SCALE}[mode]
    if mode == "batch" and any(row["batch"] for row in rows):
        columns = ON_GPU + columns
    if mode != "scale":
        columns = (*columns, ("verified", _verified))
    lines.append(format_table([name for name, _ in columns], [[cell(r) for _, cell in columns] for r in rows]))
    probes = header.get("probes", {})
    lines += ["", *(f"{kind}: {json.dumps(result)}" for kind, result in probes.items())]
    return "\n".join(lines).rstrip()


def result_path(out: str, header: Mapping[str, Any]) -> Path:
    """The file to write: `out`, or if it is a folder <strategy>[-<mode>]-<device>-<date>.json in it."""
    path = Path(out)
    if not path.is_dir():
        return path
    name = re.sub(r"[^a-z0-9]+", "-", header["device"].lower()).strip("-")
    mode = "" if header["mode"] == "batch" else f"-{header['mode']}"
    return path / f"{header['strategy']}{mode}-{name}-{header['date'][:10]}.json"


def write_result(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write header and rows as JSON."""
    path.write_text(json.dumps({**header, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
