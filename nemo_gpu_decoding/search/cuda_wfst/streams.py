"""What is remembered of utterances that are being decoded, and how a chunk of them is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.cuda_wfst.cpu import advance
from nemo_gpu_decoding.search.cuda_wfst.tokens import (
    LINK,
    NONE,
    PROGRESS,
    RECORD,
    TOKEN,
    Workspace,
    compact_records,
)
from nemo_gpu_decoding.search.cuda_wfst.ways import (
    BAD_FRAME,
    DONE,
    LINKS_FULL,
    NO_TOKEN,
    RECORDS_FULL,
    Search,
)
from nemo_gpu_decoding.search.inputs import raise_bad_frame


@dataclass(frozen=True, eq=False)
class Setup:
    """What one utterance is decoded with."""

    search: Search
    graph: WordGraph
    boosting: BackoffAutomaton


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


@dataclass
class Streams:
    """n utterances being decoded. Belongs to one thread at a time."""

    utterances: list[Utterance]
    closed: bool = False

    def __len__(self) -> int:
        return len(self.utterances)


def new_utterance(setup: Setup) -> Utterance:
    """Nothing read: one token in the start state."""
    tokens = np.zeros(1, TOKEN)
    tokens["key"] = (setup.graph.start << 32) | (setup.boosting.start_state << 16)  # see `key_of`
    tokens["record"] = tokens["source"] = NONE
    progress = np.zeros(1, PROGRESS)
    progress["tokens"] = 1
    no_links = np.empty(1024 if setup.search.keeps_links else 0, LINK)
    return Utterance(setup, tokens, np.empty(1024, RECORD), no_links, progress)


def read_chunk(
    utterance: Utterance, log_probs: np.ndarray, length: int, b: int, space: Workspace
) -> Utterance:
    """The utterance after `length` more frames of log_probs [B, T, C], those of row b.

    Raises:
        ValueError: a frame holds NaN or +inf, or allows nothing; `utterance` is as it was.
    """
    setup, count = utterance.setup, len(utterance.tokens)
    space.current[:count] = utterance.tokens
    progress = utterance.progress.copy()
    records, links = utterance.records, utterance.links
    frame, status = 0, DONE
    while frame < length:
        frame, status = advance(
            log_probs[b], frame, length, progress, records, links, setup.search,
            setup.graph.arrays, setup.boosting.arrays, space,
        )  # fmt: skip
        if status == RECORDS_FULL:
            records = _roomier_records(records, progress, space)
        elif status == LINKS_FULL:
            links = _roomier(links, int(progress["links"][0]))
        elif status in (BAD_FRAME, NO_TOKEN):
            _explain(log_probs, b, frame, status)
    tokens = space.current[: int(progress["tokens"][0])].copy()
    return replace(utterance, tokens=tokens, records=records, links=links, progress=progress)


def _explain(log_probs: np.ndarray, b: int, frame: int, status: int) -> None:
    row = log_probs[b, frame]
    if status == BAD_FRAME or not np.isfinite(row).any():
        raise_bad_frame(log_probs, b, frame)
    raise ValueError(
        f"log_probs[{b}, {frame}] makes every path through the graph impossible, expected a finite "
        "log-probability for the blank or for a label that the graph allows there"
    )


def _roomier_records(records: np.ndarray, progress: np.ndarray, space: Workspace) -> np.ndarray:
    """Records that no token points to any more are dropped; more room is made if that is not enough."""
    count, tokens = int(progress["records"][0]), int(progress["tokens"][0])
    kept = np.empty(len(records), RECORD)
    size = compact_records(records, count, space.current, tokens, kept)
    progress["records"] = size
    if 2 * size > len(records) or len(records) < 2 * space.front["tokens"][0]:
        return _roomier(kept, size, int(space.front["tokens"][0]))
    return kept


def _roomier(array: np.ndarray, used: int, more: int = 0) -> np.ndarray:
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
