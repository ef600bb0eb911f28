"""The back-off automaton of an n-gram trie: states, back-offs and the targets of arcs.

The arcs are the nodes of the trie (`trie.py`): an arc leaves the state of an n-gram's context and its
label is the last word. This module adds the states with their back-offs and the target of each arc, in
the layout of `packed.py`. An n-gram is a state if other n-grams extend it or if it has a back-off
weight. Scores would be equal if all n-grams were states.

Pruning may remove the suffix (all but the first word) of an n-gram. Only the targets depend on this,
because an absent context has back-off weight 0. A context that the file does not list has cost NaN in
the trie; its arc gets the cost of backing off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.lm.packed import NO_LABEL, ROOT
from nemo_gpu_decoding.lm.records import LM_STATE
from nemo_gpu_decoding.lm.trie import NGramTrie, find_label

NO_STATE = 0  # in `state_of`: 0 is the root, the empty context
_CHUNK = 1 << 20  # contexts per progress update


class LinkedArcs(NamedTuple):
    """The arcs, as compiled code takes them."""

    labels: np.ndarray  # [A] uint32; ascending within a state
    costs: np.ndarray  # [A] float32
    targets: np.ndarray  # [A] uint32


class BackoffArcs:
    """The arrays of an LM's automaton; A arcs, S states. It takes over the arrays of the trie.

    Args:
        start: the label of <s>, which is always a state, or NO_LABEL.
        progress: called with the number of n-grams linked since the last call, of all possible contexts.
    """

    def __init__(self, trie: NGramTrie, start: int, progress: Callable[[int], None] = lambda ngrams: None) -> None:
        self.counts = trie.counts
        self.labels = trie.labels  # [A] uint32; ascending within a state
        self.costs = trie.costs  # [A] float32
        self.targets = trie.zeros(len(self.labels), np.uint32)  # [A]
        state_of = trie.zeros(trie.num_inner, np.uint32)  # of each n-gram that may be a context
        num_states = number_states(trie.children, trie.backoff_costs, start, state_of)
        self.states = trie.zeros(num_states + 1, LM_STATE)  # as in `PackedArrays`
        enter_states(trie.children, trie.backoff_costs, state_of, self.states, len(self.labels))
        has_start = NO_LABEL != start < len(state_of)  # an LM of 1-grams has no contexts
        self.start_state = int(state_of[start]) if has_start else ROOT
        # n-grams whose suffix (all but the first word) is not listed, see `link`
        self.repaired = self._link(trie, state_of, progress)

    @property
    def num_states(self) -> int:
        return len(self.states) - 1

    def _link(self, trie: NGramTrie, state_of: np.ndarray, progress: Callable[[int], None]) -> int:
        repaired = 0
        words = min(trie.counts[0], len(state_of))  # an LM of 1-grams has no contexts
        self.targets[:words] = state_of[:words]  # of the root's arcs
        arcs = LinkedArcs(self.labels, self.costs, self.targets)
        first_states = _first_states(trie, state_of)
        for order in range(2, trie.order + 1):
            suffixes = (first_states[order - 2], first_states[order - 1])
            for begin in range(trie.first[order - 2], trie.first[order - 1], _CHUNK):
                parents = (begin, min(begin + _CHUNK, trie.first[order - 1]))
                repaired += link(parents, state_of, trie.children, arcs, self.states, suffixes)
                progress(parents[1] - begin)
        return repaired


def _first_states(trie: NGramTrie, state_of: np.ndarray) -> list[int]:
    """The first state of each order of contexts, 0 .. order - 1, and the number of states."""
    first = [0, 1]
    for begin, end in zip(trie.first[:-2], trie.first[1:-1], strict=True):
        first.append(first[-1] + int(np.count_nonzero(state_of[begin:end])))
    return first


@compiled
def number_states(children, backoff_costs, start, state_of):
    """Number the n-grams that are states: extended ones, ones with a back-off weight, and `start`.

    Returns:
        the number of states, the root included.
    """
    count = 1
    for node in range(len(state_of)):
        is_state = children[node + 1] > children[node] or backoff_costs[node] != 0 or node == start
        state_of[node] = count if is_state else NO_STATE
        count += is_state
    return count


@compiled
def enter_states(children, backoff_costs, state_of, states, num_arcs):
    """Fill all columns of `states`, which are zeros, except `backoff_to`, which `link` fills for longer contexts."""
    for node in range(len(state_of)):
        state = state_of[node]
        if state != NO_STATE:
            states[state].arc_begin = children[node]
            states[state].backoff_cost = backoff_costs[node]
    states[len(states) - 1].arc_begin = num_arcs


@compiled
def link(parents, state_of, children, arcs, states, suffix_states):
    """Set the targets of the arcs from the nodes parents[0] .. parents[1]-1, all of one order n - 1 >= 1.

    Also sets the back-offs of their target states and replaces costs that are NaN. Lower orders must be
    linked already. If "h w" is no state, its target is the target of w in the back-off state of h: the
    longest suffix of "h w" that is a state.

    Args:
        suffix_states: the range of states of order n - 2.

    Returns:
        the number of n-grams with a suffix (all but the first word) that is not listed. Their scores are
        those of an LM that lists the suffix with its backed-off weight.
    """
    labels, costs, targets = arcs.labels, arcs.costs, arcs.targets
    unlisted = 0
    for parent in range(parents[0], parents[1]):
        if children[parent] == children[parent + 1]:
            continue
        suffix = np.int64(states[state_of[parent]].backoff_to)
        is_listed_parent = suffix_states[0] <= suffix < suffix_states[1]
        low = np.int64(states[suffix].arc_begin)
        for arc in range(children[parent], children[parent + 1]):
            label = np.int64(labels[arc])
            state, place = suffix, label
            if suffix != 0:
                stop = np.int64(states[suffix + 1].arc_begin)
                low = place = find_label(labels, low, stop, label)
                if place == stop or labels[place] != label:
                    state = np.int64(states[suffix].backoff_to)
                    place, _ = _find_backing_off(states, labels, state, label, np.float32(0.0))
            unlisted += not (is_listed_parent and state == suffix)
            if np.isnan(costs[arc]):
                lower, paid = _find_backing_off(states, labels, suffix, label, states[state_of[parent]].backoff_cost)
                costs[arc] = paid + costs[lower]
            target = state_of[arc] if arc < len(state_of) else NO_STATE
            targets[arc] = targets[place] if target == NO_STATE else target
            if target != NO_STATE:
                states[target].backoff_to = targets[place]
    return unlisted


@linked
def _find_backing_off(states, labels, state, label, cost):
    """The arc with `label` in the first state of the back-off chain that has such an arc; `cost` plus back-offs."""
    while state != 0:
        stop = np.int64(states[state + 1].arc_begin)
        place = find_label(labels, np.int64(states[state].arc_begin), stop, label)
        if place < stop and labels[place] == label:
            return place, cost
        cost += states[state].backoff_cost
        state = np.int64(states[state].backoff_to)
    return label, cost
