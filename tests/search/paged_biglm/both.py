"""A decoder on both backends: the kernel, run by the emulator, must find what the CPU finds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.decoder import PagedBigLM
from tests.contract.facts import all_facts
from tests.oracles.ngram import Table
from tests.search.cuda_wfst.both import limit_tokens  # noqa: F401 (for tests)
from tests.search.cuda_wfst.models import random_graph
from tests.search.paged_biglm.models import LM, lm_table, part_of

COLUMNS = 12  # of random graphs, the last the blank
WORDS = ("w1", "w2", "w3", "w4")  # of random graphs
NEPER = 0.4342944819  # log10(e)


def rounded(table: Table) -> Table:
    """With costs that are whole numbers, so that there are ties."""
    return {
        gram: (-NEPER * round(-2.3 * prob), -NEPER * round(-2.3 * backoff))
        for gram, (prob, backoff) in table.items()
    }


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
    columns = options.pop("columns", COLUMNS)
    config = PagedBigLMConfig(backend=backend, **{"threads": 1, "max_active": 200, **options})
    return PagedBigLM(graph, columns - 1, columns - 1, lms[1].packed, lms[0].packed, config, fusion)


def everything(
    decoder: PagedBigLM, log_probs: torch.Tensor, lengths: Sequence[int], requests=None, chunk: int = 0
) -> tuple[Any, ...]:
    """All that a search has come to: its tokens, its results, and the work that depends on no order."""
    streams, frames = decoder.open(len(lengths), requests), log_probs.shape[1]
    for begin in range(0, frames, chunk or frames):
        end = min(begin + (chunk or frames), frames)
        sizes = np.clip(np.array(lengths) - begin, 0, end - begin)
        decoder.push(streams, log_probs[:, begin:end], sizes.tolist())
    known = streams.engine.results(range(len(lengths)), 1, final=True)
    found = [_tokens(utterance) for utterance in known]
    limits = [utterance.counters[["limited", "overflowed"]].tolist() for utterance in known]
    results = decoder.close(streams)
    works = [(n.work.look_ups, n.work.groups, n.work.frames) for n in results]
    lattices = [n.lattice and sorted(n.lattice.to_kaldi_text().split("\n")) for n in results]
    return found, limits, works, all_facts(results), lattices


def _tokens(utterance: Any) -> list[tuple[Any, ...]]:
    names = ["key", "lm", "cost", "run", "probability"]
    return sorted(utterance.tokens[names].tolist())


def assert_equal(graph, lms, log_probs, lengths, requests=None, chunk: int = 0, **options: Any):
    """Both backends come to the same, to the bit."""
    expected = everything(on("cpu", graph, lms, **options), log_probs, lengths, requests)
    found = everything(on("cuda", graph, lms, **options), log_probs, lengths, requests, chunk)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    return found


def random_case(seed: int, *, coarse: bool = False, nested: bool = False, **options: Any):
    return random_graph(seed, columns=COLUMNS, coarse=coarse, **options), pair(
        seed, nested=nested, coarse=coarse
    )
