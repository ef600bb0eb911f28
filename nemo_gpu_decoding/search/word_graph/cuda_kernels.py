"""What differs between the kernels of cuda_wfst and those of paged_biglm, which has a large LM.

An engine has one of these: `PLAIN_KERNELS` for cuda_wfst, `LargeLMKernels` for paged_biglm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.search.word_graph import kernel_abi, records
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.kernel_abi import Capacity
from nemo_gpu_decoding.search.word_graph.keys import NONE
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmPair
from nemo_gpu_decoding.search.word_graph.records import SearchParams
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels


class PlainKernels:
    """Kernels of the search with the graph's own costs."""

    composes = False
    static_shared_bytes = 0
    token = kernel_abi.PLAIN_TOKEN
    host_counters = records.COUNTERS
    best_path = kernel_abi.PLAIN_BEST_PATH
    advance, compact = kernel_abi.PLAIN_ADVANCE, kernel_abi.PLAIN_COMPACT
    trace_back = kernel_abi.PLAIN_TRACE_BACK
    buffers = kernel_abi.PLAIN_BUFFERS

    def capacity(self, config: WFSTConfig, params: SearchParams, columns: int, grown: int) -> Capacity:
        """Sizes of the buffers of `advance`; `grown`: how often they were too small."""
        seconds = params.topology == NORMAL and not params.keeps_links
        return kernel_abi.capacity_for(config.max_active, columns, seconds=seconds)

    def first_tokens(self, models: Sequence[StreamModels]) -> np.ndarray:
        """[n, 1] tokens before the first frame."""
        tokens = np.zeros((len(models), 1), self.token)
        tokens["key"][:, 0] = [own.first_key for own in models]
        tokens["back_pointer"] = NONE
        return tokens

    def tokens_on_host(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [n] as the CPU's search has them."""
        same = np.zeros(len(tokens), records.TOKEN)
        for name, _ in (records.KEY, *records.TOKEN_FIELDS):
            same[name] = tokens[name]
        return same

    def weight(self, models: StreamModels) -> float:
        """Of the LM score difference."""
        return 0.0

    def arguments(self, models: Sequence[StreamModels], device: torch.device) -> dict[str, Any]:
        """Arguments of `advance` and `trace_back` for the large LM."""
        return {}


PLAIN_KERNELS = PlainKernels()


class LargeLMKernels:
    """Kernels that add the LM score difference to the costs of words. Keep them as long as they are decoded with.

    Args:
        lms: both LMs, as the CPU's search has them.
        config: says where the large LM goes.
        name: of the large LM, for messages.
    """

    composes = True
    static_shared_bytes = kernel_abi.STATIC_SHARED_BYTES
    token = kernel_abi.LM_TOKEN
    host_counters = LM_COUNTERS
    best_path = kernel_abi.LM_BEST_PATH
    advance, compact = kernel_abi.LM_ADVANCE, kernel_abi.LM_COMPACT
    trace_back = kernel_abi.LM_TRACE_BACK
    buffers = kernel_abi.LM_BUFFERS

    def __init__(self, lms: LmPair, config: PagedBigLMConfig, name: str) -> None:
        self._lms = lms
        self._large = PlacedLM(lms.large, config.placement, config.cache_mb * 10**6, name)
        self._small = self._large  # a difference needs no other
        if not lms.is_difference:
            cache_bytes = config.cache_mb * 10**6  # if even the small one does not fit
            self._small = PlacedLM(lms.small, "auto", cache_bytes, "the small LM")

    def capacity(self, config: WFSTConfig, params: SearchParams, columns: int, grown: int) -> Capacity:
        """Sizes of the buffers of `advance`; `grown`: how often they were too small."""
        return kernel_abi.lm_capacity_for(config.max_active, columns, grown)

    def first_tokens(self, models: Sequence[StreamModels]) -> np.ndarray:
        """[n, 1] tokens before the first frame."""
        tokens = np.zeros((len(models), 1), self.token)
        tokens["key"]["key"][:, 0] = [own.first_key for own in models]
        tokens["key"]["lm"] = self._lms.start
        tokens["back_pointer"] = NONE
        return tokens

    def tokens_on_host(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [n] as the CPU's search has them."""
        same = np.zeros(len(tokens), records.LM_TOKEN)
        same["key"], same["lm"] = tokens["key"]["key"], tokens["key"]["lm"]
        for name, _ in records.TOKEN_FIELDS:
            same[name] = tokens[name]
        return same

    def weight(self, models: StreamModels) -> float:
        """Of the LM score difference."""
        assert models.lm_scorer is not None
        return float(models.lm_scorer.difference_weight)

    def arguments(self, models: Sequence[StreamModels], device: torch.device) -> dict[str, Any]:
        """Arguments of `advance` and `trace_back` for the large LM.

        Raises:
            ValueError: there is not enough memory for the LMs.
        """
        scorer = models[0].lm_scorer
        assert scorer is not None
        labels = (self._lms.large_labels, self._lms.small_labels)
        in_large, in_small = arrays_on_device(self, labels, device)
        return {
            **self._large.on(device).arguments("large"),
            **self._small.on(device).arguments("small"),
            "labels_in_large": in_large,
            "labels_in_small": in_small,
            "is_difference": self._lms.is_difference,
            "large_end": self._lms.large_end,
            "small_end": self._lms.small_end,
            "contexts_per_group": scorer.group_size,
        }
