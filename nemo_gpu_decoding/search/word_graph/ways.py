"""Ways from one frame into the next: what they cost, and which of several to one key stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.lookup import ANY_WEIGHT, lookup
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.tokens import ANY_RANK, NONE, boost_of, find_slot, rank_of

# What a frame may end with
DONE, BAD_FRAME, NO_TOKEN, RECORDS_FULL, LINKS_FULL = range(5)


class SearchParams(NamedTuple):
    """Options of a batch."""

    blank_id: int
    topology: int  # see `graph/topology.py`
    beam: np.float32
    max_active: int
    acoustic_scale: np.float32
    keeps_links: bool
    lattice_beam: np.float32
    num_words: int  # output labels of words; from there on, word-sequence labels


class StreamParams(NamedTuple):
    """Weights of an utterance, and the bounds that follow from them."""

    lm_weight: np.float32
    least_cost: np.float32  # no epsilon record and arc together cost less; weighted, <= 0
    boosting_weight: np.float32
    boosts: bool
    most_bonus: np.float32  # no word gets a larger one; weighted


class Search(NamedTuple):
    """Both, as compiled code takes them."""

    blank_id: int
    topology: int
    beam: np.float32
    max_active: int
    acoustic_scale: np.float32
    keeps_links: bool
    lattice_beam: np.float32
    num_words: int
    lm_weight: np.float32
    least_cost: np.float32
    boosting_weight: np.float32
    boosts: bool
    most_bonus: np.float32


@inlined
def cost_of(row, label, search):
    return -(search.acoustic_scale * row[label])


@inlined
def least_total(cost, arc_cost, acoustic_cost, search):
    """No arc that costs so much leads to less, whatever its word; summed as the true cost is."""
    return cost + search.lm_weight * arc_cost - search.most_bonus + acoustic_cost


@inlined
def lower_cutoff(total, front, search):
    if total < front.best:
        front.best = total
        front.cutoff = total + search.beam


@inlined
def offer(total, key, source, arc, epsilon, search, space):
    """Note a way into the next frame if it is not above the cutoff; there must be room for it."""
    front = space.front[0]
    if total <= front.cutoff:
        lower_cutoff(total, front, search)
        candidate = space.candidates[front.candidates]
        candidate.key, candidate.cost, candidate.source = key, total, source
        candidate.arc, candidate.epsilon = arc, epsilon
        front.candidates += 1


@no_refcount
def recombine(progress, links, search, graph, boosting, space):
    """Enter the candidates among the tokens of the next frame; of equal keys the better one stays."""
    front, following = space.front[0], space.following
    limited = front.last != ANY_RANK
    for c in range(front.candidates):
        candidate = space.candidates[c]
        if candidate.cost > front.cutoff:
            continue  # which has become lower since
        if limited and rank_of(candidate.cost, candidate.key) > front.last:
            continue
        slot = find_slot(space.token_slots, following, space.stamps[0], candidate.key)
        if space.token_slots[slot].stamp == space.stamps[0]:
            t = space.token_slots[slot].entry
            replaces = candidate.cost < following[t].cost or (
                candidate.cost == following[t].cost
                and _breaks_tie(candidate, following[t], search, graph, boosting, space.current)
            )
        elif front.tokens == len(following):
            front.full = True
            continue
        else:
            t = np.int32(front.tokens)
            replaces = True
            space.token_slots[slot].stamp = space.stamps[0]
            space.token_slots[slot].entry = t
            front.tokens += 1
        if replaces:
            token = following[t]
            token.key, token.cost, token.source = candidate.key, candidate.cost, candidate.source
            token.arc, token.epsilon = candidate.arc, candidate.epsilon
        if search.keeps_links:
            at = progress.links + front.links
            if at == len(links):
                return LINKS_FULL
            link = links[at]
            link.source, link.target, link.frame = candidate.source, t, progress.frames
            link.arc, link.epsilon = candidate.arc, candidate.epsilon
            link.cost = candidate.cost - space.current[candidate.source].cost
            link.acoustic_cost = candidate.cost
            front.links += 1
    front.candidates = 0
    return DONE


@no_refcount
def _breaks_tie(candidate, token, search, graph, boosting, current):
    """Of two ways to one key at the same cost, whether the candidate is the better one.

    By arc, cost before it, key of the source, epsilon record. The latter three are the
    order of a group's members (`groups.py`): it does not matter which ways have met in a group before.
    """
    if candidate.arc != token.arc:
        return candidate.arc < token.arc
    own = cost_before(candidate.source, candidate.epsilon, search, graph, boosting, current)
    other = cost_before(token.source, token.epsilon, search, graph, boosting, current)
    if own != other:
        return own < other
    if candidate.source != token.source:
        return current[candidate.source].key < current[token.source].key
    return candidate.epsilon < token.epsilon


@no_refcount
def cost_before(source, epsilon, search, graph, boosting, current):
    """Cost of a way before its arc: that of its source, and of an epsilon record."""
    cost = current[source].cost
    if epsilon == NONE:
        return cost
    record = graph.epsilons[epsilon]
    bonus, _ = boosted(record.word, boost_of(current[source].key), search, graph, boosting)
    return cost + search.lm_weight * record.cost - bonus


@no_refcount
def boosted(word, state, search, graph, boosting):
    """Bonus of a word label, weighted, and the boosting state after it."""
    bonus = np.float32(0.0)
    if word == 0 or not search.boosts:
        return bonus, np.int64(state)
    depth = 0  # a chain of words is compounded from the left: down to its first word, then up again
    first = word
    while first >= search.num_words:
        first = graph.compounds[first - search.num_words, 0]
        depth += 1
    weight, state = lookup(boosting, search.num_words, state, first, ANY_WEIGHT)
    bonus += search.boosting_weight * weight
    for level in range(depth - 1, -1, -1):
        compound = word
        for _ in range(level):
            compound = graph.compounds[compound - search.num_words, 0]
        second = graph.compounds[compound - search.num_words, 1]
        weight, state = lookup(boosting, search.num_words, state, second, ANY_WEIGHT)
        bonus += search.boosting_weight * weight
    return bonus, np.int64(state)
