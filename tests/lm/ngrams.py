"""Small word LMs for the tests of packing."""

from __future__ import annotations

from tests.oracles.ngram import Table, arpa_text, random_table

SPECIALS = ("<s>", "</s>", "<unk>")


def closed_table(*, seed, order=3, keep=0.3, words=("x", "y", "z")) -> Table:
    """A random LM without n-grams whose context is not listed; suffixes may well be missing."""
    table = random_table(words, order, keep, seed, SPECIALS)
    kept: Table = {}
    for gram in sorted(table, key=len):
        if len(gram) == 1 or gram[:-1] in kept:
            kept[gram] = table[gram]
    return kept


def write_arpa(path, table, separator="\t"):
    """The table as an ARPA file; returns its path."""
    path.write_text(arpa_text(table, separator))
    return path


def missing_suffixes(table: Table) -> int:
    return sum(gram[1:] not in table for gram in table if len(gram) > 1)
