"""One frame of the search on the CPU: Viterbi search of a word graph, frame by frame [CUDA-WFST], [LET].

A token is a path through the graph with its cost: acoustic_scale times the negative log-probs, plus
lm_weight times the graph's costs, minus boosting. It is relative to that of the best token, so that
float32 serves streams of any length; where the best one stands is a double. In every frame

1. a token may read a blank, or its last label again (the CTC topology, run natively; `topology.py`);
2. epsilon closure: tokens of the same graph state form a group, also by way of closure arcs
   (`token_groups.py`);
3. each group expands the arcs of its state; equal keys recombine, the cheaper one stays;
4. tokens above best + beam are pruned, then all but about max_active (`prune.py`).

Steps 2 and 3 are pruned by bounds before they cost anything: posteriors are peaked, so in most frames a
handful of labels can stay within the beam, and in a large state (thousands of words begin anywhere)
these are found by binary search. Before step 2 the best token's own arcs tighten the cutoff. Nothing is
dropped that step 4 would not drop.

With a large LM (`lm` is an `LmScorer`, not None) a token has an LM context as well, and steps 2 and 3
are others, see `large_lm/contexts.py`. numba compiles this source for both. With lm=None it drops the other
branch of each `if lm is None` before it looks at types, so that records need no LM fields. With a large LM
it types both branches and drops the first one later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import first_arc
from nemo_gpu_decoding.graph.topology import GRAPH
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph import candidates, keys, token_groups
from nemo_gpu_decoding.search.word_graph.labels import choose_labels, labels_within, likeliest_step, rank_labels
from nemo_gpu_decoding.search.word_graph.large_lm import contexts
from nemo_gpu_decoding.search.word_graph.prune import UNKNOWN, prune

SMALL_STATE = 8  # arcs; a state with no more is walked through whatever the labels
FEWEST_SLOTS = 256  # of a hash table in use


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """Read the frames begin .. end of log_probs [T, C] float32. work.current holds the tokens.

    Returns:
        the frame before which it stopped, and why: DONE; BAD_FRAME (NaN, or above 0); NO_TOKEN (no label
        is possible); BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL: grow these and go on there.
    """
    for t in range(begin, end):
        if work.frame[0].status == keys.BACK_POINTERS_FULL:  # expanded before, and now there is capacity for the past
            status = work.frame[0].status = keys.DONE
        else:
            status = _expand_or_bisect(log_probs[t], state, search, lm, work)
        if status == keys.DONE:
            status = prune(log_probs[t], state, search, work)
        if status != keys.DONE:
            return t, status
        if lm is None:
            pass
        else:
            contexts.count_work(state.counters[0], work.frame[0])
    return end, keys.DONE


@linked
def _expand_or_bisect(row, state, search, lm, work):
    """All candidates that stay below the cutoff, or the cheapest if they are too many.

    Try 1 may exceed the capacity because the cutoff is still high. Try 2 starts with the cutoff that try 1
    found. From try 3 on, the search bisects the last rank until the tokens fit and use half of the capacity,
    which is twice what max_active lets survive. The result depends on the candidates alone and not on the
    order in which they are found.
    """
    frame, tries, best = work.frame[0], 0, LARGEST
    low = high = frame.last_rank = keys.ANY_RANK
    while tries < 3 or low < high:
        _expand(best, row, state, search, lm, work)
        tries += 1
        if (frame.status != keys.DONE and frame.status != keys.NO_TOKEN) or (tries <= 2 and not frame.full):
            break
        if tries == 1:
            high = frame.last_rank = keys.rank_of(frame.cutoff, 0, 0) + (1 << keys.HASH_BITS)
            if lm is None:
                best = frame.best
            else:
                pass  # each try finds the same candidates, and makes the same queries
            continue
        if tries == 2:
            state.counters[0].overflowed += 1
            low = keys.rank_of(frame.best, 0, 0)
        elif frame.full:
            high = frame.last_rank
        elif high - low <= 1 or 2 * frame.tokens >= len(work.next_tokens):
            break
        else:
            low = frame.last_rank  # also if there is no token: none ranks so high
        frame.last_rank = low + (high - low) // 2
    if tries == 2:
        frame.last_rank = keys.ANY_RANK  # nothing was left out
    return frame.status


@linked
def _expand(best, row, state, search, lm, work):
    """All candidates that stay below the cutoff, as far as there is capacity for their keys.

    Sets frame.status. `best`: cost of the best candidate, if it is known, or LARGEST.
    """
    frame = work.frame[0]
    for label in range(len(row)):
        work.acoustic_costs[np.uintp(label)] = candidates.cost_of(row, np.uintp(label), search)
        work.posteriors[np.uintp(label)] = UNKNOWN
    begin_frame(best, state.counters[0].tokens, search, work)
    if search.params.topology != GRAPH:
        offer_blanks_and_repeats(row, state, search, lm, work)
    if frame.status == keys.DONE and not choose_labels(row, search, work):
        frame.status = keys.BAD_FRAME
    if frame.status == keys.DONE:
        if lm is None:
            pass
        else:
            contexts.begin_frame(work)
        _expand_groups(row, state, search, lm, work)
    if frame.status == keys.DONE:
        candidates.recombine(state, search, lm, work)
    if frame.status == keys.DONE and frame.tokens == 0:
        frame.status = keys.NO_TOKEN


@linked
def begin_frame(best, tokens, search, work):
    """Begin with empty tables, of a size for twice as many tokens as the last frame has."""
    frame = work.frame[0]
    frame.status, frame.full = keys.DONE, False
    frame.tokens = frame.candidates = frame.links = frame.groups = frame.group_tokens = 0
    frame.best, frame.cutoff = best, (best + search.params.beam if best < LARGEST else LARGEST)
    slots: Any = FEWEST_SLOTS
    while slots < 4 * tokens:
        slots *= 2
    frame.token_mask = min(slots, len(work.token_slots)) - 1
    frame.group_mask = min(slots, len(work.group_slots)) - 1
    for table in range(len(work.stamps)):
        work.stamps[table] += 1


@linked
def offer_blanks_and_repeats(row, state, search, lm, work):
    """Step 1: a blank, or the last label again."""
    frame, blank_id = work.frame[0], search.params.blank_id
    if not row[blank_id] <= MOST_LOG_PROB:
        frame.status = keys.BAD_FRAME
        return
    blank_cost, costs = candidates.cost_of(row, blank_id, search), work.acoustic_costs
    for i in range(state.counters[0].tokens):
        if frame.candidates + 4 > len(work.candidates):  # two for this one, one to tighten the cutoff
            candidates.recombine(state, search, lm, work)
        token = work.current[np.uintp(i)]
        cost, key, label, context = token.cost, token.key, keys.label_of(token.key), keys.context_of(token, lm)
        candidates.offer(
            cost + blank_cost, key - label, context, keys.Origin(keys.BLANK_MOVE, i, keys.NONE), search, lm, work
        )
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + costs[np.uintp(label - 1)]
            candidates.offer(total, key, context, keys.Origin(keys.REPEAT_MOVE, i, keys.NONE), search, lm, work)


@linked
def _expand_groups(row, state, search, lm, work):
    """Steps 2 and 3."""
    frame = work.frame[0]
    if frame.labels > 0:
        if lm is None:
            _, _, _, _, least = likeliest_step(row, state, search, lm, work)
            candidates.lower_cutoff(least, frame, search)
        else:
            contexts.tighten_cutoff(row, state, search, lm, work)
    rank_labels(row, search, work)
    if frame.labels > 0:
        _epsilon_closure(row, state.counters[0].tokens, search, lm, work)
        if lm is None:
            _expand_each(work.groups, row, state, search, lm, work)
        else:
            _expand_each(work.lm.groups, row, state, search, lm, work)
            contexts.expand_deferred(row, state, search, lm, work)


@linked
def _epsilon_closure(row, count, search, lm, work):
    """Step 2: each token joins the group of its state, and those of all states that its closure arcs lead to."""
    graph, weights, frame = search.graph, search.weights, work.frame[0]
    cutoff, least = frame.cutoff, candidates.cost_of(row, work.labels[0], search)
    for i in range(count):
        token = work.current[np.uintp(i)]
        source = graph.states[np.uintp(keys.state_of(token.key))]
        for e in range(source.epsilon_begin - 1, source.epsilon_end):
            cost, boost, epsilon, olabel = token.cost, keys.boost_of(token.key), keys.NONE, np.int32(0)
            target, least_arc = keys.state_of(token.key), source.least_cost
            if e >= source.epsilon_begin:
                closure = graph.epsilons[np.uintp(e)]
                cost += weights.lm_weight * closure.cost
                epsilon, target, least_arc = e, np.int64(closure.target), closure.least_cost
                olabel = closure.olabel
                if olabel != 0 and weights.boosts:
                    best_cost = cost - weights.most_bonus
                    if not candidates.least_total(best_cost, least_arc, least, search) <= cutoff:
                        continue
                    bonus, boost = candidates.boosted(olabel, boost, search)
                    cost -= bonus
            if candidates.least_total(cost, least_arc, least, search) <= cutoff:
                key, origin = keys.key_of(target, boost, 0) >> 16, keys.Origin(keys.NONE, i, epsilon)
                if lm is None:
                    if _may_expand(graph.states[np.uintp(target)], cost, search, cutoff, work):
                        token_groups.join(key, cost, origin, search, lm, work)
                else:
                    contexts.join(key, olabel, cost, origin, search, lm, work)


@linked
def _may_expand(source, cost, search, cutoff, work):
    """Whether an arc of a state may stay below the cutoff; most groups have none. Large states are always expanded."""
    arcs, costs, may = search.graph.arcs, work.acoustic_costs, source.arc_end - source.arc_begin > SMALL_STATE
    last: Any = source.arc_end - 1
    for a in range(source.arc_begin, source.arc_begin if may else source.arc_end, 2):
        # Branch-free, two arcs per step (the last may be checked twice): most states have one or two arcs, so that
        # the branch would be unpredictable.
        arc, next_arc = arcs[np.uintp(a)], arcs[np.uintp(min(a + 1, last))]
        total = candidates.least_total(cost, arc.cost, costs[np.uintp(arc.ilabel)], search)
        next_total = candidates.least_total(cost, next_arc.cost, costs[np.uintp(next_arc.ilabel)], search)
        may = may | (not total > cutoff) | (not next_total > cutoff)
    return may


@linked
def _expand_each(groups, row, state, search, lm, work):
    """Step 3 for all groups, the cheapest first since it lowers the cutoff."""
    count = work.frame[0].groups if work.frame[0].status == keys.DONE else 0
    cheapest = cheapest_of(groups, count)
    for n in range(count):
        g = cheapest if n == 0 else (n - 1 if n <= cheapest else n)
        _expand_group(groups[g], g, row, state, search, lm, work)


@linked
def cheapest_of(groups, count):
    """The first group with the least cost."""
    cheapest = 0
    for g in range(count):
        if groups[g].cost < groups[cheapest].cost:
            cheapest = g
    return cheapest


@linked
def _expand_group(group, g, row, state, search, lm, work):
    """All arcs of a group of a small state; of a large state those with labels that may matter."""
    frame, arcs, costs = work.frame[0], search.graph.arcs, work.acoustic_costs
    source = search.graph.states[np.uintp(group.key >> 16)]
    count = source.arc_end - source.arc_begin
    rounds = 1 if count <= SMALL_STATE else labels_within(group.cost, source, row, search, work)
    walks = count <= SMALL_STATE * rounds
    for n in range(1 if walks else rounds):  # all arcs in one, or one for each label
        label, first = keys.NONE, source.arc_begin
        if not walks:
            label = work.labels[n]
            if candidates.least_total(group.cost, source.least_cost, costs[np.uintp(label)], search) > frame.cutoff:
                continue
            first = first_arc(arcs, source, label)
        for a in range(first, source.arc_end):
            arc = arcs[np.uintp(a)]
            if not walks and arc.ilabel != label:
                break
            if lm is None:
                pass
            else:
                frame.arc_visits += 1
            acoustic_cost = costs[np.uintp(arc.ilabel)]
            if candidates.least_total(group.cost, arc.cost, acoustic_cost, search) > frame.cutoff:
                continue
            if lm is None:
                token_groups.expand_arc(a, g, acoustic_cost, state, search, lm, work)
            else:
                contexts.expand_arc(a, g, acoustic_cost, state, search, lm, work)
