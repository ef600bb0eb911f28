"""Hold the GPU buffers of runs at fixed addresses, for CUDA graphs, and move data to and from these buffers.

A run copies its utterances in, searches, and copies them out; it may use any idle workspace of its shape. Streams keep
a workspace from push to push, in which their predictions and frames stay.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import Module, Signature, runtime
from nemo_gpu_decoding.cuda.upload import Exchange
from nemo_gpu_decoding.fusion.batch import DeviceAutomaton
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.records import ACTIVE, FULL, REFUSED, WAITING

SCHEDULE = "search/transducer/schedule.cu"
NODE_CAPACITY = 8192  # per utterance; when a buffer is full, the host fetches the nodes and the run continues
MOST_IDLE = 4  # workspaces that a decoder keeps
MOST_HELD = 4  # workspaces of a decoder that streams hold; each has graphs of its own

# (source, from_rows, target, to_rows). None in place of rows: row r is number r. A row below 0 is not moved
Part = tuple[Tensor, "Tensor | None", Tensor, "Tensor | None"]


@dataclass(frozen=True)
class WorkspaceShape:
    """The shape that a run and its workspace must share; buffers of frames and automata may grow."""

    device: torch.device
    utterances: int  # B, at least those of the run
    beam_size: int  # K
    max_extensions: int  # M
    cache_entries: int  # of the prediction cache, per utterance
    prediction_rows: int  # of the batch of the prediction network, at least K and at most B * K
    frame: tuple[Any, ...]  # dtype and shape of a row of projected frames
    parts: tuple[tuple[Any, ...], ...]  # the same of predictions and of the parts of a state
    durations: tuple[int, ...] = (0,)  # frames
    nodes_of_push: int = 0  # capacity if nodes are fetched together with the beams; 0: they are fetched on their own


def bucket(size: int) -> int:
    """Return the next power of two, so that batches of similar sizes share a workspace and its graphs."""
    return 1 << max(0, size - 1).bit_length()


class RunWorkspace:
    """The tensors and sizes of a run, with the names that records.py gives them."""

    def __init__(self, shape: WorkspaceShape) -> None:
        self.shape = shape
        self.kernels = runtime().load(SCHEDULE, shape.device)
        n, beam_size = shape.utterances, shape.beam_size
        self.rows = n * beam_size
        self.num_utterances, self.beam_size, self.cache_entries = n, beam_size, shape.cache_entries
        self.node_capacity = max(min(shape.nodes_of_push or NODE_CAPACITY, NODE_CAPACITY), 2 * beam_size)
        nodes = {"nodes": (records.NODE, (n, self.node_capacity))}
        self.exchange = Exchange(
            {
                "streams": (records.STREAM_PARAMS, (n,)),
                "counters": (records.STREAM_COUNTERS, (n,)),
                "beams": (records.HYPOTHESIS, (n, beam_size)),
                **(nodes if shape.nodes_of_push else {}),
            },
            shape.device,
        )
        self.streams, self.counters, self.beams, *packed = self.exchange.on_device.values()
        self.nodes = packed[0] if packed else self._records(records.NODE.itemsize, n, self.node_capacity)
        self.extensions = self._records(records.CANDIDATE.itemsize, n, beam_size, shape.max_extensions)
        self.counts = self._zeros(torch.int32, n, beam_size)
        self.finished = self._zeros(torch.int64, 1)
        self.frame_rows, self.text_rows, self.new_labels, self.new_sources, self.new_targets = (
            self._zeros(torch.int64, n, beam_size) for _ in range(5)
        )
        self.prediction_rows = shape.prediction_rows
        self.labels, self.sources, self.targets = (self._zeros(torch.int64, shape.prediction_rows) for _ in range(3))
        self.taken_rows = self._zeros(torch.int32, 1)
        # the prediction cache: outputs, then the parts of a state
        self.cache = tuple(self._like(part, n * shape.cache_entries) for part in shape.parts)
        self.columns = 0  # frames that an utterance has room for
        self.frames = self._like(shape.frame, 0)
        self.frame_store: Tensor | None = None  # their bytes
        self.frame_bytes = self.frames.itemsize * math.prod(self.frames.shape[1:])
        self.boosting = DeviceAutomaton(self._records(1, 0), self._records(1, 0))
        self.durations = torch.tensor(shape.durations, dtype=torch.int32, device=shape.device)
        self._joined: weakref.ref[Tensor] | None = None  # the states that `boosting` is a copy of
        self._buffers: dict[Any, Tensor] = {}
        self._own_names: dict[str, list[str]] = {}  # of a kernel's arguments
        self.recalled_of: Any = None  # weights that `recalled` buffers were computed with, see `LSTMPrediction.begin`
        self.graphs: dict[Any, Any] = {}  # see cuda_graphs.py; they contain the addresses of the buffers above

    def launch(
        self, module: Module, signature: Signature, *, grid: int, block: int, shared_bytes: int = 0, **others: Any
    ) -> None:
        """Launch a kernel; `others` are its arguments that are not attributes of the workspace."""
        names = self._own_names.get(signature.name)
        if names is None:
            names = self._own_names[signature.name] = [name for name in signature.parameters if hasattr(self, name)]
        arguments = {name: getattr(self, name) for name in names}
        module.launch(signature, grid=grid, block=block, shared_bytes=shared_bytes, **{**arguments, **others})

    def move_rows(self, rows: int, *parts: Part) -> None:
        """Copy row from_rows[r] of the source to row to_rows[r] of the target, for r < `rows` and each part.

        Args:
            parts: contiguous tensors [R, ...] whose rows are of one type and shape; rows int64.
        """
        for first in range(0, len(parts), records.MOVED_PARTS):
            arguments: dict[str, Any] = dict.fromkeys(records.MOVE_ROWS.parameters)
            arguments |= {f"bytes{i}": 0 for i in range(records.MOVED_PARTS)}
            for i, (source, from_rows, target, to_rows) in enumerate(parts[first : first + records.MOVED_PARTS]):
                given = as_bytes(source)
                arguments |= {f"from{i}": given, f"from_rows{i}": from_rows, f"bytes{i}": given.shape[1]}
                arguments |= {f"to{i}": as_bytes(target), f"to_rows{i}": to_rows}
            self.kernels.launch(records.MOVE_ROWS, grid=rows, block=records.MOVE_THREADS, **arguments)

    def buffer(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return the buffer [*shape] with this name; created with zeros by the first call."""
        key = name, dtype, shape
        if key not in self._buffers:
            self._buffers[key] = self._zeros(dtype, *shape)
        return self._buffers[key]

    def frames_of(self, n: int) -> Tensor:
        """Return the frames of n utterances, [n, columns, H]."""
        return self.frames.view(self.shape.utterances, self.columns, *self.frames.shape[1:])[:n]

    def take_frames(self, values: Tensor) -> None:
        """Copy frames [n, C, H] to the workspace, one row per utterance."""
        n, columns = values.shape[:2]
        if columns > 0:
            self.reserve_frames(columns)
            self.frames_of(n)[:, :columns] = values

    def reserve_frames(self, columns: int) -> None:
        """Make room for `columns` frames of each utterance. A new buffer keeps all frames; no graph uses it yet."""
        if columns > self.columns:
            old, n = self.frames_of(self.shape.utterances), self.shape.utterances
            before, self.columns = self.columns, bucket(columns)
            self.frames = self._like(self.shape.frame, n * self.columns)
            self.frames_of(n)[:, :before] = old
            self.frame_store = as_bytes(self.frames)
            self.graphs.clear()

    def take_boosting(self, automaton: DeviceAutomaton) -> None:
        """Copy this run's boosting trees to the workspace, unless it has them from the last run."""
        if self._joined is None or self._joined() is not automaton.states:
            self.boosting = DeviceAutomaton(*map(self._filled, self.boosting, automaton))
            self._joined = weakref.ref(automaton.states)

    def take_predictions(self, parts: Sequence[Tensor]) -> None:
        """Copy the prediction cache of n utterances to the workspace."""
        self.recalled_of = None
        for entries, part in zip(self.cache, parts, strict=True):
            entries[: len(part)] = part

    def give_predictions(self, parts: Sequence[Tensor]) -> None:
        """Copy the prediction cache of n utterances out, and wait: the next run may be on another CUDA stream."""
        for entries, part in zip(self.cache, parts, strict=True):
            part.copy_(entries[: len(part)])
        if self.shape.device.type == "cuda":
            torch.cuda.current_stream(self.shape.device).synchronize()

    def _filled(self, buffer: Tensor, rows: Tensor) -> Tensor:
        """Return the buffer with `rows` at its start; if it is too small, a larger one, which no graph uses."""
        if len(rows) > len(buffer) or rows.shape[1:] != buffer.shape[1:]:
            buffer = self._zeros(rows.dtype, bucket(len(rows)), *rows.shape[1:])
            self.graphs.clear()
        buffer[: len(rows)] = rows
        return buffer

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.shape.device)

    def _records(self, itemsize: int, *shape: int) -> Tensor:
        return self._zeros(torch.uint8, *shape, itemsize)

    def _like(self, kind: tuple[Any, ...], rows: int) -> Tensor:
        dtype, *shape = kind
        return self._zeros(dtype, rows, *shape)


@dataclass
class WorkspacePool:
    """The workspaces of one decoder, for runs of several threads."""

    _idle: list[RunWorkspace] = field(default_factory=list)  # the last used one last
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _held: int = 0
    # Of streams that are gone; None: it failed. Finalizers add to it, which must not wait for the lock.
    _returned: list[RunWorkspace | None] = field(default_factory=list)

    @contextmanager
    def borrowed(self, shape: WorkspaceShape) -> Iterator[RunWorkspace]:
        """Lend a workspace of this shape for one run; it is discarded if the run fails."""
        with self._lock:
            self._collect()
            fitting = self._fitting(shape)
        workspace = fitting or RunWorkspace(shape)
        yield workspace
        with self._lock:
            self._idle = [*self._idle, workspace][-MOST_IDLE:]

    def held(self, shape: WorkspaceShape, holder: object) -> Held | None:
        """Return a workspace of this shape, held until `holder` is deleted, or None if `MOST_HELD` others are held."""
        with self._lock:
            self._collect()
            if self._held >= MOST_HELD:
                return None
            self._held += 1
            fitting = self._fitting(shape)
        try:
            workspace = fitting or RunWorkspace(shape)
        except BaseException:
            self._returned.append(None)
            raise
        return Held(workspace, self._returned, holder)

    def _fitting(self, shape: WorkspaceShape) -> RunWorkspace | None:
        """Take the last used idle workspace of this shape. The caller must hold the lock."""
        for i in reversed(range(len(self._idle))):
            if self._idle[i].shape == shape:
                return self._idle.pop(i)
        return None

    def _collect(self) -> None:
        """Make returned workspaces idle. The caller must hold the lock."""
        while self._returned:
            workspace = self._returned.pop()
            self._held -= 1
            if workspace is not None:
                self._idle = [*self._idle, workspace][-MOST_IDLE:]

    def clear(self) -> None:
        """Free the idle workspaces."""
        with self._lock:
            self._collect()
            self._idle = []


class Held:
    """A workspace that streams hold. The pool gets it back when `holder` is deleted, or by `give_back`."""

    def __init__(self, workspace: RunWorkspace, returned: list[RunWorkspace | None], holder: object) -> None:
        self.work, self._returned = workspace, returned
        self._finalizer = weakref.finalize(holder, returned.append, workspace)
        self._finalizer.atexit = False

    def give_back(self) -> None:
        self._finalizer()

    def discard(self) -> None:
        """Discard the workspace after a run that failed."""
        if self._finalizer.detach() is not None:
            self._returned.append(None)


def kind_of(rows: Tensor) -> tuple[Any, ...]:
    """Return type and shape of a row, as in `WorkspaceShape`."""
    return rows.dtype, *rows.shape[1:]


def as_bytes(rows: Tensor) -> Tensor:
    """View [R, ...] of any type as [R, bytes]."""
    return rows.flatten(1).view(torch.uint8)


# ----------------------------------------------------------------------- what a run gets and gives


@compiled
def plan(beams, counters, ends, first_frames, lengths, new_rows, columns, ended, utterances, given):
    """Fill the arrays that a run gives to the device.

    Args:
        beams: [n, K] HYPOTHESIS.
        counters: [n] STREAM_COUNTERS.
        ends: [n] number of frames received before the run.
        first_frames: [n] number of the frame in column 0 of the buffer of frames.
        lengths: [n] number of new frames.
        new_rows: [n] row of the first new frame.
        columns: number of frames per utterance in the buffer.
        ended: whether no more frames follow.
        utterances: [n] UTTERANCE, the weights.
        given: STREAM_PARAMS, STREAM_COUNTERS and HYPOTHESIS of at least n utterances.

    Returns:
        Whether an utterance has a step; and the columns that are needed. If more than `columns` are needed, the caller
        must enlarge the buffer and plan again.
    """
    streams, given_counters, given_beams = given
    has_step, most = False, 0
    for b in range(len(counters)):
        end = ends[b] + lengths[b]
        needed, reads, blocked = ends[b], False, False
        for k in range(counters[b].size):
            frame = np.int64(beams[b, k].frame)
            needed = min(needed, frame)
            if beams[b, k].open:
                reads |= frame < end
                blocked |= frame >= end and not ended
        has_step |= reads and not blocked
        most = max(most, ends[b] - needed + lengths[b])
        for k in range(beams.shape[1]):
            given_beams[b, k] = beams[b, k]
        given_counters[b] = counters[b]
        given_counters[b].node_base = counters[b].node_count
        stream, weights = streams[b], utterances[b]
        stream.lm_weight = weights.lm_weight
        stream.boosting_weight = weights.boosting_weight
        stream.inverse_lm_weight = 1.0 / np.float64(weights.lm_weight) if weights.lm_weight > 0 else 0.0
        stream.first_row = b * columns - needed
        stream.new_row = new_rows[b]
        stream.new_count = lengths[b]
        stream.kept = ends[b] - needed
        stream.kept_from = needed - first_frames[b]
        stream.end = end
        stream.ended = ended
    return has_step, most


@compiled
def outcome(counters):
    """Return: was the run refused; must the host fetch nodes; the most new nodes; the most nodes of a tree."""
    refused, full, failed, most_new, most = False, False, False, 0, 0
    for b in range(len(counters)):
        refused |= counters[b].activity == REFUSED
        full |= counters[b].activity == FULL
        failed |= counters[b].size <= 0
        most_new = max(most_new, counters[b].node_count - counters[b].node_base)
        most = max(most, counters[b].node_count)
    return refused, full and not failed, most_new, most


@compiled
def goes_on(counters):
    """Return whether an utterance has a next step."""
    is_active = False
    for b in range(len(counters)):
        is_active |= counters[b].activity == ACTIVE or counters[b].activity == WAITING
    return is_active


@compiled
def settle(beams, counters, ends, first_frames, lengths, columns, after):
    """Take the state of the utterances after a run from the arrays of `plan`, which the device has changed."""
    streams, counters_after, beams_after = after
    for b in range(len(counters)):
        counters[b] = counters_after[b]
        for k in range(beams.shape[1]):
            beams[b, k] = beams_after[b, k]
        ends[b] += lengths[b]
        first_frames[b] = b * columns - streams[b].first_row


@compiled
def append_nodes(nodes, added, counters):
    """Append the nodes that the device has added, [n, ...] NODE, to the trees."""
    for b in range(len(counters)):
        base = counters[b].node_base
        for i in range(counters[b].node_count - base):
            nodes[b, base + i] = added[b, i]
