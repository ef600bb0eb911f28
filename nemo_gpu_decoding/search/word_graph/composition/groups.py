"""Tokens of a graph state form a group, and groups take arcs; see `cpu.py`, steps 2 and 3."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import COMPACT, NORMAL
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.composition.composition import ask
from nemo_gpu_decoding.search.word_graph.composition.tokens import (
    fill_slot,
    find_group_slot,
    find_history_slot,
    widen_group_tables,
)
from nemo_gpu_decoding.search.word_graph.composition.ways import GROUPS_FULL, is_first, offer, recombine
from nemo_gpu_decoding.search.word_graph.groups import SMALL_STATE, first_arc
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS
from nemo_gpu_decoding.search.word_graph.tokens import (
    NONE,
    boost_of,
    key_of,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.ways import DONE, boosted, cost_of, least_total


@inlined
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
    front = space.front[0]
    label = np.int32(0)
    if search.topology == NORMAL:
        label = np.int32(label_of(space.current[source].key))
    slot = find_history_slot(key, lm, word, space)
    if space.history_slots[slot].stamp == space.stamps[2]:
        h = space.history_slots[slot].entry
        _rank(space.histories[h], cost, source, epsilon, label, space.current)
        group = space.groups[space.histories[h].group]
        group.cost = min(group.cost, cost)
    elif front.histories == len(space.histories):
        return GROUPS_FULL
    else:
        h = np.int32(front.histories)
        fill_slot(space.history_slots, slot, space.stamps[2], h)
        history = space.histories[h]
        history.key, history.lm, history.lm_after, history.word = key, lm, lm, word
        history.cost, history.source, history.epsilon = cost, source, epsilon
        history.label, history.other_cost, history.members = label, np.float32(np.inf), NONE
        history.correction = np.float32(np.nan) if word != 0 else np.float32(0.0)
        _add_history(h, space)
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
def _add_history(h, space):
    """Put a new history into its group, which may be new as well."""
    front, history = space.front[0], space.histories[h]
    slot = find_group_slot(history.key, space)
    if space.group_slots[slot].stamp != space.stamps[1]:
        g = np.int32(front.groups)  # there are no more groups than histories, so there is room
        front.groups += 1
        fill_slot(space.group_slots, slot, space.stamps[1], g)
        group = space.groups[g]
        group.key, group.cost, group.newest, group.count = history.key, history.cost, NONE, 0
        group.ordered, group.asks = NONE, False
    history.group = space.group_slots[slot].entry
    group = space.groups[history.group]
    history.next = group.newest
    group.newest = h
    group.count += 1
    group.cost = min(group.cost, history.cost)
    group.asks = group.asks or history.word != 0
    front.histories += 1
    if 2 * front.histories > front.history_mask + 1:
        widen_group_tables(space)


@no_refcount
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


@inlined
def _order(group, search, space):
    """List the group's histories, cheapest first, no more than `group_size`."""
    front = space.front[0]
    group.ordered = front.ordered
    front.ordered += group.count
    ordered = space.order[group.ordered]
    ordered.history, ordered.cost = group.newest, space.histories[group.newest].cost
    if group.count > 1:
        _sort(group, space.order, space.histories)
    if group.count > search.group_size:
        group.count = search.group_size
    front.prolonged += group.count


@no_refcount
def _sort(group, order, histories):
    """Fill the group's part of `order` by a Shell sort."""
    first, h, count = group.ordered, group.newest, group.count
    for n in range(count):
        order[first + n].history, order[first + n].cost = h, histories[h].cost
        h = histories[h].next
    gap = 1
    while 3 * gap + 1 < count:
        gap = 3 * gap + 1
    while gap > 0:
        for n in range(first + gap, first + count):
            cost, h, place = order[n].cost, order[n].history, n
            while place >= first + gap and _is_cheaper(cost, h, order[place - gap], histories):
                order[place].cost = order[place - gap].cost
                order[place].history = order[place - gap].history
                place -= gap
            order[place].cost, order[place].history = cost, h
        gap //= 3


@inlined
def _is_cheaper(cost, h, ordered, histories):
    """Whether history h with this cost comes before another one: by cost, LM state, word."""
    if cost != ordered.cost:
        return cost < ordered.cost
    history, other = histories[h], histories[ordered.history]
    if history.lm != other.lm:
        return history.lm < other.lm
    return history.word < other.word


@no_refcount
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
                _order(group, search, space)
            if arc.word == 0:
                status = _take_freely(
                    group, a, acoustic_cost, progress, links, search, graph, boosting, space
                )
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
def _take_freely(group, a, acoustic_cost, progress, links, search, graph, boosting, space):
    """An arc without a word, by all histories of a group that know their LM state."""
    arc, front, status = graph.arcs[a], space.front[0], DONE
    for n in range(group.ordered, group.ordered + group.count):
        if space.order[n].cost + search.lm_weight * arc.cost + acoustic_cost > front.cutoff:
            break
        history = space.histories[space.order[n].history]
        if history.word == 0:
            key = target_key(arc, group.key & 0xFFFF, search)
            status = _offer_all(
                history, a, np.float32(0.0), np.float32(0.0), acoustic_cost, key, history.lm,
                progress, links, search, graph, boosting, space,
            )  # fmt: skip
            if status != DONE:
                break
    return status


@inlined
def target_key(arc, boost, search):
    remembers = search.topology == COMPACT or search.topology == NORMAL
    return key_of(arc.target, boost, np.int64(arc.label) + 1 if remembers else np.int64(0))


@no_refcount
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
    key = target_key(arc, boost, search)
    for n in range(group.ordered, group.ordered + group.count):
        if space.order[n].cost + search.lm_weight * arc.cost - bonus + acoustic_cost > cutoff:
            break
        history = space.histories[space.order[n].history]
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
            history, a, bonus, correction, acoustic_cost, key, lm,
            progress, links, search, graph, boosting, space,
        )  # fmt: skip
        if status != DONE:
            break
    return status


@inlined
def _offer_all(
    history, a, bonus, correction, acoustic_cost, key, lm,
    progress, links, search, graph, boosting, space,
):  # fmt: skip
    """Offer an arc for a history: its best member's way, or those of all members for a lattice."""
    if search.keeps_links:
        return _offer_members(
            history, a, bonus, correction, acoustic_cost, key, lm,
            progress, links, search, graph, boosting, space,
        )  # fmt: skip
    status = DONE
    cost, source, epsilon = history.cost, history.source, history.epsilon
    if search.topology == NORMAL and graph.arcs[a].label + 1 == history.label:  # closed to the same one
        cost, source, epsilon = history.other_cost, history.other_source, history.other_epsilon
    total = cost + search.lm_weight * graph.arcs[a].cost - bonus + acoustic_cost + correction
    offer(total, key, lm, source, a, epsilon, search, space)
    if space.front[0].candidates == len(space.candidates):
        status = recombine(progress, links, search, graph, boosting, space)
    return status


@no_refcount
def _offer_members(
    history, a, bonus, correction, acoustic_cost, key, lm,
    progress, links, search, graph, boosting, space,
):  # fmt: skip
    arc, front, status = graph.arcs[a], space.front[0], DONE
    arc_cost, label = search.lm_weight * arc.cost, np.int64(arc.label) + 1
    at = history.members
    while at != NONE and status == DONE:
        member = space.members[at]
        closed = search.topology == NORMAL and label == label_of(space.current[member.source].key)
        if not closed and not _is_taken(a, member, front):
            total = member.cost + arc_cost - bonus + acoustic_cost + correction
            offer(total, key, lm, member.source, a, member.epsilon, search, space)
            if front.candidates == len(space.candidates):
                status = recombine(progress, links, search, graph, boosting, space)
        at = member.next
    return status


@inlined
def _is_taken(a, member, front):
    """Whether that is the way that was taken to look ahead: a lattice has it once."""
    return (
        member.source == front.ahead_source
        and a == front.ahead_arc
        and member.epsilon == front.ahead_epsilon
    )
