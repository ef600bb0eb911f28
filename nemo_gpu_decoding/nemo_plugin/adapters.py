"""Define subclasses of NeMo's decoding classes, and wrap NeMo's constructors so that they create these subclasses.

NeMo's constructor runs first, with strategy `greedy_batch` in a copy of the config. NeMo's constructor prepares text,
timestamps and confidence. Then the wrapper replaces the inner decoder, and changes the object's class: `adapted` puts
an adapter before the class that the object has.

With a word graph, the search returns words with frames, and the text is made of these words. NeMo itself joins tokens
to text and splits the text into words. NeMo's options for text still apply: no space before the model's punctuation
marks, `word_seperator` between words, division into segments, and confidence by `confidence_cfg`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import cache
from inspect import BoundArguments
from pkgutil import resolve_name
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from nemo.collections.asr.parts.submodules.ctc_decoding import AbstractCTCDecoding
from nemo.collections.asr.parts.submodules.rnnt_decoding import AbstractRNNTDecoding
from nemo.collections.asr.parts.utils.timestamp_utils import flatten_char_offsets, get_segment_offsets
from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs
from nemo.utils import logging
from nemo.utils.app_state import AppState
from omegaconf import DictConfig, OmegaConf

from nemo_gpu_decoding.checks import FieldError, check_kind, having
from nemo_gpu_decoding.metrics import calibrated
from nemo_gpu_decoding.nemo_plugin import hypotheses as kinds
from nemo_gpu_decoding.nemo_plugin.infer import FusedInfer
from nemo_gpu_decoding.nemo_plugin.register import find_strategy, other_strategies, wrong_family
from nemo_gpu_decoding.nemo_plugin.requests import confidence_map
from nemo_gpu_decoding.nemo_plugin.section import check_confidence
from nemo_gpu_decoding.presets import check_sections
from nemo_gpu_decoding.search.word_graph.result import GraphWord, WordPath
from nemo_gpu_decoding.vocabulary import Vocabulary
from nemo_gpu_decoding.words import has_unspaced, joined, single_spaced


def written_stamps(decoding: Any, hypothesis: kinds.BeamHypothesis, ids: Sequence[int], level: str) -> dict[str, list]:
    """Return one level of NeMo's timestamps, with words of scripts without spaces and with phrases for their aliases.

    If the number of words changes, a phrase is one entry."""
    aliases, stamps = hypothesis.aliases, hypothesis.timestamp
    divide_words(stamps, ids, decoding.decoding.vocabulary())
    if aliases is not None:
        words = stamps["word"]
        stamps["word"] = [
            {**words[first], "word": text, "end_offset": words[end - 1]["end_offset"]}
            for first, end, text in aliases.words([word["word"] for word in words])
        ]
        for segment in stamps["segment"]:
            segment["segment"] = aliases.written(segment["segment"])
    return level_of(stamps, level)


def divide_words(stamps: dict[str, list], ids: Sequence[int], vocabulary: Vocabulary) -> None:
    """Divide NeMo's word timestamps in scripts without spaces, where NeMo treats the whole text as one word."""
    if "word" in stamps and vocabulary.has_unspaced(ids):
        offsets, words = flatten_char_offsets(stamps["char"]), vocabulary.words(ids)
        starts = [offsets[word.first_token]["start_offset"] for word in words]
        ends = [offsets[vocabulary.last_spoken(ids, word)]["end_offset"] for word in words]
        stamps["word"] = [
            {"word": word.text, "start_offset": start, "end_offset": end}
            for word, start, end in zip(words, starts, ends, strict=True)
        ]


def level_of(stamps: dict[str, list], level: str) -> dict[str, list]:
    """Return NeMo's timestamps of one level: "char", "word" or "segment"; "all" keeps every level."""
    if level not in ("all", *stamps):
        raise FieldError("timestamp_type", level, "char, word, segment or all")
    return stamps if level == "all" else {name: stamps[name] for name in ("timestep", level)}


def written_text(hypothesis: Any, text: str) -> str:
    """Replace aliases in a hypothesis's text by their phrases, and repeated spaces by single spaces."""
    aliases, text = getattr(hypothesis, "aliases", None), single_spaced(text)
    return text if aliases is None else aliases.written(text)


def confidence_of_words(decoding: Any, hypothesis: Any, of_nemo: Callable[[Any], list[Any]]) -> list[Any]:
    """Return each word's confidence by NeMo's method; phrases aggregate the confidence of the words they replace."""
    aliases, written = getattr(hypothesis, "aliases", None), hypothesis.text
    ids, vocabulary = hypothesis.y_sequence.tolist(), decoding.decoding.vocabulary()
    if vocabulary.has_unspaced(ids):
        words = [word.text for word in vocabulary.words(ids)]
        confidences = confidence_of_parts(decoding, hypothesis.token_confidence, ids, vocabulary)
        if aliases is None:
            return confidences
    elif aliases is None:
        return of_nemo(hypothesis)
    else:
        if isinstance(written, tuple):  # of CTC: NeMo reads the tokens there
            text = decoding.decode_ids_to_str(ids)
        else:
            text = hypothesis.text = decoding.decode_tokens_to_str_with_strip_punctuation(ids)
        words, confidences = text.split(), of_nemo(hypothesis)
        hypothesis.text = written
    return [
        confidences[first] if end == first + 1 else decoding._aggregate_confidence(confidences[first:end])
        for first, end, _ in aliases.words(words)
    ]


def confidence_of_parts(
    decoding: Any, of_tokens: Sequence[Any], ids: Sequence[int], vocabulary: Vocabulary
) -> list[Any]:
    """Return the confidence of each word that `divide_words` makes, by NeMo's method."""
    words = vocabulary.words(ids)
    return [decoding._aggregate_confidence(of_tokens[word.first_token : word.end_token]) for word in words]


def mapped(decoding: Any, confidences: list[Any]) -> list[Any]:
    """Map confidences of words to the probability that they are right, if the config has a `confidence_map`."""
    fitted = confidence_map(decoding.decoding)
    return calibrated(confidences, fitted) if fitted else confidences


def word_confidence(wrapped: Callable[..., Any], decoding: Any, call: BoundArguments) -> list[Any]:
    """Return the confidence of words in a character model; NeMo's method would join ids as text."""
    hypothesis = call.arguments["hypothesis"]
    words: list[list[Any]] = [[]]
    texts = decoding.decode_ids_to_tokens(hypothesis.text[0])
    for text, confidence in zip(texts, hypothesis.token_confidence, strict=True):
        if text == decoding.word_seperator:
            words.append([])
        elif text in (decoding.supported_punctuation or ()) and not words[-1] and len(words) > 1:
            words[-2].append(confidence)  # NeMo joins it to the previous word
        else:
            words[-1].append(confidence)
    return [decoding._aggregate_confidence(confidences) for confidences in words if confidences]


def listed(results: list[Any], is_timed: bool | None) -> list[Any]:
    """Give n-best lists the fields of a hypothesis that NeMo sets and reads."""
    list_type = kinds.TimedNBestList if is_timed else kinds.NBestList
    return [list_type(result) if type(result) is list else result for result in results]


def native_lists(wrapped: Callable[..., Any], decoding: Any, call: BoundArguments) -> Any:
    """Decode CTC by any strategy; NeMo's `transcribe` fails for n-best lists of NeMo's strategies."""
    return listed(wrapped(*call.args, **call.kwargs), decoding.compute_timestamps)


@cache
def adapted(cls: type, adapter: type) -> type:
    """Return a cached subclass of a class (of NeMo or a user) that has the methods of an adapter first.

    The adapter derives from the base of NeMo's classes, because Python changes an object's class only between equal
    memory layouts. The subclass has the name of the class."""
    return type(cls)(cls.__name__, (adapter, cls), {"__qualname__": cls.__qualname__})


class CTCAdapter(AbstractCTCDecoding):
    """A CTC decoding class for searches that return tokens or words of a graph instead of frame labels.

    With a word graph, hypotheses may have only tokens: NeMo's cache-aware streaming passes greedy labels."""

    def decode_hypothesis(self, hypotheses_list: list[Any], fold_consecutive: bool) -> list:
        """Set `text` to a string or, with timestamps, to (token ids, start frame steps, frames per token)."""
        for hypothesis in hypotheses_list:
            ids = hypothesis.y_sequence.tolist()
            if self.compute_timestamps is True:
                lengths = np.diff(hypothesis.token_frames, prepend=0).tolist()
                hypothesis.text = (ids, lengths, hypothesis.token_repeats)
            elif isinstance(hypothesis, kinds.WordHypothesis):
                hypothesis.text = self.text_of(hypothesis)
            else:
                text = self.decode_tokens_to_str_with_strip_punctuation(ids)
                hypothesis.text = written_text(hypothesis, text)
        return hypotheses_list

    def compute_ctc_timestamps(self, hypothesis: kinds.BeamHypothesis, timestamp_type: str = "all") -> Any:
        """Compute timestamps from the triple in `text`, and the confidence that NeMo's n-best branch does not
        compute. Words of a graph have the frames of the search."""
        if len(hypothesis.text) == 3:
            if self.preserve_token_confidence:
                self.compute_confidence([hypothesis])
            hypothesis.text = hypothesis.text[:2]
        if isinstance(hypothesis, kinds.WordHypothesis):
            hypothesis.timestamp = self._stamps(hypothesis, timestamp_type)
            hypothesis.text = self.text_of(hypothesis)
            return hypothesis
        ids = hypothesis.text[0]
        hypothesis = super().compute_ctc_timestamps(hypothesis)  # all levels: words are made from tokens
        hypothesis.timestamp = written_stamps(self, hypothesis, ids, timestamp_type)
        hypothesis.text = written_text(hypothesis, hypothesis.text)
        return hypothesis

    def ctc_decoder_predictions_tensor(self, *args: Any, **kwargs: Any) -> list:
        return listed(super().ctc_decoder_predictions_tensor(*args, **kwargs), self.compute_timestamps)

    def _aggregate_token_confidence(self, hypothesis: Any) -> list[Any]:
        if not isinstance(hypothesis, kinds.WordHypothesis):
            return mapped(self, confidence_of_words(self, hypothesis, super()._aggregate_token_confidence))
        of_tokens, words = hypothesis.token_confidence, self._written(hypothesis)
        confidences = (of_tokens[word.first_token : word.end_token] for word in words)
        return mapped(self, [self._aggregate_confidence(of_word) for of_word in confidences])

    def _written(self, hypothesis: kinds.WordHypothesis | WordPath) -> list[GraphWord]:
        words = written_words(hypothesis.words, self.supported_punctuation or ())
        aliases = getattr(hypothesis, "aliases", None)
        if aliases is None:
            return words
        return [
            words[first]._replace(text=text, end_frame=last.end_frame, end_token=last.end_token)
            for first, end, text in aliases.words([word.text for word in words])
            for last in [words[end - 1]]
        ]

    def text_of(self, hypothesis: kinds.WordHypothesis | WordPath) -> str:
        words = [word.text for word in self._written(hypothesis)]
        return joined(words) if any(map(has_unspaced, words)) else self.word_seperator.join(words)

    def _stamps(self, hypothesis: kinds.WordHypothesis, level: str) -> dict[str, list]:
        """Return NeMo's `timestamp` dictionary with the frames of tokens and words from the search."""
        words = [
            {"word": word.text, "start_offset": word.start_frame, "end_offset": word.end_frame}
            for word in self._written(hypothesis)
        ]
        segments = get_segment_offsets(
            words,
            segment_delimiter_tokens=self.segment_seperators,
            supported_punctuation=self.supported_punctuation,
            segment_gap_threshold=self.segment_gap_threshold,
        )
        levels = {"char": self._token_offsets(hypothesis), "word": words, "segment": segments}
        return level_of({"timestep": list(hypothesis.token_frames), **levels}, level)

    def _token_offsets(self, hypothesis: kinds.WordHypothesis) -> list[dict[str, Any]]:
        tokens = hypothesis.y_sequence.tolist()
        texts = [self.decode_tokens_to_str(self.decode_ids_to_tokens([token])) for token in tokens]
        spans = zip(texts, hypothesis.token_frames, hypothesis.token_repeats, strict=True)
        return [{"char": text, "start_offset": start, "end_offset": start + n} for text, start, n in spans]


class RNNTAdapter(AbstractRNNTDecoding):
    """A transducer decoding class whose n-best lists have timestamps and confidence."""

    def decode_hypothesis(self, hypotheses_list: list[Any]) -> list:
        for hypothesis in super().decode_hypothesis(hypotheses_list):
            hypothesis.text = written_text(hypothesis, hypothesis.text)
        return hypotheses_list

    def decode_ids_to_tokens(self, tokens: list[int]) -> list[str]:
        """Return the texts of tokens; NeMo loses the last characters of TDT models."""
        labels = getattr(self, "labels_map", None)
        if labels is None:
            return super().decode_ids_to_tokens(tokens)
        return [labels[token] for token in tokens if token in labels]

    def compute_rnnt_timestamps(self, hypothesis: Any, timestamp_type: str = "all") -> Any:
        hypothesis = super().compute_rnnt_timestamps(hypothesis)
        ids = hypothesis.y_sequence.tolist()
        hypothesis.timestamp = written_stamps(self, hypothesis, ids, timestamp_type)
        return hypothesis

    def rnnt_decoder_predictions_tensor(
        self, encoder_output, encoded_lengths, return_hypotheses: bool = False, partial_hypotheses: Any = None
    ) -> list:
        """Decode like NeMo's method, and compute confidence also for n-best lists, where NeMo computes none. An
        n-best list has the fields of a hypothesis that NeMo reads."""
        results = super().rnnt_decoder_predictions_tensor(
            encoder_output, encoded_lengths, return_hypotheses, partial_hypotheses
        )
        for result in results:
            if return_hypotheses and isinstance(result, list) and self.preserve_token_confidence:
                self.compute_confidence(result)
        return listed(results, self.compute_timestamps and return_hypotheses)

    def compute_confidence(self, hypotheses_list: list[Any]) -> list:
        """Call NeMo's method with the start frames of tokens; word times have replaced them in `timestamp`."""
        stamps = [hypothesis.timestamp for hypothesis in hypotheses_list]
        for hypothesis in hypotheses_list:
            if isinstance(hypothesis, kinds.TransducerHypothesis):
                hypothesis.timestamp = hypothesis.token_frames
        try:
            return super().compute_confidence(hypotheses_list)
        finally:
            for hypothesis, stamp in zip(hypotheses_list, stamps, strict=True):
                hypothesis.timestamp = stamp

    def _aggregate_token_confidence(self, hypothesis: Any) -> list[Any]:
        return mapped(self, confidence_of_words(self, hypothesis, super()._aggregate_token_confidence))


def written_words(words: Sequence[GraphWord], punctuation: Collection[str]) -> list[GraphWord]:
    """Attach punctuation marks to the words before them, as NeMo does; a word keeps its duration."""
    written: list[GraphWord] = []
    for word in words:
        if written and word.text[0] in punctuation:
            last = written.pop()
            written.append(last._replace(text=last.text + word.text, end_token=word.end_token))
        else:
            written.append(word)
    return written


# options of NeMo's greedy decoders that must be off, because another strategy is used
GREEDY_EXTRAS = (
    *("ngram_lm_model", "boosting_tree", "enable_per_stream_biasing"),
    *("preserve_alignments", "compute_timestamps", "preserve_frame_confidence"),
)


def construct(wrapped: Callable[..., None], instance: Any, call: BoundArguments) -> None:
    """Construct NeMo's decoding object with this package's decoder; `wrapped` is NeMo's bound `__init__`.

    Raises:
        ValueError: the strategy decodes another family of models, or its options are invalid. In
            `change_decoding_strategy` also: the LM, graph or phrases do not fit the model.
    """
    cfg, is_ctc = _as_config(call.arguments["decoding_cfg"]), isinstance(instance, AbstractCTCDecoding)
    family = "ctc" if is_ctc else "rnnt"
    check_sections(cfg, "")
    check_confidence(cfg, family)
    spec = find_strategy(cfg)
    if spec is None:
        try:
            wrapped(*call.args, **call.kwargs)
        except ValueError as error:
            if not (others := other_strategies(str(cfg.get("strategy")), family)):
                raise
            raise ValueError(f"{error}{others}") from error
        except OSError as error:
            placeholder = _Unusable.of(str(cfg.strategy), error)
            call.arguments["decoding_cfg"] = _host_config(cfg, "beam")
            wrapped(*call.args, **call.kwargs)
            instance.cfg, instance.decoding = _unstructured(cfg), placeholder
        return
    if spec.family != family:
        head = {"ctc": "CTC", "rnnt": "transducer"}[spec.family]
        hint = f"for the {head} head of a hybrid model: change_decoding_strategy(cfg, decoder_type='{spec.family}')"
        raise ValueError(f"{wrong_family(spec, family, 'this decoder')}; {hint}")
    call.arguments["decoding_cfg"] = _host_config(cfg, spec.section)
    wrapped(*call.args, **call.kwargs)
    instance.cfg = _unstructured(cfg)
    instance.cfg.strategy = spec.name  # also for an alias: NeMo treats some names ("wfst") specially later on
    instance.__class__ = adapted(instance.__class__, CTCAdapter if is_ctc else RNNTAdapter)
    networks = {name: call.arguments[name] for name in ("decoder", "joint") if name in call.arguments}
    try:
        instance.decoding = resolve_name(spec.factory)(instance, instance.cfg, **networks)
    except (ValueError, OSError) as error:
        instance.decoding = _Unusable.of(spec.name, error)
    if _changing.get() and isinstance(instance.decoding, FusedInfer):
        instance.decoding.decoder()


class _Unusable:
    """The placeholder decoder of a restored model whose config names a missing file; any use raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @classmethod
    def of(cls, strategy: str, error: Exception) -> "_Unusable":
        """Return the placeholder for a strategy, with a warning; raise the error unless a model is being restored."""
        if not AppState().is_model_being_restored:
            raise error
        logging.warning(f"The model is restored without its decoding strategy {strategy}: {error}")
        return cls(error)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "decoding_computer":  # copies and pickles; models look for it
            raise AttributeError(name)
        raise self._error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


_changing: ContextVar[bool] = ContextVar("changing_strategy", default=False)


def change(wrapped: Callable[..., None], instance: Any, call: BoundArguments) -> None:
    """Call NeMo's `change_decoding_strategy` so that LM, graph and phrases are loaded at once.

    A file that does not fit the model therefore raises here, and the model keeps its strategy. Restoring a model loads
    no files, because NeMo then creates the decoding object more than once. CUDA graphs that are switched off remain
    off.
    """
    with having(_changing, True), _only_user_of(instance):
        are_graphs_off = _are_graphs_off(getattr(instance, "decoding", None))
        if given := call.arguments.get("decoding_cfg"):
            check_sections(cfg := _as_config(given), "")
            call.arguments["decoding_cfg"] = _with_default_weight(cfg)
        wrapped(*call.args, **call.kwargs)
        if are_graphs_off:
            instance.disable_cuda_graphs()


def _with_default_weight(cfg: DictConfig) -> Any:
    """Set a missing boosting weight to null (this package's default), because NeMo's default 0 boosts nothing."""
    if spec := find_strategy(cfg):
        section = cfg.get(spec.section) or {}
        if section.get("boosting_tree") and "boosting_tree_alpha" not in section:
            return OmegaConf.merge(cfg, {spec.section: {"boosting_tree_alpha": None}})
    return cfg


def alone(wrapped: Callable[..., Any], instance: Any, call: BoundArguments) -> Any:
    """Call NeMo's `transcribe` in one thread at a time, because it changes the model while it runs."""
    with _only_user_of(instance):
        return wrapped(*call.args, **call.kwargs)


def alone_to_the_end(wrapped: Callable[..., Any], instance: Any, call: BoundArguments) -> Iterator[Any]:
    """Call NeMo's `transcribe_generator`; calls of other threads wait until the generator ends or is deleted."""
    with _only_user_of(instance):
        yield from wrapped(*call.args, **call.kwargs)


_locks: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()  # of models; a lock inside a model could not be copied
_users: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # the threads that hold the locks
_locks_lock = Lock()


@contextmanager
def _only_user_of(model: Any) -> Iterator[None]:
    """Hold the lock of a model unless this thread holds it. Any thread may end the block, as generators do."""
    with _locks_lock:
        lock = _locks.setdefault(model, Lock())
    if _users.get(model) == get_ident():
        yield
        return
    with lock:
        _users[model] = get_ident()
        try:
            yield
        finally:
            del _users[model]


def _are_graphs_off(decoding: Any) -> bool:
    """Return whether a decoding object supports CUDA graphs, and they are switched off."""
    inner = getattr(decoding, "decoding", None)
    if not isinstance(inner, WithOptionalCudaGraphs):
        return False
    was_on, can_be_on = inner.disable_cuda_graphs(), inner.maybe_enable_cuda_graphs()
    return can_be_on and not was_on and inner.disable_cuda_graphs()


def _as_config(cfg: Any) -> DictConfig:
    if is_dataclass(cfg):
        return OmegaConf.structured(cfg)
    check_kind("decoding_cfg", cfg, Mapping, ' such as {"strategy": "flexctc_beam"}')  # YAML accepts texts
    return cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg)


def _unstructured(cfg: DictConfig) -> DictConfig:
    """Return a copy of a config that accepts any key, with interpolations resolved if possible."""
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.create(values)


def _host_config(cfg: DictConfig, section: str) -> DictConfig:
    """Return the config for NeMo's constructor: greedy decoding without files to load, and this config's flags."""
    host = _unstructured(cfg)
    host.strategy = "greedy_batch"
    greedy = host.get("greedy") or {}
    host.greedy = {key: value for key, value in greedy.items() if key not in GREEDY_EXTRAS}
    options = host.get(section) or {}
    for flag in ("preserve_alignments", "compute_timestamps"):
        if host.get(flag) is None:
            host[flag] = bool(options.get(flag, False))
    return host
