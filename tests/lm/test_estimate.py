"""Kneser-Ney LMs against the formulas of Chen & Goodman, counted one by one."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.estimate import estimate_ngram_lm, write_arpa
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
        for ids, prob, backoff in zip(
            block.symbols, block.log10_probs, block.log10_backoffs, strict=True
        )
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
            g: c if len(g) == order or g[0] == "<s>" else len(before[g])
            for g, c in raw.items()
            if g != ("<s>",)
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
        found = {
            g: c for g, c in self.counts.items() if len(g) == len(context) + 1 and g[:-1] == context
        }
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
    seen = {g for g in oracle.counts if len(g) == order} | {("<s>",)} - (
        {("<s>",)} if order == 1 else set()
    )
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


def test_given_symbols_and_unknown_ones():
    text = made_up_text(6)
    arpa = estimate_ngram_lm(text, 2, symbols=["w0", "w1", "never"])
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
    assert "too small or too regular" in caplog.text
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
def test_bad_input(text, options, message):
    with pytest.raises(ValueError, match=message):
        estimate_ngram_lm(text, **{"order": 2, **options})
