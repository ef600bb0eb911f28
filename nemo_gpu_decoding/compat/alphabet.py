"""Convert the labels of CTC models as pyctcdecode does: characters, BPE pieces and wav2vec2's symbols."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.vocabulary import CONTINUATION, WORD_START, Vocabulary, WordSpan

BLANK, SPACE = "", " "
MOST_SPELLINGS = 3  # of a word in pieces; the model's own tokenizer is not known
UNK_TOKEN, UNK_BPE_TOKEN = "⁇", "▁⁇▁"
SPECIAL_TOKEN_PTN = re.compile(r"[<\[].+[>\]]")
BLANK_TOKEN_PTN = re.compile(r"[<\[]pad[>\]]$", re.IGNORECASE)
UNK_TOKEN_PTN = re.compile(r"[<\[]unk[>\]]$", re.IGNORECASE)


class Alphabet:
    """The label of each column in a CTC model's log-probs, in the same form for all kinds of models.

    The blank is "". Words of characters are separated by " ". BPE pieces that begin a word begin with "▁".

    Args:
        labels: labels in this form; `build_alphabet` converts the labels of a model. Several may be blanks or unknown.
        is_bpe: whether the labels are BPE pieces.
        names: the labels as the model spells them, for messages; None means `labels`.

    Raises:
        ValueError: a label occurs twice, no label is the blank, or a BPE piece has a space.
    """

    def __init__(self, labels: Sequence[str], is_bpe: bool, names: Sequence[str] | None = None) -> None:
        self._labels, self.is_bpe, self._names = list(labels), is_bpe, labels if names is None else names
        single = [label for label in labels if label not in (BLANK, UNK_TOKEN, UNK_BPE_TOKEN)]  # others may be several
        if double := next((label for i, label in enumerate(single) if label in single[:i]), None):
            raise ValueError(f"labels has {double!r} twice, expected different labels")
        if BLANK not in self._labels:
            raise ValueError("labels has no blank, expected one label ''")
        if is_bpe and any(SPACE in label for label in labels):
            raise ValueError("labels has a space among BPE pieces, expected '▁' or '##' to mark the words")

    @classmethod
    def build_alphabet(cls, labels: Sequence[str]) -> Alphabet:
        """Convert the labels of a model.

        '', '<pad>' and '[PAD]' are blanks; in models of characters, '_' is a blank if there is no other blank. If
        there is no blank, the last column becomes one. '|' is the space if there is no other. '##' becomes '▁'.
        """
        if labels is None or not all(isinstance(label, str) for label in labels):
            raise FieldError("labels", labels, "a list of texts")
        is_bpe = any(label.startswith((CONTINUATION, WORD_START)) for label in labels)
        found = list(labels)
        if any(label.startswith(CONTINUATION) for label in labels):
            found = [_with_word_start(label) for label in found]
        elif not is_bpe and SPACE not in found:
            found = [SPACE if label == "|" else label for label in found]
        found = [BLANK if BLANK_TOKEN_PTN.match(label) else label for label in found]
        if not is_bpe and BLANK not in found:
            found = [BLANK if label == "_" else label for label in found]
        unknown = UNK_BPE_TOKEN if is_bpe else UNK_TOKEN
        found = [unknown if UNK_TOKEN_PTN.match(label) else label for label in found]
        return cls(found if BLANK in found else [*found, BLANK], is_bpe, labels)

    @property
    def labels(self) -> list[str]:
        """Return a copy of the labels."""
        return self._labels[:]

    def dumps(self) -> str:
        return json.dumps({"labels": self._labels, "is_bpe": self.is_bpe})

    @classmethod
    def loads(cls, text: str) -> Alphabet:
        """Create an alphabet from the JSON text that `dumps` or pyctcdecode has written."""
        values = json.loads(text)
        if not isinstance(values, dict) or set(values) != {"labels", "is_bpe"}:
            raise ValueError(f"the alphabet is {text[:60]!r}, expected an object with the keys labels and is_bpe")
        return cls(values["labels"], values["is_bpe"])

    # ------------------------------------------------------------------------------------ tokens

    @cached_property
    def blanks(self) -> tuple[int, ...]:
        """Return the columns of the logits that are blanks."""
        return tuple(column for column, label in enumerate(self._labels) if label == BLANK)

    @property
    def note(self) -> str:
        """Return a text for messages that names the label that is used as the blank."""
        named = [f"{self._names[i]!r} (column {i})" for i in self.blanks if i < len(self._names)]
        return f"taken for the blank: {' and '.join(named) or 'a column after the labels, which lack <pad>'}"

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Return the labels without blanks; a token is an index into this tuple."""
        return tuple(label for label in self._labels if label != BLANK)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the pieces as a vocabulary that spells words."""
        return Vocabulary(self.pieces, "bpe" if self.is_bpe else "char")

    @property
    def separator(self) -> int | None:
        """Return the token of the space between words; None for BPE pieces, which mark the beginnings of words."""
        return self.pieces.index(SPACE) if not self.is_bpe and SPACE in self.pieces else None

    def breaks(self, token: int) -> bool:
        """Return whether a word ends before this token."""
        return self.pieces[token].startswith(WORD_START) if self.is_bpe else self.pieces[token] == SPACE

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of characters of each token."""
        return tuple(len(piece.strip(WORD_START)) for piece in self.pieces)

    @cached_property
    def unknown_word_tokens(self) -> tuple[int, ...]:
        """Return the tokens that may begin an out-of-vocabulary word of the LM."""
        return tuple(
            token
            for token, piece in enumerate(self.pieces)
            if piece != SPACE and not SPECIAL_TOKEN_PTN.fullmatch(piece)
            if piece.startswith(WORD_START) or not self.is_bpe
        )

    @cached_property
    def _spaced(self) -> tuple[str, ...]:
        """Return the text of each token, in which a space marks the beginning or end of a word."""
        if not self.is_bpe:
            return self.pieces
        return tuple(
            SPACE * piece.startswith(WORD_START) + piece.strip(WORD_START) + SPACE * piece.endswith(WORD_START)
            for piece in self.pieces
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a token sequence, with single spaces between words."""
        return SPACE.join(filter(None, "".join(map(self._spaced.__getitem__, tokens)).split(SPACE)))

    def words(self, tokens: Sequence[int]) -> Iterator[WordSpan]:
        """Yield the words that a token sequence spells, except empty words."""
        text, first, breaks = "", 0, False
        for i, token in enumerate(tokens):
            piece = self.pieces[token]
            if self.breaks(token) or breaks:
                if text:
                    yield WordSpan(text, first, i)
                text, first = "", i
            breaks = self.is_bpe and piece.endswith(WORD_START)
            if not text:
                first = i
            text += piece.strip(WORD_START) if self.is_bpe else piece.strip(SPACE)
        if text:
            yield WordSpan(text, first, len(tokens))


@lru_cache(maxsize=1 << 16)
def spellings(alphabet: Alphabet, word: str) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell a word, shortest first; [] if no label has one of its characters."""
    try:
        return tuple(map(tuple, alphabet.vocabulary.segmentations(word, MOST_SPELLINGS if alphabet.is_bpe else 1)))
    except ValueError:
        return ()


def _with_word_start(label: str) -> str:
    """Convert a WordPiece token to the form of a BPE piece: '##ing' to 'ing', and 'go' to '▁go'."""
    if label.startswith(CONTINUATION):
        return label[len(CONTINUATION) :]
    is_special = SPECIAL_TOKEN_PTN.fullmatch(label) or label in (BLANK, WORD_START, UNK_BPE_TOKEN)
    return label if is_special else WORD_START + label
