"""NeMo's own decoders of CTC: `beam_batch`, on a GPU with CUDA graphs, and `greedy_batch`; its encoders.

NeMo's beam goes on adding LM scores in padded frames, so that a result may depend on the batch. It is
therefore timed on the batch, but compared by utterances decoded alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from nemo_gpu_decoding.bench.files import cached, content_key
from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Hypothesis, Peer, Ready, Setting, collapse
from nemo_gpu_decoding.bench.tasks import Task
from nemo_gpu_decoding.vocabulary import Vocabulary

NEMO: dict[str, Any] = {
    "needs": ("nemo",), "install": "pip install 'nemo-gpu-decoding[nemo]'", "multithreaded": True,
}  # fmt: skip


class NemoTokenizer:
    """The two members of a tokenizer that NeMo's boosting tree asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary)
        self.text_to_ids = vocabulary.tokenize


def beam_batch(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.context_biasing import BoostingTreeModelConfig
    from nemo.collections.asr.parts.submodules.ctc_beam_decoding import BeamBatchedCTCInfer

    fusion: dict[str, Any] = {}
    if setting.lm:
        fusion |= {
            "ngram_lm_model": str(ngram_lm(task)),
            "ngram_lm_alpha": task.weights.lm_weight,
            "beam_beta": task.weights.beam_beta,
        }
    if setting.phrases:
        fusion |= {
            "boosting_tree": BoostingTreeModelConfig(key_phrases_list=task.phrases(setting.phrases)),
            "boosting_tree_alpha": task.weights.boosting_weight,
            "tokenizer": NemoTokenizer(task.vocabulary),
        }
    decoder = BeamBatchedCTCInfer(
        blank_index=task.vocab_size, beam_size=setting.beam_size, allow_cuda_graphs=options.device != "cpu", **fusion
    )
    mode = decoder.search_algorithm.cuda_graphs_mode

    def hypotheses(log_probs: torch.Tensor, lengths: torch.Tensor) -> list[list[Hypothesis]]:
        found = _run(decoder, log_probs, lengths)
        return [[Hypothesis(h.y_sequence.tolist(), float(h.score))] for h in found]

    return Ready(
        lambda log_probs, lengths: _run(decoder, log_probs, lengths),
        lambda found: [h.y_sequence.tolist() for h in found],
        hypotheses,
        graphs=None if mode is None else mode.value,
    )


def greedy_batch(options: BenchOptions, task: Task, setting: Setting) -> Ready:
    silence_nemo()
    from nemo.collections.asr.parts.submodules.ctc_greedy_decoding import GreedyBatchedCTCInfer

    decoder = GreedyBatchedCTCInfer(blank_id=task.vocab_size)
    return Ready(
        lambda log_probs, lengths: _run(decoder, log_probs, lengths),
        lambda found: [collapse(h.y_sequence.tolist(), task.vocab_size) for h in found],
    )


def _run(decoder: Any, log_probs: torch.Tensor, lengths: torch.Tensor) -> Any:
    from nemo.core.classes import typecheck

    with typecheck.disable_checks():  # as NeMo's models call it
        return decoder(decoder_output=log_probs, decoder_lengths=lengths)[0]


def ngram_lm(task: Task) -> Path:
    """The token LM in NeMo's own format: reading an ARPA takes NeMo 20 s, so it is converted once."""

    def convert(path: Path) -> None:
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        NGramGPULanguageModel.from_file(str(task.lm), vocab_size=task.vocab_size).save_to(str(path))

    assert task.lm is not None
    return cached(f"{content_key(task.lm)}-{task.vocab_size}.nemo", convert)


def silence_nemo() -> None:
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)


# ----------------------------------------------------------------------------------------- encoders


class _ConformerCTC(torch.nn.Module):
    def __init__(self, encoder: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Log-probs [B, T, V + 1] of features [B, mel bands, frames]."""
        encoded, _ = self.encoder(audio_signal=features, length=lengths)
        return self.head(encoder_output=encoded)


def random_conformer(layers: int, width: int, vocab_size: int, mel_bands: int, subsampling: int) -> torch.nn.Module:
    """A FastConformer with a CTC head, as NeMo's published ones are built, untrained."""
    from nemo.collections.asr.modules import ConformerEncoder, ConvASRDecoder

    encoder = ConformerEncoder(
        feat_in=mel_bands, feat_out=-1, n_layers=layers, d_model=width, subsampling="dw_striding",
        subsampling_factor=subsampling, subsampling_conv_channels=min(256, width),
        self_attention_model="rel_pos", n_heads=8, conv_kernel_size=9, xscaling=False,
    )  # fmt: skip
    return _ConformerCTC(encoder, ConvASRDecoder(feat_in=width, num_classes=vocab_size)).eval()


BEAM_BATCH = Peer("nemo", beam_batch, **NEMO)
GREEDY_BATCH = Peer("nemo_greedy", greedy_batch, **NEMO)
