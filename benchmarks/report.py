"""Output of rows as a table and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.options import GPU_BATCHES, BenchOptions
from benchmarks.published import published_table
from nemo_gpu_decoding.container import write_text
from nemo_gpu_decoding.plain_text import format_table

Row = dict[str, Any]
NAMING_PEERS = ("greedy_fusion", "topologies", "word_graph", "unbatched", "one_thread", "flashlight_words")


class Column(NamedTuple):
    """One column of a table of rows."""

    title: str
    value: str | Callable[[Row], Any]  # where it is in the row, "latency.total.p99"
    digits: int | None = None  # decimal places; None: unchanged
    factor: float = 1.0

    def cell(self, row: Row) -> str:
        value: Any = self.value(row) if callable(self.value) else reduce(_inner, self.value.split("."), row)
        if value is None:
            return "-"
        return str(value) if self.digits is None else f"{value * self.factor:.{self.digits}f}"


def _inner(row: Mapping[str, Any] | None, name: str) -> Any:
    return None if row is None else row.get(name)


def _both(name: str) -> Callable[[Row], str]:
    """A setting; that of the peer and of the strategy if they differ."""

    def cell(row: Row) -> str:
        theirs, ours = row["peer_params"][name], row["params"][name]
        return f"{theirs:d}" if theirs == ours else f"{theirs:d}/{ours:d}"

    return cell


def _verified(row: Row) -> str:
    return f"skipped: {row['skipped']}" if row.get("skipped") else "yes" if row["verified"] else "NO"


def _found(row: Row) -> str:
    """Description of a stage of mode=scale."""
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


TASK, VERIFIED = Column("task", "task"), Column("verified", _verified)
BATCHES, ROOFLINE = (Column("part", "part"), Column("B", "batch")), (Column("x roofline", "roofline.ours", 1),)
PAGED = (
    Column("placement", "params.placement"), Column("cache hits %", "work.ours.cache_hit_rate", 1, 100),
    Column("bus bytes per frame", "work.ours.bus_bytes", 0),
)  # fmt: skip
COLUMNS: dict[str, tuple[Column, ...]] = {
    "batch": (
        TASK, Column("peer", "peer"), Column("beam", _both("beam_size")), Column("LM", _both("lm")),
        Column("phrases", _both("phrases")), Column("threads", _both("threads")),
        Column("s peer", "seconds.peer", 4), Column("s ours", "seconds.ours", 4), Column("ratio", "ratio", 2),
        Column("WER peer", "wer.peer", 2), Column("WER ours", "wer.ours", 2),
        Column("F peer", "fscore.peer", 2), Column("F ours", "fscore.ours", 2), VERIFIED,
    ),
    "live": (
        TASK, Column("streams", "streams"), Column("decoder", "peer"), Column("load", "load", 2),
        Column("batch", "batch.mean", 1),
        *(Column(f"{text} {name}", f"latency.{text}.{name}", 2, 1e3)
          for text in ("partial", "final") for name in ("p50", "p99")),
        Column("streams/core", "streams_per_core", 0), Column("ratio", "ratio", 2), VERIFIED,
    ),
    "scale": (
        TASK, Column("stage", "stage"), Column("beam", "beam"),
        Column("CPU s", "seconds.cpu", 1), Column("peak GB", "memory.peak_rss", 2, 1e-9),
        Column("anonymous GB", "memory.peak_anonymous", 2, 1e-9), Column("found", _found),
    ),
    "cluster": (
        TASK, Column("run", "run"), Column("s until the first partition", "start", 1),
        Column("ms per utterance, all processes", "per_utterance", 3, 1e3), Column("at work on it", "work", 3, 1e3),
        Column("beside it", lambda row: f"{1e3 * (row['per_utterance'] - row['work']):.3f}"), VERIFIED,
    ),
}  # fmt: skip
CLOCKS = {
    "batch": "ratio = peer / ours, medians of {clock} over up to {repeats} repetitions, warm",
    "live": "ms from a chunk's last frame to its text (- waits without end), fed with the {clock} of decoding; "
    "streams/core: with a chunk of all at once; ratio: ours / the decoder's",
    "scale": "every stage in a process of its own; CPU seconds",
    "cluster": "wall-clock milliseconds times processes, of the best of {repeats} runs, without the first partitions",
}


def line_of(row: Row) -> str:
    """One row as a line of progress output."""
    what = [str(row[name]) for name in ("task", "part", "peer", "stage") if row.get(name)]
    if "run" in row:
        return f"{', '.join(what)}, {row['run']}: {1e3 * row['per_utterance']:.3f} ms per utterance, verified"
    if "stage" in row:
        return f"{', '.join(what)}: {_found(row)}"
    settings = f"{row['streams']} streams" if "streams" in row else f"{row['params']}"
    seen = row.get("skipped") or f"{row['verified_by']}: {_verified(row)}"
    ratio = f"{row['ratio']:.1f}x, " if row.get("ratio") else ""
    return f"{', '.join(what)}, {settings}: {ratio}{seen}"


def format_rows(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table of all rows, the machine and the options above it; below it probes, of a GPU also published figures."""
    mode, threads = header["mode"], header["threads"]
    lines = [f"{header['strategy']} on {header['device']}, {threads} thread(s), {header['date']}"]
    for task in header["tasks"]:
        size = f"{task['utterances']} utterances, {task['audio_seconds']} s, V={task['vocab_size']}"
        lines.append(f"{task['name']}: {size}")
    lines.append(CLOCKS[mode].format(clock=header["clock"], repeats=header["options"]["repeats"]))
    graphs = {f"graph of {row['task']}: {json.dumps(row['graph'])}" for row in rows if row.get("graph")}
    lines += [*(sorted(graphs) if mode == "batch" else []), ""]
    columns, on_gpu = COLUMNS[mode], mode == "batch" and header["options"]["device"] != "cpu"
    if mode == "batch" and any(row["batch"] for row in rows):
        columns = BATCHES + ROOFLINE * on_gpu + columns
    if any(row.get("params", {}).get("placement") == "paged" for row in rows):
        columns += PAGED
    lines.append(format_table([c.title for c in columns], [[c.cell(row) for c in columns] for row in rows]))
    if on_gpu:
        title = f"published, beside this run on {header['device']}:"
        lines += ["", title, published_table([{**header, "rows": rows}], header["strategy"])]
    probes = header.get("probes", {})
    lines += ["", *(f"{kind}: {json.dumps(result)}" for kind, result in probes.items())]
    return "\n".join(lines).rstrip()


def result_path(out: str, header: Mapping[str, Any]) -> Path:
    """The file to write: `out`, or if it is a folder <run>-<device>-<date>.json in it; see `name_of_run`."""
    path = Path(out)
    if not path.is_dir():
        return path
    name = re.sub(r"[^a-z0-9]+", "-", header["device"].lower()).strip("-")
    return path / f"{name_of_run(header)}-{name}-{header['date'][:10]}.json"


def name_of_run(header: Mapping[str, Any]) -> str:
    """Strategy, mode, the peer that gives the run its name ("cuda_wfst-topologies"), and an unusual kind of LM."""
    options = header["options"]
    named = next((peer for peer in options.get("peers", []) if peer in NAMING_PEERS), "")
    if header["mode"] == "scale":
        named = "" if options["ngrams"] == BenchOptions.ngrams else f"{options['ngrams'] // 1_000_000}m"
        named = "contexts" if options.get("continuations") else named
    if options["device"] == "cpu" and options.get("batches", []) not in ([], list(GPU_BATCHES)):
        named = "batches"
    mode = "" if header["mode"] == "batch" else header["mode"]
    return "-".join(filter(None, (header["strategy"], mode, named)))


def write_result(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write header and rows as JSON."""
    write_text(path, json.dumps({**header, "rows": list(rows)}, indent=1) + "\n")
