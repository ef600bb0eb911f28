"""What is remembered of utterances that are being decoded, and how a chunk of them is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.cuda_wfst.streams import raise_stop, roomier, roomier_records
from nemo_gpu_decoding.search.cuda_wfst.tokens import LINK, NONE, RECORD
from nemo_gpu_decoding.search.cuda_wfst.ways import BAD_FRAME, DONE, LINKS_FULL, NO_TOKEN, RECORDS_FULL
from nemo_gpu_decoding.search.paged_biglm.composition import Rescoring
from nemo_gpu_decoding.search.paged_biglm.cpu import advance
from nemo_gpu_decoding.search.paged_biglm.tokens import PROGRESS, TOKEN, Workspace, with_more_groups
from nemo_gpu_decoding.search.paged_biglm.ways import GROUPS_FULL, Search


@dataclass(frozen=True, eq=False)
class Setup:
    """What one utterance is decoded with."""

    search: Search
    graph: WordGraph
    boosting: BackoffAutomaton
    rescoring: Rescoring


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
    tokens["lm"] = setup.rescoring.start
    tokens["record"] = tokens["source"] = NONE
    progress = np.zeros(1, PROGRESS)
    progress["tokens"] = 1
    no_links = np.empty(1024 if setup.search.keeps_links else 0, LINK)
    return Utterance(setup, tokens, np.empty(1024, RECORD), no_links, progress)


def read_chunk(
    utterance: Utterance, log_probs: np.ndarray, length: int, b: int, space: Workspace
) -> tuple[Utterance, Workspace]:
    """The utterance after `length` more frames of log_probs [B, T, C], those of row b.

    Returns:
        it, and the workspace, which may have become larger.

    Raises:
        ValueError: a frame holds NaN or +inf, or allows nothing; `utterance` is as it was.
    """
    setup, count = utterance.setup, len(utterance.tokens)
    search = setup.search
    space.current[:count] = utterance.tokens
    progress = utterance.progress.copy()
    records, links = utterance.records, utterance.links
    frame, status = 0, DONE
    while frame < length:
        frame, status = advance(
            log_probs[b], frame, length, progress, records, links, search,
            setup.graph.arrays, setup.boosting.arrays, setup.rescoring, space,
        )  # fmt: skip
        if status == RECORDS_FULL:
            records = roomier_records(records, progress, cast(Any, space))  # has all it reads
        elif status == LINKS_FULL:
            links = roomier(links, int(progress["links"][0]))
        elif status == GROUPS_FULL:
            space = with_more_groups(space, search.max_active, search.keeps_links)
        elif status in (BAD_FRAME, NO_TOKEN):
            raise_stop(log_probs, b, frame, status)
    tokens = space.current[: int(progress["tokens"][0])].copy()
    return replace(utterance, tokens=tokens, records=records, links=links, progress=progress), space
