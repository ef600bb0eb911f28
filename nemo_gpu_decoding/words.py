"""Divide texts into words: at spaces and, in scripts without spaces such as Japanese and Thai, at characters."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache

# prefixes of the Unicode names of their characters
_SCRIPTS_WITHOUT_SPACES = (
    "CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "TIBETAN", "KHMER", "MYANMAR",
)  # fmt: skip
# marks a word without a space before it, where NeMo joins texts by spaces
JOINT = "\N{WORD JOINER}"
_STACKING = "\u17d2\u1039"  # signs of Khmer and Burmese: the next consonant is below the one before
_BEFORE_BASE = "เแโใไເແໂໃໄ"  # vowels of Thai and Lao that are written before their consonant


@lru_cache(maxsize=4096)
def is_unspaced(character: str) -> bool:
    """Return whether a character belongs to a script without spaces between words; False for digits."""
    first = unicodedata.normalize("NFKC", character)[0]
    return unicodedata.name(first, "").startswith(_SCRIPTS_WITHOUT_SPACES) and not first.isdecimal()


def has_unspaced(text: str) -> bool:
    """Return whether a text has any character of a script without spaces between words."""
    return not text.isascii() and any(map(is_unspaced, text))


@lru_cache(maxsize=4096)
def belongs_to_last(character: str) -> bool:
    """Return whether a character is a mark or closing punctuation, which stays with the character before it."""
    first = unicodedata.normalize("NFKC", character)[0]
    return unicodedata.category(first) in ("Mn", "Mc", "Me", "Pe", "Pf", "Po")


def is_border(before: str, after: str) -> bool:
    """Return whether a word ends between two adjacent characters that no space separates."""
    is_cluster = belongs_to_last(after) or before in _STACKING or before in _BEFORE_BASE
    is_opening = unicodedata.category(before) in ("Ps", "Pi", "Zs")
    return not (is_cluster or is_opening) and (_is_beside_words(before) or _is_beside_words(after))


@lru_cache(maxsize=4096)
def _is_beside_words(character: str) -> bool:
    """Return whether a character belongs to a script without spaces, or is wide punctuation such as a bracket."""
    is_sign = unicodedata.category(character)[0] == "P" and unicodedata.east_asian_width(character) in "WF"
    return is_sign or is_unspaced(character)


def words_of(text: str) -> list[str]:
    """Return the words of a text; in scripts without spaces, each character with its marks is a word."""
    words = text.split()
    if text.isascii():
        return words
    return [part for word in words for part in divided(word)]


def divided(word: str) -> list[str]:
    """Return the words of a text that contains no spaces."""
    begins = [0, *(n for n in range(1, len(word)) if is_border(word[n - 1], word[n]))]
    return [word[begin:end] for begin, end in zip(begins, [*begins[1:], len(word)], strict=True)]


def single_spaced(text: str) -> str:
    """Return a text with single spaces between its words and no spaces around the text; bare word marks add spaces."""
    return " ".join(filter(None, text.split(" ")))


def joined(words: Sequence[str]) -> str:
    """Join words to a text, with spaces except around characters of scripts without spaces."""
    if all(map(str.isascii, words)):
        return " ".join(words)
    text = ""
    for word in words:
        has_space = text and word and not (is_unspaced(text[-1]) or is_unspaced(word[0]))
        text += f" {word}" if has_space else word
    return text
