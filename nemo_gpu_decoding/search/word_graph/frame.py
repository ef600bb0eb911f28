"""One frame of the search on the CPU: Viterbi search of a word graph, frame by frame [CUDA-WFST], [LET].

A token is a path through the graph with its cost: acoustic_scale times the negative log-probs, plus
lm_weight times the graph's costs, minus boosting. In every frame

1. a token may read a blank, or its last label again (the CTC topology, run natively; `topology.py`);
2. epsilon closure: tokens of the same graph state form a group, also by way of closure arcs
   (`token_groups.py`);
3. each group expands the arcs of its state; equal keys recombine, the cheaper one stays;
4. tokens above best + beam are pruned, then all but about max_active (`prune.py`).

Steps 2 and 3 are pruned by bounds before they cost anything: posteriors are peaked, so in most frames a
handful of labels can stay within the beam, and a large state (thousands of words begin anywhere) is
asked for these by binary search in place of being walked through. Nothing is dropped that step 4 would
not drop. Before step 2 the best token's own arcs tighten the cutoff.

**With a large LM** (`lm` is a `Composition`, not None) a token has an LM context as well, and has paid
an LM score difference for each word that the graph has emitted, see `composition.py`. With composition
"lazy" [LET],

2. a closure arc with a word changes the LM context, but the LMs are not queried for it yet;
3. each group looks at the arcs of its state once, at the cost of its best LM context. Arcs without a
   word are taken right away by all contexts that stay below the cutoff. For what is left and still
   below the cutoff by the small LM's cost, the LMs are queried, and the arcs taken at the true cost
   ("prune before the look-up"; [LET] calls it the expansion of a group), see `lm_contexts.py`.

So a word is pruned twice: by the small LM's cost before the query, by the large LM's after it. Which
queries are made does not depend on the order of work. The cutoff of step 2 is that after step 1 and
after it was tightened; that of the queries is what these and all arcs without queries leave. An arc and
a context that need the LMs (the arc has a word, or the context one that is not queried yet) query them
if and only if their cost by the small LM, boosting included, is not above that cutoff, whatever other
answers are. So tokens, their costs to the bit, queries and groups are the same in whatever order tokens,
groups and arcs come; arc visits, expanded tokens and cache hits are not. With "eager" each token takes
each arc of its state and queries each word at once (`eager.py`); both give the same result where the
beam is wide enough.

There is one source for both: numba compiles it for lm=None, where it drops the other branch of each
`if lm is None` before it looks at types (so that records need no LM fields), and for a `Composition`,
where the records have all fields, so that both branches have types, and LLVM drops the first.

Costs are kept relative to the best token, so that float32 serves streams of any length; where the best
one stands is a double.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH, NORMAL
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.word_graph import lm_contexts
from nemo_gpu_decoding.search.word_graph.candidates import (
    boosted,
    cost_of,
    least_total,
    lower_cutoff,
    offer,
    recombine,
)
from nemo_gpu_decoding.search.word_graph.eager import expand_all_arcs
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS, choose_labels, narrow_labels
from nemo_gpu_decoding.search.word_graph.prune import prune
from nemo_gpu_decoding.search.word_graph.records import (
    ANY_RANK,
    BAD_FRAME,
    BLANK_MOVE,
    DONE,
    HASH_BITS,
    NO_TOKEN,
    NONE,
    REPEAT_MOVE,
    Origin,
    boost_of,
    context_of,
    key_of,
    label_of,
    rank_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.token_groups import expand_arc, first_arc, join

SMALL_STATE = 8  # arcs; a state with no more is walked through whatever the labels
FEWEST_SLOTS = 256  # of a hash table in use


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """Read the frames begin .. end of log_probs [T, C] float32. work.current holds the tokens.

    Returns:
        the frame before which it stopped, and why: DONE; BAD_FRAME (NaN or +inf); NO_TOKEN (no label
        is possible); BACK_POINTERS_FULL, LINKS_FULL, GROUPS_FULL: make room and go on there.
    """
    for t in range(begin, end):
        status = _expand_within_capacity(log_probs[t], state, search, lm, work)
        if status == DONE:
            status = prune(log_probs[t], state, search, work)
        if status != DONE:
            return t, status
        if lm is None:
            pass
        else:
            lm_contexts.count_work(state.counters[0], work.frame[0])
    return end, DONE


@no_refcount
def _expand_within_capacity(row, state, search, lm, work):
    """All candidates that stay below the cutoff, or the cheapest if they are too many.

    If there is no room for all keys, that may be since the cutoff was not low yet: once more, with only
    those entered that stay below the last cutoff. If they still are too many, the highest rank is looked
    for with which they fit, until half of the room is used, which is twice what max_active lets survive.
    The result depends on the candidates alone and not on the order in which they are found.
    """
    frame, tries, best = work.frame[0], 0, LARGEST
    low = high = frame.last_rank = ANY_RANK
    status = DONE
    while tries < 3 or low < high:
        status = _expand(best, row, state, search, lm, work)
        tries += 1
        if (status != DONE and status != NO_TOKEN) or (tries <= 2 and not frame.full):
            break
        if tries == 1:
            high = frame.last_rank = rank_of(frame.cutoff, 0, 0) + (1 << HASH_BITS)
            if lm is None:
                best = frame.best
            else:
                pass  # each try finds the same candidates, and makes the same queries
            continue
        if tries == 2:
            state.counters[0].overflowed += 1
            low = rank_of(frame.best, 0, 0)
        elif frame.full:
            high = frame.last_rank
        elif high - low <= 1 or 2 * frame.tokens >= len(work.next_tokens):
            break
        else:
            low = frame.last_rank  # also if there is no token: none ranks so high
        frame.last_rank = low + (high - low) // 2
    if tries == 2:
        frame.last_rank = ANY_RANK  # nothing was left out
    return status


@no_refcount
def _expand(best, row, state, search, lm, work):
    """All candidates that stay below the cutoff, as far as there is room for their keys.

    Fills work.next_tokens. `best`: cost of the best candidate, if it is known, or LARGEST.
    """
    frame, status = work.frame[0], DONE
    _begin_frame(best, state.counters[0].tokens, search, work)
    if lm is None:
        pass
    else:
        lm_contexts.begin_frame(lm, work)
    if search.params.topology != GRAPH:
        status = _offer_blanks_and_repeats(row, state, search, lm, work)
    if status == DONE and not choose_labels(row, search, work):
        status = BAD_FRAME
    is_eager = False
    if lm is None:
        pass
    else:
        is_eager = not lm.lazy
        if status == DONE and is_eager:
            status = expand_all_arcs(row, state, search, lm, work)
    if status == DONE and not is_eager and frame.labels > 0:
        status = _expand_groups(row, state, search, lm, work)
    if status == DONE:
        status = recombine(state, search, lm, work)
    if status == DONE and frame.tokens == 0:
        status = NO_TOKEN
    return status


@inlined
def _begin_frame(best, tokens, search, work):
    """Begin with empty tables, of a size for twice as many tokens as the last frame has."""
    frame = work.frame[0]
    frame.tokens = frame.candidates = frame.links = frame.groups = frame.group_tokens = 0
    frame.full = False
    frame.best, frame.cutoff = best, (best + search.params.beam if best < LARGEST else LARGEST)
    slots: Any = FEWEST_SLOTS
    while slots < 4 * tokens:
        slots *= 2
    frame.token_mask = min(slots, len(work.token_slots)) - 1
    frame.group_mask = min(slots, len(work.group_slots)) - 1
    for table in range(len(work.stamps)):
        work.stamps[table] += 1


@no_refcount
def _offer_blanks_and_repeats(row, state, search, lm, work):
    """Step 1: a blank, or the last label again."""
    frame, status, blank_id = work.frame[0], DONE, search.params.blank_id
    if not row[blank_id] <= LARGEST:
        return BAD_FRAME
    blank_cost = cost_of(row, blank_id, search)
    for i in range(state.counters[0].tokens):
        if frame.candidates + 4 > len(work.candidates):  # two for this one, one to tighten the cutoff
            status = recombine(state, search, lm, work)
            if status != DONE:
                break
        token = work.current[i]
        cost, key, label, context = token.cost, token.key, label_of(token.key), context_of(token, lm)
        offer(cost + blank_cost, key - label, context, Origin(i, BLANK_MOVE, NONE), search, lm, work)
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + cost_of(row, label - 1, search)
            offer(total, key, context, Origin(i, REPEAT_MOVE, NONE), search, lm, work)
    return status


@no_refcount
def _expand_groups(row, state, search, lm, work):
    """Steps 2 and 3."""
    frame, status = work.frame[0], DONE
    cutoff = frame.cutoff
    if lm is None:
        _tighten_cutoff(row, state, search, work)
    else:
        lm_contexts.tighten_cutoff(row, state, search, lm, work)
    if frame.cutoff < cutoff:
        narrow_labels(row, search, work)
    if frame.labels == 0:
        return status
    least = cost_of(row, work.labels[0], search)
    for i in range(1, frame.labels):
        least = min(least, cost_of(row, work.labels[i], search))
    status = _epsilon_closure(state.counters[0].tokens, least, search, lm, work)
    if status == DONE:
        status = _expand_each(row, state, search, lm, work)
    if lm is None:
        pass
    else:
        if status == DONE:
            status = lm_contexts.expand_deferred(row, state, search, lm, work)
    return status


@no_refcount
def _tighten_cutoff(row, state, search, work):
    """Lower the cutoff by the best token's own arcs, before anything is entered for them."""
    graph, weights = search.graph, search.weights
    for best in range(state.counters[0].tokens):
        if work.current[best].cost == 0:
            break
    token = work.current[best]
    source = graph.states[state_of(token.key)]
    _tighten_by(row, token.cost, token, source, search, work)
    for e in range(source.epsilon_begin, source.epsilon_end):
        closure = graph.epsilons[e]
        if closure.olabel == 0 or not weights.boosts:  # a bonus may be < 0, where a phrase breaks off
            cost = token.cost + weights.lm_weight * closure.cost
            _tighten_by(row, cost, token, graph.states[closure.target], search, work)


@no_refcount
def _tighten_by(row, cost, token, source, search, work):
    frame, arcs, weights = work.frame[0], search.graph.arcs, search.weights
    for i in range(frame.labels):
        label = work.labels[i]
        total = cost + weights.lm_weight * source.least_cost + cost_of(row, label, search)
        if not total < frame.best:
            if frame.labels <= SORTED_LABELS:
                break
            continue
        if search.params.topology == NORMAL and label == np.int32(label_of(token.key)) - 1:
            continue
        a = first_arc(arcs, source, label)
        while a < source.arc_end and arcs[a].ilabel == label:
            if arcs[a].olabel == 0 or not weights.boosts:
                total = cost + weights.lm_weight * arcs[a].cost + cost_of(row, label, search)
                lower_cutoff(total, frame, search)
            a += 1


@no_refcount
def _epsilon_closure(count, least, search, lm, work):
    """Step 2: each token joins groups."""
    status = DONE
    for i in range(count):
        status = _join_groups(i, least, search, lm, work)
        if status != DONE:
            break
    return status


@inlined
def _join_groups(i, least, search, lm, work):
    """A token joins the group of its state, and those of all states that its closure arcs lead to."""
    token, cutoff, status = work.current[i], work.frame[0].cutoff, DONE
    graph, weights = search.graph, search.weights
    source = graph.states[state_of(token.key)]
    for e in range(source.epsilon_begin - 1, source.epsilon_end):
        cost, boost, epsilon, olabel = token.cost, boost_of(token.key), NONE, np.int32(0)
        target, least_arc = state_of(token.key), source.least_cost
        if e >= source.epsilon_begin:
            closure = graph.epsilons[e]
            cost += weights.lm_weight * closure.cost
            epsilon, target, least_arc = e, np.int64(closure.target), closure.least_cost
            olabel = closure.olabel
            if olabel != 0 and weights.boosts:
                best_cost = cost - weights.most_bonus
                if not least_total(best_cost, least_arc, least, search) <= cutoff:
                    continue
                bonus, boost = boosted(olabel, boost, search)
                cost -= bonus
        if least_total(cost, least_arc, least, search) <= cutoff:
            key, origin = key_of(target, boost, 0) >> 16, Origin(i, NONE, epsilon)
            if lm is None:
                status = join(key, cost, origin, search, lm, work)
            else:
                status = lm_contexts.join(key, olabel, cost, origin, search, lm, work)
            if status != DONE:
                break
    return status


@no_refcount
def _expand_each(row, state, search, lm, work):
    """Step 3 for all groups, the cheapest first since it lowers the cutoff."""
    status, cheapest, groups, count = DONE, 0, work.expanding, work.frame[0].groups
    if lm is None:
        pass
    else:
        count = work.frame[0].lm_groups
    for g in range(count):
        if groups[g].cost < groups[cheapest].cost:
            cheapest = g
    for n in range(count):
        g = cheapest if n == 0 else (n - 1 if n <= cheapest else n)
        status = _expand_group(groups[g], g, row, state, search, lm, work)
        if status != DONE:
            break
    return status


@inlined
def _expand_group(group, g, row, state, search, lm, work):
    """All arcs of a group of a small state; of a large state those with labels that may matter."""
    frame, arcs, status = work.frame[0], search.graph.arcs, DONE
    source = search.graph.states[group.key >> 16]
    count = source.arc_end - source.arc_begin
    walks = count <= SMALL_STATE or count <= 4 * frame.labels
    rounds = 1 if walks else frame.labels  # all arcs in one, or one for each label
    for n in range(rounds):
        label, first = NONE, source.arc_begin
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
            if lm is None:
                pass
            else:
                frame.arc_visits += 1
            acoustic_cost = cost_of(row, arcs[a].ilabel, search)
            if least_total(group.cost, arcs[a].cost, acoustic_cost, search) > frame.cutoff:
                continue
            if lm is None:
                status = expand_arc(a, g, acoustic_cost, state, search, lm, work)
            else:
                status = lm_contexts.expand_arc(a, g, acoustic_cost, state, search, lm, work)
            if status != DONE:
                return status
    return status
