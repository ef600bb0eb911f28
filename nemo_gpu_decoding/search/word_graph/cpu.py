"""cuda_wfst on the CPU: time-synchronous Viterbi search of a word graph [CUDA-WFST], compiled.

A token is a path through the graph with its cost: acoustic_scale times the negative log-probs, plus
lm_weight times the graph's costs, minus boosting. In every frame

1. a token may read a blank, or its last label again (the CTC topology, run natively; `topology.py`);
2. tokens of the same graph state form a group, also by way of epsilon records, and only the cheapest
   of a group matters for what follows (with topology "normal" also the cheapest with another last
   label, since an arc with the same label is closed to the first);
3. each group takes the arcs of its state; equal keys recombine, the cheaper one stays;
4. tokens above best + beam are dropped, then all but about max_active.

Steps 2 and 3 are pruned by bounds before they cost anything: posteriors are peaked, so in most frames a
handful of labels can stay within the beam, and a large state (thousands of words begin anywhere) is
asked for these by binary search in place of being walked through. Nothing is dropped that step 4 would
not drop.

Costs are kept relative to the best token, so that float32 serves streams of any length; where the best
one stands is a double.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH, NORMAL
from nemo_gpu_decoding.jit import no_refcount
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.word_graph.groups import (
    first_arc,
    has_room,
    join_groups,
    take_arcs,
)
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS, choose_labels, narrow_labels
from nemo_gpu_decoding.search.word_graph.survivors import commit
from nemo_gpu_decoding.search.word_graph.tokens import (
    ANY_RANK,
    BLANK_MOVE,
    HASH_BITS,
    NONE,
    REPEAT_MOVE,
    label_of,
    rank_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.ways import (
    BAD_FRAME,
    DONE,
    LINKS_FULL,
    NO_TOKEN,
    cost_of,
    lower_cutoff,
    offer,
    recombine,
)


@no_refcount
def advance(log_probs, begin, end, progress, records, links, search, graph, boosting, space):
    """Read the frames begin .. end of log_probs [T, C] float32. space.current holds the tokens.

    Returns:
        the frame before which it stopped, and why: DONE; BAD_FRAME (NaN or +inf); NO_TOKEN (no label
        is possible); RECORDS_FULL, LINKS_FULL: make room and go on there.
    """
    for t in range(begin, end):
        status = _expand_within_room(log_probs[t], progress[0], links, search, graph, boosting, space)
        if status == DONE:
            status = commit(log_probs[t], progress[0], records, links, search, graph, space)
        if status != DONE:
            return t, status
    return end, DONE


@no_refcount
def _expand_within_room(row, progress, links, search, graph, boosting, space):
    """All ways into the next frame that stay below the cutoff, or the cheapest if they are too many.

    Where keys find no room, that may be since the cutoff was not low yet: the first try has found the
    best cost, with which there is another one. If they still are too many, the highest rank is looked
    for with which they fit, until half of the room is used, which is twice what max_active lets survive.
    The result depends on the ways alone and not on the order in which they are found.
    """
    front = space.front[0]
    front.last = ANY_RANK
    status = _expand(LARGEST, row, progress, links, search, graph, boosting, space)
    if status != DONE or not front.full:
        return status
    best = front.best
    status = _expand(best, row, progress, links, search, graph, boosting, space)
    if status != DONE or not front.full:
        return status
    progress.overflowed += 1
    low, high = rank_of(best, 0), rank_of(best + search.beam, 0) + (1 << HASH_BITS)
    while low < high and status != LINKS_FULL:  # NO_TOKEN: none ranks so high
        front.last = low + (high - low) // 2
        status = _expand(best, row, progress, links, search, graph, boosting, space)
        if front.full:
            high = front.last
        elif high - low <= 1 or 2 * front.tokens >= len(space.following):
            break
        else:
            low = front.last
    return status


@no_refcount
def _expand(best, row, progress, links, search, graph, boosting, space):
    """All ways into the next frame that stay below the cutoff, as far as there is room for their keys.

    Fills space.following. `best`: cost of the best way, if it is known, or LARGEST.
    """
    front = space.front[0]
    front.tokens = front.candidates = front.groups = front.members = front.links = 0
    front.full = False
    front.best, front.cutoff = best, (best + search.beam if best < LARGEST else LARGEST)
    space.stamps[0] += 1
    space.stamps[1] += 1
    status = DONE
    if search.topology != GRAPH:
        status = _stay(row, progress, links, search, graph, boosting, space)
    if status == DONE and not choose_labels(row, search, space):
        status = BAD_FRAME
    if status == DONE and front.labels > 0:
        cutoff = front.cutoff
        _look_ahead(row, progress, search, graph, space)
        if front.cutoff < cutoff:
            narrow_labels(row, search, space)
    if status == DONE and front.labels > 0:
        status = _move(row, progress, links, search, graph, boosting, space)
    if status == DONE:
        status = recombine(progress, links, search, graph, boosting, space)
    if status == DONE and front.tokens == 0:
        status = NO_TOKEN
    return status


@no_refcount
def _stay(row, progress, links, search, graph, boosting, space):
    """Step 1: a blank, or the last label again."""
    front, status = space.front[0], DONE
    if not row[search.blank_id] <= LARGEST:
        return BAD_FRAME
    blank_cost = cost_of(row, search.blank_id, search)
    for i in range(progress.tokens):
        if front.candidates + 2 > len(space.candidates):
            status = recombine(progress, links, search, graph, boosting, space)
            if status != DONE:
                break
        cost, key = space.current[i].cost, space.current[i].key
        label = label_of(key)
        offer(cost + blank_cost, key - label, i, BLANK_MOVE, NONE, search, space)
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + cost_of(row, label - 1, search)
            offer(total, key, i, REPEAT_MOVE, NONE, search, space)
    return status


@no_refcount
def _look_ahead(row, progress, search, graph, space):
    """Lower the cutoff by the best token's own arcs, before anything is entered for them."""
    for best in range(progress.tokens):
        if space.current[best].cost == 0:
            break
    token = space.current[best]
    state = graph.states[state_of(token.key)]
    _look_at(row, token.cost, token, state, search, graph, space)
    for e in range(state.epsilon_begin, state.epsilon_end):
        record = graph.epsilons[e]
        if record.word == 0 or not search.boosts:  # a bonus may be negative, where a phrase breaks off
            cost = token.cost + search.lm_weight * record.cost
            _look_at(row, cost, token, graph.states[record.target], search, graph, space)


@no_refcount
def _look_at(row, cost, token, state, search, graph, space):
    front = space.front[0]
    for i in range(front.labels):
        label = space.labels[i]
        total = cost + search.lm_weight * state.least_cost + cost_of(row, label, search)
        if not total < front.best:
            if front.labels <= SORTED_LABELS:
                break
            continue
        if search.topology == NORMAL and label == np.int32(label_of(token.key)) - 1:
            continue
        a = first_arc(graph.arcs, state, label)
        while a < state.arc_end and graph.arcs[a].label == label:
            arc = graph.arcs[a]
            if arc.word == 0 or not search.boosts:
                total = cost + search.lm_weight * arc.cost + cost_of(row, label, search)
                lower_cutoff(total, front, search)
            a += 1


@no_refcount
def _move(row, progress, links, search, graph, boosting, space):
    """Steps 2 and 3. Where there is no room for another group, those that there are go first."""
    front, status = space.front[0], DONE
    least = cost_of(row, space.labels[0], search)
    for i in range(1, front.labels):
        least = min(least, cost_of(row, space.labels[i], search))
    first, count = 0, progress.tokens
    while first < count and status == DONE:
        while first < count and has_room(
            graph.states[state_of(space.current[first].key)], search, space
        ):
            join_groups(first, least, search, graph, boosting, space)
            first += 1
        status = take_arcs(row, progress, links, search, graph, boosting, space)
    return status
