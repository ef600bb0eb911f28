"""`TransducerDecoder`: input checks and results of alsd_pp and aes_pp; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.fusion.batch import FusionLabels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.decoder import Decoder, Streams
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.result import NBest, ScoreParts
from nemo_gpu_decoding.search.transducer.beam import Search, for_utterance
from nemo_gpu_decoding.search.transducer.blank_scoring import BLANK_LM_SCORE_MODES
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.transducer.cuda_engine import CUDAEngine, Shared
from nemo_gpu_decoding.search.transducer.cuda_graphs import GraphRunner
from nemo_gpu_decoding.search.transducer.cuda_prediction import PredictionPaths
from nemo_gpu_decoding.search.transducer.cuda_workspace import WorkspacePool
from nemo_gpu_decoding.search.transducer.engine import Found, Strategy
from nemo_gpu_decoding.search.transducer.history import fusion_parts, trace_back
from nemo_gpu_decoding.search.transducer.inputs import check_encoder_output, checked_networks
from nemo_gpu_decoding.search.transducer.launch_shape import why_not
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks
from nemo_gpu_decoding.search.transducer.result import TransducerPath

C = TypeVar("C", bound=TransducerConfig)


class TransducerDecoder(Decoder[C, NBest]):
    """A batched beam search over a transducer's networks. Inputs are the encoder's output [B, T, D].

    Args:
        networks: prediction network and joint, see `TransducerNetworks`.
        config: the options of the search.
        fusion: LM and boosting tree over the V tokens of the networks.

    One decoder may serve several threads at once: it holds no state of a running utterance.

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    input_name = "encoder_output"

    def __init__(self, networks: TransducerNetworks, config: C, fusion: Fusion | None) -> None:
        self.networks = checked_networks(networks)
        super().__init__(config, fusion, FusionLabels(networks.vocab_size))
        # an RNN-T is a TDT model that knows the duration 0 only, see `transducer/beam.py`
        self._durations = np.array(networks.durations or (0,), np.int32)
        self._search = Search(
            vocab_size=networks.vocab_size,
            num_durations=len(self._durations),
            timed=bool(networks.durations),
            weighted_blank=BLANK_LM_SCORE_MODES[config.blank_lm_score_mode],
            late=config.pruning_mode == "late",
            alignments=config.alignments,
            lm_weight=np.float32(0.0),
            boosting_weight=np.float32(0.0),
        )
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

    def with_options(self, config: C, fusion: Fusion) -> TransducerDecoder[C]:
        return type(self)(self.networks, config, fusion)

    def _strategy(self) -> Strategy:
        """What alsd_pp and aes_pp differ in."""
        raise NotImplementedError

    def _check_inputs(self, inputs: Tensor, batch: int | None) -> None:
        check_encoder_output(inputs, batch=batch, size=self.networks.encoder_size)

    def _cpu_engine(self, streams: Streams) -> Engine:
        return CPUEngine(self.networks, self.config, self._strategy(), streams.fusion)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        shared = Shared(self._workspaces, self._graphs, self._predictions)
        return CUDAEngine(self.networks, self.config, self._strategy(), streams.fusion, shared)

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        with torch.inference_mode(), self.networks.evaluation():
            own = self.networks.start()[0].device
        if own != device:
            return f"the networks are on {own}"
        kernels = self._strategy().kernels
        return why_not(
            self.config.beam_size,
            kernels.per_hypothesis,
            self.networks.vocab_size + 1,
            len(self._durations),
            kernels.pooled,
            runtime().shared_bytes(device),
        )

    def _most_partial(self) -> tuple[int, str]:
        return self.config.beam_size, " (beam_size)"

    def _results(
        self, streams: Streams, engine: Engine, rows: Sequence[int], n_best: int, *, final: bool
    ) -> list[NBest]:
        found: Found = engine.results(rows, n_best, final=final)
        return [
            NBest(
                tuple(
                    self._path(streams, b, found, r, n, final)
                    for n in range(n_best)
                    if found.order[r, n] >= 0
                ),
                num_frames=int(found.state.batch.ends[found.rows[r]]),
            )
            for r, b in enumerate(rows)
        ]

    def _path(
        self, streams: Streams, b: int, found: Found, r: int, n: int, final: bool
    ) -> TransducerPath:
        own, score = int(found.rows[r]), float(found.scores[r, n])
        node = found.state.batch.beam[own, found.order[r, n]]["node"]
        steps = trace_back(found.state.nodes[own], node)
        emitted = steps[steps["label"] < self.networks.vocab_size]
        tokens, durations = emitted["label"].copy(), emitted["duration"].copy()
        fusion = streams.fusion.arrays
        search = for_utterance(self._search, fusion.lm_weights[b], fusion.boosting_weights[b])
        lm, boosting = fusion_parts(
            tokens, search, fusion.lm, fusion.boosting, fusion.lm_starts[b], fusion.boosting_starts[b],
            final,
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
