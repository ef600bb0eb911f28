"""Tokens of a graph state form a group, and groups take arcs; see `cpu.py`, steps 2 and 3."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import COMPACT, NORMAL
from nemo_gpu_decoding.jit import inlined
from nemo_gpu_decoding.search.cuda_wfst.groups import SMALL_STATE, SORTED_LABELS, first_arc
from nemo_gpu_decoding.search.cuda_wfst.tokens import (
    NONE,
    boost_of,
    find_slot,
    key_of,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.cuda_wfst.uncounted import uncounted
from nemo_gpu_decoding.search.cuda_wfst.ways import DONE, boosted, cost_of, least_total
from nemo_gpu_decoding.search.paged_biglm.composition import ask
from nemo_gpu_decoding.search.paged_biglm.tokens import find_history_slot
from nemo_gpu_decoding.search.paged_biglm.ways import GROUPS_FULL, is_first, offer, recombine


@uncounted
def join_groups(i, least, search, graph, boosting, space):
    """Step 2 for one token: the group of its state, and of all states that its epsilons lead to."""
    token, cutoff = space.current[i], space.front[0].cutoff
    state, lm, status = graph.states[state_of(token.key)], token.lm, DONE
    for e in range(state.epsilon_begin - 1, state.epsilon_end):
        cost, boost, epsilon, word = token.cost, boost_of(token.key), NONE, np.int32(0)
        target, least_arc = state_of(token.key), state.least_cost
        if e >= state.epsilon_begin:
            record = graph.epsilons[e]
            cost += search.lm_weight * record.cost
            epsilon, target, least_arc = e, np.int64(record.target), record.least_cost
            word = record.word
            if word != 0 and search.boosts:
                bonus, boost = boosted(word, boost, search, graph, boosting)
                cost -= bonus
        if least_total(cost, least_arc, least, search) <= cutoff:
            key = key_of(target, boost, 0) >> 16
            status = _join(cost, key, lm, word, i, epsilon, search, space)
            if status != DONE:
                break
    return status


@inlined
def _join(cost, key, lm, word, source, epsilon, search, space):
    """Make a token a member of a history, and that one of a group."""
    front, stamp = space.front[0], space.stamps[2]
    label = np.int32(0)
    if search.topology == NORMAL:
        label = np.int32(label_of(space.current[source].key))
    slot = find_history_slot(space.history_slots, space.histories, stamp, key, lm, word)
    if space.history_slots[slot].stamp == stamp:
        h = space.history_slots[slot].entry
        _rank(space.histories[h], cost, source, epsilon, label, space.current)
    elif front.histories == len(space.histories):
        return GROUPS_FULL
    else:
        h = np.int32(front.histories)
        front.histories += 1
        space.history_slots[slot].stamp = stamp
        space.history_slots[slot].entry = h
        history = space.histories[h]
        history.key, history.lm, history.lm_after, history.word = key, lm, lm, word
        history.cost, history.source, history.epsilon = cost, source, epsilon
        history.label, history.other_cost, history.members = label, np.float32(np.inf), NONE
        history.correction = np.float32(np.nan) if word != 0 else np.float32(0.0)
        _add_history(h, space)
    group = space.groups[space.group_slots[_group_slot(key, space)].entry]
    group.cost = min(group.cost, cost)
    if search.keeps_links:
        if front.members == len(space.members):
            return GROUPS_FULL
        member = space.members[front.members]
        member.cost, member.source, member.epsilon = cost, source, epsilon
        member.next = space.histories[h].members
        space.histories[h].members = front.members
        front.members += 1
    return DONE


@inlined
def _group_slot(key, space):
    return find_slot(space.group_slots, space.groups, space.stamps[1], key)


@inlined
def _add_history(h, space):
    """Put a new history into its group, which may be new as well."""
    front, history = space.front[0], space.histories[h]
    slot = _group_slot(history.key, space)
    if space.group_slots[slot].stamp != space.stamps[1]:
        g = np.int32(front.groups)  # there are no more groups than histories, so there is room
        front.groups += 1
        space.group_slots[slot].stamp = space.stamps[1]
        space.group_slots[slot].entry = g
        group = space.groups[g]
        group.key, group.cost, group.newest, group.count = history.key, history.cost, NONE, 0
        group.ordered, group.asks = NONE, False
    group = space.groups[space.group_slots[slot].entry]
    history.next = group.newest
    group.newest = h
    group.count += 1
    group.asks = group.asks or history.word != 0


@inlined
def _rank(history, cost, source, epsilon, label, current):
    """Keep the best member and the best one with another last label."""
    if _is_before(cost, source, epsilon, history.cost, history.source, history.epsilon, current):
        if label != history.label:
            history.other_cost, history.other_source = history.cost, history.source
            history.other_epsilon = history.epsilon
        history.cost, history.source, history.epsilon = cost, source, epsilon
        history.label = label
    elif label != history.label and (
        history.other_cost == np.inf
        or _is_before(
            cost, source, epsilon,
            history.other_cost, history.other_source, history.other_epsilon, current,
        )
    ):  # fmt: skip
        history.other_cost, history.other_source = cost, source
        history.other_epsilon = epsilon


@inlined
def _is_before(cost, source, epsilon, other_cost, other_source, other_epsilon, current):
    if cost != other_cost:
        return cost < other_cost
    if source != other_source:
        return is_first(current[source], current[other_source])
    return epsilon < other_epsilon


@uncounted
def _sort(group, search, space):
    """List the group's histories, cheapest first, by a Shell sort."""
    front, order = space.front[0], space.order
    first, h, count = front.ordered, group.newest, group.count
    for n in range(count):
        order[first + n] = h
        h = space.histories[h].next
    gap = 1
    while 3 * gap + 1 < count:
        gap = 3 * gap + 1
    while gap > 0:
        for n in range(gap, count):
            moved, place = order[first + n], n
            while place >= gap and _costs_less(moved, order[first + place - gap], space):
                order[first + place] = order[first + place - gap]
                place -= gap
            order[first + place] = moved
        gap //= 3
    group.ordered = first
    front.ordered += count
    if group.count > search.group_size:
        group.count = search.group_size
    front.prolonged += group.count


@inlined
def _costs_less(h, other, space):
    one, two = space.histories[h], space.histories[other]
    if one.cost != two.cost:
        return one.cost < two.cost
    if one.lm != two.lm:
        return one.lm < two.lm
    return one.word < two.word


@uncounted
def take_arcs(row, progress, links, search, graph, boosting, space):
    """Step 3 for all groups, the cheapest first since it lowers the cutoff."""
    front, status = space.front[0], DONE
    cheapest_group = 0
    for g in range(front.groups):
        if space.groups[g].cost < space.groups[cheapest_group].cost:
            cheapest_group = g
    for n in range(front.groups):
        g = cheapest_group if n == 0 else (n - 1 if n <= cheapest_group else n)
        status = _take_group(g, row, progress, links, search, graph, boosting, space)
        if status != DONE:
            break
    return status


@inlined
def _take_group(g, row, progress, links, search, graph, boosting, space):
    """All arcs of a small state; of a large one those with the labels that may matter."""
    front, group, status = space.front[0], space.groups[g], DONE
    state = graph.states[group.key >> 16]
    arcs = state.arc_end - state.arc_begin
    walks = arcs <= SMALL_STATE or arcs <= 4 * front.labels
    rounds = 1 if walks else front.labels  # all arcs in one, or one for each label
    for n in range(rounds):
        label, first = NONE, state.arc_begin
        if not walks:
            label = space.labels[n]
            acoustic_cost = cost_of(row, label, search)
            if least_total(group.cost, state.least_cost, acoustic_cost, search) > front.cutoff:
                if front.labels <= SORTED_LABELS:
                    break
                continue
            first = first_arc(graph.arcs, state, label)
        for a in range(first, state.arc_end):
            arc = graph.arcs[a]
            if not walks and arc.label != label:
                break
            front.arc_visits += 1
            acoustic_cost = cost_of(row, arc.label, search)
            if least_total(group.cost, arc.cost, acoustic_cost, search) > front.cutoff:
                continue
            if group.ordered == NONE:
                _sort(group, search, space)
            if arc.word == 0:
                status = _take_freely(group, a, acoustic_cost, progress, links, search, graph, space)
                if status != DONE:
                    return status
            if arc.word != 0 or group.asks:
                if front.errands == len(space.errands):
                    return GROUPS_FULL
                space.errands[front.errands].group = g
                space.errands[front.errands].arc = a
                front.errands += 1
    return status


@inlined
def _take_freely(group, a, acoustic_cost, progress, links, search, graph, space):
    """An arc without a word, by all histories of a group that know their LM state."""
    arc, front, status = graph.arcs[a], space.front[0], DONE
    for n in range(group.ordered, group.ordered + group.count):
        history = space.histories[space.order[n]]
        total = history.cost + search.lm_weight * arc.cost + acoustic_cost
        if total > front.cutoff:
            break
        if history.word == 0:
            key = _target_key(arc, group.key & 0xFFFF, search)
            status = _offer_all(
                history, a, np.float32(0.0), np.float32(0.0), acoustic_cost, key, history.lm,
                progress, links, search, graph, space,
            )  # fmt: skip
            if status != DONE:
                break
    return status


@inlined
def _target_key(arc, boost, search):
    remembers = search.topology == COMPACT or search.topology == NORMAL
    return key_of(arc.target, boost, np.int64(arc.label) + 1 if remembers else np.int64(0))


@uncounted
def run_errands(row, progress, links, search, graph, boosting, rescoring, space):
    """The arcs that ask the LMs, for all histories that are within the beam before they ask.

    The cutoff for that is the one that all other ways have left; what the answers say comes after. So
    it does not matter in which order they are asked.
    """
    front, status = space.front[0], DONE
    cutoff = front.cutoff
    for n in range(front.errands):
        group, a = space.groups[space.errands[n].group], space.errands[n].arc
        status = _run(group, a, cutoff, row, progress, links, search, graph, boosting, rescoring, space)
        if status != DONE:
            break
    return status


@inlined
def _run(group, a, cutoff, row, progress, links, search, graph, boosting, rescoring, space):
    """One arc: of all histories if it has a word, or else of those that still have to ask for one."""
    arc, front, status = graph.arcs[a], space.front[0], DONE
    acoustic_cost = cost_of(row, arc.label, search)
    if least_total(group.cost, arc.cost, acoustic_cost, search) > cutoff:
        return status
    bonus, boost = np.float32(0.0), group.key & 0xFFFF
    if arc.word != 0 and search.boosts:
        bonus, boost = boosted(arc.word, boost, search, graph, boosting)
    key = _target_key(arc, boost, search)
    for n in range(group.ordered, group.ordered + group.count):
        history = space.histories[space.order[n]]
        if history.cost + search.lm_weight * arc.cost - bonus + acoustic_cost > cutoff:
            break
        if arc.word == 0 and history.word == 0:
            continue
        if np.isnan(history.correction):
            history.correction, history.lm_after = ask(
                history.word, history.lm, front, search, graph, rescoring, space.memo
            )
        correction, lm = history.correction, history.lm_after
        if arc.word != 0:
            more, lm = ask(arc.word, lm, front, search, graph, rescoring, space.memo)
            correction += more
        status = _offer_all(
            history, a, bonus, correction, acoustic_cost, key, lm, progress, links, search, graph, space
        )
        if status != DONE:
            break
    return status


@uncounted
def _offer_all(
    history, a, bonus, correction, acoustic_cost, key, lm, progress, links, search, graph, space
):
    """Offer an arc for a history: its best member's way, or those of all members for a lattice."""
    arc, front, status = graph.arcs[a], space.front[0], DONE
    arc_cost, label = search.lm_weight * arc.cost, np.int64(arc.label) + 1
    if not search.keeps_links:
        cost, source, epsilon = history.cost, history.source, history.epsilon
        if search.topology == NORMAL and label == history.label:  # closed to the same label
            cost, source, epsilon = history.other_cost, history.other_source, history.other_epsilon
        total = cost + arc_cost - bonus + acoustic_cost + correction
        offer(total, key, lm, source, a, epsilon, search, space)
        if front.candidates == len(space.candidates):
            status = recombine(progress, links, search, space)
        return status
    at = history.members
    while at != NONE and status == DONE:
        member = space.members[at]
        if search.topology != NORMAL or label != label_of(space.current[member.source].key):
            total = member.cost + arc_cost - bonus + acoustic_cost + correction
            offer(total, key, lm, member.source, a, member.epsilon, search, space)
            if front.candidates == len(space.candidates):
                status = recombine(progress, links, search, space)
        at = member.next
    return status
