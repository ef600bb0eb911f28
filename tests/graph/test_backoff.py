"""Checks of back-off weights: each kind of fault is counted, sound LMs have none."""

from __future__ import annotations

import itertools
import math

import pytest

from nemo_gpu_decoding.graph.backoff import check_backoffs
from nemo_gpu_decoding.graph.grammar import read_grammar
from tests.assets import ASSETS
from tests.graph.toy import toy_table
from tests.oracles.ngram import arpa_text, log10_prob


def log10(probability):
    return math.log10(probability)


# p(a) = 0.5, p(b) = 0.3, p(</s>) = 0.2; after a: p(b | a) = 0.6 and the rest, 0.4, by backing off
BACKED_OFF = 0.4 / (1 - 0.3)
SOUND = {
    ("<s>",): (-99.0, 0.0),
    ("a",): (log10(0.5), log10(BACKED_OFF)),
    ("b",): (log10(0.3), 0.0),
    ("</s>",): (log10(0.2), 0.0),
    ("a", "b"): (log10(0.6), 0.0),
}


def checks_of(table, tmp_path):
    (tmp_path / "lm.arpa").write_text(arpa_text(table))
    return check_backoffs(read_grammar(tmp_path / "lm.arpa").automaton)


def test_a_sound_lm_passes(tmp_path):
    found = checks_of(SOUND, tmp_path)
    assert (found.improper, found.undercut, found.longest_chain) == (0, 0, 1)
    assert found.largest_deviation < 1e-5


def test_the_shipped_lm_passes():
    found = check_backoffs(read_grammar(ASSETS / "lm" / "word3.arpa").automaton)
    assert (found.improper, found.undercut, found.longest_chain) == (0, 0, 2)


def test_wrong_back_off_weights_are_counted(tmp_path):
    found = checks_of({**SOUND, ("a",): (log10(0.5), log10(0.9))}, tmp_path)
    assert found.improper == 1
    assert found.largest_deviation == pytest.approx(0.6 + 0.9 * 0.7 - 1, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_all_contexts_of_random_lms_by_brute_force(tmp_path, seed):
    words = ("x", "y", "z")
    table = toy_table(seed=seed, words=words, specials=("<s>", "</s>"))
    found = checks_of(table, tmp_path)
    histories = [h for n in range(3) for h in itertools.product((*words, "<s>"), repeat=n)]
    sums = [sum(10 ** log10_prob(table, h, w, 3) for w in (*words, "</s>")) for h in histories]
    assert found.largest_deviation == pytest.approx(max(abs(s - 1) for s in sums), rel=1e-4)
    longer = [ngram for ngram in table if len(ngram) > 1]
    shorter = {
        ngram: table.get(ngram[:-1], (0.0, 0.0))[1] + log10_prob(table, ngram[1:-1], ngram[-1], 3)
        for ngram in longer
    }
    assert found.undercut == sum(shorter[ngram] > table[ngram][0] + 1e-3 for ngram in longer)


def test_an_end_that_a_context_lists_counts_once(tmp_path):
    backoff = (1 - 0.6 - 0.1) / (1 - 0.3 - 0.2)
    table = {**SOUND, ("a",): (log10(0.5), log10(backoff)), ("a", "</s>"): (log10(0.1), 0.0)}
    found = checks_of(table, tmp_path)
    assert found.improper == 0
    assert found.largest_deviation < 1e-5


def test_ngrams_below_their_back_off_are_counted(tmp_path):
    rare = 0.1  # p(b | a) < backoff(a) p(b)
    backoff = (1 - rare) / (1 - 0.3)
    table = {**SOUND, ("a",): (log10(0.5), log10(backoff)), ("a", "b"): (log10(rare), 0.0)}
    found = checks_of(table, tmp_path)
    assert (found.undercut, found.improper) == (1, 0)


def test_a_missing_suffix_is_backed_off_through(tmp_path):
    """The trigram a b a has the context a b, whose suffix b lists nothing: p(a) is what it replaces."""
    after = 0.7 / (1 - 0.5)
    table = {**SOUND, ("a", "b"): (log10(0.6), log10(after)), ("a", "b", "a"): (log10(0.3), 0.0)}
    found = checks_of(table, tmp_path)
    assert (found.improper, found.undercut) == (0, 1)
    assert found.largest_deviation < 1e-5
