"""Our strategies in the shape of `Peer`, so that one loop measures everything."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from nemo_gpu_decoding.bench.options import BenchOptions
from nemo_gpu_decoding.bench.peers.base import Hypothesis, ScoringPeer, Setting
from nemo_gpu_decoding.bench.task import Task, Utterances
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, build_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import NBest, Path


class Strategy(ScoringPeer):
    """A decoder of ours. `prepare` makes `decoder` and its `fusion`; `backend` may be set before."""

    fusion: Fusion
    decoder: Any  # a `search.protocol.Decoder`; what it returns may be more than an `NBest`
    multithreaded = True
    tells_rows = False  # `partial` can be asked about some of the streams that were opened together

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        self.backend = "cpu" if options.device == "cpu" else "cuda"

    @abstractmethod
    def paths(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        """The best path of each utterance."""

    def hypotheses(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Hypothesis]:
        return [Hypothesis(path.tokens.tolist(), path.score) for path in self.paths(log_probs, lengths)]


class FlexCTC(Strategy):
    name = "flexctc_beam"

    def prepare(self, task: Task, setting: Setting) -> None:
        self.fusion = make_fusion(task, setting, self.options)
        config = FlexCTCConfig(
            beam_size=setting.beam_size,
            beam_beta=self.options.beam_beta if setting.lm else 0.0,
            threads=setting.threads,
            backend=self.backend,
        )
        self.decoder = FlexCTCBeam(task.vocab_size, task.vocab_size, config, self.fusion)

    def paths(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        return [nbest.best for nbest in self.results(log_probs, lengths)]

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[NBest]:
        return self.decoder.decode(log_probs, lengths)


def make_fusion(task: Utterances, setting: Setting, options: BenchOptions) -> Fusion:
    """LM and boosting tree as the setting asks.

    Boosting takes refunds as NeMo does, so that hypotheses can be compared with NeMo's one by one.
    """
    lm = boosting = None
    if setting.lm and task.lm:
        lm = load_ngram_lm(task.lm, task.vocab_size, encoding="nemo")
    if setting.phrases:
        phrases = task.phrases(setting.phrases)
        boosting = build_boosting_tree(phrases, task.vocabulary, BoostingConfig(refund="nemo"))
    return Fusion(lm, options.lm_weight, boosting, options.boosting_weight)


STRATEGIES: dict[str, type[Strategy]] = {FlexCTC.name: FlexCTC}
