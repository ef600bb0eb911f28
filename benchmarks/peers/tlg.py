"""T o L o G: the graph of a strategy composed with its CTC topology, for peers that apply no topology."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import COMPACT, MINIMAL, NORMAL, WordGraph, arc_sources, topology_number
from nemo_gpu_decoding.graph.openfst import Fst, write_fst

ROUNDING = 1e-5  # relative; costs are float32


def composed_graph(graph: WordGraph, topology: str, vocab_size: int) -> Any:
    """T o L o G as a kaldifst `StdVectorFst`.

    Input labels are column + 1, output labels those of `graph.words`. The blank is column V.
    """
    import kaldifst

    with tempfile.TemporaryDirectory(prefix="nemo-gpu-decoding-") as folder:
        paths = [os.path.join(folder, name) for name in ("t.fst", "lg.fst")]
        write_fst(topology_fst(topology, vocab_size), paths[0])
        write_fst(as_transducer(graph), paths[1])
        left, right = (kaldifst.StdVectorFst.read(path) for path in paths)
    kaldifst.arcsort(left, sort_type="olabel")
    kaldifst.arcsort(right, sort_type="ilabel")
    return kaldifst.compose(left, right)


def topology_fst(name: str, vocab_size: int) -> Fst:
    """T as NeMo makes it: reads columns + 1, writes token + 1; the blank is column V.

    State 0 is where a blank leads to, state v + 1 is the token v, if the topology has states for tokens.

    Raises:
        ValueError: there is no such topology, or it is "graph", which has no T.
    """
    number = topology_number(name)
    tokens, blank = np.arange(1, vocab_size + 1), vocab_size + 1  # labels
    start, nothing = np.zeros_like(tokens), np.zeros_like(tokens)
    final = np.full(1 if number == MINIMAL else vocab_size + 1, np.inf)
    final[0] = 0.0
    # columns: source, input, output, target
    rows = [tuple(np.array([value]) for value in (0, blank, 0, 0))]
    if number == MINIMAL:
        rows.append((start, tokens, tokens, start))
    elif number in (COMPACT, NORMAL):
        rows += [(start, tokens, tokens, tokens), (tokens, tokens, nothing, tokens)]
        back = nothing if number == COMPACT else np.full_like(tokens, blank)
        rows.append((tokens, back, nothing, start))
        if number == NORMAL:
            final[:] = 0.0
            before, after = np.repeat(tokens, vocab_size), np.tile(tokens, vocab_size)
            before, after = before[before != after], after[before != after]
            rows.append((before, after, after, after))
    else:
        raise ValueError(f"topology is {name!r}, expected compact, normal or minimal")
    sources, inputs, outputs, targets = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Fst.from_arcs(0, final, sources, inputs, outputs, np.zeros(len(sources)), targets)


def as_transducer(graph: WordGraph) -> Fst:
    """The graph as a transducer, with single epsilon arcs where it has closures over whole chains.

    A closure that two others put together give, at the same cost, is that of a chain; what is left
    are the arcs that chains are made of.
    """
    states, arcs, closures, _ = graph.arrays
    single = ~_is_chain(graph)
    own, closures = arc_sources(states, "epsilon")[single], closures[single]
    return Fst.from_arcs(
        graph.start,
        states["final_cost"],
        np.append(arc_sources(states, "arc"), own),
        np.append(arcs["ilabel"] + 1, np.zeros(len(closures), np.int64)),
        np.append(arcs["olabel"], closures["olabel"]),
        np.append(arcs["cost"], closures["cost"]),
        np.append(arcs["target"], closures["target"]),
    )


def _is_chain(graph: WordGraph) -> np.ndarray:
    """[number of epsilon closures] whether two other closures together give it."""
    states, _, closures, word_sequences = graph.arrays
    own = arc_sources(states, "epsilon")
    num_states, labels = len(states), len(graph.words) + len(word_sequences)

    def key(source: np.ndarray, target: np.ndarray, word: np.ndarray) -> np.ndarray:
        return (source.astype(np.int64) * num_states + target) * labels + word

    begin = states["epsilon_begin"][closures["target"]]
    count = states["epsilon_end"][closures["target"]] - begin
    first = np.repeat(np.arange(len(closures)), count)
    position = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
    second = begin[first] + position
    one_word = (closures["olabel"][first] == 0) | (closures["olabel"][second] == 0)
    first, second = first[one_word], second[one_word]
    word = closures["olabel"][first] + closures["olabel"][second]
    joined = key(own[first], closures["target"][second], word)
    keys = key(own, closures["target"], closures["olabel"])
    order = np.argsort(keys)
    found = order[np.searchsorted(keys[order], joined)]
    cost = closures["cost"].astype(np.float64)
    apart = np.abs(cost[first] + cost[second] - cost[found])
    chains = closures["olabel"] >= len(graph.words)  # two words: no single arc has them
    chains[found[apart <= ROUNDING * (1 + np.abs(cost[found]))]] = True
    return chains
