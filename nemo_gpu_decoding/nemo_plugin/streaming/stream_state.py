"""Keep running searches in NeMo's `partial_hypotheses`, and undo a failed step.

NeMo's streaming code passes the hypotheses of one call to the next call, including the object in their
`dec_state`. This object holds the running search:

    hypotheses = decoding.rnnt_decoder_predictions_tensor(chunk, lengths, return_hypotheses=True)
    hypotheses = decoding.rnnt_decoder_predictions_tensor(
        next_chunk, lengths, return_hypotheses=True, partial_hypotheses=hypotheses
    )

NeMo does not mark the last call. So each call returns the result for audio that ends there: it closes a copy
of the streams and keeps the streams open. After the last chunk, this is the result of the whole utterance,
whatever the chunk sizes.

NeMo's pipelines mark ends of utterances. Their utterances share one `Slots`, see `shared_slots`.

`all_or_nothing` undoes a step of NeMo's pipelines after an error:

    with all_or_nothing(pipeline, [7, 8]):
        outputs = pipeline.transcribe_step(frames)     # of streams 7 and 8

If the block raises, the pipeline is restored. The caller then steps its streams one by one and drops the stream that
raises.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import repeat
from queue import Queue
from typing import Any

import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from torch import Tensor

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.live.slots import LiveSlot, Slots
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Streams
from nemo_gpu_decoding.search.result import NBest

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
    """The state of a running utterance, which `Hypothesis.dec_state` holds."""

    num_frames: int  # read when this state was returned
    batch: StreamBatch | None = None  # the utterances that began in one batch; None once released, or with `slot`
    row: int = 0  # in `batch`
    history: Tensor | None = None  # [num_frames, ...] input frames, for confidence or alignments
    slot: LiveSlot | None = None  # for an utterance in `Slots`, instead of batch and row
    error: ValueError | None = None  # why the last chunk was not read
    nbest: NBest | None = None  # for an utterance in `Slots`: the result if it ended here

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the search from a pickled hypothesis."""
        return self.__dict__ | {"batch": None, "history": None, "slot": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamState:
        return self  # copies share one search, which only one call can continue


States = Sequence[StreamState | None]
Requests = Sequence[Request | None] | None


class Continuation:
    """An object that begins and continues the utterances of a batch.

    Args:
        name: name of the argument with the states, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._recent: deque[list[StreamState]] = deque()

    def advance(
        self, decoder: Any, frames: Tensor, lengths: Tensor, states: States, requests: Requests, *, keep_history: bool
    ) -> list[tuple[NBest, StreamState]]:
        """Decode the next chunk of every utterance.

        Args:
            decoder: decoder for utterances that begin; running utterances keep their decoder.
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
        shared = shared_slots.get()
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
                state.batch = state.history = None


# slots in which utterances begin; the caller ends them
shared_slots: ContextVar[Slots | None] = ContextVar("slots", default=None)


def _advance_in(
    slots: Slots, frames: Tensor, lengths: Tensor, states: States, requests: Requests, *, keep_history: bool
) -> list[tuple[NBest, StreamState]]:
    """Decode like `Continuation.advance`, for utterances in slots, in one push."""
    request = iter(requests or repeat(None))
    places = [slots.begin(next(request)) if state is None or state.slot is None else state.slot for state in states]
    counts = lengths.tolist()
    errors = slots.push({slot: frames[b, :n] for b, (slot, n) in enumerate(zip(places, counts, strict=True)) if n})
    results = []
    for b, (slot, nbest) in enumerate(zip(places, slots.final(places), strict=True)):
        read = 0 if slot in errors else counts[b]
        history = _history(states[b], frames[b, :read]) if keep_history else None
        state = StreamState(nbest.num_frames, history=history, slot=slot, error=errors.get(slot), nbest=nbest)
        results.append((nbest, state))
    return results


def _history(state: StreamState | None, frames: Tensor) -> Tensor:
    if state is None or state.history is None:
        return frames.clone()
    return torch.cat([state.history, frames])


@contextlib.contextmanager
def all_or_nothing(pipeline: Any, streams: Sequence[int]) -> Iterator[None]:
    """Restore the pipeline if the block, which steps its streams, raises an error.

    Args:
        pipeline: buffered or cache-aware, with audio frames as its requests.
        streams: all streams of the step.
    """
    undo = [_undo_objects(pipeline._state_pool, streams)]
    if hasattr(pipeline, "context_manager"):
        undo += [_undo_features(pipeline.bufferer, streams), _undo_caches(pipeline.context_manager, streams)]
    else:
        undo.append(_undo_objects(pipeline.bufferer.bufferers, streams))
    slots = getattr(pipeline, "slots", None)  # of pipelines that search
    try:
        with contextlib.nullcontext() if slots is None else slots.step():
            yield
    except BaseException:
        with torch.inference_mode():
            for put_back in undo:
                put_back()
        raise


def _undo_objects(held: dict[int, Any], streams: Sequence[int]) -> Callable[[], None]:
    """Return the objects of streams and their attributes; tensors are not copied, because steps replace them."""
    before = {stream: (held[stream], _copied(held[stream])) for stream in streams if stream in held}

    def put_back() -> None:
        for stream in streams:
            held.pop(stream, None)
        for stream, (holder, values) in before.items():
            held[stream] = holder
            holder.__dict__ = values

    return put_back


def _copied(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object, with copies of lists and hypotheses, which steps change in place."""
    return {name: _copy(value) for name, value in vars(holder).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, list | dict):
        return value.copy()
    if isinstance(value, Hypothesis):
        other = copy.copy(value)
        other.__dict__ = {name: item.copy() if isinstance(item, list) else item for name, item in vars(value).items()}
        return other
    return value


def _undo_features(bufferer: Any, streams: Sequence[int]) -> Callable[[], None]:
    """Return the state of a `BatchedCacheFeatureBufferer`, which clears a slot before a stream gets it."""
    put_slots_back = _undo_slots(bufferer)
    rows = [bufferer.streamidx2slotidx[stream] for stream in streams if stream in bufferer.streamidx2slotidx]
    audio = [(bufferer.audio_bufferers[row], vars(bufferer.audio_bufferers[row]).copy()) for row in rows]
    features = bufferer.feature_buffer[rows]

    def put_back() -> None:
        put_slots_back()
        bufferer.feature_buffer[rows] = features
        for bufferer_of_stream, values in audio:
            bufferer_of_stream.__dict__ = values

    return put_back


def _undo_caches(manager: Any, streams: Sequence[int]) -> Callable[[], None]:
    """Return the state of a `CacheAwareContextManager`; its free slots are zeros."""
    put_slots_back = _undo_slots(manager)
    rows = [manager.streamidx2slotidx[stream] for stream in streams if stream in manager.streamidx2slotidx]
    channel, time = manager.cache_last_channel[:, rows], manager.cache_last_time[:, rows]
    lengths = manager.cache_last_channel_len[rows]

    def put_back() -> None:
        begun = list(manager.slotidx2streamidx)
        put_slots_back()
        begun = [row for row in begun if row not in manager.slotidx2streamidx]
        manager.cache_last_channel[:, begun], manager.cache_last_time[:, begun] = 0.0, 0.0
        manager.cache_last_channel_len[begun] = 0
        manager.cache_last_channel[:, rows], manager.cache_last_time[:, rows] = channel, time
        manager.cache_last_channel_len[rows] = lengths

    return put_back


def _undo_slots(owner: Any) -> Callable[[], None]:
    """Return the mapping of streams to slots, in both."""
    (queue,) = (value for value in vars(owner).values() if isinstance(value, Queue))
    by_stream, by_slot, free = owner.streamidx2slotidx.copy(), owner.slotidx2streamidx.copy(), list(queue.queue)

    def put_back() -> None:
        owner.streamidx2slotidx, owner.slotidx2streamidx = by_stream, by_slot
        queue.queue.clear()
        queue.queue.extend(free)

    return put_back
