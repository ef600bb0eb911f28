"""What all our decoders behind NeMo's interfaces have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
from nemo_gpu_decoding.vocabulary import Vocabulary


class BoostingOptions(Protocol):
    """What the options of all strategies say about phrases."""

    @property
    def boosting(self) -> BoostingConfig:
        """`boosting_tree` of the config."""

    @property
    def boosting_weight(self) -> float:
        """`boosting_tree_alpha` of the config."""


class FusedInfer(WithOptionalCudaGraphs, ABC):
    """A decoder with the LM and phrases of a decoding config.

    NeMo looks for `WithOptionalCudaGraphs` when a model goes from training to validation and back.
    """

    options: BoostingOptions
    section = "beam"  # of NeMo's decoding config, where its options are

    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The tokens of the model."""

    @property
    def has_phrases(self) -> bool:
        """The config boosts phrases."""
        return not self.options.boosting.is_empty and self.options.boosting_weight > 0

    def phrase_tree(self, phrases: Sequence[str | Phrase]) -> BackoffAutomaton:
        """A boosting tree of other phrases, with the options of the config's `boosting_tree`."""
        config = replace(
            self.options.boosting,
            model_path=None,
            key_phrases_file=None,
            key_phrases_list=None,
            key_phrase_items_list=None,
        )
        return build_boosting_tree(phrases, self.vocabulary(), config)

    def disable_cuda_graphs(self) -> bool:
        return False  # nothing changes: there are no CUDA graphs to switch

    def maybe_enable_cuda_graphs(self) -> bool:
        return False
