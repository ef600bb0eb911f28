"""Group the tokens of one graph state: those in it, and those from which a closure arc leads to it.

A group expands arcs for its cheapest token only. With topology "normal" a token cannot take an arc with its last
label, so that a group also keeps the cheapest token with another last label. For lattices a group keeps all its
tokens. With a large LM the fields of a group are those of its LM contexts, see `large_lm/contexts.py`.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import COMPACT, NORMAL
from nemo_gpu_decoding.jit import inlined, linked
from nemo_gpu_decoding.search.word_graph import candidates, keys

AFTER_WORD = np.int64(1) << 48  # with composition "let": bit of the key of groups behind closure arcs with words


class ArcStep(NamedTuple):
    """An arc that the tokens of a group take."""

    arc: int
    key: np.int64  # of the target token
    context: np.int64  # LM context of the target token
    bonus: np.float32  # of the arc's word, weighted
    acoustic_cost: np.float32
    difference: np.float32  # LM score difference, weighted


@linked
def state_of(group):
    """Return the graph state of a group."""
    return (group.key & ~AFTER_WORD) >> 16


@linked
def join(key, cost, origin, search, lm, work):
    """Add a token to the group with this key (graph state, boosting state); the group may be new."""
    frame = work.frame[0]
    slot = candidates.find_slot(key, 0, group_table(work.groups, work), None)
    if work.group_slots[slot].stamp != work.stamps[1]:
        if frame.groups == len(work.groups):
            frame.status = keys.GROUPS_FULL
            return
        g = np.int32(frame.groups)
        candidates.fill_slot(work.group_slots, slot, work.stamps[1], g)
        frame.groups += 1
        begin_group(work.groups[g], key, cost, origin, search, work)
        if 2 * frame.groups > frame.group_mask + 1:
            widen_group_table(work)
    else:
        g = work.group_slots[slot].entry
        keep_best(work.groups[g], cost, origin, search, lm, work)
    if len(work.group_tokens) > 1:  # with a lattice, and with composition "let"
        add_group_token(work.groups[g], cost, origin, work)


@linked
def begin_group(group, key, cost, origin, search, work):
    group.key, group.cost, group.source, group.epsilon = key, cost, origin.source, origin.epsilon
    group.label = _last_label(origin, search, work)
    group.newest, group.other_cost = keys.NONE, np.float32(np.inf)


@linked
def _last_label(origin, search, work):
    """Return the last label + 1 of a token; 0 with topologies that do not need it."""
    if search.params.topology == NORMAL:
        return np.int32(keys.label_of(work.current[origin.source].key))
    return np.int32(0)


@linked
def keep_best(group, cost, origin, search, lm, work):
    """Update the best token of a group, and the best token with another last label."""
    label, best = _last_label(origin, search, work), keys.Origin(keys.NONE, group.source, group.epsilon)
    if _is_before(cost, origin, group.cost, best, lm, work):
        if label != group.label:
            group.other_cost, group.other_source = group.cost, group.source
            group.other_epsilon = group.epsilon
        group.cost, group.source, group.epsilon = cost, origin.source, origin.epsilon
        group.label = label
    elif label != group.label:
        other = keys.Origin(keys.NONE, group.other_source, group.other_epsilon)
        if group.other_cost == np.inf or _is_before(cost, origin, group.other_cost, other, lm, work):
            group.other_cost, group.other_source = cost, origin.source
            group.other_epsilon = origin.epsilon


@linked
def _is_before(cost, origin, other_cost, other, lm, work):
    if cost != other_cost:
        return cost < other_cost
    if origin.source != other.source:
        return keys.precedes(work.current[origin.source], work.current[other.source], lm)
    return origin.epsilon < other.epsilon


@linked
def add_group_token(group, cost, origin, work):
    frame = work.frame[0]
    if frame.group_tokens == len(work.group_tokens):
        frame.status = keys.GROUPS_FULL
        return
    token = work.group_tokens[frame.group_tokens]
    token.cost, token.source, token.epsilon = cost, origin.source, origin.epsilon
    token.next = group.newest
    group.newest = frame.group_tokens
    frame.group_tokens += 1


@linked
def expand_arc(a, g, acoustic_cost, state, search, lm, work):
    """Expand an arc for a group, without a large LM."""
    arc, group, bonus = search.graph.arcs[a], work.groups[g], np.float32(0.0)
    boost = group.key & 0xFFFF
    if search.weights.boosts and arc.olabel != 0:
        bonus, boost = candidates.boosted(arc.olabel, boost, search)
    step = ArcStep(a, target_key(arc, boost, search), np.int64(0), bonus, acoustic_cost, np.float32(0.0))
    offer_step(group, step, state, search, lm, work)


@linked
def target_key(arc, boost, search):
    """Return the key of the token that an arc leads to."""
    keeps_label = search.params.topology in (COMPACT, NORMAL)
    return keys.key_of(arc.target, boost, np.int64(arc.ilabel) + 1 if keeps_label else np.int64(0))


@linked
def offer_step(group, step, state, search, lm, work):
    """Offer the candidate of an arc from the best token of a group; for a lattice, from all its tokens."""
    arc, is_normal = search.graph.arcs[step.arc], search.params.topology == NORMAL
    label = np.int64(arc.ilabel) + 1
    if not search.params.keeps_links:
        cost, origin = group.cost, keys.Origin(step.arc, group.source, group.epsilon)
        if is_normal and label == group.label:  # the best token cannot take this arc
            cost, origin = group.other_cost, keys.Origin(step.arc, group.other_source, group.other_epsilon)
        _offer(cost, origin, step, state, search, lm, work)
        return
    at = group.newest
    while at != keys.NONE:
        token = work.group_tokens[at]
        origin = keys.Origin(step.arc, token.source, token.epsilon)
        is_closed = is_normal and label == keys.label_of(work.current[token.source].key)
        if not is_closed and not _is_offered(origin, lm, work.frame[0]):
            _offer(token.cost, origin, step, state, search, lm, work)
        at = token.next


@linked
def _offer(cost, origin, step, state, search, lm, work):
    arc = search.graph.arcs[step.arc]
    total = cost + search.weights.lm_weight * arc.cost - step.bonus + step.acoustic_cost
    if lm is None:
        pass
    else:
        total += step.difference
    candidates.offer(total, step.key, step.context, origin, search, lm, work)
    if work.frame[0].candidates == len(work.candidates):
        candidates.recombine(state, search, lm, work)


@linked
def _is_offered(origin, lm, frame):
    """Return whether this is the candidate that tightened the cutoff; a lattice must contain it once."""
    if lm is None:
        return False
    else:
        return (
            origin.source == frame.tight_source
            and origin.arc == frame.tight_arc
            and origin.epsilon == frame.tight_epsilon
        )


@inlined
def group_table(groups, work):
    return candidates.Table(work.group_slots, groups, work.frame[0].group_mask, work.stamps[1])


@linked
def widen_group_table(work):
    """Double the part of the table that is in use."""
    work.frame[0].group_mask = 2 * work.frame[0].group_mask + 1
    work.stamps[1] += 1
    candidates.fill_table(group_table(work.groups, work), work.frame[0].groups, None)
