"""What `bench mode=scale` does, stage by stage; each runs in a process of its own (`process.py`)."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.bench.language import Language
from nemo_gpu_decoding.bench.large_lm.prune import write_pruned
from nemo_gpu_decoding.bench.large_lm.strategies import work_per_frame
from nemo_gpu_decoding.bench.measure import torch_threads
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.scale.arpa_text import write_arpa
from nemo_gpu_decoding.bench.scale.ngrams import SyntheticLM
from nemo_gpu_decoding.bench.synthetic import draw_language, spoken_task
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.word_graph.graphs import describe
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.store import load_graph, save_graph
from nemo_gpu_decoding.lm.pack import pack_arpa
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.lm.packed_file import load_packed_lm
from nemo_gpu_decoding.metrics import word_errors
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import NO_END, CudaWFST, PagedBigLM
from nemo_gpu_decoding.search.word_graph.result import WordPath

LARGE, SMALL, SMALL_PACKED, GRAPH = "large.arpa", "small.arpa", "small.packed", "small.graph"
NGRAMS_PER_WORD, MOST_WORDS = 50, 200_000  # as in LMs of 1 M to 100 M n-grams made of text
SCORE_TOLERANCE = 1e-2  # natural log; hundreds of float32 additions in another order

Answer = dict[str, Any]


def draw(options: BenchOptions) -> tuple[Language, list[np.ndarray], np.random.Generator]:
    """The language with its confusions, the same in every stage, and what else is drawn from."""
    rng = np.random.default_rng(options.seed)
    words = min(MOST_WORDS, options.ngrams // NGRAMS_PER_WORD)
    language, confusions = draw_language(options, rng, mutual=True, words=words)
    return language, confusions, rng


def draw_task(options: BenchOptions) -> Task:
    """The utterances of all rows."""
    language, confusions, rng = draw(options)
    task = spoken_task(language, confusions, options, rng)
    return replace(task, name=f"{task.name}-n{options.ngrams}").first(options.utterances)


def generate(options: BenchOptions, folder: Path) -> Answer:
    """The large LM as an ARPA file."""
    language, _, _ = draw(options)
    lm = SyntheticLM(language, options.ngrams, np.random.default_rng(options.seed + 1))
    write_arpa(lm, folder / LARGE)
    return {"counts": lm.counts, "bytes": (folder / LARGE).stat().st_size}


def pack(options: BenchOptions, folder: Path, layout: str) -> Answer:
    """The large LM packed; what a GPU would keep of it is all but the arcs."""
    report = pack_arpa(folder / LARGE, folder / f"{layout}.packed", layout=layout)
    arrays = dict(load_packed_lm(folder / f"{layout}.packed", verify=False).nbytes)
    on_device = sum(arrays.values()) - arrays["arcs"]
    return {
        "ngrams": report.num_ngrams,
        "repaired": report.repaired,
        "states": report.states,
        "bytes": report.num_bytes,
        "bytes_per_ngram": report.num_bytes / report.num_ngrams,
        "max_error": report.max_error,
        "arrays": arrays,
        "paged": {"device_bytes": on_device, "device_share": on_device / sum(arrays.values())},
    }


def graph(options: BenchOptions, folder: Path) -> Answer:
    """The small LM, pruned from the large one, and its graph."""
    language, _, _ = draw(options)
    write_pruned(folder / LARGE, folder / SMALL, options.small_share)
    pack_arpa(folder / SMALL, folder / SMALL_PACKED)
    lexicon = Lexicon({word: (spelling,) for word, spelling in language.lexicon.items()})
    small = build_graph(folder / SMALL, lexicon, vocab_size=options.vocab_size, cache=False)
    save_graph(small, folder / GRAPH)
    return {"graph": describe(small), "bytes": (folder / GRAPH).stat().st_size}


def small_lm(options: BenchOptions, folder: Path, beam: int) -> Answer:
    """The utterances decoded with the small LM alone."""
    task, vocab_size = draw_task(options), options.vocab_size
    began = time.process_time()
    small = load_packed_lm(folder / SMALL_PACKED)
    config = WFSTConfig(**_search_options(options, beam))
    decoder = CudaWFST(load_graph(folder / GRAPH), vocab_size, vocab_size, config)
    loaded = time.process_time() - began
    return _decode(decoder, small, task, options) | {"load_seconds": loaded}


def paged_biglm(options: BenchOptions, folder: Path, beam: int, layout: str) -> Answer:
    """The utterances decoded with both LMs; loading reads the packed file once, for its checksum."""
    task, vocab_size = draw_task(options), options.vocab_size
    began = time.process_time()
    large, small = load_packed_lm(folder / f"{layout}.packed"), load_packed_lm(folder / SMALL_PACKED)
    config = PagedBigLMConfig(**_search_options(options, beam))
    graph = load_graph(folder / GRAPH)
    decoder = PagedBigLM(graph, vocab_size, vocab_size, large, small, config)
    loaded = time.process_time() - began
    return _decode(decoder, large, task, options) | {"load_seconds": loaded}


def _search_options(options: BenchOptions, beam: int) -> dict[str, Any]:
    return {
        "topology": options.topology,
        "beam": float(beam),
        "max_active": options.max_active,
        "acoustic_scale": options.acoustic_scale,
        "threads": options.threads,
    }


def _decode(decoder: CudaWFST, lm: PackedLM, task: Task, options: BenchOptions) -> Answer:
    """Decode a first time, which reads from the disk what is not in memory, and then for the clock."""
    decoder.decode(task.inputs[:1, :1], [1])  # compiles, or reads compiled code
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    with torch_threads(options.threads):
        first, results = _timed(lambda: decoder.decode(task.inputs, task.lengths))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
        later = [
            _timed(lambda: decoder.decode(task.inputs, task.lengths))[0] for _ in range(options.repeats)
        ]
    cpu = statistics.median(seconds["cpu"] for seconds in later)
    verified, how = scores_are_of(lm, results)
    errors = word_errors(task.texts, [nbest.best.text for nbest in results])
    return {
        "decode": {"first": first, "cpu": cpu, "disk_reads_in_first": faults},
        "frames_per_second": float(task.lengths.sum()) / cpu,
        "rtfx": task.audio_seconds / cpu,
        "wer": 100 * errors.wer,
        "work_per_frame": work_per_frame(results),
        "verified": verified,
        "verified_by": how,
    }


def _timed(call: Callable[[], list[NBest[WordPath]]]) -> tuple[dict[str, float], list[NBest[WordPath]]]:
    cpu, wall = time.process_time(), time.perf_counter()
    results = call()
    return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}, results


def scores_are_of(lm: PackedLM, results: Iterable[NBest[WordPath]]) -> tuple[bool, str]:
    """Is the LM's part of every score what the LM itself gives for the words, asked one by one?

    Hypotheses that were cut off within a word have paid for a part of it; they are only counted.
    """
    differences: list[float] = []
    cut_off = 0
    for nbest in results:
        if NO_END in nbest.notes:
            cut_off += 1
            continue
        path = nbest.best
        differences.append(abs(path.parts.lm + lm.score([word.text for word in path.words])))
    right = sum(difference <= SCORE_TOLERANCE for difference in differences)  # NaN is not
    verified = len(differences) > cut_off and right == len(differences)
    how = f"LM scores of {right} of {len(differences)} texts off by at most {SCORE_TOLERANCE:.0e}"
    return verified, f"{how}; {cut_off} more end within a word" if cut_off else how


STAGES: dict[str, Callable[..., Answer]] = {
    stage.__name__: stage for stage in (generate, pack, graph, small_lm, paged_biglm)
}
