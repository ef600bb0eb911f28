"""Aliases of phrases: spellings that are heard for a phrase, and written as the phrase.

    aliases = Aliases({"sasilano": "Castellano", "phi four mini": "Phi-4-mini"})
    aliases.written("sasilano's phi four mini")        # "Castellano's Phi-4-mini"

The search knows an alias as a further phrase. `Aliases` replaces it in the text of a result, wherever its words occur
between word boundaries, whether or not the search has paid a bonus for them. Of several aliases that begin at one
place, the longest is replaced. Tokens, times and scores of the result stay those of the path.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

# prefixes of the Unicode names of their characters
_SCRIPTS_WITHOUT_SPACES = (
    "CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR",
)  # fmt: skip


class WrittenWord(NamedTuple):
    """A text for the words [first, end) of a hypothesis."""

    first: int
    end: int
    text: str


@dataclass(frozen=True)
class Aliases:
    """The aliases of a list of phrases.

    Args:
        phrases: alias -> the phrase that is written for it.
        ignore_case: whether an alias is replaced in any letter case.
    """

    phrases: Mapping[str, str]
    ignore_case: bool = False

    def written(self, text: str) -> str:
        """The text with each alias replaced by its phrase."""
        return self._replaced(text, is_open=False)

    def committed(self, text: str) -> str:
        """The written form of a text that may go on, without an end that may become an alias.

        For every text that begins with `text`, its written form begins with the result.
        """
        return self._replaced(text, is_open=True).rstrip()

    def words(self, texts: Sequence[str]) -> list[WrittenWord]:
        """The words of a hypothesis with each alias replaced.

        The words of an alias become those of the phrase, one by one if there are equally many, else one `WrittenWord`.
        """
        joined = " ".join(texts)
        begins = [0]
        for text in texts:
            begins.append(begins[-1] + len(text) + 1)
        found: list[WrittenWord] = []
        for begin, end, _ in self._matches(joined, is_open=False):
            first, last = bisect_right(begins, begin) - 1, bisect_left(begins, end)
            if found and first < found[-1].end:  # two aliases in one word, such as "ann-bob"
                first = found.pop().first
            found.append(WrittenWord(first, last, self.written(joined[begins[first] : begins[last] - 1])))
        result, at = [], 0
        for each in [*found, WrittenWord(len(texts), len(texts), "")]:
            result += [WrittenWord(n, n + 1, texts[n]) for n in range(at, each.first)]
            result += _one_by_one(each)
            at = each.end
        return result

    def _replaced(self, text: str, *, is_open: bool) -> str:
        parts, at = [], 0
        for begin, end, phrase in self._matches(text, is_open=is_open):
            parts += [text[at:begin], phrase]
            at = end
        return "".join([*parts, text[at:]])

    def _matches(self, text: str, *, is_open: bool) -> Iterator[tuple[int, int, str]]:
        """Begin and end of each alias in a text, and its phrase.

        With `is_open`, the last match may be an end of the text that begins an alias; its phrase is "".
        """
        bounds = _bounds(text)
        units = [self._key(text[begin:end]) for begin, end in pairwise(bounds)]
        n = 0
        while n < len(units):
            if is_open and self._begins_alias(units[n:]):
                yield bounds[n], len(text), ""
                return
            last = min(n + self._most_units, len(units)) if units[n] in self._first_units else n
            ends = (end for end in range(last, n, -1) if "".join(units[n:end]) in self._table)
            end = next(ends, 0)
            if end:
                yield bounds[n], bounds[end], self._table["".join(units[n:end])]
            n = end or n + 1

    def _begins_alias(self, units: Sequence[str]) -> bool:
        key = "".join(units)
        if len(key) > self._longest:
            return False
        place = bisect_left(self._sorted, key)
        return place < len(self._sorted) and self._sorted[place].startswith(key)

    def _key(self, text: str) -> str:
        """The form in which texts are compared."""
        spaced = " " if text.isspace() else unicodedata.normalize("NFC", text)
        return spaced.lower() if self.ignore_case else spaced

    @cached_property
    def _table(self) -> dict[str, str]:
        return {self._key(alias): phrase for alias, phrase in self.phrases.items()}

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._table)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._table), default=0)

    @cached_property
    def _first_units(self) -> frozenset[str]:
        return frozenset(self._key(alias[: _bounds(alias)[1]]) for alias in self.phrases)

    @cached_property
    def _most_units(self) -> int:
        return max((len(_bounds(alias)) - 1 for alias in self.phrases), default=0)


def _one_by_one(written: WrittenWord) -> list[WrittenWord]:
    """Divide a written form among its words, if it has as many."""
    first, end, text = written
    parts = text.split()
    if len(parts) != end - first:
        return [written] if first < end else []
    if parts:
        parts[0] = text[: len(text) - len(text.lstrip())] + parts[0]
    return [WrittenWord(first + n, first + n + 1, part) for n, part in enumerate(parts)]


def _bounds(text: str) -> list[int]:
    """The ends of the units of a text, from 0 to its length.

    A unit is a run of word characters, a run of white space, or any other character.
    """
    kinds = [_kind(character) for character in text]
    begins = [n for n, kind in enumerate(kinds) if n == 0 or kind == "" or kind != kinds[n - 1]]
    return [*begins, len(text)]


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    if character.isspace():
        return "space"
    return "word" if is_word_character(character) else ""


def is_word_character(character: str) -> bool:
    """Whether this is a letter, digit or accent of a script with spaces between words; False for ""."""
    if not character or unicodedata.category(character)[0] not in "LNM":
        return False
    name = unicodedata.name(unicodedata.normalize("NFKC", character)[0], "")
    return not name.startswith(_SCRIPTS_WITHOUT_SPACES)
