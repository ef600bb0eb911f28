"""Steps 2 and 3 of a frame: tokens of a graph state form a group, and groups take arcs; see `cpu.py`."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import COMPACT, NORMAL
from nemo_gpu_decoding.jit import inlined
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS
from nemo_gpu_decoding.search.word_graph.tokens import (
    NONE,
    boost_of,
    find_slot,
    key_of,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.ways import (
    DONE,
    boosted,
    cost_of,
    least_total,
    offer,
    recombine,
)

SMALL_STATE = 8  # arcs; a state with no more is walked through whatever the labels


@inlined
def has_room(state, search, space):
    """Whether a token in this state finds room in groups, however many it joins."""
    front, more = space.front[0], state.epsilon_end - state.epsilon_begin + 1
    if search.keeps_links and front.members > 0 and front.members + more > len(space.members):
        return False
    return front.groups == 0 or front.groups + more <= len(space.groups)


@inlined
def join_groups(i, least, search, graph, boosting, space):
    """Step 2 for one token: the group of its state, and of all states that its epsilons lead to."""
    token, cutoff = space.current[i], space.front[0].cutoff
    state = graph.states[state_of(token.key)]
    for e in range(state.epsilon_begin - 1, state.epsilon_end):
        cost, boost, epsilon = token.cost, boost_of(token.key), NONE
        target, least_arc = state_of(token.key), state.least_cost
        if e >= state.epsilon_begin:
            record = graph.epsilons[e]
            cost += search.lm_weight * record.cost
            epsilon, target, least_arc = e, np.int64(record.target), record.least_cost
            if record.word != 0 and search.boosts:
                best_cost = cost - search.most_bonus
                if not least_total(best_cost, least_arc, least, search) <= cutoff:
                    continue
                bonus, boost = boosted(record.word, boost, search, graph, boosting)
                cost -= bonus
        if least_total(cost, least_arc, least, search) <= cutoff:
            _join(cost, key_of(target, boost, 0) >> 16, i, epsilon, search, space)


@inlined
def _join(cost, key, source, epsilon, search, space):
    """Make a token a member of a group."""
    front = space.front[0]
    slot = find_slot(space.group_slots, space.groups, space.stamps[1], key)
    label = np.int32(label_of(space.current[source].key)) if search.topology == NORMAL else np.int32(0)
    if space.group_slots[slot].stamp != space.stamps[1]:
        g = np.int32(front.groups)
        space.group_slots[slot].stamp = space.stamps[1]
        space.group_slots[slot].entry = g
        front.groups += 1
        group = space.groups[g]
        group.key, group.cost, group.source, group.epsilon = key, cost, source, epsilon
        group.label, group.members, group.other_cost = label, NONE, np.float32(np.inf)
    else:
        g = space.group_slots[slot].entry
        _rank(space.groups[g], cost, source, epsilon, label, space.current)
    if search.keeps_links:
        member = space.members[front.members]
        member.cost, member.source, member.epsilon = cost, source, epsilon
        member.next = space.groups[g].members
        space.groups[g].members = front.members
        front.members += 1


@inlined
def _rank(group, cost, source, epsilon, label, current):
    """Keep the best member and the best one with another last label."""
    if _is_before(cost, source, epsilon, group.cost, group.source, group.epsilon, current):
        if label != group.label:
            group.other_cost, group.other_source = group.cost, group.source
            group.other_epsilon = group.epsilon
        group.cost, group.source, group.epsilon = cost, source, epsilon
        group.label = label
    elif label != group.label and (
        group.other_cost == np.inf
        or _is_before(
            cost, source, epsilon, group.other_cost, group.other_source, group.other_epsilon, current
        )
    ):
        group.other_cost, group.other_source, group.other_epsilon = cost, source, epsilon


@inlined
def _is_before(cost, source, epsilon, other_cost, other_source, other_epsilon, current):
    if cost != other_cost:
        return cost < other_cost
    if source != other_source:
        return current[source].key < current[other_source].key
    return epsilon < other_epsilon


@inlined
def take_arcs(row, progress, links, search, graph, boosting, space):
    """Step 3 for all groups, the cheapest first since it lowers the cutoff; they are void afterwards."""
    front, status = space.front[0], DONE
    cheapest_group = 0
    for g in range(front.groups):
        if space.groups[g].cost < space.groups[cheapest_group].cost:
            cheapest_group = g
    for n in range(front.groups):
        g = cheapest_group if n == 0 else (n - 1 if n <= cheapest_group else n)
        status = _take_group(space.groups[g], row, progress, links, search, graph, boosting, space)
        if status != DONE:
            break
    front.groups = front.members = 0
    space.stamps[1] += 1
    return status


@inlined
def _take_group(group, row, progress, links, search, graph, boosting, space):
    """All arcs of a small state; of a large one those with the labels that may matter."""
    front, status = space.front[0], DONE
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
            if not walks and graph.arcs[a].label != label:
                break
            if front.candidates == len(space.candidates):
                status = recombine(progress, links, search, graph, boosting, space)
                if status != DONE:
                    return status
            status = _take_arc(a, group, row, progress, links, search, graph, boosting, space)
            if status != DONE:
                return status
    return status


@inlined
def first_arc(arcs, state, label):
    """The first arc of the state with a label that is not smaller."""
    low, high = state.arc_begin, state.arc_end
    while low < high:
        middle = (low + high) >> 1
        if arcs[middle].label < label:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _take_arc(a, group, row, progress, links, search, graph, boosting, space):
    arc, front, status = graph.arcs[a], space.front[0], DONE
    arc_cost, acoustic_cost = search.lm_weight * arc.cost, cost_of(row, arc.label, search)
    if least_total(group.cost, arc.cost, acoustic_cost, search) > front.cutoff:
        return status
    label = np.int64(arc.label) + 1
    bonus, boost = np.float32(0.0), group.key & 0xFFFF
    if search.boosts and arc.word != 0:
        bonus, boost = boosted(arc.word, boost, search, graph, boosting)
    remembers = search.topology == COMPACT or search.topology == NORMAL
    key = key_of(arc.target, boost, label if remembers else 0)
    if not search.keeps_links:
        cost, source, epsilon = group.cost, group.source, group.epsilon
        if search.topology == NORMAL and label == group.label:
            cost, source, epsilon = group.other_cost, group.other_source, group.other_epsilon
        offer(cost + arc_cost - bonus + acoustic_cost, key, source, a, epsilon, search, space)
        return status
    at = group.members
    while at != NONE and status == DONE:
        member = space.members[at]
        closed = search.topology == NORMAL and label == label_of(space.current[member.source].key)
        if not closed:
            total = member.cost + arc_cost - bonus + acoustic_cost
            offer(total, key, member.source, a, member.epsilon, search, space)
            if front.candidates == len(space.candidates):
                status = recombine(progress, links, search, graph, boosting, space)
        at = member.next
    return status
