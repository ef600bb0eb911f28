"""Decode transducers for NeMo with alsd_pp and aes_pp, and adapt NeMo's networks to these searches."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import torch
from nemo.collections.asr.modules.hybrid_autoregressive_transducer import HATJoint
from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint, StatelessTransducerDecoder
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis, NBestHypotheses
from nemo.collections.common.parts.rnn import LSTMDropout
from omegaconf import DictConfig
from torch import Tensor, nn

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.nemo_plugin.beam_sections import read_aes, read_alsd
from nemo_gpu_decoding.nemo_plugin.hypotheses import TransducerHypothesis, from_path
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer, frame_confidence, load_fusion
from nemo_gpu_decoding.nemo_plugin.requests import biasing_request, next_requests
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import StreamState
from nemo_gpu_decoding.search.result import Path
from nemo_gpu_decoding.search.transducer import networks
from nemo_gpu_decoding.search.transducer.aes import AESPlusPlus
from nemo_gpu_decoding.search.transducer.alsd import ALSDPlusPlus
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.networks import whole_blocks
from nemo_gpu_decoding.search.transducer.trace_back import step_log_probs

Predictor: TypeAlias = RNNTDecoder | StatelessTransducerDecoder


class TransducerInfer(FusedInfer):
    """A transducer beam search with the interface of NeMo's `BeamBatchedRNNTInfer`.

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
        self, encoder_output: Tensor, encoded_lengths: Tensor, partial_hypotheses: Sequence[Any] | None = None
    ) -> tuple[list[Hypothesis | NBestHypotheses]]:
        """Decode a batch, or the next chunk of a batch of streams.

        Args:
            encoder_output: [B, D, T].
            encoded_lengths: [B] valid frames.
            partial_hypotheses: [B] results of an earlier call to continue; None begins an utterance.

        Returns:
            A 1-tuple of a list with one `Hypothesis`, or `NBestHypotheses`, per utterance: the result if the
            audio ended here. A later call can continue this result, see `stream_state.py`.

        Raises:
            ValueError: see `TransducerDecoder.decode`; a partial hypothesis cannot be continued. If an utterance has
                an invalid frame (NaN), it skips this chunk and has the reason in `error`, and a warning is logged;
                other utterances are not affected.
        """
        frames, lengths = encoder_output.transpose(1, 2), encoded_lengths.cpu()
        states = _states(partial_hypotheses, len(frames))
        requests = self._requests(partial_hypotheses, states)
        aligned = self.needs_frames
        results = self._continuation.advance(self.decoder(), frames, lengths, states, requests, keep_history=aligned)
        paths, hypotheses = self._hypotheses(results)
        if aligned:
            self._add_steps(results, paths, hypotheses)
        return self._returned(hypotheses)

    def _requests(
        self, partial_hypotheses: Sequence[Any] | None, states: Sequence[StreamState | None]
    ) -> list[Request | None] | None:
        """Return the requests of new utterances: from empty partial hypotheses, else from `utterance_requests`."""
        requests = next_requests(self, states.count(None))
        begin = [partial for partial, state in zip(partial_hypotheses or [], states, strict=False) if state is None]
        phrases = [biasing_request(self, getattr(partial, "biasing_cfg", None)) for partial in begin]
        if not any(phrases):
            return requests
        return [given or request for given, request in zip(phrases, requests or [None] * len(phrases), strict=True)]

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
        """Stop using CUDA graphs and free idle buffers of the search; NeMo calls this method before training."""
        return self._switch_cuda_graphs(False)

    def maybe_enable_cuda_graphs(self) -> bool:
        """Use CUDA graphs again if the config allows them."""
        return self._switch_cuda_graphs(True)

    def _switch_cuda_graphs(self, allowed: bool) -> bool:
        changed = self._cuda_graphs != allowed and self.options.search.allow_cuda_graphs
        self._cuda_graphs = allowed
        for decoder in self._decoders.values():
            decoder.allow_cuda_graphs(allowed)
        return changed

    def _hypothesis(self, path: Any, state: StreamState) -> TransducerHypothesis:
        durations = None if path.durations is None else path.durations.tolist()
        return from_path(path, state, TransducerHypothesis, dec_state=state, token_duration=durations)

    def _add_steps(
        self,
        states: Sequence[StreamState],
        paths_of: Sequence[Sequence[Any]],
        hypotheses: Sequence[Sequence[TransducerHypothesis]],
    ) -> None:
        """Set confidence and alignments in all hypotheses of an utterance."""
        paths: list[Any] = [path for n_best in paths_of for path in n_best]
        frames: list[Any] = [state.history for state, n_best in zip(states, paths_of, strict=True) for _ in n_best]
        flat = [hypothesis for n_best in hypotheses for hypothesis in n_best]
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
        """Return NeMo's confidence of each of m steps: [m] values or, if the config asks, pairs (token, duration)."""
        num_labels = log_probs.shape[1] - len(self.durations)
        measure = partial(frame_confidence, blank_id=num_labels - 1, method=self.confidence_method)
        labels = measure(log_probs[:, :num_labels])
        if not (self.durations and self.include_duration_confidence):
            return labels
        durations = measure(log_probs[:, num_labels:])
        return [list(pair) for pair in zip(labels, durations, strict=True)]


class ALSDInfer(TransducerInfer):
    """The search alsd_pp with NeMo's decoder interface."""

    read = staticmethod(read_alsd)
    search = ALSDPlusPlus


class AESInfer(TransducerInfer):
    """The search aes_pp with NeMo's decoder interface."""

    read = staticmethod(read_aes)
    search = AESPlusPlus


def _by_frame(values: Sequence[Any], path: Path) -> list[list[Any]]:
    """Group the values of a path's steps by frame; each frame with steps has a list."""
    assert path.alignment_frames is not None
    steps = zip(path.alignment_frames.tolist(), values, strict=True)
    return [[value for _, value in group] for _, group in groupby(steps, key=lambda step: step[0])]


def _states(partials: Sequence[Any] | None, batch: int) -> list[StreamState | None]:
    """Return the `StreamState` in each partial hypothesis of a batch; None where an utterance begins."""
    if partials is None:
        return [None] * batch
    if len(partials) != batch:
        raise ValueError(f"partial_hypotheses has {len(partials)} entries, expected {batch}, one per utterance")
    return [_state(b, partial) for b, partial in enumerate(partials)]


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


def networks_of(decoder: Predictor, joint: RNNTJoint, durations: Sequence[int] = ()) -> networks.TransducerNetworks:
    """Return prediction network and joint of a NeMo transducer in the interface of the searches.

    For LSTM and stateless prediction networks with a plain joint, the layers are called directly, which is
    faster. Other networks (adapters, normalised LSTMs, HAT joints) are called through NeMo's methods. Call this
    function again after adapters are enabled or disabled.

    Args:
        decoder: the prediction network, trained with blank_as_pad.
        joint: RNN-T or HAT joint.
        durations: durations of a TDT model, in frames; empty for RNN-T.

    Raises:
        ValueError: the joint's output is not one score per label and duration.
    """
    durations = networks.checked_durations(durations)
    _check(decoder, joint, durations)
    if type(joint) is not RNNTJoint or joint.is_adapter_available() or joint.temperature != 1.0:
        return NemoNetworks(decoder, joint, durations)
    parts = joint.enc, joint.pred, joint.joint_net
    if isinstance(decoder, StatelessTransducerDecoder):
        net = decoder.prediction
        return networks.StatelessNetworks(list(net.embeds), net.norm, *parts, durations=durations)
    rnn = decoder.prediction["dec_rnn"]
    plain = isinstance(rnn, LSTMDropout) and not rnn.lstm.proj_size
    if plain and not decoder.is_adapter_available():
        return networks.LSTMNetworks(decoder.prediction["embed"], rnn.lstm, *parts, durations=durations)
    return NemoNetworks(decoder, joint, durations)


class NemoNetworks:
    """A NeMo prediction network and joint of any kind, called through NeMo's methods."""

    def __init__(self, decoder: Predictor, joint: RNNTJoint, durations: Sequence[int] = ()) -> None:
        self.decoder = decoder
        self.joint = joint
        self.durations = networks.checked_durations(durations)
        self.vocab_size = int(decoder.blank_idx)
        self._rows_first = isinstance(decoder, StatelessTransducerDecoder)

    @property
    def encoder_size(self) -> int:
        return int(self.joint.encoder_hidden)

    def evaluation(self) -> AbstractContextManager[None]:
        return networks.evaluating([self.decoder, self.joint])

    def project_encoder(self, frames: Tensor) -> Tensor:
        weight = next(self.joint.enc.parameters())
        whole = whole_blocks(frames.to(weight.device, weight.dtype))
        return self.joint.project_encoder(whole[None])[0, : len(frames)]

    def start(self) -> tuple[Tensor, networks.State]:
        weight = next(self.joint.enc.parameters())
        blank = torch.full((1, 1), self.vocab_size, dtype=torch.int64, device=weight.device)
        output, after = self.decoder.predict(blank, None, add_sos=False, batch_size=1)
        state = self.decoder.initialize_state(weight.new_zeros(1))
        self.decoder.batch_replace_states_all(after, dst_states=state)
        return self._projected(output), self._rows(state)

    def predict(self, labels: Tensor, state: networks.State) -> tuple[Tensor, networks.State]:
        whole, held = whole_blocks(labels), tuple(whole_blocks(part) for part in state)
        output, after = self.decoder.predict(whole[:, None], self._packed(held), add_sos=False, batch_size=len(whole))
        rows = slice(len(labels))
        return self._projected(output)[rows], tuple(part[rows] for part in self._rows(after))

    def join(self, frames: Tensor, predictions: Tensor) -> Tensor:
        pairs = whole_blocks(frames)[:, None], whole_blocks(predictions)[:, None]
        return self.joint.joint_after_projection(*pairs)[: len(frames), 0, 0]

    def _projected(self, output: Tensor) -> Tensor:
        return self.joint.project_prednet(output)[:, 0]

    # NeMo keeps LSTM states as [layers, N, H], the labels of stateless networks as [N, positions]

    def _rows(self, state: Sequence[Tensor]) -> networks.State:
        return tuple(part if self._rows_first else part.transpose(0, 1) for part in state)

    def _packed(self, state: networks.State) -> Sequence[Tensor]:
        if self._rows_first:
            return list(state)
        return tuple(part.transpose(0, 1).contiguous() for part in state)


def _check(decoder: nn.Module, joint: nn.Module, durations: tuple[int, ...]) -> None:
    if not decoder.blank_as_pad:
        raise ValueError(
            "decoder was built with blank_as_pad=False, expected True: beams start from the blank's embedding"
        )
    if isinstance(joint, HATJoint) and joint.return_hat_ilm:
        raise ValueError(
            "joint is a HAT joint with return_hat_ilm=True (hat_subtract_ilm), expected False: its "
            "internal LM is not subtracted here"
        )
    if joint.num_extra_outputs != len(durations):
        raise ValueError(
            f"durations has {len(durations)} entries, expected {joint.num_extra_outputs}, "
            "the extra outputs of the joint"
        )
