"""Take steps 2 and 3 of a frame (`frame.py`) with a large LM, composition "lazy", by groups and LM contexts.

2. Tokens in one graph state and boosting state form a token group [LET]. Tokens of a group that have the same LM
   context form one context of the group. A closure arc with a word changes the LM context, but the search defers the
   LM query for that word. Example: three tokens in graph state 7 after "a b", "a c" (just read) and "a c" (then a
   blank) are one group with two contexts, the second with two tokens.
3. The search visits the arcs of each group's state once, at the cost of the best context. All contexts
   below the cutoff take arcs without a word at once. Then the search queries the LMs for the other arcs and
   contexts that are below the cutoff by the small LM's cost. The search takes the queried arcs at the true cost.

So a word is pruned twice: by the small LM's cost before the query, by the large LM's cost after it. There are two
cutoffs. The epsilon closure uses a tightened cutoff. LM queries use the cutoff after all arcs that need no query. An
arc and a context need a query if the arc has a word, or if the context has a word without a query yet. The LMs are
queried if and only if the cost by the small LM, boosting included, is at most that cutoff, and the best context of the
group does not dominate the context (`scorer.py`). So tokens, their costs to the bit, queries and groups do not depend
on the order of tokens, groups and arcs. The counts of arc visits, expanded contexts and cache hits do depend on it.

Token groups, the finite heap of a group (`group_size`), one visit of the arcs of a group and pruning by buckets
come from [LET]. In [LET], a group has no contexts until it needs them, as with composition "let" (`let.py`).
With composition "lazy", every token has its LM context in every frame.

The groups are in `work.lm.groups`, their LM contexts in `work.lm.contexts`. The contexts of a group form a
linked list.
"""

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import NORMAL
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, keys, token_groups
from nemo_gpu_decoding.search.word_graph.labels import SMALL_STATE, likeliest_step
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import WORK_FIELDS, is_dominated, query
from nemo_gpu_decoding.search.word_graph.records import FRAME_FIELDS, GROUP_FIELDS, KEY, LM

LM_CONTEXT = np.dtype(
    [
        KEY,  # of the group
        LM,  # LM context before `olabel`
        ("lm_after", np.int64),  # LM context after `olabel`, valid once `difference` is known
        *GROUP_FIELDS,  # costs by the small LM
        ("olabel", np.int32),  # output label of the closure arc to the group's state, or 0
        ("difference", np.float32),  # LM score difference of `olabel`, weighted; NaN: not queried yet
        ("group", np.int32),
        ("next", np.int32),  # next context of the group, or NONE
    ],
    align=True,
)
LM_GROUP = np.dtype(
    [
        KEY,
        ("cost", np.float32),  # of its best context
        ("newest", np.int32),  # its newest LM_CONTEXT
        ("count", np.int32),  # number of its contexts
        ("ordered", np.int32),  # index in `order` of its contexts, cheapest first; NONE: not sorted yet
        ("queries", np.bool_),  # whether a context has a word that needs an LM query
    ],
    align=True,
)
# An entry of a group's sorted list of contexts
ORDERED = np.dtype([("cost", np.float32), ("context", np.int32)])
# A deferred LM query: an arc that contexts of a group take after the LMs were queried
GROUP_ARC = np.dtype([("group", np.int32), ("arc", np.int32)])
LM_FRAME_STATE = np.dtype(
    [
        ("contexts", np.int64),
        ("deferred", np.int64),
        ("ordered", np.int64),  # entries of `order` in use
        ("context_mask", np.int64),
        *((f"tight_{name}", np.int32) for name in keys.Origin._fields),  # origin of the tightening candidate
        *(work for work in WORK_FIELDS if work not in FRAME_FIELDS),
        *FRAME_FIELDS,
    ],
    align=True,
)


class LmWorkspace(NamedTuple):
    """The buffers of a workspace for composition "lazy"."""

    groups: np.ndarray  # [entries] LM_GROUP
    contexts: np.ndarray  # [entries] LM_CONTEXT
    order: np.ndarray  # [entries] ORDERED
    deferred: np.ndarray  # [entries] GROUP_ARC
    context_slots: np.ndarray  # [power of 2] SLOT
    cache: np.ndarray  # [power of 2] CACHED_SCORE


@linked
def begin_frame(work):
    frame = work.frame[0]
    frame.contexts = frame.deferred = frame.ordered = 0
    frame.look_ups = frame.query_hits = frame.arc_visits = frame.expanded = 0
    frame.context_mask = frame.group_mask
    frame.tight_source = frame.tight_arc = frame.tight_epsilon = keys.NONE


@linked
def count_work(counters, frame):
    """Add the work of a frame to the counters of a stream."""
    counters.look_ups += frame.look_ups
    counters.query_hits += frame.query_hits
    counters.arc_visits += frame.arc_visits
    counters.groups += frame.groups
    counters.expanded += frame.expanded


# -------------------------------------------------------------------------------- epsilon closure


@linked
def epsilon_closure(row, count, search, lm, work):
    """Step 2, as in `frame.py`, for runs of tokens in one graph state and boosting state.

    Most tokens of a state follow each other, because step 1 keeps their order. The bounds are those of the run's best
    token, so a few more tokens join, whose arcs are above the cutoff.
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
    """Join tokens begin .. end - 1 of a state to its group and to those after closure arcs; `best` costs least."""
    graph, weights, cutoff = search.graph, search.weights, work.frame[0].cutoff
    state, boost = keys.state_of(work.current[np.uintp(begin)].key), keys.boost_of(work.current[np.uintp(begin)].key)
    source = graph.states[np.uintp(state)]
    for e in range(source.epsilon_begin - 1, source.epsilon_end):
        target, least_arc, epsilon, olabel, next_boost = state, source.least_cost, keys.NONE, np.int32(0), boost
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
    """Return a lower bound of an arc's total cost in a state. A large state has the bound `total`."""
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
        token_groups.keep_best(contexts[c], cost, origin, search, lm, work)
        group = work.lm.groups[g]
        group.cost = min(group.cost, cost)
    elif frame.contexts == len(contexts):
        frame.status = keys.GROUPS_FULL
        return
    else:
        c = np.int32(frame.contexts)
        candidates.fill_slot(work.lm.context_slots, slot, work.stamps[2], c)
        token_groups.begin_group(contexts[c], key, cost, origin, search, work)
        contexts[c].lm, contexts[c].lm_after, contexts[c].olabel = context, context, olabel
        contexts[c].difference = np.float32(np.nan) if olabel != 0 else np.float32(0.0)
        add_context(c, g, work)
    if search.params.keeps_links:
        token_groups.add_group_token(contexts[c], cost, origin, work)


@linked
def group_of(key, work):
    """Return the number of the group with a key; add the group if there is none.

    If one more context fits, one more group fits, too, because there are at most as many groups as contexts.
    """
    slots = work.group_slots
    slot = candidates.find_slot(key, 0, token_groups.group_table(work.lm.groups, work), None)
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
    """Add the newest LM context c to group g."""
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
    """Return the slot of a group's LM context in the hash table, or a free slot if the table lacks the context."""
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


@linked
def _widen_tables(work):
    """Double the used sizes of two hash tables, which hold groups and LM contexts."""
    frame = work.frame[0]
    frame.group_mask = frame.context_mask = 2 * frame.context_mask + 1
    work.stamps[1] += 1
    work.stamps[2] += 1
    for c in range(frame.contexts):
        context = work.lm.contexts[c]
        at = find_context_slot(context.key, context.lm, context.olabel, work)
        candidates.fill_slot(work.lm.context_slots, at, work.stamps[2], c)
    candidates.fill_table(token_groups.group_table(work.lm.groups, work), frame.groups, None)


# --------------------------------------------------------------------------- tightening the cutoff


@linked
def tighten_cutoff(row, state, search, lm, work):
    """Take the best token's best arc by the small LM, if it costs less than all candidates so far.

    Ties go to the first closure arc, then to the first arc. LM queries give the arc's true cost, which lowers the
    cutoff. The search also offers the candidate at once, so that a token is below the new cutoff.
    """
    best, last_epsilon, last_arc, boost, least = likeliest_step(row, state, search, lm, work)
    if last_arc == keys.NONE:
        return
    frame, graph = work.frame[0], search.graph
    difference, context, arc = np.float32(0.0), work.current[best].lm, graph.arcs[last_arc]
    if last_epsilon != keys.NONE and graph.epsilons[last_epsilon].olabel != 0:
        olabel = graph.epsilons[last_epsilon].olabel
        difference, context = query(olabel, context, search, lm, work)
    if arc.olabel != 0:
        more, context = query(arc.olabel, context, search, lm, work)
        difference += more
    frame.tight_source, frame.tight_arc, frame.tight_epsilon = best, last_arc, last_epsilon
    key, origin = token_groups.target_key(arc, boost, search), keys.Origin(last_arc, best, last_epsilon)
    candidates.offer(least + difference, key, context, origin, search, lm, work)


# --------------------------------------------------------------------------------- expanding groups


@linked
def expand_arc(a, g, acoustic_cost, state, search, lm, work):
    """Expand an arc that is below the cutoff for a group's best context; defer it if it needs the LMs."""
    arc, group, frame = search.graph.arcs[a], work.lm.groups[g], work.frame[0]
    if group.ordered == keys.NONE:
        _order(group, search, lm, work)
    if arc.olabel == 0:
        _expand_without_lm(a, group, acoustic_cost, state, search, lm, work)
    if arc.olabel != 0 or group.queries:
        if frame.deferred == len(work.lm.deferred):
            frame.status = keys.GROUPS_FULL
            return
        work.lm.deferred[frame.deferred].group = g
        work.lm.deferred[frame.deferred].arc = a
        frame.deferred += 1


@linked
def _order(group, search, lm, work):
    """List at most `group_size` contexts of a group in `order`, cheapest first, without dominated contexts."""
    frame, order, contexts = work.frame[0], work.lm.order, work.lm.contexts
    first, count, c = frame.ordered, 0, group.newest
    while c != keys.NONE:
        cost = contexts[np.uintp(c)].cost
        if count < lm.group_size:
            _insert(cost, c, first + count, first, order, contexts)
            count += 1
        elif _is_cheaper(cost, c, order[np.uintp(first + count - 1)], contexts):
            _insert(cost, c, first + count - 1, first, order, contexts)
        c = contexts[np.uintp(c)].next
    best, kept = keys.NONE, first
    for n in range(first, first + count):
        cost, c = order[np.uintp(n)].cost, order[np.uintp(n)].context
        if contexts[c].olabel == 0 and search.params.topology != NORMAL:
            best = c if best == keys.NONE else best
            if is_dominated(cost - contexts[best].cost, contexts[best].lm, contexts[c].lm, search, lm):
                continue
        order[np.uintp(kept)].cost, order[np.uintp(kept)].context = cost, c
        kept += 1
    group.ordered, group.count = first, kept - first
    frame.ordered += group.count
    frame.expanded += group.count


@linked
def _insert(cost, c, at, first, order, contexts):
    """Insert a context into the sorted entries first .. at - 1 of `order`; contexts with a higher cost move up."""
    while at > first and _is_cheaper(cost, c, order[np.uintp(at - 1)], contexts):
        order[np.uintp(at)].cost = order[np.uintp(at - 1)].cost
        order[np.uintp(at)].context = order[np.uintp(at - 1)].context
        at -= 1
    order[np.uintp(at)].cost, order[np.uintp(at)].context = cost, c


@linked
def _is_cheaper(cost, c, ordered, contexts):
    """Return whether context c with this cost precedes another one, by cost, then LM context, then output label."""
    if cost != ordered.cost:
        return cost < ordered.cost
    context, other = contexts[c], contexts[ordered.context]
    if context.lm != other.lm:
        return context.lm < other.lm
    return context.olabel < other.olabel


@linked
def _expand_without_lm(a, group, acoustic_cost, state, search, lm, work):
    """Take an arc without a word, for all contexts of a group that need no LM query."""
    arc, none = search.graph.arcs[a], np.float32(0.0)
    arc_cost, key = search.weights.lm_weight * arc.cost, token_groups.target_key(arc, group.key & 0xFFFF, search)
    for n in range(group.ordered, group.ordered + group.count):
        if work.lm.order[n].cost + arc_cost + acoustic_cost > work.frame[0].cutoff:
            break
        context = work.lm.contexts[work.lm.order[n].context]
        if context.olabel == 0:
            step = token_groups.ArcStep(a, key, context.lm, none, acoustic_cost, none)
            token_groups.offer_step(context, step, state, search, lm, work)


@linked
def expand_deferred(row, state, search, lm, work):
    """Take the arcs that need LM queries, for all contexts that are below the cutoff before the query.

    The cutoff, after all candidates without queries, stays fixed, so that the queries do not depend on their order.
    """
    frame, arcs = work.frame[0], search.graph.arcs
    cutoff = frame.cutoff
    for n in range(frame.deferred):
        if frame.status != keys.DONE:
            break
        group, a = work.lm.groups[work.lm.deferred[n].group], work.lm.deferred[n].arc
        acoustic_cost = candidates.cost_of(row, arcs[a].ilabel, search)
        if not candidates.least_total(group.cost, arcs[a].cost, acoustic_cost, search) > cutoff:
            expand_with_lm(a, group, acoustic_cost, cutoff, state, (search, lm), work)


@linked
def expand_with_lm(a, group, acoustic_cost, cutoff, state, models, work):
    """Take one arc: for all contexts if it has a word, else for the contexts that need an LM query."""
    search, lm = models
    arc, bonus, boost = search.graph.arcs[a], np.float32(0.0), group.key & 0xFFFF
    if arc.olabel != 0 and search.weights.boosts:
        bonus, boost = candidates.boosted(arc.olabel, boost, search)
    arc_cost, key = search.weights.lm_weight * arc.cost, token_groups.target_key(arc, boost, search)
    least, best = LARGEST, np.int64(0)
    for n in range(group.ordered, group.ordered + group.count):
        if work.lm.order[n].cost + arc_cost - bonus + acoustic_cost > cutoff:
            break
        context = work.lm.contexts[work.lm.order[n].context]
        if arc.olabel == 0 and context.olabel == 0:
            continue
        if np.isnan(context.difference):
            context.difference, context.lm_after = query(context.olabel, context.lm, search, lm, work)
        difference, after = context.difference, context.lm_after
        if arc.olabel != 0:
            more, after = query(arc.olabel, after, search, lm, work)
            difference += more
        cost = context.cost + difference
        if cost < least:
            least, best = cost, after  # with topology normal, the best token of a context may not take the arc
        elif search.params.topology != NORMAL and is_dominated(cost - least, best, after, search, lm):
            continue
        step = token_groups.ArcStep(a, key, after, bonus, acoustic_cost, difference)
        token_groups.offer_step(context, step, state, search, lm, work)
