"""Searches with the large LM, and with the small one alone, in the shape of `Peer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nemo_gpu_decoding.bench.large_lm.lms import large_lm, small_graph, small_lm
from nemo_gpu_decoding.bench.peers.base import Output, Peer, Setting
from nemo_gpu_decoding.bench.strategies import Strategy
from nemo_gpu_decoding.bench.task import Task
from nemo_gpu_decoding.bench.word_graph.settings import GraphSetting
from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST, PagedBigLM
from nemo_gpu_decoding.search.word_graph.result import WordPath


class SmallLMSearch(Strategy):
    """cuda_wfst on the small LM's graph: what a search costs that knows no large LM."""

    name = "small_lm"

    def prepare(self, task: Task, setting: Setting) -> None:
        graph = small_graph(task, self.options.small_share)
        config = WFSTConfig(**self._options(setting))
        self.decoder = CudaWFST(graph, task.vocab_size, task.vocab_size, config)

    def _options(self, setting: Setting) -> dict[str, Any]:
        assert isinstance(setting, GraphSetting)
        return {
            "topology": setting.topology,
            "beam": float(setting.beam_size),
            "max_active": setting.max_active,
            "acoustic_scale": setting.acoustic_scale,
            "threads": setting.threads,
            "backend": self.backend,
        }

    def decode(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Output]:
        return [nbest.best.text for nbest in self.results(log_probs, lengths)]

    def paths(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[Path]:
        return [nbest.best for nbest in self.results(log_probs, lengths)]

    def results(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[NBest[WordPath]]:
        return self.decoder.decode(log_probs, lengths)


class PagedBigLMSearch(SmallLMSearch):
    """paged_biglm with lazy composition."""

    name = "paged_biglm"
    composition = "lazy"

    def prepare(self, task: Task, setting: Setting) -> None:
        share = self.options.small_share
        config = PagedBigLMConfig(**self._options(setting), composition=self.composition)
        self.decoder = PagedBigLM(
            small_graph(task, share), task.vocab_size, task.vocab_size, large_lm(task),
            small_lm(task, share), config,
        )  # fmt: skip

    def describe(self, peer: Peer, task: Task) -> dict[str, Any]:
        """Size of both LMs, and what both sides do per frame; for the row."""
        share, work = self.options.small_share, {"ours": self.work_per_frame(task)}
        if isinstance(peer, PagedBigLMSearch):
            work["peer"] = peer.work_per_frame(task)
        lms = {"large": sum(large_lm(task).counts), "small": sum(small_lm(task, share).counts)}
        return {"lms": lms, "work": work}

    def work_per_frame(self, task: Task) -> dict[str, float]:
        """Look-ups, arc visits and so on, see `Work`."""
        return work_per_frame(self.results(task.inputs, task.lengths))


def work_per_frame(results: Iterable[NBest]) -> dict[str, float]:
    """`Work` per frame; nothing of a search without a large LM."""
    works = [nbest.work for nbest in results if nbest.work is not None]
    frames = max(1, sum(work.frames for work in works))
    names = works[0]._fields[:-1] if works else ()
    return {name: round(sum(getattr(work, name) for work in works) / frames, 3) for name in names}


class EagerSearch(PagedBigLMSearch):
    """paged_biglm with eager composition, the baseline of [LET]."""

    name = "eager"
    composition = "eager"


LARGE_LM_STRATEGIES: dict[str, type[Strategy]] = {PagedBigLMSearch.name: PagedBigLMSearch}
