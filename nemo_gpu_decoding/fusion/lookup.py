"""Looking up one label in a `BackoffAutomaton`, compiled; every search on the CPU calls this."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import linked, no_refcount

ANY_WEIGHT = np.float32(-np.inf)


@no_refcount
def lookup(automaton, vocab_size, state, label, least):
    """Weight (float32, natural log) of `label` in `state`, and the state after it.

    Returns weight -inf as soon as the upper bounds show that the weight is below `least`. An unlikely
    label then costs one step instead of a whole back-off chain. With `ANY_WEIGHT` the look-up always
    ends at an arc. The order of additions is that of NeMo's NGPU-LM, so that sums are equal to the bit.
    """
    states, arcs = automaton.states, automaton.arcs
    weight = np.float32(0.0)
    while True:
        at = np.uintp(state)
        low = np.uintp(states[at].arc_begin)
        end = np.uintp(states[at].arc_end)
        low = low + np.uintp(label) if end - low == vocab_size else first_not_below(arcs, low, end, label)
        if low < end and arcs[low].label == label:
            return weight + arcs[low].weight, arcs[low].target
        if not weight + states[at].backoff_bound >= least:
            return ANY_WEIGHT, np.int32(state)
        weight += states[at].backoff_weight
        state = states[at].backoff_to


@linked
def first_not_below(arcs, low, end, label):
    """The first of the arcs low .. end-1 with a label >= `label`, else end; unsigned numbers.

    The search is branch-free, because a branch would be mispredicted every other time.
    """
    count = end - low
    while count > 1:
        half = count >> np.uintp(1)
        low = low + half if arcs[low + half - np.uintp(1)].label < label else low
        count -= half
    return low + np.uintp(count == 1 and arcs[low].label < label)
