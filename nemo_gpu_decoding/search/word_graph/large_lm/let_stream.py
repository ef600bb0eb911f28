"""Streams of composition "let": which nodes are kept of the frames that are read, and what they are listed as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.search.word_graph import records
from nemo_gpu_decoding.search.word_graph.committed import Committed
from nemo_gpu_decoding.search.word_graph.keys import DONE, NONE, state_of
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import (
    CLOSURE_WORD,
    LET_COUNTERS,
    NODE,
    NODE_CONTEXT,
    NODE_LINK,
    NodeArrays,
    expand,
)
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import grown
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels

LET_NODES = 4096  # first capacity for nodes, links, contexts and back-pointers
LIVE, IN_LATTICE = 1, 2  # marks of nodes that are kept
SLACK = 1e-2  # of the lattice beam: relative costs are sums of float32; `lattice_of` prunes exactly


@dataclass(frozen=True, eq=False)
class LetStream:
    """One utterance after some frames, with `composition: let`. Arrays are as in `NodeArrays`."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN; `back_pointer` is a node
    arrays: NodeArrays
    committed: Committed | None = None  # as in `StreamState`


class Marks(NamedTuple):
    """What `collect` knows of the old nodes."""

    nodes: np.ndarray  # [nodes] int32: 0, LIVE or IN_LATTICE; then their new numbers
    back_pointers: np.ndarray  # [back-pointers] int32: 0 or 1; then their new numbers
    extra: np.ndarray  # [nodes] float64: a path through the node costs at least so much more than the best; or inf


def new_let_stream(models: StreamModels) -> LetStream:
    """Nothing read: one token, whose node has one context, the LMs' start."""
    assert models.lm_scorer is not None
    tokens, counters = np.zeros(1, records.TOKEN), np.zeros(1, LET_COUNTERS)
    tokens["key"] = models.first_key
    for name in ("tokens", "nodes", "contexts"):
        counters[name] = 1
    arrays = _node_arrays(counters, (LET_NODES,) * 4)
    arrays.nodes[0] = (models.first_key, 0, 0, NONE, 0, 1)
    arrays.contexts[0] = (models.lm_scorer.lms.start, 0, NONE, 0, 0, NONE)
    return LetStream(models, tokens, arrays, Committed.nothing(models))


def _node_arrays(counters: np.ndarray, sizes: Sequence[int]) -> NodeArrays:
    kinds = (records.BACK_POINTER, NODE_LINK, NODE, NODE_CONTEXT)
    return NodeArrays(counters, *(np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)))


def collected(
    arrays: NodeArrays, tokens: np.ndarray, params: records.SearchParams, *, more: bool = False
) -> NodeArrays:
    """New arrays with all that the tokens lead to, at most half full; `more`: twice as large as the old ones, or more.

    The tokens get new numbers. With a lattice, nodes and links that may be in it are kept too.
    """
    new = _node_arrays(arrays.counters.copy(), [len(array) for array in arrays[1:]])
    counts = [int(arrays.counters[name][0]) for name in ("back_pointers", "links", "nodes", "contexts")]
    marks = Marks(np.zeros(counts[2], np.int32), np.zeros(counts[0], np.int32), np.full(counts[2], np.inf))
    collect(tokens, arrays, new, marks, float(params.lattice_beam) + SLACK if params.keeps_links else -1.0)
    used = [int(new.counters[name][0]) for name in ("back_pointers", "links", "nodes", "contexts")]
    kept = [grown(array, n) if more or 4 * n > len(array) else array for array, n in zip(new[1:], used, strict=True)]
    return NodeArrays(new.counters, *kept)


@no_refcount
def collect(tokens, state, new, marks, beam):
    """Copy to `new` what the tokens lead to; the tokens get new numbers. Links of expanded nodes are dropped.

    Args:
        tokens: [n] TOKEN.
        marks: zeros, and `extra` inf.
        beam: >= 0: keep the nodes and links that may be on a path within this beam of the best one.
    """
    old, fresh, numbers = state.counters[0], new.counters[0], marks.nodes
    _mark_live(tokens, state, numbers)
    if beam >= 0:
        _mark_lattice(tokens, state, marks, beam)
    fresh.nodes = fresh.links = fresh.contexts = 0
    for n in range(old.nodes):
        if numbers[n] > 0:
            _copy_node(n, state, new, marks, beam)
            numbers[n] = fresh.nodes
            fresh.nodes += 1
    _collect_back_pointers(state, new, marks.back_pointers)
    for i in range(len(tokens)):
        tokens[i].back_pointer = numbers[tokens[i].back_pointer]


@linked
def _mark_live(tokens, state, numbers):
    """Mark the nodes that the search may still look at: those from the tokens back to expanded ones."""
    nodes, links = state.nodes, state.links
    for i in range(len(tokens)):
        numbers[tokens[i].back_pointer] = LIVE
    for n in range(state.counters[0].nodes - 1, -1, -1):
        if numbers[n] == LIVE and nodes[n].begin == NONE:
            at = nodes[n].newest
            while at != NONE:
                numbers[links[at].node] = LIVE
                at = links[at].next


@linked
def _mark_lattice(tokens, state, marks, beam):
    """Mark the nodes that may be in the lattice, and set `extra`; each token may turn out to be on the best path.

    As `link_pruning.prune_links`, with the costs of groups. The bound of a word is that of its best context.
    """
    nodes, links, extra = state.nodes, state.links, marks.extra
    for i in range(len(tokens)):
        extra[tokens[i].back_pointer] = 0.0
    for n in range(state.counters[0].nodes - 1, -1, -1):
        if extra[n] > beam:
            continue
        if marks.nodes[n] == 0:
            marks.nodes[n] = IN_LATTICE
        at = nodes[n].newest
        while at != NONE:
            least = extra[n] + _least_extra(links[at])
            if least <= beam:
                extra[links[at].node] = min(extra[links[at].node], least)
            at = links[at].next


@linked
def _least_extra(link):
    """What a path by this link costs at least more than the best way to its node."""
    return np.float64(0.0) if link.arc <= CLOSURE_WORD else np.float64(link.cost)


@linked
def _copy_node(n, state, new, marks, beam):
    fresh, node, numbers = new.counters[0], state.nodes[n], marks.nodes
    copy, is_expanded = new.nodes[fresh.nodes], node.begin != NONE
    new.nodes[fresh.nodes] = node
    copy.newest = NONE
    if is_expanded:
        copy.begin = fresh.contexts
        for c in range(node.begin, node.begin + node.count):
            if numbers[n] == IN_LATTICE and marks.extra[n] + state.contexts[c].cost > beam:
                continue
            new.contexts[fresh.contexts] = state.contexts[c]
            fresh.contexts += 1
            if state.contexts[c].back_pointer != NONE:
                marks.back_pointers[state.contexts[c].back_pointer] = 1
        copy.count = fresh.contexts - copy.begin
    at = node.newest
    while at != NONE:
        if not is_expanded or marks.extra[n] + _least_extra(state.links[at]) <= beam:
            link = new.links[fresh.links]
            new.links[fresh.links] = state.links[at]
            link.node, link.next = numbers[state.links[at].node], copy.newest
            copy.newest = fresh.links
            fresh.links += 1
        at = state.links[at].next


@linked
def _collect_back_pointers(state, new, past):
    old, fresh = state.counters[0], new.counters[0]
    fresh.back_pointers = 0
    for b in range(old.back_pointers - 1, -1, -1):
        previous = state.back_pointers[b].previous
        if past[b] == 1 and previous != NONE:
            past[previous] = 1
    for b in range(old.back_pointers):
        if past[b] == 1:
            copy = new.back_pointers[fresh.back_pointers]
            new.back_pointers[fresh.back_pointers] = state.back_pointers[b]
            if copy.previous != NONE:
                copy.previous = past[copy.previous]
            past[b] = fresh.back_pointers
            fresh.back_pointers += 1
    for c in range(fresh.contexts):
        if new.contexts[c].back_pointer != NONE:
            new.contexts[c].back_pointer = past[new.contexts[c].back_pointer]


def without(stream: LetStream, committed: Committed, root: int) -> LetStream:
    """The stream without the back-pointers before `root`, which `collect` then drops."""
    stream.arrays.back_pointers["previous"][root] = NONE
    return replace(stream, committed=committed)


# ----------------------------------------------------------------------------------------- results


@compiled
def forget_contexts(state):
    """Undo that nodes were filled with contexts beyond the counters, by a search that failed or for a result."""
    known = state.counters[0].contexts
    for n in range(state.counters[0].nodes):
        if state.nodes[n].begin >= known:
            state.nodes[n].begin = NONE


@compiled
def live_pasts(tokens, state):
    """[n] int32: the newest back-pointer of every context that the tokens may go on with, or NONE."""
    marks, count = np.zeros(state.counters[0].nodes, np.int32), 0
    _mark_live(tokens, state, marks)
    pasts = np.empty(state.counters[0].contexts, np.int32)
    for n in range(len(marks)):
        node = state.nodes[n]
        for c in range(node.begin, node.begin + node.count if marks[n] == LIVE and node.begin != NONE else node.begin):
            pasts[count] = state.contexts[c].back_pointer
            count += 1
    return pasts[:count]


@compiled
def list_ends(tokens, state, lists_all, models, work):
    """Expand the best token and those that may end, or all tokens, and list their contexts.

    Returns:
        a status as that of `expand`, and the contexts as [n] LM_TOKEN: those of a token one after the other.
    """
    search, lm = models
    total, least = 0, tokens[0].cost
    for i in range(len(tokens)):
        least = min(least, tokens[i].cost)
    for i in range(len(tokens)):
        if lists_all or tokens[i].cost == least or _may_end(tokens[i], search):
            status = expand(tokens[i].back_pointer, state, search, lm, work)
            if status != DONE:
                return status, np.empty(0, records.LM_TOKEN)
            total += state.nodes[tokens[i].back_pointer].count
    listed = np.zeros(total, records.LM_TOKEN)
    at = 0
    for i in range(len(tokens)):
        if lists_all or tokens[i].cost == least or _may_end(tokens[i], search):
            node = state.nodes[tokens[i].back_pointer]
            for c in range(node.begin, node.begin + node.count):
                token, context = listed[at], state.contexts[c]
                token.key, token.lm, token.cost = tokens[i].key, context.lm, tokens[i].cost + context.cost
                token.back_pointer, token.run = context.back_pointer, context.run
                token.probability = context.probability
                at += 1
    return DONE, listed


@linked
def _may_end(token, search):
    states = search.graph.states
    state = states[state_of(token.key)]
    ends = state.final_cost < np.inf
    for e in range(state.epsilon_begin, state.epsilon_end):
        ends = ends or states[search.graph.epsilons[e].target].final_cost < np.inf
    return ends
