"""Streaming search through NeMo's `partial_hypotheses`.

NeMo's streaming code passes the hypotheses of one call to the next call, including the object in their
`dec_state`. This object holds the running search:

    hypotheses = decoding.rnnt_decoder_predictions_tensor(chunk, lengths, return_hypotheses=True)
    hypotheses = decoding.rnnt_decoder_predictions_tensor(
        next_chunk, lengths, return_hypotheses=True, partial_hypotheses=hypotheses
    )

NeMo does not mark the last call. So each call returns the result for audio that ends there: it closes a copy
of the streams and keeps the streams open. After the last chunk, this is the result of the whole utterance,
whatever the chunk sizes.

NeMo's pipelines mark ends of utterances. Their utterances share one `Slots`, see `using_slots`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.live.slots import LiveSlot, Slots
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.search.streams import Streams

# A first chunk may be a whole file, and a user may keep its hypothesis for long. So utterances that were not
# continued yet are kept for this number of batches only.
RECENT_BATCHES = 8


@dataclass(eq=False)
class StreamBatch:
    """Utterances that began in one batch."""

    decoder: Decoder[Any, Any]
    streams: Streams
    num_frames: list[int]  # read so far, of each


@dataclass(eq=False)
class StreamState:
    """One running utterance; what `Hypothesis.dec_state` holds."""

    num_frames: int  # read when this state was returned
    batch: StreamBatch | None = None  # the utterances that began in one batch; None once released, or with `slot`
    row: int = 0  # in `batch`
    history: Tensor | None = None  # [num_frames, ...] input frames, for confidence or alignments
    slot: LiveSlot | None = None  # for an utterance in `Slots`, instead of batch and row
    error: ValueError | None = None  # why the last chunk was not read
    nbest: NBest | None = None  # for an utterance in `Slots`: the result if it ended here

    def release(self) -> None:
        """Free the memory; afterwards the utterance cannot be continued."""
        self.batch = self.history = None

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the search from a pickled hypothesis."""
        return self.__dict__ | {"batch": None, "history": None, "slot": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamState:
        return self  # copies share one search, which only one call can continue


class Continuation:
    """Begins and continues the utterances of a batch.

    Args:
        name: of the argument with the states, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._recent: deque[list[StreamState]] = deque()

    def advance(
        self,
        decoder: Decoder[Any, Any],
        frames: Tensor,
        lengths: Tensor,
        states: Sequence[StreamState | None],
        requests: Sequence[Request | None] | None,
        *,
        keep_history: bool,
    ) -> list[tuple[NBest, StreamState]]:
        """Decode the next chunk of every utterance.

        Args:
            decoder: for utterances that begin; running utterances keep their decoder.
            frames: [B, T, ...] log-probs or encoder output.
            lengths: [B] valid frames.
            states: [B] state to continue; None begins an utterance.
            requests: one per utterance that begins.
            keep_history: keep all input frames in the states.

        Returns:
            Per utterance: the result if the audio ended here, and the new state.

        Raises:
            ValueError: see `Decoder.push`; a state cannot be continued. If the chunk of an utterance cannot be
                read, its state has the error, and the other utterances continue.
        """
        shared = _slots.get()
        if shared is not None:
            return _advance_in(shared, frames, lengths, states, requests, keep_history=keep_history)
        self._check(states)
        groups: dict[int, list[int]] = {}  # id of the streams -> utterances
        for b, state in enumerate(states):
            groups.setdefault(0 if state is None else id(state.batch), []).append(b)
        results: dict[int, tuple[NBest, StreamState]] = {}
        for rows in groups.values():
            running = [state for b in rows if (state := states[b]) is not None]
            slots = [state.row for state in running] or list(range(len(rows)))
            batch = running[0].batch if running else None
            if batch is None:
                batch = StreamBatch(decoder, decoder.open(len(rows), requests), [0] * len(rows))
            errors = batch.decoder.push(batch.streams, frames[rows], lengths[rows], rows=slots, isolate=True)
            nbests = batch.decoder.close(replace(batch.streams), rows=slots)  # closes a copy
            for b, slot, nbest in zip(rows, slots, nbests, strict=True):
                batch.num_frames[slot] = nbest.num_frames
                read = 0 if slot in errors else lengths[b]
                history = _history(states[b], frames[b, :read]) if keep_history else None
                results[b] = nbest, StreamState(nbest.num_frames, batch, slot, history, error=errors.get(slot))
        self._remember([results[b][1] for b, state in enumerate(states) if state is None])
        return [results[b] for b in range(len(states))]

    def _check(self, states: Sequence[StreamState | None]) -> None:
        for b, state in enumerate(states):
            if state is None:
                continue
            if state.batch is None:
                raise ValueError(
                    f"{self.name}[{b}] cannot be continued: its search was released (utterances "
                    f"not yet continued are kept for {RECENT_BATCHES} batches, pickled ones not at all)"
                )
            batch = state.batch
            if batch.streams.closed or state.num_frames != batch.num_frames[state.row]:
                raise ValueError(f"{self.name}[{b}] was continued before: expected what this has returned")

    def _remember(self, begun: list[StreamState]) -> None:
        """Release the oldest states; continued utterances have newer state objects."""
        if begun:
            self._recent.append(begun)
        while len(self._recent) > RECENT_BATCHES:
            for state in self._recent.popleft():
                state.release()


_slots: ContextVar[Slots | None] = ContextVar("slots", default=None)


@contextlib.contextmanager
def using_slots(slots: Slots) -> Iterator[None]:
    """Within this block, utterances begin in these slots; the caller ends them."""
    token = _slots.set(slots)
    try:
        yield
    finally:
        _slots.reset(token)


def _advance_in(
    slots: Slots,
    frames: Tensor,
    lengths: Tensor,
    states: Sequence[StreamState | None],
    requests: Sequence[Request | None] | None,
    *,
    keep_history: bool,
) -> list[tuple[NBest, StreamState]]:
    """Like `Continuation.advance`, for utterances in slots, in one push."""
    request = iter(requests or repeat(None))
    own = [slots.begin(next(request)) if state is None or state.slot is None else state.slot for state in states]
    counts = lengths.tolist()
    errors = slots.push({slot: frames[b, :n] for b, (slot, n) in enumerate(zip(own, counts, strict=True)) if n})
    results = []
    for b, (slot, nbest) in enumerate(zip(own, slots.final(own), strict=True)):
        read = 0 if slot in errors else counts[b]
        history = _history(states[b], frames[b, :read]) if keep_history else None
        state = StreamState(nbest.num_frames, history=history, slot=slot, error=errors.get(slot), nbest=nbest)
        results.append((nbest, state))
    return results


def _history(state: StreamState | None, frames: Tensor) -> Tensor:
    if state is None or state.history is None:
        return frames.clone()
    return torch.cat([state.history, frames])
