"""Looking up one label in a `BackoffAutomaton`, compiled; every search on the CPU calls this."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled

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
    while weight + states[state].upper_bound >= least:
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
        weight += states[state].backoff_weight
        state = states[state].backoff_to  # ends at the latest in a root, which has every label
    return ANY_WEIGHT, np.int32(state)
