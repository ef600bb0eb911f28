"""Streams of composition "let": garbage collection of nodes, and conversion of nodes to tokens for results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.search.word_graph import records
from nemo_gpu_decoding.search.word_graph.committed import Committed
from nemo_gpu_decoding.search.word_graph.keys import DONE, NONE, state_of
from nemo_gpu_decoding.search.word_graph.large_lm.let_lattice import LatticeLinks, is_open, mark_live, more_links
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import (
    LET_COUNTERS,
    NODE,
    NODE_CONTEXT,
    NODE_LINK,
    NodeArrays,
    expand,
)
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import grown
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels

LET_NODES = 8192  # first capacity for nodes, links, contexts and back-pointers


@dataclass(frozen=True, eq=False)
class LetStream:
    """One utterance after some frames, with `composition: let`. Arrays are as in `NodeArrays`."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN; `back_pointer` is a node
    arrays: NodeArrays
    committed: Committed | None = None  # as in `StreamState`
    lattice: LatticeLinks | None = None  # of the dropped nodes; None: the search keeps no lattice


def new_let_stream(models: StreamModels) -> LetStream:
    """A stream before its first frame: one token, whose node has one context, the start states of the LMs."""
    assert models.lm_scorer is not None
    tokens, counters = np.zeros(1, records.TOKEN), np.zeros(1, LET_COUNTERS)
    tokens["key"] = models.first_key
    for name in ("tokens", "nodes", "contexts"):
        counters[name] = 1
    arrays = _node_arrays(counters, (LET_NODES,) * 4)
    arrays.nodes[0] = (models.first_key, 0, 0, NONE, 0, 1)
    arrays.contexts[0] = (models.lm_scorer.lms.start, 0, NONE, 0, 0, NONE, 0)
    lattice = LatticeLinks.nothing() if models.params.keeps_links else None
    return LetStream(models, tokens, arrays, Committed.nothing(models), lattice)


def _node_arrays(counters: np.ndarray, sizes: Sequence[int]) -> NodeArrays:
    kinds = (records.BACK_POINTER, NODE_LINK, NODE, NODE_CONTEXT)
    return NodeArrays(counters, *(np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)))


def collected(stream: LetStream, work: records.Workspace, *, more: bool = False) -> LetStream:
    """Collect the nodes of a stream: copy all live nodes to new arrays, which are at most half full.

    The tokens get new node numbers in place. With a lattice, the links to expanded nodes are listed first.

    Args:
        more: make the new arrays at least twice as large as the old ones.
    """
    arrays, lattice, models = stream.arrays, stream.lattice, stream.models
    if lattice is not None:
        arrays, lattice = more_links(arrays, stream.tokens, lattice, (models.search, models.lm_scorer), work)
    new = _node_arrays(arrays.counters.copy(), [len(array) for array in arrays[1:]])
    nodes, past = (np.zeros(int(arrays.counters[name][0]), np.int32) for name in ("nodes", "back_pointers"))
    collect(stream.tokens, arrays, new, nodes, past, lattice is not None)
    used = [int(new.counters[name][0]) for name in ("back_pointers", "links", "nodes", "contexts")]
    kept = [grown(array, n) if more or 4 * n > len(array) else array for array, n in zip(new[1:], used, strict=True)]
    return replace(stream, arrays=NodeArrays(new.counters, *kept), lattice=lattice)


@no_refcount
def collect(tokens, state, new, numbers, past, keeps_links):
    """Copy the live nodes to `new`, without the links of expanded nodes.

    Args:
        tokens: [n] TOKEN; `back_pointer` gets the new number of its node.
        numbers: [nodes] int32, zeros on entry; new numbers of the nodes on return.
        past: [back-pointers] int32, zeros on entry; new numbers of the back-pointers on return.
        keeps_links: keep the links of nodes within a frame, and the nodes before them.
    """
    old, fresh = state.counters[0], new.counters[0]
    mark_live(tokens, state, numbers, keeps_links)
    fresh.nodes = fresh.links = fresh.contexts = 0
    for n in range(old.nodes):
        if numbers[n] == 1:
            _copy_node(n, state, new, numbers, past, keeps_links)
            numbers[n] = fresh.nodes
            fresh.nodes += 1
    _collect_back_pointers(state, new, past)
    for i in range(len(tokens)):
        tokens[i].back_pointer = numbers[tokens[i].back_pointer]


@linked
def _copy_node(n, state, new, numbers, past, keeps_links):
    fresh, node = new.counters[0], state.nodes[n]
    copy = new.nodes[fresh.nodes]
    new.nodes[fresh.nodes] = node
    copy.newest = NONE
    if node.begin != NONE:
        copy.begin = fresh.contexts
        for c in range(node.begin, node.begin + node.count):
            new.contexts[fresh.contexts] = state.contexts[c]
            fresh.contexts += 1
            if state.contexts[c].back_pointer != NONE:
                past[state.contexts[c].back_pointer] = 1
    at = node.newest if is_open(n, state, keeps_links) else NONE
    while at != NONE:
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
    """Undo expansions with contexts beyond the counters, from a failed search or from the listing of a result."""
    known = state.counters[0].contexts
    for n in range(state.counters[0].nodes):
        if state.nodes[n].begin >= known:
            state.nodes[n].begin = NONE


@compiled
def live_pasts(tokens, state):
    """[n] int32: the newest back-pointer, or NONE, of every context of the expanded live nodes."""
    marks, count = np.zeros(state.counters[0].nodes, np.int32), 0
    mark_live(tokens, state, marks, False)
    pasts = np.empty(state.counters[0].contexts, np.int32)
    for n in range(len(marks)):
        node = state.nodes[n]
        for c in range(node.begin, node.begin + node.count if marks[n] == 1 and node.begin != NONE else node.begin):
            pasts[count] = state.contexts[c].back_pointer
            count += 1
    return pasts[:count]


@compiled
def list_ends(tokens, state, lists_all, models, work):
    """Expand the best token and the tokens that may end, or all tokens, and list their contexts.

    Returns:
        a status of `expand`; [n] LM_TOKEN, one for each context, grouped by token; `source` is the number of the
        context.
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
                token.probability, token.source = context.probability, c
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
