"""`python -m benchmarks mode=scale`: generates an LM of any size, packs it, and decodes with paged_biglm.

Every row is a stage, which runs in its own process; `docs/results/README.md` explains them.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import HostClock, torch_threads
from benchmarks.language import Language, make_language
from benchmarks.options import BenchOptions
from benchmarks.ours import describe_graph, graph_search, work_per_frame
from benchmarks.peers.base import Setting
from benchmarks.probe import in_process
from benchmarks.report import Row
from benchmarks.sources import make_tasks, speech_language, spoken_task
from benchmarks.synthetic_lm import SyntheticLM
from benchmarks.tasks import Task
from benchmarks.verify import lm_scores
from nemo_gpu_decoding import (
    CudaWFST,
    PagedBigLM,
    PagedBigLMConfig,
    WFSTConfig,
    build_graph,
    load_graph,
    load_packed_lm,
    pack_arpa,
    prune_ngram_lm,
    write_arpa,
)
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.store import save_graph
from nemo_gpu_decoding.lm.arpa import ArpaReader, read_arpa
from nemo_gpu_decoding.lm.estimate import write_ngrams
from nemo_gpu_decoding.metrics import word_errors

LARGE, LARGE_PACKED = "large.arpa", "large.packed"
SMALL, SMALL_PACKED, GRAPH = "small.arpa", "small.packed", "small.graph"
NGRAMS_PER_WORD, MOST_WORDS = 50, 200_000  # as in LMs of 1 M to 100 M n-grams made of text
SHARE = 0.02  # n-grams of the small LM / those of the large one


def plan(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """Stages in their order, with their arguments."""
    for task in options.tasks:
        for stage in ("generate", "pack", "graph"):
            yield {"task": task, "stage": stage}
        for beam in options.graph_beams or (10, 13):
            for stage in ("small_lm", "paged_biglm"):
                yield {"task": task, "stage": stage, "beam": beam}


def measure(options: BenchOptions, stages: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Run stages. The files of a task are deleted when the next task begins."""
    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-", dir=options.folder) as folder:
        for asked in stages:
            stage = "decode" if "beam" in asked else asked["stage"]
            arguments = {name: value for name, value in asked.items() if name != "stage" or "beam" in asked}
            answer, took = in_process(f"scale:{stage}", options, folder=folder, **arguments)
            yield {"strategy": options.strategy, **asked, **took, **answer}


def draw_language(options: BenchOptions, task: str) -> tuple[Language, np.random.Generator]:
    """The language of a task, the same in every stage, and the generator after it."""
    rng = np.random.default_rng(options.seed)
    if task == "hard":
        return speech_language(rng), rng
    words = min(MOST_WORDS, options.ngrams // NGRAMS_PER_WORD)
    return make_language(options.vocab_size, rng, words=words), rng


def draw_task(options: BenchOptions, task: str) -> Task:
    """The utterances of all rows."""
    if task == "hard":
        (found,) = make_tasks(replace(options, tasks=["hard"], mode="batch"))
        return found
    language, rng = draw_language(options, task)
    return spoken_task(language, options, rng)


# ------------------------------------------------------------------------------------------- stages


def generate(options: BenchOptions, folder: str, task: str) -> Row:
    """The large LM as an ARPA file."""
    rng = np.random.default_rng(options.seed + 1)
    lm = SyntheticLM(draw_language(options, task)[0], options.ngrams, rng, options.continuations)
    path = Path(folder) / LARGE
    write_ngrams(path, lm.symbols, lm.counts, lm.blocks())
    return {"counts": lm.counts, "bytes": path.stat().st_size}


def pack(options: BenchOptions, folder: str, task: str) -> Row:
    """The packed large LM; a GPU keeps all of it except for the arcs."""
    path = Path(folder) / LARGE_PACKED
    report = pack_arpa(Path(folder) / LARGE, path)
    arrays = dict(load_packed_lm(path, verify=False).nbytes)
    on_device = sum(arrays.values()) - arrays["arcs"]
    return {
        "ngrams": report.num_ngrams,
        "repaired": report.repaired,
        "states": report.states,
        "bytes": report.num_bytes,
        "bytes_per_ngram": report.num_bytes / report.num_ngrams,
        "arrays": arrays,
        "paged": {"device_bytes": on_device, "device_share": on_device / sum(arrays.values())},
    }


def graph(options: BenchOptions, folder: str, task: str) -> Row:
    """The small LM, pruned from the large one's 1-grams and 2-grams, and its graph."""
    language, _ = draw_language(options, task)
    large, small, packed, path = (Path(folder) / name for name in (LARGE, SMALL, SMALL_PACKED, GRAPH))
    with ArpaReader(large) as reader:
        total = sum(reader.counts.values())
    lower = read_arpa(large, max_order=2)
    size = max(len(lower.symbols) + 1, int(options.weights.get("small_share", SHARE) * total))
    write_arpa(prune_ngram_lm(lower, size=size), small)
    pack_arpa(small, packed)
    lexicon = Lexicon({word: (spelling,) for word, spelling in language.lexicon.items()}, len(language.pieces))
    built = build_graph(small, lexicon, cache=False)
    save_graph(built, path)
    return {"graph": describe_graph(built), "bytes": path.stat().st_size}


def decode(options: BenchOptions, folder: str, task: str, stage: str, beam: int) -> Row:
    """Decode the utterances with the small LM or with both LMs, twice. The first pass reads the LM from the disk; the
    second one is timed. Loading reads a packed file once, for its checksum.
    """
    found, began = draw_task(options, task), time.process_time()
    config = graph_search(options, found, Setting(beam, threads=options.threads))
    searched, small = load_graph(Path(folder) / GRAPH), load_packed_lm(Path(folder) / SMALL_PACKED)
    lm, sizes = small, (found.vocab_size, found.vocab_size)
    decoder: CudaWFST | PagedBigLM
    if stage == "small_lm":
        decoder = CudaWFST(searched, *sizes, WFSTConfig(**config))
    else:
        lm = load_packed_lm(Path(folder) / LARGE_PACKED)
        decoder = PagedBigLM(searched, *sizes, lm, small, PagedBigLMConfig(**config))
    loaded = time.process_time() - began
    decoder.decode(found.inputs[:1, :1], [1])  # compiles, or reads compiled code
    faults, results = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, list[Any]()
    with torch_threads(options.threads):
        first = HostClock().measure(lambda: results.extend(decoder.decode(found.inputs, found.lengths)), 1)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
        later = [
            HostClock().measure(lambda: decoder.decode(found.inputs, found.lengths), 1).cpu
            for _ in range(options.repeats)
        ]
    cpu, (verified, how) = statistics.median(later), lm_scores(lm, results)
    return {
        "load_seconds": loaded,
        "decode": {
            "first": {"cpu": first.cpu, "wall": first.wall}, "cpu": cpu, "disk_reads_in_first": faults,
        },
        "frames_per_second": float(found.lengths.sum()) / cpu,
        "rtfx": found.audio_seconds / cpu,
        "wer": 100 * word_errors(found.texts, [nbest.best.text for nbest in results]).wer,
        "work_per_frame": work_per_frame(results),
        "verified": verified,
        "verified_by": how,
    }  # fmt: skip
