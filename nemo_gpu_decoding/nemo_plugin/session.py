"""A NeMo model as the command line uses it: loaded once, encoder run once, any decoding strategy."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.nemo_plugin.register import STRATEGIES
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.transducer.decoder import TransducerDecoder
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.vocabulary import Vocabulary

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel
    from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

NO_NEMO = "this command needs NeMo: pip install 'nemo_toolkit[asr]'"


@dataclass(frozen=True)
class Word:
    """A word, its times in seconds and its confidence in [0, 1] (None where the strategy has none)."""

    word: str
    start: float
    end: float
    confidence: float | None = None


@dataclass(frozen=True)
class Transcript:
    """What a strategy made of one utterance: best text first."""

    text: str
    score: float | None  # natural log, as the strategy defines it
    words: tuple[Word, ...] = ()  # if timestamps were asked for
    n_best: tuple[tuple[str, float], ...] = ()  # (text, score), if more than one was asked for


@dataclass(frozen=True)
class Emission:
    """The output of a CTC head for one utterance. T frames, V tokens and the blank."""

    log_probs: np.ndarray  # [T, V + 1] float32, natural log
    greedy_text: str


@dataclass(frozen=True)
class Encoding:
    """The output of the encoder of a transducer for one utterance. T frames of size D."""

    frames: np.ndarray  # [T, D] float32
    greedy_text: str


class Session:
    """One loaded model.

    Raises:
        ValueError: the model cannot be found, or has no CTC head where one is needed.
        ModuleNotFoundError: NeMo is not installed.
    """

    def __init__(self, model: ASRModel) -> None:
        self.model = model

    @classmethod
    def load(cls, name: str, *, device: str = "auto", verbose: bool = False) -> Session:
        """Restore a `.nemo` file, or fetch a pretrained model by its name."""
        is_file = Path(name).is_file()
        if name.endswith(".nemo") and not is_file:
            raise ValueError(f"model={name} is no file here")
        if is_file and not tarfile.is_tarfile(name):
            raise ValueError(f"model={name} is no NeMo model: a .nemo file is a tar archive")
        place = _usable_device(device)
        asr_model = _import_nemo(verbose)
        if is_file:
            return cls(asr_model.restore_from(name, map_location=place).eval())
        try:
            model = asr_model.from_pretrained(name, map_location=place)
        except OSError as error:  # unknown names and network errors alike
            raise ValueError(
                f"model={name} is no file here, and NeMo cannot fetch it: {error}"
            ) from error
        return cls(model.to(place).eval())

    @property
    def is_hybrid(self) -> bool:
        return hasattr(self.model, "ctc_decoder")

    @property
    def has_ctc(self) -> bool:
        return self.is_hybrid or hasattr(self.model.decoding, "ctc_decoder_predictions_tensor")

    @property
    def has_transducer(self) -> bool:
        return self.is_hybrid or not self.has_ctc

    @property
    def default_head(self) -> str:
        """The head that is used where none is named: ctc if there is one."""
        return "ctc" if self.has_ctc else "rnnt"

    @property
    def frame_seconds(self) -> float:
        """Seconds per encoder frame."""
        stride = float(self.model.cfg.preprocessor.window_stride)
        return stride * int(getattr(self.model.encoder, "subsampling_factor", 1))

    @property
    def ctc_decoding(self) -> Any:
        """NeMo's decoding object of the CTC head."""
        self._require_ctc()
        return self.model.ctc_decoding if self.is_hybrid else self.model.decoding

    @property
    def device_name(self) -> str:
        device = next(self.model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def set_decoding(self, config: DictConfig, *, head: str = "ctc") -> None:
        """Switch to the strategy that `config` (NeMo's `decoding` section) names.

        `head` picks the decoder of a hybrid model: "ctc" or "rnnt".
        """
        if self.is_hybrid:
            self.model.change_decoding_strategy(config, decoder_type=head, verbose=False)
            return
        if self.has_ctc != (head == "ctc"):
            raise ValueError(
                f"head={head}, but the model is a {type(self.model).__name__}; "
                f"its only head is {'ctc' if self.has_ctc else 'rnnt'}"
            )
        self.model.change_decoding_strategy(config, verbose=False)

    def transcribe(self, files: Sequence[str | Path], *, batch_size: int = 8) -> Iterator[Transcript]:
        """Transcribe with the present strategy, in the order of `files`, yielding batch by batch."""
        for hypothesis in self._hypotheses(files, batch_size):
            yield self._transcript(hypothesis)

    def emissions(self, files: Sequence[str | Path], *, batch_size: int = 8) -> Iterator[Emission]:
        """Run the encoder and the CTC head once per file; later decoding needs no model any more."""
        self._require_ctc()
        self.set_decoding(OmegaConf.create({"strategy": "greedy_batch"}), head="ctc")
        for hypothesis in self._hypotheses(files, batch_size):
            log_probs = hypothesis.y_sequence.detach().float().cpu().numpy()
            yield Emission(np.ascontiguousarray(log_probs), hypothesis.text)

    def encodings(self, files: Sequence[str | Path], *, batch_size: int = 8) -> Iterator[Encoding]:
        """Run the encoder once per file; later decoding needs no encoder any more."""
        self._require_transducer()
        self.set_decoding(OmegaConf.create({"strategy": "greedy_batch"}), head="rnnt")
        waiting: list[np.ndarray] = []  # encoded, but their texts have not come yet

        def keep(module: Any, arguments: Any, output: Any) -> None:
            encoded, lengths = output[:2]
            rows = encoded.transpose(1, 2).detach().float().cpu().numpy()
            waiting.extend(row[:n].copy() for row, n in zip(rows, lengths.tolist(), strict=True))

        hook = self.model.encoder.register_forward_hook(keep)
        try:
            for hypothesis in self._hypotheses(files, batch_size):
                yield Encoding(waiting.pop(0), hypothesis.text)
        finally:
            hook.remove()

    def transducer_decoder(self, config: DictConfig) -> TransducerDecoder[Any]:
        """The decoder that NeMo would run for this `decoding` section, with its LM and boosting tree.

        Raises:
            ValueError: the section names another strategy than alsd_pp or aes_pp.
        """
        self._require_transducer()
        self.set_decoding(config, head="rnnt")
        infer = self.model.decoding.decoding
        if not hasattr(infer, "decoder") or not callable(infer.decoder):
            raise ValueError(f"strategy is {config.get('strategy')!r}, expected alsd_pp or aes_pp")
        decoder = infer.decoder()
        assert isinstance(decoder, TransducerDecoder)
        return decoder

    def transducer_texts(self, frames: torch.Tensor, lengths: torch.Tensor) -> list[str]:
        """NeMo's transducer decoding, with the present strategy, of frames [B, T, D], lengths [B]."""
        decode = self.model.decoding.rnnt_decoder_predictions_tensor
        with torch.inference_mode():
            found = decode(frames.transpose(1, 2), lengths, return_hypotheses=True)
        return [hypothesis.text for hypothesis in found]

    def transducer_networks(self) -> TransducerNetworks:
        """Prediction network and joint as our searches take them."""
        from nemo_gpu_decoding.nemo_plugin.transducer_networks import networks_of

        self._require_transducer()
        durations = self.model.decoding.durations or ()
        return networks_of(self.model.decoder, self.model.joint, durations)

    def transducer_vocabulary(self) -> Vocabulary:
        """The tokens of the transducer."""
        from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary

        tokenizer = getattr(self.model, "tokenizer", None)
        labels = [] if tokenizer is not None else list(self.model.joint.vocabulary)
        return nemo_vocabulary("char" if tokenizer is None else "subword", labels, tokenizer)

    def ctc_vocabulary(self) -> Vocabulary:
        """The tokens of the CTC head."""
        from nemo_gpu_decoding.nemo_plugin.loading import nemo_vocabulary

        self._require_ctc()
        tokenizer = getattr(self.model, "tokenizer", None)
        head = self.model.ctc_decoder if self.is_hybrid else self.model.decoder
        labels = [] if tokenizer is not None else list(head.vocabulary)
        return nemo_vocabulary("char" if tokenizer is None else "subword", labels, tokenizer)

    def transducer_text_of(self, tokens: Sequence[int]) -> str:
        """Token ids to text, as NeMo's transducer decoding writes it."""
        decoding = self.model.decoding
        ids = [int(token) for token in tokens]
        return decoding.decode_tokens_to_str_with_strip_punctuation(ids)

    def decode_texts(self, log_probs: torch.Tensor, lengths: torch.Tensor) -> list[str]:
        """NeMo's CTC decoding, with the present strategy, of log-probs [B, T, V + 1], lengths [B]."""
        decode = self.ctc_decoding.ctc_decoder_predictions_tensor
        return [hypothesis.text for hypothesis in decode(log_probs, lengths, return_hypotheses=True)]

    def beam_decoder(self, config: DictConfig) -> FlexCTCBeam:
        """The decoder that NeMo would run for this `decoding` section, with its LM and boosting tree."""
        self.set_decoding(config, head="ctc")
        decoder = self.ctc_decoding.decoding.decoder()
        assert isinstance(decoder, FlexCTCBeam)
        return decoder

    def graph_decoder(self, config: DictConfig) -> CudaWFST:
        """The decoder that NeMo would run for this `decoding` section, with its graph and phrases."""
        self.set_decoding(config, head="ctc")
        decoder = self.ctc_decoding.decoding.decoder()
        if not isinstance(decoder, CudaWFST):
            raise ValueError(f"strategy is {config.get('strategy')!r}, expected cuda_wfst")
        return decoder

    def search(self, config: DictConfig) -> FlexCTCBeam | CudaWFST | TransducerDecoder[Any]:
        """The decoder of whichever of our strategies `config` names."""
        spec = STRATEGIES[str(config.strategy)]
        if spec.family == "rnnt":
            return self.transducer_decoder(config)
        return self.graph_decoder(config) if spec.section == "wfst" else self.beam_decoder(config)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Token ids to text, as NeMo's CTC decoding writes it."""
        return self.ctc_decoding.decode_tokens_to_str_with_strip_punctuation([int(t) for t in tokens])

    def _require_transducer(self) -> None:
        if not self.has_transducer:
            raise ValueError(f"the model is a {type(self.model).__name__}, which has no transducer head")

    def _require_ctc(self) -> None:
        if not self.has_ctc:
            raise ValueError(f"the model is a {type(self.model).__name__}, which has no CTC head")

    def _hypotheses(self, files: Sequence[str | Path], batch_size: int) -> Iterator[Any]:
        """One `Hypothesis`, or a list of them (n-best), per file."""
        config = self.model.get_transcribe_config()
        config.batch_size = batch_size
        config.return_hypotheses = True
        config.num_workers = 0
        config.verbose = False
        paths = [str(file) for file in files]
        with torch.inference_mode():
            for batch in self.model.transcribe_generator(paths, override_config=config):
                # transducers of some NeMo versions give (best, all)
                yield from batch[0] if isinstance(batch, tuple) else batch

    def _transcript(self, result: Hypothesis | Sequence[Hypothesis]) -> Transcript:
        hypotheses = _as_list(result)
        best = hypotheses[0]
        ranked = tuple((hypothesis.text, _score(hypothesis)) for hypothesis in hypotheses)
        return Transcript(
            text=best.text,
            score=ranked[0][1],
            words=self._words(best),
            n_best=ranked if len(ranked) > 1 else (),
        )

    def _words(self, hypothesis: Hypothesis) -> tuple[Word, ...]:
        stamps = hypothesis.timestamp
        if not isinstance(stamps, dict):
            return ()
        spans = stamps.get("word", ())
        confidences = hypothesis.word_confidence
        # NeMo leaves the list empty where confidence was not asked for
        if confidences is None or len(confidences) != len(spans):
            confidences = [None] * len(spans)
        step = self.frame_seconds
        return tuple(
            Word(
                span["word"],
                round(float(span["start_offset"]) * step, 3),
                round(float(span["end_offset"]) * step, 3),
                None if confidence is None else round(float(confidence), 4),
            )
            for span, confidence in zip(spans, confidences, strict=True)
        )


def _usable_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}, expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _import_nemo(verbose: bool) -> type[ASRModel]:
    """Import NeMo (about ten seconds) and register our strategies."""
    if not verbose:
        _silence()
    try:
        from nemo.collections.asr.models import ASRModel
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "nemo":
            raise ValueError(NO_NEMO) from error
        raise
    from nemo_gpu_decoding.nemo_plugin.register import register

    register()
    return ASRModel


def _silence() -> None:
    """Keep remarks of NeMo and its parts below ERROR off the terminal, where transcripts are printed.

    NeMo sets its own level while it transcribes, hence a filter on its logger rather than a level.
    """
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)
    nemo_logger = logging.getLogger("nemo_logger")
    if _only_errors not in nemo_logger.filters:
        nemo_logger.addFilter(_only_errors)


def _only_errors(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _as_list(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return list(result)
    n_best = getattr(result, "n_best_hypotheses", None)
    return list(n_best) if n_best else [result]


def _score(hypothesis: Hypothesis) -> float:
    return round(float(hypothesis.score), 4)
