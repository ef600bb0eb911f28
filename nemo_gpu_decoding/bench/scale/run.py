"""`bench mode=scale`: an LM of any size is made up, packed, and decoded with by paged_biglm.

Every row is a dict of one stage, which ran in a process of its own:

    stage                   generate (the ARPA file), pack, graph (the small LM's), small_lm (decodes
                            with it alone), paged_biglm (decodes with both)
    layout, beam            of the packed LM; of the search
    seconds                 {"cpu", "wall"} of the process, imports included
    memory                  {"peak_rss", "peak_anonymous"} bytes; the former counts mapped files, which
                            the system drops, or writes to the disk, where others need the memory
    bytes                   of the file that was written
    counts                  generate: n-grams of each order
    ngrams, repaired, states, bytes_per_ngram, max_error, arrays
                            pack: see `PackReport`; bytes of each array
    paged                   pack: what `placement: paged` keeps on a GPU, all but the arcs
                            {"device_bytes", "device_share": of the arrays}
    graph                   graph: its size
    load_seconds            decoding: CPU seconds to load graph and LMs
    decode                  {"first": seconds of the first pass over the utterances, "cpu": median CPU
                            seconds of later ones, "disk_reads_in_first": pages read from the disk}
    frames_per_second, rtfx of later passes, by CPU seconds
    work_per_frame          look-ups of the LMs and so on, see `Work`
    wer                     percent of words that are wrong
    verified, verified_by   does the LM's share of each score equal the LM's own score of the words
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_gpu_decoding.bench.environment import describe_run
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.report import machine, result_path, write_result
from nemo_gpu_decoding.bench.rows import Row
from nemo_gpu_decoding.bench.scale.process import run_stage
from nemo_gpu_decoding.bench.scale.stages import draw_task
from nemo_gpu_decoding.lm.packed import LAYOUTS
from nemo_gpu_decoding.report import format_table

HEAD = ("stage", "layout", "beam", "CPU s", "peak GB", "anonymous GB", "found")


def run_scale(options: BenchOptions) -> list[Row]:
    """Measure; print a table; write `options.out` if it is given. What else is written is deleted."""
    header = describe_run(options, draw_task(options)) | {"mode": "scale"}
    del header["ratio"]
    rows: list[Row] = []
    out = result_path(options.out, header) if options.out else None
    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-", dir=options.folder) as folder:
        for stage, arguments in _plan(options):
            found = run_stage(stage, options, Path(folder), **arguments)
            rows.append({"strategy": options.strategy, "stage": stage, **arguments, **found})
            print(" ".join(_cells(rows[-1])), file=sys.stderr, flush=True)
            if out:  # a run that is cut off keeps what it has
                write_result(out, header, rows)
    print(format_scale(header, rows))
    return rows


def _plan(options: BenchOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stages in their order, with their arguments."""
    yield "generate", {}
    for layout in LAYOUTS:
        yield "pack", {"layout": layout}
    yield "graph", {}
    for beam in options.graph_beams:
        yield "small_lm", {"beam": beam}
        for layout in LAYOUTS:
            yield "paged_biglm", {"beam": beam, "layout": layout}


def format_scale(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table of all rows with what was measured where above it."""
    threads, task = header["threads"]["bench"], header["task"]
    return "\n".join(
        [
            f"{header['strategy']} on {machine(header)}, {threads} thread(s), {header['date']}",
            f"{task['name']}: {task['utterances']} utterances, {task['audio_seconds']} s",
            "",
            format_table(HEAD, [_cells(row) for row in rows]),
        ]
    )


def _cells(row: Row) -> list[str]:
    memory = row["memory"]
    sizes = ["-" if size is None else f"{size / 1e9:.2f}" for size in memory.values()]
    place = [str(row.get(name, "-")) for name in ("layout", "beam")]
    return [row["stage"], *place, f"{row['seconds']['cpu']:.1f}", *sizes, _found(row)]


def _found(row: Row) -> str:
    """What the stage is about, in words."""
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
