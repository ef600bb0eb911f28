"""What is remembered of utterances that are being decoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.inputs import raise_bad_frame
from nemo_gpu_decoding.search.word_graph.tokens import (
    LINK,
    NONE,
    PROGRESS,
    RECORD,
    TOKEN,
    Workspace,
    compact_records,
)
from nemo_gpu_decoding.search.word_graph.ways import BAD_FRAME, Search, SearchParams, StreamParams


@dataclass(frozen=True, eq=False)
class Setup:
    """What one utterance is decoded with."""

    params: SearchParams  # of the batch
    weights: StreamParams  # of the utterance
    graph: WordGraph
    boosting: BackoffAutomaton

    @cached_property
    def search(self) -> Any:
        """All options as compiled code takes them."""
        return Search(*self.params, *self.weights)

    @property
    def first_key(self) -> int:
        """The key of the token that an utterance begins with; see `key_of`."""
        return (self.graph.start << 32) | (self.boosting.start_state << 16)

    def new_utterance(self) -> Utterance:
        """Nothing read: one token in the start state."""
        tokens, progress = self._first_token(TOKEN), np.zeros(1, PROGRESS)
        return self._with_room(tokens, progress)

    def _first_token(self, token: np.dtype) -> np.ndarray:
        tokens = np.zeros(1, token)
        tokens["key"] = self.first_key
        tokens["record"] = tokens["source"] = NONE
        return tokens

    def _with_room(self, tokens: np.ndarray, progress: np.ndarray) -> Utterance:
        progress["tokens"] = len(tokens)
        links = np.empty(1024 if self.search.keeps_links else 0, LINK)
        return Utterance(self, tokens, np.empty(1024, RECORD), links, progress)


@dataclass(frozen=True, eq=False)
class Utterance:
    """One utterance after some frames. Never changed in place below the counts of `progress`."""

    setup: Setup
    tokens: np.ndarray  # [n] TOKEN
    records: np.ndarray  # [capacity] RECORD
    links: np.ndarray  # [capacity] LINK
    progress: np.ndarray  # [1] PROGRESS

    @property
    def frames(self) -> int:
        return int(self.progress["frames"][0])


def raise_stop(log_probs: np.ndarray, b: int, frame: int, status: int) -> None:
    """Say why a search cannot read a frame of log_probs [n, T, V + 1] (BAD_FRAME or NO_TOKEN)."""
    row = log_probs[b, frame]
    if status == BAD_FRAME or not np.isfinite(row).any():
        raise_bad_frame(log_probs, b, frame)
    raise ValueError(
        f"log_probs[{b}, {frame}] makes every path through the graph impossible, expected a finite "
        "log-probability for the blank or for a label that the graph allows there"
    )


def roomier_records(records: np.ndarray, progress: np.ndarray, space: Workspace) -> np.ndarray:
    """Records that no token points to any more are dropped; more room is made if that is not enough."""
    count, tokens = int(progress["records"][0]), int(progress["tokens"][0])
    kept = np.empty(len(records), RECORD)
    size = compact_records(records, count, space.current, tokens, kept)
    progress["records"] = size
    if 2 * size > len(records) or len(records) < 2 * space.front["tokens"][0]:
        return roomier(kept, size, int(space.front["tokens"][0]))
    return kept


def roomier(array: np.ndarray, used: int, more: int = 0) -> np.ndarray:
    """A copy of what is used, with room for as much again and for `more`."""
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
