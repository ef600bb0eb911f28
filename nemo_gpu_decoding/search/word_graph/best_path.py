"""From the tokens of the last frame back to texts: where utterances end best, and how they got there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.candidates import boosted
from nemo_gpu_decoding.search.word_graph.composition import difference_of_label, final_difference
from nemo_gpu_decoding.search.word_graph.keys import NONE, boost_of, context_of, is_first, state_of

END = np.dtype(
    [
        ("node", np.int64),  # token of the last frame, or node of a lattice
        ("epsilon", np.int32),  # closure arc taken after the last frame, or NONE
        ("state", np.int32),  # of the graph, after the last frame and before the closure arc
        ("cost", np.float64),
    ],
    align=True,
)


class Steps(NamedTuple):
    """The back-pointers of one path, oldest first, N of them; arrays [N]."""

    arcs: np.ndarray  # int32
    epsilons: np.ndarray  # int32, taken before the arc, or NONE
    frames: np.ndarray  # int32
    runs: np.ndarray  # int32, frames that the arc's label lasted
    probabilities: np.ndarray  # float32, sum of its posteriors over these frames


@compiled
def best_end(tokens, final, search, lm):
    """The token with which an utterance ends best.

    Args:
        final: the utterance is over: final costs count and closure arcs may lead to a final state.

    Returns:
        its number, the closure arc to the end or NONE, and the cost with all that comes after the
        last frame; the number is NONE if no token reaches a final state.
    """
    best, last_epsilon, least = np.int64(NONE), np.int64(NONE), np.inf
    for i in range(len(tokens)):
        state = search.graph.states[state_of(tokens[i].key)]
        begin = state.epsilon_begin
        for e in range(begin - 1, state.epsilon_end if final else begin):
            epsilon, total = NONE if e < begin else e, np.float64(tokens[i].cost)
            if final:
                total += end_cost(tokens[i], epsilon, search, lm)
            if total == np.inf:
                continue
            if total < least or (total == least and is_first(tokens[i], tokens[best], lm)):
                best, last_epsilon, least = np.int64(i), np.int64(epsilon), total
    return best, last_epsilon, least


@compiled
def all_ends(tokens, final, search, lm):
    """[E] END: all ways to end, `final` as in `best_end`; without it every token is one, at no cost."""
    states, most = search.graph.states, 0
    for i in range(len(tokens)):
        state = states[state_of(tokens[i].key)]
        most += 1 + state.epsilon_end - state.epsilon_begin
    ends, count = np.empty(most, END), 0
    for i in range(len(tokens)):
        s = state_of(tokens[i].key)
        begin = states[s].epsilon_begin
        for e in range(begin - 1, states[s].epsilon_end if final else begin):
            epsilon, cost = NONE if e < begin else e, 0.0
            if final:
                cost = end_cost(tokens[i], epsilon, search, lm)
            if cost < np.inf:
                ends[count].node, ends[count].epsilon = i, epsilon
                ends[count].state, ends[count].cost = s, cost
                count += 1
    return ends[:count].copy()


@compiled
def end_cost(token, epsilon, search, lm):
    """What it costs to end with a token, or where a closure arc leads it; inf if that is not final."""
    graph, weights, cost = search.graph, search.weights, 0.0
    state, boost, olabel = state_of(token.key), boost_of(token.key), np.int32(0)
    if epsilon != NONE:
        closure = graph.epsilons[epsilon]
        olabel = closure.olabel
        bonus, boost = boosted(olabel, boost, search)
        cost += weights.lm_weight * closure.cost - bonus
        state = np.int64(closure.target)
    final_cost = graph.states[state].final_cost
    if final_cost == np.inf:
        return np.inf
    cost += weights.lm_weight * final_cost
    if weights.boosts:
        cost -= weights.boosting_weight * search.boosting.states[boost].final_weight
    if lm is None:
        return cost
    else:
        return cost + end_difference(olabel, context_of(token, lm), search, lm)


@compiled
def end_difference(olabel, context, search, lm):
    """LM score difference of the word of a closure arc, if there is one, and of the end after it."""
    difference = 0.0
    if lm.difference_weight == 0:
        return difference
    if olabel != 0:
        cost, context = difference_of_label(olabel, context, search, lm)
        difference += lm.difference_weight * cost
    return difference + final_difference(context, lm)


@compiled
def count_back_pointers(back_pointers, at):
    count = 0
    while at != NONE:
        at = back_pointers[at].previous
        count += 1
    return count


@compiled
def trace_back(back_pointers, token, steps):
    """Fill `steps` (as long as the chain) with the back-pointers that `token` points to."""
    at, run, probability = token.back_pointer, token.run, token.probability
    for n in range(len(steps.arcs) - 1, -1, -1):
        steps.arcs[n] = back_pointers[at].arc
        steps.epsilons[n] = back_pointers[at].epsilon
        steps.frames[n] = back_pointers[at].frame
        steps.runs[n], steps.probabilities[n] = run, probability
        run, probability = back_pointers[at].run, back_pointers[at].probability
        at = back_pointers[at].previous


def steps_of(back_pointers: np.ndarray, token: np.void) -> Steps:
    """The path of a token."""
    count = count_back_pointers(back_pointers, token["back_pointer"])
    arcs, epsilons, frames, runs = (np.empty(count, np.int32) for _ in range(4))
    steps = Steps(arcs, epsilons, frames, runs, np.empty(count, np.float32))
    if count:
        trace_back(back_pointers, token, steps)
    return steps
