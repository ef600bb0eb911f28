"""Store active searches in NeMo's `partial_hypotheses`, and undo failed steps of NeMo's pipelines.

NeMo's streaming code passes the hypotheses of one call to the next call, including the object in their
`dec_state`. The object in `dec_state` holds the running search:

    hypotheses = decoding.rnnt_decoder_predictions_tensor(chunk, lengths, return_hypotheses=True)
    hypotheses = decoding.rnnt_decoder_predictions_tensor(
        next_chunk, lengths, return_hypotheses=True, partial_hypotheses=hypotheses
    )

NeMo does not mark the last call. Therefore each call returns the result for audio that ends with its chunk: it
closes a copy of the streams and keeps the streams open. After the last chunk, this is the result of the whole
utterance, whatever the chunk sizes.

NeMo's pipelines mark the ends of utterances. All utterances of a pipeline share one `Slots`, see `shared_slots`.

`all_or_nothing` undoes a step of NeMo's pipelines after an error:

    with all_or_nothing(pipeline, [7, 8]):
        outputs = pipeline.transcribe_step(frames)     # of streams 7 and 8

If the block raises, the pipeline is restored. The caller then decodes the chunk of each stream alone, and drops the
stream that raises.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis
from torch import Tensor

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.live.slots import LiveSlot, Slots
from nemo_gpu_decoding.search.result import NBest

# A first chunk may be a whole file, and a user may keep its hypothesis for long. So utterances that were not
# continued yet are kept for this number of batches only.
RECENT_BATCHES = 8


@dataclass(eq=False)
class StreamState:
    """The state of a running utterance, which `Hypothesis.dec_state` holds."""

    num_frames: int  # read when this state was returned
    nbest: NBest  # the result if the utterance ended here
    slot: LiveSlot | None = None  # where the utterance is decoded; None once it is released
    history: Tensor | None = None  # [num_frames, ...] input frames, for confidence or alignments
    error: ValueError | None = None  # why the last chunk was not read
    is_continued: bool = False  # a newer state has more frames

    def __getstate__(self) -> dict[str, Any]:
        """Leave the running search out when a hypothesis is pickled."""
        return self.__dict__ | dict.fromkeys(("nbest", "slot", "history"))

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamState:
        return self  # copies share one search, which only one call can continue


# slots in which utterances begin; the caller ends them
shared_slots: ContextVar[Slots | None] = ContextVar("slots", default=None)


class Continuation:
    """A helper that begins and continues the searches of a batch of utterances.

    Args:
        name: name of the argument with the states, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._recent: deque[list[StreamState]] = deque()

    def advance(
        self,
        decoder: Any,
        frames: Tensor,
        lengths: Tensor,
        states: Sequence[StreamState | None],
        requests: Sequence[Request | None] | None,
        *,
        keep_history: bool,
    ) -> list[StreamState]:
        """Decode the next chunk of every utterance; utterances that began in one batch are decoded in one push.

        Args:
            decoder: decoder for utterances that begin; running utterances keep their decoder.
            frames: [B, T, ...] log-probs or encoder output.
            lengths: [B] valid frames.
            states: [B] state to continue; None begins an utterance.
            requests: one per utterance that begins.
            keep_history: whether to keep all input frames in the states.

        Returns:
            The new state of each utterance, with the result if the audio ended here.

        Raises:
            ValueError: see `Decoder.push`; a state cannot be continued. If the chunk of an utterance cannot be
                read, its state has the error, and the other utterances continue.
        """
        begins = [b for b, state in enumerate(states) if state is None]
        if (shared := shared_slots.get()) is None:
            self._check(states)
            begun = Slots(decoder).begin_together(len(begins), requests)
        else:
            begun = [shared.begin(request) for request in requests or [None] * len(begins)]
        new, counts = dict(zip(begins, begun, strict=True)), lengths.tolist()
        places: list[Any] = [new[b] if state is None else state.slot for b, state in enumerate(states)]
        advanced: dict[int, StreamState] = {}
        for slots in dict.fromkeys(slot.slots for slot in places):
            rows = [b for b, slot in enumerate(places) if slot.slots is slots]
            errors = slots.push({places[b]: frames[b, : counts[b]] for b in rows if counts[b]})
            for b, nbest in zip(rows, slots.final([places[b] for b in rows]), strict=True):
                state, error = states[b], errors.get(places[b])
                history = _history(state, frames[b, : 0 if error else counts[b]]) if keep_history else None
                advanced[b] = StreamState(nbest.num_frames, nbest, places[b], history, error)
                if state is not None:
                    state.is_continued = nbest.num_frames > state.num_frames
        if shared is None:
            self._remember([advanced[b] for b in begins])
        return [advanced[b] for b in range(len(states))]

    def _check(self, states: Sequence[StreamState | None]) -> None:
        for b, state in enumerate(states):
            if state is not None and state.slot is None:
                raise ValueError(
                    f"{self.name}[{b}] cannot be continued: its search was released (utterances "
                    f"not yet continued are kept for {RECENT_BATCHES} batches, pickled ones not at all)"
                )
            if state is not None and state.is_continued:
                raise ValueError(f"{self.name}[{b}] was continued before: expected what this has returned")

    def _remember(self, begun: list[StreamState]) -> None:
        """Release the oldest state objects. Utterances that continue have newer state objects, and do not end."""
        if begun:
            self._recent.append(begun)
        while len(self._recent) > RECENT_BATCHES:
            for state in self._recent.popleft():
                state.slot = state.history = None


def _history(state: StreamState | None, frames: Tensor) -> Tensor:
    if state is None or state.history is None:
        return frames.clone()
    return torch.cat([state.history, frames])


@contextlib.contextmanager
def all_or_nothing(pipeline: Any, streams: Sequence[int]) -> Iterator[None]:
    """Restore the state of a pipeline if the block, which decodes a step of its streams, raises an error.

    Args:
        pipeline: buffered or cache-aware, with audio frames as its requests.
        streams: all streams of the step.
    """
    undo = [_undo_objects(pipeline._state_pool, streams)]
    if hasattr(pipeline, "context_manager"):
        buffers, caches = pipeline.bufferer, pipeline.context_manager
        undo += [
            _undo_rows(buffers, streams, feature_buffer=0),
            _undo_objects(dict(enumerate(buffers.audio_bufferers)), _rows(buffers, streams)),
            _undo_rows(caches, streams, cache_last_channel=1, cache_last_time=1, cache_last_channel_len=0),
        ]
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
    """Return a function that restores the streams' objects in `held`; tensors need no copy, as steps replace them.
    Lists and hypotheses are copied, because steps change them in place."""
    before = {
        stream: (held[stream], {name: _copy(value) for name, value in vars(held[stream]).items()})
        for stream in streams
        if stream in held
    }

    def put_back() -> None:
        for stream in streams:
            held.pop(stream, None)
        for stream, (holder, values) in before.items():
            held[stream] = holder
            holder.__dict__ = values

    return put_back


def _copy(value: Any) -> Any:
    if isinstance(value, list | dict):
        return value.copy()
    if isinstance(value, Hypothesis):
        other = copy.copy(value)
        other.__dict__ = {name: item.copy() if isinstance(item, list) else item for name, item in vars(value).items()}
        return other
    return value


def _rows(owner: Any, streams: Sequence[int]) -> list[int]:
    """Return the tensor rows of streams in a `CacheAwareContextManager` or `BatchedCacheFeatureBufferer`."""
    return [owner.streamidx2slotidx[stream] for stream in streams if stream in owner.streamidx2slotidx]


def _undo_rows(owner: Any, streams: Sequence[int], **axes: int) -> Callable[[], None]:
    """Return a function that restores the tensor rows of streams, with zeros for streams that began in the step.

    It also restores the owner's two mappings between streams and slots, and its free slots.

    Args:
        axes: for each tensor of the owner, by name, the axis of its rows.
    """
    (queue,) = (value for value in vars(owner).values() if isinstance(value, Queue))
    by_stream, by_slot, free = owner.streamidx2slotidx.copy(), owner.slotidx2streamidx.copy(), list(queue.queue)
    rows = torch.tensor(_rows(owner, streams), dtype=torch.int64)
    tensors = [(getattr(owner, name), axis) for name, axis in axes.items()]
    kept = [tensor.index_select(axis, rows.to(tensor.device)) for tensor, axis in tensors]

    def put_back() -> None:
        begun = [row for row in owner.slotidx2streamidx if row not in by_slot]
        owner.streamidx2slotidx, owner.slotidx2streamidx = by_stream, by_slot
        queue.queue.clear()
        queue.queue.extend(free)
        for (tensor, axis), values in zip(tensors, kept, strict=True):
            tensor.index_fill_(axis, torch.tensor(begun, dtype=torch.int64, device=tensor.device), 0)
            tensor.index_copy_(axis, rows.to(tensor.device), values)

    return put_back
