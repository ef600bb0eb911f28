"""Convert token ids to text and words, and text to token sequences."""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from os import PathLike, fspath
from typing import Any, NamedTuple

from nemo_gpu_decoding.checks import FieldError, check_kind
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.words import has_unspaced, is_border

KINDS = ("bpe", "wpe", "char", "byte_bpe")
WORD_START = "▁"  # U+2581, SentencePiece's mark of the beginning of a word
CONTINUATION = "##"  # WordPiece's mark of a piece inside a word
SPACE_BYTE = "Ġ"  # the space before a word in byte-level BPE (GPT-2, Whisper)
OTHER_CASE = "phrases in a letter case that the model does not have are boosted in one that it has"
_SEPARATORS = (" ", "|")  # of character models; "|" is wav2vec2's
_UNKNOWN = ("<unk>", "[UNK]")
_SHOWN_OTHERWISE = {"<unk>": f"{WORD_START}⁇{WORD_START}"} | dict.fromkeys(
    ("<s>", "</s>", "<pad>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"), ""
)
_CONTROL = re.compile(r"<[^<>]+>|\[[A-Z]+\]")  # <s>, <pad>, <|en|>, [CLS]: no text
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # of bytes that are a part of one

# The 256 characters of bytes in byte-level BPE: printable bytes are the same character, others are from
# U+0100 upwards in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + n) for n, byte in enumerate(_OTHERS)
}
_BYTE_OF_CHARACTER = {character: byte for byte, character in _CHARACTER_OF_BYTE.items()}
_TYPED = str.maketrans("\u2018\u2019\u02bc\u2032\u2010\u2011\u2012\u2013\u2212", 4 * "'" + 5 * "-")
# Units that byte-level BPE never merges: English contractions, letters, digits, other characters.
_BYTE_LEVEL_UNITS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+")
# Largest share of pieces in a BPE vocabulary that are not a merge of two others.
_OTHER_PIECES = 0.01

Segmentation = list[int]


class WordSpan(NamedTuple):
    """A word and the tokens [first_token, end_token) that spell it."""

    text: str
    first_token: int
    end_token: int


class LetterCaseError(ValueError):
    """A ValueError about a text that the vocabulary has only in another letter case."""


@dataclass(frozen=True)
class Vocabulary:
    """The V text pieces of a model without the blank; the id of a piece is its position.

    `kind` defines how pieces join: "bpe" (SentencePiece: '▁' begins a word), "wpe" (WordPiece: '##' continues a word),
    "char" (characters, ' ' or '|' between words) or "byte_bpe" (GPT-2, Whisper: the
    characters are bytes, 'Ġ' is the space before a word).

    Raises:
        ValueError: there are no pieces, or the kind is unknown.
    """

    pieces: tuple[str, ...]
    kind: str
    # The model's tokenizer. None: split text by the rule of `kind`. BPE merges the pair with the lowest id;
    # WordPiece takes the longest match. See `spells_by_guess`.
    encode: Callable[[str], list[int]] | None = field(default=None, hash=False)
    # For aggregate tokenizers: one tokenizer per language, with the ids of `pieces`.
    encode_by_language: Mapping[str, Callable[[str], list[int]]] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(self.pieces))
        if not self.pieces:
            raise ValueError("pieces is empty, expected one text per token")
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, expected one of {', '.join(KINDS)}")

    def __len__(self) -> int:
        return len(self.pieces)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} {self.kind} pieces)"

    @classmethod
    def from_pieces(
        cls, pieces: Sequence[str], kind: str | None = None, encode: Callable[[str], list[int]] | None = None
    ) -> Vocabulary:
        """Create a vocabulary from pieces; if `kind` is None, their word marks ('▁', '##', ...) define it.

        Raises:
            ValueError: the pieces are no texts, or have no word marks.
        """
        texts = tuple(pieces) if isinstance(pieces, Iterable) else (pieces,)
        if not all(isinstance(text, str) for text in texts):
            raise FieldError("pieces", pieces, "a list of texts")
        return cls(texts, kind or _guess_kind(texts), encode)

    @classmethod
    def from_sentencepiece(cls, model: str | PathLike[str] | Any) -> Vocabulary:
        """Create a vocabulary from a SentencePiece model file or a loaded `SentencePieceProcessor`."""
        if isinstance(model, (str, PathLike)):
            require("sentencepiece")
            from sentencepiece import SentencePieceProcessor

            model = SentencePieceProcessor(model_file=fspath(model))
        pieces = tuple(model.id_to_piece(i) for i in range(model.get_piece_size()))
        return cls(pieces, "bpe", model.encode_as_ids)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the pieces, 16 hexadecimal digits; tokenizers with other pieces have another hash."""
        return hashlib.sha256("\n".join(self.pieces).encode()).hexdigest()[:16]

    @cached_property
    def space(self) -> int | None:
        """Return the id of the piece that separates words, if there is such a piece."""
        found = [mark for mark in _SEPARATORS if self.kind == "char" and mark in self.pieces]
        return self.pieces.index(found[0]) if found else None

    @cached_property
    def spells_by_guess(self) -> bool:
        """Return whether `tokenize` may spell words differently than the model: unigram pieces without a tokenizer.

        The ids of a BPE model are in the order of its merges: each piece merges two pieces of lower ids. A
        unigram model chooses pieces by probabilities, which the vocabulary lacks. `tokenize` then spells a word
        with the fewest pieces.
        """
        if self.encode or self.encode_by_language or self.kind != "bpe":
            return False
        others = sum(not self._is_merge(piece) for piece in self._surfaces)
        return others > _OTHER_PIECES * len(self)

    def _is_merge(self, piece: str) -> bool:
        """Return whether a piece is a single character, or consists of two pieces with lower ids."""
        ids, own = self._surfaces, self._surfaces[piece]
        return len(piece) == 1 or any(
            all(part in ids and (len(part) == 1 or ids[part] < own) for part in (piece[:i], piece[i:]))
            for i in range(1, len(piece))
        )

    # -- ids to text -----------------------------------------------------------------------------

    def text(self, ids: Sequence[int]) -> str:
        """Return the text that tokens spell, as the model's tokenizer decodes them; other ids raise a ValueError."""
        if len(ids) and not 0 <= min(ids) <= max(ids) < len(self.pieces):
            raise FieldError("ids", ids, f"numbers 0 .. {len(self) - 1}")
        if self.kind == "char":
            return "".join(self._shown(i) for i in ids)
        if self.kind == "byte_bpe":
            joined = "".join(self._shown(i) for i in ids)
            return bytes(_BYTE_OF_CHARACTER[c] for c in joined).decode("utf-8", "replace").removeprefix(" ")
        joined = "".join(self._shown(i) for i in _merge_bytes(self.pieces, ids))
        if self.kind == "wpe" or (len(ids) and self.pieces[ids[0]] not in _UNKNOWN):
            joined = joined.lstrip(WORD_START)
        return joined.replace(WORD_START, " ")

    def words(self, ids: Sequence[int]) -> list[WordSpan]:
        """Return the words that tokens spell. A token that is only a word mark belongs to the word after it.

        In scripts without spaces, a word is the text of one token: a character with its marks, or a longer piece.
        """
        spans: list[WordSpan] = []
        marks = 0  # number of textless tokens before the word
        for begin, end in (part for word in self._word_ranges(ids) for part in self._divided(ids, *word)):
            word = self.text(ids[begin:end]).strip(" ")
            if word:
                spans.append(WordSpan(word, begin - marks, end))
            marks = 0 if word or self.kind == "char" else marks + end - begin
        return spans

    def last_spoken(self, ids: Sequence[int], word: WordSpan) -> int:
        """Return the last token of a word that is no punctuation; as in NeMo's timestamps, the word ends there."""
        tokens = range(word.end_token - 1, word.first_token - 1, -1)
        return next((n for n in tokens if not _is_punctuation(self.text([ids[n]]))), tokens[0])

    def has_unspaced(self, ids: Sequence[int]) -> bool:
        """Return whether tokens spell any character of a script that is written without spaces."""
        return not self._unspaced.isdisjoint(ids) and has_unspaced(self.text(ids))

    def _word_ranges(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Return the token range of each word; a range may be empty or contain a word mark alone."""
        if self.kind == "char":
            separators = [n for n, i in enumerate(ids) if i == self.space]
            return zip([0, *(n + 1 for n in separators)], [*separators, len(ids)], strict=True)
        starts = [n for n, i in enumerate(ids) if n and self.starts_word(i)]
        return zip([0, *starts], [*starts, len(ids)], strict=True)

    def _divided(self, ids: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield token ranges of the words in a text without spaces; byte tokens of one character stay together."""
        first, at, last = begin, begin, ""  # first tokens of the word and of the character; the previous character
        for n in range(begin, begin if self._unspaced.isdisjoint(ids[begin:end]) else end):
            text = self.text(ids[at : n + 1]).strip()
            if text.endswith(_NO_CHARACTER) and n - at < 3:
                continue
            if last and text and is_border(last, text[0]):
                yield first, at
                first = at
            at, last = n + 1, text[-1:] or last
        yield first, end

    @cached_property
    def _unspaced(self) -> frozenset[int]:
        """Return the tokens with characters of scripts without spaces, or with bytes of such characters."""
        tokens = (i for i, piece in enumerate(self.pieces) if not piece.isascii() or _BYTE.fullmatch(piece))
        return frozenset(i for i in tokens if _NO_CHARACTER in (text := self.text([i])) or has_unspaced(text))

    def _shown(self, piece: int | str) -> str:
        """Return the text of a piece, in which '▁' stands for the space before a word."""
        text = piece if isinstance(piece, str) else self.pieces[piece]
        if self.kind == "byte_bpe":
            return "" if _is_control(text) or not _BYTE_OF_CHARACTER.keys() >= set(text) else text
        if self.kind == "char":
            is_silent = _SHOWN_OTHERWISE.get(text) == ""
            return "" if is_silent else " " if piece == self.space else text
        if text in _SHOWN_OTHERWISE:
            return _SHOWN_OTHERWISE[text]
        if self.kind == "wpe":
            return text[len(CONTINUATION) :] if _continues(text) else WORD_START + text
        return text

    def surfaces(self) -> Iterator[tuple[int, str]]:
        """Return id and text of each piece, without control pieces; '▁' is the space before a word (' ' in "char")."""
        return ((i, self._shown(i)) for i, piece in enumerate(self.pieces) if piece and not _is_control(piece))

    def starts_word(self, i: int) -> bool:
        """Return whether a word begins with token i."""
        piece = self.pieces[i]
        if self.kind in ("bpe", "byte_bpe"):
            return piece.startswith(WORD_START if self.kind == "bpe" else SPACE_BYTE)
        return not _continues(piece)

    # -- text to ids -----------------------------------------------------------------------------

    def tokenize(self, text: str, language: str | None = None) -> Segmentation:
        """Return the tokens of a text by the model's tokenizer or, without one, by the rule of the vocabulary's kind.

        `language` selects the tokenizer of an aggregate; other vocabularies ignore it.

        Raises:
            ValueError: a character is in no piece, or the aggregate has no such language.
        """
        return self._fitted(text, language)[1]

    def _fitted(self, text: str, language: str | None, written: str = "") -> tuple[str, Segmentation]:
        """Return the first Unicode form that the pieces can spell, and its tokens; errors quote the text `written`."""
        check_kind("text", text, str)
        # without soft hyphens, joiners, byte-order marks and directions of text, which have no width
        seen = (c for c in text if c.isascii() or unicodedata.category(c) != "Cf" or c in self._alphabet)
        words = " ".join("".join(seen).split())
        if not words:
            raise ValueError("text is empty, expected at least one word")
        encode, missing = self._encoder(language), ""
        for form in unicode_forms(words):
            ids = [int(i) for i in encode(form)] if encode else self._spelled(form)
            bad_id = next((i for i in ids if not 0 <= i < len(self.pieces)), None)
            if bad_id is not None:
                raise ValueError(f"the tokenizer gave id {bad_id} for {text!r}, expected 0 .. {len(self) - 1}")
            uncovered = self._uncovered(form, ids)
            if uncovered is None:
                return form, ids
            missing = missing or uncovered
        is_case = set(missing.swapcase()) <= self._alphabet
        lacking = f"phrase {written or text!r} has the character {missing!r}, which is not in the model's vocabulary"
        raise LetterCaseError(f"{lacking}; letter case matters: convert the text") if is_case else ValueError(lacking)

    def segmentations(
        self, text: str, limit: int = 1, ignore_case: bool = False, language: str | None = None
    ) -> list[Segmentation]:
        """Return token sequences that spell `text`: the tokenizer's first, then others by number of pieces.

        Of sequences with equal numbers of pieces, those with longer early pieces come first. With `ignore_case`, the
        text is also spelled in lower case, in upper case and with capital initials, if pieces exist. There are
        up to `limit` sequences per spelling, and the tokenizer's sequences of all spellings come first.

        Raises:
            ValueError: limit < 1; all spellings have a character that is in no piece; limit > 1 for an
                aggregate, because pieces of other languages would match.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}, expected at least 1")
        if limit > 1 and self.encode_by_language:
            raise ValueError("several segmentations cannot be had from an aggregate tokenizer")
        canonical, spellings = [], []
        faults: list[ValueError] = []
        for spelling in letter_cases(text) if ignore_case else [text]:
            try:
                form, ids = self._fitted(spelling, language, text)
                canonical.append(ids)
                spellings.append(form)
            except ValueError as error:
                faults.append(error)
        if not canonical:  # a character missing in lower case too is the better reason
            named = faults[: 1 if text == text.lower() else 2]
            raise next((fault for fault in named if not isinstance(fault, LetterCaseError)), faults[0])
        found = dict.fromkeys(map(tuple, canonical))
        for spelling, first in zip(spellings, canonical, strict=True):
            own = {tuple(first)}
            candidates = self._fewest_pieces(spelling, limit) if limit > 1 else []
            for tokens in map(tuple, candidates):
                if len(own) < limit:
                    own.add(tokens)
                    found.setdefault(tokens)
        return [list(ids) for ids in found]

    def _encoder(self, language: str | None) -> Callable[[str], list[int]] | None:
        if not self.encode_by_language:
            return self.encode
        if language is None or language not in self.encode_by_language:
            known = ", ".join(sorted(self.encode_by_language))
            raise ValueError(f"language is {language!r}, expected one of {known}")
        return self.encode_by_language[language]

    def _spelled(self, text: str) -> Segmentation:
        """Return the tokens of a text by the rule of the vocabulary's kind, or [] if the pieces cannot spell it."""
        ids: Segmentation | None = None
        if self.kind == "byte_bpe":
            units = [self._surface(unit) for unit in _BYTE_LEVEL_UNITS.findall(f" {text}")]
            ids = [i for unit in units for i in self._merged(unit) or [-1]]
        elif self.kind == "wpe":
            ids = [i for word in text.split() for i in self._longest_matches(WORD_START + word) or [-1]]
        elif self.kind == "bpe" and not self.spells_by_guess:
            ids = self._merged(self._surface(text))
        if not ids or -1 in ids:
            ids = next(iter(self._fewest_pieces(text, 1)), [])
        return ids

    def _merged(self, surface: str) -> Segmentation:
        """Merge pieces as BPE does: the pair with the lowest id, leftmost first; [] if a character is no piece."""
        find, parts = self._surfaces.get, list(surface)
        while True:
            pairs = ((find(a + b), n) for n, (a, b) in enumerate(itertools.pairwise(parts)))
            best = min(((i, n) for i, n in pairs if i is not None), default=None)
            if best is None:
                break
            n = best[1]
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        ids = [find(part) for part in parts]
        return [] if None in ids else [i for i in ids if i is not None]

    def _longest_matches(self, surface: str) -> Segmentation:
        """Match the longest piece from the left repeatedly, as WordPiece does; return [] where no piece matches."""
        ids = []
        while surface:
            longest = range(min(len(surface), self._longest_piece), 0, -1)
            end = next((n for n in longest if surface[:n] in self._surfaces), None)
            if end is None:
                return []
            ids.append(self._surfaces[surface[:end]])
            surface = surface[end:]
        return ids

    def _surface(self, text: str) -> str:
        """Return a text in the form of the pieces: with spaces as '▁' or, for "byte_bpe", with bytes as characters."""
        if self.kind == "byte_bpe":
            return "".join(_CHARACTER_OF_BYTE[byte] for byte in text.encode())
        return text if self.kind == "char" else WORD_START + text.replace(" ", WORD_START)

    def _uncovered(self, text: str, ids: Segmentation) -> str | None:
        """Return the first character of the text that these token ids do not spell, or None."""
        if not ids or any(self.pieces[i] in _UNKNOWN for i in ids):
            missing = text
        elif self.kind == "char":
            # tokenizers of characters drop unknown characters without an error
            left_out = Counter(_basic(text)) - Counter(_basic(self.text(ids)))
            missing = "".join(c for c in text if any(form in left_out for form in _basic(c)))
        else:
            missing = ""
        form = self._surface if self.kind == "byte_bpe" else partial(unicodedata.normalize, "NFKC")
        unknown = (c for c in missing if not set(form(c)) <= self._alphabet)
        return next(unknown, missing[:1] or None)

    @cached_property
    def _alphabet(self) -> frozenset[str]:
        return frozenset("".join(self._surfaces)) | {" "}

    @cached_property
    def _surfaces(self) -> dict[str, int]:
        """Return a mapping from piece texts, with '▁' before words, to ids; of equal pieces, it has the first id."""
        surfaces: dict[str, int] = {}
        for i, shown in self.surfaces():
            surfaces.setdefault(shown, i)
        return surfaces

    @cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self._surfaces), default=0)

    def _fewest_pieces(self, text: str, limit: int) -> list[Segmentation]:
        """Return the `limit` segmentations with the fewest pieces, by dynamic programming from the end.

        best[i] has the segmentations of text[i:] as (length, (id, rest)), best first; `rest` is such a pair
        or (), so that segmentations share their tails.
        """
        surface = self._surface(f" {text}" if self.kind == "byte_bpe" else text)
        find = self._surfaces.get
        best: list[list[tuple[int, tuple]]] = [[] for _ in surface] + [[(0, ())]]
        for begin in range(len(surface) - 1, -1, -1):
            candidates = []
            for end in range(min(len(surface), begin + self._longest_piece), begin, -1):
                if best[end] and (i := find(surface[begin:end])) is not None:
                    candidates += [(length + 1, (i, rest)) for length, rest in best[end]]
            # a stable sort: among equal lengths, longer first pieces stay first
            candidates.sort(key=itemgetter(0))
            best[begin] = candidates[:limit]
        return [list(_unlink(chain)) for _, chain in best[0]]


def _basic(text: str) -> str:
    """Return a text without letter case, accents and spaces, which a tokenizer's normalisation may change."""
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    return "".join(c for c in decomposed if not c.isspace() and not unicodedata.combining(c))


def _unlink(chain: tuple) -> Iterator[int]:
    while chain:
        i, chain = chain
        yield i


def unicode_forms(text: str) -> list[str]:
    """Return the Unicode forms of a text: NFC, NFD, NFKC, NFKD, then those with ASCII's apostrophe and hyphen."""
    versions = (text, text.translate(_TYPED))
    forms = (unicodedata.normalize(form, version) for version in versions for form in ("NFC", "NFD", "NFKC", "NFKD"))
    return list(dict.fromkeys(forms))


def spellings_of(word: str, ignore_case: bool) -> list[str]:
    """Return a word as written and in its other Unicode forms; with `ignore_case`, in other letter cases too."""
    cases = letter_cases(word) if ignore_case else [word]
    return list(dict.fromkeys(form for case in cases for form in (case, *unicode_forms(case))))


def letter_cases(text: str) -> list[str]:
    """Return a text as written, in lower case, in upper case and with capital initials, without duplicates."""
    capitalized = " ".join(word[:1].upper() + word[1:].lower() for word in text.split())
    return list(dict.fromkeys([text, text.lower(), text.upper(), capitalized]))


def _is_punctuation(text: str) -> bool:
    return all(unicodedata.category(character)[0] in "PZ" for character in text)


def _is_control(piece: str) -> bool:
    return len(piece) > 1 and bool(_CONTROL.fullmatch(piece))


def _continues(piece: str) -> bool:
    return piece.startswith(CONTINUATION) and len(piece) > len(CONTINUATION)


def _guess_kind(pieces: Sequence[str]) -> str:
    texts = [piece for piece in pieces if not _is_control(piece)]
    if any(piece.startswith(WORD_START) for piece in texts):
        return "bpe"
    if any(piece.startswith(SPACE_BYTE) for piece in texts) and set("".join(texts)) <= set(_BYTE_OF_CHARACTER):
        return "byte_bpe"
    if any(map(_continues, texts)):
        return "wpe"
    if all(len(piece) == 1 for piece in texts):
        return "char"
    raise ValueError(
        f"pieces have no marks ({WORD_START!r}, {CONTINUATION!r}, {SPACE_BYTE!r}) and are no single "
        f"characters; give kind, one of {', '.join(KINDS)}"
    )


def _merge_bytes(pieces: Sequence[str], ids: Sequence[int]) -> Iterator[int | str]:
    """Replace consecutive byte pieces (<0xE2>, <0x82>, <0xAC>) by the characters that they encode."""
    run = bytearray()
    for i in ids:
        byte = _BYTE.fullmatch(pieces[i])
        if byte:
            run.append(int(byte[1], 16))
            continue
        if run:
            yield run.decode("utf-8", "replace")
            run.clear()
        yield i
    if run:
        yield run.decode("utf-8", "replace")
