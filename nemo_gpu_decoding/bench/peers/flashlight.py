"""flashlight-text's lexicon-free CTC beam search with KenLM over tokens [Wav2letter++, Flashlight]."""

from __future__ import annotations

import importlib
import math

import numpy as np
import torch

from nemo_gpu_decoding.bench.peers.base import Output, Peer, Setting, collapse
from nemo_gpu_decoding.bench.task import TOKEN_OFFSET, Task

TOKENS_PER_FRAME = 16  # best tokens that each hypothesis is extended by (NeMo's beam_size_token)
THRESHOLD = 20.0  # natural log below the best hypothesis, as NeMo's and ours
SILENCE = 0  # flashlight wraps its result in this token, and wants it to be a real one


class Flashlight(Peer):
    name = "flashlight"

    def available(self) -> str | None:
        try:
            importlib.import_module("flashlight.lib.text.decoder.kenlm")
        except ImportError as error:
            return f"{error}: {self.install}"
        return None

    def prepare(self, task: Task, setting: Setting) -> None:
        from flashlight.lib.text.decoder import (
            CriterionType,
            LexiconFreeDecoder,
            LexiconFreeDecoderOptions,
            ZeroLM,
        )
        from flashlight.lib.text.decoder.kenlm import KenLM
        from flashlight.lib.text.dictionary import Dictionary

        self._blank_id = task.vocab_size
        if setting.lm:
            tokens = Dictionary()
            for token in range(task.vocab_size):
                tokens.add_entry(chr(token + TOKEN_OFFSET))
            tokens.add_entry("<blank>")
            self._lm = KenLM(str(task.lm), tokens)
        else:
            self._lm = ZeroLM()
        options = LexiconFreeDecoderOptions(
            beam_size=setting.beam_size,
            beam_size_token=min(TOKENS_PER_FRAME, task.vocab_size + 1),
            beam_threshold=THRESHOLD,
            # KenLM's scores are log10, the acoustic ones natural
            lm_weight=self.options.flashlight_lm_weight * math.log(10) if setting.lm else 0.0,
            sil_score=0.0,
            log_add=True,
            criterion_type=CriterionType.CTC,
        )
        self._decoder = LexiconFreeDecoder(options, self._lm, SILENCE, task.vocab_size, [])

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        outputs: list[Output] = []
        for utterance, length in zip(log_probs.numpy(), lengths.tolist(), strict=True):
            frames = np.ascontiguousarray(utterance[:length])
            best = self._decoder.decode(frames.ctypes.data, *frames.shape)[0]
            outputs.append(collapse(list(best.tokens[1:-1]), self._blank_id))
        return outputs
