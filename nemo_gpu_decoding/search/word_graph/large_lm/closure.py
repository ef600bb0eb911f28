"""Epsilon closure with a large LM: the token groups of a frame and their LM contexts; see `contexts.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.jit import inlined, linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.labels import SMALL_STATE
from nemo_gpu_decoding.search.word_graph.token_groups import add_group_token, begin_group, keep_best


@linked
def epsilon_closure(row, count, search, lm, work):
    """Step 2, as in `frame.py`, for runs of tokens in one graph state and boosting state.

    Most tokens of a state follow each other, because step 1 keeps their order. The bounds are those of the run's
    best token, so a few more tokens join; the arcs of these are above the cutoff.
    """
    least, begin = candidates.cost_of(row, work.labels[0], search), 0
    while begin < count and work.frame[0].status == keys.DONE:
        key, best, end = work.current[np.uintp(begin)].key >> 16, work.current[np.uintp(begin)].cost, begin + 1
        while end < count and work.current[np.uintp(end)].key >> 16 == key:
            best = min(best, work.current[np.uintp(end)].cost)
            end += 1
        _join_run(row, begin, end, best, least, search, lm, work)
        begin = end


@linked
def _join_run(row, begin, end, best, least, search, lm, work):
    """The tokens begin .. end - 1 of one state join its group and those of its closure arcs; `best` costs least."""
    graph, weights, cutoff = search.graph, search.weights, work.frame[0].cutoff
    own, boost = keys.state_of(work.current[np.uintp(begin)].key), keys.boost_of(work.current[np.uintp(begin)].key)
    source = graph.states[np.uintp(own)]
    for e in range(source.epsilon_begin - 1, source.epsilon_end):
        target, least_arc, epsilon, olabel, next_boost = own, source.least_cost, keys.NONE, np.int32(0), boost
        step, bonus = np.float32(0.0), np.float32(0.0)
        if e >= source.epsilon_begin:
            closure = graph.epsilons[np.uintp(e)]
            target, least_arc, epsilon, olabel = np.int64(closure.target), closure.least_cost, e, closure.olabel
            step = weights.lm_weight * closure.cost
            if olabel != 0 and weights.boosts:
                if not candidates.least_total(best + step - weights.most_bonus, least_arc, least, search) <= cutoff:
                    continue
                bonus, next_boost = candidates.boosted(olabel, boost, search)
        total = candidates.least_total(best + step - bonus, least_arc, least, search)
        if total <= cutoff:
            total = _least_total(row, best + step - bonus, total, graph.states[np.uintp(target)], search)
        if not total <= cutoff:
            continue
        slack = np.float32(1e-3) + np.float32(1e-5) * abs(cutoff)  # for rounding errors
        most = best + step - bonus + (cutoff - total) + slack
        if work.frame[0].contexts == len(work.lm.contexts):
            work.frame[0].status = keys.GROUPS_FULL
            return
        key = keys.key_of(target, next_boost, 0) >> 16
        g = group_of(key, work)
        for i in range(begin, end):
            cost = work.current[np.uintp(i)].cost + step - bonus
            if cost <= most:
                join(key, g, olabel, cost, keys.Origin(keys.NONE, i, epsilon), search, lm, work)


@linked
def _least_total(row, cost, total, source, search):
    """Lower bound of the total cost of an arc of a state; `total` is that of a large state."""
    arcs = search.graph.arcs
    if source.arc_end - source.arc_begin > SMALL_STATE:
        return total
    least: Any = np.float32(np.inf)
    for a in range(source.arc_begin, source.arc_end):
        least = min(least, candidates.least_of(row, arcs[np.uintp(a)], cost, search))
    return least


@linked
def join(key, g, olabel, cost, origin, search, lm, work):
    """Add a token to its LM context of group g; `olabel` is the output label of the closure arc, or 0."""
    frame, contexts = work.frame[0], work.lm.contexts
    context = work.current[np.uintp(origin.source)].lm
    slot = find_context_slot(key, context, olabel, work)
    if work.lm.context_slots[slot].stamp == work.stamps[2]:
        c = work.lm.context_slots[slot].entry
        keep_best(contexts[c], cost, origin, search, lm, work)
        group = work.lm.groups[g]
        group.cost = min(group.cost, cost)
    elif frame.contexts == len(contexts):
        frame.status = keys.GROUPS_FULL
        return
    else:
        c = np.int32(frame.contexts)
        candidates.fill_slot(work.lm.context_slots, slot, work.stamps[2], c)
        begin_group(contexts[c], key, cost, origin, search, work)
        contexts[c].lm, contexts[c].lm_after, contexts[c].olabel = context, context, olabel
        contexts[c].difference = np.float32(np.nan) if olabel != 0 else np.float32(0.0)
        add_context(c, g, work)
    if search.params.keeps_links:
        add_group_token(contexts[c], cost, origin, work)


@linked
def group_of(key, work):
    """The number of the group with a key; adds the group if there is none.

    The capacity suffices if there is capacity for one more context, because there are at most as many groups.
    """
    slots = work.group_slots
    slot = candidates.find_slot(key, 0, _group_table(work), None)
    if slots[slot].stamp != work.stamps[1]:
        candidates.fill_slot(slots, slot, work.stamps[1], new_group(key, work))
    return slots[slot].entry


@linked
def new_group(key, work):
    """Add a group without contexts."""
    g = np.int32(work.frame[0].groups)
    work.frame[0].groups += 1
    group = work.lm.groups[np.uintp(g)]
    group.key, group.cost, group.newest, group.count = key, LARGEST, keys.NONE, 0
    group.ordered, group.queries = keys.NONE, False
    return g


@linked
def add_context(c, g, work):
    """Add LM context c, the newest one, to group g."""
    frame, context, group = work.frame[0], work.lm.contexts[c], work.lm.groups[g]
    context.group, context.next = g, group.newest
    group.newest = c
    group.count += 1
    group.cost = min(group.cost, context.cost)
    group.queries = group.queries or context.olabel != 0
    frame.contexts += 1
    if 2 * frame.contexts > frame.context_mask + 1:
        _widen_tables(work)


@linked
def find_context_slot(key, context, olabel, work):
    """The slot of an LM context of a group, or the free slot for it if it has none."""
    slots, entries, stamp = work.lm.context_slots, work.lm.contexts, work.stamps[2]
    mask = np.uint64(work.frame[0].context_mask)
    at = ((keys.hash_of(key, context) + np.uint64(olabel) * keys.OTHER_HASH) >> keys.SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and not (
        entries[slots[at].entry].key == key
        and entries[slots[at].entry].lm == context
        and entries[slots[at].entry].olabel == olabel
    ):
        at = (at + np.uint64(1)) & mask
    return at


@inlined
def _group_table(work):
    return candidates.Table(work.group_slots, work.lm.groups, work.frame[0].group_mask, work.stamps[1])


@linked
def _widen_tables(work):
    """Double the used sizes of the hash tables of groups and of LM contexts."""
    frame = work.frame[0]
    frame.group_mask = frame.context_mask = 2 * frame.context_mask + 1
    work.stamps[1] += 1
    work.stamps[2] += 1
    for c in range(frame.contexts):
        context = work.lm.contexts[c]
        at = find_context_slot(context.key, context.lm, context.olabel, work)
        candidates.fill_slot(work.lm.context_slots, at, work.stamps[2], c)
    candidates.fill_table(_group_table(work), frame.groups, None)
