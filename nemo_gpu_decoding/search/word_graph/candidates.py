"""Compute costs of candidates for the next frame, and recombine them in hash tables that find equal keys."""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import ANY_WEIGHT, lookup
from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import inlined, linked
from nemo_gpu_decoding.search.word_graph import keys


@linked
def cost_of(row, label, search):
    """Return the acoustic cost of a label: the scaled negative log-prob."""
    return -(search.params.acoustic_scale * row[label])


@linked
def least_total(cost, arc_cost, acoustic_cost, search):
    """Return a lower bound of an arc's total cost, with the largest bonus, summed in the order of the exact cost."""
    return cost + search.weights.lm_weight * arc_cost - search.weights.most_bonus + acoustic_cost


@linked
def least_of(row, arc, cost, search):
    """Return a lower bound of an arc's total cost in this frame, after a token or group with this cost."""
    return least_total(cost, arc.cost, cost_of(row, np.uintp(arc.ilabel), search), search)


@linked
def lower_cutoff(total, frame):
    """Lower the cutoff, which is the lowest cost plus the beam, if a candidate costs less than all others."""
    if total < frame.best:
        frame.best = total
        frame.cutoff = total + frame.beam


@linked
def offer(total, key, context, origin, search, lm, work):
    """Append a candidate to the list unless it is above the cutoff. The list must have capacity for it."""
    frame = work.frame[0]
    if total <= frame.cutoff:
        lower_cutoff(total, frame)
        candidate = work.candidates[np.uintp(frame.candidates)]
        candidate.key, candidate.cost, candidate.source = key, total, origin.source
        candidate.arc, candidate.epsilon = origin.arc, origin.epsilon
        if lm is None:
            pass
        else:
            candidate.lm = context
        frame.candidates += 1


@linked
def recombine(state, search, lm, work):
    """Move the list of candidates into the table of next tokens. If keys are equal, the better candidate stays."""
    frame, next_tokens = work.frame[0], work.next_tokens
    limited = frame.last_rank != keys.ANY_RANK
    for c in range(frame.candidates):
        candidate = work.candidates[np.uintp(c)]
        if candidate.cost > frame.cutoff:
            continue  # the cutoff was higher when the candidate was listed
        context = keys.context_of(candidate, lm)
        if limited and keys.rank_of(candidate.cost, candidate.key, context) > frame.last_rank:
            continue
        slot = find_slot(candidate.key, context, token_table(work), lm)
        if work.token_slots[slot].stamp == work.stamps[0]:
            t = work.token_slots[slot].entry
            replaces = candidate.cost < next_tokens[t].cost or (
                candidate.cost == next_tokens[t].cost
                and _breaks_tie(candidate, next_tokens[t], search, lm, work.current)
            )
        elif frame.tokens == len(next_tokens):
            frame.full = True
            continue
        else:
            t = np.int32(frame.tokens)
            replaces = True
            fill_slot(work.token_slots, slot, work.stamps[0], t)
            frame.tokens += 1
        if replaces:
            token = next_tokens[np.uintp(t)]
            token.key, token.cost, token.source = candidate.key, candidate.cost, candidate.source
            token.arc, token.epsilon = candidate.arc, candidate.epsilon
            if lm is None:
                pass
            else:
                token.lm = candidate.lm
            if 2 * frame.tokens > frame.token_mask + 1:
                widen_token_table(lm, work)
        if search.params.keeps_links:
            _add_link(candidate, t, state, work)
    frame.candidates = 0


@linked
def _add_link(candidate, target, state, work):
    """Append a candidate to the links of the frame, for the lattice."""
    frame, counters = work.frame[0], state.counters[0]
    if counters.links + frame.links == len(state.links):
        frame.status = keys.LINKS_FULL
        return
    link = state.links[counters.links + frame.links]
    link.source, link.target, link.frame = candidate.source, target, counters.frames
    link.arc, link.epsilon = candidate.arc, candidate.epsilon
    link.cost = candidate.cost - work.current[candidate.source].cost
    link.acoustic_cost = candidate.cost  # of the target, until `prune` replaces it
    frame.links += 1


@linked
def _breaks_tie(candidate, token, search, lm, current):
    """Return whether a candidate replaces a next token with the same key and cost.

    Ties are broken by arc, cost before the arc, key of the source, closure arc. The last three are the order in
    `token_groups.keep_best`.
    """
    if candidate.arc != token.arc:
        return candidate.arc < token.arc
    cost = _cost_before(current[candidate.source], candidate.epsilon, search)
    other = _cost_before(current[token.source], token.epsilon, search)
    if cost != other:
        return cost < other
    if candidate.source != token.source:
        return keys.precedes(current[candidate.source], current[token.source], lm)
    return candidate.epsilon < token.epsilon


@linked
def _cost_before(source, epsilon, search):
    """Return the cost of a candidate before its arc: the cost of its source plus the cost of the closure arc."""
    cost = source.cost
    if epsilon != keys.NONE:
        closure = search.graph.epsilons[epsilon]
        bonus, _ = boosted(closure.olabel, keys.boost_of(source.key), search)
        cost = cost + search.weights.lm_weight * closure.cost - bonus
    return cost


@linked
def boosted(olabel, state, search):
    """Return the weighted bonus of an output label, and the boosting state after it."""
    graph, weights, num_words = search.graph, search.weights, search.params.num_words
    bonus = np.float32(0.0)
    if olabel == 0 or not weights.boosts:
        return bonus, np.int64(state)
    for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
        word = word_from_end(olabel, n, graph, num_words)
        weight, state = lookup(search.boosting, num_words, state, word, ANY_WEIGHT)
        bonus += weights.boosting_weight * weight
    return bonus, np.int64(state)


# ------------------------------------------------------------------------------------- hash tables


class Table(NamedTuple):
    """A hash table that holds records with keys, with linear probing.

    The frame decides which part of the table is in use, so that few entries touch few cache lines.
    """

    slots: np.ndarray  # [power of 2] SLOT; a slot with another stamp is empty
    entries: np.ndarray
    mask: int  # size of the part in use, minus 1
    stamp: int


@linked
def find_slot(key, context, table, lm):
    """Return the slot of the entry with a key and LM context; if there is none, the empty slot where it belongs."""
    slots, entries, mask = table.slots, table.entries, np.uint64(table.mask)
    at = (keys.hash_of(key, context) >> keys.SLOT_SHIFT) & mask
    while slots[at].stamp == table.stamp and not (
        entries[np.uintp(slots[at].entry)].key == key
        and keys.context_of(entries[np.uintp(slots[at].entry)], lm) == context
    ):
        at = (at + np.uint64(1)) & mask
    return at


@linked
def fill_slot(slots, at, stamp, entry):
    slots[at].stamp, slots[at].entry = stamp, entry


@linked
def fill_table(table, count, lm):
    """Insert the first `count` entries into an empty table."""
    for e in range(count):
        key, context = table.entries[e].key, keys.context_of(table.entries[e], lm)
        fill_slot(table.slots, find_slot(key, context, table, lm), table.stamp, e)


@inlined
def token_table(work):
    return Table(work.token_slots, work.next_tokens, work.frame[0].token_mask, work.stamps[0])


@linked
def widen_token_table(lm, work):
    """Double the part of the table that is in use."""
    work.frame[0].token_mask = 2 * work.frame[0].token_mask + 1
    work.stamps[0] += 1
    fill_table(token_table(work), work.frame[0].tokens, lm)
