"""pyctcdecode: CTC prefix beam search in Python with a word-level KenLM and hotwords."""

from __future__ import annotations

import logging
from typing import Any

import torch

from nemo_gpu_decoding.bench.peers.base import Output, Peer, Setting
from nemo_gpu_decoding.bench.task import Task


class PyCTCDecode(Peer):
    name = "pyctcdecode"
    needs = ("pyctcdecode", "kenlm")
    # pyctcdecode asks for numpy < 2, which NeMo's own dependencies do not go with; newer ones work
    install = "pip install kenlm && pip install --no-deps pyctcdecode pygtrie"

    def prepare(self, task: Task, setting: Setting) -> None:
        from pyctcdecode import build_ctcdecoder

        logging.getLogger("pyctcdecode").setLevel(logging.ERROR)
        lm: dict[str, Any] = {}
        if setting.lm:
            lm = {
                "kenlm_model_path": str(task.word_lm),
                "unigrams": list(task.lexicon) or None,
                "alpha": self.options.pyctcdecode_lm_weight,
                "beta": self.options.pyctcdecode_beta,
            }
        self._decoder = build_ctcdecoder([*task.vocabulary.pieces, ""], **lm)  # "" is the blank
        self._search: dict[str, Any] = {"beam_width": setting.beam_size}
        if setting.phrases:
            self._search["hotwords"] = task.phrases(setting.phrases)
            self._search["hotword_weight"] = self.options.hotword_weight

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [
            self._decoder.decode(utterance[:length], **self._search)
            for utterance, length in zip(log_probs.numpy(), lengths.tolist(), strict=True)
        ]
