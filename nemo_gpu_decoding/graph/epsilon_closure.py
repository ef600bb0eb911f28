"""Epsilon closure of a word graph, computed once before the search.

Epsilons of a word graph are back-off arcs, and ends of words with a spelling that begins another spelling.
They form chains of two or three arcs. Epsilon removal would multiply the arcs of the graph (55-131 times
for the LMs measured). Instead, each state gets a closure arc to each state that it reaches by epsilons,
with the cost and the word of the chain. A search then takes closure arcs in one step, in any order:

    0 --eps:the/1--> 1 --eps/2--> 2          closure arcs of 0: (the, 1, to 1), (the, 3, to 2)
                                             closure arcs of 1: (-, 2, to 2)

The cheapest of several chains with the same words and target is kept. A chain with two words (possible in
ready-made graphs) gets a word-sequence label for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

MAX_CHAIN = 64  # arcs; a longer chain is treated like a cycle
Chains: TypeAlias = "tuple[np.ndarray, ...]"  # source states (of chains), words, costs and target states


@dataclass(frozen=True, eq=False)
class EpsilonClosure:
    """R epsilon-closure arcs of S states, grouped by state, then sorted by target and word."""

    begin: np.ndarray  # [S + 1] int64
    words: np.ndarray  # [R] int64, 0 for none
    costs: np.ndarray  # [R] float64
    targets: np.ndarray  # [R] int64
    sequences: np.ndarray  # [C, 2] int64: label num_words + i means the two labels sequences[i]


def epsilon_closure(
    num_states: int, sources: np.ndarray, arcs: np.ndarray, num_words: int, name: str
) -> EpsilonClosure:
    """The closure of epsilon arcs, [A] FST_ARC with their source states.

    Raises:
        ValueError: the arcs form a cycle, or a chain of more than `MAX_CHAIN` arcs.
    """
    order = np.argsort(sources, kind="stable")
    sources, arcs = sources[order].astype(np.int64), arcs[order]
    words: np.ndarray = arcs["output"].astype(np.int64)
    costs: np.ndarray = arcs["cost"].astype(np.float64)
    targets: np.ndarray = arcs["target"].astype(np.int64)
    _check_acyclic(num_states, sources, targets, name)
    begin = np.searchsorted(sources, np.arange(num_states + 1))
    sequences: dict[tuple[int, int], int] = {}
    level: Chains = (sources, words, costs, targets)
    levels = [level]
    while len(level[0]):
        level = _extended(level, begin, (words, costs, targets), sequences, num_words)
        levels.append(level)
    origins, words, costs, targets = (np.concatenate(column) for column in zip(*levels, strict=True))
    order = np.lexsort((costs, words, targets, origins))
    origins, words, costs, targets = (v[order] for v in (origins, words, costs, targets))
    best = np.ones(len(origins), bool)
    best[1:] = (np.diff(origins) != 0) | (np.diff(words) != 0) | (np.diff(targets) != 0)
    return EpsilonClosure(
        np.searchsorted(origins[best], np.arange(num_states + 1)),
        words[best],
        costs[best],
        targets[best],
        np.array(list(sequences), np.int64).reshape(-1, 2),
    )


def _extended(
    chains: Chains, begin: np.ndarray, arcs: Chains, sequences: dict[tuple[int, int], int], num_words: int
) -> Chains:
    """Extend each chain by each epsilon arc of its target state."""
    origins, words, costs, ends = chains
    counts = begin[ends + 1] - begin[ends]
    chain = np.repeat(np.arange(len(origins)), counts)
    arc = begin[ends[chain]] + np.arange(len(chain)) - (np.cumsum(counts) - counts)[chain]
    first, second = words[chain], arcs[0][arc]
    label = np.where(first == 0, second, first)
    for i in np.flatnonzero((first != 0) & (second != 0)):
        pair = int(first[i]), int(second[i])
        label[i] = num_words + sequences.setdefault(pair, len(sequences))
    return origins[chain], label, costs[chain] + arcs[1][arc], arcs[2][arc]


def _check_acyclic(num_states: int, sources: np.ndarray, targets: np.ndarray, name: str) -> None:
    """Repeatedly remove arcs to states without epsilon arcs; the remaining arcs lead to a cycle."""
    alive = np.arange(len(sources))
    for _ in range(MAX_CHAIN):
        if not len(alive):
            return
        has_arcs = np.zeros(num_states, bool)
        has_arcs[sources[alive]] = True
        alive = alive[has_arcs[targets[alive]]]
    if len(alive):
        raise ValueError(
            f"{name}: epsilon arcs from state {sources[alive[0]]} form a cycle or a chain of more than "
            f"{MAX_CHAIN} arcs, expected finite chains: a search could not end"
        )
