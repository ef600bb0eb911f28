"""N-grams to lines of an ARPA file in numpy, a block at a time: over a million lines per second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemo_gpu_decoding.bench.scale.ngrams import (
    BLOCK,
    LOG10_BACKOFF,
    SPECIALS,
    SyntheticLM,
)

DIGITS = 5  # after the point
_TAB, _BLANK, _NEWLINE, _MINUS, _POINT, _ZERO = (ord(c) for c in "\t \n-.0")


def write_arpa(lm: SyntheticLM, path: Path) -> None:
    """Write an LM as ARPA, in memory that does not grow with the number of 3-grams."""
    table = symbol_table(lm.symbols)
    unigrams, seconds = np.arange(len(lm.symbols))[:, None], lm.bigrams.seconds
    with path.open("wb") as file:
        file.write(b"\\data\\\n")
        file.writelines(b"ngram %d=%d\n" % entry for entry in enumerate(lm.counts, 1))
        file.write(b"\n\\1-grams:\n")
        backoffs = np.full(len(lm.symbols), LOG10_BACKOFF)
        backoffs[: len(SPECIALS)] = 0.0
        file.write(format_ngrams(lm.log10_words, unigrams, table, backoffs))
        file.write(b"\n\\2-grams:\n")
        for first in range(0, len(seconds), BLOCK):
            block = slice(first, first + BLOCK)
            numbers = np.arange(first, first + len(seconds[block]))
            firsts = np.searchsorted(lm.bigrams.begin, numbers, "right") - 1
            symbols = np.stack([firsts, seconds[block]], 1)
            file.write(format_ngrams(lm.bigrams.log10_probs[block], symbols, table))
        file.write(b"\n\\3-grams:\n")
        for symbols, log10_probs in lm.trigrams():
            file.write(format_ngrams(log10_probs, symbols, table))
        file.write(b"\n\\end\\\n")


def symbol_table(symbols: Sequence[str]) -> np.ndarray:
    """The symbols in UTF-8, [S, longest] uint8, filled up with zeros."""
    encoded = np.array([symbol.encode() for symbol in symbols])
    return encoded.view(np.uint8).reshape(len(symbols), -1)


def format_ngrams(
    log10_probs: np.ndarray,
    symbols: np.ndarray,
    table: np.ndarray,
    log10_backoffs: np.ndarray | None = None,
) -> bytes:
    """Lines of M n-grams.

    Args:
        log10_probs: [M], and log10_backoffs [M], which may be None: no back-off weights. They are
            written with one digit before the point and DIGITS behind it, limited to -9.99999 .. 0.
        symbols: [M, order] rows of the table.
        table: from `symbol_table`.
    """
    number, width = DIGITS + 3, table.shape[1] + 1
    order = symbols.shape[1]
    size = number + order * width + 1 + (0 if log10_backoffs is None else number + 1)
    lines = np.zeros((len(symbols), size), np.uint8)
    lines[:, :number] = fixed_point(log10_probs)
    for place in range(order):
        begin = number + place * width
        lines[:, begin] = _BLANK if place else _TAB
        lines[:, begin + 1 : begin + width] = table[symbols[:, place]]
    if log10_backoffs is not None:
        lines[:, -number - 2] = _TAB
        lines[:, -number - 1 : -1] = fixed_point(log10_backoffs)
    lines[:, -1] = _NEWLINE
    return lines[lines != 0].tobytes()


def fixed_point(values: np.ndarray) -> np.ndarray:
    """Numbers in -9.99999 .. 0, [M], as text of equal length, [M, DIGITS + 3] uint8."""
    scaled = np.rint(np.clip(-values.astype(np.float64), 0.0, 9.99999) * 10**DIGITS).astype(np.uint32)
    text = np.empty((len(values), DIGITS + 3), np.uint8)
    for column in range(DIGITS + 2, 2, -1):
        scaled, digit = np.divmod(scaled, 10)
        text[:, column] = _ZERO + digit
    text[:, 0], text[:, 1], text[:, 2] = _MINUS, _ZERO + scaled, _POINT
    return text
