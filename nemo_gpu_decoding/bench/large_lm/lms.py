"""The two LMs of a task: its word LM is the large one, the small one is pruned from it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from nemo_gpu_decoding.bench.cache import cache_dir, cached, content_key
from nemo_gpu_decoding.bench.large_lm.prune import write_pruned
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.lm.pack import pack_arpa, pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.lm.packed_file import load_packed_lm


@lru_cache(maxsize=1)
def large_lm(task: Task) -> PackedLM:
    """The task's word LM, packed."""
    source = _word_lm(task)
    path = cached(f"{content_key(source)}.packed", lambda target: _pack(source, target))
    return load_packed_lm(path)


@lru_cache(maxsize=1)
def small_lm(task: Task, share: float) -> PackedLM:
    """The small LM, with `share` of the n-grams."""
    return pack_arpa_in_memory(_small_arpa(task, share))


@lru_cache(maxsize=1)
def small_graph(task: Task, share: float) -> WordGraph:
    """L o G of the small LM; words are spelled as in `word_graph/graphs.py`."""
    spelled: Lexicon | None = None
    if task.lexicon:
        spelled = Lexicon({word: (tuple(tokens),) for word, tokens in task.lexicon.items()})
    return build_graph(
        _small_arpa(task, share), spelled or task.vocabulary, vocab_size=task.vocab_size,
        cache=cache_dir() / "graphs",
    )  # fmt: skip


def _pack(source: Path, target: Path) -> None:
    pack_arpa(source, target)


def _small_arpa(task: Task, share: float) -> Path:
    source = _word_lm(task)
    name = f"{content_key(source)}-{share:g}.arpa"
    return cached(name, lambda target: write_pruned(source, target, share))


def _word_lm(task: Task) -> Path:
    assert task.word_lm is not None
    return Path(task.word_lm)
