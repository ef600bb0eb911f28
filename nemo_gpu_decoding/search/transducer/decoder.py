"""The verbs of all transducer decoders: checks, buffers, results; no algorithm.

`alsd_pp` and `aes_pp` add their options and the step of their search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.search.backend import choose_backend
from nemo_gpu_decoding.search.result import NBest, ScoreParts
from nemo_gpu_decoding.search.transducer import beam as beams
from nemo_gpu_decoding.search.transducer.blank_scoring import BLANK_LM_SCORE_MODES
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cuda_graphs import GraphRunner
from nemo_gpu_decoding.search.transducer.cuda_loop import CUDALoop
from nemo_gpu_decoding.search.transducer.cuda_prediction import PredictionPaths
from nemo_gpu_decoding.search.transducer.cuda_step import DeviceStep
from nemo_gpu_decoding.search.transducer.cuda_workspace import WorkspacePool
from nemo_gpu_decoding.search.transducer.history import fusion_parts, rank, trace_back
from nemo_gpu_decoding.search.transducer.inputs import (
    checked_encoder_output,
    checked_networks,
    valid_frames,
)
from nemo_gpu_decoding.search.transducer.launch_shape import why_not
from nemo_gpu_decoding.search.transducer.loop import Loop
from nemo_gpu_decoding.search.transducer.memory import Frames, Predictions
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks
from nemo_gpu_decoding.search.transducer.result import TransducerPath

C = TypeVar("C", bound=TransducerConfig)


@dataclass
class TransducerStreams:
    """n utterances being decoded: everything a search remembers. Belongs to one thread at a time."""

    batch: beams.Batch
    nodes: np.ndarray  # [n, N] beam.NODE
    predictions: Predictions
    frames: Frames
    fusion: BatchFusion
    closed: bool = False
    backend: str = "cpu"  # that the last `push` chose; between runs all backends keep the same things

    def __len__(self) -> int:
        return len(self.batch.sizes)

    def copy(self) -> TransducerStreams:
        """Streams that can be continued or closed apart from these."""
        return replace(
            self,
            batch=beams.Batch(*(part.copy() for part in self.batch)),
            nodes=self.nodes.copy(),
            predictions=self.predictions.copy(),
        )

    def forget_read(self) -> None:
        """Free the memory of encoder frames that no hypothesis needs any more."""
        nothing = self.frames.values.new_zeros(0, self.frames.values.shape[2])
        self.frames = self._frames_and(nothing, np.zeros(len(self), np.int64))

    def add_frames(self, projected: Tensor, lengths: np.ndarray) -> None:
        """Take in new frames: projected [sum of lengths, H], of one utterance after the other."""
        self.frames = self._frames_and(projected, lengths)
        self.batch.ends[:] += lengths

    def _frames_and(self, projected: Tensor, lengths: np.ndarray) -> Frames:
        """The frames that are still needed, and new ones."""
        batch = self.batch
        alive = np.arange(batch.beam.shape[1]) < batch.sizes[:, None]
        needed = np.where(alive, batch.beam["frame"], np.iinfo(np.int32).max).min(axis=1)
        return self.frames.extended(projected, lengths, batch.ends, needed)


class TransducerDecoder(Generic[C]):
    """A batched beam search over a transducer's networks.

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: the options of the search.
        fusion: LM and boosting tree over the V tokens of the networks.

    One decoder may serve several threads at once: it holds no state of a running utterance.

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    def __init__(self, networks: TransducerNetworks, config: C, fusion: Fusion | None = None) -> None:
        self.networks = checked_networks(networks)
        self.config = config
        self.fusion = fusion or Fusion()
        self._labels = FusionLabels(networks.vocab_size)
        check_fusion(self.fusion, self._labels)
        # an RNN-T is a TDT model that knows the duration 0 only, see `transducer/beam.py`
        self._durations = np.array(networks.durations or (0,), np.int32)
        self._graphs = GraphRunner(networks, allowed=config.allow_cuda_graphs)
        self._predictions = PredictionPaths(networks)
        self._workspaces = WorkspacePool()

    @property
    def device_modes(self) -> dict[str, str | None]:
        """How the last run on a GPU went; None before the first one.

        graphs      how steps were launched: loop, chunks or plain, see `cuda_graphs.py`
        prediction  what ran the prediction network: lstm or stateless (our kernels), or torch
        """
        return {"graphs": self._graphs.mode, "prediction": self._predictions.path}

    # ------------------------------------------------------------------------------------ verbs

    def decode(
        self,
        encoder_output: Tensor,
        lengths: Tensor | Sequence[int],
        requests: Sequence[Request | None] | None = None,
    ) -> list[NBest]:
        """Decode a batch.

        Args:
            encoder_output: [B, T, D] floating point. NeMo's encoders give [B, D, T]: transpose(1, 2).
                What lies beyond an utterance's length is never read.
            lengths: [B] valid frames.
            requests: [B] what single utterances want instead of the decoder's fusion.

        Returns:
            One `NBest` of `TransducerPath` per utterance.

        Raises:
            ValueError: wrong shapes, lengths beyond T, NaN or infinity in valid frames, wrong requests.
        """
        checked_encoder_output(encoder_output, lengths, batch=None, size=self.networks.encoder_size)
        streams = self.open(len(encoder_output), requests)
        self.push(streams, encoder_output, lengths)
        return self.close(streams)

    def open(self, n: int, requests: Sequence[Request | None] | None = None) -> TransducerStreams:
        """Begin n utterances that arrive in chunks."""
        if n < 0:
            raise ValueError(f"n is {n}, expected the number of streams, >= 0")
        fusion = BatchFusion.resolve(self.fusion, n, requests, self._labels)
        batch = beams.new_batch(
            n,
            self.config.beam_size,
            fusion.arrays.lm_starts,
            fusion.arrays.boosting_starts,
            fusion.lm_weights,
            fusion.boosting_weights,
        )
        with torch.inference_mode(), self.networks.evaluation():
            predictions = Predictions.start(self.networks, n, batch.memo_hash.shape[1])
        return TransducerStreams(
            batch, beams.new_nodes(n, 16 * self.config.beam_size), predictions, Frames.none(n), fusion
        )

    def push(
        self, streams: TransducerStreams, encoder_output: Tensor, lengths: Tensor | Sequence[int]
    ) -> None:
        """Read the next chunk of every stream: encoder_output [n, T, D], lengths [n] (0 = nothing new).

        A hypothesis that is behind others in time keeps them waiting, so that the order of steps, and
        with it the result, is that of the whole utterance.

        Raises:
            ValueError: as `decode`; the streams are then as they were before the call. If it is the
                networks that fail or give NaN, the streams are closed.
        """
        self._check_open(streams)
        counts = checked_encoder_output(
            encoder_output, lengths, batch=len(streams), size=self.networks.encoder_size
        )
        place = streams.predictions.outputs.device
        streams.backend = choose_backend(
            self.config.backend, encoder_output.device, lambda device: self._why_not(device, place)
        )
        announce_compilation()
        new = valid_frames(encoder_output, counts)
        if len(new) == 0:
            return
        with torch.inference_mode(), self.networks.evaluation():
            streams.add_frames(self.networks.project_encoder(new), counts)
        self._run(streams, ended=False)

    def partial(self, streams: TransducerStreams, n_best: int = 1) -> list[NBest]:
        """The best hypotheses of every stream so far; unfinished phrases still hold their bonus."""
        self._check_open(streams)
        if not 1 <= n_best <= self.config.beam_size:
            raise ValueError(f"n_best is {n_best}, expected 1 .. {self.config.beam_size} (beam_size)")
        return self._results(streams, n_best, final=False)

    def close(self, streams: TransducerStreams) -> list[NBest]:
        """End the utterances and return their hypotheses."""
        self._check_open(streams)
        if len(streams) and streams.frames.values.shape[1]:
            self._run(streams, ended=True)
        streams.closed = True
        return self._results(streams, self.config.n_best, final=True)

    def with_options(self, config: C, fusion: Fusion) -> TransducerDecoder[C]:
        """The same decoder with other options; what it searches with is shared."""
        return type(self)(self.networks, config, fusion)

    # ------------------------------------------------------------------------------- inner rooms

    def _step(self, rows, joint, nodes, wishes, streams, search) -> None:
        """One step of the search; see `cpu.py` of the strategies."""
        raise NotImplementedError

    def _device_step(self) -> DeviceStep:
        """The same step on the GPU."""
        raise NotImplementedError

    def _nodes_per_step(self) -> int:
        return self.config.beam_size

    def _why_not(self, device: torch.device, networks_device: torch.device) -> str | None:
        """What keeps our kernels from `device`, in one line."""
        if networks_device != device:
            return f"the networks are on {networks_device}"
        kernels = self._device_step()
        return why_not(
            self.config.beam_size,
            kernels.per_hypothesis,
            self.networks.vocab_size + 1,
            len(self._durations),
            kernels.pooled,
            runtime().shared_bytes(device),
        )

    def _run(self, streams: TransducerStreams, *, ended: bool) -> None:
        streams.closed = True  # for good, if the networks fail half-way
        run = self._run_on_device if streams.backend == "cuda" else self._run_on_cpu
        with torch.inference_mode(), self.networks.evaluation():
            streams.nodes = run(streams, ended)
        failed = np.flatnonzero(streams.batch.sizes <= 0)
        if len(failed):
            b = int(failed[0])
            what = "NaN or +inf" if streams.batch.sizes[b] < 0 else "-inf for every label"
            raise ValueError(
                f"networks give {what} for utterance {b}, expected logits of which at least one is "
                "finite and none is NaN or +inf; the streams are closed"
            )
        streams.closed = False

    def _run_on_cpu(self, streams: TransducerStreams, ended: bool) -> np.ndarray:
        search = self._search()
        loop = Loop(
            self.networks, self.config.softmax_temperature, self._nodes_per_step(), self.config.threads
        )
        return loop.run(
            streams.batch,
            streams.nodes,
            streams.predictions,
            streams.frames,
            lambda rows, joint, nodes, wishes: self._step(rows, joint, nodes, wishes, streams, search),
            ended=ended,
        )

    def _run_on_device(self, streams: TransducerStreams, ended: bool) -> np.ndarray:
        loop = CUDALoop(
            self.networks,
            self._search(),
            self._durations,
            self.config.softmax_temperature,
            self._device_step(),
            self._workspaces,
            self._graphs,
            self._predictions,
        )
        return loop.run(
            streams.batch,
            streams.nodes,
            streams.predictions,
            streams.frames,
            streams.fusion,
            ended=ended,
        )

    def _search(self) -> beams.Search:
        return beams.Search(
            vocab_size=self.networks.vocab_size,
            num_durations=len(self._durations),
            timed=bool(self.networks.durations),
            weighted_blank=BLANK_LM_SCORE_MODES[self.config.blank_lm_score_mode],
            late=self.config.pruning_mode == "late",
            alignments=self.config.alignments,
            lm_weight=np.float32(0.0),
            boosting_weight=np.float32(0.0),
        )

    @staticmethod
    def _check_open(streams: TransducerStreams) -> None:
        if streams.closed:
            raise ValueError("streams is closed, expected streams from open() that were not closed yet")

    def _results(self, streams: TransducerStreams, n_best: int, *, final: bool) -> list[NBest]:
        n = len(streams)
        order = np.full((n, n_best), -1, np.int32)
        scores = np.zeros((n, n_best), np.float32)
        rank(streams.batch, streams.fusion.arrays.boosting, final, self.config.score_norm, order, scores)
        return [
            NBest(
                tuple(
                    self._path(streams, b, int(slot), float(score), final)
                    for slot, score in zip(order[b], scores[b], strict=True)
                    if slot >= 0
                ),
                num_frames=int(streams.batch.ends[b]),
            )
            for b in range(n)
        ]

    def _path(
        self, streams: TransducerStreams, b: int, slot: int, score: float, final: bool
    ) -> TransducerPath:
        steps = trace_back(streams.nodes[b], streams.batch.beam[b, slot]["node"])
        emitted = steps[steps["label"] < self.networks.vocab_size]
        tokens, durations = emitted["label"].copy(), emitted["duration"].copy()
        fusion = streams.fusion
        search = beams.for_utterance(self._search(), fusion.lm_weights[b], fusion.boosting_weights[b])
        lm, boosting = fusion_parts(
            tokens, search, fusion.lm.arrays, fusion.arrays.boosting,
            fusion.arrays.lm_starts[b], fusion.arrays.boosting_starts[b], final,
        )  # fmt: skip
        timed, aligned = bool(self.networks.durations), self.config.alignments
        return TransducerPath(
            tokens=tokens,
            frames=emitted["frame"].copy(),
            repeats=np.maximum(durations, 1),
            token_confidence=np.exp(emitted["log_prob"]),
            score=score,
            parts=ScoreParts(score - lm - boosting, lm, boosting),
            alignment=steps["label"].copy() if aligned else None,
            alignment_log_probs=steps["log_prob"].copy() if aligned else None,
            durations=durations if timed else None,
            alignment_frames=steps["frame"].copy() if aligned else None,
        )
