"""Convert NeMo's prediction networks and joints to `TransducerNetworks`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from nemo.collections.asr.modules.hybrid_autoregressive_transducer import HATJoint
from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint, StatelessTransducerDecoder
from nemo.collections.common.parts.rnn import LSTMDropout
from torch import Tensor, nn

from nemo_gpu_decoding.search.transducer import networks
from nemo_gpu_decoding.search.transducer.networks import whole_blocks


def networks_of(
    decoder: RNNTDecoder | StatelessTransducerDecoder, joint: RNNTJoint, durations: Sequence[int] = ()
) -> networks.TransducerNetworks:
    """The networks of a NeMo transducer.

    The layers of plain LSTM and stateless prediction networks with a plain joint are called directly, which is
    faster. Other networks (adapters, normalised LSTMs, HAT joints) are called through NeMo's methods. Create
    the networks again after enabling or disabling adapters.

    Args:
        decoder: the prediction network, trained with blank_as_pad.
        joint: RNN-T or HAT joint.
        durations: of a TDT model, in frames; empty for RNN-T.

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
    """Any NeMo prediction network and joint, called through NeMo's methods."""

    def __init__(
        self, decoder: RNNTDecoder | StatelessTransducerDecoder, joint: RNNTJoint, durations: Sequence[int] = ()
    ) -> None:
        self.decoder = decoder
        self.joint = joint
        self.durations = networks.checked_durations(durations)
        self.vocab_size = int(decoder.blank_idx)

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
        whole, before = whole_blocks(labels), tuple(whole_blocks(part) for part in state)
        output, after = self.decoder.predict(
            whole[:, None], self._packed(before), add_sos=False, batch_size=len(whole)
        )
        rows = slice(len(labels))
        return self._projected(output)[rows], tuple(part[rows] for part in self._rows(after))

    def join(self, frames: Tensor, predictions: Tensor) -> Tensor:
        pairs = whole_blocks(frames)[:, None], whole_blocks(predictions)[:, None]
        return self.joint.joint_after_projection(*pairs)[: len(frames), 0, 0]

    def _projected(self, output: Tensor) -> Tensor:
        return self.joint.project_prednet(output)[:, 0]

    # NeMo keeps LSTM states as [layers, N, H], the labels of stateless networks as [N, positions]

    @property
    def _rows_first(self) -> bool:
        return isinstance(self.decoder, StatelessTransducerDecoder)

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
