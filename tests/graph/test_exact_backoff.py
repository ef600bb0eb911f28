"""G with exact back-off: the cheapest path of a bigram text costs what the LM says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.automaton import arcs_by_state
from nemo_gpu_decoding.graph import grammar as grammars
from nemo_gpu_decoding.graph.grammar import grammar_fst, read_grammar, with_exact_backoff
from tests.oracles.ngram import arpa_text, random_table


def cheapest(fst, labels, backoff):
    """The cost of the cheapest path that reads these labels, with any number of back-offs between them."""
    costs = np.full(fst.num_states, np.inf)
    costs[fst.start] = 0.0
    sources = fst.sources()
    for label in [*labels, None]:
        for _ in range(3):
            step = fst.arcs[fst.arcs["input"] == backoff]
            np.minimum.at(costs, step["target"], costs[sources[fst.arcs["input"] == backoff]] + step["cost"])
        if label is None:
            return float((costs + fst.final_costs).min())
        following = np.full(fst.num_states, np.inf)
        step = fst.arcs["input"] == label
        np.minimum.at(following, fst.arcs["target"][step], costs[sources[step]] + fst.arcs["cost"][step])
        costs = following
    raise AssertionError


@pytest.mark.parametrize("seed", range(3))
def test_listed_ngram_cannot_be_avoided_by_backing_off(tmp_path, seed):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa_text(random_table(["a", "b", "c"], 2, 0.6, seed)))
    grammar = read_grammar(path)
    labels = np.arange(1, len(grammar.words) + 1)
    backoff = len(labels) + 1
    plain = grammar_fst(grammar, labels, backoff)
    exact = grammar_fst(replace(grammar, automaton=with_exact_backoff(grammar.automaton)), labels, backoff)
    evaded = 0
    for text in itertools.chain.from_iterable(itertools.product(range(len(labels)), repeat=n) for n in range(3)):
        expected = -grammar.automaton.score(text)
        read = [labels[word] for word in text]
        assert cheapest(exact, read, backoff) == pytest.approx(expected, abs=1e-4)
        evaded += cheapest(plain, read, backoff) < expected - 1e-3
    assert evaded


@pytest.mark.parametrize("seed", range(3))
def test_no_listed_word_is_likelier_by_backing_off_over_several_orders(tmp_path, seed):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa_text(random_table(["a", "b", "c"], 3, 0.6, seed)))
    states, arcs = with_exact_backoff(read_grammar(path).automaton).arrays
    sources, arcs = arcs_by_state(states, arcs)
    weights = {(s, label): w for s, label, w in zip(sources.tolist(), arcs["label"], arcs["weight"], strict=True)}
    for (state, label), weight in weights.items():
        paid, at = 0.0, state
        while int(states["backoff_to"][at]) != at:
            paid, at = paid + states["backoff_weight"][at], int(states["backoff_to"][at])
            assert paid + weights.get((at, label), -np.inf) <= weight + 2e-3


def test_too_many_copies_leave_the_lm_unchanged(tmp_path, monkeypatch, caplog):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa_text(random_table(["a", "b", "c"], 2, 0.6, 1)))
    automaton = read_grammar(path).automaton
    monkeypatch.setattr(grammars, "MOST_COPIED", 0)
    with caplog.at_level("WARNING", "nemo_gpu_decoding"):
        assert with_exact_backoff(automaton) is automaton
    assert "less likely than by back-off" in caplog.text


def test_an_lm_without_such_ngrams_is_unchanged(tmp_path):
    path = tmp_path / "lm.arpa"
    table = {ngram: (-0.1 if len(ngram) > 1 else -2.0, -0.5) for ngram in random_table(["a", "b"], 2, 0.6, 1)}
    path.write_text(arpa_text(table))
    automaton = read_grammar(path).automaton
    assert with_exact_backoff(automaton) is automaton
