"""The object that NeMo calls to decode CTC log-probs with flexctc_beam."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nemo.collections.asr.parts.submodules.ctc_beam_decoding import AbstractBeamCTCInfer
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis, NBestHypotheses
from nemo.utils import logging, logging_mode
from omegaconf import DictConfig

from nemo_gpu_decoding.nemo_plugin.beam_options import BeamOptions
from nemo_gpu_decoding.nemo_plugin.confidence import FrameConfidence
from nemo_gpu_decoding.nemo_plugin.ctc_config import read_ctc_options
from nemo_gpu_decoding.nemo_plugin.hypotheses import BeamHypothesis, from_labels, from_path
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer
from nemo_gpu_decoding.nemo_plugin.loading import load_fusion, nemo_vocabulary
from nemo_gpu_decoding.nemo_plugin.requests import next_requests
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.vocabulary import Vocabulary


def build_flexctc_beam(owner: Any, cfg: DictConfig) -> FlexCTCInfer:
    """The decoder for one of NeMo's CTC decoding objects (factory of the strategy table)."""
    infer = FlexCTCInfer(owner.blank_id, read_ctc_options(cfg), dict(owner.confidence_method_cfg))
    infer.preserve_alignments = owner.preserve_alignments
    infer.compute_timestamps = owner.compute_timestamps
    infer.preserve_frame_confidence = owner.preserve_frame_confidence
    return infer


class FlexCTCInfer(FusedInfer, AbstractBeamCTCInfer):
    """CTC beam search behind the interface of NeMo's `BeamBatchedCTCInfer`.

    Cheap to make, for NeMo makes many: LM and phrases are read when the first batch comes. NeMo's
    decoding object sets `preserve_alignments` and `preserve_frame_confidence` at any time.

    Args:
        blank_id: the blank's column, which in NeMo is also the number of tokens.
        options: from `read_ctc_options`.
        confidence_method: NeMo's `confidence_cfg.method_cfg`.
    """

    def __init__(
        self,
        blank_id: int,
        options: BeamOptions[FlexCTCConfig],
        confidence_method: dict[str, Any],
    ) -> None:
        super().__init__(blank_id=blank_id, beam_size=options.search.beam_size)
        self.options = options
        self.confidence_method = confidence_method
        self.return_best_hypothesis = options.return_best
        self.preserve_alignments = False
        self.compute_timestamps = False
        self.preserve_frame_confidence = False
        self._decoders: dict[bool, FlexCTCBeam] = {}  # with and without alignments

    def forward(
        self, decoder_output: torch.Tensor, decoder_lengths: torch.Tensor | None = None
    ) -> tuple[list[Hypothesis | NBestHypotheses]]:
        """Decode a batch.

        Args:
            decoder_output: [B, T, V + 1] log-probs; or [B, T] int, the greedy labels that NeMo's
                cache-aware streaming passes on. They leave nothing to search and are collapsed.
            decoder_lengths: [B] valid frames; None = all of them.

        Returns:
            A 1-tuple of a list with one `Hypothesis`, or `NBestHypotheses`, per utterance.

        Raises:
            ValueError: see `FlexCTCBeam.decode`; labels when alignments or confidence are asked for.
        """
        if decoder_lengths is None:
            decoder_lengths = torch.full((len(decoder_output),), decoder_output.shape[1])
        if decoder_output.ndim == 2:
            return (self._collapse(decoder_output.cpu().numpy(), decoder_lengths.tolist()),)
        requests = next_requests(self, len(decoder_output))
        results = self.decoder().decode(decoder_output, decoder_lengths, requests)
        frames = [None] * len(results)
        if self.preserve_alignments or self.preserve_frame_confidence:
            log_probs, lengths = decoder_output.cpu(), decoder_lengths.tolist()
            frames = [row[:length] for row, length in zip(log_probs, lengths, strict=True)]
        return ([self._hypotheses(nbest, rows) for nbest, rows in zip(results, frames, strict=True)],)

    def decoder(self) -> FlexCTCBeam:
        """The search itself, with LM and phrases loaded."""
        alignments = bool(self.preserve_alignments)
        if alignments not in self._decoders:
            search = replace(self.options.search, alignments=alignments)
            fusion = load_fusion(self.options.fusion, self.blank_id, self.vocabulary())
            self._decoders[alignments] = FlexCTCBeam(self.blank_id, self.blank_id, search, fusion)
        return self._decoders[alignments]

    def vocabulary(self) -> Vocabulary:
        """The tokens of the model, from what NeMo told by `set_vocabulary` and `set_tokenizer`."""
        return nemo_vocabulary(self.decoding_type, self.vocab, self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the options; LM and phrases come from the cache again."""
        return self.__dict__ | {"_decoders": {}}

    def _hypotheses(self, nbest: NBest, log_probs: torch.Tensor | None) -> Hypothesis | NBestHypotheses:
        for note in nbest.notes:
            logging.warning(note)
        confidence = None
        if self.preserve_frame_confidence:
            confidence = FrameConfidence(self.blank_id, self.confidence_method).of(log_probs)
        hypotheses = []
        for path in nbest:
            hypothesis = from_path(path, nbest.num_frames)
            hypothesis.frame_confidence = confidence
            if self.preserve_alignments:
                assert log_probs is not None
                assert path.alignment is not None  # decoder() asks for it
                labels = torch.from_numpy(path.alignment.astype(np.int64))
                hypothesis.alignments = (log_probs.clone(), labels)
            hypotheses.append(hypothesis)
        return hypotheses[0] if self.return_best_hypothesis else NBestHypotheses(hypotheses)

    def _collapse(self, labels: np.ndarray, lengths: list[int]) -> list[Hypothesis | NBestHypotheses]:
        for flag in ("preserve_alignments", "preserve_frame_confidence"):
            if getattr(self, flag):
                raise ValueError(
                    f"{flag} is true, but labels were given, expected log-probs [B, T, V + 1]"
                )
        logging.info(
            "flexctc_beam was given greedy labels instead of log-probs; they are collapsed as they are.",
            mode=logging_mode.ONCE,
        )
        hypotheses: list[BeamHypothesis] = [
            from_labels(row[:length], self.blank_id) for row, length in zip(labels, lengths, strict=True)
        ]
        if self.return_best_hypothesis:
            return hypotheses
        return [NBestHypotheses([hypothesis]) for hypothesis in hypotheses]
