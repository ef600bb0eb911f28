"""How large the weight of a label can get in a state of an automaton, computed once when it is built.

Two bounds per state. `upper_bound` holds for every label; `backoff_bound` holds for the labels that
the state has no arc for. In a state with one likely successor the first is near 0 and says nothing
about the other labels, the second is what they really can get:

    state "new yor", arcs k:-0.01; backs off with -3.2 to "yor", arcs k:-0.05 e:-4.1
    upper_bound = -0.01 (k)        backoff_bound = -3.2 + max(-4.1, ...): k is no label without an arc

The searches offer the few arcs of such a state one by one and bound all other labels by the second.
"""

from __future__ import annotations

import numpy as np


def add_bounds(states: np.ndarray, arcs: np.ndarray) -> None:
    """Fill `upper_bound` and `backoff_bound` of `states` (`automaton.STATE`) with checked contents.

    Computed in double and rounded up, since the search adds the same numbers in another order.
    """
    backoff_to = states["backoff_to"]
    ranked = _ByWeight(states, arcs)
    backoff_bounds = np.full(len(states), -np.inf)
    for level in _levels(backoff_to):
        parents = backoff_to[level]
        others = np.maximum(ranked.best_without_own_arc(level, parents), backoff_bounds[parents])
        backoff_bounds[level] = states["backoff_weight"][level].astype(np.float64) + others
    states["upper_bound"] = _rounded_up(np.maximum(ranked.best(), backoff_bounds))
    states["backoff_bound"] = _rounded_up(backoff_bounds)


def _levels(backoff_to: np.ndarray) -> list[np.ndarray]:
    """The states that are no roots, nearest to their root first: each after what it backs off to."""
    levels = []
    pending = np.flatnonzero(backoff_to != np.arange(len(backoff_to)))
    is_pending = np.zeros(len(backoff_to), bool)
    is_pending[pending] = True
    while len(pending):
        ready = pending[~is_pending[backoff_to[pending]]]
        levels.append(ready)
        is_pending[ready] = False
        pending = pending[is_pending[pending]]
    return levels


class _ByWeight:
    """The arcs of every state, heaviest first, and whether a state has an arc for a label."""

    def __init__(self, states: np.ndarray, arcs: np.ndarray) -> None:
        self.counts = (states["arc_end"] - states["arc_begin"]).astype(np.int64)
        self.begins = np.cumsum(self.counts) - self.counts
        owner = np.repeat(np.arange(len(states)), self.counts)
        offset = np.arange(len(owner)) - self.begins[owner]
        arc = states["arc_begin"][owner] + offset  # by state, and by label within a state
        self.span = int(arcs["label"].max(initial=0)) + 1
        self.own_keys = owner * self.span + arcs["label"][arc]  # ascending
        weights = arcs["weight"][arc].astype(np.float64)
        heaviest_first = np.lexsort((-weights, owner))
        self.labels = arcs["label"][arc][heaviest_first]
        self.weights = weights[heaviest_first]

    def best(self) -> np.ndarray:
        """The largest weight of each state's own arcs, -inf where there are none."""
        best = np.full(len(self.counts), -np.inf)
        has_arcs = self.counts > 0
        best[has_arcs] = self.weights[self.begins[has_arcs]]
        return best

    def best_without_own_arc(self, states: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """The largest weight among the arcs of parents[i] whose label states[i] has no arc for."""
        best = np.full(len(states), -np.inf)
        undecided = np.arange(len(states))
        rank = 0
        while len(undecided):
            undecided = undecided[self.counts[parents[undecided]] > rank]
            arc = self.begins[parents[undecided]] + rank
            owned = self._has_arc(states[undecided], self.labels[arc])
            best[undecided[~owned]] = self.weights[arc[~owned]]
            undecided = undecided[owned]
            rank += 1
        return best

    def _has_arc(self, states: np.ndarray, labels: np.ndarray) -> np.ndarray:
        keys = states.astype(np.int64) * self.span + labels
        found = np.searchsorted(self.own_keys, keys)
        return self.own_keys[np.minimum(found, len(self.own_keys) - 1)] == keys


def _rounded_up(bounds: np.ndarray) -> np.ndarray:
    slack = np.where(np.isfinite(bounds), 1e-5 * (1.0 + np.abs(bounds)), 0.0)
    return (bounds + slack).astype(np.float32)
