"""Ways from one frame into the next, and which of several to one token stays.

As in `word_graph/ways.py`, for tokens that differ by LM history too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.composition.tokens import (
    fill_slot,
    find_token_slot,
    rank_of,
    widen_token_table,
)
from nemo_gpu_decoding.search.word_graph.tokens import ANY_RANK
from nemo_gpu_decoding.search.word_graph.ways import DONE, LINKS_FULL, cost_before, lower_cutoff

GROUPS_FULL = 100  # besides what a frame of cuda_wfst may end with


class CompositionParams(NamedTuple):
    """Options of composition, for one utterance."""

    correction_weight: np.float32  # lm_weight * large_lm_weight
    lazy: bool
    group_size: int  # histories of a group that take arcs


class Search(NamedTuple):
    """All options and weights of an utterance, as compiled code takes them."""

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
    correction_weight: np.float32
    lazy: bool
    group_size: int


@inlined
def offer(total, key, lm, source, arc, epsilon, search, space):
    """Note a way into the next frame if it is not above the cutoff; there must be room for it.

    A way that ranks too high is not noted, but lowers the cutoff all the same.
    """
    front = space.front[0]
    if total <= front.cutoff:
        lower_cutoff(total, front, search)
        if front.last == ANY_RANK or rank_of(total, key, lm) <= front.last:
            candidate = space.candidates[front.candidates]
            candidate.key, candidate.lm, candidate.cost = key, lm, total
            candidate.source, candidate.arc, candidate.epsilon = source, arc, epsilon
            front.candidates += 1


@no_refcount
def recombine(progress, links, search, graph, boosting, space):
    """Enter the candidates among the tokens of the next frame; of equal ones the better stays."""
    front, following = space.front[0], space.following
    for c in range(front.candidates):
        candidate = space.candidates[c]
        if candidate.cost > front.cutoff:
            continue  # which has become lower since
        slot = find_token_slot(candidate.key, candidate.lm, space)
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
            fill_slot(space.token_slots, slot, space.stamps[0], t)
            front.tokens += 1
        if replaces:
            token = following[t]
            token.key, token.lm, token.cost = candidate.key, candidate.lm, candidate.cost
            token.source, token.arc = candidate.source, candidate.arc
            token.epsilon = candidate.epsilon
            if 2 * front.tokens > front.token_mask + 1:
                widen_token_table(space)
        if search.keeps_links:
            at = progress.links + front.links
            if at == len(links):
                return LINKS_FULL
            link = links[at]
            link.source, link.target, link.frame = candidate.source, t, progress.frames
            link.arc, link.epsilon = candidate.arc, candidate.epsilon
            link.cost = candidate.cost - space.current[candidate.source].cost
            link.acoustic_cost = candidate.cost  # of the whole way; `commit` replaces it
            front.links += 1
    front.candidates = 0
    return DONE


@no_refcount
def _breaks_tie(candidate, token, search, graph, boosting, current):
    """Of two ways to one token at the same cost, whether the candidate is the better one.

    By arc, cost before it, source, epsilon record. The latter three are the order of a history's members
    (`groups.py`): it does not matter which ways have met in a history before.
    """
    if candidate.arc != token.arc:
        return candidate.arc < token.arc
    own = cost_before(candidate.source, candidate.epsilon, search, graph, boosting, current)
    other = cost_before(token.source, token.epsilon, search, graph, boosting, current)
    if own != other:
        return own < other
    if candidate.source != token.source:
        return is_first(current[candidate.source], current[token.source])
    return candidate.epsilon < token.epsilon


@inlined
def is_first(token, other):
    """An order of tokens of a frame that does not depend on where they are stored."""
    if token.key != other.key:
        return token.key < other.key
    return token.lm < other.lm
