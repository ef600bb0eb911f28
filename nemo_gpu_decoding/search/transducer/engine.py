"""`TransducerEngine`: what the engines of both backends share. Frames come in, results go out.

Between runs all backends keep the same things, in a `StreamState`; a subclass says how a run is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.search.engine import StreamsLost
from nemo_gpu_decoding.search.transducer.beam import Batch, Search, new_batch, new_nodes
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cuda_step import DeviceStep
from nemo_gpu_decoding.search.transducer.history import rank
from nemo_gpu_decoding.search.transducer.inputs import valid_frames
from nemo_gpu_decoding.search.transducer.memory import Frames, Predictions
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


class Strategy(NamedTuple):
    """What makes a transducer search alsd_pp or aes_pp, and the options of a batch."""

    step: Callable[..., None]  # one step of some utterances, compiled; see `alsd_pp/cpu.py`
    limits: Any  # of expansion, for `step`
    kernels: DeviceStep  # the same step on the GPU
    search: Search
    durations: np.ndarray  # [D] int32, frames


@dataclass
class StreamState:
    """n utterances being searched."""

    batch: Batch
    nodes: np.ndarray  # [n, N] NODE
    predictions: Predictions
    frames: Frames  # those that a hypothesis may still read

    def selected(self, rows: np.ndarray) -> StreamState:
        """A copy of some utterances."""
        batch = Batch(*(part[rows] for part in self.batch))
        most = int(batch.node_counts.max(initial=0))
        return StreamState(
            batch, self.nodes[rows, :most], self.predictions.selected(rows, len(self.batch.sizes)),
            Frames(self.frames.values[rows], self.frames.first[rows]),
        )  # fmt: skip

    def add_frames(self, projected: Tensor, lengths: np.ndarray) -> None:
        """Take in new frames: projected [sum of lengths, H], of one utterance after the other."""
        self.frames = self._frames_and(projected, lengths)
        self.batch.ends[:] += lengths

    def forget_read(self) -> None:
        """Free the memory of encoder frames that no hypothesis needs any more."""
        nothing = self.frames.values.new_zeros(0, self.frames.values.shape[2])
        self.frames = self._frames_and(nothing, np.zeros(len(self.batch.sizes), np.int64))

    def _frames_and(self, projected: Tensor, lengths: np.ndarray) -> Frames:
        """The frames that are still needed, and new ones."""
        batch = self.batch
        alive = np.arange(batch.beam.shape[1]) < batch.sizes[:, None]
        needed = np.where(alive, batch.beam["frame"], np.iinfo(np.int32).max).min(axis=1)
        return self.frames.extended(projected, lengths, batch.ends, needed)


class Found(NamedTuple):
    """The best hypotheses of R utterances, N of each."""

    order: np.ndarray  # [R, N] int32 slots in the beam, best first; -1: there are fewer
    scores: np.ndarray  # [R, N] float32
    state: StreamState
    rows: np.ndarray  # [R] numbers of the utterances in `state`


class TransducerEngine(ABC):
    """See `engine.Engine`; errors are never deferred.

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: options of the decoder.
        strategy: alsd_pp's or aes_pp's part.
        fusion: LM, boosting trees and weights of each utterance.
    """

    def __init__(
        self,
        networks: TransducerNetworks,
        config: TransducerConfig,
        strategy: Strategy,
        fusion: BatchFusion,
    ) -> None:
        self._networks, self._config, self._strategy = networks, config, strategy
        self._fusion = fusion
        arrays, n = fusion.arrays, len(fusion)
        batch = new_batch(
            n, config.beam_size, arrays.lm_starts, arrays.boosting_starts, arrays.lm_weights,
            arrays.boosting_weights,
        )  # fmt: skip
        with torch.inference_mode(), networks.evaluation():
            predictions = Predictions.start(networks, n, batch.memo_hash.shape[1])
        nodes = new_nodes(n, 16 * config.beam_size)
        self._state = StreamState(batch, nodes, predictions, Frames.none(n))
        self._lost = False

    @abstractmethod
    def _advance(self, state: StreamState, *, ended: bool) -> None:
        """Search until every utterance needs frames that have not come, or has `ended`.

        Stops at once with a size <= 0 in the batch where the joint's output was unusable.
        """

    def takes(self, lengths: Tensor) -> bool:
        return False

    def push(self, inputs: Tensor, lengths: np.ndarray | Tensor, *, deferred: bool = False) -> None:
        """See `engine.Engine.push`.

        A hypothesis that is behind others in time keeps them waiting, so that the order of steps, and
        with it the result, is that of the whole utterance.
        """
        assert isinstance(lengths, np.ndarray)
        self._check_alive()
        new = valid_frames(inputs, lengths)
        if len(new) == 0:
            return
        with torch.inference_mode(), self._networks.evaluation():
            self._state.add_frames(self._networks.project_encoder(new), lengths)
            self._lost = True  # for good, if the networks fail half-way
            self._run(self._state, ended=False)
            self._lost = False
            self._state.forget_read()

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Found:
        """See `engine.Engine.results`; what the streams remember stays as it is."""
        self._check_alive()
        state, numbers = self._state, np.array(rows, np.int64)
        if final and state.frames.values.shape[1]:  # frames that wait for others to come
            state = state.selected(numbers)
            with torch.inference_mode(), self._networks.evaluation():
                self._run(state, ended=True)
            numbers = np.arange(len(numbers))
        order = np.full((len(numbers), n_best), -1, np.int32)
        scores = np.zeros((len(numbers), n_best), np.float32)
        boosting = self._fusion.arrays.boosting
        rank(numbers, state.batch, boosting, final, self._config.score_norm, order, scores)
        return Found(order, scores, state, numbers)

    def _run(self, state: StreamState, *, ended: bool) -> None:
        self._advance(state, ended=ended)
        failed = np.flatnonzero(state.batch.sizes <= 0)
        if len(failed):
            b = int(failed[0])
            what = "NaN or +inf" if state.batch.sizes[b] < 0 else "-inf for every label"
            raise StreamsLost(
                f"networks give {what} for utterance {b}, expected logits of which at least one is "
                "finite and none is NaN or +inf; the streams are closed"
            )

    def _check_alive(self) -> None:
        if self._lost:
            raise StreamsLost("streams is closed, expected streams whose networks have not failed")
