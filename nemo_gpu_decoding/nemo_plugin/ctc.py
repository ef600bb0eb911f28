"""The object that NeMo calls to decode CTC log-probs with flexctc_beam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import DictConfig

from nemo_gpu_decoding.nemo_plugin.beam_options import BeamOptions
from nemo_gpu_decoding.nemo_plugin.ctc_config import read_ctc_options
from nemo_gpu_decoding.nemo_plugin.ctc_infer import CTCInfer
from nemo_gpu_decoding.nemo_plugin.hypotheses import BeamHypothesis, from_path
from nemo_gpu_decoding.nemo_plugin.loading import load_fusion
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import NBest, Path


def build_flexctc_beam(owner: Any, cfg: DictConfig) -> FlexCTCInfer:
    """The decoder for one of NeMo's CTC decoding objects (factory of the strategy table)."""
    infer = FlexCTCInfer(owner.blank_id, read_ctc_options(cfg), dict(owner.confidence_method_cfg))
    infer.preserve_alignments = owner.preserve_alignments
    infer.compute_timestamps = owner.compute_timestamps
    infer.preserve_frame_confidence = owner.preserve_frame_confidence
    return infer


class FlexCTCInfer(CTCInfer):
    """flexctc_beam as NeMo calls it.

    Args:
        blank_id: the blank's column, which in NeMo is also the number of tokens.
        options: from `read_ctc_options`.
        confidence_method: NeMo's `confidence_cfg.method_cfg`.
    """

    strategy = "flexctc_beam"
    options: BeamOptions[FlexCTCConfig]

    def __init__(
        self,
        blank_id: int,
        options: BeamOptions[FlexCTCConfig],
        confidence_method: dict[str, Any],
    ) -> None:
        super().__init__(blank_id, options.search.beam_size, options.return_best, confidence_method)
        self.options = options
        self._decoders: dict[bool, FlexCTCBeam] = {}  # with and without alignments

    def decoder(self) -> FlexCTCBeam:
        """The search itself, with LM and phrases loaded."""
        alignments = bool(self.preserve_alignments)
        if alignments not in self._decoders:
            search = replace(self.options.search, alignments=alignments)
            fusion = load_fusion(self.options.fusion, self.blank_id, self.vocabulary())
            self._decoders[alignments] = FlexCTCBeam(self.blank_id, self.blank_id, search, fusion)
        return self._decoders[alignments]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the options; LM and phrases come from the cache again."""
        return self.__dict__ | {"_decoders": {}}

    def _chosen(self, nbest: NBest) -> Sequence[Path]:
        return nbest.paths

    def _hypothesis(self, path: Path, nbest: NBest) -> BeamHypothesis:
        return from_path(path, nbest.num_frames)

    def _alignment(self, path: Path, num_frames: int) -> np.ndarray:
        assert path.alignment is not None  # decoder() asks for it
        return path.alignment
