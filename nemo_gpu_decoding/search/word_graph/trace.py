"""From the tokens of the last frame back to texts: where utterances end best, and how they got there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.tokens import NONE, boost_of, state_of
from nemo_gpu_decoding.search.word_graph.ways import boosted

END = np.dtype(
    [
        ("node", np.int64),  # token of the last frame, or node of a lattice
        ("epsilon", np.int32),  # record taken after the last frame, or NONE
        ("state", np.int32),  # of the graph, after the last frame and before the record
        ("cost", np.float64),
    ],
    align=True,
)


class Steps(NamedTuple):
    """The records of one path, oldest first, N of them; arrays [N]."""

    arcs: np.ndarray  # int32
    epsilons: np.ndarray  # int32, taken before the arc, or NONE
    frames: np.ndarray  # int32
    runs: np.ndarray  # int32, frames that the arc's label lasted
    probabilities: np.ndarray  # float32, sum of its posteriors over these frames


@compiled
def best_end(tokens, count, final, search, graph, boosting):
    """The token with which an utterance ends best.

    Args:
        final: the utterance is over: final costs count and epsilons may lead to a final state.

    Returns:
        its number, the epsilon record to the end or NONE, and the cost with all that comes after the
        last frame; the number is NONE if no token reaches a final state.
    """
    best, last_epsilon, least = np.int64(NONE), np.int64(NONE), np.inf
    for i in range(count):
        s, boost = state_of(tokens[i].key), boost_of(tokens[i].key)
        begin = graph.states[s].epsilon_begin
        for e in range(begin - 1, graph.states[s].epsilon_end if final else begin):
            epsilon, total = NONE if e < begin else e, np.float64(tokens[i].cost)
            if final:
                total += end_cost(s, epsilon, boost, search, graph, boosting)
            if total == np.inf:
                continue
            if total < least or (total == least and tokens[i].key < tokens[best].key):
                best, last_epsilon, least = np.int64(i), np.int64(epsilon), total
    return best, last_epsilon, least


@compiled
def all_ends(tokens, final, search, graph, boosting):
    """All ways to end: (token, epsilon record or NONE, state before it, cost after the last frame).

    `final` as in `best_end`; without it every token is an end, at no cost.
    """
    most = 0
    for i in range(len(tokens)):
        state = graph.states[state_of(tokens[i].key)]
        most += 1 + state.epsilon_end - state.epsilon_begin
    ends, count = np.empty(most, END), 0
    for i in range(len(tokens)):
        s = state_of(tokens[i].key)
        begin = graph.states[s].epsilon_begin
        for e in range(begin - 1, graph.states[s].epsilon_end if final else begin):
            epsilon, cost = NONE if e < begin else e, 0.0
            if final:
                cost = end_cost(s, epsilon, boost_of(tokens[i].key), search, graph, boosting)
            if cost < np.inf:
                ends[count].node, ends[count].epsilon = i, epsilon
                ends[count].state, ends[count].cost = s, cost
                count += 1
    return ends[:count].copy()


@compiled
def end_cost(state, epsilon, boost, search, graph, boosting):
    """What it costs to end in `state`, or where an epsilon record of it leads; inf if not final."""
    cost = 0.0
    if epsilon != NONE:
        record = graph.epsilons[epsilon]
        bonus, boost = boosted(record.word, boost, search, graph, boosting)
        cost += search.lm_weight * record.cost - bonus
        state = record.target
    final_cost = graph.states[state].final_cost
    if final_cost == np.inf:
        return np.inf
    cost += search.lm_weight * final_cost
    if search.boosts:
        cost -= search.boosting_weight * boosting.states[boost].final_weight
    return cost


@compiled
def count_records(records, record):
    count = 0
    while record != NONE:
        record = records[record].previous
        count += 1
    return count


@compiled
def trace_back(records, token, steps):
    """Fill `steps` (as long as the chain) with the records that `token` points to."""
    record, run, probability = token.record, token.run, token.probability
    for n in range(len(steps.arcs) - 1, -1, -1):
        steps.arcs[n] = records[record].arc
        steps.epsilons[n] = records[record].epsilon
        steps.frames[n] = records[record].frame
        steps.runs[n], steps.probabilities[n] = run, probability
        run, probability = records[record].run, records[record].probability
        record = records[record].previous


def steps_of(records: np.ndarray, token: np.void) -> Steps:
    """The path of a token."""
    count = count_records(records, token["record"])
    arcs, epsilons, frames, runs = (np.empty(count, np.int32) for _ in range(4))
    steps = Steps(arcs, epsilons, frames, runs, np.empty(count, np.float32))
    if count:
        trace_back(records, token, steps)
    return steps
