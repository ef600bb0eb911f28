"""Eager composition: each token takes each arc of its state, and queries the LMs before it is pruned [BigLM].

Where the beam is wide enough, the result is that of `lm_contexts.py`.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.word_graph.candidates import boosted, cost_of, offer, recombine
from nemo_gpu_decoding.search.word_graph.composition import query
from nemo_gpu_decoding.search.word_graph.keys import NONE, Origin, boost_of, label_of, state_of
from nemo_gpu_decoding.search.word_graph.token_groups import target_key


@linked
def expand_all_arcs(row, state, search, lm, work):
    """All arcs of all tokens, also by way of closure arcs."""
    graph, weights, frame = search.graph, search.weights, work.frame[0]
    for i in range(state.counters[0].tokens):
        token = work.current[i]
        frame.expanded += 1
        own = graph.states[state_of(token.key)]
        for e in range(own.epsilon_begin - 1, own.epsilon_end):
            cost, start, before = token.cost, boost_of(token.key), token.lm
            source, epsilon, first = own, NONE, np.float32(0.0)
            if e >= own.epsilon_begin:
                closure, epsilon = graph.epsilons[e], e
                source = graph.states[closure.target]
                cost += weights.lm_weight * closure.cost
                if closure.olabel != 0:
                    bonus, start = boosted(closure.olabel, start, search)
                    cost -= bonus
                    first, before = query(closure.olabel, before, search, lm, work)
            for a in range(source.arc_begin, source.arc_end):
                frame.arc_visits += 1
                arc, boost, context, difference = graph.arcs[a], start, before, first
                if search.params.topology == NORMAL and arc.ilabel + 1 == label_of(token.key):
                    continue
                bonus = np.float32(0.0)
                if arc.olabel != 0:
                    bonus, boost = boosted(arc.olabel, boost, search)
                    more, context = query(arc.olabel, context, search, lm, work)
                    difference += more
                acoustic_cost = cost_of(row, arc.ilabel, search)
                total = cost + weights.lm_weight * arc.cost - bonus + acoustic_cost + difference
                key, origin = target_key(arc, boost, search), Origin(a, i, epsilon)
                offer(total, key, context, origin, search, lm, work)
                if frame.candidates == len(work.candidates):
                    recombine(state, search, lm, work)
