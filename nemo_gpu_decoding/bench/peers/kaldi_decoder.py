"""kaldi_decoder: Kaldi's FasterDecoder as a Python package, on T o L o G [Kaldi, Povey et al. 2011].

It gets what is best for it: `min_active` 0 (its default of 20 goes on with hopeless hypotheses and
takes up to 20 times as long on peaky posteriors, for the same words), a const FST, and log-probs that
have been scaled before the clock starts, since it has no acoustic scale of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.bench.peers.base import Output, Peer, Setting
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.word_graph.graphs import decoding_graph, word_graph
from nemo_gpu_decoding.bench.word_graph.settings import GraphSetting


class WordHypothesis(NamedTuple):
    words: list[int]  # labels of the graph's words
    cost: float  # negative natural log, everything included


class KaldiDecoder(Peer):
    name = "kaldi_decoder"
    needs = ("kaldi_decoder", "kaldifst")
    install = "pip install 'nemo-gpu-decoding[bench,wfst]'"

    def prepare(self, task: Task, setting: Setting) -> None:
        assert isinstance(setting, GraphSetting)
        from kaldi_decoder import FasterDecoderOptions

        graph = word_graph(task)
        self._words = graph.words
        self._fst = decoding_graph(graph, setting.topology, task.vocab_size)
        self._scale = np.float32(setting.acoustic_scale)
        self._search = FasterDecoderOptions(
            beam=setting.beam_size, max_active=setting.max_active, min_active=0
        )
        self._batch: torch.Tensor | None = None
        self._frames: list[np.ndarray] = []

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [
            " ".join(self._words[word] for word in found.words)
            for found in self.hypotheses(log_probs, lengths)
        ]

    def hypotheses(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[WordHypothesis]:
        """The words of every utterance and what they cost."""
        return [self._decode(frames) for frames in self._scaled(log_probs, lengths)]

    def _decode(self, frames: np.ndarray) -> WordHypothesis:
        from kaldi_decoder import DecodableCtc, FasterDecoder
        from kaldifst import get_linear_symbol_sequence

        decoder = FasterDecoder(self._fst, self._search)
        decoder.decode(DecodableCtc(frames))
        found, path = decoder.get_best_path()
        if not found:
            return WordHypothesis([], float("inf"))
        _, _, words, weight = get_linear_symbol_sequence(path)
        return WordHypothesis(list(words), weight.value1 + weight.value2)

    def _scaled(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[np.ndarray]:
        """[T, V + 1] of each utterance; remembered for the batch that comes again."""
        if self._batch is not log_probs:
            self._frames = [
                np.ascontiguousarray(utterance[:length] * self._scale)
                for utterance, length in zip(log_probs.cpu().numpy(), lengths.tolist(), strict=True)
            ]
            self._batch = log_probs
        return self._frames
