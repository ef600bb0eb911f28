"""Define the base class of decoders with NeMo's interface, which loads vocabulary, LM and phrases."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from nemo.collections.asr.parts.utils.asr_confidence_utils import ConfidenceMethodMixin
from nemo.collections.asr.parts.utils.rnnt_utils import NBestHypotheses
from nemo.collections.asr.parts.utils.tokenizer_utils import define_spe_tokenizer_type
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs
from nemo.utils import logging
from omegaconf import DictConfig

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, fields_named
from nemo_gpu_decoding.fusion.allowed import AllowedTokens, allowed_tokens
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting import BoostingConfig, load_boosting_tree, weight_of_tree
from nemo_gpu_decoding.fusion.fusion import Fusion
from nemo_gpu_decoding.fusion.grammar import MOST_LETTERS, Grammar, build_grammar
from nemo_gpu_decoding.fusion.ngram import load_lm_pool, load_ngram_lm
from nemo_gpu_decoding.nemo_plugin.section import AllowedOptions, FusionOptions, Options
from nemo_gpu_decoding.nemo_plugin.streaming.stream_state import Continuation, StreamState
from nemo_gpu_decoding.plain_text import read_lines
from nemo_gpu_decoding.search.alternatives import word_alternatives
from nemo_gpu_decoding.search.result import NBest, Place
from nemo_gpu_decoding.search.result import Path as SearchPath
from nemo_gpu_decoding.vocabulary import Vocabulary


class FusedInfer(WithOptionalCudaGraphs, ABC):
    """A decoder with NeMo's interface, and with LM and phrases of a decoding config; `decoder()` is the search.

    The constructor is fast, because NeMo creates many of these objects: the first batch loads LM, graph and
    phrases. NeMo requires `WithOptionalCudaGraphs` when a model switches between training and validation.

    Args:
        owner: NeMo's decoding object, complete except for this decoder.
        cfg: its config.

    Raises:
        ValueError, FileNotFoundError: see the reader of the strategy's section.
    """

    section: ClassVar[str] = "beam"  # of NeMo's decoding config, where its options are
    continued_by: ClassVar[str]  # NeMo's argument with the states of running utterances
    options: Options[Any]

    def __init__(self, owner: Any, cfg: DictConfig) -> None:
        self._owner = owner
        self.strategy = str(cfg.strategy)
        self.options = self.read(cfg)
        self.return_best_hypothesis = self.options.return_best
        self.preserve_alignments = bool(owner.preserve_alignments)
        self.preserve_frame_confidence = bool(owner.preserve_frame_confidence)
        self.compute_timestamps = owner.compute_timestamps
        self.confidence_method = dict(owner.confidence_method_cfg)
        self.tokenizer = getattr(owner, "tokenizer", None)
        self.labels_map = getattr(owner, "labels_map", None)  # of character models
        self._continuation = Continuation(self.continued_by)
        self._decoders: dict[Hashable, Any] = {}  # key: `_variant`
        self._vocabulary: Vocabulary | None = None

    @staticmethod
    @abstractmethod
    def read(cfg: DictConfig) -> Options[Any]:
        """Read and check the options of this strategy in a decoding config."""

    @abstractmethod
    def _load(self) -> Any:
        """Load LM, graph and phrases, and create the search with them."""

    def _variant(self) -> Hashable:
        """Return the values of attributes that NeMo may change later; a change needs another search object."""
        return None

    def decoder(self) -> Any:
        """Return the search; the first call loads LM, graph and phrases."""
        variant = self._variant()
        if variant not in self._decoders:
            self._decoders[variant] = self._load()
        return self._decoders[variant]

    @property
    def needs_frames(self) -> bool:
        """Return whether results have alignments or frame confidence, which are computed from the input frames."""
        return self.preserve_alignments or self.preserve_frame_confidence

    @property
    def why_one_best(self) -> str:
        """Return why a stream's transcript may differ from the best path of its n-best list, or "" if it cannot."""
        return ""

    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = nemo_vocabulary(self)
        return self._vocabulary

    def candidates(self, n_best: int) -> int:
        """Return how many hypotheses to request for n_best different texts: the whole beam, as texts may repeat."""
        return n_best if n_best == 1 else max(n_best, getattr(self.options.search, "beam_size", 1))

    def chosen(self, nbest: NBest) -> Sequence[Any]:
        """Return the `n_best` best paths with different texts, best first."""
        return nbest.distinct(self.text_of, self.options.n_best).paths

    @abstractmethod
    def _hypothesis(self, path: Any, state: StreamState) -> Any:
        """Convert a path of an utterance to NeMo's `Hypothesis`."""

    def _hypotheses(self, states: Sequence[StreamState]) -> tuple[list[Sequence[Any]], list[list[Any]]]:
        """Return paths and NeMo's hypotheses of each utterance, best first; log errors and notes of the search."""
        for row, state in enumerate(states):
            if state.error:
                logging.warning(f"utterance {row} of the batch (from 0) is not decoded: {state.error}")
        for note in (note for state in states for note in state.nbest.notes):
            logging.warning(note)
        paths = [self.chosen(state.nbest) for state in states]
        hypotheses = []
        for state, chosen in zip(states, paths, strict=True):
            hypotheses.append([self._hypothesis(path, state) for path in chosen])
            hypotheses[-1][0].find_alternatives = self.alternatives(state.nbest)
        return paths, hypotheses

    def _returned(self, hypotheses: Sequence[list[Any]]) -> tuple[list[Any]]:
        """Return a 1-tuple of a list with a `Hypothesis` or `NBestHypotheses` per utterance, as NeMo's decoders do."""
        if self.return_best_hypothesis:
            return ([n_best[0] for n_best in hypotheses],)
        return ([NBestHypotheses(n_best) for n_best in hypotheses],)

    def alternatives(self, nbest: NBest) -> Callable[[], tuple[Place, ...]] | None:
        """Return a function that makes the confusion network of an n-best list, or None for a single hypothesis."""
        return partial(word_alternatives, nbest.paths, self.vocabulary()) if len(nbest) > 1 else None

    def text_of(self, path: SearchPath) -> str:
        """Return the text of a path as NeMo's decoding object writes it."""
        if self._owner is None:
            return self.vocabulary().text(path.tokens.tolist())
        return self._owner.decode_tokens_to_str_with_strip_punctuation(path.tokens.tolist())

    def boosting_of(self, config: BoostingConfig, weight: float | None, lm: str | None = None) -> BackoffAutomaton:
        """Return the boosting tree for a request with `boosting_tree` options.

        Args:
            weight: weight of the tree in the search, > 0; None means the default. The default bonuses come from the
                LM of the request.
            lm: the name of this LM; None means the config's.
        """
        fusion = self.decoder().fusion
        payer = fusion.lm if lm is None else fusion.lm_pool.get(lm)
        return load_boosting_tree(config, self.vocabulary(), payer if weight is None else None)

    def disable_cuda_graphs(self) -> bool:
        return False  # without effect: this search has no CUDA graphs

    def maybe_enable_cuda_graphs(self) -> bool:
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle only the options; a copy takes loaded files from the cache. The owner is left out, because
        its class is created at run time and cannot be pickled."""
        return self.__dict__ | {"_decoders": {}, "_continuation": Continuation(self.continued_by), "_owner": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedInfer:
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__getstate__() | {"_owner": self._owner}, memo)
        return other


def frame_confidence(log_probs: torch.Tensor, blank_id: int, method: dict[str, Any]) -> list[float]:
    """Return NeMo's confidence of each frame, in [0, 1], from log-probs [T, V + 1], by `confidence_cfg.method_cfg`."""
    measure = ConfidenceMethodMixin()
    measure.blank_id = blank_id
    measure._init_confidence_method(method)
    return measure._get_confidence(log_probs)


def nemo_vocabulary(decoding: Any) -> Vocabulary:
    """Return the vocabulary of a NeMo decoding object: from its `tokenizer` (monolingual or aggregate) or, for a
    character model, from `labels_map`, number -> character."""
    tokenizer = getattr(decoding, "tokenizer", None)
    if tokenizer is None:
        return Vocabulary(tuple(decoding.labels_map[i] for i in range(len(decoding.labels_map))), "char")
    # `vocab` is not always in the order of the ids
    all_pieces = tokenizer.ids_to_tokens(list(range(tokenizer.tokenizer.vocab_size)))
    kind = define_spe_tokenizer_type(all_pieces)
    if hasattr(tokenizer, "tokenizers_dict"):  # an aggregate
        by_language = {language: _EncodeIn(tokenizer, language) for language in tokenizer.tokenizers_dict}
        return Vocabulary(tuple(all_pieces), kind, encode_by_language=by_language)
    return Vocabulary(tuple(all_pieces), kind, encode=tokenizer.text_to_ids)


@dataclass(frozen=True)
class _EncodeIn:
    """A function that encodes text with one language of an aggregate tokenizer. Objects with the same fields compare
    equal, unlike lambdas, so that equal vocabularies have equal keys in the cache."""

    tokenizer: Any
    language: str

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.text_to_ids(text, self.language)


def load_fusion(options: FusionOptions, vocab_size: int, vocabulary: Vocabulary) -> Fusion:
    """Load the LMs and the boosting tree that a config names, or take them from the cache."""
    load = partial(load_ngram_lm, vocab_size=vocab_size, vocabulary=vocabulary, encoding=options.lm_encoding)
    lm = load(options.lm) if options.lm and options.lm_weight > 0 else None
    source_lm = load(options.source_lm) if options.source_lm and options.source_lm_weight > 0 else None
    payer = lm if options.boosting_weight is None else None
    boosting = load_boosting_tree(options.boosting, vocabulary, payer) if options.has_phrases else None
    weight = weight_of_tree(options.boosting_weight, boosting)
    pool = load_lm_pool(options.lm_pool, vocab_size, vocabulary=vocabulary, encoding=options.lm_encoding)
    source = source_lm, options.source_lm_weight
    allowed = load_allowed(options.allowed, vocabulary)
    grammar = None if options.grammar is None else load_grammar(options.grammar, options.grammar_price, vocabulary)
    return Fusion(lm, options.lm_weight, boosting, weight, *source, allowed, grammar, pool, options.lm_pool_weights)


def load_grammar(
    source: Path | Sequence[str], price: float, vocabulary: Vocabulary, where: str = "beam.", most: int = MOST_LETTERS
) -> Grammar:
    """Return the grammar of a config or request from a list of sentences or a file with one sentence per line.

    Args:
        where: text before keys in messages, such as "beam.".

    Raises:
        FieldError: a value is invalid; the error names its key.
    """
    if isinstance(source, Path):
        source = [line for line in read_lines(source) if line.strip()]
    try:
        return build_grammar(source, vocabulary, price, most)
    except FieldError as error:
        raise error.named(f"{where}grammar{'_price' if error.field == 'price' else ''}") from None
    except ValueError as error:
        shown = [*source][:3]
        raise FieldError(f"{where}grammar", shown, "a grammar of the model's tokens", f"({error})") from None


def load_allowed(lock: AllowedOptions, vocabulary: Vocabulary, section: str = "beam.") -> AllowedTokens | None:
    """Return the cached allowed tokens of a config or request; None allows all. `section` precedes keys in errors."""
    if not (lock.scripts or lock.tokens or lock.text):
        return None

    def load() -> AllowedTokens:
        texts = read_lines(lock.text) if lock.text else []
        return allowed_tokens(vocabulary, scripts=lock.scripts, tokens=lock.tokens, texts=texts, price=lock.price)

    with fields_named(f"{section}allowed_{{}}"):
        return cached(("allowed", lock, lock.text and file_key(lock.text), vocabulary), load)
