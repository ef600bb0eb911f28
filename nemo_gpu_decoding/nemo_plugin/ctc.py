"""Decode CTC log-probs for NeMo: define the base class of CTC decoders, and the decoder of flexctc_beam."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from nemo.collections.asr.parts.submodules.ctc_beam_decoding import AbstractBeamCTCInfer
from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis, NBestHypotheses
from nemo.utils import logging, logging_mode
from omegaconf import DictConfig

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.nemo_plugin.beam_sections import read_flexctc
from nemo_gpu_decoding.nemo_plugin.hypotheses import BeamHypothesis, from_labels, from_path
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer, frame_confidence, load_fusion
from nemo_gpu_decoding.nemo_plugin.requests import next_requests
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import StreamState
from nemo_gpu_decoding.search.engine import BadRow
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import Path


class CTCInfer(FusedInfer, AbstractBeamCTCInfer):
    """A CTC search with the interface of NeMo's `BeamBatchedCTCInfer`.

    NeMo's decoding object may set `preserve_alignments` and `preserve_frame_confidence` at any time. NeMo's
    blank is the last column, so its index is the number of tokens.
    """

    continued_by = "previous_pred_out"

    def __init__(self, owner: Any, cfg: DictConfig) -> None:
        AbstractBeamCTCInfer.__init__(self, blank_id=owner.blank_id, beam_size=1)
        FusedInfer.__init__(self, owner, cfg)
        self.beam_size = getattr(self.options.search, "beam_size", self.options.n_best)

    @abstractmethod
    def _alignment(self, path: Path, num_frames: int) -> np.ndarray:
        """Return the label (token or blank) of each frame in a path, [num_frames] integers."""

    def forward(
        self, decoder_output: torch.Tensor, decoder_lengths: torch.Tensor | None = None
    ) -> tuple[list[Hypothesis | NBestHypotheses]]:
        """Decode a batch.

        Args:
            decoder_output: [B, T, V + 1] log-probs; or [B, T] int, labels of a greedy decoder, which are
                collapsed without a search, with a warning.
            decoder_lengths: [B] valid frames; None = all of them.

        Returns:
            A 1-tuple of a list with one `Hypothesis`, or `NBestHypotheses`, per utterance.

        Raises:
            ValueError: see the decoder's `decode`; labels are given with alignments or confidence. If an
                utterance has an invalid frame (NaN), its hypothesis is empty and has `error`, and a warning is
                logged; the other utterances are not affected.
        """
        if decoder_lengths is None:
            decoder_lengths = torch.full((len(decoder_output),), decoder_output.shape[1])
        if decoder_output.ndim == 2:
            return self._collapse(decoder_output.cpu().numpy(), decoder_lengths.tolist())
        states = continued_streams.get()
        requests = next_requests(self, len(decoder_output) if states is None else states.count(None))
        if states is None:
            results = self._decode(decoder_output, decoder_lengths, requests)
        else:
            chunk = decoder_output, decoder_lengths.cpu()
            results = self._continuation.advance(
                self.decoder(), *chunk, states, requests, keep_history=self.needs_frames
            )
            states[:] = results
        paths, hypotheses = self._hypotheses(results)
        if self.needs_frames:
            for of_utterance in zip(results, paths, hypotheses, strict=True):
                self._add_frames(*of_utterance)
        return self._returned(hypotheses)

    def _decode(
        self, log_probs: torch.Tensor, lengths: torch.Tensor, requests: Sequence[Request | None] | None
    ) -> list[StreamState]:
        """Decode whole utterances; an utterance with invalid log-probs gets a result with an error and no frames."""
        errors: dict[int, BadRow] = {}
        while True:
            try:
                nbests = self.decoder().decode(log_probs, lengths, requests)
                break
            except BadRow as error:
                errors[error.row] = error
                lengths = lengths.clone()
                lengths[error.row] = 0
        frames: Sequence[Any] = [None] * len(nbests)
        if self.needs_frames:
            frames = [row[:length] for row, length in zip(log_probs.cpu(), lengths.tolist(), strict=True)]
        return [
            StreamState(nbest.num_frames, nbest, None, rows, errors.get(b))
            for b, (nbest, rows) in enumerate(zip(nbests, frames, strict=True))
        ]

    def _add_frames(self, state: StreamState, paths: Sequence[Path], hypotheses: Sequence[BeamHypothesis]) -> None:
        """Set frame confidence and alignments in the hypotheses of one utterance."""
        assert state.history is not None
        log_probs, confidence = state.history.cpu(), None
        if self.preserve_frame_confidence:
            confidence = frame_confidence(log_probs, self.blank_id, self.confidence_method)
        for path, hypothesis in zip(paths, hypotheses, strict=True):
            hypothesis.frame_confidence = confidence
            if self.preserve_alignments:
                labels = torch.from_numpy(self._alignment(path, len(log_probs)).astype(np.int64))
                hypothesis.alignments = (log_probs.clone(), labels)

    def _collapse(self, labels: np.ndarray, lengths: list[int]) -> tuple[list[Any]]:
        for flag in ("preserve_alignments", "preserve_frame_confidence"):
            if getattr(self, flag):
                raise ValueError(f"{flag} is true, but labels were given, expected log-probs [B, T, V + 1]")
        logging.warning(
            f"{self.strategy} got greedy labels, which cannot be searched: the text is greedy. Expected "
            "log-probs [B, T, V + 1], as NeMo's conformer_stream_step gives them while the plugin is registered.",
            mode=logging_mode.ONCE,
        )
        pairs = zip(labels, lengths, strict=True)
        return self._returned([[from_labels(row[:length], self.blank_id)] for row, length in pairs])


# The state of each utterance of a batch; None begins an utterance. With it, decoders continue utterances with the next
# chunk of log-probs, and replace the states by the new ones.
continued_streams: ContextVar[list[StreamState | None] | None] = ContextVar("stream_states", default=None)


class FlexCTCInfer(CTCInfer):
    """The search flexctc_beam with NeMo's decoder interface."""

    read = staticmethod(read_flexctc)

    def _variant(self) -> Hashable:
        return bool(self.preserve_alignments)

    def _load(self) -> FlexCTCBeam:
        n_best = self.candidates(self.options.n_best)
        search = replace(self.options.search, n_best=n_best, alignments=bool(self.preserve_alignments))
        fusion = load_fusion(self.options.fusion, self.blank_id, self.vocabulary())
        return FlexCTCBeam(self.blank_id, self.blank_id, search, fusion)

    def _hypothesis(self, path: Path, state: StreamState) -> BeamHypothesis:
        return from_path(path, state, BeamHypothesis)

    def _alignment(self, path: Path, num_frames: int) -> np.ndarray:
        assert path.alignment is not None  # the options of the search enable it
        return path.alignment
