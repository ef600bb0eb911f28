"""`Engine`: the interface between a decoder and the search of one backend, for the streams of one `open`.

A decoder checks arguments and builds results; its engines search. An engine holds the state of its streams, so only
one thread may use it at a time.
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
        """Whether `push` accepts these lengths as a tensor and checks them on its device."""
        return False

    @abstractmethod
    def push(self, inputs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        """Read lengths[b] frames of inputs[b].

        Args:
            inputs: [n, T, ...] floating point, on any device.
            lengths: [n] int64 in 0 .. T, or a tensor that `accepts_device_lengths` accepts.
            deferred: errors may be raised by `results` instead; the streams are lost then.

        Raises:
            BadRow: the search cannot read a valid frame; the streams are unchanged.
            ValueError: a length in a tensor is out of range; the streams are unchanged.
            StreamsLost: the streams cannot continue.
        """

    @abstractmethod
    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Any:
        """The best hypotheses, in a form that the strategy's decoder reads. The streams are unchanged.

        Args:
            rows: numbers of the utterances.
            n_best: hypotheses of each.
            final: add final weights, because these utterances have ended.

        Raises:
            ValueError: an error that `push` deferred.
            StreamsLost: the streams cannot continue.
        """

    def commit(self, rows: Sequence[int]) -> None:  # noqa: B027 (engines without back-pointers have nothing to do)
        """Commit the tokens that all live hypotheses of these streams share.

        Later results trace back only the tokens that are not committed. Commits do not change results.

        Args:
            rows: numbers of utterances, each once.
        """

    @abstractmethod
    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        """Replace these utterances by new ones; the others continue.

        Args:
            rows: numbers of utterances.
            fusion: the fusion of all n utterances after the call; it differs for `rows` only.

        Raises:
            ValueError: a captured CUDA graph depends on tables that would change; the streams are unchanged.
        """


class BadRow(ValueError):  # noqa: N818 (the name describes the event)
    """A frame cannot be read; the streams are unchanged.

    Args:
        row: number of the stream.
        message: names the frame, the value seen and the value expected.
    """

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


class StreamsLost(ValueError):  # noqa: N818 (the name describes the event)
    """The streams of an engine cannot continue; the decoder closes them."""
