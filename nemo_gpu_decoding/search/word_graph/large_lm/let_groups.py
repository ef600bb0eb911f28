"""Expand token groups of composition "let" in a frame, and make nodes after words; see `let.py`, `let_nodes.py`.

A record of work.groups represents all tokens in one graph state and boosting state, with any last label. So the
search visits the arcs once for all of them. Tokens behind closure arcs with words form separate groups, because
all arcs of these groups need the LMs.

This module makes all LM queries of the search. With a lattice, a node after a word keeps links to the nodes before it.
If an array is full, functions that return a node set the status of the frame and return NONE.
"""

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import NORMAL
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.candidates import boosted, cost_of, least_total, lower_cutoff
from nemo_gpu_decoding.search.word_graph.labels import likeliest_step
from nemo_gpu_decoding.search.word_graph.large_lm import let_nodes as nodes
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import query
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
    """Drop candidates that are above the cutoff, because the cutoff has become lower since they were listed."""
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
def expand_arc(a, g, acoustic_cost, state, search, lm, work):
    """Expand an arc that is below the cutoff for a group's best token; defer it if it needs the LMs."""
    arc, group, frame = search.graph.arcs[a], work.groups[g], work.frame[0]
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


# --------------------------------------------------------------------------------- nodes after words


@linked
def _is_closed(member, closed, work):
    """Return whether topology "normal" forbids an arc to a group's member: both have the last label `closed`."""
    return closed != keys.NONE and keys.label_of(work.current[member.source].key) == closed


@linked
def node_of_group(group, closed, state, work):
    """Return the node of the group's open tokens, which may take the arc. Add the node if it is missing.

    Returns:
        the node, or NONE without open tokens; the closure arc to the group if there is one open token, because the
        token's own node is the result then, else NONE; the cost of the best open token.
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
        return np.int32(keys.NONE), np.int32(keys.NONE), least
    if count == 1:
        return work.current[members[last].source].back_pointer, members[last].epsilon, least
    if is_whole and group.node != keys.NONE:
        return group.node, np.int32(keys.NONE), least
    if not nodes.has_room(1, count, 0, state):
        work.frame[0].status = nodes.ARENA_FULL
        return np.int32(keys.NONE), np.int32(keys.NONE), least
    node, at = nodes.new_node(group.key << 16, least, state), group.newest
    while at != keys.NONE:
        member = members[at]
        if not _is_closed(member, closed, work):
            source = work.current[member.source].back_pointer
            nodes.add_link(node, source, nodes.JOIN_MOVE, member.epsilon, member.cost - least, np.float32(0.0), state)
        at = member.next
    if is_whole:
        group.node = node
    return node, np.int32(keys.NONE), least


@linked
def node_after_closure(group, closed, cutoff, state, models, work):
    """Return the node whose contexts follow the words of a group's closure arcs, at their true cost.

    Returns:
        the node, or NONE if no context is within the cutoff.
    """
    search, lm = models
    members, epsilons = work.group_tokens, search.graph.epsilons
    is_whole, at, total, links, most = True, group.newest, 0, 0, cutoff - group.least_step
    while at != keys.NONE:
        is_whole = is_whole and not _is_closed(members[at], closed, work)
        at = members[at].next
    if is_whole and group.node != keys.NONE:
        return group.node
    at = group.newest
    while at != keys.NONE:
        if not _is_closed(members[at], closed, work) and members[at].cost <= most:
            source = work.current[members[at].source].back_pointer
            work.frame[0].status = nodes.expand(source, state, search, lm, work)
            if work.frame[0].status != keys.DONE:
                return np.int32(keys.NONE)
            total += state.nodes[source].count
            links += 1
        at = members[at].next
    if not _may_begin(total, links, state, work):
        return np.int32(keys.NONE)
    begin, count, at = state.counters[0].contexts, 0, group.newest
    while at != keys.NONE:
        member = members[at]
        if not _is_closed(member, closed, work) and member.cost <= most:
            source, olabel = work.current[member.source].back_pointer, epsilons[member.epsilon].olabel
            before = source, at, member.cost, most, olabel, member.epsilon
            count = _enter_words(begin, count, total, before, models, state, work)
        at = member.next
    node = _node_of_contexts(group.key << 16, begin, count, state, models)
    if search.params.keeps_links and node != keys.NONE:
        least, at = state.nodes[node].cost, group.newest
        while at != keys.NONE:
            member = members[at]
            if not _is_closed(member, closed, work) and member.cost <= most:
                source = work.current[member.source].back_pointer
                nodes.add_link(
                    node, source, nodes.CLOSURE_WORD, member.epsilon, member.cost - least, most - member.cost, state
                )
            at = member.next
    if is_whole:
        group.node = node
    return node


@linked
def node_after_arc(before, a, state, models, work):
    """Return the node whose contexts are those of another node after the word of arc `a`.

    Args:
        before: the other node; its cost by the small LM; the highest cost of a context, before and after the query;
            the closure arc since the last frame, or NONE.

    Returns:
        the node, or NONE if no context is within that cost.
    """
    search, lm = models
    node, base, most, epsilon = before
    work.frame[0].status = nodes.expand(node, state, search, lm, work)
    if work.frame[0].status != keys.DONE or not _may_begin(state.nodes[node].count, 1, state, work):
        return np.int32(keys.NONE)
    source, begin, olabel = state.nodes[node], state.counters[0].contexts, search.graph.arcs[a].olabel
    way = node, keys.NONE, base, most, olabel, epsilon
    count = _enter_words(begin, 0, source.count, way, models, state, work)
    after = _node_of_contexts(source.key, begin, count, state, models)
    if search.params.keeps_links and after != keys.NONE:
        nodes.add_link(after, node, nodes.ARC_WORD - a, epsilon, base - state.nodes[after].cost, most - base, state)
    return after


@linked
def best_after_words(token, epsilon, a, state, models, work):
    """Return a node with only a token's best context, after the words of a closure arc (or NONE) and of arc `a`.

    Returns:
        the node; the LM score difference of these words.
    """
    search, lm = models
    graph, none = search.graph, np.int32(0)
    work.frame[0].status = nodes.expand(token.back_pointer, state, search, lm, work)
    if work.frame[0].status != keys.DONE or not _may_begin(1, 1, state, work):
        return np.int32(keys.NONE), np.float32(0.0)
    source = state.contexts[nodes.best_context(state.nodes[token.back_pointer], state.contexts)]
    total, after = np.float32(0.0), source.lm
    for olabel in (graph.epsilons[epsilon].olabel if epsilon != keys.NONE else none, graph.arcs[a].olabel):
        if olabel != 0:
            difference, after = query(olabel, after, search, lm, work)
            total += difference
    node, counters = nodes.new_node(token.key, token.cost, state), state.counters[0]
    state.nodes[node].begin, state.nodes[node].count = counters.contexts, 1
    context = state.contexts[counters.contexts]
    context.lm, context.cost, context.epsilon = after, np.float32(0.0), epsilon
    _copy_past(context, source)
    counters.contexts += 1
    if search.params.keeps_links:
        move = nodes.CLOSURE_WORD if graph.arcs[a].olabel == 0 else nodes.ARC_WORD - a
        nodes.add_link(node, token.back_pointer, move, epsilon, -total, nodes.BEST_ONLY, state)
    return node, total


# ----------------------------------------------------------------------------------- after a word


@linked
def _enter_words(begin, count, total, before, models, state, work):
    """Enter the contexts of a node after a word, and recombine equal LM contexts into the cheapest one.

    Args:
        begin: first context of the new node. The node has `count` contexts so far and at most `total` in the end.
        before: the node; the member of its token group, or NONE; the node's cost by the small LM; the highest cost of
            a context, before and after the query; the word; the closure arc with the word, or NONE.

    Returns:
        the number of contexts of the new node so far.
    """
    node, member, base, most, olabel, epsilon = before
    search, lm = models
    contexts = state.contexts
    for source in range(state.nodes[node].begin, state.nodes[node].begin + state.nodes[node].count):
        cost = base + contexts[source].cost
        if cost > most:
            continue
        difference, after = query(olabel, contexts[source].lm, search, lm, work)
        total_cost = cost + difference
        if total_cost > most:
            continue
        n = nodes.number_of(after, begin, count, total, state, work)
        context = contexts[begin + n]
        replaces = n == count or total_cost < context.cost
        if not replaces and total_cost == context.cost:
            replaces = _word_is_before(source, member, epsilon, context, state, work)
        if replaces:
            context.lm, context.cost, context.back_pointer = after, total_cost, source
            context.run, context.epsilon = member, epsilon
        count += n == count
    return count


@linked
def _word_is_before(source, member, epsilon, other, state, work):
    """Return whether the first of two ways to one context after a word precedes the other one at the same cost."""
    if epsilon != other.epsilon:
        return epsilon < other.epsilon
    if member != other.run:  # both are members of one group
        joins = work.group_tokens
        key, other_key = work.current[joins[member].source].key, work.current[joins[other.run].source].key
        return key < other_key
    return state.contexts[source].lm < state.contexts[other.back_pointer].lm


@linked
def _node_of_contexts(key, begin, count, state, models):
    """Return a node of the `count` contexts from `begin` on, with their total costs; NONE if `count` is 0."""
    search, lm = models
    if count == 0:
        return np.int32(keys.NONE)
    least = state.contexts[begin].cost
    for n in range(begin + 1, begin + count):
        least = min(least, state.contexts[n].cost)
    count = nodes.without_dominated(begin, count, search, lm, state)
    count = nodes.limit_contexts(begin, count, lm, state)
    for n in range(begin, begin + count):
        state.contexts[n].cost -= least
        _copy_past(state.contexts[n], state.contexts[state.contexts[n].back_pointer])
    node = nodes.new_node(key, least, state)
    state.nodes[node].begin, state.nodes[node].count = begin, count
    state.counters[0].contexts += count
    return node


@linked
def _copy_past(context, source):
    context.back_pointer, context.run, context.probability = source.back_pointer, source.run, source.probability
    context.number = keys.NONE
    if context.epsilon == keys.NONE:
        context.epsilon = source.epsilon


@linked
def _may_begin(total, links, state, work):
    """Return whether there is capacity for a new node with up to `links` links and `total` contexts."""
    if not nodes.has_room(1, links, total, state):
        work.frame[0].status = nodes.ARENA_FULL
    elif not nodes.begin_merge(total, work):
        work.frame[0].status = keys.GROUPS_FULL
    return work.frame[0].status == keys.DONE
