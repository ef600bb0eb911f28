"""Undo a step of NeMo's pipelines after an error.

    with all_or_nothing(pipeline, [7, 8]):
        outputs = pipeline.transcribe_step(frames)     # of streams 7 and 8

If the block raises, the pipeline is restored. The caller then steps its streams one by one and drops the stream that
raises.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from typing import Any

import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis


@contextlib.contextmanager
def all_or_nothing(pipeline: Any, streams: Sequence[int]) -> Iterator[None]:
    """A block that steps streams of a pipeline; an error in it restores the pipeline.

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
    """The objects of streams and their attributes; tensors are not copied, because steps replace them."""
    before = {stream: (held[stream], _copied(held[stream])) for stream in streams if stream in held}

    def put_back() -> None:
        for stream in streams:
            held.pop(stream, None)
        for stream, (own, values) in before.items():
            held[stream] = own
            own.__dict__ = values

    return put_back


def _copied(holder: Any) -> dict[str, Any]:
    """The attributes of an object, with copies of lists and hypotheses, which steps change in place."""
    return {name: _copy(value) for name, value in vars(holder).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, list | dict):
        return value.copy()
    if isinstance(value, Hypothesis):
        other = copy.copy(value)
        other.__dict__ = {name: own.copy() if isinstance(own, list) else own for name, own in vars(value).items()}
        return other
    return value


def _undo_features(bufferer: Any, streams: Sequence[int]) -> Callable[[], None]:
    """The state of a `BatchedCacheFeatureBufferer`, which clears a slot before a stream gets it."""
    put_slots_back = _undo_slots(bufferer)
    rows = [bufferer.streamidx2slotidx[stream] for stream in streams if stream in bufferer.streamidx2slotidx]
    audio = [(bufferer.audio_bufferers[row], vars(bufferer.audio_bufferers[row]).copy()) for row in rows]
    features = bufferer.feature_buffer[rows]

    def put_back() -> None:
        put_slots_back()
        bufferer.feature_buffer[rows] = features
        for own, values in audio:
            own.__dict__ = values

    return put_back


def _undo_caches(manager: Any, streams: Sequence[int]) -> Callable[[], None]:
    """The state of a `CacheAwareContextManager`; its free slots are zeros."""
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
    """The mapping of streams to slots, in both."""
    (queue,) = (value for value in vars(owner).values() if isinstance(value, Queue))
    by_stream, by_slot, free = owner.streamidx2slotidx.copy(), owner.slotidx2streamidx.copy(), list(queue.queue)

    def put_back() -> None:
        owner.streamidx2slotidx, owner.slotidx2streamidx = by_stream, by_slot
        queue.queue.clear()
        queue.queue.extend(free)

    return put_back
