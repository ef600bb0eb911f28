"""Looking up one label in a `BackoffAutomaton`, compiled; every search on the CPU calls this."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined

ANY_WEIGHT = np.float32(-np.inf)


@compiled
def lookup(automaton, vocab_size, state, label, least):
    """Weight (float32, natural log) of `label` in `state`, and the state after it.

    Gives up with weight -inf as soon as upper bounds show that the weight is below `least`: a label
    that is no likely successor then costs one step and not a whole chain of back-offs. With
    `ANY_WEIGHT` it never gives up. The additions happen in the order in which NeMo's NGPU-LM does
    them, so that sums agree to the bit.
    """
    states, arcs = automaton.states, automaton.arcs
    weight = np.float32(0.0)
    while True:
        low = states[state].arc_begin
        end = states[state].arc_end
        if end - low == vocab_size:
            low += label
        else:
            high = end
            while low < high:
                middle = (low + high) >> 1
                if arcs[middle].label < label:
                    low = middle + 1
                else:
                    high = middle
        if low < end and arcs[low].label == label:
            return weight + arcs[low].weight, arcs[low].target
        if not weight + states[state].backoff_bound >= least:
            return ANY_WEIGHT, np.int32(state)
        weight += states[state].backoff_weight
        state = states[state].backoff_to


@inlined
def find_arc(automaton, vocab_size, state, label):
    """The number of the state's own arc for `label`, or -1."""
    low = automaton.states[state].arc_begin
    end = automaton.states[state].arc_end
    if end - low == vocab_size:
        return low + label
    high = end
    while low < high:
        middle = (low + high) >> 1
        if automaton.arcs[middle].label < label:
            low = middle + 1
        else:
            high = middle
    if low < end and automaton.arcs[low].label == label:
        return low
    return np.int32(-1)


@inlined
def has_arc(automaton, vocab_size, state, label):
    return find_arc(automaton, vocab_size, state, label) >= 0
