"""Entropy pruning against the relative entropy itself, summed over all contexts and symbols."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from nemo_gpu_decoding.lm.arpa import Arpa, read_arpa
from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
from nemo_gpu_decoding.lm.prune import prune_ngram_lm
from tests.assets import ASSETS
from tests.lm.test_estimate import made_up_text, table_of
from tests.oracles.ngram import log10_prob


def size_of(arpa):
    return sum(len(block.symbols) for block in arpa.orders)


@pytest.fixture(scope="module")
def arpa() -> Arpa:
    return estimate_ngram_lm(made_up_text(11, sentences=120, words=9), 3)


def entropy_change(full, pruned, removed, symbols):
    """The relative entropy for the contexts that can differ: that of the removed n-gram."""
    context = removed[:-1]
    probability = 1.0
    for n in range(len(context)):
        symbol = "</s>" if context[n] == "<s>" else context[n]
        probability *= 10 ** log10_prob(full, context[:n], symbol, 3)
    total = 0.0
    for symbol in symbols:
        before, after = (log10_prob(table, context, symbol, 3) for table in (full, pruned))
        total += 10**before * (before - after) * math.log(10)
    return probability * total


def test_what_goes_is_what_changes_the_entropy_least(arpa):
    full = table_of(arpa)
    symbols = [g[0] for g in full if len(g) == 1 and g != ("<s>",)]
    sizes = [size_of(arpa) - 1, size_of(arpa) - 2]
    pruned = [table_of(prune_ngram_lm(arpa, size=size)) for size in sizes]
    first, second = (full.keys() - table.keys() for table in pruned)
    assert [len(first), len(second)] == [1, 2]
    (removed,) = first
    change = entropy_change(full, pruned[0], removed, symbols)
    # one more than the LM's own threshold takes it out, one less does not
    at = math.expm1(change)
    assert removed not in table_of(prune_ngram_lm(arpa, threshold=at * (1 + 1e-6) + 1e-12))
    assert removed in table_of(prune_ngram_lm(arpa, threshold=at * (1 - 1e-6) - 1e-12))


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_what_stays_is_part_of_the_lm_and_adds_up(arpa, share):
    unigrams = len(arpa.orders[0].symbols)
    size = unigrams + int(share * (size_of(arpa) - unigrams))
    small = prune_ngram_lm(arpa, size=size)
    assert 0.9 * size <= size_of(small) <= size
    full, table = table_of(arpa), table_of(small)
    assert all(prob == full[gram][0] for gram, (prob, _) in table.items())
    assert all(gram[1:] in table and gram[:-1] in table for gram in table if len(gram) > 1)
    symbols = [g[0] for g in table if len(g) == 1 and g != ("<s>",)]
    for context in itertools.product(["<s>", *symbols[:6]], symbols[:6]):
        assert sum(10 ** log10_prob(table, context, s, 3) for s in symbols) == pytest.approx(
            1.0, abs=1e-6
        )


def test_all_or_nothing(arpa):
    assert table_of(prune_ngram_lm(arpa, size=size_of(arpa))).keys() == table_of(arpa).keys()
    alone = prune_ngram_lm(arpa, size=len(arpa.orders[0].symbols))
    assert len(alone.orders) == 1
    assert not alone.orders[0].log10_backoffs.any()
    assert size_of(prune_ngram_lm(arpa, threshold=1e-4)) < size_of(prune_ngram_lm(arpa, threshold=1e-6))


def test_an_lm_without_some_suffixes(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(
        "\\data\\\nngram 1=5\nngram 2=2\nngram 3=1\n\n\\1-grams:\n"
        "-1\t<unk>\n-99\t<s>\t-0.2\n-0.6\t</s>\n"
        "-0.5\ta\t-0.3\n-0.4\tb\t-0.1\n\n\\2-grams:\n-0.3\t<s> a\t-0.2\n-0.2\tb a\n\n"
        "\\3-grams:\n-0.01\t<s> a b\n\n\\end\\\n"
    )
    table = table_of(prune_ngram_lm(read_arpa(path), size=8))
    # what p(b | <s> a) takes from the others: p(b | a) is backed off, 10^-0.4 with a weight of 1
    left = (1 - 10**-0.01) / (1 - 10**-0.4)
    assert table[("<s>", "a")][1] == pytest.approx(math.log10(left))
    assert ("<s>", "a", "b") in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of size and threshold"),
        ({"size": 5, "threshold": 1e-8}, "expected one of size and threshold"),
        ({"size": 3}, r"size is 3, expected an integer >= \d+, the number of 1-grams"),
        ({"threshold": -1.0}, "threshold is -1.0, expected a finite number >= 0"),
    ],
)
def test_bad_options(arpa, options, message):
    with pytest.raises(ValueError, match=message):
        prune_ngram_lm(arpa, **options)


def test_an_ngram_without_its_context_is_named(tmp_path, arpa):
    write_arpa(arpa, tmp_path / "lm.arpa")
    text = (tmp_path / "lm.arpa").read_text().splitlines()
    gram = text[text.index("\\3-grams:") + 1].split("\t")[1]
    context = gram.rsplit(" ", 1)[0]
    lines = [line for line in text if line.split("\t")[1:2] != [context]]
    count = next(line for line in lines if line.startswith("ngram 2="))
    lines[lines.index(count)] = f"ngram 2={len(arpa.orders[1].symbols) - 1}"
    (tmp_path / "lm.arpa").write_text("\n".join([*lines, ""]))
    with pytest.raises(ValueError, match=f"lists '{gram}' without '{context}'"):
        prune_ngram_lm(read_arpa(tmp_path / "lm.arpa"), size=1000)


def test_the_small_lm_that_is_shipped_is_what_its_recipe_makes(tmp_path):
    recipe = [sys.executable, str(ASSETS / "recipe" / "small_lm.py"), str(ASSETS / "lm" / "word3.arpa")]
    subprocess.run([*recipe, str(tmp_path / "small.arpa"), "0.05"], check=True)
    assert (tmp_path / "small.arpa").read_bytes() == (ASSETS / "lm" / "word_small.arpa").read_bytes()
