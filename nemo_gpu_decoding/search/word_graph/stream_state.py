"""The state of a stream between two chunks, and the models that decode it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.inputs import raise_bad_frame
from nemo_gpu_decoding.search.word_graph import records
from nemo_gpu_decoding.search.word_graph.keys import BAD_FRAME, DONE, NONE, state_of
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import (
    LET_COUNTERS,
    NODE,
    NODE_CONTEXT,
    NODE_LINK,
    NodeArrays,
    expand,
)
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmScorer
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import grown

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.word_graph.committed import Committed


@dataclass(frozen=True, eq=False)
class StreamModels:
    """The models and weights of one utterance."""

    params: records.SearchParams  # of the batch
    weights: records.StreamParams  # of the utterance
    graph: WordGraph
    boosting: BackoffAutomaton
    lm_scorer: LmScorer | None = None  # with a large LM
    pieces: Sequence[str] | None = None  # text of each token, to spell words that the graph reads as <unk>

    @cached_property
    def search(self) -> records.Search:
        """The inputs of compiled code, without the large LM."""
        return records.Search(self.params, self.weights, self.graph.arrays, self.boosting.arrays)

    @property
    def first_key(self) -> int:
        """The key of the first token, see `key_of`."""
        return (self.graph.start << 32) | (self.boosting.start_state << 16)

    @cached_property
    def first(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token of an utterance, and its counters."""
        tokens = np.zeros(1, records.TOKEN if self.lm_scorer is None else records.LM_TOKEN)
        counters = np.zeros(1, records.COUNTERS if self.lm_scorer is None else LM_COUNTERS)
        tokens["key"], tokens["back_pointer"], tokens["source"] = self.first_key, NONE, NONE
        counters["tokens"] = 1
        if self.lm_scorer is not None:
            tokens["lm"] = self.lm_scorer.lms.start
        return tokens, counters

    def new_stream(self, committed: Committed | None = None) -> StreamState:
        """A stream before its first frame: one token in the start states of graph, boosting and LMs."""
        tokens, counters = self.first
        links = np.empty(1024 if self.params.keeps_links else 0, records.LINK)
        live = None if committed is None else tokens["back_pointer"]
        return StreamState(self, tokens, np.empty(2048, records.BACK_POINTER), links, counters, live, committed)


ModelsOf = Callable[[BatchFusion, int], StreamModels]  # the models of utterance b of a batch


def models_of_rows(models_of: ModelsOf, fusion: BatchFusion, rows: Sequence[int]) -> list[StreamModels]:
    """The models of some utterances; utterances with equal weights and trees share them."""
    columns = (fusion.lm_weights, fusion.boosting_weights, fusion.tree_of)
    options = list(zip(*(values[rows].tolist() for values in columns), strict=True))
    known = {own: models_of(fusion, row) for own, row in dict(zip(options, rows, strict=True)).items()}
    return [known[own] for own in options]


@dataclass(frozen=True, eq=False)
class StreamState:
    """One utterance after some frames. Its entries below the counts of `counters` never change."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK
    counters: np.ndarray  # [1] COUNTERS
    live: np.ndarray | None = None  # newest back-pointer, or NONE, of each live hypothesis; None: not known
    committed: Committed | None = None  # the path before the first back-pointer; None: this stream never commits
    device_numbers: np.ndarray | None = None  # numbers of the back-pointers on the device, if these are a part of them

    @property
    def frames(self) -> int:
        return int(self.counters["frames"][0])


def raise_stop(log_probs: np.ndarray, b: int, frame: int, status: int) -> None:
    """Raise the error of a frame of log_probs [n, T, V + 1] that has the status BAD_FRAME or NO_TOKEN."""
    row = log_probs[b, frame]
    if status == BAD_FRAME or not np.isfinite(row).any():
        raise_bad_frame(log_probs, b, frame)
    raise BadRow(
        b,
        f"log_probs[{b}, {frame}] makes every path through the graph impossible, expected a finite "
        "log-probability for the blank or for a label that the graph allows there",
    )


def grown_back_pointers(back_pointers: np.ndarray, counters: np.ndarray, tokens: np.ndarray, more: int) -> np.ndarray:
    """Drop the back-pointers that no token needs; grow the array if it has no capacity for `more` after that."""
    kept = np.empty(len(back_pointers), records.BACK_POINTER)
    size = compact_back_pointers(back_pointers, int(counters["back_pointers"][0]), tokens, kept)
    counters["back_pointers"] = size
    if 2 * size > len(back_pointers) or len(back_pointers) < 2 * more:
        return grown(kept, size, more)
    return kept


@compiled
def compact_back_pointers(back_pointers, count, tokens, kept):
    """Copy the back-pointers that tokens need to `kept`, in order, and renumber those of the tokens.

    Returns:
        the number of copies.
    """
    number = np.full(count, NONE, np.int32)
    for i in range(len(tokens)):
        if tokens[i].back_pointer >= 0:
            number[tokens[i].back_pointer] = 0
    for i in range(count - 1, -1, -1):
        if number[i] == 0 and back_pointers[i].previous >= 0:
            number[back_pointers[i].previous] = 0
    size = 0
    for i in range(count):
        if number[i] == 0:
            kept[size] = back_pointers[i]
            if back_pointers[i].previous >= 0:
                kept[size].previous = number[back_pointers[i].previous]
            number[i] = size
            size += 1
    for i in range(len(tokens)):
        if tokens[i].back_pointer >= 0:
            tokens[i].back_pointer = number[tokens[i].back_pointer]
    return size


# ------------------------------------------------------------------------------ composition "let"

LET_NODES = 4096  # that there is room for at first, and as many links, contexts and back-pointers


@dataclass(frozen=True, eq=False)
class LetStream:
    """One utterance after some frames, with `composition: let`."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN; `back_pointer` is a node
    arrays: NodeArrays
    committed: Committed | None = None  # as in `StreamState`


def new_let_stream(models: StreamModels) -> LetStream:
    """Nothing read: one token, whose node has one context, the LMs' start."""
    assert models.lm_scorer is not None
    tokens, counters = np.zeros(1, records.TOKEN), np.zeros(1, LET_COUNTERS)
    tokens["key"] = models.first_key
    for name in ("tokens", "nodes", "contexts"):
        counters[name] = 1
    arrays = _node_arrays(counters, (LET_NODES,) * 4)
    for name, value in (("key", models.first_key), ("cost", 0), ("newest", NONE), ("begin", 0), ("count", 1)):
        arrays.nodes[name][0] = value
    start = models.lm_scorer.lms.start
    for name, value in (("lm", start), ("cost", 0), ("back_pointer", NONE), ("run", 0), ("epsilon", NONE)):
        arrays.contexts[name][0] = value
    arrays.contexts["probability"][0] = 0
    return LetStream(models, tokens, arrays)


def _node_arrays(counters: np.ndarray, sizes: Sequence[int]) -> NodeArrays:
    kinds = (records.BACK_POINTER, NODE_LINK, NODE, NODE_CONTEXT)
    return NodeArrays(counters, *(np.empty(size, kind) for size, kind in zip(sizes, kinds, strict=True)))


def collected(arrays: NodeArrays, tokens: np.ndarray, *, more: bool = False) -> NodeArrays:
    """What the tokens lead to, in arrays of its own with as much room again, `more`: at least twice
    that of before. The tokens get new numbers."""
    sizes = [len(array) for array in arrays[1:]]
    new = _node_arrays(arrays.counters.copy(), sizes)
    numbers, past = np.zeros(len(arrays.nodes), np.int32), np.zeros(len(arrays.back_pointers), np.int32)
    collect(tokens, arrays, new, numbers, past)
    counters = new.counters[0]
    used = [int(counters[name]) for name in ("back_pointers", "links", "nodes", "contexts")]
    kept = [grown(array, n) if more or 2 * n > len(array) else array for array, n in zip(new[1:], used, strict=True)]
    return NodeArrays(new.counters, *kept)


@no_refcount
def collect(tokens, state, new, numbers, past):
    """Copy to `new` what the tokens lead to; they get new numbers. Ways to expanded nodes are forgotten.

    Args:
        tokens: [n] TOKEN.
        numbers: [nodes] int32, zeros.
        past: [back-pointers] int32, zeros.
    """
    old, fresh, nodes, links = state.counters[0], new.counters[0], state.nodes, state.links
    for i in range(len(tokens)):
        numbers[tokens[i].back_pointer] = 1
    for n in range(old.nodes - 1, -1, -1):
        if numbers[n] == 1 and nodes[n].begin == NONE:
            at = nodes[n].newest
            while at != NONE:
                numbers[links[at].node] = 1
                at = links[at].next
    fresh.nodes = fresh.links = fresh.contexts = 0
    for n in range(old.nodes):
        if numbers[n] == 1:
            _copy_node(n, state, new, numbers, past)
            numbers[n] = fresh.nodes
            fresh.nodes += 1
    _collect_back_pointers(state, new, past)
    for i in range(len(tokens)):
        tokens[i].back_pointer = numbers[tokens[i].back_pointer]


@linked
def _copy_node(n, state, new, numbers, past):
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
        return
    at = node.newest
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


@no_refcount
def expand_ends(tokens, state, search, lm, work):
    """Expand the best token and those that may end.

    Returns:
        a status, and the number of their contexts.
    """
    total, least = 0, tokens[0].cost
    for i in range(len(tokens)):
        least = min(least, tokens[i].cost)
    for i in range(len(tokens)):
        if tokens[i].cost == least or _may_end(tokens[i], search):
            status = expand(tokens[i].back_pointer, state, search, lm, work)
            if status != DONE:
                return status, 0
            total += state.nodes[tokens[i].back_pointer].count
    return DONE, total


@linked
def _may_end(token, search):
    states = search.graph.states
    state = states[state_of(token.key)]
    ends = state.final_cost < np.inf
    for e in range(state.epsilon_begin, state.epsilon_end):
        ends = ends or states[search.graph.epsilons[e].target].final_cost < np.inf
    return ends


@no_refcount
def list_contexts(tokens, state, search, listed):
    """Fill `listed` [contexts] LM_TOKEN with the contexts that `expand_ends` has counted."""
    at, least = 0, tokens[0].cost
    for i in range(len(tokens)):
        least = min(least, tokens[i].cost)
    for i in range(len(tokens)):
        if tokens[i].cost == least or _may_end(tokens[i], search):
            node = state.nodes[tokens[i].back_pointer]
            for n in range(node.begin, node.begin + node.count):
                token, context = listed[at], state.contexts[n]
                token.key, token.lm, token.cost = tokens[i].key, context.lm, tokens[i].cost + context.cost
                token.back_pointer, token.run = context.back_pointer, context.run
                token.probability = context.probability
                at += 1
