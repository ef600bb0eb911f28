"""Phrase boosting: build a boosting tree from phrases and NeMo's `boosting_tree` options.

    tree = build_boosting_tree(["NVIDIA", Phrase("New York", weight=2.0)], vocabulary)
    Fusion(boosting=tree, boosting_weight=1.0)

Phrases are matched as token sequences. "ann" earns no bonus in "anna", even if the tokens of "anna" begin
with those of "ann", unless `whole_words` is False or `refund` is "nemo".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from os import fspath
from pathlib import Path
from typing import Any

import numpy as np

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, check_choice, check_number, checked_options
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.boosting_tree import BoostingTree, PhraseTable
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence, build_context_graph, token_scores
from nemo_gpu_decoding.fusion.ngram import load_nemo_automaton
from nemo_gpu_decoding.fusion.phrases import (
    Phrase,
    aliases_of,
    as_phrase,
    is_word_character,
    read_phrases,
    spelled_phrases,
    weight_of,
    without_repetitions,
)
from nemo_gpu_decoding.vocabulary import CONTINUATION, Vocabulary

REFUNDS = ("full", "nemo")
BPE_MODES = ("default", "bpe_dropout", "var_bpe", "case_insensitive")
VAR_BPE_SEGMENTATIONS = 8  # of modes in which NeMo boosts every segmentation
_SHOWN = 3  # phrases at fault listed in messages


@checked_options
@dataclass(frozen=True)
class BoostingConfig:
    """NeMo's `BoostingTreeModelConfig`, followed by options of this package. Scores are natural log.

    Raises:
        ValueError: a value is out of range or has no effect here.
    """

    # A boosting tree that NeMo made. Phrases have one source: this one, `key_phrases_file`, or the two lists.
    model_path: str | None = None
    # A text file of phrases: one per line, optionally followed by its weight and its aliases, each after a tab.
    key_phrases_file: str | None = None
    # A list of phrases; it adds to `key_phrase_items_list`.
    key_phrases_list: Sequence[str | Phrase] | None = None
    # A list of items: Phrase, or anything with phrase, lang and, if need be, weight (or alpha)
    # and aliases.
    key_phrase_items_list: Sequence[Any] | None = None
    # Bonus of the first token of a phrase, >= 0.
    context_score: float = 1.0
    # Token n > 1 of a phrase gets context_score * depth_scaling + log(n); >= 0.
    depth_scaling: float = 2.0
    # Weight of a token that neither continues nor begins a phrase.
    unk_score: float = 0.0
    # Bonus of the end-of-sentence token of attention decoders; without effect for CTC, RNN-T and TDT.
    final_eos_score: float = 1.0
    # If not 0: context_score of a phrase = score_per_phrase / number of its characters.
    score_per_phrase: float = 0.0
    # Language of the phrases for aggregate tokenizers.
    source_lang: str = "en"
    # Ignored: this package does not use Triton.
    use_triton: bool | None = True
    # Every token gets context_score, without depth scaling (as in Icefall).
    uniform_weights: bool = False
    # Boost num_of_transcriptions segmentations of a phrase: the same as segmentations=5.
    use_bpe_dropout: bool = False
    # Of NeMo's development branch. default; bpe_dropout: use_bpe_dropout; var_bpe: at least 8 segmentations;
    # case_insensitive: at least 8 segmentations, with ignore_case.
    bpe_mode: str = "default"
    # Of NeMo's development branch; without effect here: all segmentations of a phrase are paid alike.
    var_bpe_scoring_temp: float = 10.0
    # Of NeMo's development branch; without effect here.
    var_bpe_penalize_subsplits: bool = True
    # Number of these segmentations, including the tokenizer's own; enumerated, fewest pieces first.
    num_of_transcriptions: int = 5
    # Sampling parameter of NeMo's segmentations; without effect here, because all are enumerated.
    bpe_alpha: float = 0.3
    # Token sequences boosted per phrase and spelling. With refund "full" each has the same total
    # bonus as the tokenizer's own segmentation, however many pieces it has.
    segmentations: int = 1
    # Boost the phrase as written, in lower case, in upper case and with capital initials.
    ignore_case: bool = False
    # full: bonuses of unfinished phrases are taken back exactly; nemo: the weights of NeMo 2.7 and 3.0 to the bit, all
    # >= 0.
    refund: str = "full"
    # False: each token counts for one phrase, and a phrase that begins inside a complete phrase and ends
    # after it earns no bonus. True: all phrases count, even where they overlap in the text. Use True for
    # lists with overlapping parts ("new york", "york city"). In lists of digit strings, one more digit after
    # a listed number often completes another number; with True its bonus then inserts words. Without
    # overlaps the results are equal. None: False with refund "full". Word graphs count all phrases.
    overlapping: bool | None = None
    # A phrase earns its bonus only if it ends at the end of a word: "ann" counts in "ann's" but not in
    # "anna". With "char" vocabularies it must also begin at the beginning of a word; other vocabularies
    # mark the beginnings of words. More than 64 different bonuses are rounded, by at most 0.2 % of their
    # median. None: True with refund "full", False with refund "nemo".
    whole_words: bool | None = None
    # Least probability of a phrase in a result, 0 .. 1; 0: no limit. The probability is the smallest posterior of
    # its tokens. Phrases below it are withdrawn: the utterance is decoded again with the phrases above it only.
    # `tune false_phrases_per_hour=1` finds a value; 0.0001 is typical. Not for model_path.
    ac_threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("key_phrases_list", "key_phrase_items_list"):
            if isinstance(getattr(self, name), str | Mapping):
                raise FieldError(name, getattr(self, name), "a list of phrases")
        object.__setattr__(self, "key_phrases_list", _freeze(self.key_phrases_list))
        object.__setattr__(self, "key_phrase_items_list", _freeze(self.key_phrase_items_list))
        for name in ("context_score", "depth_scaling", "score_per_phrase"):
            check_number(name, getattr(self, name))
        check_number("unk_score", self.unk_score, negative=True)
        for name in ("segmentations", "num_of_transcriptions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FieldError(name, value, "at least 1")
        check_choice("refund", self.refund, REFUNDS)
        check_choice("bpe_mode", self.bpe_mode, BPE_MODES)
        check_number("ac_threshold", self.ac_threshold)
        if self.ac_threshold > 1 or (self.ac_threshold and self.model_path):
            note = "with model_path, which names no phrases" if self.model_path else ""
            raise FieldError("ac_threshold", self.ac_threshold, "0" if self.model_path else "0 .. 1", note)
        for name in ("whole_words", "overlapping"):
            if not isinstance(getattr(self, name), bool | None):
                raise FieldError(name, getattr(self, name), "True, False or None")
        self._check_without_effect()

    def _check_without_effect(self) -> None:
        reasons = {
            "final_eos_score": "only attention decoders have an end-of-sentence token to boost",
            "bpe_alpha": "segmentations are enumerated, not sampled",
            "var_bpe_scoring_temp": "all segmentations of a phrase are paid alike",
            "var_bpe_penalize_subsplits": "all segmentations of a phrase are paid alike",
        }
        if not self.drops_pieces:
            reasons["num_of_transcriptions"] = "use_bpe_dropout is False; set it, or use segmentations"
        defaults = {f.name: f.default for f in fields(self)}
        for name, reason in reasons.items():
            if getattr(self, name) != defaults[name]:
                note = f", which has no effect here: {reason}"
                raise FieldError(name, getattr(self, name), f"{defaults[name]!r}", note)
        if self.refund != "full" or self.model_path:
            # None, and the value that describes NeMo's trees
            for name, nemo in (("whole_words", False), ("overlapping", True)):
                if getattr(self, name) not in (None, nemo):
                    note = ", which has no effect with refund 'nemo' and on trees made by NeMo (model_path)"
                    raise FieldError(name, not nemo, f"None or {nemo}", note)

    @property
    def is_empty(self) -> bool:
        """Whether the config has no source of phrases."""
        return not self._sources()

    def _sources(self) -> list[str]:
        names = ("model_path", "key_phrases_file", "key_phrases_list", "key_phrase_items_list")
        return [name for name in names if getattr(self, name)]

    @property
    def checks_word_boundary(self) -> bool:
        """Whether bonuses are taken back if the next token continues the word."""
        return self.refund == "full" and self.whole_words is not False

    @property
    def drops_pieces(self) -> bool:
        """Whether `num_of_transcriptions` segmentations are boosted."""
        return self.use_bpe_dropout or self.bpe_mode == "bpe_dropout"

    @property
    def is_case_ignored(self) -> bool:
        return self.ignore_case or self.bpe_mode == "case_insensitive"

    @property
    def sequences_per_spelling(self) -> int:
        more = self.num_of_transcriptions if self.drops_pieces else 1
        is_var = self.bpe_mode in ("var_bpe", "case_insensitive")
        return max(self.segmentations, more, VAR_BPE_SEGMENTATIONS if is_var else 1)


def load_boosting_tree(config: BoostingConfig, vocabulary: Vocabulary) -> BackoffAutomaton:
    """The boosting tree that a config describes: its model file, phrase file or phrase lists.

    Raises:
        ValueError: no or several sources of phrases; a phrase cannot be spelled; a damaged file.
    """
    sources = config._sources()
    is_lists = set(sources) <= {"key_phrases_list", "key_phrase_items_list"}
    if not sources:
        raise ValueError("no phrases: set model_path, key_phrases_file or key_phrases_list")
    if len(sources) > 1 and not is_lists:
        raise ValueError(f"phrases come from {' and '.join(sources)}, expected one source")
    if is_lists:
        phrases = [*(config.key_phrases_list or ()), *(config.key_phrase_items_list or ())]
        return _build_cached(tuple(phrases), vocabulary, config, "phrase list")
    path = config.model_path or config.key_phrases_file
    assert path is not None
    if config.model_path and not Path(path).exists():
        raise FileNotFoundError(f"model_path {path} does not exist; to build a tree from phrases leave model_path out")
    key = ("boosting file", file_key(path), vocabulary, config)
    return cached(key, partial(_load_file, path, vocabulary, config))


def build_boosting_tree(
    phrases: Iterable[str | Phrase], vocabulary: Vocabulary, config: BoostingConfig | None = None
) -> BackoffAutomaton:
    """Build the boosting tree of phrases; `context_graph.py` defines the weights.

    Blank and duplicate phrases are skipped with one warning. Duplicates keep the largest weight.
    Results are cached.

    Raises:
        ValueError: no phrases are left; a phrase has a character that is not in the vocabulary; a phrase
            has a negative weight with refund "nemo"; the config names phrases, too.
    """
    config = config or BoostingConfig()
    if isinstance(phrases, str | Mapping):
        raise ValueError(f"phrases is a {type(phrases).__name__}, expected a list of phrases")
    if not config.is_empty:
        raise ValueError(f"config has {config._sources()[0]} besides the phrases given, expected one source")
    return _build_cached(_freeze(phrases) or (), vocabulary, config, "phrase list")


def _freeze(items: Iterable[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(item if isinstance(item, str) else as_phrase(item) for item in items)


def _load_file(path: str, vocabulary: Vocabulary, config: BoostingConfig) -> BackoffAutomaton:
    if config.model_path:
        return load_nemo_automaton(path, len(vocabulary), with_final_weights=False)
    return _build(tuple(read_phrases(path)), vocabulary, config, fspath(path))


def _build_cached(
    phrases: tuple[Any, ...], vocabulary: Vocabulary, config: BoostingConfig, name: str
) -> BackoffAutomaton:
    key = ("boosting", phrases, vocabulary, config)
    return cached(key, partial(_build, phrases, vocabulary, config, name))


def _build(phrases: tuple[Any, ...], vocabulary: Vocabulary, config: BoostingConfig, name: str) -> BackoffAutomaton:
    kept = without_repetitions([as_phrase(phrase) for phrase in phrases], name)
    aliases = aliases_of(kept, name, config.is_case_ignored)
    space = vocabulary.space if config.checks_word_boundary else None
    sequences: list[ScoredSequence] = []
    texts: list[str] = []
    faults: list[str] = []
    for phrase in spelled_phrases(kept, lambda phrase: can_spell(phrase, vocabulary, config)):
        try:
            sequences += _sequences(phrase, vocabulary, config, space)
        except ValueError as error:
            faults.append(str(error))
        texts += [aliases.written(phrase.text) if aliases else phrase.text] * (len(sequences) - len(texts))
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ValueError(f"{name}: {'; '.join(faults[:_SHOWN])}{more}")
    is_continuation = word_continuations(vocabulary) if config.checks_word_boundary else None
    build = partial(
        build_context_graph,
        vocab_size=len(vocabulary),
        unk_score=config.unk_score,
        refund=config.refund,
        overlapping=bool(config.overlapping),
        uniform_weights=config.uniform_weights,
        is_continuation=is_continuation,
        label_before=space,
        name=name,
    )
    keys = [tuple(map(int, sequence.tokens)) for sequence in sequences]
    table = PhraseTable(sequences, keys, texts, build, is_continuation, space)
    return replace(BoostingTree.of(table, config.ac_threshold), aliases=aliases)


def can_spell(phrase: Phrase, vocabulary: Vocabulary, config: BoostingConfig) -> bool:
    """Whether the vocabulary has all characters of a phrase."""
    try:
        vocabulary.segmentations(phrase.text, 1, config.is_case_ignored, phrase.lang or config.source_lang)
    except ValueError:
        return False
    return True


def _sequences(
    phrase: Phrase, vocabulary: Vocabulary, config: BoostingConfig, space: int | None
) -> list[ScoredSequence]:
    """The token sequences of one phrase with their scores, the tokenizer's own first.

    If the vocabulary has a `space` token, it comes first in a phrase that begins with a word.
    """
    weight = weight_of(phrase)
    if weight < 0 and config.refund != "full":
        note = f"with refund '{config.refund}'"
        raise FieldError(f"weight of phrase {phrase.text!r}", weight, "a number >= 0", note)
    context_score = _context_score(phrase, config)
    ends_in_word = is_word_character(phrase.text[-1])
    before = [] if space is None or not is_word_character(phrase.text[0]) else [space]
    sequences = []
    canonical_total = None
    for tokens in vocabulary.segmentations(
        phrase.text, config.sequences_per_spelling, config.is_case_ignored, phrase.lang or config.source_lang
    ):
        scores = token_scores(len(tokens), context_score, config.depth_scaling, config.uniform_weights)
        total = float(scores.sum())
        canonical_total = total if canonical_total is None else canonical_total
        if config.refund == "full" and total > 0:
            scores *= canonical_total / total
        scores = np.append(np.zeros(len(before)), weight * scores)
        sequences.append(ScoredSequence([*before, *tokens], scores, weight * context_score, ends_in_word))
    return sequences


def _context_score(phrase: Phrase, config: BoostingConfig) -> float:
    per_character = config.score_per_phrase / len(phrase.text)
    if config.refund != "full":
        per_character = round(per_character, 2)  # as NeMo: less than 0.005 becomes 0, the default score
    return per_character or config.context_score


def word_continuations(vocabulary: Vocabulary) -> np.ndarray:
    """Which pieces continue the word before them. [V] bool

        "▁new" "er"     True: the word is "newer"
        "▁new" "▁york"  False: '▁' begins the next word
        "▁new" "'s"     False, as for "-" and ",": only letters, digits and accents continue a word

    False for pieces without a text (<unk>, <s>, [CLS]) and for single bytes (<0xE2>), because their
    character is not known yet. False for characters of scripts without spaces, because a word may end
    after any of them.
    """
    mark = CONTINUATION if vocabulary.kind == "wpe" else ""
    pieces = vocabulary.pieces
    if vocabulary.kind == "byte_bpe":  # 'Ġ' is a letter in Unicode
        pieces = tuple("" if vocabulary.starts_word(i) else vocabulary.text([i]) for i in range(len(vocabulary)))
    return np.array(
        [piece.startswith(mark) and is_word_character(piece[len(mark) : len(mark) + 1]) for piece in pieces], bool
    )
