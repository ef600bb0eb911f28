"""`TransducerDecoder` checks the inputs and makes the results of alsd_pp and aes_pp."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.checks import given_or_default
from nemo_gpu_decoding.cuda.launch import runtime
from nemo_gpu_decoding.fusion.batch import FusionLabels
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.search.committed import common_ancestor, joined
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.engine import Engine, Streams
from nemo_gpu_decoding.search.inputs import check_batch
from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts, new_frozen
from nemo_gpu_decoding.search.transducer import cuda_engine
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.transducer.cpu_networks import CompiledNetworks
from nemo_gpu_decoding.search.transducer.engine import Algorithm, TransducerNBest
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks, checked_networks
from nemo_gpu_decoding.search.transducer.records import BLANK_MODES, SearchParams
from nemo_gpu_decoding.search.transducer.trace_back import add_scores, path_fields, tokens_between, trace_back

C = TypeVar("C", bound=TransducerConfig)


class TransducerDecoder(Decoder[C, NBest]):
    """A decoder that searches with a transducer's networks. Inputs are the encoder's output [B, T, D].

    In results, `parts.acoustic` is the score of the networks, summed over the recombined alignments. With
    blank_lm_score_mode=lm_weighted_full, that score includes eq. 3's terms of the blank probability. `repeats` is a
    token's duration, at least 1. Arguments and errors: see `ALSDPlusPlus`.
    """

    input_name, input_axes, reads_log_probs = "encoder_output", "T, D", False
    config_type: ClassVar[type[Any]]  # the options of the strategy
    step: ClassVar[Callable[..., None]]  # of the strategy, compiled
    run: ClassVar[Callable[..., None]]  # all steps of a group of utterances, compiled, see cpu_engine.py
    kernels: ClassVar[str]  # the source of the same step on the GPU

    def __init__(self, networks: TransducerNetworks, config: C | None = None, fusion: Fusion | None = None) -> None:
        self.networks = checked_networks(networks)
        config = given_or_default("config", config, self.config_type)
        size, mode = networks.vocab_size, config.pruning_mode
        # if the joint's best labels are all forbidden, no hypothesis is left
        why = f"pruning_mode '{mode}' drops labels before their prices are known; set it to 'late'"
        unlocked = "" if mode == "late" else why
        labels = FusionLabels(size, blank_id=size, unlocked=unlocked, beam_beta=config.beam_beta)
        super().__init__(config, fusion, labels)
        # an RNN-T is a TDT model with the duration 0 only, see `beam.py`
        durations = np.array(networks.durations or (0,), np.int32)
        zeros = np.flatnonzero(durations == 0)
        self._params = SearchParams(
            beam_size=config.beam_size,
            vocab_size=networks.vocab_size,
            num_durations=len(durations),
            zero_duration=int(zeros[0]) if len(zeros) else -1,
            timed=bool(networks.durations),
            blank_mode=BLANK_MODES[config.blank_lm_score_mode],
            late=config.pruning_mode == "late",
            alignments=config.alignments,
            **self._own_params(),
        )
        self._algorithm = Algorithm(
            networks, config, self._params, durations, self.step, self.run, CompiledNetworks(networks), self.kernels
        )
        self._shared = cuda_engine.Shared(networks, allowed=config.allow_cuda_graphs)

    @abstractmethod
    def _own_params(self) -> dict[str, Any]:
        """Return the fields of `SearchParams` that differ between alsd_pp and aes_pp."""

    @property
    def device_modes(self) -> dict[str, str | None]:
        """Return the modes of the last run on a GPU, or None before the first one.

        graphs      launches of the steps: loop or plain, see `cuda_graphs.py`
        prediction  implementation of the prediction network: lstm or stateless (kernels of this package), or torch
        """
        return {"graphs": self._shared.graphs.mode, "prediction": self._shared.predictions.path}

    def allow_cuda_graphs(self, allowed: bool) -> None:
        """Switch CUDA graphs on, if the config allows them, or off, which frees the idle buffers of runs on a GPU."""
        self._shared.graphs.allowed = allowed and self.config.allow_cuda_graphs
        if not allowed:
            self._shared.workspaces.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Create copies from the same arguments, because locks and GPU buffers cannot be copied."""
        return type(self), (self.networks, self.config, self.fusion)

    def with_options(self, config: C, fusion: Fusion) -> TransducerDecoder[C]:
        return type(self)(self.networks, config, fusion)

    def _check_inputs(self, inputs: Tensor, batch: int | None) -> None:
        shape, size = tuple(inputs.shape), self.networks.encoder_size
        if shape[2] != size:
            hint = " (NeMo's encoders give [B, D, T]: transpose(1, 2))" if shape[1] == size else ""
            raise ValueError(f"encoder_output has shape {shape}, expected [B, T, {size}], as the joint takes it{hint}")
        check_batch(inputs, "encoder_output", batch)

    def _cpu_engine(self, streams: Streams) -> Engine:
        return CPUEngine(self._algorithm, streams.fusion)

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        return cuda_engine.CUDAEngine(self._algorithm, streams.fusion, self._shared)

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        with torch.inference_mode(), self.networks.evaluation():
            home = self.networks.start()[0].device
        if home != device:
            return f"the networks are on {home}"
        return cuda_engine.why_not(self._params, runtime().shared_bytes(device))

    def _most_partial(self) -> tuple[int, str]:
        return self.config.beam_size, " (beam_size)"

    def _results(
        self, streams: Streams, engine: Engine, rows: Sequence[int], n_best: int, *, final: bool
    ) -> list[NBest]:
        hypotheses: TransducerNBest = engine.results(rows, n_best, final=final)
        results = []
        for r in range(len(rows)):
            paths = tuple(self._path(hypotheses, r, n, final) for n in range(n_best) if hypotheses.order[r, n] >= 0)
            committed = None if final else len(paths[0]) - self._open_tokens(hypotheses, r)
            num_frames = int(hypotheses.state.beams.ends[hypotheses.rows[r]])
            results.append(new_frozen(NBest, paths=paths, num_frames=num_frames, committed=committed))
        return results

    def _open_tokens(self, hypotheses: TransducerNBest, r: int) -> int:
        """Return the number of tokens of the best hypothesis that are not shared by all live hypotheses."""
        b, beams = int(hypotheses.rows[r]), hypotheses.state.beams
        ends = beams.beam[b, : beams.counters["size"][b]]["node"]
        best = beams.beam[b, hypotheses.order[r, 0]]["node"]
        nodes = hypotheses.state.nodes[b]
        return int(tokens_between(nodes, common_ancestor(nodes["parent"], ends), best, self.networks.vocab_size))

    def _path(self, hypotheses: TransducerNBest, r: int, n: int, final: bool) -> Path:
        b, score = int(hypotheses.rows[r]), float(hypotheses.scores[r, n])
        node = hypotheses.state.beams.beam[b, hypotheses.order[r, n]]["node"]
        columns: dict[str, Any] = path_fields(trace_back(hypotheses.state.nodes[b], node), self._params)
        committed = hypotheses.committed[r]
        fused = committed.scores.copy()
        add_scores(columns["tokens"], self._params.vocab_size, hypotheses.state.fusions, b, fused, final)
        count = len(committed) + len(columns["tokens"])
        lm, boosting, *_ = fused.tolist()[0]
        insertion = self.config.beam_beta * count
        boosting -= insertion
        acoustic = score - lm - boosting - insertion
        parts = new_frozen(ScoreParts, acoustic=acoustic, lm=lm, boosting=boosting, insertion=insertion)
        return joined(committed.head(), new_frozen(Path, **columns, score=score, parts=parts))
