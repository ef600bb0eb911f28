"""Kneser-Ney LMs against the formulas of Chen & Goodman, counted one by one."""

import itertools
import logging
import math
import random
import runpy
import sys
from collections import Counter, defaultdict

import numpy as np
import pytest

from nemo_gpu_decoding.lm.arpa import Arpa, read_arpa
from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
from nemo_gpu_decoding.lm.prune import prune_ngram_lm
from tests.assets import ASSETS
from tests.oracles.ngram import log10_prob


def made_up_text(seed, sentences=400, words=150):
    """Sentences in which one word suggests the next: few n-grams are frequent, many are rare."""
    draw = random.Random(seed)
    weights = [1 / (1 + i) ** 1.3 for i in range(words)]
    follows = {w: random.Random(w).sample(range(words), words) for w in range(words)}
    text = []
    for _ in range(sentences):
        word, sentence = 0, []
        for _ in range(draw.randrange(9)):
            word = follows[word][draw.choices(range(words), weights)[0]]
            sentence.append(f"w{word}")
        text.append(sentence)
    return text


def table_of(arpa):
    return {
        tuple(arpa.symbols[i] for i in ids): (prob, backoff)
        for block in arpa.orders
        for ids, prob, backoff in zip(block.symbols, block.log10_probs, block.log10_backoffs, strict=True)
    }


class Oracle:
    """Interpolated modified Kneser-Ney with dictionaries, as [Chen & Goodman 1998] and lmplz have it."""

    def __init__(self, text, order):
        self.order = order
        raw, before = Counter(), defaultdict(set)
        for sentence in text:
            padded = ("<s>", *sentence, "</s>")
            for n, end in itertools.product(range(1, order + 1), range(1, len(padded) + 1)):
                if n <= end:
                    gram = padded[end - n : end]
                    raw[gram] += 1
                    if end > n:
                        before[gram].add(padded[end - n - 1])
        self.symbols = {g[0] for g in raw if len(g) == 1} | {"<unk>"}
        self.counts = {
            g: c if len(g) == order or g[0] == "<s>" else len(before[g]) for g, c in raw.items() if g != ("<s>",)
        }
        self.after = defaultdict(dict)
        for gram, count in self.counts.items():
            self.after[gram[:-1]][gram] = count
        self.discounts = {}
        for n in range(1, order + 1):
            t = Counter(c for g, c in self.counts.items() if len(g) == n)
            y = t[1] / (t[1] + 2 * t[2])
            self.discounts[n] = [0.0, *(k - (k + 1) * y * t[k + 1] / t[k] for k in (1, 2, 3))]

    def prob(self, context, symbol):
        if context is None:
            return 1 / (len(self.symbols) - 1)
        discount = self.discounts[len(context) + 1]
        found = {g: c for g, c in self.counts.items() if len(g) == len(context) + 1 and g[:-1] == context}
        shorter = context[1:] if context else None
        if not found:
            return self.prob(shorter, symbol)
        total = sum(found.values())
        left = sum(discount[min(c, 3)] for c in found.values()) / total
        count = found.get((*context, symbol), 0)
        return (count - discount[min(count, 3)]) / total + left * self.prob(shorter, symbol)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_the_formulas(order):
    text = made_up_text(order, sentences=60 if order == 1 else 400)
    oracle, table = Oracle(text, order), table_of(estimate_ngram_lm(text, order))
    seen = {g for g in oracle.counts if len(g) == order} | {("<s>",)} - ({("<s>",)} if order == 1 else set())
    assert {g for g in table if len(g) == order} >= {g for g in seen if len(g) == order}
    draw = random.Random(0)
    symbols = sorted(oracle.symbols - {"<s>"})
    contexts = [("<s>",)[: order - 1], *(tuple(draw.choices(symbols, k=order - 1)) for _ in range(5))]
    contexts += [g[:-1] for g in sorted(seen) if len(g) == order][::40]
    for context in contexts:
        probs = [10 ** log10_prob(table, context, symbol, order) for symbol in symbols]
        assert probs == pytest.approx([oracle.prob(context, symbol) for symbol in symbols], rel=1e-9)
        assert sum(probs) == pytest.approx(1.0)


def test_rare_ngrams_are_left_out_and_the_rest_still_adds_up():
    text = made_up_text(5)
    full = table_of(estimate_ngram_lm(text, 3))
    pruned = table_of(estimate_ngram_lm(text, 3, min_counts=(1, 2, 3)))
    assert pruned.keys() < full.keys()
    raw = Counter(g for s in text for g in itertools.pairwise(("<s>", *s, "</s>")))
    assert {g for g in pruned if len(g) == 2} == {g for g, count in raw.items() if count >= 2}
    for gram in pruned:
        assert gram[1:] in pruned or len(gram) == 1
        assert gram[:-1] in pruned or len(gram) == 1
    symbols = {g[0] for g in pruned if len(g) == 1} - {"<s>"}
    for context in [g for g in pruned if len(g) == 2][:20]:
        assert sum(10 ** log10_prob(pruned, context, s, 3) for s in symbols) == pytest.approx(1.0)


def test_unlisted_symbols_count_as_unk():
    arpa = estimate_ngram_lm(made_up_text(6), 2, symbols=["w0", "w1", "never"])
    assert arpa.symbols == ("<unk>", "<s>", "</s>", "w0", "w1", "never")
    table = table_of(arpa)
    assert ("<unk>", "w0") in table
    assert 10 ** table[("<unk>",)][0] > 10 ** table[("never",)][0] > 0
    assert table[("<s>",)][0] == -99


@pytest.mark.parametrize("name", ["lm.arpa", "lm.arpa.gz"])
def test_a_written_lm_is_read_again(tmp_path, name):
    arpa = estimate_ngram_lm(made_up_text(7), 3)
    write_arpa(arpa, tmp_path / name)
    again = read_arpa(tmp_path / name)
    assert again.symbols == arpa.symbols
    for ours, read in zip(arpa.orders, again.orders, strict=True):
        np.testing.assert_array_equal(ours.symbols, read.symbols)
        np.testing.assert_allclose(ours.log10_probs, read.log10_probs, rtol=1e-6)
        np.testing.assert_allclose(ours.log10_backoffs, read.log10_backoffs, rtol=1e-6, atol=1e-12)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_small_text_takes_lmplzs_fallback_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        table = table_of(estimate_ngram_lm([["a", "b"], ["a"]], 2))
    assert "too few for Kneser-Ney discounts" in caplog.text
    # c(a b) = c(a </s>) = 1, D(1) = 0.5; p(b | a) = 0.5 / 2 + 0.5 p(b), p(b) = 0.5 / 4 + gamma / 4
    gamma = (0.5 + 0.5 + 1.0) / 4  # a and b have one symbol before them, </s> has two
    assert 10 ** table[("a", "b")][0] == pytest.approx(0.25 + 0.5 * (0.5 / 4 + gamma / 4))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ([["a"], ["<s>"]], {}, "sentence 2 has '<s>', expected words"),
        ([["a"], ["b c"]], {}, "sentence 2 has the symbol 'b c', expected one without white space"),
        ([["a", ""]], {}, "sentence 1 has the symbol ''"),
        ([[], []], {}, "2 sentences and no word"),
        ([["a"]], {"order": 0}, "order is 0, expected an integer 1 .. 10"),
        ([["a"]], {"min_counts": (2, 1)}, r"min_counts is \[2, 1\], expected up to 2 integers >= 1"),
        ([["a"]], {"min_counts": (1, 1, 1)}, "expected up to 2 integers"),
    ],
)
def test_invalid_text_raises_an_error(text, options, message):
    with pytest.raises(ValueError, match=message):
        estimate_ngram_lm(text, **{"order": 2, **options})


# ---------- Entropy pruning against the relative entropy itself, summed over all contexts and symbols
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


def test_pruning_removes_the_ngrams_that_change_the_entropy_least(arpa):
    full = table_of(arpa)
    symbols = [g[0] for g in full if len(g) == 1 and g != ("<s>",)]
    pruned = [table_of(prune_ngram_lm(arpa, size=size)) for size in [size_of(arpa) - 1, size_of(arpa) - 2]]
    first, second = (full.keys() - table.keys() for table in pruned)
    assert [len(first), len(second)] == [1, 2]
    (removed,) = first
    change = entropy_change(full, pruned[0], removed, symbols)
    # one more than the LM's own threshold takes it out, one less does not
    at = math.expm1(change)
    assert removed not in table_of(prune_ngram_lm(arpa, threshold=at * (1 + 1e-6) + 1e-12))
    assert removed in table_of(prune_ngram_lm(arpa, threshold=at * (1 - 1e-6) - 1e-12))


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2])
def test_pruned_lm_is_a_subset_and_sums_to_one(arpa, share):
    unigrams = len(arpa.orders[0].symbols)
    size = unigrams + int(share * (size_of(arpa) - unigrams))
    small = prune_ngram_lm(arpa, size=size)
    assert 0.9 * size <= size_of(small) <= size
    full, table = table_of(arpa), table_of(small)
    assert all(prob == full[gram][0] for gram, (prob, _) in table.items())
    assert all(gram[1:] in table and gram[:-1] in table for gram in table if len(gram) > 1)
    symbols = [g[0] for g in table if len(g) == 1 and g != ("<s>",)]
    for context in itertools.product(["<s>", *symbols[:6]], symbols[:6]):
        assert sum(10 ** log10_prob(table, context, s, 3) for s in symbols) == pytest.approx(1.0, abs=1e-6)


def test_prune_keeps_all_or_only_1_grams_at_the_limits(arpa):
    assert table_of(prune_ngram_lm(arpa, size=size_of(arpa))).keys() == table_of(arpa).keys()
    alone = prune_ngram_lm(arpa, size=len(arpa.orders[0].symbols))
    assert len(alone.orders) == 1
    assert not alone.orders[0].log10_backoffs.any()
    assert size_of(prune_ngram_lm(arpa, threshold=1e-4)) < size_of(prune_ngram_lm(arpa, threshold=1e-6))


def test_prune_ngram_lm_does_not_depend_on_the_rows_per_step(monkeypatch):
    arpa = estimate_ngram_lm(made_up_text(seed=5), order=3)
    expected = table_of(prune_ngram_lm(arpa, threshold=1e-4))
    monkeypatch.setattr("nemo_gpu_decoding.lm.prune._ROWS", 7)
    assert table_of(prune_ngram_lm(arpa, threshold=1e-4)) == expected


def test_lm_without_some_suffixes_is_pruned(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(
        "\\data\\\nngram 1=5\nngram 2=2\nngram 3=1\n\n\\1-grams:\n"
        "-1\t<unk>\n-99\t<s>\t-0.2\n-0.6\t</s>\n"
        "-0.5\ta\t-0.3\n-0.4\tb\t-0.1\n\n\\2-grams:\n-0.3\t<s> a\t-0.2\n-0.2\tb a\n\n"
        "\\3-grams:\n-0.01\t<s> a b\n\n\\end\\\n"
    )
    table = table_of(prune_ngram_lm(read_arpa(path), size=8))
    # what p(b | <s> a) takes from the others: p(b | a) is backed off, 10^-0.4 with a weight of 1
    assert table[("<s>", "a")][1] == pytest.approx(math.log10((1 - 10**-0.01) / (1 - 10**-0.4)))
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
def test_invalid_pruning_option_raises_an_error(arpa, options, message):
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


def test_the_small_lm_that_is_shipped_is_what_its_recipe_makes(tmp_path, monkeypatch):
    recipe = str(ASSETS / "recipe" / "small_lm.py")
    monkeypatch.setattr(sys, "argv", [recipe, str(ASSETS / "lm" / "word3.arpa"), str(tmp_path / "small.arpa"), "0.05"])
    runpy.run_path(recipe, run_name="__main__")
    assert (tmp_path / "small.arpa").read_bytes() == (ASSETS / "lm" / "word_small.arpa").read_bytes()
