"""Dominated LM contexts: tokens that cannot be on the best path, because a cheaper token beats them for any words.

Two tokens in one graph state and boosting state have the same ways to go on, at costs that differ only by the LM score
differences of the words to come. Suppose that, for any words, their differences after the first token's LM context
exceed those after the second token's by at most D. If the first token is cheaper by more than D, every path from the
second token costs more than the same path from the first one. So the search drops the second token
(`scorer.is_dominated`): composition "lazy" before a group expands its arcs (`contexts.py`), both after a word.

D is a sum over the back-off chains of both LM contexts to their common suffix. `context_bounds` computes the terms:
for any words, `over` is how much more they cost after a state than after its back-off state, `under` how much less.

Only the difference automaton (`difference.py`) has bounds. A search that keeps a lattice drops nothing.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.lm.packed import PackedArrays, arc_cost_and_target, arc_label, lookup

# Bounds of a state of the difference automaton
CONTEXT_BOUNDS = np.dtype([("backoff_to", np.uint32), ("over", np.float32), ("under", np.float32)])


def context_bounds(lm: PackedArrays) -> np.ndarray:
    """[S] CONTEXT_BOUNDS of the S states of a back-off automaton."""
    bounds = np.empty(len(lm.states) - 1, CONTEXT_BOUNDS)
    bounds["backoff_to"], bounds["over"], bounds["under"] = lm.states["backoff_to"][:-1], np.inf, np.inf
    _fill_bounds(lm, bounds)
    return bounds


@compiled
def _fill_bounds(lm, bounds):
    """Fill `over` and `under`, which are infinite before.

    Longer contexts have higher numbers, and the target of an arc is longer than its source by one word at most. So the
    bounds that a state needs are known.
    """
    bounds[0].over = bounds[0].under = 0
    for state in range(len(bounds) - 1, 0, -1):
        shorter = np.int64(bounds[state].backoff_to)
        backoff = np.float64(lm.states[state].backoff_cost)
        over, under = max(0.0, backoff), max(0.0, -backoff)
        for arc in range(np.int64(lm.states[state].arc_begin), np.int64(lm.states[state + 1].arc_begin)):
            cost, target = arc_cost_and_target(lm, arc)
            shorter_cost, at = lookup(lm, shorter, arc_label(lm, arc))
            more = np.float64(cost) - shorter_cost
            less = -more
            while target > at:  # the target of the shorter context is a suffix of this one
                more += bounds[target].over
                less += bounds[target].under
                target = np.int64(bounds[target].backoff_to)
            over, under = max(over, more), max(under, less)
        bounds[state].over, bounds[state].under = over, under
