"""Search one frame of CTC log-probs in a word graph on the CPU by Viterbi beam search [CUDA-WFST].

A token is a partial path through the graph with its cost: acoustic_scale times the negative log-probs, plus lm_weight
times the graph's costs, minus boosting. Costs are relative to the best token of the frame, so that float32 is precise
enough for streams of any length. The cost of the best token itself is a double. Each frame has four steps:

1. Each token reads a blank, or reads its last label again. These steps are the self-loops of the CTC topology, which
   the graph does not contain (`graph/csr.py`).
2. Epsilon closure: tokens in one graph state form a group. A token also joins the groups of the states that its
   closure arcs lead to (`token_groups.py`).
3. Each group expands the arcs of its state. Candidates with equal keys recombine: the cheapest one stays.
4. Tokens that cost more than best + beam are pruned, then all but about max_active (`prune.py`). If fewer than
   min_active tokens are within the beam, the search repeats the frame with a wider beam.

Lower bounds of costs skip most of the work in steps 2 and 3. Posteriors are peaked, so that in most frames only a few
labels can stay within the beam. In a large state, where any word may begin, binary search finds their arcs. Before
step 2 the cheapest arc of the best token lowers the cutoff. The bounds skip only what step 4 would prune.

With a large LM (`lm` is an `LmScorer`, not None) a token also has an LM context, and steps 2 and 3 differ, see
`large_lm/contexts.py`. numba compiles this source for both cases. With lm=None, numba removes the second branch of
each `if lm is None` before it infers types, so that records need no LM fields. With a large LM it infers the types of
both branches, and removes the first branch later.
"""

from typing import Any

import numpy as np

from nemo_gpu_decoding.graph.csr import GRAPH, first_arc, label_bit
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph import candidates, keys, labels, token_groups
from nemo_gpu_decoding.search.word_graph.large_lm import contexts
from nemo_gpu_decoding.search.word_graph.prune import UNKNOWN, prune, widen_beam

FEWEST_SLOTS = 256  # the smallest part of a hash table that is in use


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """Decode the frames begin .. end - 1 of an utterance.

    Args:
        log_probs: [T, V + 1] float32.
        state: `StreamArrays`, updated in place; work.current holds the tokens before and after.

    Returns:
        the number of the next frame, and a status. The status is DONE after the last frame. BAD_FRAME (NaN, or a value
        above 0) and NO_TOKEN (the graph allows no label) are errors of that frame. After BACK_POINTERS_FULL,
        LINKS_FULL and GROUPS_FULL the caller grows these arrays and calls again with that frame.
    """
    frame = work.frame[0]
    for t in range(begin, end):
        is_narrow = frame.status != keys.BACK_POINTERS_FULL  # else the frame is expanded; only pruning is left to do
        frame.beam, frame.status = search.params.beam if is_narrow else frame.beam, keys.DONE
        while is_narrow:
            _expand_or_bisect(log_probs[t], state, search, lm, work)
            is_narrow = frame.status == keys.DONE and widen_beam(search.params, work)
        if frame.status == keys.DONE:
            prune(log_probs[t], state, search, work)
        if frame.status != keys.DONE:
            return t, frame.status
        if lm is None:
            pass
        else:
            contexts.count_work(state.counters[0], frame)
    return end, keys.DONE


@linked
def _expand_or_bisect(row, state, search, lm, work):
    """Find the tokens of the next frame; if they exceed the capacity, the cheapest of them.

    Try 1 may exceed the capacity because the cutoff is still high. Try 2 starts with the cutoff that try 1 found. From
    try 3 on, the search bisects the last rank until the tokens fill between half and all of the capacity. Half of it
    is twice the number of tokens that max_active lets survive. The result does not depend on the order in which
    candidates are found.
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
                pass  # each try must find the same candidates, and make the same LM queries
            continue
        if tries == 2:
            state.counters[0].overflowed += 1
            low = keys.rank_of(frame.best, 0, 0)
        elif frame.full:
            high = frame.last_rank
        elif high - low <= 1 or 2 * frame.tokens >= len(work.next_tokens):
            break
        else:
            low = frame.last_rank  # also if there is no token, because all rank lower
        frame.last_rank = low + (high - low) // 2
    if tries == 2:
        frame.last_rank = keys.ANY_RANK  # all tokens fitted


@linked
def _expand(best, row, state, search, lm, work):
    """Take steps 1 to 3: all candidates below the cutoff become next tokens, while there is capacity for their keys.

    Set frame.status. `best` is the cost of the best candidate if it is known, else LARGEST.
    """
    frame = work.frame[0]
    begin_frame(best, state.counters[0].tokens, work)
    offer_blanks_and_repeats(row, state, search, lm, work)
    if frame.status == keys.DONE and not labels.choose_labels(row, search, work):
        frame.status = keys.BAD_FRAME
    if frame.status == keys.DONE:
        if lm is None:
            if frame.labels > 0:
                _, _, _, _, least = labels.likeliest_step(row, state, search, lm, work)
                candidates.lower_cutoff(least, frame)
        else:
            contexts.begin_frame(work)
            if frame.labels > 0:
                contexts.tighten_cutoff(row, state, search, lm, work)
        labels.rank_labels(row, search, work)
        if frame.labels > 0:
            if lm is None:
                epsilon_closure(row, state.counters[0].tokens, search, lm, work)
                expand_groups(token_groups.expand_arc, work.groups, row, state, search, lm, work)
            else:
                contexts.epsilon_closure(row, state.counters[0].tokens, search, lm, work)
                expand_groups(contexts.expand_arc, work.lm.groups, row, state, search, lm, work)
                contexts.expand_deferred(row, state, search, lm, work)
    if frame.status == keys.DONE:
        candidates.recombine(state, search, lm, work)
    if frame.status == keys.DONE and frame.tokens == 0:
        frame.status = keys.NO_TOKEN


@linked
def begin_frame(best, tokens, work):
    """Empty the tables. The part of a hash table in use has four slots or more for each token of the last frame."""
    frame = work.frame[0]
    frame.status, frame.full = keys.DONE, False
    work.posteriors[:] = UNKNOWN
    frame.tokens = frame.candidates = frame.links = frame.groups = frame.group_tokens = 0
    frame.best, frame.cutoff = best, (best + frame.beam if best < LARGEST else LARGEST)
    slots: Any = FEWEST_SLOTS
    while slots < 4 * tokens:
        slots *= 2
    frame.token_mask = min(slots, len(work.token_slots)) - 1
    frame.group_mask = min(slots, len(work.group_slots)) - 1
    for table in range(len(work.stamps)):
        work.stamps[table] += 1


@linked
def offer_blanks_and_repeats(row, state, search, lm, work):
    """Step 1: each token reads a blank, or reads its last label again."""
    frame, blank_id = work.frame[0], search.params.blank_id
    if search.params.topology == GRAPH:
        return  # the graph contains blanks and self-loops
    if not row[blank_id] <= MOST_LOG_PROB:
        frame.status = keys.BAD_FRAME
        return
    blank_cost = candidates.cost_of(row, blank_id, search)
    for i in range(state.counters[0].tokens):
        if frame.candidates + 4 > len(work.candidates):  # two for this token; the tightened cutoff needs one more
            candidates.recombine(state, search, lm, work)
        token = work.current[np.uintp(i)]
        cost, key, label, context = token.cost, token.key, keys.label_of(token.key), keys.context_of(token, lm)
        candidates.offer(
            cost + blank_cost, key - label, context, keys.Origin(keys.BLANK_MOVE, i, keys.NONE), search, lm, work
        )
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + candidates.cost_of(row, np.uintp(label - 1), search)
            candidates.offer(total, key, context, keys.Origin(keys.REPEAT_MOVE, i, keys.NONE), search, lm, work)


@linked
def epsilon_closure(row, count, search, lm, work):
    """Step 2: each token joins the group of its state, and the groups of the states that its closure arcs lead to.

    A token joins a group only if an arc of that group may stay below the cutoff. With a large LM, this is the closure
    of composition "let": tokens behind closure arcs with words form separate groups.
    """
    graph, weights, frame = search.graph, search.weights, work.frame[0]
    cutoff, least, likely = frame.cutoff, candidates.cost_of(row, work.labels[0], search), np.uint64(0)
    for n in range(frame.labels):
        likely |= label_bit(work.labels[np.uintp(n)])
    for i in range(count):
        token = work.current[np.uintp(i)]
        source = graph.states[np.uintp(keys.state_of(token.key))]
        for e in range(source.epsilon_begin - 1, source.epsilon_end):
            cost, boost, epsilon, olabel = token.cost, keys.boost_of(token.key), keys.NONE, np.int32(0)
            target, least_arc = keys.state_of(token.key), source.least_cost
            if e >= source.epsilon_begin:
                epsilon_arc = graph.epsilons[np.uintp(e)]
                cost += weights.lm_weight * epsilon_arc.cost
                epsilon, target, least_arc = e, np.int64(epsilon_arc.target), epsilon_arc.least_cost
                olabel = epsilon_arc.olabel
                if olabel != 0 and weights.boosts:
                    best_cost = cost - weights.most_bonus
                    if not candidates.least_total(best_cost, least_arc, least, search) <= cutoff:
                        continue
                    bonus, boost = candidates.boosted(olabel, boost, search)
                    cost -= bonus
            may = search.arc_index.label_sets[np.uintp(target)] & likely != 0
            may = may & (candidates.least_total(cost, least_arc, least, search) <= cutoff)  # one branch for both
            if may and may_expand(row, graph.states[np.uintp(target)], cost, search, cutoff):
                key, origin = keys.key_of(target, boost, 0) >> 16, keys.Origin(keys.NONE, i, epsilon)
                if lm is None:
                    pass
                elif olabel != 0:
                    key |= token_groups.AFTER_WORD
                token_groups.join(key, cost, origin, search, None, work)


@linked
def may_expand(row, source, cost, search, cutoff):
    """Return whether an arc of a state may stay below the cutoff; large states are always expanded."""
    arcs, may = search.graph.arcs, source.arc_end - source.arc_begin > labels.SMALL_STATE
    for a in range(source.arc_begin, source.arc_begin if may else source.arc_end):
        may = may | (
            not candidates.least_of(row, arcs[np.uintp(a)], cost, search) > cutoff
        )  # a branch is unpredictable
    return may


@linked
def expand_groups(expand_arc, groups, row, state, search, lm, work):
    """Step 3: expand groups by a compiled `expand_arc`, the cheapest first: it lowers the cutoff for all others."""
    count = work.frame[0].groups if work.frame[0].status == keys.DONE else 0
    cheapest = 0  # the first one with the lowest cost
    for g in range(count):
        if groups[g].cost < groups[cheapest].cost:
            cheapest = g
    for n in range(count):
        g = cheapest if n == 0 else (n - 1 if n <= cheapest else n)
        _expand_group(expand_arc, groups[g], g, row, state, search, lm, work)


@linked
def _expand_group(expand_arc, group, g, row, state, search, lm, work):
    """Expand all arcs of a small state, or the arcs of a large state with labels that may stay below the cutoff."""
    frame, arcs, s = work.frame[0], search.graph.arcs, token_groups.state_of(group)
    source = search.graph.states[np.uintp(s)]
    count = source.arc_end - source.arc_begin
    rounds = 1 if count <= labels.SMALL_STATE else labels.labels_within(group.cost, source, row, search, work)
    tries_all = count <= labels.SMALL_STATE * rounds
    for n in range(1 if tries_all else rounds):  # one round for all arcs, or one for each label
        label, first = keys.NONE, source.arc_begin
        if not tries_all:
            label = work.labels[n]
            acoustic_cost = candidates.cost_of(row, np.uintp(label), search)
            if candidates.least_total(group.cost, source.least_cost, acoustic_cost, search) > frame.cutoff:
                continue
            first = first_arc(search.arc_index, arcs, s, source, label)
        for a in range(first, source.arc_end):
            arc = arcs[np.uintp(a)]
            if not tries_all and arc.ilabel != label:
                break
            if lm is None:
                pass
            else:
                frame.arc_visits += 1
            acoustic_cost = candidates.cost_of(row, np.uintp(arc.ilabel), search)
            if not candidates.least_total(group.cost, arc.cost, acoustic_cost, search) > frame.cutoff:
                expand_arc(a, g, acoustic_cost, state, search, lm, work)
