"""Our searches of word graphs in the shape of `Peer`."""

from __future__ import annotations

import torch

from nemo_gpu_decoding.bench.peers.base import Output, Setting
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.word_graph.graphs import word_graph
from nemo_gpu_decoding.bench.word_graph.settings import GraphSetting
from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.result import WordPath


class WordGraphSearch(Strategy):
    """Its words are those of the task's graph."""

    name = "cuda_wfst"
    tells_rows = True

    def prepare(self, task: Task, setting: Setting) -> None:
        assert isinstance(setting, GraphSetting)
        config = WFSTConfig(
            topology=setting.topology,
            beam=float(setting.beam_size),
            max_active=setting.max_active,
            acoustic_scale=setting.acoustic_scale,
            threads=setting.threads,
            backend=self.backend,
        )
        self.decoder = CudaWFST(word_graph(task), task.vocab_size, task.vocab_size, config)

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [nbest.best.text for nbest in self.results(log_probs, lengths)]

    def paths(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        return [nbest.best for nbest in self.results(log_probs, lengths)]

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[NBest[WordPath]]:
        return self.decoder.decode(log_probs, lengths)


WORD_GRAPH_STRATEGIES: dict[str, type[Strategy]] = {WordGraphSearch.name: WordGraphSearch}
