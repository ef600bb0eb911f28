"""What a backend of flexctc_beam does for the streams of one `open`: two verbs, what goes in and out.

`decoder.py` checks arguments and builds results; `cpu_engine.py` and `cuda.py` search. An engine holds
all that its streams remember, so it belongs to one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch

from nemo_gpu_decoding.search.flexctc_beam import cpu
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.fusing import BatchFusion
from nemo_gpu_decoding.search.history import Traces

MERGE = {"max": cpu.MERGE_MAX, "sum": cpu.MERGE_SUM, "prefix": cpu.MERGE_PREFIX}


@dataclass(frozen=True)
class Setup:
    """What n utterances are decoded with, from their first frame to their last."""

    config: FlexCTCConfig
    vocab_size: int
    blank_id: int
    fusion: BatchFusion

    def __len__(self) -> int:
        return len(self.fusion)

    @property
    def merge(self) -> int:
        return MERGE[self.config.merge]

    @cached_property
    def search(self) -> cpu.Search:
        """The options as compiled code takes them; the weights come with each utterance."""
        return cpu.Search(
            blank_id=self.blank_id,
            vocab_size=self.vocab_size,
            merge=self.merge,
            beam_beta=np.float32(self.config.beam_beta),
            threshold=np.float32(self.config.beam_threshold),
            lm_weight=np.float32(0.0),
            boosting_weight=np.float32(0.0),
        )


class Found(NamedTuple):
    """The N best hypotheses of n utterances as bare numbers, best first."""

    frames: np.ndarray  # [n] int64, frames read
    order: np.ndarray  # [n, N] int32, slots in the beam; -1 where there are fewer
    scores: np.ndarray  # [n, N] float32
    without_final: np.ndarray  # [n] bool: the LM forbids the end, so final weights were left out
    traces: Traces
    alignment: np.ndarray | None  # [n, N, T] int32, if the config asks for it
    alignment_log_probs: np.ndarray | None  # [n, N, T] float32


class Engine(Protocol):
    """The search of n utterances on one backend."""

    def takes(self, lengths: object) -> bool:
        """Whether `push` takes these lengths where they lie and checks them there."""
        ...

    def push(
        self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False
    ) -> None:
        """Read lengths[b] frames of log_probs[b].

        Args:
            log_probs: [n, T, V + 1] floating point, on any device.
            lengths: [n] int64 in 0 .. T, or what `takes` said yes to.
            deferred: errors may wait for `results`; the streams are lost then.

        Raises:
            ValueError: a valid frame holds NaN or +inf or leaves no label possible, or a length that
                was checked here is wrong; the streams are as they were before the call.
        """
        ...

    def results(self, n_best: int, *, final: bool) -> Found:
        """The `n_best` best of every utterance; `final`: it is over, so final weights count.

        Raises:
            ValueError: an error that `push` deferred.
        """
        ...
