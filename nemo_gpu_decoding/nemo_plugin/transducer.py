"""The decoders of encoder output for NeMo: alsd_pp and aes_pp."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis, NBestHypotheses
from nemo.utils import logging
from omegaconf import DictConfig
from torch import Tensor

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.nemo_plugin.beam_sections import read_aes, read_alsd
from nemo_gpu_decoding.nemo_plugin.hypotheses import TransducerHypothesis, from_path
from nemo_gpu_decoding.nemo_plugin.infer import FrameConfidence, FusedInfer, load_fusion, warn_of_errors
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request, next_requests
from nemo_gpu_decoding.nemo_plugin.streaming.continuation import StreamState
from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of
from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.trace_back import step_log_probs


class TransducerInfer(FusedInfer):
    """Transducer beam search with the interface of NeMo's `BeamBatchedRNNTInfer`.

    Args:
        owner, cfg: see `FusedInfer`.
        decoder: NeMo's prediction network.
        joint: NeMo's joint.

    Raises:
        ValueError: the networks are not supported, see `networks_of`.
    """

    continued_by = "partial_hypotheses"
    search: ClassVar[type[TransducerDecoder[Any]]]  # the decoder class of the strategy

    def __init__(self, owner: Any, cfg: DictConfig, decoder: Any, joint: Any) -> None:
        super().__init__(owner, cfg)
        self.decoder_model = decoder
        self.joint = joint  # NeMo's decoding object reads it
        self.durations = tuple(owner.durations or ())
        self._cuda_graphs = True  # as NeMo has switched them
        networks_of(decoder, joint, self.durations)  # raise errors here instead of at the first batch
        self.include_duration_confidence = bool(owner.tdt_include_duration_confidence)

    def __call__(
        self,
        encoder_output: Tensor,
        encoded_lengths: Tensor,
        partial_hypotheses: Sequence[Hypothesis | Sequence[Hypothesis] | None] | None = None,
    ) -> tuple[list[Hypothesis | NBestHypotheses]]:
        """Decode a batch, or the next chunk of a batch of streams.

        Args:
            encoder_output: [B, D, T].
            encoded_lengths: [B] valid frames.
            partial_hypotheses: [B] results of an earlier call to continue; None begins an utterance.

        Returns:
            A 1-tuple of a list with one `Hypothesis`, or `NBestHypotheses`, per utterance: the result if the
            audio ended here. It can be continued, see `continuation.py`.

        Raises:
            ValueError: see `TransducerDecoder.decode`; a partial hypothesis cannot be continued. If an utterance
                has an invalid frame (NaN), it skips this chunk and has the reason in `error`, and a warning is
                logged; the other utterances are not affected.
        """
        frames, lengths = encoder_output.transpose(1, 2), encoded_lengths.cpu()
        states = _states(partial_hypotheses, len(frames))
        requests = self._requests(partial_hypotheses, states)
        aligned = self.needs_frames
        results = self._continuation.advance(self.decoder(), frames, lengths, states, requests, keep_history=aligned)
        warn_of_errors({b: str(state.error) for b, (_, state) in enumerate(results) if state.error})
        alternatives = [self.alternatives(nbest) for nbest, _ in results]
        results = [(nbest.distinct(self.text_of, self.options.n_best), state) for nbest, state in results]
        for nbest, _ in results:
            for note in nbest.notes:
                logging.warning(note)
        hypotheses = [self._hypotheses(nbest, state) for nbest, state in results]
        for own, find in zip(hypotheses, alternatives, strict=True):
            own[0].find_alternatives = find
        if aligned:
            self._add_steps(results, hypotheses)
        if self.return_best_hypothesis:
            return ([own[0] for own in hypotheses],)
        return ([NBestHypotheses(own) for own in hypotheses],)

    def _requests(
        self, partial_hypotheses: Sequence[Any] | None, states: Sequence[StreamState | None]
    ) -> list[Request | None] | None:
        """Requests of the utterances that begin: the phrases in an empty partial hypothesis of NeMo's streaming,
        else those of `utterance_requests`."""
        requests = next_requests(self, states.count(None))
        begin = [partial for partial, state in zip(partial_hypotheses or [], states, strict=False) if state is None]
        phrases = [biasing_request(self, getattr(partial, "biasing_cfg", None)) for partial in begin]
        if not any(phrases):
            return requests
        return [own or request for own, request in zip(phrases, requests or [None] * len(phrases), strict=True)]

    def _variant(self) -> Hashable:
        return self.needs_frames, *(m.is_adapter_available() for m in (self.decoder_model, self.joint))

    def _load(self) -> TransducerDecoder[Any]:
        networks = networks_of(self.decoder_model, self.joint, self.durations)
        fusion = load_fusion(self.options.fusion, networks.vocab_size, self.vocabulary())
        n_best = self.candidates(self.options.n_best)
        options = replace(self.options.search, n_best=n_best, alignments=self.needs_frames)
        decoder = self.search(networks, options, fusion)
        decoder.allow_cuda_graphs(self._cuda_graphs)
        return decoder

    def disable_cuda_graphs(self) -> bool:
        """Launch kernels one by one, and free the idle buffers of the search; NeMo calls this before training."""
        return self._switch_cuda_graphs(False)

    def maybe_enable_cuda_graphs(self) -> bool:
        """Use CUDA graphs again, if the config allows them."""
        return self._switch_cuda_graphs(True)

    def _switch_cuda_graphs(self, allowed: bool) -> bool:
        changed = self._cuda_graphs != allowed and self.options.search.allow_cuda_graphs
        self._cuda_graphs = allowed
        for decoder in self._decoders.values():
            decoder.allow_cuda_graphs(allowed)
        return changed

    def _hypotheses(self, nbest: NBest, state: StreamState) -> list[TransducerHypothesis]:
        paths: list[Any] = list(nbest)
        return [
            from_path(
                path, nbest, TransducerHypothesis, dec_state=state,
                token_duration=None if path.durations is None else path.durations.tolist(),
                error=str(state.error or ""),
            )
            for path in paths
        ]  # fmt: skip

    def _add_steps(
        self, results: Sequence[tuple[NBest, StreamState]], hypotheses: Sequence[Sequence[TransducerHypothesis]]
    ) -> None:
        """Set confidence and alignments of all hypotheses."""
        paths: list[Any] = [path for nbest, _ in results for path in nbest]
        frames: list[Any] = [state.history for nbest, state in results for _ in nbest]
        flat = [hypothesis for own in hypotheses for hypothesis in own]
        log_probs = step_log_probs(self.decoder().networks, frames, paths)
        for hypothesis, path, steps in zip(flat, paths, log_probs, strict=True):
            # NeMo needs alignments for the confidence of TDT tokens
            if self.preserve_alignments or self.durations:
                labels = torch.from_numpy(path.alignment.astype("int64"))
                pairs = list(zip(steps, labels, strict=True))
                hypothesis.alignments = _by_frame(pairs, path)
            if self.preserve_frame_confidence:
                confidence = self._confidence(steps)
                hypothesis.frame_confidence = _by_frame(confidence, path)
                emits = path.alignment < self.decoder().networks.vocab_size
                hypothesis.step_confidence = [value for value, emit in zip(confidence, emits, strict=True) if emit]

    def _confidence(self, log_probs: Tensor) -> list[Any]:
        """NeMo's confidence of each step, [m]; pairs of token and duration confidence if the latter is on."""
        num_labels = log_probs.shape[1] - len(self.durations)
        measure = FrameConfidence(num_labels - 1, self.confidence_method)
        labels = measure.of(log_probs[:, :num_labels])
        if not (self.durations and self.include_duration_confidence):
            return labels
        durations = measure.of(log_probs[:, num_labels:])
        return [list(pair) for pair in zip(labels, durations, strict=True)]


class ALSDInfer(TransducerInfer):
    """alsd_pp with NeMo's interface."""

    read = staticmethod(read_alsd)
    search = ALSDPlusPlus


class AESInfer(TransducerInfer):
    """aes_pp with NeMo's interface."""

    read = staticmethod(read_aes)
    search = AESPlusPlus


def _by_frame(values: Sequence[Any], path: Path) -> list[list[Any]]:
    """Group the values of a path's steps by frame; frames without steps have no list."""
    assert path.alignment_frames is not None
    steps = zip(path.alignment_frames.tolist(), values, strict=True)
    return [[value for _, value in group] for _, group in groupby(steps, key=lambda step: step[0])]


def _states(partial_hypotheses: Sequence[Any] | None, batch: int) -> list[StreamState | None]:
    """The state of each utterance of the batch; None begins an utterance."""
    if partial_hypotheses is None:
        return [None] * batch
    if len(partial_hypotheses) != batch:
        raise ValueError(
            f"partial_hypotheses has {len(partial_hypotheses)} entries, expected {batch}, one per utterance"
        )
    return [_state(b, partial) for b, partial in enumerate(partial_hypotheses)]


def _state(b: int, partial: Any) -> StreamState | None:
    if isinstance(partial, (list, tuple)):  # an n-best list, whose hypotheses share the search
        partial = partial[0]
    if partial is None:
        return None
    if isinstance(partial.dec_state, StreamState):
        return partial.dec_state
    if len(partial.y_sequence) == 0 and partial.dec_state is None:
        return None
    raise ValueError(
        f"partial_hypotheses[{b}] is of another decoder (dec_state is a "
        f"{type(partial.dec_state).__name__}), expected what this one has returned"
    )
