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
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.inputs import raise_bad_frame
from nemo_gpu_decoding.search.word_graph import records
from nemo_gpu_decoding.search.word_graph.keys import BAD_FRAME, NONE
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
        return records.Search(self.params, self.weights, self.graph.arrays, self.graph.arc_index, self.boosting.arrays)

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
    models = {option: models_of(fusion, row) for option, row in dict(zip(options, rows, strict=True)).items()}
    return [models[option] for option in options]


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
