"""Back-off n-gram probabilities straight from the definition, and ARPA text for made-up n-grams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

NGram = tuple[str, ...]
Table = dict[NGram, tuple[float, float]]  # n-gram -> log10 probability, log10 back-off weight


def log10_prob(table: Table, history: Sequence[str], symbol: str, order: int) -> float:
    """log10 p(symbol | history): the longest listed n-gram, and a back-off weight per dropped symbol."""
    context = tuple(history)[max(0, len(history) - order + 1) :]
    penalty = 0.0
    while True:
        if (*context, symbol) in table:
            return penalty + table[(*context, symbol)][0]
        assert context, f"{symbol} has no 1-gram"
        penalty += table.get(context, (0.0, 0.0))[1]
        context = context[1:]


def random_table(
    symbols: Sequence[str], order: int, keep: float, seed: int, specials: Sequence[str] = ("<s>", "</s>")
) -> Table:
    """All 1-grams and a random part of the longer n-grams: contexts and suffixes may well be missing."""
    draw = random.Random(seed)
    first = [s for s in (*symbols, *specials) if s != "</s>"]
    last = [s for s in (*symbols, *specials) if s != "<s>"]
    singles = dict.fromkeys((*first, *last))
    table: Table = {(s,): (draw.uniform(-3, 0), draw.uniform(-1, 0)) for s in singles}
    for n in range(2, order + 1):
        for ngram in itertools.product(first, *[symbols] * (n - 2), last):
            if draw.random() < keep:
                table[ngram] = (draw.uniform(-3, 0), draw.uniform(-1, 0) if n < order else 0.0)
    return table


def arpa_text(table: Table, separator: str = "\t") -> str:
    """The table as an ARPA file; weights in full precision, back-off weights of 0 left out."""
    order = max(map(len, table))
    by_order = {n: [g for g in table if len(g) == n] for n in range(1, order + 1)}
    lines = ["\\data\\", *(f"ngram {n}={len(grams)}" for n, grams in by_order.items()), ""]
    for n, grams in by_order.items():
        lines.append(f"\\{n}-grams:")
        for gram in grams:
            prob, backoff = table[gram]
            fields = [repr(prob), " ".join(gram)] + ([repr(backoff)] if backoff else [])
            lines.append(separator.join(fields))
        lines.append("")
    return "\n".join([*lines, "\\end\\", ""])
