"""Token groups of composition "let", and their arcs; see `let.py`.

A record of work.groups is what tokens in one graph state and boosting state have in common, whatever their
last label: arcs are looked at once for all. Those behind closure arcs with words are groups of their own, since
all that they lead to needs the LMs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import first_arc
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.candidates import (
    boosted,
    cost_of,
    fill_slot,
    find_slot,
    least_total,
    lower_cutoff,
)
from nemo_gpu_decoding.search.word_graph.frame import SMALL_STATE
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS, likeliest_step
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import (
    ARENA_FULL,
    JOIN_MOVE,
    add_link,
    begin_words,
    best_context,
    copy_past,
    enter_words,
    expand,
    has_room,
    new_node,
    node_after_words,
)
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import query
from nemo_gpu_decoding.search.word_graph.records import KEY
from nemo_gpu_decoding.search.word_graph.token_groups import group_table, target_key, widen_group_table

AFTER_WORD = np.int64(1) << 48  # in the key of a group whose tokens have taken closure arcs with words

LET_GROUP = np.dtype(
    [
        ("key", np.int64),  # that of a token >> 16, with AFTER_WORD
        ("cost", np.float32),  # of the best token, by the small LM
        ("other_cost", np.float32),  # of the best one with another last label; inf: there is none
        ("label", np.int32),  # last label of the best token
        ("newest", np.int32),  # of its GROUP_TOKENs
        ("node", np.int32),  # that stands for all of them, or NONE
        ("least_step", np.float32),  # no arc of it in `deferred` costs less
    ],
    align=True,
)
LET_CANDIDATE = np.dtype(  # `token`: of the next frame, or NONE
    [KEY, ("cost", np.float32), *((name, np.int32) for name in (*keys.Origin._fields, "token"))], align=True
)


@linked
def offer(total, key, origin, search, work):
    """List a candidate if it is not above the cutoff; the source is a node, or ~g: that of group g."""
    status = keys.DONE
    if work.frame[0].candidates == len(work.candidates):
        status = _drop_hopeless(work)
    if status == keys.DONE:
        candidates.offer(total, key, np.int64(0), origin, search, None, work)
    return status


@linked
def _drop_hopeless(work):
    """Drop candidates above the cutoff, which has become lower since."""
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
    """Lower the cutoff by the best token's best arc; at its true cost if it has a word, see `contexts.py`."""
    graph = search.graph
    best, last_epsilon, last_arc, boost, least = likeliest_step(row, state, search, None, work)
    if last_arc == keys.NONE:
        return keys.DONE
    token, olabel = work.current[best], np.int32(0)
    if last_epsilon != keys.NONE:
        olabel = graph.epsilons[last_epsilon].olabel
    words = olabel, graph.arcs[last_arc].olabel
    if words[0] == 0 and words[1] == 0:
        lower_cutoff(least, work.frame[0], search)
        return keys.DONE
    status = expand(token.back_pointer, state, search, lm, work)
    if status != keys.DONE:
        return status
    status, node, difference = _best_after_words(token, words, last_epsilon, state, (search, lm), work)
    if status == keys.DONE:
        key = target_key(graph.arcs[last_arc], boost, search)
        status = offer(least + difference, key, keys.Origin(last_arc, node, keys.NONE), search, work)
    return status


@linked
def _best_after_words(token, words, epsilon, state, models, work):
    """A node of the best context of a token alone, after up to two output labels."""
    search, lm = models
    if not has_room(1, 0, 1, state):
        return ARENA_FULL, np.int32(keys.NONE), np.float32(0.0)
    source = state.contexts[best_context(state.nodes[token.back_pointer], state.contexts)]
    total, after = np.float32(0.0), source.lm
    for olabel in words:
        if olabel != 0:
            difference, after = query(olabel, after, search, lm, work)
            total += difference
    node, counters = new_node(token.key, token.cost, state), state.counters[0]
    state.nodes[node].begin, state.nodes[node].count = counters.contexts, 1
    context = state.contexts[counters.contexts]
    context.lm, context.cost, context.epsilon = after, np.float32(0.0), epsilon
    copy_past(context, source)
    counters.contexts += 1
    return keys.DONE, node, total


# ------------------------------------------------------------------------------------ token groups


@linked
def expand_closure(i, least, search, work):
    """A token joins the group of its state, and those of all states that its closure arcs lead to."""
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
        if least_total(cost, least_arc, least, search) <= cutoff:
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
    """All arcs of a group of a small state; of a large state those with labels that may matter."""
    frame, arcs, status = work.frame[0], search.graph.arcs, keys.DONE
    source = search.graph.states[(group.key & ~AFTER_WORD) >> 16]
    count = source.arc_end - source.arc_begin
    walks = count <= SMALL_STATE or count <= 4 * frame.labels
    rounds = 1 if walks else frame.labels  # all arcs in one, or one for each label
    for n in range(rounds):
        label, first = keys.NONE, source.arc_begin
        if not walks:
            label = work.labels[n]
            acoustic_cost = cost_of(row, label, search)
            if least_total(group.cost, source.least_cost, acoustic_cost, search) > frame.cutoff:
                if frame.labels <= SORTED_LABELS:
                    break
                continue
            first = first_arc(arcs, source, label)
        for a in range(first, source.arc_end):
            if not walks and arcs[a].ilabel != label:
                break
            frame.arc_visits += 1
            acoustic_cost = cost_of(row, arcs[a].ilabel, search)
            if least_total(group.cost, arcs[a].cost, acoustic_cost, search) > frame.cutoff:
                continue
            status = _expand_arc(a, group, g, acoustic_cost, search, work)
            if status != keys.DONE:
                return status
    return status


@linked
def _expand_arc(a, group, g, acoustic_cost, search, work):
    """An arc that survives at the cost of a group's best token; put off where it needs the LMs."""
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
def expand_with_lm(group_arc, row, cutoff, state, search, lm, work):
    """An arc that queries the LMs, for all contexts that are within the beam before the query."""
    group, arc, weights = work.groups[group_arc.group], search.graph.arcs[group_arc.arc], search.weights
    acoustic_cost, closed = cost_of(row, arc.ilabel, search), np.int64(keys.NONE)
    if least_total(group.cost, arc.cost, acoustic_cost, search) > cutoff:
        return keys.DONE
    if search.params.topology == NORMAL:
        closed = np.int64(arc.ilabel) + 1
    epsilon: Any = np.int32(keys.NONE)
    cost = np.float32(0.0)
    if group.key < AFTER_WORD:
        status, node, epsilon, cost = node_of_group(group, closed, state, work)
    else:
        status, node = _node_after_closure(group, closed, cutoff, state, (search, lm), work)
        if node != keys.NONE:
            cost = state.nodes[node].cost
    bonus, boost = np.float32(0.0), group.key & 0xFFFF
    if status == keys.DONE and node != keys.NONE and arc.olabel != 0:
        if weights.boosts:
            bonus, boost = boosted(arc.olabel, boost, search)
        most = cutoff - (weights.lm_weight * arc.cost - bonus + acoustic_cost)
        before = node, cost, most, epsilon
        status, node = _node_after_arc(before, arc.olabel, state, (search, lm), work)
        if node != keys.NONE:
            cost, epsilon = state.nodes[node].cost, np.int32(keys.NONE)
    if status != keys.DONE or node == keys.NONE:
        return status
    total = cost + weights.lm_weight * arc.cost - bonus + acoustic_cost
    origin = keys.Origin(group_arc.arc, node, epsilon)
    return offer(total, target_key(arc, boost, search), origin, search, work)


@linked
def _is_closed(member, closed, work):
    """Whether an arc with this last label (topology normal) is closed to a member of a group."""
    return closed != keys.NONE and keys.label_of(work.current[member.source].key) == closed


@linked
def node_of_group(group, closed, state, work):
    """The node of a group's tokens, without those that the arc is closed to, made if there is none.

    Returns:
        a status; the node, or NONE if there are no such tokens; the closure arc to the group if there
        is one such token, whose own node is taken, or NONE; the cost of the best of them.
    """
    members, count, last, is_whole, least = work.group_tokens, 0, keys.NONE, True, LARGEST
    at = group.newest
    while at != keys.NONE:
        if _is_closed(members[at], closed, work):
            is_whole = False
        else:
            count, last, least = count + 1, at, min(least, members[at].cost)
        at = members[at].next
    if count == 0:
        return keys.DONE, np.int32(keys.NONE), np.int32(keys.NONE), least
    if count == 1:
        return keys.DONE, work.current[members[last].source].back_pointer, members[last].epsilon, least
    if is_whole and group.node != keys.NONE:
        return keys.DONE, group.node, np.int32(keys.NONE), least
    if not has_room(1, count, 0, state):
        return ARENA_FULL, np.int32(keys.NONE), np.int32(keys.NONE), least
    node, at = new_node(group.key << 16, least, state), group.newest
    while at != keys.NONE:
        member = members[at]
        if not _is_closed(member, closed, work):
            source = work.current[member.source].back_pointer
            add_link(node, source, JOIN_MOVE, member.epsilon, member.cost - least, np.float32(0.0), state)
        at = member.next
    if is_whole:
        group.node = node
    return keys.DONE, node, np.int32(keys.NONE), least


@linked
def _node_after_closure(group, closed, cutoff, state, models, work):
    """The node of a group behind closure arcs with words: contexts after these, at their true cost."""
    search, lm = models
    members, epsilons = work.group_tokens, search.graph.epsilons
    is_whole, at, total, most = True, group.newest, 0, cutoff - group.least_step
    while at != keys.NONE:
        is_whole = is_whole and not _is_closed(members[at], closed, work)
        at = members[at].next
    if is_whole and group.node != keys.NONE:
        return keys.DONE, group.node
    at = group.newest
    while at != keys.NONE:
        if not _is_closed(members[at], closed, work) and members[at].cost <= most:
            source = work.current[members[at].source].back_pointer
            status = expand(source, state, search, lm, work)
            if status != keys.DONE:
                return status, np.int32(keys.NONE)
            total += state.nodes[source].count
        at = members[at].next
    status = begin_words(total, state, work)
    if status != keys.DONE:
        return status, np.int32(keys.NONE)
    begin, count, at = state.counters[0].contexts, 0, group.newest
    while at != keys.NONE:
        member = members[at]
        if not _is_closed(member, closed, work) and member.cost <= most:
            source, olabel = work.current[member.source].back_pointer, epsilons[member.epsilon].olabel
            before = source, at, member.cost, most, olabel, member.epsilon
            count = enter_words(begin, count, total, before, models, state, work)
        at = member.next
    node_after = node_after_words(group.key << 16, begin, count, state, lm)
    if is_whole:
        group.node = node_after
    return keys.DONE, node_after


@linked
def _node_after_arc(before, olabel, state, models, work):
    """The node of the contexts of another one after the word of an arc, of those that cost `most` at most."""
    search, lm = models
    node, base, most, epsilon = before
    status = expand(node, state, search, lm, work)
    if status == keys.DONE:
        status = begin_words(state.nodes[node].count, state, work)
    if status != keys.DONE:
        return status, np.int32(keys.NONE)
    source, begin = state.nodes[node], state.counters[0].contexts
    before = node, keys.NONE, base, most, olabel, epsilon
    count = enter_words(begin, 0, source.count, before, models, state, work)
    return keys.DONE, node_after_words(source.key, begin, count, state, lm)
