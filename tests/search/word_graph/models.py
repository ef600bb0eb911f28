"""Decoders, graphs, LMs and log-probs for the tests of both searches in word graphs."""

import math
import random
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.openfst import FST_ARC, Fst
from nemo_gpu_decoding.graph.unknown_words import with_piece_labels
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
from tests.graph.toy import BLANK, PIECES, toy_arpa, toy_lexicon, toy_table
from tests.oracles.ngram import Table, arpa_text, log10_prob

VOCAB = len(PIECES)
WIDE = 1e4  # a beam that prunes nothing
ALL = 50000


@lru_cache(maxsize=8)
def toy_graph(seed: int, *, open_vocabulary=None) -> WordGraph:
    arpa = toy_arpa(Path(mkdtemp()) / "toy.arpa", seed=seed)
    return build_graph(arpa, toy_lexicon(), open_vocabulary=open_vocabulary, cache=False)


def fst_of(graph: WordGraph) -> Fst:
    """The graph as a transducer again, its epsilon records as epsilon arcs, one for each word."""
    states, arcs, epsilons, _ = graph.arrays
    rows, size = [], len(states)
    for s, state in enumerate(states):
        for arc in arcs[state["arc_begin"] : state["arc_end"]]:
            rows.append((s, arc["ilabel"] + 1, arc["olabel"], arc["cost"], arc["target"]))
        for record in epsilons[state["epsilon_begin"] : state["epsilon_end"]]:
            *first, last = graph.expanded(int(record["olabel"])) or [0]
            at = s
            for word in first:
                rows.append((at, 0, word, 0.0, size))
                at, size = size, size + 1
            rows.append((at, 0, last, record["cost"], record["target"]))
    rows.sort(key=lambda row: row[0])
    begin = np.searchsorted([row[0] for row in rows], np.arange(size + 1))
    final = np.full(size, np.inf, np.float32)
    final[: len(states)] = states["final_cost"]
    return Fst(graph.start, final, begin, np.array([row[1:] for row in rows], FST_ARC))


def make(graph, *, vocab_size=VOCAB, blank_id=BLANK, boosting=None, lm_weight=1.0, pieces=None, **options):
    config = WFSTConfig(**{"beam": WIDE, "max_active": ALL, "threads": 1, **options})
    return CudaWFST(graph, vocab_size, blank_id, config, Fusion(lm_weight=lm_weight, boosting=boosting), pieces)


def random_graph(
    seed: int, *, columns: int, blank: int | None = None, states: int = 25, coarse: bool = False
) -> WordGraph:
    """Any graph over the labels 0 .. columns - 2: arcs with and without words, two arcs with one label,
    a state with many arcs, chains of epsilons with several words.

    Args:
        seed: which one.
        columns: of the log-probs; the last one is the blank.
        blank: a column that arcs read too, for ready-made graphs.
        states: number of states; each may be final.
        coarse: costs are whole numbers and may be below zero.
    """
    rng, words = np.random.default_rng(seed), ("<eps>", "w1", "w2", "w3", "w4")
    labels = [*range(columns - 1), *([blank] if blank is not None else [])]

    def cost():
        return float(rng.integers(-1, 3)) if coarse else float(rng.normal(0.8, 1.0))

    rows = []
    for state in range(states):
        for _ in range(4 * len(labels) if state in (0, states // 2) else int(rng.integers(1, 6))):
            word = int(rng.integers(1, len(words))) if rng.random() < 0.4 else 0
            rows.append((state, rng.choice(labels) + 1, word, cost(), rng.integers(states)))
        if blank is not None:
            rows.append((state, blank + 1, 0, cost(), state))
            rows.append((state, rng.choice(labels) + 1, 0, cost(), state))
        for _ in range(int(rng.integers(0, 3))):  # epsilons lead to higher states: no cycles
            if state + 1 < states:
                word = int(rng.integers(0, len(words)))
                rows.append((state, 0, word, cost(), rng.integers(state + 1, min(state + 9, states))))
    rows.sort(key=lambda row: row[0])
    begin = np.searchsorted([row[0] for row in rows], np.arange(states + 1))
    final = np.where(rng.random(states) < 0.7, rng.random(states), np.inf).astype(np.float32)
    fst = Fst(0, final, begin, np.array([row[1:] for row in rows], FST_ARC))
    return WordGraph.from_fst(fst, words, name=f"random graph {seed}")


# ---------------------------------------------- LMs, graphs and decoders for the tests of paged_biglm
def lm_table(*, seed: int, order: int = 3, keep: float = 0.4, **options) -> Table:
    """A random LM with all contexts, in which backing off never pays: a graph takes back-offs as epsilons."""
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
    return max(prob, log10_prob(table, gram[:-1], gram[-1], len(gram)) - backoff + 0.02), backoff


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
    return build_graph(path, toy_lexicon(), cache=False)


@lru_cache(maxsize=8)
def open_graph(path: Path) -> WordGraph:
    unknown = OpenVocabulary(word_cost=0.5, piece_cost=0.5)
    return with_piece_labels(build_graph(path, toy_lexicon(), open_vocabulary=unknown, cache=False))


@lru_cache(maxsize=16)
def random_lm(seed: int, **options) -> LM:
    return LM(lm_table(seed=seed, **options))


@lru_cache(maxsize=4)
def nested_pair(seed: int) -> tuple[LM, LM]:
    large = random_lm(seed, keep=0.7)
    return LM(part_of(large.table, seed=seed + 100)), large


def make_paged(
    small: LM, large: LM, *, graph=None, lm_weight=1.0, boosting=None, pieces=None, kind=PagedBigLM, **options
) -> PagedBigLM:
    config = PagedBigLMConfig(**{"beam": WIDE, "max_active": ALL, "group_size": 0, "threads": 1, **options})
    return kind(
        graph or small.graph, VOCAB, BLANK, large.packed, small.packed, config,
        Fusion(lm_weight=lm_weight, boosting=boosting), pieces,
    )  # fmt: skip


def without_bounds(decoder: PagedBigLM) -> PagedBigLM:
    """The decoder, which now drops no dominated LM context."""
    decoder._lms = decoder._lms._replace(bounds=decoder._lms.bounds[:0])
    return decoder


# ------------------------------------------------------- all paths of a lattice, for tests of what is asked of it
class Whole(NamedTuple):
    """One path through a lattice, as it is written there."""

    words: tuple[str, ...]
    labels: tuple[int, ...]  # column read in each frame
    cost: float
    acoustic_cost: float
    graph_cost: float  # of arcs, closure arcs and the final state, unweighted


def all_paths(lattice):
    graph = lattice.graph
    arcs, epsilons, finals = graph.arrays.arcs, graph.arrays.epsilons, graph.arrays.states["final_cost"]
    found = []

    def texts(*labels):
        return tuple(graph.words[word] for label in labels for word in graph.expanded(int(label)))

    def walk(node, words, labels, cost, acoustic, graph_cost):
        for end in lattice.ends[lattice.ends["node"] == node]:
            e, state, own, last = end["epsilon"], end["state"], 0.0, ()
            if e >= 0:
                state, own, last = epsilons[e]["target"], epsilons[e]["cost"], texts(epsilons[e]["olabel"])
            if lattice.reaches_end:
                own += finals[state]
            found.append(Whole(words + last, labels, cost + end["cost"], acoustic, graph_cost + own))
        for link in lattice.links[lattice.links["source"] == node]:
            own, emitted = 0.0, []
            for table, n in ((epsilons, link["epsilon"]), (arcs, link["arc"])):
                if n >= 0:
                    own += table[n]["cost"]
                    emitted.append(table[n]["olabel"])
            walk(
                link["target"], words + texts(*emitted), (*labels, int(link["ilabel"])), cost + link["cost"],
                acoustic + link["acoustic_cost"], graph_cost + own,
            )  # fmt: skip

    walk(0, (), (), 0.0, 0.0, 0.0)
    return found


def least(paths, cost):
    texts: dict = {}
    for path in paths:
        texts[path.words] = min(texts.get(path.words, math.inf), cost(path))
    return texts
