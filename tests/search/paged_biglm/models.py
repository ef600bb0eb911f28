"""LMs, graphs and decoders for the tests of paged_biglm."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.decoder import PagedBigLM
from tests.graph.toy import BLANK, PIECES, toy_lexicon, toy_table
from tests.oracles.ngram import Table, arpa_text, log10_prob

VOCAB = len(PIECES)
WIDE = 1e4  # a beam that prunes nothing
ALL = 50000


def lm_table(*, seed: int, order: int = 3, keep: float = 0.4, **options) -> Table:
    """A random LM with the context of every n-gram, in which it never pays to back off.

    Graphs take back-offs as epsilons; only for such an LM is the best path that of the LM's own costs.
    """
    drawn = toy_table(seed=seed, order=order, keep=keep, **options)
    table: Table = {}
    for gram, weights in drawn.items():
        if len(gram) == 1 or gram[:-1] in table:
            table[gram] = _without_undercut(table, gram, *weights)
    return table


def _without_undercut(table: Table, gram, prob: float, backoff: float) -> tuple[float, float]:
    """Weights with which backing off before the last word, or after it, costs no less than not to."""
    if len(gram) == 1:
        return prob - 2.0, backoff
    backed_off = log10_prob(table, gram[:-1], gram[-1], len(gram))
    return max(prob, backed_off - backoff + 0.02), backoff


def part_of(table: Table, *, seed: int, keep: float = 0.4) -> Table:
    """An LM with some of the n-grams, all their contexts and suffixes, and weights of its own."""
    draw = random.Random(seed)
    kept = {gram for gram in table if len(gram) == 1 or draw.random() < keep}
    for gram in list(kept):
        kept |= {gram[i:j] for i in range(len(gram)) for j in range(i + 1, len(gram) + 1)} & set(table)
    part: Table = {}
    for gram in table:
        if gram in kept:
            is_context = any(longer[:-1] == gram for longer in kept)
            backoff = draw.uniform(-1, 0) if is_context else 0.0
            part[gram] = _without_undercut(part, gram, draw.uniform(-3, 0), backoff)
    return part


class LM:
    """An LM in the forms that tests need."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.path = Path(mkdtemp()) / "lm.arpa"
        self.path.write_text(arpa_text(table))
        self.packed: PackedLM = pack_arpa_in_memory(self.path)

    @property
    def graph(self) -> WordGraph:
        return _graph(self.path)


@lru_cache(maxsize=16)
def _graph(path: Path) -> WordGraph:
    return build_graph(path, toy_lexicon(), vocab_size=VOCAB, cache=False)


@lru_cache(maxsize=16)
def random_lm(seed: int, **options) -> LM:
    return LM(lm_table(seed=seed, **options))


@lru_cache(maxsize=4)
def nested_pair(seed: int) -> tuple[LM, LM]:
    """A small LM and a large one that has all its n-grams."""
    large = random_lm(seed, keep=0.7)
    return LM(part_of(large.table, seed=seed + 100)), large


def make(small: LM, large: LM, *, graph=None, lm_weight=1.0, boosting=None, **options) -> PagedBigLM:
    config = PagedBigLMConfig(**{"beam": WIDE, "max_active": ALL, "threads": 1, **options})
    return PagedBigLM(
        graph or small.graph, VOCAB, BLANK, large.packed, small.packed, config,
        Fusion(lm_weight=lm_weight, boosting=boosting),
    )  # fmt: skip
