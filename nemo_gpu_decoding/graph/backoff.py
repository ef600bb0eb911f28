"""Checks of an LM's back-off weights, before a graph is made of it.

A word graph takes back-offs as epsilon arcs, which a search may follow whether or not the LM lists the
longer n-gram. Two things are therefore worth knowing about an LM:

    sums      p(w | h) over all words w should be 1 in every context h; contexts where it is not come
              from back-off weights that were not computed anew after pruning or rounding
    undercut  n-grams that cost less by backing off than by their own probability: the graph gives them
              the lower cost, the LM the higher one
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.graph.grammar import arcs_by_state

SUM_TOLERANCE = 0.01  # of probability; ARPA files with four decimals stay well below
UNDERCUT_TOLERANCE = 1e-3  # natural log, likewise


@dataclass(frozen=True)
class BackoffChecks:
    """What was found. A context is a state of the LM; the empty one counts."""

    contexts: int
    longest_chain: int  # back-offs until the empty context
    improper: int  # contexts whose probabilities do not sum to 1
    largest_deviation: float  # of such a sum from 1
    undercut: int  # n-grams that are cheaper by backing off, those with </s> too


def check_backoffs(lm: BackoffAutomaton) -> BackoffChecks:
    """Look at every context and n-gram of a word LM."""
    states = lm.arrays.states
    sources, arcs = arcs_by_state(lm)
    suffix = states["backoff_to"]
    depths = _depths(suffix)
    own = arcs["weight"].astype(np.float64)
    keys = sources * lm.vocab_size + arcs["label"]
    shorter = _weights(lm, keys, own, suffix[sources], arcs["label"])
    backed_off = states["backoff_weight"][sources] + shorter
    undercut = (depths[sources] > 0) & (backed_off > own + UNDERCUT_TOLERANCE)
    end = states["final_weight"]
    cut_short = (depths > 0) & (states["backoff_weight"] + end[suffix] > end + UNDERCUT_TOLERANCE)
    deviations = np.abs(_sums(states, depths, sources, own, shorter) - 1)
    return BackoffChecks(
        contexts=len(states),
        longest_chain=int(depths.max()),
        improper=int((deviations > SUM_TOLERANCE).sum()),
        largest_deviation=float(deviations.max()),
        undercut=int(undercut.sum() + cut_short.sum()),
    )


def _sums(
    states: np.ndarray, depths: np.ndarray, sources: np.ndarray, own: np.ndarray, shorter: np.ndarray
) -> np.ndarray:
    """Total probability of each context, [S]: what it lists, and the rest of its suffix's backed off."""
    size, suffix = len(states), states["backoff_to"]
    end = np.exp(states["final_weight"].astype(np.float64))
    sums = np.bincount(sources, np.exp(own), size) + end
    # final weights have back-offs resolved: where </s> is not listed, it cancels out
    replaced = np.bincount(sources, np.exp(shorter), size) + end[suffix]
    factors = np.exp(states["backoff_weight"].astype(np.float64))
    for depth in range(1, int(depths.max()) + 1):
        at = np.flatnonzero(depths == depth)
        sums[at] += factors[at] * (sums[suffix[at]] - replaced[at])
    return sums


def _weights(
    lm: BackoffAutomaton, keys: np.ndarray, own: np.ndarray, states: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """The weight of each label in each state, backing off where need be; [N] float64.

    `keys`, state * vocab_size + label of every arc, ascend; `own` are the weights of these arcs.
    """
    table = lm.arrays.states
    at, weights = states.copy(), np.zeros(len(states))
    pending = np.arange(len(states))
    while len(pending):  # a root lists every label
        wanted = at[pending] * lm.vocab_size + labels[pending]
        found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        hit = keys[found] == wanted
        weights[pending[hit]] += own[found[hit]]
        pending = pending[~hit]
        weights[pending] += table["backoff_weight"][at[pending]]
        at[pending] = table["backoff_to"][at[pending]]
    return weights


def _depths(suffix: np.ndarray) -> np.ndarray:
    """Back-offs from each context to the empty one, [S]."""
    depths, at = np.zeros(len(suffix), np.int64), np.arange(len(suffix))
    while (is_inner := suffix[at] != at).any():
        depths += is_inner
        at = suffix[at]
    return depths
