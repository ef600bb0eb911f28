"""Token groups of composition "let" within a frame, and their arcs; see `let.py`.

A record of work.groups represents all tokens in one graph state and boosting state, with any last label. So the
search visits the arcs once for all of them. Tokens behind closure arcs with words form separate groups, because
all arcs of these groups need the LMs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import first_arc
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.candidates import boosted, fill_slot, find_slot, least_total, lower_cutoff
from nemo_gpu_decoding.search.word_graph.frame import may_expand
from nemo_gpu_decoding.search.word_graph.labels import SMALL_STATE, labels_within, likeliest_step
from nemo_gpu_decoding.search.word_graph.large_lm.let_words import (
    best_after_words,
    node_after_arc,
    node_after_closure,
    node_of_group,
)
from nemo_gpu_decoding.search.word_graph.records import KEY
from nemo_gpu_decoding.search.word_graph.token_groups import group_table, target_key, widen_group_table

AFTER_WORD = np.int64(1) << 48  # bit of the key of groups behind closure arcs with words

LET_GROUP = np.dtype(
    [
        ("key", np.int64),  # key of its tokens >> 16; AFTER_WORD is set behind closure arcs with words
        ("cost", np.float32),  # of the best token, by the small LM
        ("other_cost", np.float32),  # of the best token with another last label; inf: there is none
        ("label", np.int32),  # last label of the best token
        ("newest", np.int32),  # its newest GROUP_TOKEN
        ("node", np.int32),  # node of all its tokens, or NONE
        ("least_step", np.float32),  # lower bound of the cost of its arcs in `deferred`
    ],
    align=True,
)
LET_CANDIDATE = np.dtype(  # `token`: number of the token of the next frame, or NONE
    [KEY, ("cost", np.float32), *((name, np.int32) for name in (*keys.Origin._fields, "token"))], align=True
)


@linked
def offer(total, key, origin, search, work):
    """List a candidate if it is not above the cutoff; its source is a node, or ~g for the node of group g."""
    status = keys.DONE
    if work.frame[0].candidates == len(work.candidates):
        status = _drop_hopeless(work)
    if status == keys.DONE:
        candidates.offer(total, key, np.int64(0), origin, search, None, work)
    return status


@linked
def _drop_hopeless(work):
    """Drop candidates above the cutoff, which is lower now than when they were listed; returns a status."""
    frame, kept = work.frame[0], 0
    for c in range(frame.candidates):
        if work.candidates[c].cost <= frame.cutoff:
            work.candidates[kept] = work.candidates[c]
            kept += 1
    frame.candidates = kept
    return keys.DONE if 2 * kept <= len(work.candidates) else keys.GROUPS_FULL


# --------------------------------------------------------------------------- tightening the cutoff


@linked
def tighten_cutoff(row, state, search, lm, work):
    """Lower the cutoff by the best token's best arc, at the arc's true cost if it has a word; see `contexts.py`."""
    graph = search.graph
    best, last_epsilon, last_arc, boost, least = likeliest_step(row, state, search, None, work)
    if last_arc == keys.NONE:
        return keys.DONE
    token, olabel = work.current[best], np.int32(0)
    if last_epsilon != keys.NONE:
        olabel = graph.epsilons[last_epsilon].olabel
    if olabel == 0 and graph.arcs[last_arc].olabel == 0:
        lower_cutoff(least, work.frame[0])
        return keys.DONE
    status, node, difference = best_after_words(token, last_epsilon, last_arc, state, (search, lm), work)
    if status == keys.DONE:
        key = target_key(graph.arcs[last_arc], boost, search)
        status = offer(least + difference, key, keys.Origin(last_arc, node, keys.NONE), search, work)
    return status


# ------------------------------------------------------------------------------------ token groups


@linked
def expand_closure(i, least, search, work):
    """Add token i to the group of its state and to the groups of the targets of its closure arcs."""
    token, cutoff, status = work.current[i], work.frame[0].cutoff, keys.DONE
    graph, weights = search.graph, search.weights
    source = graph.states[keys.state_of(token.key)]
    for e in range(source.epsilon_begin - 1, source.epsilon_end):
        cost, boost, epsilon, olabel = token.cost, keys.boost_of(token.key), keys.NONE, np.int32(0)
        target, least_arc = keys.state_of(token.key), source.least_cost
        if e >= source.epsilon_begin:
            closure = graph.epsilons[e]
            cost += weights.lm_weight * closure.cost
            epsilon, target, least_arc = e, np.int64(closure.target), closure.least_cost
            olabel = closure.olabel
            if olabel != 0 and weights.boosts:
                if not least_total(cost - weights.most_bonus, least_arc, least, search) <= cutoff:
                    continue
                bonus, boost = boosted(olabel, boost, search)
                cost -= bonus
        if not least_total(cost, least_arc, least, search) <= cutoff:
            continue
        if may_expand(graph.states[np.uintp(target)], cost, search, cutoff, work):
            key = keys.key_of(target, boost, 0) >> 16
            if olabel != 0:
                key |= AFTER_WORD
            status = _join(key, cost, i, epsilon, search, work)
            if status != keys.DONE:
                break
    return status


@linked
def _join(key, cost, i, epsilon, search, work):
    frame, label = work.frame[0], np.int32(0)
    if frame.groups == len(work.groups) or frame.group_tokens == len(work.group_tokens):
        return keys.GROUPS_FULL
    if search.params.topology == NORMAL:
        label = np.int32(keys.label_of(work.current[i].key))
    slot = find_slot(key, 0, group_table(work), None)
    if work.group_slots[slot].stamp != work.stamps[1]:
        g = np.int32(frame.groups)
        fill_slot(work.group_slots, slot, work.stamps[1], g)
        frame.groups += 1
        group = work.groups[g]
        group.key, group.cost, group.other_cost, group.label = key, cost, np.float32(np.inf), label
        group.newest, group.node, group.least_step = keys.NONE, keys.NONE, LARGEST
        if 2 * frame.groups > frame.group_mask + 1:
            widen_group_table(work)
    else:
        g = work.group_slots[slot].entry
        group = work.groups[g]
        if cost < group.cost:
            if label != group.label:
                group.other_cost = group.cost
            group.cost, group.label = cost, label
        elif label != group.label:
            group.other_cost = min(group.other_cost, cost)
    member = work.group_tokens[frame.group_tokens]
    member.cost, member.source, member.epsilon, member.next = cost, i, epsilon, work.groups[g].newest
    work.groups[g].newest = frame.group_tokens
    frame.group_tokens += 1
    return keys.DONE


@linked
def expand_group(group, g, row, search, work):
    """Expand the arcs of a group. In a large state, only arcs with labels that may survive are visited."""
    frame, arcs, costs, status = work.frame[0], search.graph.arcs, work.acoustic_costs, keys.DONE
    source = search.graph.states[np.uintp((group.key & ~AFTER_WORD) >> 16)]
    count = source.arc_end - source.arc_begin
    rounds = 1 if count <= SMALL_STATE else labels_within(group.cost, source, row, search, work)
    walks = count <= SMALL_STATE * rounds
    for n in range(1 if walks else rounds):  # one round for all arcs, or one round for each label
        label, first = keys.NONE, source.arc_begin
        if not walks:
            label = work.labels[n]
            if least_total(group.cost, source.least_cost, costs[np.uintp(label)], search) > frame.cutoff:
                continue
            first = first_arc(arcs, source, label)
        for a in range(first, source.arc_end):
            arc = arcs[np.uintp(a)]
            if not walks and arc.ilabel != label:
                break
            frame.arc_visits += 1
            acoustic_cost = costs[np.uintp(arc.ilabel)]
            if least_total(group.cost, arc.cost, acoustic_cost, search) > frame.cutoff:
                continue
            status = _expand_arc(a, group, g, acoustic_cost, search, work)
            if status != keys.DONE:
                return status
    return status


@linked
def _expand_arc(a, group, g, acoustic_cost, search, work):
    """Expand an arc that is below the cutoff for a group's best token; defer it if it needs the LMs."""
    arc, frame = search.graph.arcs[a], work.frame[0]
    if arc.olabel == 0 and group.key < AFTER_WORD:
        cost = group.cost
        if search.params.topology == NORMAL and arc.ilabel + 1 == group.label:  # closed to the best token
            cost = group.other_cost
        total = cost + search.weights.lm_weight * arc.cost + acoustic_cost
        return offer(total, target_key(arc, group.key & 0xFFFF, search), keys.Origin(a, ~g, keys.NONE), search, work)
    if frame.deferred == len(work.lm.deferred):
        return keys.GROUPS_FULL
    work.lm.deferred[frame.deferred].group = g
    work.lm.deferred[frame.deferred].arc = a
    frame.deferred += 1
    step = least_total(np.float32(0.0), arc.cost, acoustic_cost, search)
    group.least_step = min(group.least_step, step)
    return keys.DONE


# ------------------------------------------------------------------------------ arcs with words


@linked
def expand_with_lm(group_arc, cutoff, state, search, lm, work):
    """Take an arc that needs LM queries, for all contexts that are below the cutoff before the query."""
    group, arc, weights = work.groups[group_arc.group], search.graph.arcs[group_arc.arc], search.weights
    acoustic_cost, closed = work.acoustic_costs[np.uintp(arc.ilabel)], np.int64(keys.NONE)
    if least_total(group.cost, arc.cost, acoustic_cost, search) > cutoff:
        return keys.DONE
    if search.params.topology == NORMAL:
        closed = np.int64(arc.ilabel) + 1
    epsilon: Any = np.int32(keys.NONE)
    cost = np.float32(0.0)
    if group.key < AFTER_WORD:
        status, node, epsilon, cost = node_of_group(group, closed, state, work)
    else:
        status, node = node_after_closure(group, closed, cutoff, state, (search, lm), work)
        if node != keys.NONE:
            cost = state.nodes[node].cost
    bonus, boost = np.float32(0.0), group.key & 0xFFFF
    if status == keys.DONE and node != keys.NONE and arc.olabel != 0:
        if weights.boosts:
            bonus, boost = boosted(arc.olabel, boost, search)
        most = cutoff - (weights.lm_weight * arc.cost - bonus + acoustic_cost)
        before = node, cost, most, epsilon
        status, node = node_after_arc(before, group_arc.arc, state, (search, lm), work)
        if node != keys.NONE:
            cost, epsilon = state.nodes[node].cost, np.int32(keys.NONE)
    if status != keys.DONE or node == keys.NONE:
        return status
    total = cost + weights.lm_weight * arc.cost - bonus + acoustic_cost
    origin = keys.Origin(group_arc.arc, node, epsilon)
    return offer(total, target_key(arc, boost, search), origin, search, work)
