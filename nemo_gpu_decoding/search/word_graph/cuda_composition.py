"""What differs between a search in one graph and one that composes it with a large LM, on the GPU.

An engine has one of these: `NO_COMPOSITION` for cuda_wfst, an `LmComposition` for paged_biglm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.search.word_graph import kernel_abi
from nemo_gpu_decoding.search.word_graph import tokens as plain
from nemo_gpu_decoding.search.word_graph.composition import tokens as composed
from nemo_gpu_decoding.search.word_graph.composition.composition import Rescoring
from nemo_gpu_decoding.search.word_graph.composition.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.kernel_abi import Capacity
from nemo_gpu_decoding.search.word_graph.streams import Setup
from nemo_gpu_decoding.search.word_graph.ways import SearchParams


class NoComposition:
    """The graph's own costs are all there is."""

    composes = False
    static_shared_bytes = 0
    token = kernel_abi.PLAIN_TOKEN
    host_token, host_progress = plain.TOKEN, plain.PROGRESS
    advance, compact = kernel_abi.PLAIN_ADVANCE, kernel_abi.PLAIN_COMPACT
    buffers = kernel_abi.PLAIN_BUFFERS

    def capacity(self, config: WFSTConfig, params: SearchParams, columns: int, grown: int) -> Capacity:
        """Sizes of the buffers of `advance`; `grown`: how often they were too small."""
        seconds = params.topology == NORMAL and not params.keeps_links
        return kernel_abi.capacity_for(config.max_active, columns, seconds=seconds)

    def first_tokens(self, setups: Sequence[Setup]) -> np.ndarray:
        """[n, 1] tokens before the first frame."""
        tokens = np.zeros((len(setups), 1), self.token)
        tokens["key"][:, 0] = [setup.first_key for setup in setups]
        tokens["back_pointer"] = plain.NONE
        return tokens

    def tokens_on_host(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [n] as the CPU's search has them."""
        same = np.zeros(len(tokens), self.host_token)
        for name in ("key", "cost", "run", "probability"):
            same[name] = tokens[name]
        same["record"] = tokens["back_pointer"]
        return same

    def weight(self, setup: Setup) -> float:
        """Of the LM score difference."""
        return 0.0

    def arguments(self, setups: Sequence[Setup], device: torch.device) -> dict[str, Any]:
        """Arguments of `advance` that are composition's own."""
        return {}

    def defines(self, setups: Sequence[Setup]) -> dict[str, int | str]:
        """Macros of `advance`."""
        return {}


NO_COMPOSITION = NoComposition()


class LmComposition:
    """Costs of words are corrected by the LM score difference. Keep it as long as it is decoded with.

    Args:
        rescoring: both LMs, as the CPU's search has them.
        config: says where the large LM goes.
        name: of the large LM, for messages.
    """

    composes = True
    static_shared_bytes = kernel_abi.STATIC_SHARED_BYTES
    token = kernel_abi.LM_TOKEN
    host_token, host_progress = composed.TOKEN, composed.PROGRESS
    advance, compact = kernel_abi.LM_ADVANCE, kernel_abi.LM_COMPACT
    buffers = kernel_abi.LM_BUFFERS

    def __init__(self, rescoring: Rescoring, config: PagedBigLMConfig, name: str) -> None:
        self._rescoring = rescoring
        self._large = PlacedLM(rescoring.large, config.placement, config.cache_mb * 10**6, name)
        self._small = self._large  # a difference asks nothing else
        if not rescoring.is_difference:
            cache_bytes = config.cache_mb * 10**6  # if even the small one does not fit
            self._small = PlacedLM(rescoring.small, "auto", cache_bytes, "the small LM")

    def capacity(self, config: WFSTConfig, params: SearchParams, columns: int, grown: int) -> Capacity:
        """Sizes of the buffers of `advance`; `grown`: how often they were too small."""
        return kernel_abi.lm_capacity_for(config.max_active, columns, grown)

    def first_tokens(self, setups: Sequence[Setup]) -> np.ndarray:
        """[n, 1] tokens before the first frame."""
        tokens = np.zeros((len(setups), 1), self.token)
        tokens["key"]["key"][:, 0] = [setup.first_key for setup in setups]
        tokens["key"]["lm"] = self._rescoring.start
        tokens["back_pointer"] = plain.NONE
        return tokens

    def tokens_on_host(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [n] as the CPU's search has them."""
        same = np.zeros(len(tokens), self.host_token)
        for name in ("cost", "run", "probability"):
            same[name] = tokens[name]
        same["key"], same["lm"] = tokens["key"]["key"], tokens["key"]["lm"]
        same["record"] = tokens["back_pointer"]
        return same

    def weight(self, setup: Any) -> float:
        """Of the LM score difference."""
        return float(setup.composition.correction_weight)

    def arguments(self, setups: Sequence[Any], device: torch.device) -> dict[str, Any]:
        """Arguments of `advance` that are composition's own.

        Raises:
            ValueError: there is not enough memory for the LMs.
        """
        labels = (self._rescoring.large_labels, self._rescoring.small_labels)
        in_large, in_small = arrays_on_device(self, labels, device)
        return {
            **self._large.on(device).arguments("large"),
            **self._small.on(device).arguments("small"),
            "labels_in_large": in_large,
            "labels_in_small": in_small,
            "is_difference": self._rescoring.is_difference,
            "contexts_per_group": setups[0].composition.group_size,
        }

    def defines(self, setups: Sequence[Any]) -> dict[str, int | str]:
        """Macros of `advance`."""
        return {"COMPOSE": 1} if setups[0].composition.lazy else {"COMPOSE": 1, "EAGER": 1}
