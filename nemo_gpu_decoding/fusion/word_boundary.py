"""Word boundaries: which pieces continue the word before them.

    "▁new" "er"     continues it: the word is not "new"
    "▁new" "▁york"  does not: '▁' begins the next word
    "▁new" "'s"     does not, nor do "-" and ",": only letters, digits and accents do

Pieces without a text of their own (<unk>, <s>, [CLS]) and single bytes (<0xE2>), of which nobody knows
what they will become, do not either. Nor do characters of scripts that are written without
spaces: there one piece does not tell where words end, so a word may end anywhere.
"""

from __future__ import annotations

import unicodedata

import numpy as np

from nemo_gpu_decoding.vocabulary import CONTINUATION, Vocabulary

# what Unicode's names of their characters begin with
_SCRIPTS_WITHOUT_SPACES = (
    "CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR",
)  # fmt: skip


def word_continuations(vocabulary: Vocabulary) -> np.ndarray:
    """[V] bool, the pieces that continue the word before them."""
    mark = CONTINUATION if vocabulary.kind == "wpe" else ""
    pieces = vocabulary.pieces
    if vocabulary.kind == "byte_bpe":  # 'Ġ' is a letter in Unicode; half a character is none
        pieces = tuple(
            "" if vocabulary.starts_word(i) else vocabulary.text([i]) for i in range(len(vocabulary))
        )
    return np.array(
        [
            piece.startswith(mark) and is_word_character(piece[len(mark) : len(mark) + 1])
            for piece in pieces
        ],
        bool,
    )


def is_word_character(character: str) -> bool:
    """A letter, digit or accent of a script that puts spaces between words; "" is none."""
    if not character or unicodedata.category(character)[0] not in "LNM":
        return False
    name = unicodedata.name(unicodedata.normalize("NFKC", character)[0], "")
    return not name.startswith(_SCRIPTS_WITHOUT_SPACES)
