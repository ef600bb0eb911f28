"""Token groups of composition "let" within a frame, and their arcs; see `let.py`.

A record of work.groups represents all tokens in one graph state and boosting state, with any last label. So the
search visits the arcs once for all of them. Tokens behind closure arcs with words form separate groups, because
all arcs of these groups need the LMs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import NORMAL, first_arc
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.candidates import boosted, cost_of, least_total, lower_cutoff
from nemo_gpu_decoding.search.word_graph.labels import SMALL_STATE, labels_within, likeliest_step
from nemo_gpu_decoding.search.word_graph.large_lm.let_words import (
    best_after_words,
    node_after_arc,
    node_after_closure,
    node_of_group,
)
from nemo_gpu_decoding.search.word_graph.records import GROUP_FIELDS, KEY
from nemo_gpu_decoding.search.word_graph.token_groups import AFTER_WORD, target_key

LET_GROUP = np.dtype(
    [
        KEY,
        ("node", np.int32),  # node of all its tokens, or NONE
        ("least_step", np.float32),  # lower bound of the cost of its arcs in `deferred`
        *GROUP_FIELDS,
    ],
    align=True,
)
LET_CANDIDATE = np.dtype(  # `token`: number of the token of the next frame, or NONE
    [KEY, ("token", np.int32), ("cost", np.float32), *((name, np.int32) for name in keys.Origin._fields)], align=True
)


@linked
def offer(total, key, origin, search, work):
    """List a candidate if it is not above the cutoff; its source is a node, or ~g for the node of group g."""
    frame = work.frame[0]
    if frame.candidates == len(work.candidates) and frame.status == keys.DONE:
        _drop_hopeless(work)
    if frame.candidates < len(work.candidates):
        candidates.offer(total, key, np.int64(0), origin, search, None, work)


@linked
def _drop_hopeless(work):
    """Drop candidates above the cutoff, which is lower now than when they were listed."""
    frame, kept = work.frame[0], 0
    for c in range(frame.candidates):
        if work.candidates[c].cost <= frame.cutoff:
            work.candidates[kept] = work.candidates[c]
            kept += 1
    frame.candidates = kept
    if 2 * kept > len(work.candidates):
        frame.status = keys.GROUPS_FULL


# --------------------------------------------------------------------------- tightening the cutoff


@linked
def tighten_cutoff(row, state, search, lm, work):
    """Lower the cutoff by the best token's best arc, at the arc's true cost if it has a word; see `contexts.py`."""
    graph = search.graph
    best, last_epsilon, last_arc, boost, least = likeliest_step(row, state, search, None, work)
    if last_arc == keys.NONE:
        return
    token, olabel = work.current[best], np.int32(0)
    if last_epsilon != keys.NONE:
        olabel = graph.epsilons[last_epsilon].olabel
    if olabel == 0 and graph.arcs[last_arc].olabel == 0:
        lower_cutoff(least, work.frame[0])
        return
    node, difference = best_after_words(token, last_epsilon, last_arc, state, (search, lm), work)
    if node != keys.NONE:
        key = target_key(graph.arcs[last_arc], boost, search)
        offer(least + difference, key, keys.Origin(last_arc, node, keys.NONE), search, work)


# ------------------------------------------------------------------------------------ token groups


@linked
def expand_group(group, g, row, search, work):
    """Expand the arcs of a group. In a large state, only arcs with labels that may survive are visited."""
    frame, arcs = work.frame[0], search.graph.arcs
    source = search.graph.states[np.uintp((group.key & ~AFTER_WORD) >> 16)]
    count = source.arc_end - source.arc_begin
    rounds = 1 if count <= SMALL_STATE else labels_within(group.cost, source, row, search, work)
    walks = count <= SMALL_STATE * rounds
    for n in range(1 if walks else rounds):  # one round for all arcs, or one round for each label
        label, first = keys.NONE, source.arc_begin
        if not walks:
            label = work.labels[n]
            acoustic_cost = cost_of(row, np.uintp(label), search)
            if least_total(group.cost, source.least_cost, acoustic_cost, search) > frame.cutoff:
                continue
            first = first_arc(search.arc_index, arcs, (group.key & ~AFTER_WORD) >> 16, source, label)
        for a in range(first, source.arc_end):
            arc = arcs[np.uintp(a)]
            if not walks and arc.ilabel != label:
                break
            frame.arc_visits += 1
            acoustic_cost = cost_of(row, np.uintp(arc.ilabel), search)
            if least_total(group.cost, arc.cost, acoustic_cost, search) > frame.cutoff:
                continue
            _expand_arc(a, group, g, acoustic_cost, search, work)


@linked
def _expand_arc(a, group, g, acoustic_cost, search, work):
    """Expand an arc that is below the cutoff for a group's best token; defer it if it needs the LMs."""
    arc, frame = search.graph.arcs[a], work.frame[0]
    if arc.olabel == 0 and group.key < AFTER_WORD:
        cost = group.cost
        if search.params.topology == NORMAL and arc.ilabel + 1 == group.label:  # closed to the best token
            cost = group.other_cost
        total = cost + search.weights.lm_weight * arc.cost + acoustic_cost
        offer(total, target_key(arc, group.key & 0xFFFF, search), keys.Origin(a, ~g, keys.NONE), search, work)
        return
    if frame.deferred == len(work.lm.deferred):
        frame.status = keys.GROUPS_FULL
        return
    work.lm.deferred[frame.deferred].group = g
    work.lm.deferred[frame.deferred].arc = a
    frame.deferred += 1
    step = least_total(np.float32(0.0), arc.cost, acoustic_cost, search)
    group.least_step = min(group.least_step, step)


# ------------------------------------------------------------------------------ arcs with words


@linked
def expand_with_lm(row, group_arc, cutoff, state, search, lm, work):
    """Take an arc that needs LM queries, for all contexts that are below the cutoff before the query."""
    group, arc, weights = work.groups[group_arc.group], search.graph.arcs[group_arc.arc], search.weights
    acoustic_cost, closed = cost_of(row, np.uintp(arc.ilabel), search), np.int64(keys.NONE)
    if least_total(group.cost, arc.cost, acoustic_cost, search) > cutoff:
        return
    if search.params.topology == NORMAL:
        closed = np.int64(arc.ilabel) + 1
    epsilon: Any = np.int32(keys.NONE)
    cost = np.float32(0.0)
    if group.key < AFTER_WORD:
        node, epsilon, cost = node_of_group(group, closed, state, work)
    else:
        node = node_after_closure(group, closed, cutoff, state, (search, lm), work)
        if node != keys.NONE:
            cost = state.nodes[node].cost
    bonus, boost = np.float32(0.0), group.key & 0xFFFF
    if node != keys.NONE and arc.olabel != 0:
        if weights.boosts:
            bonus, boost = boosted(arc.olabel, boost, search)
        most = cutoff - (weights.lm_weight * arc.cost - bonus + acoustic_cost)
        before = node, cost, most, epsilon
        node = node_after_arc(before, group_arc.arc, state, (search, lm), work)
        if node != keys.NONE:
            cost, epsilon = state.nodes[node].cost, np.int32(keys.NONE)
    if node == keys.NONE:
        return
    total = cost + weights.lm_weight * arc.cost - bonus + acoustic_cost
    origin = keys.Origin(group_arc.arc, node, epsilon)
    offer(total, target_key(arc, boost, search), origin, search, work)
