"""`Slots` decodes live utterances in one batch of a decoder; each utterance may begin and end at any time.

    slots = Slots(decoder)
    here, there = slots.begin(), slots.begin(request)     # at the beginning of utterances
    errors = slots.push({here: chunk, there: other})      # all utterances with new frames, in one call
    slots.partial([here, there])                          # the best hypotheses so far
    (result,) = slots.end([here])                         # the utterance has ended; its slot is free

A slot is a row of a decoder's `Streams`, and a group is one `Streams`. If no slot is free, a new group doubles the
number of slots. New utterances begin in the largest group; the other groups are dropped when they are empty. Therefore
a step needs one `push` and one `partial` of the decoder, or a few of each after the number of utterances has grown.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Streams
from nemo_gpu_decoding.search.result import NBest

FIRST = 8  # initial number of slots


@dataclass(frozen=True, eq=False)
class LiveSlot:
    """One stream of a decoder, which one utterance uses from `begin` to `end`."""

    slots: "Slots"
    streams: Streams
    row: int


class _StepEvents(NamedTuple):
    """What undoing a `Slots.step` needs: the utterances that began, read a chunk or ended in it."""

    begun: dict[LiveSlot, None]
    pushed: dict[LiveSlot, ValueError | None]  # the error of each chunk; None: the chunk was read
    ended: dict[LiveSlot, None]


class Slots:
    """Live utterances that a decoder decodes in one batch. Only one thread may use the object at a time.

    The result of an utterance depends neither on other utterances nor on earlier utterances in its slot.

    Args:
        decoder: any decoder.
        first: initial number of slots, >= 1; more are added when they are needed.
    """

    def __init__(self, decoder: Decoder[Any, Any], first: int = FIRST) -> None:
        if first < 1:
            raise FieldError("first", first, "a number of utterances, >= 1")
        self.decoder, self._first = decoder, first
        self._groups: list[Streams] = []
        self._step: _StepEvents | None = None  # the running step
        self._read: dict[LiveSlot, ValueError | None] = {}  # errors of chunks in failed steps; None: no error

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Undo a block that raises an error: utterances that began in the block are abandoned, and utterances that
        ended in the block continue. After an error, push the same chunks again; chunks that were read are not read
        twice."""
        step, groups, closed = _StepEvents({}, {}, {}), self._groups.copy(), list[LiveSlot]()
        self._step = step
        try:
            yield
            self._step, closed = None, list(step.ended)
            self.abandon(closed)
        except BaseException:
            self._step, self._groups = None, groups
            for slot in closed:  # closed streams keep their state
                slot.streams.set_open([slot.row], True)
            self._read |= {slot: error for slot, error in step.pushed.items() if slot not in step.begun}
            self.abandon(list(step.begun))
            raise
        for slot in step.pushed:
            self._read.pop(slot, None)

    def __len__(self) -> int:
        """Return the number of running utterances."""
        return sum(int(streams.is_open.sum()) for streams in self._groups)

    @property
    def capacity(self) -> int:
        """Return the number of slots, free ones included."""
        return sum(map(len, self._groups))

    def begin(self, request: Request | None = None) -> LiveSlot:
        """Begin an utterance in a free slot and return the slot.

        Args:
            request: weights and boosting tree that replace the decoder's.

        Raises:
            ValueError: the request does not fit the decoder.
        """
        streams = max((group for group in self._groups if not group.is_open.all()), key=len, default=None)
        if streams is None:
            streams = self.decoder.open(max(self._first, self.capacity))
            streams.set_open(range(len(streams)), False)
            self._groups.append(streams)
        row = int(streams.is_open.argmin())
        self.decoder.reopen(streams, [row], None if request is None else [request])
        slot = LiveSlot(self, streams, row)
        if self._step is not None:
            self._step.begun[slot] = None
        return slot

    def begin_together(self, n: int, requests: Sequence[Request | None] | None = None) -> list[LiveSlot]:
        """Begin n utterances in a new group of slots, one per request; not allowed within `step`."""
        streams = self.decoder.open(n, requests)
        self._groups.append(streams)
        return [LiveSlot(self, streams, row) for row in range(n)]

    def push(self, chunks: Mapping[LiveSlot, Tensor]) -> dict[LiveSlot, ValueError]:
        """Decode the next chunks of these utterances.

        Args:
            chunks: [T, ...] valid frames of each utterance that has new ones; T may differ.

        Returns:
            The errors of chunks that were not read. Their utterances are unchanged. All other chunks were read.

        Raises:
            ValueError: chunks have the wrong shape; all utterances are unchanged.
        """
        outcomes = {slot: self._read[slot] for slot in chunks if slot in self._read}
        pushed = outcomes if self._step is None else self._step.pushed
        pushed.update(outcomes)
        for streams, slots in self._by_group(slot for slot in chunks if slot not in outcomes):
            frames = [chunks[slot] for slot in slots]
            rows = [slot.row for slot in slots]
            inputs, lengths = pad_sequence(frames, batch_first=True), [len(chunk) for chunk in frames]
            read: dict[LiveSlot, ValueError | None] = dict.fromkeys(slots)
            errors = self.decoder.push(streams, inputs, lengths, rows=rows, isolate=True)
            pushed.update(read)  # before anything can fail, so that chunks are not read twice
            for slot in slots:
                if slot.row in errors:
                    pushed[slot] = errors[slot.row]
                outcomes[slot] = pushed[slot]
        return {slot: error for slot, error in outcomes.items() if error is not None}

    def partial(self, slots: Sequence[LiveSlot], n_best: int = 1) -> list[Any]:
        """Return the best hypotheses so far as an `NBest` for each of these utterances; see `Decoder.partial`."""
        return self._asked(slots, lambda streams, rows: self.decoder.partial(streams, n_best, rows=rows))

    def final(self, slots: Sequence[LiveSlot]) -> list[Any]:
        """Return the `NBest` that `end` would return for each of these utterances; the utterances continue."""
        # a copy is closed
        return self._asked(slots, lambda streams, rows: self.decoder.close(replace(streams), rows=rows))

    def end(self, slots: Sequence[LiveSlot]) -> list[Any]:
        """End these utterances, free their slots, and return an `NBest` for each utterance."""
        results = self.final(slots)
        self.abandon(slots)
        return results

    def abandon(self, slots: Sequence[LiveSlot]) -> None:
        """End these utterances without a result, and free their slots."""
        if self._step is not None:
            self._step.ended.update(dict.fromkeys(slots))
            return
        for slot in slots:
            slot.streams.set_open([slot.row], False)
            self._read.pop(slot, None)
        self._drop_empty()

    def _drop_empty(self) -> None:
        largest = max(map(len, self._groups), default=0)
        self._groups = [group for group in self._groups if group.is_open.any() or len(group) == largest]

    def _by_group(self, slots: Any) -> list[tuple[Streams, list[LiveSlot]]]:
        groups: dict[int, tuple[Streams, list[LiveSlot]]] = {}
        for slot in slots:
            groups.setdefault(id(slot.streams), (slot.streams, []))[1].append(slot)
        return list(groups.values())

    def _asked(self, slots: Sequence[LiveSlot], ask: Any) -> list[NBest]:
        results: dict[LiveSlot, NBest] = {}
        for streams, slots_of_group in self._by_group(slots):
            results |= dict(zip(slots_of_group, ask(streams, [slot.row for slot in slots_of_group]), strict=True))
        return [results[slot] for slot in slots]
