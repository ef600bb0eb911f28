"""What is remembered of utterances that are being decoded, and what they are decoded with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.inputs import raise_bad_frame
from nemo_gpu_decoding.search.word_graph.composition import LM_COUNTERS, Composition
from nemo_gpu_decoding.search.word_graph.keys import BAD_FRAME, NONE
from nemo_gpu_decoding.search.word_graph.records import (
    BACK_POINTER,
    COUNTERS,
    LINK,
    LM_TOKEN,
    TOKEN,
    Search,
    SearchParams,
    StreamParams,
)

BEAM_SLACK = 1e-4  # of the lattice beam: rounding must not drop the best path


@dataclass(frozen=True, eq=False)
class StreamModels:
    """What one utterance is decoded with."""

    params: SearchParams  # of the batch
    weights: StreamParams  # of the utterance
    graph: WordGraph
    boosting: BackoffAutomaton
    composition: Composition | None = None  # with a large LM

    @property
    def search(self) -> Search:
        """All that compiled code reads, but for the large LM."""
        return Search(self.params, self.weights, self.graph.arrays, self.boosting.arrays)

    @property
    def first_key(self) -> int:
        """The key of the token that an utterance begins with; see `key_of`."""
        return (self.graph.start << 32) | (self.boosting.start_state << 16)

    def new_stream(self) -> StreamState:
        """Nothing read: one token in the start state, whose LM context is the LMs' start."""
        tokens = np.zeros(1, TOKEN if self.composition is None else LM_TOKEN)
        counters = np.zeros(1, COUNTERS if self.composition is None else LM_COUNTERS)
        tokens["key"], tokens["back_pointer"], tokens["source"] = self.first_key, NONE, NONE
        counters["tokens"] = 1
        if self.composition is not None:
            tokens["lm"] = self.composition.lms.start
        links = np.empty(1024 if self.params.keeps_links else 0, LINK)
        return StreamState(self, tokens, np.empty(1024, BACK_POINTER), links, counters)


ModelsOf = Callable[[BatchFusion, int], StreamModels]  # what utterance b of a batch is decoded with


@dataclass(frozen=True, eq=False)
class StreamState:
    """One utterance after some frames. Never changed in place below the counts of `counters`."""

    models: StreamModels
    tokens: np.ndarray  # [n] TOKEN
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] LINK
    counters: np.ndarray  # [1] COUNTERS

    @property
    def frames(self) -> int:
        return int(self.counters["frames"][0])


def raise_stop(log_probs: np.ndarray, b: int, frame: int, status: int) -> None:
    """Say why a search cannot read a frame of log_probs [n, T, V + 1] (BAD_FRAME or NO_TOKEN)."""
    row = log_probs[b, frame]
    if status == BAD_FRAME or not np.isfinite(row).any():
        raise_bad_frame(log_probs, b, frame)
    raise BadRow(
        b,
        f"log_probs[{b}, {frame}] makes every path through the graph impossible, expected a finite "
        "log-probability for the blank or for a label that the graph allows there",
    )


def grown_back_pointers(back_pointers: np.ndarray, counters: np.ndarray, tokens: np.ndarray, more: int) -> np.ndarray:
    """Those that no token leads to are dropped; the array grows if that is not enough for `more`."""
    kept = np.empty(len(back_pointers), BACK_POINTER)
    size = compact_back_pointers(back_pointers, int(counters["back_pointers"][0]), tokens, kept)
    counters["back_pointers"] = size
    if 2 * size > len(back_pointers) or len(back_pointers) < 2 * more:
        return grown(kept, size, more)
    return kept


def grown_links(links: np.ndarray, counters: np.ndarray, lattice_beam: float) -> np.ndarray:
    """Those that no path within the lattice beam can take are dropped; more room is made if that is not enough."""
    used, kept = int(counters["links"][0]), np.empty(len(links), LINK)
    size = prune_links(links, used, int(counters["frames"][0]), lattice_beam + BEAM_SLACK, kept)
    counters["links"] = size
    return kept if size < used and 2 * size <= len(links) else grown(kept, size)


def grown(array: np.ndarray, used: int, more: int = 0) -> np.ndarray:
    """A copy of what is used, with capacity for as much again and for `more`."""
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger


@compiled
def compact_back_pointers(back_pointers, count, tokens, kept):
    """Copy the back-pointers that tokens still lead to, in order, to `kept`; tokens get new numbers.

    Returns:
        how many were copied.
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


@compiled
def prune_links(links, count, frames, beam, kept):
    """Copy the links that may be on a path within a beam of the best one, in order, to `kept`.

    As Kaldi's PruneActiveTokens: each token of the last frame may turn out to be on the best path, at no extra cost;
    the extra cost of a link is what it costs more than the best way to its target, and the least extra cost of the
    links from there. Whatever the frames to come may cost, a path with that link costs so much more than another.

    Returns:
        how many were copied.
    """
    first = np.zeros(frames + 3, np.int64)  # node of the first token of each frame
    for i in range(count):
        first[links[i].frame + 1] = max(first[links[i].frame + 1], links[i].source + 1)
        first[links[i].frame + 2] = max(first[links[i].frame + 2], links[i].target + 1)
    first = np.cumsum(first)
    costs, extra = np.full(first[-1] + 1, np.inf), np.full(first[-1] + 1, np.inf)
    costs[0], extra[first[frames] :] = 0.0, 0.0
    for i in range(count):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        costs[target] = min(costs[target], costs[source] + links[i].cost)
    is_kept, size = np.zeros(count, np.bool_), 0
    for i in range(count - 1, -1, -1):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        more = costs[source] + links[i].cost - costs[target] + extra[target]
        if more <= beam:
            is_kept[i] = True
            extra[source] = min(extra[source], more)
    for i in range(count):
        if is_kept[i]:
            kept[size] = links[i]
            size += 1
    return size
