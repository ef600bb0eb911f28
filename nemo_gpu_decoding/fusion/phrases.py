"""Read phrases to boost, phrase files and aliases, and the requests in manifests and messages of clients.

An alias is a spelling that a model recognises for a spoken phrase; results contain the phrase in its place:

    aliases = Aliases({"sasilano": "Castellano", "phi four mini": "Phi-4-mini"})
    aliases.written("sasilano's phi four mini")        # "Castellano's Phi-4-mini"

The search boosts an alias like a phrase. `Aliases` replaces the alias in the text of a result, wherever its words
occur between word boundaries, whether or not the search has added a bonus. Of several aliases that begin at the same
word, the longest is replaced. Tokens, times and scores of the result do not change.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

from nemo_gpu_decoding.checks import MOST_FAULTS, FieldError, NothingLeftError, check_number, leave_out, warn_once
from nemo_gpu_decoding.plain_text import decoded, lines_of
from nemo_gpu_decoding.schema import checked_options, option
from nemo_gpu_decoding.vocabulary import WORD_START
from nemo_gpu_decoding.words import is_unspaced, joined, words_of

logger = logging.getLogger("nemo_gpu_decoding")

LARGE_WEIGHT = 5.0
MOST_SHOWN = 80  # characters of a value in a message
# "phrase :2.0" of sherpa-onnx, perhaps with " #0.3" or " @NAME"; "phrase 2.0", "phrase,20"; CSV, JSON; sherpa's tokens
_OTHER_FORMAT = re.compile(
    r"(?P<text>.*?\S)(?:\s+[#@]\S+)*(?:\s+:|\s*\t\s*)(?P<weight>-?\d+(?:\.\d+|,\d\d?)?)(?:\s+[#@]\S+)*"
    r"|.*[^\W\d]\"?(?:[\s,;|:：=^*(\[#][\s\"=>(\[#]*-?\d+[.,]\d+|[,;|:：=^*][\s\"]*-?\d+)[\"\])]?"
    r"|.*\s[#@]\S+|[\[{]\s*\".*|.*▁.*",
    re.DOTALL,
)


@dataclass(frozen=True)
class Phrase:
    """A phrase that is boosted or, with a negative weight, penalised.

    A partial match of a phrase gets a part of the phrase's bonus. Only a complete match gets a penalty.

    Raises:
        FieldError: the weight is no finite number, lang is no text, or aliases are no list of texts.
    """

    text: str
    weight: float | None = None  # multiplies the phrase's bonus; None = 1, < 0: a penalty
    lang: str | None = None  # for aggregate tokenizers; None = the config's source_lang
    aliases: tuple[str, ...] = ()  # spellings with the same weight that results show as `text`

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise FieldError("phrase", self.text, "a text")
        if self.weight is not None:
            check_number(f"weight of phrase {self.text!r}", self.weight, negative=True)
        if not isinstance(self.lang, str | None):
            raise FieldError(f"lang of phrase {self.text!r}", self.lang, "the name of a language, or None")
        aliases = () if self.aliases is None else self.aliases
        is_list = isinstance(aliases, Iterable) and not isinstance(aliases, str | Mapping)
        if not is_list or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
            raise FieldError(f"aliases of phrase {self.text!r}", self.aliases, "a list of texts that are not blank")
        object.__setattr__(self, "text", unicodedata.normalize("NFC", self.text))
        object.__setattr__(self, "aliases", tuple(unicodedata.normalize("NFC", alias) for alias in aliases))


def as_phrase(item: Any) -> Phrase:
    """Convert a text, NeMo's PhraseItem or a mapping with its keys to a `Phrase`; return a `Phrase` unchanged."""
    if isinstance(item, Phrase):
        return item
    if isinstance(item, str):
        return Phrase(item)
    names = ("lang", "weight", "alpha", "aliases")
    if isinstance(item, Mapping):
        values = dict(item)
    else:
        values = {key: getattr(item, key) for key in ("phrase", *names) if hasattr(item, key)}
    text = values.pop("phrase", None)
    if not isinstance(text, str) or set(values) - set(names):
        expected = "a text (numbers need quotes), or the keys phrase, lang, weight and aliases"
        raise FieldError("phrase item", item, expected)
    alpha = values.pop("alpha", None)  # the weight in NeMo's development branch
    if alpha is not None:
        if values.get("weight") is not None:
            raise FieldError("phrase item", item, "weight or alpha, not both")
        values["weight"] = alpha
    return Phrase(text, **values)


def warn_if_large(name: str, weight: float) -> None:
    """Warn once of a phrase weight that is far above usual weights."""
    if weight > LARGE_WEIGHT:
        why = "bonuses are natural logs, and larger ones insert phrases that are not in the audio"
        warn_once(f"{name} is {weight:g}, expected at most {LARGE_WEIGHT:g}: {why}")


def weight_of(phrase: Phrase) -> float:
    """Return the factor of a phrase's bonus, which is 1 by default."""
    return 1.0 if phrase.weight is None else phrase.weight


def read_phrases(path: str | PathLike[str]) -> list[Phrase]:
    """Return the phrases in a UTF-8 phrase file.

    A line is a phrase, optionally followed by its weight and its aliases, each after a tab. The weight may be blank.
    Blank lines and duplicates are skipped with one warning, and so are lines that are not UTF-8 or whose weight is no
    finite number.

    Raises:
        ValueError: no line is left; the message names file and line.
    """
    phrases, faults = [], []
    for number, line in enumerate(lines_of(path), 1):
        try:
            text, weight, *aliases = (part.strip() for part in (decoded(line) + "\t").split("\t"))
            phrases.append(Phrase(text, _number(weight) if weight else None, None, tuple(filter(None, aliases))))
        except ValueError as error:
            faults.append(f"line {number}: {error}, expected 'phrase<tab>weight' and, after more tabs, aliases")
    leave_out(str(path), faults, len(phrases), "lines")
    return without_repetitions(phrases, str(path))


def _number(text: str) -> float:
    """Return the number in a text; "2,5" is 2.5."""
    return float(re.sub(r",(?=\d\d?$)", ".", text))


def without_repetitions(phrases: Iterable[Phrase], name: str) -> list[Phrase]:
    """Drop blank and repeated phrases with a warning; keep largest weight and all aliases; raise if none is left."""
    kept: dict[tuple[str, str | None], Phrase] = {}
    blank = duplicate = 0
    others = []
    for phrase in phrases:
        text, weight, aliases = phrase.text, phrase.weight, phrase.aliases
        if weight is None and (other_format := _OTHER_FORMAT.fullmatch(text.strip())):
            if "\t" not in text:
                others.append(" ".join(text.split()))
            if other_format["weight"]:
                text, weight = other_format["text"], _number(other_format["weight"])
        if WORD_START in text:
            text = "".join(text.split()).replace(WORD_START, " ")
        text = " ".join(text.split())
        first, *spellings = text.split("_")
        if first and first.replace(" ", "").lower() in (each.replace(" ", "").lower() for each in spellings):
            text, aliases = first, (*aliases, *(each for each in spellings if each != first))  # NeMo's CTC-WS
        if not text:
            blank += 1
            continue
        own = replace(phrase, text=text, weight=weight, aliases=tuple(" ".join(alias.split()) for alias in aliases))
        if other := kept.get((text, phrase.lang)):
            duplicate += 1
            heavier = other if weight_of(other) >= weight_of(own) else own
            own = replace(heavier, aliases=tuple(dict.fromkeys(other.aliases + own.aliases)))
        kept[text, phrase.lang] = own
    for heaviest in sorted(kept.values(), key=weight_of)[-1:]:
        warn_if_large(f"{name}: the weight of {heaviest.text!r}", weight_of(heaviest))
    if others:
        logger.warning(
            "%s: %s in the format of another decoder; only 'phrase :weight' is read as a weight. Expected the phrase, "
            "a tab and the weight",
            name, ", ".join(map(repr, others[:MOST_FAULTS])),
        )  # fmt: skip
    if blank or duplicate:
        logger.warning("%s: skipped %d blank and %d duplicate phrases", name, blank, duplicate)
    if not kept:
        raise NothingLeftError(f"{name} has no phrases, expected at least one")
    return list(kept.values())


def spelled_phrases(phrases: Iterable[Phrase], can_spell: Callable[[Phrase], bool]) -> list[Phrase]:
    """Return the phrases that a search boosts: the given phrases and, with the same weight, their aliases.

    A phrase that cannot be spelled is left out if it has aliases, because only the aliases are recognised. Of phrases
    with equal texts, the one with the largest weight is kept.
    """
    found: dict[tuple[str, str | None], Phrase] = {}
    for phrase in phrases:
        own = replace(phrase, aliases=())
        texts = [own] if not phrase.aliases or can_spell(own) else []
        for each in [*texts, *(replace(own, text=alias) for alias in phrase.aliases)]:
            other = found.setdefault((each.text, each.lang), each)
            if weight_of(each) > weight_of(other):
                found[each.text, each.lang] = each
    return list(found.values())


def aliases_of(phrases: Iterable[Phrase], name: str, ignore_case: bool) -> Aliases | None:
    """Return the aliases of a phrase list, which results replace by their phrases; None if there are none.

    Raises:
        ValueError: an alias belongs to two phrases, or is a phrase of its own.
    """

    def form(text: str) -> str:
        return text.lower() if ignore_case else text

    spaced = [(" ".join(phrase.text.split()), phrase.aliases) for phrase in phrases]
    owners = {form(text): text for text, _ in spaced}
    table: dict[str, str] = {}
    for text, aliases in spaced:
        for alias in (" ".join(each.split()) for each in aliases):
            owner = owners.setdefault(form(alias), text)
            if form(owner) != form(text):
                what = "a phrase itself" if form(owner) == form(alias) else f"an alias of {owner!r}"
                raise ValueError(f"{name}: the alias {alias!r} of {text!r} is {what}, expected one phrase per alias")
            table[alias] = text
    return Aliases(table, ignore_case) if table else None


class WrittenWord(NamedTuple):
    """The text that replaces the words [first, end) of a hypothesis."""

    first: int
    end: int
    text: str


@dataclass(frozen=True)
class Aliases:
    """The aliases of a phrase list, which are replaced in the texts of results.

    Args:
        phrases: alias -> the phrase that is written for it.
        ignore_case: whether an alias is replaced in any letter case.
    """

    phrases: Mapping[str, str]
    ignore_case: bool = False

    def written(self, text: str) -> str:
        """Return the text with each alias replaced by its phrase."""
        return self._replaced(text, is_open=False)

    def committed(self, text: str) -> str:
        """Return the beginning of the written form that will not change if more words follow `text`.

        The written form of every text that begins with `text` begins with the returned text.
        """
        return self._replaced(text, is_open=True).rstrip()

    def words(self, texts: Sequence[str]) -> list[WrittenWord]:
        """Return the words of a hypothesis after the replacement of aliases.

        An alias with as many words as its phrase is replaced word by word, any other alias by one `WrittenWord`.
        """
        text, begins, ends = joined(texts), [0], [0]
        for part in texts:
            begins[-1] = text.index(part, ends[-1])
            ends.append(begins[-1] + len(part))
            begins.append(len(text))
        replaced: list[WrittenWord] = []
        for begin, end, _ in self._matches(text, is_open=False):
            first, last = bisect_right(begins, begin) - 1, bisect_left(begins, end)
            if replaced and first < replaced[-1].end:  # two aliases in one word, such as "ann-bob"
                first = replaced.pop().first
            replaced.append(WrittenWord(first, last, self.written(text[begins[first] : ends[last]])))
        result, at = [], 0
        for word in [*replaced, WrittenWord(len(texts), len(texts), "")]:
            result += [WrittenWord(n, n + 1, texts[n]) for n in range(at, word.first)]
            result += _one_by_one(word)
            at = word.end
        return result

    def _replaced(self, text: str, *, is_open: bool) -> str:
        parts, at = [], 0
        for begin, end, phrase in self._matches(text, is_open=is_open):
            parts += [text[at:begin], phrase]
            at = end
        return "".join([*parts, text[at:]])

    def _matches(self, text: str, *, is_open: bool) -> Iterator[tuple[int, int, str]]:
        """Yield the begin and end (in characters) of each alias in a text, and the phrase of the alias.

        With `is_open`, the last match may be an unfinished alias at the end of the text; its phrase is "".
        """
        bounds = _bounds(text)
        units = [self._key(text[begin:end]) for begin, end in pairwise(bounds)]
        n, (first_units, most_units) = 0, self._units
        while n < len(units):
            if is_open and "".join(units[n:]) in self._beginnings:
                yield bounds[n], len(text), ""
                return
            last = min(n + most_units, len(units)) if units[n] in first_units else n
            ends = (end for end in range(last, n, -1) if "".join(units[n:end]) in self._table)
            end = next(ends, 0)
            if end:
                yield bounds[n], bounds[end], self._table["".join(units[n:end])]
            n = end or n + 1

    def _key(self, text: str) -> str:
        """Return a text in its form for comparisons: NFC, single spaces, lower case with `ignore_case`."""
        spaced = " " if text.isspace() else unicodedata.normalize("NFC", text)
        return spaced.lower() if self.ignore_case else spaced

    @cached_property
    def _table(self) -> dict[str, str]:
        return {self._key(alias): phrase for alias, phrase in self.phrases.items()}

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        """Return all prefixes of all aliases."""
        return frozenset(alias[:end] for alias in self._table for end in range(1, len(alias) + 1))

    @cached_property
    def _units(self) -> tuple[frozenset[str], int]:
        """Return the first unit (see `_bounds`) of each alias, and the largest number of units in an alias."""
        bounds = {alias: _bounds(alias) for alias in self.phrases}
        firsts = frozenset(self._key(alias[: ends[1]]) for alias, ends in bounds.items())
        return firsts, max((len(ends) - 1 for ends in bounds.values()), default=0)


def _one_by_one(written: WrittenWord) -> list[WrittenWord]:
    """Return one `WrittenWord` per word if a replacement has as many words as the replaced text."""
    first, end, text = written
    parts = words_of(text)
    if len(parts) != end - first:
        return [written] if first < end else []
    if parts:
        parts[0] = text[: len(text) - len(text.lstrip())] + parts[0]
    return [WrittenWord(first + n, first + n + 1, part) for n, part in enumerate(parts)]


def _bounds(text: str) -> list[int]:
    """Return the positions between units of a text: runs of word characters, runs of white space, single others."""
    kinds = [_kind(character) for character in text]
    begins = [n for n, kind in enumerate(kinds) if n == 0 or kind == "" or kind != kinds[n - 1]]
    return [*begins, len(text)]


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    if character.isspace():
        return "space"
    return "word" if is_word_character(character) else ""


def is_word_character(character: str) -> bool:
    """Return whether a character is a letter, digit or accent of a script with spaces; False for ""."""
    return bool(character) and unicodedata.category(character)[0] in "LNM" and not is_unspaced(character)


@checked_options
@dataclass(frozen=True)
class WrittenRequest:
    """An utterance's request as users write it, with keys of `beam`; None keeps the config's value.

    A grammar is a list of sentences, never a file. A price without tokens or sentences replaces the config's price.

    Raises:
        FieldError: a value has a wrong type or is out of range, or there are phrases beside a grammar.
    """

    phrases: Sequence[Any] | None = None  # anything for `as_phrase`, which becomes `Phrase`s
    boosting_weight: float | None = option(None, above=0)  # of these phrases, natural log
    lm: str | None = None  # a name in `lm_pool`
    allowed_scripts: tuple[str, ...] | None = None
    allowed_tokens: tuple[str, ...] | None = None
    allowed_price: float | None = option(None, low=0, infinite=True)
    grammar: tuple[str, ...] | None = None
    grammar_price: float | None = option(None, above=0, infinite=True)
    biasing_request: Mapping[str, Any] | None = None  # phrases with their options and weight, as in NeMo's manifests

    def check_rules(self) -> None:
        if not isinstance(self.phrases, list | tuple | None):
            known = "a list of texts, or of objects with phrase, and optionally weight, lang and aliases"
            raise FieldError("phrases", self.phrases, known)
        if self.phrases is not None:
            object.__setattr__(self, "phrases", tuple(map(as_phrase, self.phrases)))
        for name in ("allowed_scripts", "allowed_tokens", "grammar"):
            texts = getattr(self, name)
            is_list = isinstance(texts, list | tuple) and len(texts) > 0
            if texts is not None and not (is_list and all(isinstance(text, str) and text.strip() for text in texts)):
                what = "sentences" if name == "grammar" else "texts that are not blank"
                raise FieldError(name, texts, f"a list of {what}")
            object.__setattr__(self, name, texts and tuple(texts))
        if self.phrases and self.grammar is not None:
            raise FieldError("phrases", self.shown["phrases"], "none with a grammar, which has all sentences")
        if self.biasing_request is not None and not (self.phrases is self.grammar is None):
            raise FieldError("biasing_request", self.biasing_request, "none beside phrases or a grammar")
        if self.boosting_weight is not None and self.phrases is None:
            raise FieldError("boosting_weight", self.boosting_weight, "phrases that it is for")

    @property
    def given(self) -> dict[str, Any]:
        """Return the fields of the request that are not None, by their names."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    @property
    def shown(self) -> dict[str, Any]:
        """Return the fields that are not None for messages, where item counts replace long lists and texts."""
        return {key: _shown(value) for key, value in self.given.items()}


REQUEST_KEYS = tuple(field.name for field in fields(WrittenRequest))


def written_request(row: Mapping[str, Any]) -> WrittenRequest | None:
    """Return the request of the utterance in a manifest row, or None if the row has no key of a request.

    Raises:
        FieldError: a value is invalid; the error names its key.
    """
    given = {key: row[key] for key in REQUEST_KEYS if row.get(key) is not None}
    prices = {key: math.inf for key, value in given.items() if value == "inf"}  # JSON has no other form
    return WrittenRequest(**given | prices) if given else None


def _shown(value: Any) -> Any:
    value = [getattr(item, "text", item) for item in value] if isinstance(value, tuple) else value
    if len(repr(value)) <= MOST_SHOWN:
        return value
    what = "an object" if isinstance(value, Mapping) else "a list"
    return f"{value[:MOST_SHOWN]}..." if isinstance(value, str) else f"{what} of {len(value)}"
