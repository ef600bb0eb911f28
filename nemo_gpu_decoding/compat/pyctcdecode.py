"""pyctcdecode's interface on the searches of this package.

    from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder

    decoder = build_ctcdecoder(labels, kenlm_model_path="lm.arpa", alpha=0.5, beta=1.0)
    decoder.decode(logits)  # [T, V] of one utterance
    decoder.decode_batch(None, [logits, logits])

With a word LM, the search is that of `cuda_wfst` in an open-vocabulary graph; without an LM it is `flexctc_beam` with
merge "prefix". Scores are pyctcdecode's, see `language_model.py`, with one difference: with an LM, `logit_score` is
that of the best alignment, where pyctcdecode adds the alignments in its beam.

All utterances of a batch are decoded at once, on the threads of torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nemo_gpu_decoding.checks import FieldError, check_int, check_number
from nemo_gpu_decoding.compat.alphabet import Alphabet
from nemo_gpu_decoding.compat.language_model import LanguageModel
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase, build_boosting_tree
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.decoder import Decoder
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE, FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.result import NBest, Path
from nemo_gpu_decoding.search.word_graph.config import MAX_ACTIVE_LIMIT, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

DEFAULT_ALPHA, DEFAULT_BETA, DEFAULT_UNK_LOGP_OFFSET, DEFAULT_SCORE_LM_BOUNDARY = 0.5, 1.5, -10.0, True
DEFAULT_BEAM_WIDTH, DEFAULT_PRUNE_LOGP, DEFAULT_MIN_TOKEN_LOGP = 100, -10.0, -5.0
DEFAULT_HOTWORD_WEIGHT, DEFAULT_PRUNE_BEAMS = 10.0, False
LEAST_LOGP = math.log(1e-15)  # tokens with smaller log-probs are always skipped
# With an LM: the graph charges for a word at its beginning, where pyctcdecode does at its end, so the search keeps
# hypotheses that are worse by LEAD more, natural log. One hypothesis of pyctcdecode corresponds to several states of
# the graph. Higher values did not lower the error rates of the benchmark's tasks.
LEAD, STATES_PER_BEAM = 5.0, 20
MOST_RESULTS = 10_000
SKIPPED = -1000.0  # log-prob of a token below token_min_logp: a path of the graph takes it if there is no other

Frames = tuple[int, int]  # the first frame of a word, and one past its last
WordFrames = tuple[str, Frames]


class LMState(NamedTuple):
    """What the LM has read: the last words before an utterance, as tokens."""

    tokens: tuple[int, ...]


class OutputBeam(NamedTuple):
    """A hypothesis of one utterance."""

    text: str
    last_lm_state: LMState | None  # for `lm_start_state` of the next part; None without an LM
    text_frames: list[WordFrames]
    logit_score: float  # natural log of the acoustic probability
    lm_score: float  # logit_score and what the LM, beta and the hotwords add


class OutputBeamMPSafe(NamedTuple):
    """An `OutputBeam` without the state of the LM."""

    text: str
    text_frames: list[WordFrames]
    logit_score: float
    lm_score: float


class _Options(NamedTuple):
    """Options of one call of the decoder."""

    beam_width: int
    beam_prune_logp: float
    token_min_logp: float
    prune_history: bool
    hotwords: Mapping[str, float]  # word -> bonus
    n_best: int


class _Before(NamedTuple):
    """What comes before an utterance that continues another."""

    frames: int
    score: float  # of the LM and the bonuses


class _WordSearch(CudaWFST):
    def _most_bonus(self, boosting: BackoffAutomaton, weight: float) -> float:
        """Without a warning of large bonuses: the user does not choose the beam of the graph."""
        return weight * max(0.0, float(boosting.arrays.states["upper_bound"].max())) * self.graph.most_words

    def _parts(self, *path: Any) -> tuple[float, float, float]:
        """None: beams have whole scores, and the parts take time to add up."""
        return 0.0, 0.0, 0.0


class BeamSearchDecoderCTC:
    """A CTC decoder with pyctcdecode's methods.

    Args:
        alphabet: the labels of the logits' columns.
        language_model: a word LM; None: none.
    """

    model_container: ClassVar[dict[bytes, LanguageModel | None]] = {}
    _ALPHABET_SERIALIZED_FILENAME = "alphabet.json"
    _LANGUAGE_MODEL_SERIALIZED_DIRECTORY = "language_model"

    def __init__(self, alphabet: Alphabet, language_model: LanguageModel | None = None) -> None:
        self._alphabet = alphabet
        self._model_key = os.urandom(16)
        BeamSearchDecoderCTC.model_container[self._model_key] = language_model
        self._search = lru_cache(maxsize=8)(self._make_search)

    @property
    def _language_model(self) -> LanguageModel | None:
        return BeamSearchDecoderCTC.model_container[self._model_key]

    @classmethod
    def clear_class_models(cls) -> None:
        """Release the LMs of all decoders."""
        BeamSearchDecoderCTC.model_container = {}

    def cleanup(self) -> None:
        """Release the LM of this decoder."""
        BeamSearchDecoderCTC.model_container.pop(self._model_key, None)

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
    ) -> None:
        """Change weights of the LM; None keeps a weight. Without an LM there is none to change."""
        if self._language_model is not None:
            self._language_model.reset_params(alpha, beta, unk_score_offset, lm_score_boundary)

    # ------------------------------------------------------------------------------------- files

    def save_to_dir(self, filepath: str | PathLike[str]) -> None:
        """Write the alphabet and the LM to a folder, in the form of pyctcdecode."""
        folder = FilePath(filepath)
        (folder / self._ALPHABET_SERIALIZED_FILENAME).write_text(self._alphabet.dumps(), encoding="utf-8")
        if self._language_model is not None:
            target = folder / self._LANGUAGE_MODEL_SERIALIZED_DIRECTORY
            target.mkdir()
            self._language_model.save_to_dir(target)

    @classmethod
    def parse_directory_contents(cls, filepath: str | PathLike[str]) -> dict[str, str | None]:
        """The paths of the alphabet and of the LM, if there is one."""
        alphabet = FilePath(filepath) / cls._ALPHABET_SERIALIZED_FILENAME
        lm = FilePath(filepath) / cls._LANGUAGE_MODEL_SERIALIZED_DIRECTORY
        if not alphabet.exists():
            raise ValueError(f"{fspath(filepath)} has no {alphabet.name}, expected a folder that save_to_dir wrote")
        return {"alphabet": str(alphabet), "language_model": str(lm) if lm.exists() else None}

    @classmethod
    def load_from_dir(cls, filepath: str | PathLike[str], unigram_encoding: str = "utf-8") -> BeamSearchDecoderCTC:
        """Read a decoder that `save_to_dir` or pyctcdecode wrote."""
        paths = cls.parse_directory_contents(filepath)
        alphabet = Alphabet.loads(FilePath(str(paths["alphabet"])).read_text(encoding="utf-8"))
        folder = paths["language_model"]
        return cls(alphabet, None if folder is None else LanguageModel.load_from_dir(folder, unigram_encoding))

    @classmethod
    def load_from_hf_hub(
        cls, model_id: str, cache_dir: str | FilePath | None = None, **kwargs: Any
    ) -> BeamSearchDecoderCTC:
        """Read a decoder from a repository of Hugging Face; `kwargs` are those of `snapshot_download`."""
        require("huggingface_hub")
        from huggingface_hub import snapshot_download

        return cls.load_from_dir(snapshot_download(model_id, cache_dir=cache_dir, **kwargs))

    # ------------------------------------------------------------------------------------ decode

    def decode(
        self,
        logits: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
        lm_start_state: LMState | None = None,
    ) -> str:
        """The text of one utterance; arguments as in `decode_beams`."""
        options = _options(beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, 1)
        return self._texts([logits], options, lm_start_state)[0]

    def decode_batch(
        self,
        pool: Any,
        logits_list: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[str]:
        """The texts of several utterances; arguments as in `decode_beams_batch`."""
        options = _options(beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, 1)
        return self._texts(logits_list, options)

    def decode_beams(
        self,
        logits: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        prune_history: bool = DEFAULT_PRUNE_BEAMS,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
        lm_start_state: LMState | None = None,
    ) -> list[OutputBeam]:
        """The hypotheses of one utterance with different texts, best first.

        Args:
            logits: [T, V] logits, log-probs or probabilities; NumPy or torch.
            beam_width: hypotheses kept per frame, and returned, at most.
            beam_prune_logp: hypotheses whose score is lower than the best one's by more than this are dropped;
                natural log, < 0.
            token_min_logp: tokens with a lower log-prob are skipped, unless they are the most likely of the frame.
            prune_history: of hypotheses that end in the same words, as many as the LM looks back to, return the best.
            hotwords: words, or phrases whose words are taken one by one.
            hotword_weight: bonus of each occurrence of a hotword, natural log.
            lm_start_state: `last_lm_state` of the utterance that this one continues.
        """
        options = _options(
            beam_width, beam_prune_logp, token_min_logp, prune_history, hotwords, hotword_weight, beam_width
        )
        return self._decode([logits], options, lm_start_state)[0]

    def decode_beams_batch(
        self,
        pool: Any,
        logits_list: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        prune_history: bool = DEFAULT_PRUNE_BEAMS,
        hotwords: Iterable[str] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[list[OutputBeamMPSafe]]:
        """The hypotheses of several utterances.

        Args:
            pool: not used: the utterances are decoded as one batch in this process.
            logits_list: [T, V] of each utterance.
            beam_width and the others: as in `decode_beams`.
        """
        options = _options(
            beam_width, beam_prune_logp, token_min_logp, prune_history, hotwords, hotword_weight, beam_width
        )
        return [[OutputBeamMPSafe(b.text, *b[2:]) for b in beams] for beams in self._decode(logits_list, options)]

    def _decode(
        self, logits_list: Iterable[Any], options: _Options, state: LMState | None = None
    ) -> list[list[OutputBeam]]:
        log_probs = [self._log_probs(logits) for logits in logits_list]
        found, before = self._found(log_probs, options, state)
        return [
            self._beams(nbest.paths, values.numpy(), options, before)
            for nbest, values in zip(found, log_probs, strict=True)
        ]

    def _texts(self, logits_list: Iterable[Any], options: _Options, state: LMState | None = None) -> list[str]:
        found, before = self._found([self._log_probs(logits) for logits in logits_list], options, state)
        own = (nbest.best.tokens[nbest.best.frames >= before.frames].tolist() for nbest in found)
        return [" ".join(word.text for word in self._alphabet.words(tokens)) for tokens in own]

    def _found(self, log_probs: list[Tensor], options: _Options, state: LMState | None) -> tuple[list[NBest], _Before]:
        """The hypotheses of utterances, and what comes before each of them."""
        if not log_probs:
            return [], _Before(0, 0.0)
        lm, bonuses = self._language_model, self._bonuses(options.hotwords)
        request = None if bonuses is None else Request(bonuses, 1.0, None if lm is None else float(lm.alpha))
        search = self._search(options.beam_width, options.beam_prune_logp, options.n_best, self._graph())
        inputs = [_masked(values, options.token_min_logp) for values in log_probs]
        before = _Before(0, 0.0)
        if lm is not None and state is not None and state.tokens:
            forced = self._forced(state)
            inputs = [torch.cat([forced, values]) for values in inputs]
            words = [word.text for word in self._alphabet.words(state.tokens)]
            before = _Before(len(forced), lm.score(words, options.hotwords))
        batch = inputs if len(inputs) > 1 else inputs[0]
        return search.decode(batch, requests=[request] * len(inputs)), before

    def _forced(self, state: LMState) -> Tensor:
        """Log-probs [T, V + 1] that only the tokens of an LM state fit, each followed by a blank."""
        separator = self._alphabet.separator
        tokens = [*state.tokens, *([] if separator is None else [separator])]
        forced = torch.full((2 * len(tokens), len(self._alphabet.labels)), SKIPPED)
        forced[1::2, -1] = 0.0
        forced[torch.arange(0, len(forced), 2), torch.tensor(tokens)] = 0.0
        return forced

    # ------------------------------------------------------------------------------------ search

    def _graph(self) -> WordGraph | None:
        return None if self._language_model is None else self._language_model.graph(self._alphabet)

    def _make_search(
        self, beam_width: int, beam_prune_logp: float, n_best: int, graph: WordGraph | None
    ) -> Decoder[Any, Any]:
        size = len(self._alphabet.pieces)
        search: Decoder[Any, Any]
        if graph is None:
            check_int("beam_width", beam_width, 1, MAX_BEAM_SIZE)
            token = FlexCTCConfig(
                beam_size=beam_width, beam_threshold=-beam_prune_logp, merge="prefix", n_best=n_best, backend="cpu"
            )
            search = FlexCTCBeam(size, size, token)
        else:
            beam = LEAD - beam_prune_logp
            word = WFSTConfig(
                beam=beam,
                lattice_beam=beam,
                max_active=min(STATES_PER_BEAM * beam_width, MAX_ACTIVE_LIMIT),
                n_best=min(n_best, MOST_RESULTS),
                topology="normal",
                backend="cpu",
            )
            search = _WordSearch(graph, size, size, word)
        search._is_sampled = True  # rows without unlikely tokens do not add up to 1
        return search

    def _bonuses(self, hotwords: Mapping[str, float]) -> BackoffAutomaton | None:
        if self._language_model is not None:
            return self._language_model.bonuses(self._alphabet, hotwords)
        vocabulary, phrases = self._alphabet.vocabulary, []
        for word, bonus in hotwords.items():
            phrases.append(Phrase(word, bonus / len(vocabulary.tokenize(word))))
        config = BoostingConfig(uniform_weights=True, segmentations=3 if self._alphabet.is_bpe else 1)
        return build_boosting_tree(phrases, vocabulary, config) if phrases else None

    # ----------------------------------------------------------------------------------- results

    def _log_probs(self, logits: Any) -> Tensor:
        """Log-probs [T, V + 1] with the blank as the last column."""
        values = torch.as_tensor(logits).detach().cpu()
        columns = len(self._alphabet.labels)
        if values.ndim != 2 or values.shape[1] != columns:
            raise ValueError(f"logits has shape {tuple(values.shape)}, expected [T, {columns}]: one column per label")
        if not values.is_floating_point():
            values = values.double()
        if math.isclose(float(values.sum(dim=1).mean()), 1, rel_tol=1e-9 if values.dtype == torch.float64 else 1e-5):
            values = values.clamp(1e-15, 1).log()
        else:
            values = values.log_softmax(dim=1)
        blank = self._alphabet.blank
        if blank == columns - 1:
            return values
        return values[:, [*range(blank), *range(blank + 1, columns), blank]]

    def _beams(
        self, paths: Sequence[Path], values: np.ndarray, options: _Options, before: _Before
    ) -> list[OutputBeam]:
        """The hypotheses with different texts; `values`: log-probs [T, V + 1]."""
        beams: dict[str, OutputBeam] = {}
        endings, least = set(), -math.inf
        for path in paths:
            beam = self._beam(path, values, before)
            least = max(least, beam.lm_score + options.beam_prune_logp)
            ending = tuple(beam.text.split()[-self._history :]) if options.prune_history else beam.text
            if beam.text not in beams and ending not in endings and beam.lm_score >= least:
                beams[beam.text] = beam
                endings.add(ending)
        return sorted(beams.values(), key=lambda beam: -beam.lm_score)[: options.beam_width]

    @property
    def _history(self) -> int:
        """Number of words that the LM looks back to, at least one."""
        return 1 if self._language_model is None else max(1, self._language_model.order - 1)

    def _beam(self, path: Path, values: np.ndarray, before: _Before) -> OutputBeam:
        starts = path.frames - before.frames
        stops, words = starts + path.repeats, list(self._alphabet.words(path.tokens.tolist()))
        frames = [(w.text, (int(starts[w.first]), int(stops[w.end - 1]))) for w in words if starts[w.first] >= 0]
        acoustic, state = path.parts.acoustic, None
        if self._language_model is not None:
            acoustic = _aligned_score(path.tokens, starts, stops, values)
            first = words[-self._history].first if len(words) >= self._history else 0
            state = LMState(tuple(path.tokens[first:].tolist()))
        return OutputBeam(" ".join(word for word, _ in frames), state, frames, acoustic, path.score - before.score)


def _aligned_score(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, values: np.ndarray) -> float:
    """The sum of log-probs [T, V + 1] along an alignment, whose tokens last from start to stop."""
    labels = np.full(len(values), values.shape[1] - 1)
    for token, start, stop in zip(tokens.tolist(), starts.tolist(), stops.tolist(), strict=True):
        labels[max(start, 0) : max(stop, 0)] = token
    return float(sum(values[np.arange(len(values)), labels].tolist(), 0.0))


def _masked(log_probs: Tensor, token_min_logp: float) -> Tensor:
    """float32 log-probs in which less likely tokens are `SKIPPED`, except for the best one of each frame."""
    least = max(token_min_logp, LEAST_LOGP)
    kept = functional.threshold(log_probs.float(), np.nextafter(np.float32(least), np.float32(-np.inf)), SKIPPED)
    for frame in (kept.amax(dim=1) == SKIPPED).nonzero()[:, 0].tolist():
        best = int(log_probs[frame].argmax())
        kept[frame, best] = log_probs[frame, best]
    return kept


def _options(
    beam_width: int,
    beam_prune_logp: float,
    token_min_logp: float,
    prune_history: bool,
    hotwords: Iterable[str] | None,
    hotword_weight: float,
    n_best: int,
) -> _Options:
    """Checked options; a hotword of several words stands for these words."""
    check_int("beam_width", beam_width, 1, 1 << 30)
    check_number("hotword_weight", hotword_weight, negative=True)
    if not -math.inf < beam_prune_logp < 0:
        raise FieldError("beam_prune_logp", beam_prune_logp, "a finite number < 0")
    if math.isnan(token_min_logp):
        raise FieldError("token_min_logp", token_min_logp, "a number")
    if isinstance(hotwords, str):
        raise FieldError("hotwords", hotwords, "a list of words")
    words = {word: float(hotword_weight) for phrase in hotwords or () for word in phrase.split()}
    return _Options(beam_width, beam_prune_logp, token_min_logp, bool(prune_history), words, n_best)


def build_ctcdecoder(
    labels: Sequence[str],
    kenlm_model_path: str | PathLike[str] | None = None,
    unigrams: Collection[str] | None = None,
    alpha: float = DEFAULT_ALPHA,
    beta: float = DEFAULT_BETA,
    unk_score_offset: float = DEFAULT_UNK_LOGP_OFFSET,
    lm_score_boundary: bool = DEFAULT_SCORE_LM_BOUNDARY,
) -> BeamSearchDecoderCTC:
    """A decoder of a model's logits.

    Args:
        labels: the label of each column, without or with the blank, see `Alphabet.build_alphabet`.
        kenlm_model_path: word LM: ARPA (plain or gzipped) or KenLM binary; None: no LM.
        unigrams: the known words; None: the words of the LM.
        alpha: weight of the LM, >= 0.
        beta: bonus of each word, natural log.
        unk_score_offset: log10, added to the LM's score of an unknown word.
        lm_score_boundary: whether the LM scores the beginning and the end of an utterance.
    """
    alphabet = Alphabet.build_alphabet(labels)
    lm = None
    if kenlm_model_path is not None:
        lm = LanguageModel(fspath(kenlm_model_path), unigrams, alpha, beta, unk_score_offset, lm_score_boundary)
    return BeamSearchDecoderCTC(alphabet, lm)
