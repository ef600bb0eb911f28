"""The buffers of one run on the GPU, at fixed addresses so that a CUDA graph may know them.

A run copies its utterances in, works, and copies them out again; between runs a workspace holds nothing
that counts, so any run that fits may take any idle one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton
from nemo_gpu_decoding.search.transducer import launch_shape as shapes
from nemo_gpu_decoding.search.transducer.beam import HYPOTHESIS, NODE

NODE_ROOM = 8192  # per utterance; when they are full, the host fetches them and the run goes on
MOST_IDLE = 4  # workspaces that a decoder keeps


@dataclass(frozen=True)
class WorkspaceShape:
    """What must agree for a run to use a workspace; frames and automata may grow."""

    device: torch.device
    utterances: int  # B, at least those of the run
    beam_size: int  # K
    per_hypothesis: int  # M
    entries: int  # of the memory of predictions, per utterance
    frame: tuple[Any, ...]  # dtype and shape of a row of projected frames
    parts: tuple[tuple[Any, ...], ...]  # the same of predictions and of the parts of a state


def bucket(size: int) -> int:
    """The next power of two: sizes that come and go share a workspace, and with it a graph."""
    return 1 << max(0, size - 1).bit_length()


class Workspace:
    """Tensors named as in the signatures of launch_shape.py."""

    def __init__(self, shape: WorkspaceShape) -> None:
        self.shape = shape
        n, beam_size = shape.utterances, shape.beam_size
        self.rows = n * beam_size
        self.node_room = max(NODE_ROOM, 2 * beam_size)
        self.utterances = self._records(shapes.UTTERANCE.itemsize, n)
        self.beams = self._records(HYPOTHESIS.itemsize, n, beam_size)
        self.progress = self._records(shapes.PROGRESS.itemsize, n)
        self.nodes = self._records(NODE.itemsize, n, self.node_room)
        self.extensions = self._records(shapes.EXTENSION.itemsize, n, beam_size, shape.per_hypothesis)
        self.counts = self._zeros(torch.int32, n, beam_size)
        self.going = self._zeros(torch.int32, 1)
        self.frame_rows, self.text_rows, self.labels, self.sources, self.targets = (
            self._zeros(torch.int64, n, beam_size) for _ in range(5)
        )
        # what the joint is given; rows of hypotheses that need nothing keep old numbers
        self.joint_frames = self._like(shape.frame, self.rows)
        self.joint_predictions = self._like(shape.parts[0], self.rows)
        # the memory of predictions: outputs, then the parts of a state
        self.memory = tuple(self._like(part, n * shape.entries) for part in shape.parts)
        self.frames = self._like(shape.frame, 0)
        self.boosting = DeviceAutomaton(self._records(1, 0), self._records(1, 0))
        self.constants: dict[Any, Tensor] = {}
        self._rooms: dict[Any, Tensor] = {}
        self.graphs: dict[Any, Any] = {}  # see cuda_graphs.py; they hold the addresses of all the above

    def room(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A buffer [*shape] under a name of its user's: zeros at first, the same one ever after."""
        key = name, dtype, shape
        if key not in self._rooms:
            self._rooms[key] = self._zeros(dtype, *shape)
        return self._rooms[key]

    def take_frames(self, values: Tensor) -> None:
        """Copy frames [n, C, H] in, one utterance after the other."""
        rows = values.flatten(0, 1)
        if len(rows) > len(self.frames):
            self.frames = self._like(self.shape.frame, bucket(len(rows)))
            self.graphs.clear()
        self.frames[: len(rows)] = rows

    def take_boosting(self, automaton: DeviceAutomaton) -> None:
        """Copy the trees of this run in: they differ from run to run."""
        kept = []
        for old, new in zip(self.boosting, automaton, strict=True):
            if len(new) > len(old) or new.shape[1] != old.shape[1]:
                old = self._records(new.shape[1], bucket(len(new)))
                self.graphs.clear()
            old[: len(new)] = new
            kept.append(old)
        self.boosting = DeviceAutomaton(*kept)

    def take_predictions(self, parts: Sequence[Tensor]) -> None:
        """Copy the memory of predictions of n utterances in."""
        for own, part in zip(self.memory, parts, strict=True):
            own[: len(part)] = part

    def give_predictions(self, parts: Sequence[Tensor]) -> None:
        """Copy it out again."""
        for own, part in zip(self.memory, parts, strict=True):
            part.copy_(own[: len(part)])

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.shape.device)

    def _records(self, itemsize: int, *shape: int) -> Tensor:
        return self._zeros(torch.uint8, *shape, itemsize)

    def _like(self, kind: tuple[Any, ...], rows: int) -> Tensor:
        dtype, *shape = kind
        return self._zeros(dtype, rows, *shape)


@dataclass
class WorkspacePool:
    """The idle workspaces of one decoder; its runs may come from several threads."""

    _idle: list[Workspace] = field(default_factory=list)  # the last used one last
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def borrowed(self, shape: WorkspaceShape) -> Iterator[Workspace]:
        """A workspace of this shape for the time of a run; lost if the run fails."""
        with self._lock:
            fitting = [workspace for workspace in self._idle if workspace.shape == shape]
            if fitting:
                self._idle.remove(fitting[-1])
        workspace = fitting[-1] if fitting else Workspace(shape)
        yield workspace
        with self._lock:
            self._idle = [*self._idle, workspace][-MOST_IDLE:]


def kind_of(rows: Tensor) -> tuple[Any, ...]:
    """Type and shape of a row, as in `WorkspaceShape`."""
    return rows.dtype, *rows.shape[1:]
