"""The Parakeet transducers of Hugging Face transformers, for `ALSDPlusPlus` and `AESPlusPlus`."""

from __future__ import annotations

from typing import Any

from torch import nn

from nemo_gpu_decoding.search.transducer.networks import LSTMNetworks


def parakeet_networks(model: Any) -> LSTMNetworks:
    """The prediction network and the joint of a `ParakeetForRNNT` or `ParakeetForTDT`; weights are shared.

    The decoder reads `model.get_audio_features(**inputs).last_hidden_state`.

    Raises:
        ValueError: the blank is not the last token.
    """
    config, decoder = model.config, model.decoder
    if config.blank_token_id != config.vocab_size - 1:
        raise ValueError(
            f"config.blank_token_id is {config.blank_token_id}, expected the last: {config.vocab_size - 1}"
        )
    joint = nn.Sequential(model.joint.activation, model.joint.head)
    durations = tuple(getattr(config, "durations", ()))
    return LSTMNetworks(
        decoder.embedding, decoder.lstm, model.encoder_projector, decoder.decoder_projector, joint, durations=durations
    )
