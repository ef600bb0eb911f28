"""`Engine`: what a backend does for the streams of one `open`. One shape for all strategies.

A decoder checks arguments and builds results; its engines search. An engine holds all that its streams
remember, so it belongs to one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.batch import BatchFusion


class Engine(ABC):
    """The search of n utterances on one backend."""

    def accepts_device_lengths(self, lengths: torch.Tensor) -> bool:
        """Whether `push` takes lengths in this form, and checks them where they lie."""
        return False

    @abstractmethod
    def push(self, inputs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        """Read lengths[b] frames of inputs[b].

        Args:
            inputs: [n, T, ...] floating point, on any device.
            lengths: [n] int64 in 0 .. T, or a tensor that `accepts_device_lengths` accepts.
            deferred: errors may wait for `results`; the streams are lost then.

        Raises:
            BadRow: the search cannot read a valid frame; the streams are as they were before the call.
            ValueError: a length that was checked here is wrong; likewise.
            StreamsLost: the streams cannot go on.
        """

    @abstractmethod
    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Any:
        """What the decoder makes hypotheses of, in a form of the strategy. The streams stay as they are.

        Args:
            rows: numbers of the utterances.
            n_best: hypotheses of each.
            final: these utterances are over, so that final weights count.

        Raises:
            ValueError: an error that `push` deferred.
            StreamsLost: the streams cannot go on.
        """

    def commit(self, rows: Sequence[int]) -> None:  # noqa: B027 (engines without back-pointers have nothing to do)
        """Commit the tokens that all live hypotheses of these streams share.

        Later results trace back the other tokens only. They are the same with and without commits.

        Args:
            rows: numbers of utterances, each once.
        """

    @abstractmethod
    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        """Forget these utterances and begin new ones in their place; the others go on.

        Args:
            rows: numbers of utterances.
            fusion: of all n utterances from now on; new for `rows` only.

        Raises:
            ValueError: a CUDA graph knows tables that would have to change; nothing has changed.
        """


class BadRow(ValueError):  # noqa: N818 (it says what has happened)
    """Raised by an engine that cannot read a frame; no stream has changed.

    Args:
        row: number of the stream.
        message: names the frame, what was seen and what was expected.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class StreamsLost(ValueError):  # noqa: N818 (it says what has happened)
    """Raised by an engine whose streams cannot go on; the decoder closes them."""
