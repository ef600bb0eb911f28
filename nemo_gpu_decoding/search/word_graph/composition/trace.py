"""Where utterances end best, with the LMs' costs of the end of a sentence."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.word_graph.composition.composition import cost_of_label, final_correction
from nemo_gpu_decoding.search.word_graph.tokens import NONE, boost_of, state_of
from nemo_gpu_decoding.search.word_graph.trace import END, end_cost


@compiled
def all_ends(tokens, final, search, graph, boosting, rescoring):
    """All ways to end: (token, epsilon record or NONE, state before it, cost after the last frame).

    Args:
        final: the utterance is over: final costs count and epsilons may lead to a final state. Without
            it every token is an end, at no cost.
    """
    most = 0
    for i in range(len(tokens)):
        state = graph.states[state_of(tokens[i].key)]
        most += 1 + state.epsilon_end - state.epsilon_begin
    ends, count = np.empty(most, END), 0
    for i in range(len(tokens)):
        s, boost = state_of(tokens[i].key), boost_of(tokens[i].key)
        begin = graph.states[s].epsilon_begin
        for e in range(begin - 1, graph.states[s].epsilon_end if final else begin):
            epsilon, cost = NONE if e < begin else e, 0.0
            if final:
                cost = end_cost(s, epsilon, boost, search, graph, boosting)
                if cost < np.inf:
                    cost += _lm_end(tokens[i].lm, epsilon, search, graph, rescoring)
            if cost < np.inf:
                ends[count].node, ends[count].epsilon = i, epsilon
                ends[count].state, ends[count].cost = s, cost
                count += 1
    return ends[:count].copy()


@compiled
def _lm_end(lm, epsilon, search, graph, rescoring):
    """Correction of the word that an epsilon record tells, and of the end after it."""
    correction = 0.0
    if search.correction_weight == 0:
        return correction
    if epsilon != NONE and graph.epsilons[epsilon].word != 0:
        word = graph.epsilons[epsilon].word
        cost, lm = cost_of_label(word, lm, search.num_words, graph, rescoring)
        correction += search.correction_weight * cost
    return correction + final_correction(lm, search, rescoring)


@compiled
def best_of(ends, tokens):
    """The number of the cheapest end; of equal ones that of the first token by key."""
    best, least = NONE, np.inf
    for n in range(len(ends)):
        token, total = tokens[ends[n].node], tokens[ends[n].node].cost + ends[n].cost
        if total < least:
            best, least = n, total
        elif total == least:
            other = tokens[ends[best].node]
            if token.key < other.key or (token.key == other.key and token.lm < other.lm):
                best = n
    return best
