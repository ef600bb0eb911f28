"""Estimate a small n-gram LM in plain Python: interpolated Witten-Bell, written as ARPA.

Good enough to give a benchmark a real LM without another tool; about 100,000 tokens/s at order 6.
For a model to use, take KenLM's lmplz.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

BOS, EOS, UNK = "<s>", "</s>", "<unk>"

Gram = tuple[str, ...]


def write_witten_bell(
    sentences: Iterable[Sequence[str]],
    order: int,
    path: Path,
    *,
    words: Iterable[str] = (),
    min_count: int = 2,
) -> None:
    """Estimate p(w|h) = (c(hw) + t(h) p(w|h')) / (c(h) + t(h)); t(h) = different words seen after h.

    Args:
        words: words that get a unigram probability even if no sentence holds them.
        min_count: n-grams of order 3 and up seen less often are left out. Counts never grow with the
            order, so that every n-gram that stays has its history and its suffix in the model.
    """
    counts = _count(sentences, order)
    vocabulary = ({w for (w,) in counts[0]} | set(words) | {UNK, EOS}) - {BOS}
    seen = {(w,): counts[0].get((w,), 0) for w in sorted(vocabulary)}
    probabilities: list[dict[Gram, float]] = []
    backoffs: list[dict[Gram, float]] = []  # backoffs[n]: of histories with n words
    for n in range(order):
        grams = seen if n == 0 else {g: c for g, c in counts[n].items() if n == 1 or c >= min_count}
        total, types = _history_sums(counts[n], without=(BOS,) if n == 0 else None)
        lower: dict[Gram, float] = {(): 1.0 / len(vocabulary)} if n == 0 else probabilities[n - 1]
        weights = {h: 1.0 / (total[h] + types[h]) for h in total}
        kept_mass: dict[Gram, float] = defaultdict(float)
        for gram, count in grams.items():
            kept_mass[gram[:-1]] += count * weights[gram[:-1]]
        backoff = {h: max(1.0 - kept_mass[h], 1e-9) for h in total}
        probabilities.append(
            {
                g: c * weights[g[:-1]] + backoff[g[:-1]] * lower[() if n == 0 else g[1:]]
                for g, c in grams.items()
            }
        )
        backoffs.append(backoff)
    _write_arpa(path, probabilities, backoffs)


def _count(sentences: Iterable[Sequence[str]], order: int) -> list[Counter[Gram]]:
    counts: list[Counter[Gram]] = [Counter() for _ in range(order)]
    for sentence in sentences:
        words = (BOS, *sentence, EOS)
        for n, counter in enumerate(counts, 1):
            counter.update(zip(*(words[i:] for i in range(n)), strict=False))
    return counts


def _history_sums(
    counts: Counter[Gram], without: Gram | None
) -> tuple[dict[Gram, int], dict[Gram, int]]:
    """c(h) and t(h) of every history h."""
    total: dict[Gram, int] = defaultdict(int)
    types: dict[Gram, int] = defaultdict(int)
    for gram, count in counts.items():
        if gram != without:
            total[gram[:-1]] += count
            types[gram[:-1]] += 1
    return total, types


def _write_arpa(
    path: Path, probabilities: list[dict[Gram, float]], backoffs: list[dict[Gram, float]]
) -> None:
    order = len(probabilities)
    probabilities[0] = {(BOS,): 1.0} | probabilities[0]
    with path.open("w", encoding="utf-8") as file:
        file.write("\\data\\\n")
        for n, grams in enumerate(probabilities, 1):
            file.write(f"ngram {n}={len(grams)}\n")
        for n, grams in enumerate(probabilities, 1):
            file.write(f"\n\\{n}-grams:\n")
            for gram in sorted(grams):
                line = f"{math.log10(grams[gram]):.7g}\t{' '.join(gram)}"
                if n < order:
                    line += f"\t{math.log10(backoffs[n].get(gram, 1.0)):.7g}"
                file.write(line + "\n")
        file.write("\n\\end\\\n")
