"""The verbs that every decoder has. Read this first.

    decoder = FlexCTCBeam(vocab_size=1024, blank_id=1024, config=FlexCTCConfig(beam_size=8))
    results = decoder.decode(log_probs, lengths)          # one NBest per utterance

    streams = decoder.open(2)                             # two live streams
    decoder.push(streams, log_probs, lengths)             # as chunks arrive, any number of times
    decoder.partial(streams)                              # what is best so far, per stream
    results = decoder.close(streams)                      # the same results, whatever the chunks were

`decode` is open + push + close; there is no second path through the code. All state of a running
utterance lives in the streams, none in the decoder: one decoder may serve many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.result import NBest

S = TypeVar("S")


@runtime_checkable
class Decoder(Protocol[S]):
    """A batched beam search. B utterances, T frames, V tokens and the blank."""

    def decode(
        self,
        log_probs: torch.Tensor,  # [B, T, V + 1] float, natural log
        lengths: torch.Tensor | Sequence[int],  # [B] valid frames of each utterance
        requests: Sequence[Request | None] | None = None,  # [B]
    ) -> list[NBest]: ...

    def open(self, n: int, requests: Sequence[Request | None] | None = None) -> S: ...

    def push(
        self, streams: S, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> None: ...

    def partial(self, streams: S, n_best: int = 1) -> list[NBest]: ...

    def close(self, streams: S) -> list[NBest]: ...
