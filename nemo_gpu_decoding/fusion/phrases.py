"""Phrases to boost, their files and their aliases."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from typing import Any
from unicodedata import normalize

from nemo_gpu_decoding.checks import MOST_FAULTS, FieldError, check_number, leave_out
from nemo_gpu_decoding.fusion.aliases import Aliases
from nemo_gpu_decoding.text_file import read_lines

logger = logging.getLogger("nemo_gpu_decoding")

LARGE_WEIGHT = 5.0
# "phrase :2.0" of sherpa-onnx, "phrase 2.0", "phrase,2.0"
_OTHER_FORMAT = re.compile(r"(?P<text>.*\S)(?:\s:(?P<weight>\d+(?:\.\d+)?)|(?:\s|,\s*)\d+\.\d+)")


@dataclass(frozen=True)
class Phrase:
    """A phrase to boost or, with a negative weight, to penalise.

    A partial match of a phrase gets part of its bonus. Only a complete match gets a penalty.

    Raises:
        FieldError: the weight is no finite number, lang is no text, or aliases are no list of texts.
    """

    text: str
    weight: float | None = None  # multiplies the phrase's bonus; None = 1, < 0: a penalty
    lang: str | None = None  # for aggregate tokenizers; None = the config's source_lang
    aliases: tuple[str, ...] = ()  # spellings with the same weight that results show as `text`

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_number(f"weight of phrase {self.text!r}", self.weight, negative=True)
        if not isinstance(self.lang, str | None):
            raise FieldError(f"lang of phrase {self.text!r}", self.lang, "the name of a language, or None")
        aliases = () if self.aliases is None else self.aliases
        is_list = isinstance(aliases, Iterable) and not isinstance(aliases, str | Mapping)
        if not is_list or not all(isinstance(alias, str) and alias.strip() for alias in aliases):
            raise FieldError(f"aliases of phrase {self.text!r}", self.aliases, "a list of texts that are not blank")
        object.__setattr__(self, "text", normalize("NFC", self.text))
        object.__setattr__(self, "aliases", tuple(normalize("NFC", alias) for alias in aliases))


def as_phrase(item: Any) -> Phrase:
    """A Phrase from a Phrase, a text, NeMo's PhraseItem, or a mapping with the same keys."""
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


@lru_cache(maxsize=64)  # one warning for each
def warn_if_large(name: str, weight: float) -> None:
    """Warn of a weight far above the usual ones."""
    if weight > LARGE_WEIGHT:
        logger.warning(
            "%s is %g, expected at most %g: bonuses are natural logs, and larger ones insert phrases that nobody said",
            name, weight, LARGE_WEIGHT,
        )  # fmt: skip


def weight_of(phrase: Phrase) -> float:
    """The factor of the phrase's bonus; default 1."""
    return 1.0 if phrase.weight is None else phrase.weight


def read_phrases(path: str | PathLike[str]) -> list[Phrase]:
    """Read a phrase file. UTF-8.

    A line is a phrase, optionally followed by its weight and its aliases, each after a tab. The weight may be blank.
    Blank lines and duplicates are skipped with one warning, and so are lines whose weight is no finite number.

    Raises:
        ValueError: no line is left, or the file is not UTF-8; names file and line.
    """
    phrases, faults = [], []
    for number, line in enumerate(read_lines(path), 1):
        text, weight, *aliases = (part.strip() for part in f"{line}\t".split("\t"))
        try:
            phrases.append(Phrase(text, float(weight) if weight else None, None, tuple(filter(None, aliases))))
        except ValueError as error:
            faults.append(f"line {number}: {error}, expected 'phrase<tab>weight' and, after more tabs, aliases")
    leave_out(str(path), faults, len(phrases), "lines")
    return without_repetitions(phrases, str(path))


def without_repetitions(phrases: Iterable[Phrase], name: str) -> list[Phrase]:
    """Normalise white space, drop blank and duplicate phrases with one warning; raise if none are left.

    Duplicates keep the largest weight and all aliases.
    """
    kept: dict[tuple[str, str | None], Phrase] = {}
    blank = duplicate = 0
    others = []
    for phrase in phrases:
        text = " ".join(phrase.text.split())
        other_format = None if phrase.weight is not None else _OTHER_FORMAT.fullmatch(text)
        if other_format:
            others.append(text)
        if other_format and other_format["weight"]:  # of sherpa-onnx
            text, phrase = other_format["text"], replace(phrase, weight=float(other_format["weight"]))
        blank += not text
        if not text:
            continue
        own = replace(phrase, text=text, aliases=tuple(" ".join(alias.split()) for alias in phrase.aliases))
        other = kept.get((text, phrase.lang))
        duplicate += other is not None
        if other is not None:
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
        raise ValueError(f"{name} has no phrases, expected at least one")
    return list(kept.values())


def spelled_phrases(phrases: Iterable[Phrase], can_spell: Callable[[Phrase], bool]) -> list[Phrase]:
    """All texts that a search can find: the phrases and, with the same weight, their aliases.

    A phrase that cannot be spelled is left out if it has aliases: it is a written form only. Of equal texts, that with
    the largest weight is kept.
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
    """What results show for the aliases of phrases; None without aliases.

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
