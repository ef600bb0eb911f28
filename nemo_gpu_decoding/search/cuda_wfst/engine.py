"""What a backend of cuda_wfst does for the streams of one `open`: three verbs, what goes in and out.

`decoder.py` checks arguments and builds results; `cpu_engine.py` and `cuda.py` search. An engine holds
all that its streams remember, so it belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from nemo_gpu_decoding.search.cuda_wfst.streams import Utterance


class Engine(Protocol):
    """The search of n utterances on one backend."""

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray) -> None:
        """Read lengths[b] frames of log_probs[b].

        Args:
            log_probs: [n, T, V + 1] floating point, on any device.
            lengths: [n] int64 in 0 .. T.

        Raises:
            ValueError: a valid frame holds NaN or +inf or leaves no way through the graph; the streams
                are as they were before the call.
        """
        ...

    def utterances(self) -> list[Utterance]:
        """What is known of every utterance, in the host's memory."""
        ...

    def leading(self, rows: Sequence[int], *, final: bool) -> list[Utterance]:
        """Of these utterances at least what best paths need.

        Args:
            rows: numbers of utterances.
            final: they are over. The token with which each ends best is there, with its past; else the
                best token with its past, and the one with which the utterance would end best. Where no
                token may end, the best one is there with its past in either case.
        """
        ...
