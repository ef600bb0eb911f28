"""`Streams`: the utterances that a decoder is decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.boosting_tree import BoostingTree
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.search.engine import Engine


@dataclass
class Streams:
    """State of n utterances that are being decoded. Only one thread may use it at a time."""

    fusion: BatchFusion  # LM, boosting tree and weights of each
    capacity: int  # frames to allocate buffers for
    is_open: np.ndarray  # [n] bool
    engine: Engine | None = None  # created by the first push, on the backend for its inputs
    commit_frames: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [n] at the last commit
    # Of utterances whose phrases need evidence, by their numbers. A copy of these streams keeps its own values.
    requests: dict[int, Request] = field(default_factory=dict)
    heard: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)  # all inputs
    shown: dict[int, int] = field(default_factory=dict)  # committed tokens of partial results

    def __post_init__(self) -> None:
        self.commit_frames = np.zeros(len(self), np.int64)

    def __len__(self) -> int:
        return len(self.fusion)

    @property
    def closed(self) -> bool:
        """Whether there are streams and all of them are closed."""
        return len(self) > 0 and not self.is_open.any()

    def set_open(self, rows: Sequence[int], is_open: bool) -> None:
        """Mark streams as open or closed; copies of these streams keep their own marks."""
        self.is_open = self.is_open.copy()
        self.is_open[list(rows)] = is_open

    def tree_of(self, row: int) -> BoostingTree | None:
        """The phrases of an utterance; None without phrases, or if the tree does not name them."""
        fusion = self.fusion
        tree = fusion.trees[fusion.tree_of[row]] if fusion.boosting_weights[row] else None
        return tree if isinstance(tree, BoostingTree) and tree.table is not None else None

    def remember(self, rows: Sequence[int], requests: Sequence[Request | None] | None) -> None:
        """Keep the requests of new utterances, and later their inputs, where phrases need evidence."""
        kept: list[int] = []
        if any(isinstance(tree, BoostingTree) and tree.ac_threshold > 0 for tree in self.fusion.trees):
            kept = [i for i, row in enumerate(rows) if (tree := self.tree_of(row)) and tree.ac_threshold > 0]
        left = self.requests.keys() - set(rows)
        self.requests = {row: self.requests[row] for row in left} | {
            rows[i]: (requests and requests[i]) or Request() for i in kept
        }
        self.heard = {row: self.heard.get(row, ()) if row in left else () for row in self.requests}
        self.shown = {row: self.shown.get(row, 0) if row in left else 0 for row in self.requests}

    def hear(self, inputs: Tensor, counts: Sequence[int], *, copies: bool) -> None:
        """Keep the inputs that were read; `copies`: the caller may change `inputs` later."""
        heard = dict(self.heard)
        for row in heard:
            if counts[row] > 0:
                own = inputs[row, : counts[row]]
                heard[row] += (own.clone() if copies else own,)
        self.heard = heard
