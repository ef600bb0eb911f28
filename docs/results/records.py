"""Records of benchmarks: measured anew, written into the pages of docs/, drawn.

    python docs/results/records.py measure [NAME ...] [KEY=VALUE ...]
                                                           all records, or some of `RUNS`; then `NAMED`
    python docs/results/records.py write                   figures and pictures of the pages, from the records
    python docs/results/records.py plot RECORD.json PICTURE.png [TASK]

A picture shows one task: error rate against speed, on a GPU milliseconds per batch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.report import name_of_run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# pages with figures of records
PAGES = [
    page
    for page in sorted((*HERE.parent.glob("*.md"), *HERE.parent.glob("experiments/*.md")))
    if "<!-- records: " in page.read_text(encoding="utf-8")
]
# 60 minutes on two cores. `NAMED` are measured only if they are named: scale and scale-contexts take 18 more each and
# 6 GB of disk, scale-400m four times as much; boosting needs folder=FOLDER and takes 8 more
RUNS = {
    "flexctc_beam": "utterances=8 beams=[4,8,16] pair_seconds=5 probes=true",
    "alsd_pp": "peers=[nemo] utterances=4 beams=[4,8] threads=2 pair_seconds=5",
    "aes_pp": "peers=[nemo] utterances=4 beams=[4,8] threads=2 pair_seconds=5",
    "cuda_wfst": "peers=[kaldi_decoder] utterances=32 repeats=7 pair_seconds=10",
    "paged_biglm": "peers=[large_lm,small_lm,let,two_pass,eager,bounded_eager,eager_groups] "
    "utterances=32 graph_beams=[8,12,13,17,25] repeats=5 pair_seconds=2 group_sizes=[1,4,0]",
    "flexctc_beam-live": "strategy=flexctc_beam mode=live",
    "cuda_wfst-live": "strategy=cuda_wfst mode=live",
    "alsd_pp-live": "strategy=alsd_pp mode=live",
    "cluster": "strategy=flexctc_beam mode=cluster tasks=[hard] beams=[4] repeats=2",
    "flexctc_beam-greedy_fusion": "strategy=flexctc_beam peers=[greedy_fusion] utterances=32 beams=[4,8,16,32,64,128] "
    "many_phrases=0",
    "alsd_pp-greedy_fusion": "strategy=alsd_pp peers=[greedy_fusion] utterances=4 beams=[1,2,4,8,12]",
    "aes_pp-greedy_fusion": "strategy=aes_pp peers=[greedy_fusion] utterances=4 beams=[1,2,4,8,12]",
    "alsd_pp-batches": "strategy=alsd_pp peers=[greedy_fusion] tasks=[peaked] utterances=32 beams=[6] phrases=0 "
    "batches=[1,4,8,16,32] end_to_end=true encoder_precision=float32",
    "alsd_pp-unbatched": "strategy=alsd_pp peers=[unbatched] utterances=4 beams=[1,2,4,8,12]",
    "aes_pp-unbatched": "strategy=aes_pp peers=[unbatched] utterances=4 beams=[8]",
    "flexctc_beam-word_graph": "strategy=flexctc_beam peers=[word_graph] beams=[4,16] many_phrases=0",
    "cuda_wfst-topologies": "strategy=cuda_wfst peers=[topologies] utterances=32",
    "cuda_wfst-flashlight_words": "strategy=cuda_wfst peers=[flashlight_words] utterances=32 threads=2 "
    "end_to_end=true encoder_precision=float32 encoder_layers=16 encoder_width=176",
    "paged_biglm-one_thread": "strategy=paged_biglm peers=[one_thread] utterances=32 threads=2 group_sizes=[] "
    "repeats=9",
    "scale-1m": "strategy=paged_biglm mode=scale tasks=[peaked] utterances=32 graph_beams=[13] ngrams=1000000",
    "scale-10m": "strategy=paged_biglm mode=scale tasks=[peaked] utterances=32 graph_beams=[13] ngrams=10000000",
    "scale-400m": "strategy=paged_biglm mode=scale tasks=[peaked] utterances=32 graph_beams=[13] ngrams=400000000",
    "scale-contexts": "strategy=paged_biglm mode=scale tasks=[peaked] utterances=32 graph_beams=[13] "
    "ngrams=100000000 continuations=4",
    "scale": "strategy=paged_biglm mode=scale tasks=[peaked] utterances=32 graph_beams=[13] ngrams=100000000",
    "boosting": "",
}
PROGRAMS = {"boosting": "benchmarks.boosting_cells"}  # others: benchmarks
NAMED = ("scale", "scale-contexts", "scale-400m", "boosting")  # measured only if they are named
TASKS = ("peaked", "hard")
KINDS = {"rnnt": "RNN-T", "tdt": "TDT"}
Record = dict[str, Any]
Columns = list[tuple[str, int]]  # task and beam

# The task of each picture. Of transducers the hard one has 20 s of speech, too few for error rates.
PICTURED = {"flexctc_beam": "hard", "alsd_pp": "peaked-rnnt", "cuda_wfst": "hard"}
TITLES = {"hard": "hard real speech", "peaked": "synthetic emissions"}
PEERS = {
    "nemo": "NeMo beam_batch", "nemo_malsd": "NeMo malsd_batch", "nemo_maes": "NeMo maes_batch",
    "nemo_greedy": "NeMo greedy", "kaldi_decoder": "Kaldi",
}  # fmt: skip
MOST_LINES = 5  # of a picture


class Point(NamedTuple):
    x: float
    y: float
    label: str = ""


Lines = dict[str, list[Point]]
Rows = Sequence[Mapping[str, Any]]


def plot_rows(header: Mapping[str, Any], rows: Rows, path: str, task: str | None = None) -> None:
    """Draw the rows of one task, 900 pixels wide; the suffix of `path` chooses the format.

    Args:
        task: its name; None = the first one that was measured.

    Raises:
        ValueError: no row of the task was measured.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if not row.get("skipped")]
    own = [row for row in measured if row["task"] == (task or measured[0]["task"])]
    if not own:
        raise ValueError(f"rows hold no measured row of task {task!r}, expected at least one")
    batches = bool(own[0].get("batch"))  # on a GPU
    lines = batch_lines(own) if batches else lines_of(own)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, dict(list(lines.items())[:MOST_LINES]), header["strategy"])
    (_label_batches if batches else _label_errors)(axes)
    name, _, networks = own[0]["task"].partition("-")
    threads = f"{header['threads']} thread" + "s" * (header["threads"] > 1)
    what = [TITLES.get(name, name), KINDS.get(networks, ""), threads, header["device"]]
    axes.set_title(", ".join(filter(None, what)), fontsize=12, loc="left")
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def lines_of(rows: Rows) -> Lines:
    """Label -> (RTFx, WER, beam) of each beam; rows with an LM and without phrases, where there are any.

    Our decoder is measured beside every peer: its first measurement is shown. Rows that set our decoder
    beside itself are about cost, not about errors, and are left out.
    """
    plain = [row for row in rows if not row["params"]["phrases"]] or rows
    found: dict[str, dict[Any, Point]] = defaultdict(dict)
    for row in [row for row in plain if row["params"]["lm"]] or plain:
        if row["peer"] == row["strategy"]:
            continue
        for side, label, beam in decoders(row):
            found[label].setdefault(beam, Point(row["rtfx"][side], row["wer"][side], f"{beam}" if beam else ""))
    return {label: [points[key] for key in sorted(points)] for label, points in found.items()}


def batch_lines(rows: Rows) -> Lines:
    """Label -> (batch size, milliseconds) of the decoders with the largest beam, and of one read of the input."""
    part = [row for row in rows if row["part"] == rows[0]["part"]]
    widest = max(row["params"]["beam_size"] for row in part)
    found: dict[str, dict[int, Point]] = defaultdict(dict)
    for row in part:
        if row["params"]["beam_size"] != widest or row["peer"] == row["strategy"]:
            continue
        times = {label: row["seconds"][side] for side, label, _ in decoders(row)}
        if row["roofline"]:
            times["one read of the log-probs"] = row["roofline"]["seconds"]
        for label, seconds in times.items():
            found[label].setdefault(row["batch"], Point(row["batch"], 1e3 * seconds))
    return {label: [points[key] for key in sorted(points)] for label, points in found.items()}


def decoders(row: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Both decoders of a row: "ours" or "peer", the name in a picture, the beam."""
    both = (("ours", row["strategy"], row["params"]), ("peer", row["peer"], row["peer_params"]))
    with_lm = {True: " + LM", False: ""}
    return [(side, PEERS.get(name, name) + with_lm[bool(p["lm"])], p["beam_size"]) for side, name, p in both]


def _draw(axes: Any, lines: Lines, strategy: str) -> None:
    """Lines with their names beside them, ours thicker."""
    for index, (label, points) in enumerate(lines.items()):
        ours, color = label.startswith(strategy), f"C{index}"
        axes.plot(
            [point.x for point in points], [point.y for point in points], color=color,
            marker="o" if ours else "s", linestyle="-" if ours else "--", linewidth=2.5 if ours else 1.5,
        )  # fmt: skip
        for point in points:
            axes.annotate(
                point.label, (point.x, point.y), xytext=(0, 7), textcoords="offset points", ha="center",
                fontsize=10, color=color,
            )  # fmt: skip
        top = max(points, key=lambda point: (point.y, -point.x))
        axes.annotate(
            label, (top.x, top.y), xytext=(0, 21), textcoords="offset points", ha="left" if ours else "center",
            fontsize=12, color=color, weight="bold" if ours else "normal",
        )  # fmt: skip


def _label_errors(axes: Any) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.22, y=0.15)
    axes.set_xlabel("seconds of audio decoded per second (numbers: beam size)", fontsize=12)
    axes.set_ylabel("word error rate, %", fontsize=12)


def _label_batches(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.22, y=0.15)
    axes.set_xlabel("batch size", fontsize=12)
    axes.set_ylabel("milliseconds per batch", fontsize=12)


# ------------------------------------------------------------------------------- measured anew


def measure(names: Sequence[str]) -> None:
    """Run benchmarks; a new record takes the place of the old one of the same strategy and mode."""
    given = [name for name in names if "=" in name]
    for name in [name for name in names if name not in given] or [name for name in RUNS if name not in NAMED]:
        program, options = PROGRAMS.get(name, "benchmarks"), [*RUNS[name].split(), *given]
        if program == "benchmarks" and "strategy=" not in RUNS[name]:
            options.insert(0, f"strategy={name}")
        before = {path for path, _ in records().values()}
        command = [sys.executable, "-m", program, *options, f"out={HERE}"]
        print(" ".join(command[2:]), flush=True)
        subprocess.run(command, cwd=ROOT, check=True)
        for path in before - {path for path, _ in records().values()}:
            path.unlink()
    write()


def records() -> dict[str, tuple[Path, Record]]:
    """The latest record of each run on a CPU, by the name of the run: "cuda_wfst", "cuda_wfst-live"."""
    found: dict[str, tuple[Path, Record]] = {}
    for path in HERE.glob("*-*.json"):  # demo.json is no benchmark
        record = read(path)
        if record["options"]["device"] != "cpu":
            continue
        name = name_of_run(record)
        if name not in found or record["date"] > found[name][1]["date"]:
            found[name] = path, record
    return found


def read(path: str | Path) -> Record:
    record: Record = json.loads(Path(path).read_text(encoding="utf-8"))
    return record


# ------------------------------------------------------------------------- figures of the page


def write() -> None:
    for page in PAGES:
        page.write_text(with_figures(page.read_text(encoding="utf-8"), results_from(page)), encoding="utf-8")
    for name, task in PICTURED.items():
        record = records()[name][1]
        plot_rows(record, record["rows"], str(HERE / f"{name}_cpu.png"), task)


def results_from(page: Path) -> str:
    """The folder of records, as links of a page name it."""
    return "../results" if page.parent.name == "experiments" else "results"


def with_figures(text: str, results: str = "results") -> str:
    """A page with the figures of the latest records between its marks: "records: NAME [NAME ...] [as WRITER]".

    Args:
        results: the folder of records, as links of the page name it.

    Raises:
        ValueError: a row of a record is not verified.
    """
    found = records()

    def replaced(match: re.Match[str]) -> str:
        given, _, form = match[1].partition(" as ")
        names = given.split()
        for name in names:
            check_verified(name, found[name][1])
        links = [f"[rows]({results}/{found[name][0].name})" for name in names]
        written = WRITERS[form or names[0]](*(found[name][1] for name in names), *links)
        return f"<!-- records: {match[1]} -->\n{written}\n<!-- end -->"

    return re.sub(r"<!-- records: ([\w -]+?) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)


# Decoders of another search: rows are verified if ours has no more errors. Where it has, the page says so.
COMPARED_BY_ERRORS = ("flashlight", "flashlight_words", "pyctcdecode")


def check_verified(name: str, record: Record) -> None:
    for row in record["rows"]:
        if not row.get("skipped") and row.get("verified") is False and row.get("peer") not in COMPARED_BY_ERRORS:
            raise ValueError(f"the record of {name} has a row that is not verified: {row}")


def task_of(row: Mapping[str, Any]) -> str:
    return row["task"].partition("-")[0]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def prose(text: str) -> str:
    """A paragraph."""
    return "\n\n" + textwrap.fill(" ".join(text.split()), 118, break_on_hyphens=False, break_long_words=False)


def audio(record: Record) -> str:
    """Of each task, how much of it there is."""
    unique = {task["name"].partition("-")[0]: task for task in record["tasks"]}
    return "; ".join(
        f"{name}: {task['utterances']} utterances, {task['audio_seconds']:.0f} s of audio, V = {task['vocab_size']}"
        for name, task in unique.items()
    )


def ratio_rows(record: Record, label: Callable[[Record], str | None]) -> tuple[Columns, dict[str, Record]]:
    """(task, beam) of the columns; label -> (task, beam) -> row; rows without a label are left out."""
    lines: dict[str, Record] = defaultdict(dict)
    for row in record["rows"]:
        name = None if row.get("skipped") else label(row)
        if name is not None:
            lines[name][task_of(row), row["params"]["beam_size"]] = row
    columns = list(dict.fromkeys(key for cells in lines.values() for key in cells))
    return sorted(columns, key=lambda key: (TASKS.index(key[0]), key[1])), lines


def ratio_cells(columns: Columns, cells: Record) -> list[str]:
    return ["" if key not in cells else _ratio(cells[key]) for key in columns]


def _ratio(row: Record) -> str:
    ratio = row["ratio"]
    return f"{ratio:.{int(ratio < 20)}f}x" + ("" if row["verified"] else ", WER higher")


def column_names(columns: Columns) -> list[str]:
    return [f"{task}, K={beam}" for task, beam in columns]


def widest(columns: Columns) -> Columns:
    """The columns of the largest beam of each task."""
    return [max(key for key in columns if key[0] == task) for task in dict.fromkeys(task for task, _ in columns)]


def fused(row: Record, lm: str = "LM", phrases: str = "phrases") -> str:
    params = row["peer_params"]
    return f" + {lm}" * bool(params["lm"]) + f" + {params['phrases']} {phrases}" * bool(params["phrases"])


def both(row: Record, name: str, digits: int = 1) -> str:
    return f"{row[name]['peer']:,.{digits}f} / {row[name]['ours']:,.{digits}f}"


def ctc_lines(record: Record) -> tuple[Columns, dict[str, Record]]:
    versions = record["versions"]

    def label(row: Record) -> str | None:
        names = {
            "nemo": f"NeMo {versions['nemo_toolkit']} `beam_batch`{fused(row)}",
            "flashlight": f"flashlight-text {versions['flashlight-text']}, lexicon-free{fused(row)}",
            "pyctcdecode": f"pyctcdecode {versions['pyctcdecode']}{fused(row, 'word LM', 'hotwords')}",
        }
        return names.get(row["peer"])

    return ratio_rows(record, label)


def flexctc_beam(record: Record, link: str) -> str:
    columns, lines = ctc_lines(record)
    columns = widest(columns)
    shown = [
        [name, *ratio_cells(columns, cells), *(both(cells[key], "wer") if key in cells else "" for key in columns)]
        for name, cells in lines.items()
    ]
    header = [*column_names(columns), *(f"WER %, {task}, peer / ours" for task, _ in columns)]
    own = {(row["peer"], task_of(row)): row for row in record["rows"] if not row.get("skipped")}
    greedy, many = own["nemo_greedy", "peaked"], own["flexctc_beam", "peaked"]
    slower = [1 / own["nemo_greedy", task]["ratio"] for task in TASKS]
    few, lots = (many[side]["phrases"] for side in ("peer_params", "params"))
    starts = [record["probes"]["start"][when]["first_decode"] for when in ("first_ever", "later")]
    return table(["ours against", *header], shown) + prose(f"""
        ({audio(record)}; {link}.) Beam {greedy["params"]["beam_size"]} with the LM takes {slower[0]:.1f} times the CPU
        seconds of NeMo's `greedy_batch` on the peaked task and {slower[1]:.1f} times on the hard task. With {lots:,}
        boosted phrases it takes {1 / many["ratio"]:.2f} times as long as with {few}. The first decoding on a machine
        takes {starts[0]:.0f} s, because it compiles; in later processes it takes {starts[1]:.2f} s.""")


def ctc_beams(record: Record, link: str) -> str:
    """Every beam."""
    columns, lines = ctc_lines(record)
    shown = [[name, *ratio_cells(columns, cells)] for name, cells in lines.items()]
    return table(["ours against", *column_names(columns)], shown) + prose(f"({audio(record)}; {link}.)")


def transducer_lines(record: Record, networks: str) -> tuple[Columns, dict[str, Record]]:
    searches = {"nemo_malsd": "malsd_batch", "nemo_maes": "maes_batch"}

    def label(row: Record) -> str | None:
        if row["networks"] != networks:
            return None
        if row["peer"] == "nemo_greedy":
            return f"`{row['strategy']}` + LM / `greedy_batch`"
        return f"`{row['strategy']}` / `{searches[row['peer']]}`{fused(row)}" if row["peer"] in searches else None

    return ratio_rows(record, label)


def transducers(alsd: Record, aes: Record, alsd_link: str, aes_link: str) -> str:
    shown, columns = [], widest(transducer_lines(alsd, "rnnt")[0])
    for record in (alsd, aes):
        lines = [transducer_lines(record, networks)[1] for networks in KINDS]
        for name in dict.fromkeys(name for kind in lines for name in kind):
            shown.append([name, *(cell for kind in lines for cell in ratio_cells(columns, kind.get(name, {})))])
    header = [f"{kind}, {name}" for kind in KINDS.values() for name in column_names(columns)]
    return table(["ratio of seconds", *header], shown) + prose(f"({alsd_link} of alsd_pp, {aes_link} of aes_pp.)")


def transducer_beams(alsd: Record, aes: Record, alsd_link: str, aes_link: str) -> str:
    """Every beam."""
    shown, columns = [], transducer_lines(alsd, "rnnt")[0]
    for record in (alsd, aes):
        for networks, kind in KINDS.items():
            lines = transducer_lines(record, networks)[1]
            shown += [[f"{kind} {name}", *ratio_cells(columns, cells)] for name, cells in lines.items()]
    links = f"{alsd_link} of alsd_pp, {aes_link} of aes_pp"
    return table(["ratio of seconds", *column_names(columns)], shown) + prose(f"({audio(alsd)}; {links}.)")


def cuda_wfst(record: Record, link: str) -> str:
    shown = [
        [task_of(row), str(row["params"]["beam_size"]), f"{row['ratio']:.1f}x",
         f"{row['rtfx']['ours']:,.0f}", f"{row['wer']['ours']:.1f}"]
        for row in record["rows"] if row["peer"] == "kaldi_decoder" and not row.get("skipped")
    ]  # fmt: skip
    sizes = {task_of(row): row["graph"]["ngrams"] for row in record["rows"] if row.get("graph")}
    graphs = "; ".join(f"{task}: {size / 1000:,.0f}k n-grams" for task, size in sizes.items())
    header = ["task", "beam", "CPU seconds, Kaldi / ours", "RTFx", "WER %"]
    plot = "[plot](results/cuda_wfst_cpu.png)"
    return table(header, shown) + prose(f"({audio(record)}; word trigrams, {graphs}; {link}, {plot}.)")


SERVED = {"one_by_one": "one by one", "nemo_greedy": "NeMo greedy"}


def live(*given: Any, every: bool = False) -> str:
    """Without `every`: no calls one by one, and of NeMo's greedy decoding only the streams."""
    found = given[: len(given) // 2]
    shown = []
    for record in found:
        rows: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
        for row in record["rows"]:
            rows[row["task"], row["streams"]][row["peer"]] = row
        for own in rows.values():
            ours, *others = (own[name] for name in (record["strategy"], *SERVED))
            fusion = "" if ours["strategy"] == "cuda_wfst" else " + LM"
            kind = f" of {KINDS[ours['networks']]}" if ours["networks"] else ""
            shown.append([
                f"{task_of(ours)}, `{ours['strategy']}`{kind}{fusion}, beam {ours['params']['beam_size']}",
                *(_milliseconds(row) for row in (ours, *others * every)),
                *(f"{row['streams_per_core']:,.0f}" for row in (ours, *others[not every :])),
            ])  # fmt: skip
    names = list(SERVED.values())
    header = ["", "ms until the text, p50 / p99", *names * every, "streams per core", *names[not every :]]
    links = ", ".join(
        f"{link} of {record['strategy']}" for link, record in zip(given[len(found) :], found, strict=True)
    )
    (n,) = {row["streams"] for record in found for row in record["rows"]}
    return table(header, shown) + prose(f"""
        ({n} utterances at once on average, chunks of {1000 * found[0]["rows"][0]["chunk_seconds"]:.0f} ms, one core;
        {links}.)""")


def _milliseconds(row: Record) -> str:
    p50, p99 = (row["latency"]["partial"][name] for name in ("p50", "p99"))
    return "-" if p50 is None else f"{1000 * p50:.1f} / {1000 * p99:.1f}"


def paged_biglm(record: Record, link: str) -> str:
    found = {(task_of(row), row["params"]["beam_size"], row["peer"]): row
             for row in record["rows"] if not row.get("skipped") and row["peer"] != "paged_biglm"}  # fmt: skip
    names = ("large_lm", "lazy", "let", "two_pass")
    shown = []
    for task, beam in dict.fromkeys(key[:2] for key in found):
        rows = {peer: found[task, beam, peer] for peer in ("small_lm", *names) if peer != "lazy"}
        small = rows["small_lm"]
        sides = {name: (rows[name], "peer") if name in rows else (small, "ours") for name in names}
        times = [rows[name]["ratio"] / small["ratio"] if name in rows else 1 / small["ratio"] for name in names]
        queries = [f"{row['work'][side]['look_ups']:,.1f}" for row, side in sides.values() if row["work"][side]]
        others = [row["beside_large_lm"][side] for row, side in list(sides.values())[1:]]
        same = [str(seen["same"]) + f" ({seen['worse']})" * (seen["worse"] > 0) for seen in others]
        count = sum(small["beside_large_lm"]["ours"].values())
        shown.append([
            task, str(beam), " / ".join(f"{time:.2f}" for time in times), " / ".join(queries),
            f"{' / '.join(same)} of {count}", both(small, "wer"),
        ])  # fmt: skip
    header = ["task", "beam", "CPU seconds relative to the small LM alone: large LM's graph / lazy / let / two passes",
              "queries of the large LM per frame: lazy / let", "texts as in the large LM's graph (other texts with "
              "worse scores): lazy / let / two passes", "WER %, small LM alone / lazy"]  # fmt: skip
    limited = [row for row in record["rows"] if not row.get("skipped") and row["peer"] == "paged_biglm"]
    groups = table(
        ["task", "beam", "`group_size`", "times as fast as with 16", "texts as in the large LM's graph: "
         "with this limit / with 16"],
        [[task_of(row), *(str(row["params"][name]) for name in ("beam_size", "group_size")),
          f"{row['ratio']:.2f}",
          " / ".join(str(row["beside_large_lm"][side]["same"]) for side in ("ours", "peer"))
          + f" of {sum(row['beside_large_lm']['ours'].values())}"] for row in limited],
    )  # fmt: skip
    lms = {task_of(row): row["lms"] for row in found.values()}
    sizes = [f"{t}: {n['small'] / 1000:,.0f}k n-grams under {n['large'] / 1000:,.0f}k" for t, n in lms.items()]
    notes = [audio(record), f"LMs, {'; '.join(sizes)}", link, record["options"]["note"]]
    return "\n\n".join((
        table(header, shown),
        "lazy and let use the default `group_size`, 16. With other limits of lazy (0: none):",
        groups,
    )) + prose(f"({'; '.join(filter(None, notes))}.)")  # fmt: skip


def let_tables(record: Record, link: str) -> str:
    """Error rates, speeds and compositions of [LET]'s baseline, of LET and of rescored lattices."""
    shown, found = [], defaultdict[tuple[str, int], dict[str, Record]](dict)
    for row in record["rows"]:
        if not row.get("skipped") and row["peer"] != record["strategy"]:  # that has other group sizes
            found[task_of(row), row["params"]["beam_size"]][row["peer"]] = row
    for (task, beam), rows in found.items():
        eager, bounded, let, two_pass = (rows[name] for name in ("eager", "bounded_eager", "let", "two_pass"))
        errors = [row["wer"]["peer"] for row in (two_pass, eager, let)]
        speeds = [eager["ratio"] / row["ratio"] for row in (bounded, let)]
        queries = [row["work"]["peer"]["look_ups"] for row in (eager, bounded, let)]
        shown.append([
            task, str(beam), " / ".join(f"{wer:.1f}" for wer in errors),
            " / ".join(f"{speed:.1f}" for speed in (*speeds, eager["ratio"])),
            " / ".join(f"{count:,.1f}" for count in queries),
        ])  # fmt: skip
    header = ["task", "beam", "WER %: two passes / eager / LET", "times as fast as eager: in bounds / LET / lazy",
              "LM queries per frame: eager / in bounds / LET"]  # fmt: skip
    return table(header, shown) + prose(f"({audio(record)}; {link}.)")


def batch_sizes(record: Record, link: str) -> str:
    """Greedy decoding and beam search over batch sizes."""
    lines = defaultdict[str, dict[int, str]](dict)
    for row in record["rows"]:
        label = f"{KINDS[row['networks']]}, {row['part']}" + ", with LM" * row["params"]["lm"]
        lines[label][row["batch"]] = "; ".join(f"{row['rtfx'][side]:,.0f}" for side in ("peer", "ours"))
    sizes = record["options"]["batches"]
    shown = [[label, *map(cells.__getitem__, sizes)] for label, cells in lines.items()]
    return table(["", *map(str, sizes)], shown) + prose(f"({audio(record)}; {record['encoder']}; {link}.)")


def lm_sizes(*given: Any) -> str:
    """Memory and time over the size of the large LM."""
    found, shown = given[: len(given) // 2], []
    for record in sorted(found, key=lambda record: record["options"]["ngrams"]):
        rows = {row["stage"]: row for row in record["rows"]}
        packed, small, large = (rows[stage] for stage in ("pack", "small_lm", "paged_biglm"))
        shown.append([
            f"{packed['ngrams'] / 1e6:,.1f} M", f"{packed['bytes'] / 1e9:.3f} GB", f"{packed['bytes_per_ngram']:.1f}",
            f"{100 * packed['paged']['device_share']:.0f} %", f"{rows['graph']['graph']['ngrams'] / 1e6:.2f} M",
            f"{large['decode']['cpu'] / small['decode']['cpu']:.2f}", f"{large['rtfx']:,.0f}",
            f"{large['work_per_frame']['look_ups']:.1f}", f"{small['wer']:.1f} / {large['wer']:.1f}", record["cpu"],
        ])  # fmt: skip
    header = ["n-grams of the large LM", "packed", "bytes per n-gram", "of it on a GPU", "n-grams of the small LM",
              "seconds / those of the small LM", "RTFx", "LM queries per frame", "WER %, small LM / large LM",
              "device"]  # fmt: skip
    return table(header, shown) + prose(f"(Beam 13; {', '.join(given[len(found) :])}.)")


def scale(record: Record, link: str) -> str:
    by_stage = {row["stage"]: row for row in record["rows"]}
    packed, small, both_lms = (by_stage[stage] for stage in ("pack", "small_lm", "paged_biglm"))
    memory, per_million = both_lms["memory"], packed["seconds"]["cpu"] / packed["ngrams"] * 1e6
    slower, ngrams = both_lms["decode"]["cpu"] / small["decode"]["cpu"], by_stage["graph"]["graph"]["ngrams"]
    return prose(f"""
        The synthetic LM of {packed["ngrams"] / 1e6:.0f} million n-grams packs into {packed["bytes"] / 1e9:.2f} GB
        at {per_million:.1f} CPU seconds per million. Over a
        small LM of {ngrams / 1e6:.1f} million n-grams, decoding at beam {both_lms["beam"]} takes {slower:.2f} times as
        long as with the small LM alone. It has {memory["peak_rss"] / 1e9:.1f} GB of resident memory;
        {memory["peak_anonymous"] / 1e9:.1f} GB of it are not the file ({link}).""").strip()


def cluster(record: Record, link: str) -> str:
    alone = record["rows"][0]
    shown = []
    for row in record["rows"]:
        beside = row["per_utterance"] - row["work"]
        more = beside - (alone["per_utterance"] - alone["work"])
        shown.append([
            row["run"], f"{1e3 * row['per_utterance']:.2f}", f"{1e3 * row['work']:.2f}", f"{1e3 * beside:.2f}",
            "" if row is alone else f"{1e3 * more:.2f}", f"{row['start']:.0f}",
        ])  # fmt: skip
    header = ["run", "ms of process time per utterance", "decoding", "overhead", "overhead added by Ray",
              "s until the first partition"]  # fmt: skip
    return table(header, shown) + prose(f"""
        ({alone["utterances"]:,} utterances in partitions of {alone["partition_size"]}, {audio(record)}, beam
        {alone["beam"]}; all runs wrote the same bytes; {link}.)""")


SETS = {"shipped": "shipped", "lj": "LJ Speech", "digits": "digits"}


def boosting(record: Record, link: str) -> str:
    """Each way of paying phrases, with its weight from dev; then thresholds with one weight."""
    ways, rows, gates = ("nemo", "default", "threshold", "tuned"), [], []
    least = record["options"]["thresholds"]
    for row in record["rows"]:
        name, found = f"{SETS[row['task']]}, {row['head']}", row["results"]
        shown = [_score(found[way]["test"]) if way in found else "" for way in ("none", *ways)]
        wrong, many = [
            " / ".join(of(found[way]) if way in found else "-" for way in ways)
            for of in (lambda own: _per_100(own["test-wrong"]), lambda own: f"{own['test-many']['fscore']:.2f}")
        ]
        rows.append([name, *shown, wrong, many])
        counts = [(gate["dev"]["found"], gate["test"]["found"], _per_100(gate["test-wrong"])) for gate in row["gate"]]
        cells = [f"{dev} / {test}; {wrong}" for dev, test, wrong in counts]
        gates.append([name, f"{row['default_weight']:g}", *cells])
    more = f"{record['options']['distractors']:,} distractors"
    header = ["set, head", "no phrases", "NeMo's refunds", "default", "`ac_threshold`", "tuned", "only wrong phrases: "
              "inserted per 100 files, the last four columns", f"F-score with {more}, the same"]  # fmt: skip
    title = "phrases found on dev / on test; inserted per 100 files of test if all phrases are wrong"
    return "\n\n".join((
        table(header, rows),
        f"With the default way and one weight, {title}:",
        table(["set, head", "weight", "no threshold", *(f"`ac_threshold: {value:g}`" for value in least)], gates),
    )) + prose(f"({record['device']}, beam {record['options']['beam_size']}; {link}.)")  # fmt: skip


def phrase_curve(record: Record, link: str) -> str:
    """Multiples of the default weight against weights from dev, over all sets and heads."""
    shown = []
    for n in range(1, len(record["rows"][0]["curve"])):  # the first has factor 0
        points = [(row["curve"][n], row["curve"][0], row["results"]["tuned"]) for row in record["rows"]]
        shares = [point["test"]["fscore"] / tuned["test"]["fscore"] for point, _, tuned in points]
        many = mean(point["test-many"]["fscore"] / tuned["test-many"]["fscore"] for point, _, tuned in points)
        lists = ("test", "test-many", "test-wrong")
        changes = [[point[phrases]["wer"] - none[phrases]["wer"] for point, none, _ in points] for phrases in lists]
        wrong = [point["test-wrong"] for point, *_ in points]
        inserted = mean(100 * found["false"] / found["utterances"] for found in wrong)
        cells = [f"{mean(values):+.1f} ({max(values):+.1f})" for values in changes]
        shares_shown = f"{mean(shares):.2f} ({min(shares):.2f})"
        shown.append([f"{points[0][0]['factor']:g}", shares_shown, f"{many:.2f}", *cells, f"{inserted:.0f}"])
    others = f"+ {record['options']['distractors']:,} others"
    header = ["factor", "F-score / tuned", others, "WER change: list of the set", others, "wrong only",
              "inserted per 100 files"]  # fmt: skip
    return table(header, shown) + prose(
        f"({len(record['rows'])} rows, beam {record['options']['beam_size']}; {link}.)"
    )


def _score(found: Record) -> str:
    return f"{found['wer']:.1f}, {found['fscore']:.2f}"


def _per_100(found: Record) -> str:
    return f"{100 * found['false'] / found['utterances']:.0f}"


WRITERS: dict[str, Callable[..., str]] = {
    "flexctc_beam": flexctc_beam, "alsd_pp": transducers, "cuda_wfst": cuda_wfst, "flexctc_beam-live": live,
    "flexctc_beam-cluster": cluster, "paged_biglm": paged_biglm, "paged_biglm-scale": scale, "boosting": boosting,
    "let_tables": let_tables, "lm_sizes": lm_sizes, "ctc_beams": ctc_beams, "transducer_beams": transducer_beams,
    "live_calls": partial(live, every=True), "phrase_curve": phrase_curve,
    "batch_sizes": batch_sizes,
}  # fmt: skip


def main(verb: str, *arguments: str) -> None:
    if verb == "plot":
        record = read(arguments[0])
        plot_rows(record, record["rows"], *arguments[1:])
    else:
        {"measure": measure, "write": lambda _: write()}[verb](arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
