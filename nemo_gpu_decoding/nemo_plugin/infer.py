"""What all our decoders behind NeMo's interfaces have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodMixin
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs
from omegaconf import DictConfig

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import Phrase, build_boosting_tree
from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary
from nemo_gpu_decoding.nemo_plugin.section import Options
from nemo_gpu_decoding.vocabulary import Vocabulary


class FusedInfer(WithOptionalCudaGraphs, ABC):
    """A decoder with the LM and phrases of a decoding config; `decoder()` is the search itself.

    Cheap to make, for NeMo makes many: LM, graph and phrases are read when the first batch comes. NeMo
    looks for `WithOptionalCudaGraphs` when a model goes from training to validation and back.

    Args:
        owner: NeMo's decoding object, set up but for this.
        cfg: its config.

    Raises:
        ValueError, FileNotFoundError: see the reader of the strategy's section.
    """

    section: ClassVar[str] = "beam"  # of NeMo's decoding config, where its options are
    options: Options[Any]

    def __init__(self, owner: Any, cfg: DictConfig) -> None:
        self.options = self.read(cfg)
        self.return_best_hypothesis = self.options.return_best
        self.preserve_alignments = bool(owner.preserve_alignments)
        self.preserve_frame_confidence = bool(owner.preserve_frame_confidence)
        self.compute_timestamps = owner.compute_timestamps
        self.confidence_method = dict(owner.confidence_method_cfg)
        self.tokenizer = getattr(owner, "tokenizer", None)
        self.labels_map = getattr(owner, "labels_map", None)  # of character models
        self._decoders: dict[Hashable, Any] = {}  # by what `_variant` says

    @staticmethod
    @abstractmethod
    def read(cfg: DictConfig) -> Options[Any]:
        """The options that the config has for this strategy."""

    @abstractmethod
    def _load(self) -> Any:
        """The search, with all that it needs."""

    def _variant(self) -> Hashable:
        """What NeMo may change later so that another search is needed."""
        return None

    def decoder(self) -> Any:
        """The search itself, with LM, graph and phrases loaded."""
        variant = self._variant()
        if variant not in self._decoders:
            self._decoders[variant] = self._load()
        return self._decoders[variant]

    def vocabulary(self) -> Vocabulary:
        """The tokens of the model."""
        return nemo_vocabulary(self)

    def phrase_tree(self, phrases: Sequence[str | Phrase]) -> BackoffAutomaton:
        """A boosting tree of other phrases, with the options of the config's `boosting_tree`."""
        config = replace(
            self.options.fusion.boosting,
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

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the options; what was loaded comes from the cache again."""
        return self.__dict__ | {"_decoders": {}}


class FrameConfidence(ConfidenceMethodMixin):
    """NeMo's confidence of a frame, by the method that `confidence_cfg.method_cfg` names."""

    def __init__(self, blank_id: int, method: dict[str, Any]) -> None:
        self.blank_id = blank_id
        self._init_confidence_method(method)

    def of(self, log_probs: torch.Tensor) -> list[float]:
        """Confidences in [0, 1] of log-probs [T, V + 1]."""
        return self._get_confidence(log_probs)
