"""Looking up one label in a `BackoffAutomaton`, compiled; every search on the CPU calls this."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import linked, no_refcount

ANY_WEIGHT = np.float32(-np.inf)


@no_refcount
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
        at = np.uintp(state)
        low = np.uintp(states[at].arc_begin)
        end = np.uintp(states[at].arc_end)
        low = low + np.uintp(label) if end - low == vocab_size else first_arc(arcs, low, end, label)
        if low < end and arcs[low].label == label:
            return weight + arcs[low].weight, arcs[low].target
        if not weight + states[at].backoff_bound >= least:
            return ANY_WEIGHT, np.int32(state)
        weight += states[at].backoff_weight
        state = states[at].backoff_to


@linked
def first_arc(arcs, low, end, label):
    """The first of the arcs low .. end whose label is not below `label`; unsigned numbers.

    The halves are chosen without a branch, which a processor would guess wrong every other time.
    """
    count = end - low
    while count > 1:
        half = count >> np.uintp(1)
        low = low + half if arcs[low + half - np.uintp(1)].label < label else low
        count -= half
    return low + np.uintp(count == 1 and arcs[low].label < label)
