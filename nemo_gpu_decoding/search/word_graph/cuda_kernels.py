"""The differences between the kernels of cuda_wfst and those of paged_biglm, which has a large LM.

An engine has one of these: `PLAIN_KERNELS` for cuda_wfst, `LargeLMKernels` for paged_biglm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.graph.csr import NORMAL
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.search.word_graph import kernel_abi, records
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmPair, LmScorer


class PlainKernels:
    """Kernels of the search without a large LM."""

    composes = False
    static_shared_bytes = 0
    token = kernel_abi.PLAIN_TOKEN
    host_token, host_counters = records.TOKEN, records.COUNTERS  # of the CPU search
    best_path = kernel_abi.PLAIN_BEST_PATH
    advance, compact = kernel_abi.PLAIN_ADVANCE, kernel_abi.PLAIN_COMPACT
    trace_back = kernel_abi.PLAIN_TRACE_BACK
    buffers = kernel_abi.PLAIN_BUFFERS

    def capacity(
        self, config: WFSTConfig, params: records.SearchParams, columns: int, doubled: int
    ) -> kernel_abi.Capacity:
        """Sizes of the buffers of `advance`; `doubled` counts how often they were too small."""
        seconds = params.topology == NORMAL and not params.keeps_links
        return kernel_abi.capacity_for(config.max_active, columns, seconds=seconds)

    def arguments(self, scorer: LmScorer | None, device: torch.device) -> dict[str, Any]:
        """The arguments of `advance` and `trace_back` for the large LM; a ValueError if memory is short."""
        return {}


PLAIN_KERNELS = PlainKernels()


class OpenedLabels:
    """Owns the LMs' labels of the words of the decoder's `opened_graph` on the devices."""


class LargeLMKernels(PlainKernels):
    """Kernels that add the LM score difference to the costs of words. They hold the LMs on the devices.

    Args:
        lms: both LMs of the CPU search.
        config: has the placement of the large LM.
        name: name of the large LM, for messages.
    """

    composes = True
    static_shared_bytes = kernel_abi.STATIC_SHARED_BYTES
    # the bytes of kernel_abi.LM_TOKEN; the fields of its key are fields of the token here
    token = np.dtype([records.KEY, records.LM, *records.TOKEN_FIELDS], align=True)
    host_token, host_counters = records.LM_TOKEN, LM_COUNTERS
    best_path = kernel_abi.best_path_of(token)
    advance, compact = kernel_abi.LM_ADVANCE, kernel_abi.LM_COMPACT
    trace_back = kernel_abi.LM_TRACE_BACK
    buffers = kernel_abi.LM_BUFFERS

    def __init__(self, lms: LmPair, config: PagedBigLMConfig, name: str) -> None:
        self._lms, self._opened = lms, OpenedLabels()
        cache_bytes = config.cache_mb * 10**6
        self._large = PlacedLM(lms.large, config.placement, cache_bytes, name)
        self._small = self._large  # the kernels do not read it if there is a difference automaton
        if not lms.is_difference:
            self._small = PlacedLM(lms.small, "auto", cache_bytes, "the small LM")

    def capacity(
        self, config: WFSTConfig, params: records.SearchParams, columns: int, doubled: int
    ) -> kernel_abi.Capacity:
        return kernel_abi.lm_capacity_for(config.max_active, columns, doubled)

    def arguments(self, scorer: LmScorer | None, device: torch.device) -> dict[str, Any]:
        assert scorer is not None
        owner = self if scorer.lms is self._lms else self._opened
        labels = (scorer.lms.large_labels, scorer.lms.small_labels)
        in_large, in_small = arrays_on_device(owner, labels, device)
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
