"""Eager composition: each token takes each arc, and asks the LMs before anything is pruned [BigLM]."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import COMPACT, NORMAL
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.composition.composition import ask
from nemo_gpu_decoding.search.word_graph.composition.ways import offer, recombine
from nemo_gpu_decoding.search.word_graph.tokens import NONE, boost_of, key_of, label_of, state_of
from nemo_gpu_decoding.search.word_graph.ways import DONE, boosted, cost_of


@no_refcount
def take_all_arcs(row, progress, links, search, graph, boosting, rescoring, space):
    """All arcs of all tokens, also by way of epsilon records."""
    front, status = space.front[0], DONE
    for i in range(progress.tokens):
        token = space.current[i]
        front.prolonged += 1
        state = graph.states[state_of(token.key)]
        for e in range(state.epsilon_begin - 1, state.epsilon_end):
            cost, boost, lm = token.cost, boost_of(token.key), token.lm
            source, epsilon, correction = state, NONE, np.float32(0.0)
            if e >= state.epsilon_begin:
                record, epsilon = graph.epsilons[e], e
                source = graph.states[record.target]
                cost += search.lm_weight * record.cost
                if record.word != 0:
                    bonus, boost = boosted(record.word, boost, search, graph, boosting)
                    cost -= bonus
                    correction, lm = ask(record.word, lm, front, search, graph, rescoring, space.memo)
            for a in range(source.arc_begin, source.arc_end):
                status = _take(
                    a, i, cost, correction, boost, lm, epsilon, row, progress, links, search, graph,
                    boosting, rescoring, space,
                )  # fmt: skip
                if status != DONE:
                    return status
    return status


@inlined
def _take(
    a, i, cost, correction, boost, lm, epsilon, row, progress, links, search, graph, boosting,
    rescoring, space,
):  # fmt: skip
    arc, front, status = graph.arcs[a], space.front[0], DONE
    label = np.int64(arc.label) + 1
    front.arc_visits += 1
    if search.topology == NORMAL and label == label_of(space.current[i].key):
        return status
    bonus = np.float32(0.0)
    if arc.word != 0:
        bonus, boost = boosted(arc.word, boost, search, graph, boosting)
        more, lm = ask(arc.word, lm, front, search, graph, rescoring, space.memo)
        correction += more
    remembers = search.topology == COMPACT or search.topology == NORMAL
    key = key_of(arc.target, boost, label if remembers else np.int64(0))
    acoustic_cost = cost_of(row, arc.label, search)
    total = cost + search.lm_weight * arc.cost - bonus + acoustic_cost + correction
    offer(total, key, lm, i, a, epsilon, search, space)
    if front.candidates == len(space.candidates):
        status = recombine(progress, links, search, graph, boosting, space)
    return status
