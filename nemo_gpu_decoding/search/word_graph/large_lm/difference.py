"""Difference automaton of the large and the small LM: one state and one look-up in place of two.

The large LM must contain all n-grams of the small LM, for example because the small LM was pruned from it.
Then a state h of the large LM determines the small LM's state s(h): the longest suffix of its context that
the small LM knows. If h has no arc for a word, s(h) has none either, unless s(h) has a shorter context. So
both LMs back off together:

    arc w of h           cost_large(w | h) - cost_small(w | s(h))
    back-off of h        B_large(h) - B_small(s(h))    if s(h) backs off, too
                         B_large(h)                    if the back-off state of h has the same small state

The automaton has the states and arcs of the large LM. Only the costs differ; they are float32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.lm.packed import (
    COST_BITS,
    NO_LABEL,
    ROOT,
    PackedLM,
    arc_cost_and_target,
    arc_label,
    find_arc,
    lookup,
    num_words,
    write_bits,
)

_CHUNK = 1 << 20  # arcs that are packed at a time


def difference_of(large: PackedLM, small: PackedLM) -> PackedLM | None:
    """Subtract the small LM's costs from the large LM's.

    The small LM scores words that it does not list as <unk>.

    Returns:
        the difference automaton, or None if the small LM is no subset of the large LM, or an LM has no </s>.
    """
    if NO_LABEL in (large.sentence_end, small.sentence_end):
        return None
    if not set(small.words) <= set(large.words):
        return None
    labels = np.array([small.label(word) for word in large.words], np.int64)
    back = np.array([large.word_ids[word] for word in small.words], np.int64)
    small_states = np.full(large.num_states, -1, np.int64)
    if not _follow(large.arrays, small.arrays, labels, small_states):
        return None
    if small_states[large.start_state] != small.start_state:
        return None
    states = large.arrays.states.copy()
    if not _subtract_backoffs(large.arrays, small.arrays, back, small_states, states):
        return None
    bits = large.arrays.target_bits + COST_BITS
    arcs = np.zeros(num_words(large.num_arcs, bits), np.uint64)
    counts = np.diff(states["arc_begin"].astype(np.int64)).astype(np.int64)
    sources = np.repeat(np.arange(large.num_states), counts)
    for first in range(0, large.num_arcs, _CHUNK):
        values = np.empty(min(_CHUNK, large.num_arcs - first), np.uint64)
        of_chunk = small_states[sources[first : first + len(values)]]
        _subtract_arcs(large.arrays, small.arrays, labels, of_chunk, first, values)
        write_bits(arcs, bits, first, values)
    arrays = large.arrays._replace(states=states, arcs=arcs)
    return replace(large, arrays=arrays, name=f"{large.name} minus {small.name}")


@compiled
def _next_small(small, state, label):
    """The small LM's state after a label; the root after NO_LABEL, a word that the small LM cannot score."""
    if label == NO_LABEL:
        return np.int64(ROOT)
    _, target = lookup(small, state, label)
    return target


@compiled
def _follow(large, small, labels, small_states):
    """Fill `small_states` [states of the large LM] with the small LM's state of each large state.

    Returns:
        False if paths to a state give it two small states, or if no path leads to a state.
    """
    small_states[ROOT] = ROOT
    pending, count = np.empty(len(small_states), np.int64), 1
    pending[0] = ROOT
    done = 0
    while done < count:
        state = pending[done]
        done += 1
        first = np.int64(large.states[state].arc_begin)
        for arc in range(first, np.int64(large.states[state + 1].arc_begin)):
            _, target = arc_cost_and_target(large, arc)
            label = labels[arc_label(large, arc)]
            small_state = _next_small(small, small_states[state], label)
            if small_states[target] == -1:
                small_states[target] = small_state
                pending[count] = target
                count += 1
            elif small_states[target] != small_state:
                return False
    return count == len(small_states)


@compiled
def _subtract_backoffs(large, small, large_labels, small_states, states):
    """Subtract the small LM's back-off costs in `states`; returns False if the LMs do not back off together."""
    for state in range(1, len(small_states)):
        small_state = small_states[state]
        shorter = small_states[np.int64(large.states[state].backoff_to)]
        if small_state == shorter:
            continue
        if np.int64(small.states[small_state].backoff_to) != shorter:
            return False
        first = np.int64(small.states[small_state].arc_begin)
        for arc in range(first, np.int64(small.states[small_state + 1].arc_begin)):
            if find_arc(large, state, large_labels[arc_label(small, arc)]) < 0:
                return False
        states[state].backoff_cost -= small.states[small_state].backoff_cost
    return True


@compiled
def _subtract_arcs(large, small, labels, small_states, first, values):
    """Pack the arcs from `first` on, with the differences as costs.

    Args:
        small_states: [n] int64, the small LM's state of the source of each arc.
        values: [n] uint64, output; an arc's target in the low `target_bits`, its float32 cost above them.
    """
    buffer = np.empty(1, np.float32)
    as_bits = buffer.view(np.uint32)
    for n in range(len(values)):
        cost, target = arc_cost_and_target(large, first + n)
        label = labels[arc_label(large, first + n)]
        if label != NO_LABEL:
            small_cost, _ = lookup(small, small_states[n], label)
            cost -= small_cost
        buffer[0] = cost
        values[n] = np.uint64(target) | (np.uint64(as_bits[0]) << np.uint64(large.target_bits))
