"""Phrase boosting: build a boosting tree from phrases and NeMo's `boosting_tree` options.

    tree = build_boosting_tree(["NVIDIA", Phrase("New York", weight=2.0)], vocabulary)
    Fusion(boosting=tree, boosting_weight=1.0)

Phrases are matched as token sequences. "ann" earns no bonus in "anna", even if the tokens of "anna" begin with the
tokens of "ann", unless `whole_words` is False or `refund` is "nemo".

A `BoostingTree` keeps its phrases, finds phrases in a hypothesis, and builds trees for subsets of phrases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.cache import cached, file_key
from nemo_gpu_decoding.checks import FieldError, check_kind, given_or_default, leave_out, warn_once
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence, build_context_graph, token_scores
from nemo_gpu_decoding.fusion.default_bonuses import class_bonuses, weight_of_list
from nemo_gpu_decoding.fusion.ngram import load_nemo_automaton
from nemo_gpu_decoding.fusion.phrases import (
    Phrase,
    aliases_of,
    as_phrase,
    is_word_character,
    read_phrases,
    spelled_phrases,
    warn_if_large,
    weight_of,
    without_repetitions,
)
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import CONTINUATION, OTHER_CASE, Vocabulary

SOURCES = ("model_path", "key_phrases_file", "key_phrases_list", "key_phrase_items_list")  # of phrases
VAR_BPE_SEGMENTATIONS = 8  # of modes in which NeMo boosts every segmentation
_PAID_ALIKE = "all segmentations of a phrase are paid alike"


@checked_options
@dataclass(frozen=True)
class BoostingConfig:
    """The fields of NeMo's `BoostingTreeModelConfig`, followed by options of this package. Scores are natural log.

    Raises:
        ValueError: a value is out of range or has no effect here.
    """

    # A file with a boosting tree of NeMo. It excludes `key_phrases_file` and the two lists of phrases.
    model_path: str | None = None
    # A text file of phrases: one per line, optionally followed by its weight and its aliases, each after a tab.
    key_phrases_file: str | None = None
    # A list of phrases, in addition to those of `key_phrase_items_list`.
    key_phrases_list: Sequence[str | Phrase] | None = None
    # A list of items: Phrase, or anything with phrase, lang and, if need be, weight (or alpha)
    # and aliases.
    key_phrase_items_list: Sequence[Any] | None = None
    # Bonus of the first token of a phrase, >= 0.
    context_score: float = option(1.0, low=0)
    # Token n > 1 of a phrase gets context_score * depth_scaling + log(n); >= 0. No effect on bonuses from an LM.
    depth_scaling: float = option(2.0, low=0)
    # Weight of a token that neither continues nor begins a phrase.
    unk_score: float = option(0.0)
    # Bonus of the end-of-sentence token of attention decoders; without effect for CTC, RNN-T and TDT.
    final_eos_score: float = option(1.0, unused="only attention decoders have an end-of-sentence token to boost")
    # If not 0, the context_score of a phrase is score_per_phrase / number of the phrase's characters.
    score_per_phrase: float = option(0.0, low=0)
    # Language of the phrases for aggregate tokenizers.
    source_lang: str = "en"
    # Ignored: this package does not use Triton.
    use_triton: bool | None = True
    # Every token gets context_score, without depth scaling (as in Icefall).
    uniform_weights: bool = False
    # Boost num_of_transcriptions segmentations of a phrase: the same as segmentations=5.
    use_bpe_dropout: bool = False
    # A key of NeMo's development branch: default; bpe_dropout: use_bpe_dropout; var_bpe: at least 8 segmentations;
    # case_insensitive: at least 8 segmentations, with ignore_case.
    bpe_mode: str = option("default", choices=("default", "bpe_dropout", "var_bpe", "case_insensitive"))
    # A key of NeMo's development branch without effect: all segmentations of a phrase have the same bonus.
    var_bpe_scoring_temp: float = option(10.0, unused=_PAID_ALIKE)
    # A key of NeMo's development branch without effect.
    var_bpe_penalize_subsplits: bool = option(True, unused=_PAID_ALIKE)
    # Number of segmentations with use_bpe_dropout: the tokenizer's segmentation, then those with the fewest pieces.
    num_of_transcriptions: int = option(5, low=1)
    # Sampling parameter of NeMo's segmentations; without effect here, because all are enumerated.
    bpe_alpha: float = option(0.3, unused="segmentations are enumerated, not sampled")
    # Number of token sequences that are boosted per phrase and spelling. With refund "full" each has the same total
    # bonus as the tokenizer's own segmentation, however many pieces it has.
    segmentations: int = option(1, low=1)
    # Boost the phrase as written, in lower case, in upper case and with capital initials.
    ignore_case: bool = False
    # full: unfinished phrases lose their bonus exactly; nemo: the weights of NeMo 2.7 and 3.0 to the bit, all >= 0.
    refund: str = option("full", choices=("full", "nemo"))
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
    # Least evidence of a phrase in a result, 0 .. 1; 0: no limit. The evidence is the smallest posterior of
    # its tokens. If phrases have less evidence, the utterance is decoded again without them.
    # `tune false_phrases_per_hour=1` finds a value; 0.0001 is typical. Not for model_path.
    ac_threshold: float = option(0.0, low=0)
    # Share of words from the list, if an LM sets the bonuses: (0, 1]. The LM is one over tokens, and there is no
    # boosting weight.
    phrase_share: float = option(0.03, above=0, high=1)

    def check_rules(self) -> None:
        for name in ("key_phrases_list", "key_phrase_items_list"):
            if _is_no_list(phrases := getattr(self, name)):
                raise FieldError(name, phrases, "a list of phrases")
            object.__setattr__(self, name, _freeze(phrases))
        warn_if_large("context_score", self.context_score)
        if self.ac_threshold > 1 or (self.ac_threshold and self.model_path):
            note = "with model_path, which names no phrases" if self.model_path else ""
            raise FieldError("ac_threshold", self.ac_threshold, "0" if self.model_path else "0 .. 1", note)
        self._check_without_effect()

    def _check_without_effect(self) -> None:
        if not self.drops_pieces and self.num_of_transcriptions != BoostingConfig.num_of_transcriptions:
            note = ", which has no effect here: use_bpe_dropout is False; set it, or use segmentations"
            default = BoostingConfig.num_of_transcriptions
            raise FieldError("num_of_transcriptions", self.num_of_transcriptions, repr(default), note)
        if self.phrase_share != BoostingConfig.phrase_share and not self.suits_lm:
            note = ", which has no effect with model_path, score_per_phrase, uniform_weights and refund 'nemo'"
            raise FieldError("phrase_share", self.phrase_share, repr(BoostingConfig.phrase_share), note)
        if self.refund != "full" or self.model_path:
            # None, and the value that describes NeMo's trees
            for name, nemo in (("whole_words", False), ("overlapping", True)):
                if getattr(self, name) not in (None, nemo):
                    note = ", which has no effect with refund 'nemo' and on trees made by NeMo (model_path)"
                    raise FieldError(name, not nemo, f"None or {nemo}", note)

    @property
    def is_empty(self) -> bool:
        """Return whether this config names no model file, phrase file or phrase list."""
        return not self._sources()

    def of_list(self, phrases: Any) -> BoostingConfig:
        """Return a copy of this config with other phrases."""
        sources: dict[str, Any] = dict.fromkeys(SOURCES) | {"key_phrases_list": phrases}
        return replace(self, **sources)

    def _sources(self) -> list[str]:
        return [name for name in SOURCES if getattr(self, name)]

    @property
    def listed(self) -> tuple[Any, ...]:
        """Return the phrases of both lists."""
        return (*(self.key_phrases_list or ()), *(self.key_phrase_items_list or ()))

    @property
    def checks_word_boundary(self) -> bool:
        """Return whether a phrase loses its bonus if the next token continues its last word."""
        return self.refund == "full" and self.whole_words is not False

    @property
    def suits_lm(self) -> bool:
        """Return whether the default bonuses may come from an LM: the options name no others."""
        others = self.model_path or self.score_per_phrase or self.uniform_weights
        return self.refund == "full" and not others

    @property
    def drops_pieces(self) -> bool:
        """Return whether each phrase is boosted in several segmentations, up to `num_of_transcriptions`."""
        return self.use_bpe_dropout or self.bpe_mode == "bpe_dropout"

    @property
    def is_case_ignored(self) -> bool:
        return self.ignore_case or self.bpe_mode == "case_insensitive"

    @property
    def sequences_per_spelling(self) -> int:
        more = self.num_of_transcriptions if self.drops_pieces else 1
        is_var = self.bpe_mode in ("var_bpe", "case_insensitive")
        return max(self.segmentations, more, VAR_BPE_SEGMENTATIONS if is_var else 1)


def load_boosting_tree(
    config: BoostingConfig, vocabulary: Vocabulary, lm: BackoffAutomaton | None = None
) -> BackoffAutomaton:
    """Return the boosting tree that a config describes: its model file, phrase file or phrase lists.

    Args:
        lm: an LM over tokens that settles the bonuses (`default_bonuses.py`); None: NeMo's formula does.

    Raises:
        ValueError: there is no source of phrases or more than one; a phrase cannot be spelled; a file is damaged.
    """
    sources, lm = config._sources(), lm if config.suits_lm else None
    path = config.model_path or config.key_phrases_file
    if not sources:
        raise ValueError("no phrases: set model_path, key_phrases_file or key_phrases_list")
    if len(sources) > 1 and path:
        raise ValueError(f"phrases come from {' and '.join(sources)}, expected one source")
    if not path:
        return _build_cached(config.listed, vocabulary, config, lm)
    if config.model_path and not Path(path).exists():
        raise FileNotFoundError(f"model_path {path} does not exist; to build a tree from phrases leave model_path out")
    key = ("boosting file", file_key(path), vocabulary, config, lm and lm.fingerprint)
    if config.model_path:
        return cached(key, partial(load_nemo_automaton, path, len(vocabulary), with_final_weights=False))
    return cached(key, lambda: _build(tuple(read_phrases(path)), vocabulary, config, lm, fspath(path)))


def build_boosting_tree(
    phrases: Iterable[str | Phrase],
    vocabulary: Vocabulary,
    config: BoostingConfig | None = None,
    lm: BackoffAutomaton | None = None,
) -> BackoffAutomaton:
    """Build the boosting tree of phrases, with the weights that `context_graph.py` defines.

    Blank and duplicate phrases are skipped with one warning. Duplicates keep the largest weight. Results are cached.

    Args:
        lm: an LM over tokens that settles the bonuses, for a boosting weight of 1 (`default_bonuses.py`).

    Raises:
        ValueError: no phrases are left; a phrase has a character that is not in the vocabulary; a phrase
            has a negative weight with refund "nemo"; the config names phrases, too.
    """
    config = given_or_default("config", config, BoostingConfig)
    check_kind("vocabulary", vocabulary, Vocabulary)
    if _is_no_list(phrases):
        raise ValueError(f"phrases is a {type(phrases).__name__}, expected a list of phrases")
    if not config.is_empty:
        raise ValueError(f"config has {config._sources()[0]} besides the phrases given, expected one source")
    if lm is not None and not config.suits_lm:
        raise FieldError("lm", lm, "None with score_per_phrase, uniform_weights and refund 'nemo'")
    if lm is None and config.phrase_share != BoostingConfig.phrase_share:
        raise FieldError("phrase_share", config.phrase_share, repr(BoostingConfig.phrase_share), "without lm")
    return _build_cached(_freeze(phrases) or (), vocabulary, config, lm)


def _is_no_list(items: Any) -> bool:
    return isinstance(items, str | Mapping) or not isinstance(items, Iterable | None)


def _freeze(items: Iterable[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(item if isinstance(item, str) else as_phrase(item) for item in items)


def _build_cached(
    phrases: tuple[Any, ...], vocabulary: Vocabulary, config: BoostingConfig, lm: BackoffAutomaton | None
) -> BackoffAutomaton:
    key = ("boosting", phrases, vocabulary, config, lm and lm.fingerprint)
    return cached(key, partial(_build, phrases, vocabulary, config, lm, "phrase list"))


def _build(
    phrases: tuple[Any, ...], vocabulary: Vocabulary, config: BoostingConfig, lm: BackoffAutomaton | None, name: str
) -> BackoffAutomaton:
    kept = without_repetitions([as_phrase(phrase) for phrase in phrases], name)
    aliases = aliases_of(kept, name, config.is_case_ignored)
    space = vocabulary.space if config.checks_word_boundary else None
    sequences: list[ScoredSequence] = []
    texts: list[str] = []
    faults: list[str] = []
    for phrase in spelled_phrases(kept, lambda phrase: can_spell(phrase, vocabulary, config)):
        try:
            sequences += _sequences(phrase, vocabulary, config, space)
        except FieldError:
            raise
        except ValueError as error:
            faults.append(str(error))
        texts += [aliases.written(phrase.text) if aliases else phrase.text] * (len(sequences) - len(texts))
    leave_out(name, faults, len(set(texts)))
    if lm is not None:
        sequences = class_bonuses(sequences, lm, config.phrase_share, len(set(texts)))
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
    table = PhraseTable(sequences, keys, texts, build, is_continuation, space, lm is not None)
    return replace(BoostingTree.of(table, config.ac_threshold), aliases=aliases)


def weight_of_tree(weight: float | None, tree: BackoffAutomaton | None, num_phrases: int | None = None) -> float:
    """Return `weight` or, if it is None, the default: 1 for bonuses of an LM, else that of the number of phrases.

    Args:
        num_phrases: None: that of the tree, or 300 if the tree does not name its phrases.
    """
    table = tree.table if isinstance(tree, BoostingTree) else None
    if weight is None and table and table.of_lm:
        return 1.0
    return weight_of_list(weight, num_phrases or (len(set(table.texts)) if table else 300))


def can_spell(phrase: Phrase, vocabulary: Vocabulary, config: BoostingConfig) -> bool:
    """Return whether the tokens of the vocabulary can spell a phrase."""
    try:
        _segmentations(phrase, vocabulary, config, 1)
    except ValueError:
        return False
    return True


def _segmentations(phrase: Phrase, vocabulary: Vocabulary, config: BoostingConfig, limit: int) -> list[list[int]]:
    """Return `Vocabulary.segmentations` of a phrase; if the pieces lack its letter case, use another letter case."""
    language = phrase.lang or config.source_lang
    try:
        return vocabulary.segmentations(phrase.text, limit, config.is_case_ignored, language)
    except ValueError:
        sequences = vocabulary.segmentations(phrase.text, limit, True, language)
        warn_once(OTHER_CASE)
        return sequences


def _sequences(
    phrase: Phrase, vocabulary: Vocabulary, config: BoostingConfig, space: int | None
) -> list[ScoredSequence]:
    """Return the token sequences that spell one phrase, with bonuses per token; the tokenizer's sequence comes first.

    If the vocabulary has a `space` token, sequences begin with it if the phrase begins with a word.
    """
    weight = weight_of(phrase)
    if weight < 0 and config.refund != "full":
        note = f"with refund '{config.refund}'"
        raise FieldError(f"weight of phrase {phrase.text!r}", weight, "a number >= 0", note)
    per_character = config.score_per_phrase / len(phrase.text)
    if config.refund != "full":
        per_character = round(per_character, 2)  # as NeMo: less than 0.005 becomes 0, the default score
    context_score = per_character or config.context_score
    ends_in_word = is_word_character(phrase.text[-1])
    before = [] if space is None or not is_word_character(phrase.text[0]) else [space]
    sequences = []
    canonical_total = None
    for tokens in _segmentations(phrase, vocabulary, config, config.sequences_per_spelling):
        scores = token_scores(len(tokens), context_score, config.depth_scaling, config.uniform_weights)
        total = float(scores.sum())
        canonical_total = total if canonical_total is None else canonical_total
        if config.refund == "full" and total > 0:
            scores *= canonical_total / total
        scores = np.append(np.zeros(len(before)), weight * scores)
        sequences.append(ScoredSequence([*before, *tokens], scores, weight * context_score, ends_in_word))
    return sequences


def word_continuations(vocabulary: Vocabulary) -> np.ndarray:
    """Return whether each piece continues the word before it, [V] bool.

        "▁new" "er"     True: the word is "newer"
        "▁new" "▁york"  False: '▁' begins the next word
        "▁new" "'s"     False, as for "-" and ",": only letters, digits and accents continue a word

    The value is False for pieces without a text (<unk>, <s>, [CLS]) and for single bytes (<0xE2>), whose
    character is not known yet. The value is False for characters of scripts without spaces too, because a
    word may end after any of them.
    """
    mark = CONTINUATION if vocabulary.kind == "wpe" else ""
    pieces = vocabulary.pieces
    if vocabulary.kind == "byte_bpe":  # 'Ġ' is a letter in Unicode
        pieces = tuple("" if vocabulary.starts_word(i) else vocabulary.text([i]) for i in range(len(vocabulary)))
    return np.array(
        [piece.startswith(mark) and is_word_character(piece[len(mark) : len(mark) + 1]) for piece in pieces], bool
    )


# -------------------------------------------------------------------------- trees with their phrases


Key = tuple[Hashable, ...]
_NUMBER = ...  # no unit; a copy of a tree has the same object


class PhraseTable(NamedTuple):
    """The token sequences with a bonus in a boosting tree, and the phrase and labels of each sequence."""

    sequences: Sequence[ScoredSequence]
    keys: Sequence[Key]  # units that a hypothesis has for each sequence: labels, for word graphs words
    texts: Sequence[str]  # phrase of each sequence
    build: Callable[[Sequence[ScoredSequence]], BackoffAutomaton]
    is_continuation: np.ndarray | None = None  # as in `build_context_graph`, as `label_before`
    label_before: int | None = None
    of_lm: bool = False  # whether the bonuses come from an LM, for a boosting weight of 1


@dataclass(frozen=True, eq=False, kw_only=True)
class BoostingTree(BackoffAutomaton):
    """An automaton that adds bonuses for phrases to a search, with a table of the phrases."""

    table: PhraseTable
    ac_threshold: float = 0.0  # least evidence of a phrase in a result, 0 .. 1

    @classmethod
    def of(cls, table: PhraseTable, ac_threshold: float) -> BoostingTree:
        """Build the boosting tree of all sequences in a table."""
        tree = table.build(table.sequences)
        fields = (tree.arrays, tree.vocab_size, tree.start_state, tree.name)
        return cls(*fields, table=table, ac_threshold=ac_threshold)

    def only(self, keys: Collection[Key]) -> BoostingTree | None:
        """Return a tree of the phrases with these keys and of all penalties, or None if there are none."""
        numbers, penalties = self._numbers
        kept = sorted([*penalties, *(n for key in keys for n in numbers.get(key, ()))])
        if not kept:
            return None
        chosen: Any = [[column[n] for n in kept] for column in self.table[:3]]
        table = self.table._replace(sequences=chosen[0], keys=chosen[1], texts=chosen[2])
        tree = table.build(table.sequences)
        return replace(self, arrays=tree.arrays, start_state=tree.start_state, table=table)

    def occurrences(self, units: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
        """Yield the boosted phrases in a hypothesis from left to right, without phrases inside longer phrases.

        Args:
            units: labels or words of the hypothesis.

        Yields:
            number of the sequence in the tree; its first unit; one past its last unit.
        """
        before, sequences, trie, continues = self.table.label_before, self.table.sequences, self._trie, self._continues
        shift = 0 if before is None else 1
        read = (*[before] * shift, *units)
        covered, count = 0, len(read)
        for begin, first in enumerate(read):
            node = trie.get(first)
            if node is None:
                continue
            matches, end = [], begin + 1
            while type(node) is dict:
                if covered < end and _NUMBER in node:
                    matches.append((node[_NUMBER], end))
                node = node.get(read[end]) if end < count else None
                end += 1
            if node is not None:
                key, number = node
                end = begin + len(key)
                if covered < end and read[begin:end] == key:
                    matches.append((number, end))
            for number, end in reversed(matches):
                if end < count and continues and continues[read[end]] and sequences[number].ends_in_word:
                    continue
                yield number, max(0, begin - shift), end - shift
                covered = end
                break

    @property
    def num_phrases(self) -> int:
        """Return the number of distinct phrases, without penalties."""
        return len(self._numbers[0])

    @property
    def longest(self) -> int:
        """Return the length of the longest phrase, in labels or (word graphs) in words."""
        return max(map(len, self._numbers[0]), default=0)

    @cached_property
    def _numbers(self) -> tuple[dict[Key, list[int]], list[int]]:
        """Return the indices of the sequences with a bonus, grouped by key, and the indices of penalties."""
        numbers: dict[Key, list[int]] = {}
        penalties = []
        for n, (key, sequence) in enumerate(zip(self.table.keys, self.table.sequences, strict=True)):
            total = sequence.scores.sum()
            if total > 0:
                numbers.setdefault(key, []).append(n)
            elif total < 0:
                penalties.append(n)
        return numbers, penalties

    @cached_property
    def _continues(self) -> Any:
        """Return `is_continuation` as a list, which is faster to read than an array; [] for None."""
        return [] if self.table.is_continuation is None else self.table.is_continuation.tolist()

    @cached_property
    def _trie(self) -> dict[Hashable, Any]:
        """Return a trie of the phrases' units; `_NUMBER` maps to the first sequence of the phrase that ends there.

        With a trie, `occurrences` needs no look-up for each phrase length at each unit. Where only one phrase is left,
        a pair (key, sequence) replaces nested dictionaries, which exceed the CPU's caches for long lists.
        """
        trie: dict[Hashable, Any] = {}
        for key, (first, *_) in self._numbers[0].items():
            node = trie
            for depth, unit in enumerate(key, 1):
                child = node.setdefault(unit, (key, first))
                if type(child) is tuple and child[0] is not key:  # two keys: the older one moves down
                    older, number = child
                    child = node[unit] = {_NUMBER: number} if len(older) == depth else {older[depth]: child}
                if type(child) is tuple:
                    break
                node = child
            else:
                node[_NUMBER] = first
        return trie
