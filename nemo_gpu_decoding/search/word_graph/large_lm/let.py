"""One frame with `composition: let`: the search of the small LM's graph, on token groups [LET, III].

A token of this search is a token group of [LET]: all tokens in one graph state, boosting state and last
label, with the cost of the best one. The steps of a frame, the bounds and pruning are those of `frame.py`
without a large LM. In place of back-pointers, links to the nodes of former groups are kept
(`let_nodes.py`): blanks, repeats and arcs without a word link group to group, and do nothing more. Only
where a word is emitted are the LM contexts of a group generated, and the LMs queried for each, so that
the group that the word leads to has the cost of its best context by the large LM.

As with "lazy", arcs with words (and those behind closure arcs with words) come last. They query the LMs if
and only if their cost by the small LM is not above the cutoff that all other arcs have left; so nothing
depends on the order of work.

Different from [LET]: an arc into an expanded group does not expand the group that it comes from; a node
has links of both kinds, and what it leads back to is expanded when somebody asks. A long silence is one
node: a blank that is the only way to a token makes no node of its own.

On hard speech this costs 1.1 to 1.5 times what "lazy" does (`python -m benchmarks strategy=paged_biglm peers=[let]`):
on flat posteriors words are within the beam in every frame, so that groups are expanded soon after they arise. It
expands a third fewer contexts, but queries the LMs as often, and keeps links and nodes besides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH, NORMAL
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph import candidates, keys
from nemo_gpu_decoding.search.word_graph.frame import begin_frame
from nemo_gpu_decoding.search.word_graph.labels import choose_labels, rank_labels
from nemo_gpu_decoding.search.word_graph.large_lm import contexts
from nemo_gpu_decoding.search.word_graph.large_lm.let_groups import (
    expand_closure,
    expand_group,
    expand_with_lm,
    node_of_group,
    offer,
    tighten_cutoff,
)
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import ARENA_FULL, add_link, has_room, new_node
from nemo_gpu_decoding.search.word_graph.prune import choose_tokens


class LetWorkspace(NamedTuple):
    """What the workspace has besides, with `composition: let`."""

    deferred: np.ndarray  # [entries] GROUP_ARC
    cache: np.ndarray  # [power of 2] CACHED_SCORE
    stack: np.ndarray  # [entries] int32, nodes that are being expanded
    context_slots: np.ndarray  # [power of 2] SLOT, of the contexts of a node


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """As `frame.advance`; ARENA_FULL: call `collect`, or make room for nodes, and go on there."""
    for t in range(begin, end):
        status = _expand(log_probs[t], state, search, lm, work)
        if status == keys.DONE:
            status = _prune(log_probs[t], state, search, work)
        if status != keys.DONE:
            return t, status
        counters, frame = state.counters[0], work.frame[0]
        counters.look_ups += frame.look_ups
        counters.query_hits += frame.query_hits
        counters.arc_visits += frame.arc_visits
        counters.groups += counters.tokens
    return end, keys.DONE


@linked
def _expand(row, state, search, lm, work):
    """All candidates that stay below the cutoff, and the tokens that they lead to."""
    frame, status = work.frame[0], keys.DONE
    frame.last_rank = keys.ANY_RANK
    begin_frame(LARGEST, state.counters[0].tokens, search, work)
    contexts.begin_frame(work)
    if search.params.topology != GRAPH:
        status = _offer_blanks_and_repeats(row, state, search, work)
    if status == keys.DONE and not choose_labels(row, search, work):
        status = keys.BAD_FRAME
    if status == keys.DONE and frame.labels > 0:
        status = _expand_groups(row, state, search, lm, work)
    if status == keys.DONE:
        _enter_within_capacity(state, work)
        if frame.tokens == 0:
            status = keys.NO_TOKEN
    return status


@linked
def _offer_blanks_and_repeats(row, state, search, work):
    """Step 1: a blank, or the last label again."""
    blank_id, status = search.params.blank_id, keys.DONE
    if not row[blank_id] <= MOST_LOG_PROB:
        return keys.BAD_FRAME
    blank_cost = candidates.cost_of(row, blank_id, search)
    for i in range(state.counters[0].tokens):
        token = work.current[i]
        cost, key, label, node = token.cost, token.key, keys.label_of(token.key), token.back_pointer
        status = offer(cost + blank_cost, key - label, keys.Origin(keys.BLANK_MOVE, node, keys.NONE), search, work)
        if label > 0 and status == keys.DONE:
            total = cost + candidates.cost_of(row, label - 1, search)
            status = offer(total, key, keys.Origin(keys.REPEAT_MOVE, node, keys.NONE), search, work)
        if status != keys.DONE:
            break
    return status


@linked
def _expand_groups(row, state, search, lm, work):
    """Steps 2 and 3."""
    frame, groups = work.frame[0], work.groups
    status = tighten_cutoff(row, state, search, lm, work)
    rank_labels(row, search, work)
    if frame.labels == 0 or status != keys.DONE:
        return status
    least = candidates.cost_of(row, work.labels[0], search)
    for i in range(state.counters[0].tokens):
        status = expand_closure(i, least, search, work)
        if status != keys.DONE:
            return status
    cheapest = 0
    for g in range(frame.groups):
        if groups[g].cost < groups[cheapest].cost:
            cheapest = g
    for n in range(frame.groups):
        g = cheapest if n == 0 else (n - 1 if n <= cheapest else n)
        status = expand_group(groups[g], g, row, search, work)
        if status != keys.DONE:
            return status
    cutoff = frame.cutoff
    for n in range(frame.deferred):
        status = expand_with_lm(work.lm.deferred[n], row, cutoff, state, search, lm, work)
        if status != keys.DONE:
            break
    return status


# ----------------------------------------------------------------------------------------- pruning


@linked
def _enter_within_capacity(state, work):
    """The tokens that the candidates lead to; if there is no room for all, the cheapest.

    Then the highest rank is looked for with which they fit, until half of the room is used, as in
    `frame.py`.
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
            low = frame.last_rank  # also if there is no token: none ranks so high
    frame.last_rank = low
    _enter(work)


@linked
def _enter(work):
    """Enter the candidates among the tokens of the next frame. `source` of a token counts its candidates."""
    frame, next_tokens, limited = work.frame[0], work.next_tokens, work.frame[0].last_rank != keys.ANY_RANK
    frame.tokens, frame.full = 0, False
    work.stamps[0] += 1
    for c in range(frame.candidates):
        candidate = work.candidates[c]
        candidate.token = keys.NONE
        if candidate.cost > frame.cutoff:
            continue
        if limited and keys.rank_of(candidate.cost, candidate.key, 0) > frame.last_rank:
            continue
        slot = candidates.find_slot(candidate.key, 0, candidates.token_table(work), None)
        if work.token_slots[slot].stamp == work.stamps[0]:
            candidate.token = work.token_slots[slot].entry
            token = next_tokens[candidate.token]
            token.cost = min(token.cost, candidate.cost)
            token.source += 1
        elif frame.tokens == len(next_tokens):
            frame.full = True
        else:
            candidate.token = np.int32(frame.tokens)
            candidates.fill_slot(work.token_slots, slot, work.stamps[0], candidate.token)
            frame.tokens += 1
            token = next_tokens[candidate.token]
            token.key, token.cost, token.source = candidate.key, candidate.cost, 1
            token.arc, token.back_pointer = candidate.arc, candidate.source
            if 2 * frame.tokens > frame.token_mask + 1:
                candidates.widen_token_table(None, work)


@linked
def _prune(row, state, search, work):
    """What survives becomes work.current, with nodes and the links to them."""
    counters, frame, next_tokens = state.counters[0], work.frame[0], work.next_tokens
    kept, limited = choose_tokens(next_tokens, frame, search.params, work)
    status = _name_sources(search, state, work)
    if status == keys.DONE and not has_room(kept, frame.candidates, 0, state):
        status = ARENA_FULL
    if status != keys.DONE:
        return status
    for t in range(frame.tokens):
        token = next_tokens[t]
        # a blank alone changes nothing: the node before it serves
        if work.renumbered[t] != keys.NONE and not (token.source == 1 and token.arc == keys.BLANK_MOVE):
            token.back_pointer, token.source = new_node(token.key, token.cost - frame.best, state), keys.NONE
    for c in range(frame.candidates):
        candidate = work.candidates[c]
        if candidate.token == keys.NONE or work.renumbered[candidate.token] == keys.NONE:
            continue
        token = next_tokens[candidate.token]
        if token.source == keys.NONE:
            label = np.int64(search.params.blank_id)
            if candidate.arc >= 0:
                label = np.int64(search.graph.arcs[candidate.arc].ilabel)
            elif candidate.arc == keys.REPEAT_MOVE:
                label = keys.label_of(token.key) - 1
            cost, log_prob = candidate.cost - token.cost, row[label]
            add_link(token.back_pointer, candidate.source, candidate.arc, candidate.epsilon, cost, log_prob, state)
    for t in range(frame.tokens):
        index = work.renumbered[t]
        if index != keys.NONE:
            work.current[index] = next_tokens[t]
            work.current[index].cost -= frame.best
    counters.limited += limited or frame.last_rank != keys.ANY_RANK
    counters.tokens = kept
    counters.cost += np.float64(frame.best)
    counters.frames += 1
    return keys.DONE


@linked
def _name_sources(search, state, work):
    """The nodes of groups that candidates come from, before those of the next frame: links lead back."""
    for c in range(work.frame[0].candidates):
        candidate = work.candidates[c]
        if candidate.source >= 0 or candidate.token == keys.NONE or work.renumbered[candidate.token] == keys.NONE:
            continue
        closed = np.int64(keys.NONE)
        if search.params.topology == NORMAL:
            closed = np.int64(search.graph.arcs[candidate.arc].ilabel) + 1
        status, node, epsilon, _ = node_of_group(work.groups[~candidate.source], closed, state, work)
        if status != keys.DONE:
            return status
        candidate.source, candidate.epsilon = node, epsilon
    return keys.DONE
