"""Run the compiled search of `let.py` on the CPU, with buffers, threads and streams.

Streams drop nodes that no token needs, and convert nodes to tokens for results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.search.word_graph import cpu_engine, keys, records, stream_state
from nemo_gpu_decoding.search.word_graph.best_path import all_ends
from nemo_gpu_decoding.search.word_graph.keys import DONE, NONE, state_of
from nemo_gpu_decoding.search.word_graph.large_lm import let, let_lattice, let_nodes
from nemo_gpu_decoding.search.word_graph.large_lm.contexts import GROUP_ARC, LM_FRAME_STATE
from nemo_gpu_decoding.search.word_graph.large_lm.let_groups import LET_CANDIDATE, LET_GROUP
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmScorer
from nemo_gpu_decoding.search.word_graph.lattice.links import grown

LET_NODES = 8192  # first capacity for nodes, links, contexts and back-pointers


@dataclass(frozen=True, eq=False)
class LetStream:
    """The state of an utterance after some frames, with `composition: let`. Arrays are as in `NodeArrays`."""

    models: stream_state.StreamModels
    tokens: np.ndarray  # [n] TOKEN; `back_pointer` is a node
    arrays: let_nodes.NodeArrays
    committed: stream_state.Committed | None = None  # as in `WordGraphStream`
    lattice: let_lattice.LatticeLinks | None = None  # of the dropped nodes; None: the search keeps no lattice


def new_let_stream(models: stream_state.StreamModels) -> LetStream:
    """Return a stream before its first frame: one token, whose node has one context, the start states of the LMs."""
    assert models.lm_scorer is not None
    tokens, counters = np.zeros(1, records.TOKEN), np.zeros(1, let_nodes.LET_COUNTERS)
    tokens["key"] = models.first_key
    for name in ("tokens", "nodes", "contexts"):
        counters[name] = 1
    arrays = _node_arrays(counters, (LET_NODES,) * 4)
    arrays.nodes[0] = (models.first_key, 0, 0, NONE, 0, 1)
    arrays.contexts[0] = (models.lm_scorer.lms.start, 0, NONE, 0, 0, NONE, 0)
    lattice = let_lattice.LatticeLinks((), np.ones(1, np.int32)) if models.params.keeps_links else None
    return LetStream(models, tokens, arrays, stream_state.Committed.nothing(models), lattice)


def _node_arrays(counters: np.ndarray, sizes: Sequence[int]) -> let_nodes.NodeArrays:
    kinds = (records.BACK_POINTER, let_nodes.NODE_LINK, let_nodes.NODE, let_nodes.NODE_CONTEXT)
    return let_nodes.NodeArrays(counters, *(np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)))


def collected(stream: LetStream, work: records.Workspace, *, more: bool = False) -> LetStream:
    """Collect the nodes of a stream: copy all live nodes to new arrays, which are at most half full.

    The tokens get new node numbers in place. With a lattice, the links to expanded nodes are listed first.

    Args:
        more: make the new arrays at least twice as large as the old arrays.
    """
    arrays, lattice, models = stream.arrays, stream.lattice, stream.models
    if lattice is not None:
        arrays, lattice = let_lattice.more_links(
            arrays, stream.tokens, lattice, (models.search, models.lm_scorer), work
        )
    new = _node_arrays(arrays.counters.copy(), [len(array) for array in arrays[1:]])
    collect(stream.tokens, arrays, new, np.zeros(int(arrays.counters["nodes"][0]), np.int32), lattice is not None)
    contexts, count = new.contexts[: int(new.counters["contexts"][0])], int(arrays.counters["back_pointers"][0])
    new.counters["back_pointers"] = stream_state.compact_back_pointers(
        arrays.back_pointers, count, contexts, new.back_pointers
    )
    used = [int(new.counters[name][0]) for name in ("back_pointers", "links", "nodes", "contexts")]
    kept = [grown(array, n) if more or 4 * n > len(array) else array for array, n in zip(new[1:], used, strict=True)]
    return replace(stream, arrays=let_nodes.NodeArrays(new.counters, *kept), lattice=lattice)


@no_refcount
def collect(tokens, state, new, numbers, keeps_links):
    """Copy the live nodes and their contexts to `new`, without the links of expanded nodes.

    Args:
        tokens: [n] TOKEN; `back_pointer` gets the new number of its node.
        numbers: [nodes] int32, zeros on entry; new numbers of the nodes on return.
        keeps_links: keep the links of nodes within a frame, and the nodes before them.
    """
    old, fresh = state.counters[0], new.counters[0]
    let_lattice.mark_live(tokens, state, numbers, keeps_links)
    fresh.nodes = fresh.links = fresh.contexts = 0
    for n in range(old.nodes):
        if numbers[n] == 1:
            _copy_node(n, state, new, numbers, keeps_links)
            numbers[n] = fresh.nodes
            fresh.nodes += 1
    for i in range(len(tokens)):
        tokens[i].back_pointer = numbers[tokens[i].back_pointer]


@linked
def _copy_node(n, state, new, numbers, keeps_links):
    fresh, node = new.counters[0], state.nodes[n]
    copy = new.nodes[fresh.nodes]
    new.nodes[fresh.nodes] = node
    copy.newest = NONE
    if node.begin != NONE:
        copy.begin = fresh.contexts
        for c in range(node.begin, node.begin + node.count):
            new.contexts[fresh.contexts] = state.contexts[c]
            fresh.contexts += 1
    at = node.newest if let_lattice.is_open(n, state, keeps_links) else NONE
    while at != NONE:
        link = new.links[fresh.links]
        new.links[fresh.links] = state.links[at]
        link.node, link.next = numbers[state.links[at].node], copy.newest
        copy.newest = fresh.links
        fresh.links += 1
        at = state.links[at].next


def without(stream: LetStream, committed: stream_state.Committed, root: int) -> LetStream:
    """Return the stream without the back-pointers before `root`; `collect` then drops them."""
    stream.arrays.back_pointers["previous"][root] = NONE
    return replace(stream, committed=committed)


# ----------------------------------------------------------------------------------------- results


@compiled
def forget_contexts(state):
    """Undo expansions by a failed search or by listing a result; their contexts are beyond the counters."""
    known = state.counters[0].contexts
    for n in range(state.counters[0].nodes):
        if state.nodes[n].begin >= known:
            state.nodes[n].begin = NONE


@compiled
def live_pasts(tokens, state):
    """Return [n] int32: the newest back-pointer, or NONE, of every context of the expanded live nodes."""
    marks, count = np.zeros(state.counters[0].nodes, np.int32), 0
    let_lattice.mark_live(tokens, state, marks, False)
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
            status = let_nodes.expand(tokens[i].back_pointer, state, search, lm, work)
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


# -------------------------------------------------------------------------------------- the engine

NO_LINKS = np.empty(0, records.LINK)


def read_let_chunk(
    stream: LetStream, log_probs: np.ndarray, length: int, b: int, work: records.Workspace
) -> tuple[LetStream, records.Workspace]:
    """Decode like `read_chunk`. After an error, the caller calls `forget_contexts` on the arrays of `stream`."""
    models, count, stopped = stream.models, len(stream.tokens), -1
    if length == 0:
        return stream, work
    work.current[:count].view(np.uint8)[:] = stream.tokens.view(np.uint8)  # records are copied field by field
    stream = replace(stream, arrays=stream.arrays._replace(counters=stream.arrays.counters.copy()))
    frame, state = 0, stream.arrays
    while frame < length:
        frame, status = let.advance(log_probs[b], frame, length, state, models.search, models.lm_scorer, work)
        tokens = work.current[: int(state.counters["tokens"][0])]
        if status == let_nodes.ARENA_FULL:
            stream = collected(replace(stream, tokens=tokens), work, more=frame == stopped)
            state, stopped = stream.arrays, frame
        elif status == keys.GROUPS_FULL:
            work = cpu_engine.with_more_groups(work, new_let_workspace, models.params.max_active)
        elif status != keys.DONE:
            stream_state.raise_stop(log_probs, b, frame, status)
    tokens = work.current[: int(state.counters["tokens"][0])].view(np.uint8).copy().view(records.TOKEN)
    return replace(stream, tokens=tokens), work


def listed_stream(
    stream: LetStream, work: records.Workspace, *, final: bool, n_best: int = 1
) -> tuple[LetStream, stream_state.WordGraphStream, records.Workspace]:
    """Convert a stream to the form of `CPUEngine`: the LM contexts of the best token and of all tokens that may end.

    With `n_best` > 1 or `final`, the result includes the links of a lattice if the search keeps links.

    Returns:
        the stream, whose nodes may have new numbers; its listed form, valid until the next chunk; the workspace.
    """
    models, has_links = stream.models, stream.models.params.keeps_links and (final or n_best > 1)
    pasts, lists_all, ends_only, more = None, has_links and not final, final, False
    while True:
        if not final:
            pasts = live_pasts(stream.tokens, stream.arrays)
        state = stream.arrays._replace(counters=stream.arrays.counters.copy())
        status, listed = list_ends(stream.tokens, state, lists_all, _scorers(models), work)
        if status == keys.DONE and not (has_links and len(all_ends(listed, ends_only, *_scorers(models))) == 0):
            break
        forget_contexts(stream.arrays)
        if status == keys.GROUPS_FULL:
            work = cpu_engine.with_more_groups(work, new_let_workspace, models.params.max_active)
        elif status == let_nodes.ARENA_FULL:
            stream, more = collected(replace(stream, tokens=stream.tokens.copy()), work, more=more), True
        else:
            lists_all, ends_only = True, False
    links = NO_LINKS
    if has_links:
        links, listed = _lattice(stream, state, listed, ends_only, work)
    forget_contexts(stream.arrays)
    counters = stream.arrays.counters.view(np.uint8)[-LM_COUNTERS.itemsize :].copy().view(LM_COUNTERS)
    counters["links"] = len(links)
    back_pointers = stream.arrays.back_pointers
    read = stream_state.WordGraphStream(models, listed, back_pointers, links, counters, pasts, stream.committed)
    return stream, read, work


def _scorers(models: stream_state.StreamModels) -> tuple[records.Search, LmScorer]:
    assert models.lm_scorer is not None
    return models.search, models.lm_scorer


def _lattice(
    stream: LetStream, state: let_nodes.NodeArrays, listed: np.ndarray, ends_only: bool, work: records.Workspace
) -> tuple[np.ndarray, np.ndarray]:
    """Return `links_to_ends` of a stream with expanded nodes. With `ends_only`, paths lead to final states."""
    assert stream.lattice is not None
    scorers = _scorers(stream.models)
    ends, costs = all_ends(listed, ends_only, *scorers), np.full(len(listed), np.inf)
    np.minimum.at(costs, ends["node"], ends["cost"])
    costs += listed["cost"]
    return let_lattice.links_to_ends(state, listed, costs - costs.min(), stream.lattice, scorers, work)


def new_let_workspace(max_active: int, columns: int, *_: bool, entries: int | None = None) -> records.Workspace:
    """Return buffers for one utterance, like `new_workspace`, whose other options have no effect."""
    work = cpu_engine.new_workspace(max_active, columns, keeps_links=True, entries=entries)
    entries = len(work.groups)
    return work._replace(
        candidates=np.empty(max(cpu_engine.CANDIDATES, 2 * entries), LET_CANDIDATE),
        groups=np.empty(entries, LET_GROUP),
        frame=np.zeros(1, LM_FRAME_STATE),
        lm=let.LetWorkspace(
            deferred=np.empty(entries, GROUP_ARC),
            cache=cpu_engine.query_cache(),
            stack=np.empty(4 * entries, np.int32),
            context_slots=cpu_engine.slots_for(entries),
        ),
    )


class LetEngine(cpu_engine.CPUEngine):
    """An engine that runs `let.py`. The results are streams of LM tokens, like those of `CPUEngine`."""

    new_stream = staticmethod(new_let_stream)
    read = staticmethod(read_let_chunk)
    without_committed = staticmethod(without)

    @property
    def make_workspace(self) -> Callable[..., records.Workspace]:
        return new_let_workspace

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        try:
            super().push(log_probs, lengths, deferred=deferred)
        except BaseException:
            for stream in self._streams:
                forget_contexts(stream.arrays)
            raise

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[stream_state.WordGraphStream]:
        listed = []

        def read(row: int, work: records.Workspace) -> records.Workspace:
            self._streams[row], state, work = listed_stream(self._streams[row], work, final=final, n_best=n_best)
            listed.append(state)
            return work

        self._in_turn(rows, read)
        return listed
