"""Use a NeMo model on the command line: load it, run its encoder, and decode with any strategy."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nemo_gpu_decoding.audio import AudioSource, Sound, check_channel_selector, part_of, unreadable, write_mono
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.fusion.phrases import WrittenRequest
from nemo_gpu_decoding.live.subtitles import is_line
from nemo_gpu_decoding.nemo_plugin.register import find_strategy, head_of
from nemo_gpu_decoding.nemo_plugin.requests import confidence_map, infer_of, request_of, utterance_requests
from nemo_gpu_decoding.nemo_plugin.restore import check_model_file, import_nemo, restore, usable_device
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.result import Path as SearchPath
from nemo_gpu_decoding.search.result import places_in_seconds
from nemo_gpu_decoding.search.word_graph.result import WordPath
from nemo_gpu_decoding.transcript import Alternative, Transcript, Word, boosted_phrases
from nemo_gpu_decoding.vocabulary import Vocabulary
from nemo_gpu_decoding.words import belongs_to_last, has_unspaced

if TYPE_CHECKING:
    from nemo.collections.asr.models import ASRModel
    from nemo.collections.asr.parts.utils.rnnt_utils import Hypothesis

    from nemo_gpu_decoding.search.rescoring import Rescoring
    from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

# output of NeMo's forward pass for a batch: log-probs [B, T, V + 1] or encoder output [B, D, T], and lengths [B]
Outputs = dict[str, Tensor]

logger = logging.getLogger("nemo_gpu_decoding")


@dataclass(frozen=True)
class Encoded:
    """The encoder output of one utterance (T frames), which a search reads, and the utterance's greedy text."""

    # [T, V + 1] float32 log-probs, natural log; for transducers [T, D] float32 encoder output
    inputs: np.ndarray
    greedy_text: str


class Model:
    """A loaded model and its heads under NeMo's names: "ctc", "rnnt" (RNN-T and TDT), or both.

    Args:
        model: a model of NeMo.
        channel_selector: channel of multi-channel files, from 0, or "average"; None averages with a warning.

    Raises:
        ValueError: the model cannot be found.
        ModuleNotFoundError: NeMo is not installed.
    """

    def __init__(self, model: ASRModel, channel_selector: int | str | None = None) -> None:
        check_channel_selector(channel_selector)
        if not hasattr(model, "decoding"):
            raise FieldError("model", model, "a model of NeMo for speech recognition")
        self.model = model
        self.channel_selector = channel_selector
        self.second: Rescoring | None = None  # the second pass, which reorders n-best lists
        self._has_warned_of_channels = False
        self.is_hybrid = hasattr(model, "ctc_decoder")
        is_ctc = hasattr(model.decoding, "ctc_decoder_predictions_tensor")
        kinds = [CTCHead, TransducerHead] if self.is_hybrid else [CTCHead if is_ctc else TransducerHead]
        self.heads: dict[str, Head] = {kind.name: kind(self) for kind in kinds}

    @classmethod
    def load(cls, name: str, *, device: str = "auto", verbose: bool = False, channel: Any = None) -> Model:
        """Load a model from a `.nemo` file, or download a pretrained model by its name."""
        check_channel_selector(channel)
        check_model_file(name)
        where = usable_device(device)
        import_nemo(verbose)
        return cls(restore(name, map_location=where).to(where).eval(), channel)

    @property
    def default_head(self) -> str:
        """Return the name of the model's default head: "ctc" if the model has a CTC head, else "rnnt"."""
        return next(iter(self.heads))

    def head(self, name: str) -> Head:
        """Return the model's head with this name; raise a ValueError if the model lacks this head."""
        if name not in self.heads:
            raise ValueError(
                f"head={name}, but the model is a {type(self.model).__name__}; its only head is {self.default_head}"
            )
        return self.heads[name]

    def head_for(self, strategy: str, name: str | None = None) -> Head:
        """Return the head that a strategy decodes, or the named head; raise a ValueError if the model lacks it."""
        return self.head(name or head_of(strategy, list(self.heads)))

    @property
    def current_head(self) -> Head:
        """Return the head that the model's `transcribe` uses at present."""
        return self.head(self.model.cur_decoder if self.is_hybrid else self.default_head)

    @contextmanager
    def using(self, section: Mapping[Any, Any]) -> Iterator[Head]:
        """Use another `decoding` section for the model's current head within the `with` block."""
        head = self.current_head
        before = head.config
        head.use(OmegaConf.create(dict(section)))
        try:
            yield head
        finally:
            head.use(before)

    @property
    def frame_seconds(self) -> float:
        """Return the duration of an encoder frame in seconds."""
        stride = float(self.model.cfg.preprocessor.window_stride)
        return stride * int(getattr(self.model.encoder, "subsampling_factor", 1))

    @property
    def trained_seconds(self) -> float | None:
        """Return the maximum duration of training utterances in seconds, or None if the config does not name it."""
        return OmegaConf.select(self.model.cfg, "train_ds.max_duration")

    @property
    def device_name(self) -> str:
        device = next(self.model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def encode(self, files: Sequence[AudioSource | np.ndarray], batch_size: int) -> Iterator[Outputs]:
        """Run the encoder on batches of files, sections, or samples [N] float32; a bad file raises a ValueError."""
        for begin in range(0, len(files), batch_size):
            yield self._encode_batch(files[begin : begin + batch_size])

    def _encode_batch(self, files: Sequence[AudioSource | np.ndarray]) -> Outputs:
        """Run NeMo's forward pass on one batch; raise a ValueError if NeMo's data loader has dropped files."""
        from nemo.collections.asr.parts.mixins.transcription import InternalTranscribeConfig
        from nemo.collections.common.data.utils import move_data_to_device

        nemo: Any = self.model
        config = self._transcribe_config(len(files))
        config._internal = InternalTranscribeConfig()
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            audio = [
                file if isinstance(file, np.ndarray) else str(self._one_channel(file, Path(folder) / f"mono{n}.wav"))
                for n, file in enumerate(files)
            ]
            nemo._transcribe_on_begin(audio, config)
            stack.callback(nemo._transcribe_on_end, config)
            config._internal.temp_dir = folder
            stack.enter_context(torch.inference_mode())
            batch = next(iter(nemo._transcribe_input_processing(audio, config)), None)
            if batch is None or len(batch[0]) != len(files):
                paths = [file for file in files if not isinstance(file, np.ndarray)]
                raise ValueError(f"{', '.join(unreadable(paths) or map(str, paths))} cannot be read as audio")
            return nemo._transcribe_forward(move_data_to_device(batch, config._internal.device), config)

    def _one_channel(self, file: AudioSource, target: Path) -> str | Path:
        """Return a file of one channel: the file itself or, for several channels or a section, a copy at `target`."""
        selector, part, channels = self.channel_selector, part_of(file), 0
        if part.is_mono:
            return part.path
        with suppress(RuntimeError, OSError), Sound(part.path) as sound:
            channels = sound.channels
            if channels == 1 and part.is_whole and selector in (None, 0, "average") and sound.is_plain:
                return part.path
        write_mono(file, target, selector)
        if channels > 1 and selector is None and not self._has_warned_of_channels:
            self._has_warned_of_channels = True
            logger.warning(
                "%s has %d channels; they are averaged, as in all such files; channel_selector=0 takes one",
                file, channels,
            )  # fmt: skip
        return target

    def decode(self, outputs: Outputs, *, requests: Sequence[WrittenRequest | None] = ()) -> Iterator[Transcript]:
        """Decode encoder output of `encode` with the current strategy; yield a transcript for each utterance.

        Args:
            requests: one per utterance; None uses the decoding config.

        Raises:
            ValueError: the strategy's scores have no parts, which `second` needs; or the strategy does not support a
                request.
        """
        has_own = any(request is not None for request in requests)
        with utterance_requests(self.model, requests) if has_own else nullcontext():
            hypotheses = self.hypotheses(outputs)
        for result in hypotheses:
            is_list = isinstance(result, list | tuple)
            n_best = list(result if is_list else getattr(result, "n_best_hypotheses", None) or [result])
            ranked = n_best if self.second is None else self.second.reordered(n_best)
            yield self._transcript(ranked, is_list=result is not n_best[0])

    def check_request(self, written: WrittenRequest) -> None:
        """Raise a ValueError if the current strategy cannot decode with this request."""
        request_of(infer_of(self.model, f"{', '.join(written.given)}: "), written)

    def hypotheses(self, outputs: Outputs) -> list[Any]:
        """Decode encoder output of `encode`; return NeMo's `Hypothesis` or n-best list for each utterance."""
        device = next(self.model.parameters()).device
        with torch.inference_mode():
            moved = {name: tensor.to(device) for name, tensor in outputs.items()}
            hypotheses = self.model._transcribe_output_processing(moved, self._transcribe_config())
        # transducers of some NeMo versions give (best, all)
        return hypotheses[0] if isinstance(hypotheses, tuple) else hypotheses

    def _transcribe_config(self, batch_size: int = 1) -> Any:
        config = self.model.get_transcribe_config()
        config.batch_size = batch_size
        config.return_hypotheses = True
        config.num_workers = 0
        config.verbose = False
        return config

    def _transcript(self, hypotheses: Sequence[Hypothesis], *, is_list: bool) -> Transcript:
        best = hypotheses[0]
        if has_unspaced(best.text):
            self._divide_words(best)
        words = self._words(best)
        places = getattr(best, "word_alternatives", ()) if isinstance(best.timestamp, dict) else ()
        ranked = tuple(Alternative(hypothesis.text, round(float(hypothesis.score), 4)) for hypothesis in hypotheses)
        return Transcript(
            text=best.text,
            score=ranked[0].score,
            words=words,
            n_best=ranked if is_list else (),
            lattice=getattr(best, "lattice", None),
            outside_share=getattr(best, "outside_share", None),
            in_grammar=getattr(best, "in_grammar", None),
            error=getattr(best, "error", ""),
            alternatives=places_in_seconds(places, words, self.frame_seconds),
            phrases=boosted_phrases(getattr(best, "phrases", ())),
        )

    def _words(self, hypothesis: Hypothesis) -> tuple[Word, ...]:
        stamps = hypothesis.timestamp
        if not isinstance(stamps, dict):
            return ()
        spans = [span for span in stamps.get("word", ()) if span["word"]]  # NeMo has empty words for bare word marks
        values: list[float | None] = [float(value) for value in hypothesis.word_confidence or ()]
        if len(values) != len(spans):  # NeMo leaves the list empty without confidence
            values = [None] * len(spans)
        chars = deque(stamps.get("char", ()))
        name = "confidence" if confidence_map(self.current_head.decoding.decoding) else "raw_confidence"
        return tuple(
            self._word(span, "word", **{name: value}, pieces=self._pieces(span, chars))
            for span, value in zip(spans, values, strict=True)
        )

    def _word(self, span: Mapping[str, Any], level: str, **more: Any) -> Word:
        start, end = (round(float(span[key]) * self.frame_seconds, 3) for key in ("start_offset", "end_offset"))
        text = "".join(span[level])  # NeMo has lists of characters for transducers
        return Word(text, start, end, **more)

    def _pieces(self, span: Mapping[str, Any], chars: deque[Any]) -> tuple[Word, ...]:
        """Remove the pieces of a word from the front of `chars`; return them if the word is too long for a subtitle
        line and the pieces spell it. Marks stay with the previous character.
        """
        word, text = self._word(span, "word"), ""
        pieces: list[Word] = []
        while chars and (chars[0]["start_offset"] < span["start_offset"] or not "".join(chars[0]["char"]).strip()):
            chars.popleft()
        while chars and text != word.word and word.word.startswith(text):
            piece = self._word(chars.popleft(), "char")
            text += piece.word.strip()
            if pieces and belongs_to_last(piece.word[:1] or " "):
                pieces[-1] = pieces[-1]._replace(word=pieces[-1].word + piece.word, end=max(pieces[-1].end, piece.end))
            else:
                pieces.append(piece._replace(word=piece.word.strip()))
        return () if text != word.word or is_line(text, word.end - word.start) else tuple(pieces)

    def _divide_words(self, hypothesis: Hypothesis) -> None:
        """Divide words of a NeMo strategy in scripts without spaces; this package's strategies divide them already."""
        from nemo_gpu_decoding.nemo_plugin.adapters import confidence_of_parts, divide_words
        from nemo_gpu_decoding.nemo_plugin.hypotheses import BeamHypothesis

        stamps, head = hypothesis.timestamp, self.current_head
        if isinstance(hypothesis, BeamHypothesis) or not isinstance(stamps, dict):
            return
        ids, vocabulary = head.token_ids(hypothesis), head.vocabulary()
        if len(ids) != len(stamps.get("char", ())):  # a beam search
            return
        divide_words(stamps, ids, vocabulary)
        if of_tokens := hypothesis.token_confidence:
            hypothesis.word_confidence = confidence_of_parts(head.decoding, of_tokens, ids, vocabulary)


class Head(ABC):
    """A head (CTC or transducer) of a model, with its decoding config and decoder."""

    name: str

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def decoding(self) -> Any:
        """Return NeMo's decoding object of this head."""
        nemo: Any = self.model.model
        return nemo.ctc_decoding if self.model.is_hybrid and self.name == "ctc" else nemo.decoding

    def encoded(self, files: Sequence[AudioSource], *, batch_size: int = 8) -> Iterator[Encoded]:
        """Run the encoder and greedy decoding once per file; yield encoder outputs for any number of searches."""
        self.use_greedy()
        for outputs in self.model.encode(files, batch_size):
            hypotheses = self.model.hypotheses(outputs)
            for inputs, hypothesis in zip(self._inputs(outputs, hypotheses), hypotheses, strict=True):
                yield Encoded(np.ascontiguousarray(inputs), hypothesis.text)

    @abstractmethod
    def _inputs(self, outputs: Outputs, hypotheses: Sequence[Hypothesis]) -> list[np.ndarray]:
        """Return what a search reads of each utterance, [T, ...] float32, after greedy decoding."""

    @property
    def config(self) -> DictConfig:
        """Return a copy of NeMo's `decoding` section of this head."""
        config = self.model.model.cfg
        of_head = config.aux_ctc if self.model.is_hybrid and self.name == "ctc" else config
        return copy.deepcopy(of_head.decoding)

    @abstractmethod
    def token_ids(self, hypothesis: Hypothesis) -> list[int]:
        """Return the token ids of a hypothesis that a greedy strategy of NeMo has decoded."""

    @abstractmethod
    def greedy_tokens(self, hypothesis: Hypothesis) -> list[tuple[int, int, int]]:
        """Return first frame, end frame and id of each token in a hypothesis of NeMo's `greedy_batch`."""

    def use(self, config: DictConfig) -> None:
        """Switch this head to the strategy in a `decoding` section; raise a ValueError for an unknown key."""
        if find_strategy(config) is None:  # this package's strategies check their keys
            from nemo_gpu_decoding.nemo_plugin.section import check_keys, check_native, nemo_config

            check_keys("", [str(key) for key in config], nemo_config("rnnt") | nemo_config("ctc"))
            check_native(config)
        which = {"decoder_type": self.name} if self.model.is_hybrid else {}
        self.model.model.change_decoding_strategy(config, verbose=False, **which)

    def search(self, config: DictConfig) -> Decoder[Any, Any]:
        """Return the search that a `decoding` section of this package describes, with LM, graph and phrases."""
        self.use(config)
        return infer_of(self.model.model).decoder()

    def vocabulary(self) -> Vocabulary:
        """Return the tokens of this head as a vocabulary, without the blank."""
        from nemo_gpu_decoding.nemo_plugin.infer import nemo_vocabulary

        return nemo_vocabulary(self.decoding)

    def text_of(self, path: SearchPath) -> str:
        """Return the text of a path, from its words or, as NeMo writes it, from its tokens."""
        if isinstance(path, WordPath):
            return path.text
        return self.decoding.decode_tokens_to_str_with_strip_punctuation(path.tokens.tolist())

    def use_greedy(self) -> None:
        """Switch this head to NeMo's strategy `greedy_batch`."""
        self.use(OmegaConf.create({"strategy": "greedy_batch"}))


class CTCHead(Head):
    """The CTC head of a model; a search reads its log-probs."""

    name = "ctc"

    def _inputs(self, outputs: Outputs, hypotheses: Sequence[Hypothesis]) -> list[np.ndarray]:
        return [hypothesis.y_sequence.detach().float().cpu().numpy() for hypothesis in hypotheses]

    def token_ids(self, hypothesis: Hypothesis) -> list[int]:
        return [token for _, _, token in self.greedy_tokens(hypothesis)]

    def greedy_tokens(self, hypothesis: Hypothesis) -> list[tuple[int, int, int]]:
        best = hypothesis.y_sequence.argmax(-1).cpu().numpy()
        edges = np.flatnonzero(np.diff(best)) + 1  # between runs of a token
        runs = zip([0, *edges.tolist()], [*edges.tolist(), len(best)], strict=True)
        blank = hypothesis.y_sequence.shape[-1] - 1
        return [(begin, end, int(best[begin])) for begin, end in runs if begin < end and best[begin] != blank]


class TransducerHead(Head):
    """The RNN-T or TDT head of a model; a search reads the encoder's output."""

    name = "rnnt"

    def _inputs(self, outputs: Outputs, hypotheses: Sequence[Hypothesis]) -> list[np.ndarray]:
        rows = outputs["encoded"].transpose(1, 2).float().cpu().numpy()
        return [row[:length].copy() for row, length in zip(rows, outputs["encoded_len"].tolist(), strict=True)]

    def token_ids(self, hypothesis: Hypothesis) -> list[int]:
        return [int(token) for token in hypothesis.y_sequence]

    def greedy_tokens(self, hypothesis: Hypothesis) -> list[tuple[int, int, int]]:
        pairs = zip(hypothesis.timestamp, hypothesis.y_sequence, strict=True)
        return [(int(frame), int(frame) + 1, int(token)) for frame, token in pairs]

    def networks(self) -> TransducerNetworks:
        """Return prediction network and joint as `TransducerNetworks`, which transducer searches call."""
        from nemo_gpu_decoding.nemo_plugin.transducer import networks_of

        nemo: Any = self.model.model
        return networks_of(nemo.decoder, nemo.joint, self.decoding.durations or ())
