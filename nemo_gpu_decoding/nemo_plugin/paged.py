"""The object that NeMo calls to decode CTC log-probs with paged_biglm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.nemo_plugin.hypotheses import WordHypothesis
from nemo_gpu_decoding.nemo_plugin.paged_config import PagedOptions, read_paged_options
from nemo_gpu_decoding.nemo_plugin.wfst import WfstInfer, configured
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.paged_biglm.config import PagedBigLMConfig
from nemo_gpu_decoding.search.paged_biglm.decoder import PagedBigLM
from nemo_gpu_decoding.search.paged_biglm.lms import load_large_lm, load_small_lm
from nemo_gpu_decoding.search.result import NBest, Path, Work


@dataclass
class PagedHypothesis(WordHypothesis):
    """A `WordHypothesis` that says what the search of its utterance had to do."""

    work: Work | None = None


def build_paged_biglm(owner: Any, cfg: DictConfig) -> PagedInfer:
    """The decoder for one of NeMo's CTC decoding objects (factory of the strategy table)."""
    return configured(PagedInfer, owner, read_paged_options(cfg))


class PagedInfer(WfstInfer):
    """paged_biglm as NeMo calls it: cuda_wfst in the small LM's graph, with the large LM's costs."""

    strategy = "paged_biglm"
    options: PagedOptions

    def _search(self, graph: WordGraph, config: WFSTConfig, **others: Any) -> PagedBigLM:
        assert isinstance(config, PagedBigLMConfig)
        large, small = load_large_lm(self.options.large), load_small_lm(self.options.small, graph)
        return PagedBigLM(graph, self.blank_id, self.blank_id, large, small, config, **others)

    def _hypothesis(self, path: Path, nbest: NBest) -> PagedHypothesis:
        return PagedHypothesis(**vars(super()._hypothesis(path, nbest)), work=nbest.work)
