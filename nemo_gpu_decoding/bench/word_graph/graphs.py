"""The same graph twice: L o G for our search, T o L o G for decoders that know no CTC topology."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.bench.cache import cache_dir
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import Lexicon
from nemo_gpu_decoding.graph.openfst import Fst, write_fst
from nemo_gpu_decoding.graph.topology import COMPACT, MINIMAL, NORMAL, topology_number

ROUNDING = 1e-5  # relative; costs are float32


@lru_cache(maxsize=1)
def word_graph(task: Task) -> WordGraph:
    """L o G of the task's word LM; words are spelled by its lexicon, else by its tokenizer."""
    assert task.word_lm is not None
    lexicon: Lexicon | Any = task.vocabulary
    if task.lexicon:
        lexicon = Lexicon({word: (tuple(spelling),) for word, spelling in task.lexicon.items()})
    return build_graph(task.word_lm, lexicon, vocab_size=task.vocab_size, cache=cache_dir() / "graphs")


@lru_cache(maxsize=1)
def decoding_graph(graph: WordGraph, topology: str, vocab_size: int) -> Any:
    """T o L o G as a kaldifst `StdConstFst`, which kaldi_decoder searches a little quicker than others.

    Labels are those of `composed_graph`.
    """
    import kaldifst

    return kaldifst.StdConstFst(composed_graph(graph, topology, vocab_size))


def composed_graph(graph: WordGraph, topology: str, vocab_size: int) -> Any:
    """T o L o G as a kaldifst `StdVectorFst`.

    Input labels are column + 1, output labels those of `graph.words`. The blank is column V.
    """
    import kaldifst

    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        paths = [os.path.join(folder, name) for name in ("t.fst", "lg.fst")]
        write_fst(topology_fst(topology, vocab_size), Path(paths[0]))
        write_fst(as_transducer(graph), Path(paths[1]))
        left, right = (kaldifst.StdVectorFst.read(path) for path in paths)
    kaldifst.arcsort(left, sort_type="olabel")
    kaldifst.arcsort(right, sort_type="ilabel")
    return kaldifst.compose(left, right)


def describe(graph: WordGraph) -> dict[str, int]:
    """How large a graph is, for the record."""
    return {
        "ngrams": int(graph.report["n-grams"]),
        "words": len(graph.words) - 1,
        "states": graph.num_states,
        "arcs": graph.num_arcs,
    }


def topology_fst(name: str, vocab_size: int) -> Fst:
    """T as NeMo makes it: reads columns + 1, writes token + 1; the blank is column V.

    State 0 is where a blank leads to, state v + 1 is the token v, if the topology has states for tokens.

    Raises:
        ValueError: there is no such topology, or it is "graph", which has no T.
    """
    number = topology_number(name)
    tokens, blank = np.arange(1, vocab_size + 1), vocab_size + 1  # labels
    start, nothing = np.zeros_like(tokens), np.zeros_like(tokens)
    # columns: source, input, output, target
    if number == MINIMAL:
        return _transducer([(start, tokens, tokens, start), _one(0, blank, 0, 0)], np.zeros(1))
    rows = [_one(0, blank, 0, 0), (start, tokens, tokens, tokens), (tokens, tokens, nothing, tokens)]
    final = np.full(vocab_size + 1, np.inf)
    final[0] = 0.0
    if number == COMPACT:
        rows.append((tokens, nothing, nothing, start))
    elif number == NORMAL:
        final[:] = 0.0
        rows.append((tokens, np.full_like(tokens, blank), nothing, start))
        before, after = np.repeat(tokens, vocab_size), np.tile(tokens, vocab_size)
        before, after = before[before != after], after[before != after]
        rows.append((before, after, after, after))
    else:
        raise ValueError(f"topology is {name!r}, expected compact, normal or minimal")
    return _transducer(rows, final)


def as_transducer(graph: WordGraph) -> Fst:
    """The graph as a transducer, with single epsilon arcs where it has records of whole chains.

    A record that two others put together give, at the same cost, is the record of a chain; what is left
    are the arcs that chains are made of.
    """
    states, arcs, records, _ = graph.arrays
    own = np.repeat(np.arange(len(states)), states["arc_end"] - states["arc_begin"])
    sources = np.repeat(np.arange(len(states)), states["epsilon_end"] - states["epsilon_begin"])
    single = ~_is_chain(graph, sources)
    sources, records = sources[single], records[single]
    return Fst.from_arcs(
        graph.start,
        states["final_cost"],
        np.append(own, sources),
        np.append(arcs["label"] + 1, np.zeros(len(records), np.int64)),
        np.append(arcs["word"], records["word"]),
        np.append(arcs["cost"], records["cost"]),
        np.append(arcs["target"], records["target"]),
    )


def _is_chain(graph: WordGraph, sources: np.ndarray) -> np.ndarray:
    """[number of epsilon records] whether two other records together give it.

    Args:
        sources: [number of epsilon records] the state that each belongs to.
    """
    states, _, records, compounds = graph.arrays
    num_states, labels = len(states), len(graph.words) + len(compounds)

    def key(source: np.ndarray, target: np.ndarray, word: np.ndarray) -> np.ndarray:
        return (source.astype(np.int64) * num_states + target) * labels + word

    begin = states["epsilon_begin"][records["target"]]
    count = states["epsilon_end"][records["target"]] - begin
    first = np.repeat(np.arange(len(records)), count)
    position = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
    second = begin[first] + position
    one_word = (records["word"][first] == 0) | (records["word"][second] == 0)
    first, second = first[one_word], second[one_word]
    word = records["word"][first] + records["word"][second]
    joined = key(sources[first], records["target"][second], word)
    keys = key(sources, records["target"], records["word"])
    order = np.argsort(keys)
    found = order[np.searchsorted(keys[order], joined)]
    cost = records["cost"].astype(np.float64)
    apart = np.abs(cost[first] + cost[second] - cost[found])
    chains = records["word"] >= len(graph.words)  # two words: no single arc has them
    chains[found[apart <= ROUNDING * (1 + np.abs(cost[found]))]] = True
    return chains


def _one(source: int, read: int, write: int, target: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value]) for value in (source, read, write, target))


def _transducer(rows: list[tuple[np.ndarray, ...]], final: np.ndarray) -> Fst:
    sources, inputs, outputs, targets = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Fst.from_arcs(0, final, sources, inputs, outputs, np.zeros(len(sources)), targets)
