"""NeMo's own CTC decoders: `beam_batch`, on a GPU with CUDA graphs, and `greedy_batch`.

NeMo's beam goes on adding LM scores in padded frames, so that a result may depend on the batch. It is
therefore timed on the batch, but compared by utterances decoded alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_gpu_decoding.bench.cache import cached, content_key
from nemo_gpu_decoding.bench.peers.base import Hypothesis, Output, Peer, ScoringPeer, Setting, collapse
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.vocabulary import Vocabulary


class _NemoPeer(Peer):
    needs = ("nemo",)
    install = "pip install 'nemo-gpu-decoding[nemo]'"
    multithreaded = True
    _decoder: Any

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> Any:
        from nemo.core.classes import typecheck

        with typecheck.disable_checks():  # as NeMo's models call it
            return self._decoder(decoder_output=log_probs, decoder_lengths=lengths)[0]

    def _run(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        found = self.results(log_probs, lengths)
        return [Hypothesis(h.y_sequence.tolist(), float(h.score)) for h in found]


class NemoBeam(_NemoPeer, ScoringPeer):
    name = "nemo"

    def prepare(self, task: Task, setting: Setting) -> None:
        silence_nemo()
        from nemo.collections.asr.parts.submodules.ctc_beam_decoding import BeamBatchedCTCInfer

        fusion: dict[str, Any] = {}
        if setting.lm:
            assert task.lm is not None
            fusion |= {
                "ngram_lm_model": str(ngram_lm(task.lm, task.vocab_size)),
                "ngram_lm_alpha": self.options.lm_weight,
                "beam_beta": self.options.beam_beta,
            }
        if setting.phrases:
            fusion |= self._boosting(task, setting.phrases)
        self._decoder = BeamBatchedCTCInfer(
            blank_index=task.vocab_size,
            beam_size=setting.beam_size,
            allow_cuda_graphs=self.options.device != "cpu",
            **fusion,
        )
        mode = self._decoder.search_algorithm.cuda_graphs_mode
        self.graphs = mode.value if mode is not None else None

    def _boosting(self, task: Task, count: int) -> dict[str, Any]:
        from nemo.collections.asr.parts.context_biasing import BoostingTreeModelConfig

        phrases = BoostingTreeModelConfig(key_phrases_list=task.phrases(count))
        return {
            "boosting_tree": phrases,
            "boosting_tree_alpha": self.options.boosting_weight,
            "tokenizer": NemoTokenizer(task.vocabulary),
        }

    def hypotheses(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        return self._run(log_probs, lengths)


class NemoGreedy(_NemoPeer):
    name = "nemo_greedy"

    def prepare(self, task: Task, setting: Setting) -> None:
        silence_nemo()
        from nemo.collections.asr.parts.submodules.ctc_greedy_decoding import GreedyBatchedCTCInfer

        self._blank_id = task.vocab_size
        self._decoder = GreedyBatchedCTCInfer(blank_id=task.vocab_size)

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [collapse(h.tokens, self._blank_id) for h in self._run(log_probs, lengths)]


class NemoTokenizer:
    """The two members of a tokenizer that NeMo's boosting tree asks for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary)
        self.text_to_ids = vocabulary.tokenize


def ngram_lm(arpa: Path, vocab_size: int) -> Path:
    """The ARPA in NeMo's own format: reading an ARPA takes NeMo 20 s, so it is converted once."""

    def convert(path: Path) -> None:
        from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

        NGramGPULanguageModel.from_file(str(arpa), vocab_size=vocab_size).save_to(str(path))

    return cached(f"{content_key(arpa)}-{vocab_size}.nemo", convert)


def silence_nemo() -> None:
    import logging

    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
