"""Estimate n-gram LMs from text with interpolated modified Kneser-Ney, like KenLM's lmplz.

The symbols are words for word graphs, and the tokens of a model for fusion:

    arpa = estimate_ngram_lm((line.split() for line in open("text")), order=3)
    write_arpa(arpa, "lm.arpa")

    c(g)     the number of occurrences of g, if g has the highest order or begins with <s>; else the
             number of different symbols before g
    D(k)     discount of a count of k: D_1, D_2 or D_3+, from the counts of counts [Chen & Goodman 1998]
    p(w|h) = (c(hw) - D(c(hw))) / c(h*) + gamma(h) p(w|h'),    gamma(h) the mass of the discounts of c(h*)

h' is h without its first symbol; below the 1-grams all symbols except <s> have equal probability. The number of an
n-gram depends on the number of its context and its last symbol. Therefore all steps of the estimation sort, or sum
over, arrays with one entry per n-gram.
"""

import gzip
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_int, check_kind
from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.lm.arpa import TOKENIZER, Arpa, NGramBlock
from nemo_gpu_decoding.plain_text import path_of

logger = logging.getLogger("nemo_gpu_decoding")

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
_UNK, _BOS, _EOS = range(3)
_LINES = 1 << 18  # lines of an ARPA file that are formatted at a time
_NEVER = -99.0  # log10 probability of <s>, which is never predicted
# Discounts of the counts 1, 2 and 3 or more if the counts of counts give none, as in lmplz.
_FALLBACK = (0.5, 1.0, 1.5)


class _NGrams(NamedTuple):
    """The M different n-grams of one order that occur in the text; columns of length M."""

    context: np.ndarray  # int64, the n-gram without its last symbol, in the order below
    symbol: np.ndarray  # int64, the last symbol
    suffix: np.ndarray  # int64, the n-gram without its first symbol, in the order below
    occurrences: np.ndarray  # int64
    begins: np.ndarray  # bool, whether the first symbol is <s>


def estimate_ngram_lm(
    sentences: Iterable[Sequence[str]],
    order: int,
    *,
    symbols: Iterable[str] | None = None,
    min_counts: Sequence[int] = (),
) -> Arpa:
    """Return the back-off n-gram LM of a text.

    Args:
        sentences: the symbols (words or tokens) of each sentence, without <s> and </s>.
        order: order of the LM, 1 .. 10.
        symbols: the symbols of the LM; other symbols of the text count as <unk>. None means all symbols of the text.
        min_counts: by order, the least number of occurrences of an n-gram in the LM; the last number holds
            for all higher orders. (1, 1, 2) is lmplz's `--prune 0 0 1`. The numbers must not decrease.

    Returns:
        The LM; log10 weights, <unk>, <s> and </s> as its first symbols.

    Raises:
        ValueError: an argument is out of range, the text is empty, or a sentence (named by its number)
            has one of <s>, </s>, <unk> or a symbol with white space.
    """
    check_int("order", order, 1, 10)
    least = _least_counts(min_counts, order)
    names, text, offsets = _numbered(sentences, symbols)
    tables = _count(text, offsets, order, len(names))
    blocks: list[NGramBlock] = []
    ngrams, probs, kept = np.zeros((1, 0), np.int32), np.full(1, 1.0 / (len(names) - 1)), np.ones(1, bool)
    for n, grams in enumerate(tables, 1):
        counts = grams.occurrences.copy()  # c(g)
        if n < order:
            before = np.bincount(tables[n].suffix, minlength=len(counts))
            counts = np.where(grams.begins, counts, before)
        keep = grams.occurrences >= least[n - 1]
        if n == 1:  # all stay; <s> is never predicted
            keep[:], counts[_BOS] = True, 0
        probs, gamma = _weights(grams, counts, keep, n, probs)
        ngrams = np.column_stack([ngrams[grams.context], grams.symbol.astype(np.int32)])
        if blocks:
            blocks[-1] = replace(blocks[-1], log10_backoffs=np.log10(np.maximum(gamma, 1e-99))[kept])
        kept, log10_probs = keep, np.log10(probs[keep])
        blocks.append(NGramBlock(n, ngrams[keep], log10_probs, np.zeros(len(log10_probs))))
    blocks[0].log10_probs[_BOS] = _NEVER
    return Arpa(tuple(names), tuple(blocks))


def _weights(
    grams: _NGrams, counts: np.ndarray, keep: np.ndarray, order: int, below: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return p(last symbol | the others) of the n-grams of one order, and gamma of the n-grams of the order below.

    Args:
        keep: whether an n-gram is in the LM.
        below: the probabilities of the order below.
    """
    size = len(below)
    discounted = counts - _discounts(counts, order)[np.minimum(counts, 3)]
    total = np.bincount(grams.context, counts, minlength=size)
    kept = np.bincount(grams.context[keep], discounted[keep], minlength=size)
    gamma = 1.0 - np.divide(kept, total, out=np.zeros(size), where=total > 0)
    probs = discounted / total[grams.context] + gamma[grams.context] * below[grams.suffix]
    return probs, gamma


def write_arpa(arpa: Arpa, path: str | PathLike[str]) -> None:
    """Write an LM as an ARPA file, gzipped if the name ends in ".gz"; the file is created only if writing succeeds."""
    check_kind("arpa", arpa, Arpa, ": read_arpa or estimate_ngram_lm makes it")
    counts = [len(block.symbols) for block in arpa.orders]
    write_ngrams(path_of(path), arpa.symbols, counts, arpa.orders, tokenizer=arpa.tokenizer)


def write_ngrams(
    path: Path, symbols: Sequence[str], counts: Sequence[int], blocks: Iterable[NGramBlock], tokenizer: str = ""
) -> None:
    """Write an LM like `write_arpa`; the LM may be larger than memory.

    Args:
        counts: number of n-grams of each order.
        blocks: all n-grams, orders ascending, at least one block of each order.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with written_whole(path) as temporary, opened(temporary, "wt", encoding="utf-8", newline="\n") as file:
        file.write(f"{TOKENIZER.decode()}{tokenizer}\n" * bool(tokenizer) + "\\data\\\n")
        file.writelines(f"ngram {order}={count}\n" for order, count in enumerate(counts, 1))
        begun = 0
        for block in blocks:
            if block.order > begun:
                begun = block.order
                file.write(f"\n\\{begun}-grams:\n")
            file.writelines(_arpa_lines(block, symbols, is_last=begun == len(counts)))
        file.write("\n\\end\\\n")


def _arpa_lines(block: NGramBlock, symbols: Sequence[str], *, is_last: bool) -> Iterator[str]:
    """Yield the lines of n-grams, formatted by column to save half the time; the last order has no back-offs."""
    for begin in range(0, len(block.symbols), _LINES):
        rows = slice(begin, begin + _LINES)
        columns = [[symbols[i] for i in ids] for ids in block.symbols[rows].T.tolist()]
        backoffs = [] if is_last else [block.log10_backoffs[rows].tolist()]
        line = "%.7g\t" + " ".join(["%s"] * block.order) + "\t%.7g" * len(backoffs) + "\n"
        yield from map(line.__mod__, zip(block.log10_probs[rows].tolist(), *columns, *backoffs, strict=True))


def _least_counts(min_counts: Sequence[int], order: int) -> list[int]:
    """Return the least number of occurrences for each order."""
    given = list(min_counts) or [1]
    least = [*given, *[given[-1]] * order][:order]
    if len(given) > order or any(not isinstance(c, int) or c < 1 for c in given) or least != sorted(least):
        raise FieldError("min_counts", given, f"up to {order} integers >= 1, none smaller than the one before")
    return least


def _numbered(
    sentences: Iterable[Sequence[str]], symbols: Iterable[str] | None
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the symbols, the text as numbers with <s> and </s>, and the distance of each position from its <s>."""
    number = {UNK: _UNK, BOS: _BOS, EOS: _EOS}
    if symbols is not None:
        for symbol in symbols:
            number.setdefault(_checked(symbol, "symbols"), len(number))
    text, lengths = array("i"), array("q")
    for n, sentence in enumerate(sentences, 1):
        if isinstance(sentence, str):
            raise FieldError(f"sentence {n}", sentence, "a list of words or tokens")
        text.append(_BOS)
        for symbol in sentence:
            label = number.get(symbol)
            if label is None or label <= _EOS:
                if symbol in (UNK, BOS, EOS):
                    raise ValueError(f"sentence {n} has {symbol!r}, expected words or tokens of a text")
                if symbols is None:
                    label = number[_checked(symbol, f"sentence {n}")] = len(number)
                else:
                    label = _UNK
            text.append(label)
        text.append(_EOS)
        lengths.append(len(sentence) + 2)
    if len(text) <= 2 * len(lengths):
        raise ValueError(f"sentences has {len(lengths)} sentences and no word, expected a text")
    ends = np.cumsum(lengths)
    offsets = np.arange(len(text)) - np.repeat(ends - np.asarray(lengths), lengths)
    return list(number), np.asarray(text, np.int64), offsets


def _checked(symbol: str, where: str) -> str:
    if not symbol or any(c in symbol for c in " \t\n\r\v\f"):
        raise ValueError(f"{where} has the symbol {symbol!r}, expected one without white space")
    return symbol


def _count(text: np.ndarray, offsets: np.ndarray, order: int, num_symbols: int) -> list[_NGrams]:
    """Return the different n-grams of each order; numbers[i] is the number of the n-gram that ends at position i."""
    nothing = np.zeros(num_symbols, np.int64)
    symbol = np.arange(num_symbols)
    occurrences = np.bincount(text, minlength=num_symbols)
    tables = [_NGrams(nothing, symbol, nothing, occurrences, symbol == _BOS)]
    numbers = text
    for n in range(2, order + 1):
        ends = np.flatnonzero(offsets >= n - 1)
        keys = numbers[ends - 1] * num_symbols + text[ends]
        different, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        context, symbol = different // num_symbols, different % num_symbols
        tables.append(_NGrams(context, symbol, numbers[ends[first]], counts, tables[-1].begins[context]))
        numbers = np.full(len(text), -1)
        numbers[ends] = inverse
    return tables


def _discounts(counts: np.ndarray, order: int) -> np.ndarray:
    """Return the Kneser-Ney discounts D(0 .. 3+) of the n-grams of one order."""
    one, two, three, four = (int(np.count_nonzero(counts == k)) for k in range(1, 5))
    if one and two and three:
        share = one / (one + 2 * two)
        discounts = (1 - 2 * share * two / one, 2 - 3 * share * three / two, 3 - 4 * share * four / three)
        if all(0 <= discount <= k for k, discount in enumerate(discounts, 1)):
            return np.array([0.0, *discounts])
    logger.warning(
        "of all %d-grams %d, %d, %d, %d occur once to four times: too few for Kneser-Ney discounts, which is usual "
        "for 1-grams of tokens and for little text; using %s",
        order, one, two, three, four, ", ".join(map(str, _FALLBACK)),
    )  # fmt: skip
    return np.array([0.0, *_FALLBACK])
