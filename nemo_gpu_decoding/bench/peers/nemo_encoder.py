"""NeMo's encoders: one with random weights, and that of a model with its speech."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.vocabulary import Vocabulary


class _ConformerCTC(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Log-probs [B, T, V + 1] of features [B, mel bands, frames]."""
        encoded, _ = self.encoder(audio_signal=features, length=lengths)
        return self.head(encoder_output=encoded)


def random_conformer(
    layers: int, width: int, vocab_size: int, mel_bands: int, subsampling: int
) -> torch.nn.Module:
    """A FastConformer with a CTC head, as NeMo's published ones are built, untrained."""
    from nemo.collections.asr.modules import ConformerEncoder, ConvASRDecoder

    encoder = ConformerEncoder(
        feat_in=mel_bands,
        feat_out=-1,
        n_layers=layers,
        d_model=width,
        subsampling="dw_striding",
        subsampling_factor=subsampling,
        subsampling_conv_channels=min(256, width),
        self_attention_model="rel_pos",
        n_heads=8,
        conv_kernel_size=9,
        xscaling=False,
    )
    head = ConvASRDecoder(feat_in=width, num_classes=vocab_size)
    return _ConformerCTC(encoder, head).eval()


class SpeechModel:
    """A CTC or hybrid model of a .nemo file.

    Args:
        path: the file.
        device: where it runs.
        precision: the arithmetic of its encoder, as a context.

    Raises:
        ValueError: it has no CTC head.
    """

    def __init__(
        self, path: str, device: torch.device, precision: Callable[[], AbstractContextManager]
    ) -> None:
        from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary
        from nemo_gpu_decoding.nemo_plugin.model import Model

        loaded = Model.load(path, device=str(device))
        if "ctc" not in loaded.heads:
            raise ValueError(f"model is {path!r}, which has no CTC head")
        model: Any = loaded.model
        front_end = model.preprocessor.featurizer
        front_end.dither, front_end.pad_to = 0.0, 0  # as NeMo's `transcribe`
        self.name = Path(path).stem
        self.frame_seconds = loaded.frame_seconds
        self.sample_rate = int(model.cfg.preprocessor.sample_rate)
        self._model = model
        self._head = model.ctc_decoder if loaded.is_hybrid else model.decoder
        self._precision = precision
        tokenizer = getattr(model, "tokenizer", None)
        kind = "char" if tokenizer is None else "subword"
        pieces = list(self._head.vocabulary)
        self.vocabulary: Vocabulary = nemo_vocabulary(kind, pieces, tokenizer)

    def log_probs(
        self, samples: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs [B, T, V + 1] float32 and lengths [B] of samples [B, N]."""
        with torch.inference_mode(), self._precision():
            features, frames = self._model.preprocessor(input_signal=samples, length=lengths)
            encoded, encoded_lengths = self._model.encoder(audio_signal=features, length=frames)
            return self._head(encoder_output=encoded).float(), encoded_lengths.long()


def load_speech(
    manifest: str, sample_rate: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Samples [B, N] float32, lengths [B] and references of a NeMo manifest.

    Raises:
        ValueError: a file has another sample rate or several channels, or there is no reference.
    """
    import soundfile

    from nemo_gpu_decoding.manifest import read_manifest, references_of

    utterances = read_manifest(Path(manifest))
    signals = []
    for utterance in utterances:
        signal, rate = soundfile.read(utterance.path, dtype="float32")
        if rate != sample_rate or signal.ndim != 1:
            raise ValueError(
                f"manifest is {manifest!r}, whose {utterance.name} has {rate} Hz and "
                f"{signal.ndim} channel(s), expected {sample_rate} Hz and one"
            )
        signals.append(signal)
    samples = np.zeros((len(signals), max(map(len, signals))), np.float32)
    for row, signal in zip(samples, signals, strict=True):
        row[: len(signal)] = signal
    lengths = torch.tensor([len(signal) for signal in signals])
    texts = references_of(utterances)
    return torch.from_numpy(samples).to(device), lengths.to(device), texts
