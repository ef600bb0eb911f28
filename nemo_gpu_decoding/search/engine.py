"""`Engine`: what a backend does for the streams of one `open`. One shape for all strategies.

A decoder checks arguments and builds results; its engines search. An engine holds all that its streams
remember, so it belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Engine(Protocol):
    """The search of n utterances on one backend."""

    def takes(self, lengths: torch.Tensor) -> bool:
        """Whether `push` takes lengths in this form, and checks them where they lie."""
        ...

    def push(self, inputs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        """Read lengths[b] frames of inputs[b].

        Args:
            inputs: [n, T, ...] floating point, on any device.
            lengths: [n] int64 in 0 .. T, or a tensor that `takes` said yes to.
            deferred: errors may wait for `results`; the streams are lost then.

        Raises:
            ValueError: the search cannot read a valid frame, or a length that was checked here is
                wrong; the streams are as they were before the call.
            StreamsLost: the streams cannot go on.
        """
        ...

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Any:
        """What the decoder makes hypotheses of, in a form of the strategy's own. Changes nothing.

        Args:
            rows: numbers of the utterances that are asked about.
            n_best: hypotheses of each.
            final: these utterances are over, so that final weights count.

        Raises:
            ValueError: an error that `push` deferred.
            StreamsLost: the streams cannot go on.
        """
        ...


class StreamsLost(ValueError):  # noqa: N818 (it says what has happened)
    """Raised by an engine whose streams cannot go on; the decoder closes them."""
