"""A decoder on both backends: the kernels, run by the emulator, must find what the CPU finds."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.word_graph import cpu_engine, kernel_abi
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.cuda_engine import CUDAEngine
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
from nemo_gpu_decoding.search.word_graph.lattice.lattice import Lattice
from tests.contract.subject import all_facts
from tests.oracles.ngram import Table
from tests.search.word_graph.models import LM, lm_table, make, part_of, random_graph, without_bounds


def on_cpu(graph, **options: Any) -> CudaWFST:
    return make(graph, backend="cpu", **options)


def on_cuda(graph, **options: Any) -> CudaWFST:
    return make(graph, backend="cuda", **options)


def assert_equal(graph, log_probs, lengths, requests=None, **options: Any):
    """Both backends return the same results: tokens, times, words, scores and notes, to the bit."""
    options = {"max_active": 200, **options}
    expected, found = (build(graph, **options).decode(log_probs, lengths, requests) for build in (on_cpu, on_cuda))
    assert all_facts(found) == all_facts(expected)
    return found


def assert_equal_lattices(graph, log_probs, lengths, requests=None, **options: Any):
    """Both backends keep the same lattices, and return the same n best of each, to the bit."""
    found = assert_equal(graph, log_probs, lengths, requests, lattice=True, **options)
    expected = on_cpu(graph, lattice=True, **{"max_active": 200, **options}).decode(log_probs, lengths, requests)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_lattice(ours.lattice, theirs.lattice)
    return found


def assert_same_lattice(lattice: Lattice, other: Lattice) -> None:
    """The same nodes, links and ends, in the same order, to the bit."""
    for name in ("node_frames", "links", "ends"):
        own, others = getattr(lattice, name), getattr(other, name)
        for field in own.dtype.names or (...,):  # what lies between fields means nothing
            assert own[field].tolist() == others[field].tolist(), (name, field)
    assert lattice.reaches_end == other.reaches_end


def limit_tokens(monkeypatch, capacity: int) -> None:
    """Room for so few tokens of a frame, on both backends."""

    new_workspace = cpu_engine.new_workspace

    def small_workspace(*sizes: int, **options: Any):
        work = new_workspace(*sizes, **options)
        return work._replace(next_tokens=work.next_tokens[:capacity])

    monkeypatch.setattr(cpu_engine, "new_workspace", small_workspace)
    monkeypatch.setattr(kernel_abi, "token_capacity", lambda max_active: capacity)


# --------------------------------------------------------------------------------- with a large LM
RANDOM_COLUMNS = 12  # of random graphs, the last the blank
WORDS = ("w1", "w2", "w3", "w4")  # of random graphs
NEPER = 0.4342944819  # log10(e)


def rounded(table: Table) -> Table:
    """With costs that are whole numbers, so that there are ties."""
    return {gram: (-NEPER * round(-2.3 * prob), -NEPER * round(-2.3 * back)) for gram, (prob, back) in table.items()}


@lru_cache(maxsize=16)
def pair(seed: int, *, nested: bool = False, coarse: bool = False) -> tuple[LM, LM]:
    """A small and a large LM over the words of random graphs."""
    large = lm_table(seed=seed, words=WORDS, keep=0.7)
    small = part_of(large, seed=seed + 50) if nested else lm_table(seed=seed + 100, words=WORDS)
    if coarse:
        large, small = rounded(large), rounded(small)
    return LM(small), LM(large)


def on(backend: str, graph: WordGraph, lms: tuple[LM, LM], **options: Any) -> PagedBigLM:
    fusion = Fusion(None, options.pop("lm_weight", 1.0), options.pop("boosting", None))
    columns = options.pop("columns", RANDOM_COLUMNS)
    config = PagedBigLMConfig(backend=backend, **{"threads": 1, "max_active": 200, **options})
    decoder = PagedBigLM(graph, columns - 1, columns - 1, lms[1].packed, lms[0].packed, config, fusion)
    return without_bounds(decoder)  # kernels drop no dominated LM contexts


def everything(
    decoder: PagedBigLM, log_probs: torch.Tensor, lengths: Sequence[int], requests=None, chunk: int = 0
) -> tuple[Any, ...]:
    """All that a search has come to: its tokens, its results, and the work that depends on no order."""
    streams, frames = decoder.open(len(lengths), requests), log_probs.shape[1]
    for begin in range(0, frames, chunk or frames):
        end = min(begin + (chunk or frames), frames)
        decoder.push(streams, log_probs[:, begin:end], np.clip(np.array(lengths) - begin, 0, end - begin).tolist())
    if isinstance(streams.engine, CUDAEngine):  # whose results have the tokens of best paths only
        known = streams.engine.utterances(range(len(lengths)))
    else:
        known = streams.engine.results(range(len(lengths)), 1, final=True)
    found = [_tokens(utterance) for utterance in known]
    limits = [utterance.counters[["limited", "overflowed"]].tolist() for utterance in known]
    results = decoder.close(streams)
    works = [(n.work.look_ups, n.work.groups, n.work.frames) for n in results]
    lattices = [n.lattice and sorted(n.lattice.to_kaldi_text().split("\n")) for n in results]
    return found, limits, works, all_facts(results), lattices


def _tokens(utterance: Any) -> list[tuple[Any, ...]]:
    return sorted(utterance.tokens[["key", "lm", "cost", "run", "probability"]].tolist())


def assert_equal_paged(graph, lms, log_probs, lengths, requests=None, chunk: int = 0, **options: Any):
    expected = everything(on("cpu", graph, lms, **options), log_probs, lengths, requests)
    found = everything(on("cuda", graph, lms, **options), log_probs, lengths, requests, chunk)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    return found


def random_case(seed: int, *, coarse: bool = False, nested: bool = False, **options: Any):
    return random_graph(seed, columns=RANDOM_COLUMNS, coarse=coarse, **options), pair(
        seed, nested=nested, coarse=coarse
    )


def checked(test):
    """A test under the race checker: compiling the kernel once more without it would take longer."""
    test = pytest.mark.usefixtures("small_lists")(test)
    return pytest.mark.parametrize("emulated_runtime", [{"check": True}], indirect=True, ids=["checked"])(test)
