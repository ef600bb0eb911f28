"""The CPU's engine: buffers and threads around the compiled search of `cpu.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.cpu import advance
from nemo_gpu_decoding.search.word_graph.streams import (
    Setup,
    Utterance,
    raise_stop,
    roomier,
    roomier_records,
)
from nemo_gpu_decoding.search.word_graph.tokens import Workspace, new_workspace
from nemo_gpu_decoding.search.word_graph.ways import BAD_FRAME, DONE, LINKS_FULL, NO_TOKEN, RECORDS_FULL


class CPUEngine:
    """See `search/engine.py`. Errors are never deferred here."""

    def __init__(self, setups: Sequence[Setup], config: WFSTConfig) -> None:
        self._config = config
        self._utterances = [setup.new_utterance() for setup in setups]

    def takes(self, lengths: torch.Tensor) -> bool:
        return False

    def push(
        self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False
    ) -> None:
        assert isinstance(lengths, np.ndarray)
        values, done, config = as_float32(log_probs), list(self._utterances), self._config

        def read(rows: np.ndarray) -> None:
            space = new_workspace(config.max_active, values.shape[2], config.keeps_links)
            for b in rows.tolist():
                done[b] = read_chunk(done[b], values, int(lengths[b]), b, space)

        for_each_share(read, lengths, config.threads)
        self._utterances = done

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[Utterance]:
        return [self._utterances[row] for row in rows]


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
            records = roomier_records(records, progress, space)
        elif status == LINKS_FULL:
            links = roomier(links, int(progress["links"][0]))
        elif status in (BAD_FRAME, NO_TOKEN):
            raise_stop(log_probs, b, frame, status)
    tokens = space.current[: int(progress["tokens"][0])].copy()
    return replace(utterance, tokens=tokens, records=records, links=links, progress=progress)
