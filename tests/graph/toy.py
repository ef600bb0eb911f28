"""Small word LMs and lexicons with everything that makes graphs hard."""

from __future__ import annotations

import itertools
import random

from nemo_gpu_decoding.graph.lexicon import Lexicon
from tests.oracles.ngram import Table, arpa_text

PIECES = ("▁a", "▁b", "b", "c", "d")  # columns 0 .. 4; the blank is column 5
BLANK = len(PIECES)

# "ab" and "abc" share a beginning, "ab" and "AB" a spelling; "cab" has two, "bb" a token twice
LEXICON = {
    "a": [("▁a",)],
    "ab": [("▁a", "b")],
    "AB": [("▁a", "b")],
    "abc": [("▁a", "b", "c")],
    "b": [("▁b",)],
    "bb": [("▁b", "b", "b")],
    "cab": [("▁b", "c"), ("▁b", "d", "d")],
}
WORDS = tuple(LEXICON)


def toy_lexicon() -> Lexicon:
    return Lexicon.from_pieces(
        [(word, spelling) for word, spellings in LEXICON.items() for spelling in spellings], PIECES
    )


def toy_table(*, seed, order=3, keep=0.3, words=WORDS, specials=("<s>", "</s>", "<unk>")) -> Table:
    """All 1-grams and a random part of the longer n-grams: contexts and suffixes may well be missing."""
    draw = random.Random(seed)
    first = [word for word in (*words, *specials) if word != "</s>"]
    last = [word for word in (*words, *specials) if word != "<s>"]
    table = {(w,): (draw.uniform(-3, 0), draw.uniform(-1, 0)) for w in dict.fromkeys([*first, *last])}
    for n in range(2, order + 1):
        for ngram in itertools.product(first, *[words] * (n - 2), last):
            if draw.random() < keep:
                table[ngram] = (draw.uniform(-3, 0), draw.uniform(-1, 0) if n < order else 0.0)
    return table


def toy_arpa(path, **options):
    """An ARPA file of `toy_table(**options)`; returns its path."""
    path.write_text(arpa_text(toy_table(**options)))
    return path


def random_texts(count, *, seed, longest=4):
    rng = random.Random(seed)
    return [tuple(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def spellings_of(text):
    """All token sequences that spell a text."""
    index = {piece: i for i, piece in enumerate(PIECES)}
    choices = [[tuple(index[p] for p in s) for s in LEXICON[word]] for word in text]
    return [sum(choice, ()) for choice in itertools.product(*choices)]
