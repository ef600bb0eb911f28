"""Nodes within a frame of composition "let": of token groups, and of LM contexts after a word; see `let_nodes.py`.

This module makes all LM queries of the search. With a lattice, a node after a word keeps links to the nodes before it.
If an array is full, functions that return a node set the status of the frame and return NONE.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import (
    ARC_WORD,
    ARENA_FULL,
    BEST_ONLY,
    CLOSURE_WORD,
    JOIN_MOVE,
    add_link,
    begin_merge,
    best_context,
    expand,
    has_room,
    limit_contexts,
    new_node,
    number_of,
    without_dominated,
)
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import query


@linked
def _is_closed(member, closed, work):
    """Whether topology normal closes an arc to a member of a group, because both have the last label `closed`."""
    return closed != keys.NONE and keys.label_of(work.current[member.source].key) == closed


@linked
def node_of_group(group, closed, state, work):
    """The node of the group's open tokens: the tokens that the arc is not closed to. Added if there is none.

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
    if not has_room(1, count, 0, state):
        work.frame[0].status = ARENA_FULL
        return np.int32(keys.NONE), np.int32(keys.NONE), least
    node, at = new_node(group.key << 16, least, state), group.newest
    while at != keys.NONE:
        member = members[at]
        if not _is_closed(member, closed, work):
            source = work.current[member.source].back_pointer
            add_link(node, source, JOIN_MOVE, member.epsilon, member.cost - least, np.float32(0.0), state)
        at = member.next
    if is_whole:
        group.node = node
    return node, np.int32(keys.NONE), least


@linked
def node_after_closure(group, closed, cutoff, state, models, work):
    """The node of a group behind closure arcs with words: the contexts after these words, at their true cost.

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
            work.frame[0].status = expand(source, state, search, lm, work)
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
                add_link(node, source, CLOSURE_WORD, member.epsilon, member.cost - least, most - member.cost, state)
            at = member.next
    if is_whole:
        group.node = node
    return node


@linked
def node_after_arc(before, a, state, models, work):
    """The node of the contexts of another node after the word of arc `a`.

    Args:
        before: the other node; its cost by the small LM; the highest cost of a context, before and after the query;
            the closure arc since the last frame, or NONE.

    Returns:
        the node, or NONE if no context is within that cost.
    """
    search, lm = models
    node, base, most, epsilon = before
    work.frame[0].status = expand(node, state, search, lm, work)
    if work.frame[0].status != keys.DONE or not _may_begin(state.nodes[node].count, 1, state, work):
        return np.int32(keys.NONE)
    source, begin, olabel = state.nodes[node], state.counters[0].contexts, search.graph.arcs[a].olabel
    way = node, keys.NONE, base, most, olabel, epsilon
    count = _enter_words(begin, 0, source.count, way, models, state, work)
    after = _node_of_contexts(source.key, begin, count, state, models)
    if search.params.keeps_links and after != keys.NONE:
        add_link(after, node, ARC_WORD - a, epsilon, base - state.nodes[after].cost, most - base, state)
    return after


@linked
def best_after_words(token, epsilon, a, state, models, work):
    """A node of only the best context of a token, after the words of a closure arc (or NONE) and of arc `a`.

    Returns:
        the node; the LM score difference of these words.
    """
    search, lm = models
    graph, none = search.graph, np.int32(0)
    work.frame[0].status = expand(token.back_pointer, state, search, lm, work)
    if work.frame[0].status != keys.DONE or not _may_begin(1, 1, state, work):
        return np.int32(keys.NONE), np.float32(0.0)
    source = state.contexts[best_context(state.nodes[token.back_pointer], state.contexts)]
    total, after = np.float32(0.0), source.lm
    for olabel in (graph.epsilons[epsilon].olabel if epsilon != keys.NONE else none, graph.arcs[a].olabel):
        if olabel != 0:
            difference, after = query(olabel, after, search, lm, work)
            total += difference
    node, counters = new_node(token.key, token.cost, state), state.counters[0]
    state.nodes[node].begin, state.nodes[node].count = counters.contexts, 1
    context = state.contexts[counters.contexts]
    context.lm, context.cost, context.epsilon = after, np.float32(0.0), epsilon
    _copy_past(context, source)
    counters.contexts += 1
    if search.params.keeps_links:
        move = CLOSURE_WORD if graph.arcs[a].olabel == 0 else ARC_WORD - a
        add_link(node, token.back_pointer, move, epsilon, -total, BEST_ONLY, state)
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
        n = number_of(after, begin, count, total, state, work)
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
    """Whether the first of two ways to one context after a word precedes the other one at the same cost."""
    if epsilon != other.epsilon:
        return epsilon < other.epsilon
    if member != other.run:  # both are members of one group
        joins = work.group_tokens
        key, other_key = work.current[joins[member].source].key, work.current[joins[other.run].source].key
        return key < other_key
    return state.contexts[source].lm < state.contexts[other.back_pointer].lm


@linked
def _node_of_contexts(key, begin, count, state, models):
    """A node of the `count` contexts from `begin` on, with their total costs; NONE if `count` is 0."""
    search, lm = models
    if count == 0:
        return np.int32(keys.NONE)
    least = state.contexts[begin].cost
    for n in range(begin + 1, begin + count):
        least = min(least, state.contexts[n].cost)
    count = without_dominated(begin, count, search, lm, state)
    count = limit_contexts(begin, count, lm, state)
    for n in range(begin, begin + count):
        state.contexts[n].cost -= least
        _copy_past(state.contexts[n], state.contexts[state.contexts[n].back_pointer])
    node = new_node(key, least, state)
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
    """Whether there is capacity for a new node with up to `links` links and `total` contexts."""
    if not has_room(1, links, total, state):
        work.frame[0].status = ARENA_FULL
    elif not begin_merge(total, work):
        work.frame[0].status = keys.GROUPS_FULL
    return work.frame[0].status == keys.DONE
