"""Offer pyctcdecode's interface with the searches of this package.

    from nemo_gpu_decoding.compat.pyctcdecode import build_ctcdecoder

    decoder = build_ctcdecoder(labels, kenlm_model_path="lm.arpa", alpha=0.5, beta=1.0)
    decoder.decode(logits)  # [T, V] of one utterance
    decoder.decode_batch(None, [logits, logits])

With a word LM, `cuda_wfst` searches an open-vocabulary graph; without an LM, `flexctc_beam` searches with merge
"prefix". The scores are those of pyctcdecode, see `language_model.py`, with one difference: with an LM, `logit_score`
is the score of the best alignment. pyctcdecode adds the probabilities of the alignments in its beam.

All utterances of a batch are decoded at once, on the threads of torch.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.checks import FieldError, check_int, check_kind, check_number
from nemo_gpu_decoding.compat.alphabet import Alphabet, spellings
from nemo_gpu_decoding.compat.language_model import LanguageModel, hotword_automaton
from nemo_gpu_decoding.compat.search import SKIPPED, TokenSearch, WordSearch, aligned_score, likely_of, log_probs_of
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.result import NBest, Path

logger = logging.getLogger("nemo_gpu_decoding")

DEFAULT_ALPHA, DEFAULT_BETA, DEFAULT_UNK_LOGP_OFFSET, DEFAULT_SCORE_LM_BOUNDARY = 0.5, 1.5, -10.0, True
DEFAULT_BEAM_WIDTH, DEFAULT_PRUNE_LOGP, DEFAULT_MIN_TOKEN_LOGP = 100, -10.0, -5.0
DEFAULT_HOTWORD_WEIGHT, DEFAULT_PRUNE_BEAMS = 10.0, False

Frames = tuple[int, int]  # the first frame of a word, and one past its last
WordFrames = tuple[str, Frames]


class LMState(NamedTuple):
    """The state of the LM before an utterance: the last words of the previous utterance, as tokens."""

    tokens: tuple[int, ...]


class OutputBeam(NamedTuple):
    """A hypothesis of one utterance, with the fields of pyctcdecode's `OutputBeam`."""

    text: str
    last_lm_state: LMState | None  # for `lm_start_state` of the next part; None without an LM
    text_frames: list[WordFrames]
    logit_score: float  # natural log of the acoustic probability
    lm_score: float  # logit_score plus the scores of LM, beta and hotwords


class OutputBeamMPSafe(NamedTuple):
    """An `OutputBeam` without the state of the LM."""

    text: str
    text_frames: list[WordFrames]
    logit_score: float
    lm_score: float


class _Call:
    """The options of one call of a decoding method; raises a FieldError for an invalid value."""

    def __init__(
        self,
        beam_width: int,
        beam_prune_logp: float,
        token_min_logp: float,
        prune_history: bool,
        hotwords: Iterable[str] | Iterable[Iterable[str] | None] | None,
        hotword_weight: float,
        n_best: int,
    ) -> None:
        check_int("beam_width", beam_width, 1, 1 << 30)
        check_number("hotword_weight", hotword_weight, negative=True)
        if not isinstance(beam_prune_logp, float | Real) or not -math.inf < beam_prune_logp < 0:
            raise FieldError("beam_prune_logp", beam_prune_logp, "a finite number < 0")
        if not isinstance(token_min_logp, float | Real) or math.isnan(token_min_logp):
            raise FieldError("token_min_logp", token_min_logp, "a number")
        given: Any = hotwords if isinstance(hotwords, str) else list(hotwords or ())
        lists = [given] if all(isinstance(phrase, str) for phrase in given) else given
        self.hotwords = [_bonuses(phrases, float(hotword_weight)) for phrases in lists]  # for all utterances, or each
        self.beam_width, self.beam_prune_logp, self.n_best = beam_width, beam_prune_logp, n_best
        self.token_min_logp, self.prune_history = token_min_logp, bool(prune_history)


class BeamSearchDecoderCTC:
    """A CTC decoder with pyctcdecode's methods.

    Args:
        alphabet: the labels of the logits' columns.
        language_model: a word LM, or None to decode without an LM.
    """

    model_container: ClassVar[dict[bytes, LanguageModel | None]] = {}
    _ALPHABET_SERIALIZED_FILENAME = "alphabet.json"
    _LANGUAGE_MODEL_SERIALIZED_DIRECTORY = "language_model"

    def __init__(self, alphabet: Alphabet, language_model: LanguageModel | None = None) -> None:
        self._alphabet = alphabet
        self._model_key = os.urandom(16)
        BeamSearchDecoderCTC.model_container[self._model_key] = language_model
        self._search = lru_cache(maxsize=8)(self._make_search)
        self._ignored: set[str] = set()  # hotwords that a warning named

    @property
    def _language_model(self) -> LanguageModel | None:
        return BeamSearchDecoderCTC.model_container[self._model_key]

    @classmethod
    def clear_class_models(cls) -> None:
        """Release the LMs of all decoders."""
        BeamSearchDecoderCTC.model_container = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._alphabet, self._language_model)

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
        """Change the weights of the LM; None keeps a weight. Without an LM, the call has no effect."""
        if self._language_model is not None:
            self._language_model.reset_params(alpha, beta, unk_score_offset, lm_score_boundary)

    # ------------------------------------------------------------------------------------- files

    def save_to_dir(self, filepath: str | PathLike[str]) -> None:
        """Write the alphabet and the LM to a folder, in the file formats of pyctcdecode."""
        folder = FilePath(filepath)
        (folder / self._ALPHABET_SERIALIZED_FILENAME).write_text(self._alphabet.dumps(), encoding="utf-8")
        if self._language_model is not None:
            target = folder / self._LANGUAGE_MODEL_SERIALIZED_DIRECTORY
            target.mkdir()
            self._language_model.save_to_dir(target)

    @classmethod
    def parse_directory_contents(cls, filepath: str | PathLike[str]) -> dict[str, str | None]:
        """Return the paths of the alphabet and of the LM, if there is one."""
        alphabet = FilePath(filepath) / cls._ALPHABET_SERIALIZED_FILENAME
        lm = FilePath(filepath) / cls._LANGUAGE_MODEL_SERIALIZED_DIRECTORY
        if not alphabet.exists():
            raise ValueError(f"{fspath(filepath)} has no {alphabet.name}, expected a folder that save_to_dir wrote")
        return {"alphabet": str(alphabet), "language_model": str(lm) if lm.exists() else None}

    @classmethod
    def load_from_dir(cls, filepath: str | PathLike[str], unigram_encoding: str = "utf-8") -> BeamSearchDecoderCTC:
        """Create a decoder from a folder that `save_to_dir` or pyctcdecode has written."""
        paths = cls.parse_directory_contents(filepath)
        alphabet = Alphabet.loads(FilePath(str(paths["alphabet"])).read_text(encoding="utf-8"))
        folder = paths["language_model"]
        return cls(alphabet, None if folder is None else LanguageModel.load_from_dir(folder, unigram_encoding))

    @classmethod
    def load_from_hf_hub(cls, model_id: str, cache_dir: Any = None, **kwargs: Any) -> BeamSearchDecoderCTC:
        """Create a decoder from a repository of Hugging Face; `kwargs` are passed to `snapshot_download`."""
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
        """Return the text of one utterance; arguments as in `decode_beams`."""
        given = _Call(beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, 1)
        return self._texts({"logits": logits}, given, lm_start_state)[0]

    def decode_batch(
        self,
        pool: Any,
        logits_list: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        hotwords: Iterable[str] | Iterable[Iterable[str] | None] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[str]:
        """Return the texts of several utterances; arguments as in `decode_beams_batch`."""
        given = _Call(beam_width, beam_prune_logp, token_min_logp, True, hotwords, hotword_weight, 1)
        return self._texts(_named(logits_list), given)

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
        """Return the hypotheses of one utterance with different texts, best first.

        Args:
            logits: [T, V] logits, log-probs or probabilities; NumPy or torch.
            beam_width: maximum number of hypotheses, per frame and in the result.
            beam_prune_logp: hypotheses whose score is lower than the best one's by more than this are dropped;
                natural log, < 0.
            token_min_logp: tokens with a lower log-prob are skipped, unless they are the most likely of the frame.
            prune_history: of hypotheses whose last words (the LM's context) are equal, return only the best.
            hotwords: words, or phrases whose words are taken one by one.
            hotword_weight: bonus of each occurrence of a hotword, natural log.
            lm_start_state: `last_lm_state` of the utterance that this one continues.
        """
        given = _Call(beam_width, beam_prune_logp, token_min_logp, prune_history, hotwords, hotword_weight, beam_width)
        return self._decode({"logits": logits}, given, lm_start_state)[0]

    def decode_beams_batch(
        self,
        pool: Any,
        logits_list: Any,
        beam_width: int = DEFAULT_BEAM_WIDTH,
        beam_prune_logp: float = DEFAULT_PRUNE_LOGP,
        token_min_logp: float = DEFAULT_MIN_TOKEN_LOGP,
        prune_history: bool = DEFAULT_PRUNE_BEAMS,
        hotwords: Iterable[str] | Iterable[Iterable[str] | None] | None = None,
        hotword_weight: float = DEFAULT_HOTWORD_WEIGHT,
    ) -> list[list[OutputBeamMPSafe]]:
        """Return, for each utterance of a batch, its hypotheses with different texts, best first.

        Args:
            pool: not used: the utterances are decoded as one batch in this process.
            logits_list: [T, V] of each utterance.
            hotwords: as in `decode_beams`, or for each utterance a list of hotwords or None.
            other arguments: as in `decode_beams`.
        """
        given = _Call(beam_width, beam_prune_logp, token_min_logp, prune_history, hotwords, hotword_weight, beam_width)
        results = self._decode(_named(logits_list), given)
        return [[OutputBeamMPSafe(beam.text, *beam[2:]) for beam in beams] for beams in results]

    def _decode(self, named: dict[str, Any], given: _Call, state: LMState | None = None) -> list[list[OutputBeam]]:
        """Decode the utterances and return the hypotheses of each one; arguments as for `_results`."""
        log_probs, results, before = self._results(named, given, state)
        lm, score = self._language_model, 0.0
        if lm is not None and before:
            assert state is not None
            words = [word.text for word in self._alphabet.words(state.tokens)]
            score = lm.score(words, given.hotwords[0])
        return [
            self._beams([self._beam(path, values, before, score) for path in nbest.paths], given)
            for values, nbest in zip(log_probs, results, strict=True)
        ]

    def _texts(self, named: Mapping[str, Any], options: _Call, state: LMState | None = None) -> list[str]:
        """Decode the utterances and return the best text of each one; arguments as for `_results`."""
        _, results, before = self._results(named, options, state)
        paths = [nbest.best for nbest in results]
        return [self._alphabet.text(path.tokens[path.frames >= before].tolist()) for path in paths]

    def _results(
        self, named: Mapping[str, Any], options: _Call, state: LMState | None
    ) -> tuple[list[np.ndarray], list[NBest[Any]], int]:
        """Return, for each utterance, its log-probs, its `NBest`, and the number of frames inserted before it.

        Args:
            named: name of an utterance in messages -> logits.
            state: the LM's state before the utterances; each token of the state becomes a frame and a blank.
        """
        log_probs = [self._log_probs(name, logits) for name, logits in named.items()]
        check_kind("lm_start_state", LMState(()) if state is None else state, LMState, ": an OutputBeam has it")
        tokens = [] if self._language_model is None or state is None else list(state.tokens)
        if tokens and self._alphabet.separator is not None:
            tokens.append(self._alphabet.separator)
        before = np.full((2 * len(tokens), len(self._alphabet.pieces) + 1), SKIPPED)
        before[range(0, len(before), 2), tokens] = before[1::2, -1] = 0
        likely = [likely_of(values, options.token_min_logp) for values in log_probs]
        if tokens:
            likely = [np.concatenate([before, values]) for values in likely]
        results: dict[int, NBest[Any]] = {}
        for rows, search, requests in self._searches(options, len(likely)):
            inputs = [likely[n] for n in rows] if len(rows) > 1 else likely[rows[0]]  # a single array is not copied
            nbests = search.decode(inputs, requests=requests)
            results |= zip(rows, nbests, strict=True)
        return log_probs, [results[n] for n in range(len(likely))], len(before)

    # ------------------------------------------------------------------------------------ search

    def _searches(self, options: _Call, count: int) -> Iterator[tuple[list[int], Any, list[Request] | None]]:
        """Yield indices, search and requests of utterances without hotwords, then of utterances with hotwords."""
        if len(options.hotwords) not in (1, count):
            expected = f"one list of words, or one for each of the {count} utterances"
            raise FieldError("hotwords", f"{len(options.hotwords)} lists", expected)
        hotwords = self._spelled(options.hotwords) * (count if len(options.hotwords) == 1 else 1)
        lm = self._language_model
        for has_hotwords in (False, True):
            if rows := [n for n, words in enumerate(hotwords) if bool(words) == has_hotwords]:
                graph = lm and (lm.graph(self._alphabet) if has_hotwords else lm.weighted_graph(self._alphabet))
                search = self._search(options.beam_width, options.beam_prune_logp, options.n_best, graph)
                yield rows, search, [self._request(hotwords[n]) for n in rows] if has_hotwords else None

    def _spelled(self, hotwords: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
        """Return the hotwords that the labels can spell; warn once of other hotwords."""
        bad = {word for words in hotwords for word in words if not spellings(self._alphabet, word)}
        if new := sorted(bad - self._ignored):
            self._ignored |= bad
            shown = ", ".join(map(repr, new[:3]))
            logger.warning("hotwords with characters that are no labels are ignored (%d): %s", len(new), shown)
        return [{word: bonus for word, bonus in words.items() if word not in bad} for words in hotwords]

    def _request(self, hotwords: Mapping[str, float]) -> Request:
        """Return the request of an utterance with hotwords: boosting automaton and weights."""
        lm, alphabet = self._language_model, self._alphabet
        if lm is None:
            return Request(hotword_automaton(alphabet, frozenset(hotwords.items())), 1.0)
        return Request(lm.bonuses(alphabet, hotwords), 1.0, float(lm.alpha))

    def _make_search(self, beam_width: int, beam_prune_logp: float, n_best: int, graph: WordGraph | None) -> Any:
        sizes = len(self._alphabet.pieces), beam_width, beam_prune_logp, n_best
        return TokenSearch(*sizes) if graph is None else WordSearch(graph, *sizes)

    # ----------------------------------------------------------------------------------- results

    def _log_probs(self, name: str, logits: Any) -> np.ndarray:
        """Check the shape [T, columns] of logits and return their log-probs.

        Raises:
            ValueError: the shape is wrong; the message has `name`.
        """
        columns = len(self._alphabet.labels)
        try:
            is_array = isinstance(logits, np.ndarray) and logits.dtype.kind in "fiu"
            values = logits if is_array else torch.as_tensor(logits).detach().cpu().float().numpy()
        except (TypeError, ValueError, RuntimeError) as error:
            raise FieldError(name, logits, f"numbers [T, {columns}]") from error
        if values.ndim != 2 or values.shape[1] != columns:
            shape = f"{name} has shape {tuple(values.shape)}, expected [T, {columns}]"
            raise ValueError(f"{shape}: one column per label; {self._alphabet.note}")
        return log_probs_of(np.array(values, np.float32, order="C"), name, self._alphabet)

    def _beams(self, ranked: Iterable[OutputBeam], options: _Call) -> list[OutputBeam]:
        """Return hypotheses with different texts, best first, from the search's hypotheses `ranked`."""
        beams: dict[str, OutputBeam] = {}
        endings, least = set(), -math.inf
        for beam in ranked:
            least = max(least, beam.lm_score + options.beam_prune_logp)
            ending = tuple(beam.text.split()[-self._history :]) if options.prune_history else beam.text
            if beam.text not in beams and ending not in endings and beam.lm_score >= least:
                beams[beam.text] = beam
                endings.add(ending)
        return sorted(beams.values(), key=lambda beam: -beam.lm_score)[: options.beam_width]

    @property
    def _history(self) -> int:
        """Return the number of words in the context of the LM (its order - 1), at least one."""
        return 1 if self._language_model is None else max(1, self._language_model.order - 1)

    def _beam(self, path: Path, values: np.ndarray, before: int, score_before: float) -> OutputBeam:
        """Convert a path to an `OutputBeam`, without frames and scores of the last utterance; `values`: log-probs."""
        starts = path.frames - before
        stops, words = starts + path.repeats, list(self._alphabet.words(path.tokens.tolist()))
        spoken = [(text, int(starts[first]), int(stops[end - 1])) for text, first, end in words]
        frames = [(text, (begin, end)) for text, begin, end in spoken if begin >= 0]
        acoustic, state = path.parts.acoustic, None
        if self._language_model is not None:
            acoustic = aligned_score(path.tokens, starts, stops, values)
            first = words[-self._history].first_token if len(words) >= self._history else 0
            state = LMState(tuple(path.tokens[first:].tolist()))
        return OutputBeam(" ".join(word for word, _ in frames), state, frames, acoustic, path.score - score_before)


def _named(logits_list: Iterable[Any]) -> dict[str, Any]:
    """Return a mapping from a name for messages, "logits_list[i]", to the logits of utterance i."""
    return {f"logits_list[{i}]": logits for i, logits in enumerate(logits_list)}


def _bonuses(hotwords: Iterable[str] | None, weight: float) -> dict[str, float]:
    """Return the bonus of each word in the hotwords; a hotword of several words is split at spaces."""
    phrases = hotwords if isinstance(hotwords, str) or not isinstance(hotwords, Iterable) else list(hotwords)
    if phrases is not None and not (isinstance(phrases, list) and all(isinstance(phrase, str) for phrase in phrases)):
        raise FieldError("hotwords", phrases, "a list of words")
    return {word: weight for phrase in phrases or () for word in phrase.split()}


def build_ctcdecoder(
    labels: Sequence[str],
    kenlm_model_path: str | PathLike[str] | None = None,
    unigrams: Collection[str] | None = None,
    alpha: float = DEFAULT_ALPHA,
    beta: float = DEFAULT_BETA,
    unk_score_offset: float = DEFAULT_UNK_LOGP_OFFSET,
    lm_score_boundary: bool = DEFAULT_SCORE_LM_BOUNDARY,
) -> BeamSearchDecoderCTC:
    """Return a decoder for the logits of a CTC model.

    Args:
        labels: the label of each column, without or with the blank, see `Alphabet.build_alphabet`.
        kenlm_model_path: word LM: ARPA (plain or gzipped) or KenLM binary; None means no LM.
        unigrams: the known words; None means the words of the LM.
        alpha: weight of the LM, >= 0.
        beta: bonus of each word, natural log.
        unk_score_offset: log10, added to the LM's score of an unknown word.
        lm_score_boundary: whether the LM scores the beginning and the end of an utterance.
    """
    alphabet = Alphabet.build_alphabet(labels)
    lm = None
    defaults = DEFAULT_ALPHA, DEFAULT_BETA, DEFAULT_UNK_LOGP_OFFSET, DEFAULT_SCORE_LM_BOUNDARY
    if kenlm_model_path is None and (unigrams, alpha, beta, unk_score_offset, lm_score_boundary) != (None, *defaults):
        logger.warning("unigrams and the weights of the LM have no effect without kenlm_model_path")
    if kenlm_model_path is not None:
        lm = LanguageModel(fspath(kenlm_model_path), unigrams, alpha, beta, unk_score_offset, lm_score_boundary)
    return BeamSearchDecoderCTC(alphabet, lm)
