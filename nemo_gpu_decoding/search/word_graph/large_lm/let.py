"""Search one frame with `composition: let` in the small LM's graph, on token groups [LET, III].

A token of this search is a token group of [LET]: all tokens in one graph state, boosting state and last label, with
the cost of the best of these tokens. The steps of a frame, the bounds and the pruning are as in `frame.py` without a
large LM; `max_active` counts groups. In place of back-pointers, the search keeps links to the nodes of earlier groups
(`let_nodes.py`). Blanks, repeats and arcs without a word only link group to group. For an arc with a word, the search
fills the group before the arc with its LM contexts and queries the LMs for each. So the group after the word has the
cost of its best context by the large LM.

As with "lazy", arcs with words and arcs behind closure arcs with words come last. Such arcs query the LMs if and only
if their cost by the small LM is at most the cutoff after all other arcs. So the results do not depend on the order of
work. The contexts of one group share the bound of the cheapest arc behind closure arcs with words. So with a narrow
beam a few more hypotheses survive than with "lazy".

Differences from [LET]: an arc into an expanded group does not expand the arc's source group. A node has links of both
kinds, and its expansion expands the nodes before it. A blank that is the only way to a token makes no node, so that a
long silence is one node. In noise without words, the search expands all nodes every EXPANSION_INTERVAL frames, so
that memory stays bounded.
"""

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import GRAPH, NORMAL
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.frame import begin_frame, epsilon_closure, expand_groups
from nemo_gpu_decoding.search.word_graph.labels import choose_labels, rank_labels
from nemo_gpu_decoding.search.word_graph.large_lm import contexts, let_groups
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import ARENA_FULL, add_link, expand, has_room, new_node
from nemo_gpu_decoding.search.word_graph.prune import choose_tokens, keep_tokens, label_read, widen_beam

EXPANSION_INTERVAL = 256  # frames between two expansions of all nodes


class LetWorkspace(NamedTuple):
    """The buffers of a workspace for composition "let"."""

    deferred: np.ndarray  # [entries] GROUP_ARC, arcs that need LM queries
    cache: np.ndarray  # [power of 2] CACHED_SCORE
    stack: np.ndarray  # [entries] int32, nodes under expansion
    context_slots: np.ndarray  # [power of 2] SLOT, of the contexts of a node


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """Search like `frame.advance`. At ARENA_FULL, the caller calls `let_engine.collected` and repeats the frame."""
    frame = work.frame[0]
    for t in range(begin, end):
        tokens, frame.status = state.counters[0].tokens, keys.DONE
        if not has_room(4 * tokens, 4 * tokens, 4 * tokens, state):
            frame.status = ARENA_FULL  # before the frame, so that it is not searched twice
        elif state.counters[0].frames % EXPANSION_INTERVAL == 0:
            _expand_nodes(state, search, lm, work)
        frame.beam, is_narrow = search.params.beam, frame.status == keys.DONE
        while is_narrow:
            _expand(log_probs[t], state, search, lm, work)
            is_narrow = frame.status == keys.DONE and widen_beam(search.params, work)
        if frame.status == keys.DONE:
            _prune(log_probs[t], state, search, work)
        if frame.status != keys.DONE:
            return t, frame.status
        contexts.count_work(state.counters[0], frame)
    return end, keys.DONE


@linked
def _expand_nodes(state, search, lm, work):
    """Expand the nodes of all tokens, so that nodes before them can be dropped in a long stretch without words."""
    for i in range(state.counters[0].tokens):
        work.frame[0].status = expand(work.current[i].back_pointer, state, search, lm, work)
        if work.frame[0].status != keys.DONE:
            break


@linked
def _expand(row, state, search, lm, work):
    """Offer the candidates of a frame, and recombine them into tokens of the next frame."""
    frame = work.frame[0]
    frame.last_rank = keys.ANY_RANK
    begin_frame(LARGEST, state.counters[0].tokens, work)
    contexts.begin_frame(work)
    if search.params.topology != GRAPH:
        _offer_blanks_and_repeats(row, state, search, work)
    if frame.status == keys.DONE and not choose_labels(row, search, work):
        frame.status = keys.BAD_FRAME
    if frame.status == keys.DONE and frame.labels > 0:
        _expand_groups(row, state, search, lm, work)
    if frame.status == keys.DONE:
        _enter_within_capacity(state, work)
        if frame.tokens == 0:
            frame.status = keys.NO_TOKEN


@linked
def _offer_blanks_and_repeats(row, state, search, work):
    """Step 1: take a blank, or repeat the last label."""
    blank_id = search.params.blank_id
    if not row[blank_id] <= MOST_LOG_PROB:
        work.frame[0].status = keys.BAD_FRAME
        return
    blank_cost = candidates.cost_of(row, blank_id, search)
    for i in range(state.counters[0].tokens):
        token = work.current[np.uintp(i)]
        cost, key, label, node = token.cost, token.key, keys.label_of(token.key), token.back_pointer
        let_groups.offer(cost + blank_cost, key - label, keys.Origin(keys.BLANK_MOVE, node, keys.NONE), search, work)
        if label > 0:
            total = cost + candidates.cost_of(row, np.uintp(label - 1), search)
            let_groups.offer(total, key, keys.Origin(keys.REPEAT_MOVE, node, keys.NONE), search, work)


@linked
def _expand_groups(row, state, search, lm, work):
    """Take steps 2 and 3: the epsilon closure, then the arcs; arcs that need LM queries come last."""
    frame, groups = work.frame[0], work.groups
    let_groups.tighten_cutoff(row, state, search, lm, work)
    rank_labels(row, search, work)
    if frame.labels == 0 or frame.status != keys.DONE:
        return
    epsilon_closure(row, state.counters[0].tokens, search, lm, work)
    for g in range(frame.groups):
        groups[g].node, groups[g].least_step = keys.NONE, LARGEST
    expand_groups(let_groups.expand_arc, groups, row, state, search, lm, work)
    cutoff, n = frame.cutoff, 0
    while n < frame.deferred and frame.status == keys.DONE:
        let_groups.expand_with_lm(row, work.lm.deferred[n], cutoff, state, search, lm, work)
        n += 1


# ----------------------------------------------------------------------------------------- pruning


@linked
def _enter_within_capacity(state, work):
    """Enter the tokens of the candidates, or only the cheapest tokens if the capacity is too small.

    If so, a bisection searches for the rank (cost) up to which they fit. As in `frame.py`, the bisection stops once
    the tokens fill half of the capacity.
    """
    frame = work.frame[0]
    _enter(work)
    if not frame.full:
        return
    state.counters[0].overflowed += 1
    low, high = keys.rank_of(frame.best, 0, 0), keys.rank_of(frame.cutoff, 0, 0) + (1 << keys.HASH_BITS)
    while high - low > 1:
        frame.last_rank = low + (high - low) // 2
        _enter(work)
        if frame.full:
            high = frame.last_rank
        elif 2 * frame.tokens >= len(work.next_tokens):
            return
        else:
            low = frame.last_rank  # also if there is no token: no candidate has such a rank
    frame.last_rank = low
    _enter(work)


@linked
def _enter(work):
    """Recombine the candidates into tokens of the next frame. `source` of a token counts its candidates."""
    frame, next_tokens, limited = work.frame[0], work.next_tokens, work.frame[0].last_rank != keys.ANY_RANK
    frame.tokens, frame.full = 0, False
    work.stamps[0] += 1
    for c in range(frame.candidates):
        candidate = work.candidates[np.uintp(c)]
        candidate.token = keys.NONE
        if candidate.cost > frame.cutoff:
            continue
        if limited and keys.rank_of(candidate.cost, candidate.key, 0) > frame.last_rank:
            continue
        slot = candidates.find_slot(candidate.key, 0, candidates.token_table(work), None)
        if work.token_slots[slot].stamp == work.stamps[0]:
            candidate.token = work.token_slots[slot].entry
            token = next_tokens[np.uintp(candidate.token)]
            token.cost = min(token.cost, candidate.cost)
            token.source += 1
        elif frame.tokens == len(next_tokens):
            frame.full = True
        else:
            candidate.token = np.int32(frame.tokens)
            candidates.fill_slot(work.token_slots, slot, work.stamps[0], candidate.token)
            frame.tokens += 1
            token = next_tokens[np.uintp(candidate.token)]
            token.key, token.cost, token.source = candidate.key, candidate.cost, 1
            token.arc, token.back_pointer = candidate.arc, candidate.source
            if 2 * frame.tokens > frame.token_mask + 1:
                candidates.widen_token_table(None, work)


@linked
def _prune(row, state, search, work):
    """Copy the tokens that survive pruning to work.current, and add their nodes with links."""
    counters, frame, next_tokens = state.counters[0], work.frame[0], work.next_tokens
    kept, limited = choose_tokens(next_tokens, frame, search.params, work)
    _name_sources(search, state, work)
    if frame.status == keys.DONE and not has_room(kept, frame.candidates, 0, state):
        frame.status = ARENA_FULL
    if frame.status != keys.DONE:
        return
    for t in range(frame.tokens):
        token = next_tokens[t]
        # If a blank is the only way to a token, the token keeps the node before the blank. With a lattice it gets
        # a node of its own, because a lattice has a node in every frame.
        is_same = token.source == 1 and token.arc == keys.BLANK_MOVE and not search.params.keeps_links
        if work.renumbered[t] != keys.NONE and not is_same:
            token.back_pointer, token.source = new_node(token.key, token.cost - frame.best, state), keys.NONE
    for c in range(frame.candidates):
        candidate = work.candidates[np.uintp(c)]
        if candidate.token == keys.NONE or work.renumbered[candidate.token] == keys.NONE:
            continue
        token = next_tokens[candidate.token]
        if token.source == keys.NONE:
            cost, log_prob = candidate.cost - token.cost, row[label_read(candidate.arc, token.key, search)]
            add_link(token.back_pointer, candidate.source, candidate.arc, candidate.epsilon, cost, log_prob, state)
    keep_tokens(kept, limited, counters, work)


@linked
def _name_sources(search, state, work):
    """Add the nodes of the candidates' source groups before the nodes of the next frame, because links lead back."""
    for c in range(work.frame[0].candidates):
        candidate = work.candidates[np.uintp(c)]
        if candidate.source >= 0 or candidate.token == keys.NONE or work.renumbered[candidate.token] == keys.NONE:
            continue
        closed = np.int64(keys.NONE)
        if search.params.topology == NORMAL:
            closed = np.int64(search.graph.arcs[candidate.arc].ilabel) + 1
        node, epsilon, _ = let_groups.node_of_group(work.groups[~candidate.source], closed, state, work)
        if node == keys.NONE:
            break
        candidate.source, candidate.epsilon = node, epsilon
