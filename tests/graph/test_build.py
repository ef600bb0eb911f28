"""Graphs against what they are made of: each text costs what LM and lexicon say, no other is in."""

import itertools
import logging
import math

import numpy as np
import pytest

from nemo_gpu_decoding.graph.build import build_graph, compose_and_optimize
from nemo_gpu_decoding.graph.grammar import grammar_fst, read_grammar
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.graph.toy import LEXICON, PIECES, WORDS, random_texts, spellings_of, toy_arpa, toy_lexicon, toy_table
from tests.oracles.ngram import arpa_text, log10_prob

kaldifst = pytest.importorskip("kaldifst")
LN10 = math.log(10)


def costs_of(graph, tokens):
    """{words: cost} of all paths that read the tokens and end; brute force over the arrays."""
    states, arcs, epsilons, _ = graph.arrays
    paths = {(graph.start, ()): 0.0}

    def relax(table, key, cost):
        table[key] = min(cost, table.get(key, math.inf))

    def with_epsilons(table):
        closed = dict(table)
        for (state, words), cost in table.items():
            for e in range(states["epsilon_begin"][state], states["epsilon_end"][state]):
                more = tuple(graph.expanded(int(epsilons["olabel"][e])))
                relax(closed, (int(epsilons["target"][e]), words + more), cost + epsilons["cost"][e])
        return closed

    for token in tokens:
        next_paths: dict = {}
        for (state, words), cost in with_epsilons(paths).items():
            for a in range(states["arc_begin"][state], states["arc_end"][state]):
                if arcs["ilabel"][a] == token:
                    more = tuple(graph.expanded(int(arcs["olabel"][a])))
                    relax(next_paths, (int(arcs["target"][a]), words + more), cost + arcs["cost"][a])
        paths = next_paths
    ends: dict = {}
    for (state, words), cost in with_epsilons(paths).items():
        relax(ends, tuple(graph.words[w] for w in words), cost + states["final_cost"][state])
    return {words: cost for words, cost in ends.items() if cost < math.inf}


def cheapest_lm_cost(table, text, order):
    """-ln p(text); as in any WFST, listed n-grams may back off. An n-gram makes its prefixes contexts."""
    table = dict(table)
    for ngram in sorted(table, key=len):
        for end in range(2, len(ngram)):
            prefix = ngram[:end]
            table.setdefault(prefix, (log10_prob(table, prefix[:-1], prefix[-1], order), 0.0))

    def step(context, symbol):
        """[(cost, n-gram used)] of every way to read a symbol after a context."""
        ways, paid = [], 0.0
        while True:
            if (*context, symbol) in table:
                ways.append((paid - table[(*context, symbol)][0], (*context, symbol)))
            if not context:
                return ways
            paid -= table.get(context, (0.0, 0.0))[1]
            context = context[1:]

    paths = {("<s>",)[: order - 1]: 0.0}
    for symbol in (*text, "</s>"):
        next_paths: dict = {}
        for context, cost in paths.items():
            for more, ngram in step(context, symbol):
                after = ngram[max(0, len(ngram) - order + 1) :]
                next_paths[after] = min(next_paths.get(after, math.inf), cost + more)
        paths = next_paths
    return min(paths.values()) * LN10


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_texts_cost_what_lm_and_lexicon_say(tmp_path, order, seed):
    keep = 0.3
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=seed, order=order, keep=keep)
    table = toy_table(seed=seed, order=order, keep=keep)
    graph = build_graph(arpa, toy_lexicon(), cache=False)
    for text in random_texts(25, seed=seed):
        for tokens in spellings_of(text):
            assert costs_of(graph, tokens)[text] == pytest.approx(cheapest_lm_cost(table, text, order), abs=1e-4)


def test_token_sequences_stand_for_all_their_texts_and_no_others(tmp_path):
    graph = build_graph(toy_arpa(tmp_path / "lm.arpa", seed=0, order=2), toy_lexicon(), cache=False)
    by_tokens: dict = {}
    for text in itertools.chain.from_iterable(itertools.product(WORDS, repeat=n) for n in (1, 2)):
        for tokens in spellings_of(text):
            by_tokens.setdefault(tokens, set()).add(text)
    for tokens in itertools.chain.from_iterable(itertools.product(range(len(PIECES)), repeat=n) for n in (1, 2, 3)):
        assert {text for text in costs_of(graph, tokens) if len(text) <= 2} == by_tokens.get(tokens, set())


def test_redundant_backoff_states_are_removed(tmp_path):
    grammar = read_grammar(toy_arpa(tmp_path / "lm.arpa", seed=3, order=3, keep=0.05))
    g = grammar_fst(grammar, np.arange(1, len(grammar.words) + 1), 99)
    arcs = np.diff(g.arc_begin)
    does_nothing_else = (arcs == np.bincount(g.sources()[g.arcs["input"] == 99], minlength=g.num_states)) & (arcs > 0)
    does_nothing_else[g.start] = False
    states, suffix = grammar.automaton.arrays.states, grammar.automaton.arrays.states["backoff_to"]
    own_end = ~np.isclose(states["final_weight"], states["backoff_weight"] + states["final_weight"][suffix], rtol=1e-6)
    assert g.num_states < grammar.automaton.num_states
    assert does_nothing_else.sum() <= own_end.sum()


def test_report_names_contexts_and_words_that_are_left_out(tmp_path):
    table = toy_table(seed=0, words=("a", "ab", "zebra"))
    (tmp_path / "lm.arpa").write_text(arpa_text(table))
    report = build_graph(tmp_path / "lm.arpa", toy_lexicon(), cache=False).report
    assert report["LM words without spelling"] == 1
    assert report["examples of them"] == ["zebra"]
    assert report["lexicon words not in the LM"] == len(LEXICON) - 2
    assert report["words"] == 2
    assert report["n-grams by order"] == [sum(len(n) == order for n in table) for order in (1, 2, 3)]
    assert report["n-grams"] == len(table)
    assert report["n-grams that end in such a word"] >= sum(n[-1] == "zebra" for n in table)
    contexts = read_grammar(tmp_path / "lm.arpa").automaton.num_states
    assert report["LM contexts kept"] <= report["LM contexts"] == contexts
    assert 0 < report["epsilon arcs"] <= report["epsilon-closure arcs"]


def test_an_lm_over_tokens_is_refused(tmp_path):
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, order=1, words=PIECES)
    with pytest.raises(ValueError, match="is an LM over tokens"):
        build_graph(arpa, Vocabulary.from_pieces(PIECES), cache=False)


def test_vocabulary_spells_the_words(tmp_path):
    vocabulary = Vocabulary.from_pieces(PIECES)
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, words=("a", "ab", "bcd", "zebra"))
    graph = build_graph(arpa, vocabulary, cache=False)
    assert set(graph.words) == {"<eps>", "a", "ab", "bcd"}
    assert graph.report["examples of them"] == ["zebra"]
    assert "zebra" in graph.report["why"]
    assert ("bcd",) in costs_of(graph, (1, 3, 4))


def test_guessed_spelling_is_reported(tmp_path, caplog):
    arpa = tmp_path / "lm.arpa"
    arpa.write_text(arpa_text(toy_table(seed=0)))
    merges = Vocabulary.from_pieces(["▁a", "▁b", "▁", "a", "b", "c", "A", "B"])
    unigram = Vocabulary.from_pieces(["▁abc", *merges.pieces])
    with caplog.at_level(logging.WARNING, "nemo_gpu_decoding"):
        build_graph(arpa, merges, cache=False)
        assert not caplog.records
        build_graph(arpa, unigram, cache=False)
    assert "spelled with the fewest pieces" in caplog.text


def test_open_vocabulary_reads_any_word(tmp_path):
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=1)
    unknown = OpenVocabulary(word_cost=1.0, piece_cost=0.5)
    graph = build_graph(arpa, toy_lexicon(), open_vocabulary=unknown, cache=False)
    table = toy_table(seed=1)
    found = costs_of(graph, (0, 4, 4))  # ▁a d d: no word
    assert found == {("<unk>",): pytest.approx(cheapest_lm_cost(table, ("<unk>",), 3) + 1.0 + 3 * 0.5, abs=1e-4)}
    assert ("ab", "<unk>") in costs_of(graph, (0, 2, 1))
    assert ("<unk>",) not in costs_of(graph, (0, 1))  # ▁a ▁b: two words, whatever they are


class TestBadInput:
    def test_lm_and_lexicon_without_a_common_word_are_refused(self, tmp_path):
        arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, words=("x", "y"))
        with pytest.raises(ValueError, match="have no word in common"):
            build_graph(arpa, toy_lexicon(), cache=False)

    def test_token_beyond_the_vocabulary_is_named(self, tmp_path):
        arpa = toy_arpa(tmp_path / "lm.arpa", seed=0)
        with pytest.raises(ValueError, match=r"has the token [34], expected 0 \.\. 2 \(vocab_size\)"):
            build_graph(arpa, Lexicon(toy_lexicon().spellings, vocab_size=3), cache=False)

    def test_open_vocabulary_needs_unk(self, tmp_path):
        arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, specials=("<s>", "</s>"))
        with pytest.raises(ValueError, match="has no <unk>"):
            build_graph(arpa, toy_lexicon(), open_vocabulary=OpenVocabulary(), cache=False)

    def test_open_vocabulary_needs_first_tokens(self, tmp_path):
        arpa = toy_arpa(tmp_path / "lm.arpa", seed=0)
        lexicon = Lexicon(toy_lexicon().spellings, len(PIECES))
        with pytest.raises(ValueError, match=r"beginning_tokens is \(\) with an open vocabulary"):
            build_graph(arpa, lexicon, open_vocabulary=OpenVocabulary())

    def test_negative_costs_of_unknown_words_are_refused(self):
        with pytest.raises(ValueError, match=r"piece_cost is -1\.0"):
            OpenVocabulary(piece_cost=-1.0)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("a\n", "line 1: the word 'a' has no pieces"), ("a ▁a\nb ▁q\n", "'b' is spelled with '▁q'")],
    )
    def test_lexicon_files_are_read_and_faults_named(self, tmp_path, text, message):
        (tmp_path / "lexicon.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            Lexicon.from_file(tmp_path / "lexicon.txt", PIECES)

    @pytest.mark.parametrize(
        ("spellings", "message"),
        [
            ({"a": ()}, "'a' has an empty spelling"),
            ({"a": ((),)}, "'a' has an empty spelling"),
            ({"a": ((1,), (1,))}, "'a' has the same spelling twice"),
            ({"a": ((-1,),)}, r"'a' has the token -1, expected 0 \.\. 1"),
        ],
    )
    def test_lexicon_without_words_or_spelling_is_refused(self, spellings, message):
        with pytest.raises(ValueError, match=message):
            Lexicon(spellings, vocab_size=2)


# -- Spellings for character models, in which a space is a token of its own ---------------------------
WITH_SPACE = Vocabulary(("a", " ", "b"), "char")
WITHOUT = Vocabulary(("a", "b"), "char")


def test_spellings_begin_with_a_space_where_a_piece_is_one():
    lexicon = Lexicon.from_vocabulary(["ab", "b"], WITH_SPACE)
    assert lexicon.spellings == {"ab": ((0, 2), (1, 0, 2)), "b": ((2,), (1, 2))}
    assert lexicon.beginning_tokens == (1,)
    lexicon = Lexicon.from_vocabulary(["ab"], WITHOUT)
    assert (lexicon.spellings, lexicon.beginning_tokens) == ({"ab": ((0, 1),)}, (0, 1))


def test_graph_of_a_character_model_reads_the_space(tmp_path):
    arpa = tmp_path / "lm.arpa"
    arpa.write_text("\\data\\\nngram 1=3\n\n\\1-grams:\n-99 <s>\n-1 </s>\n-1 ab\n\n\\end\\\n")
    assert set(build_graph(arpa, WITH_SPACE, cache=False).arrays.arcs["ilabel"].tolist()) == {0, 1, 2}


# -------------------------------------------------------------------- what no determinization ends for
SAME_SPELLING = [(0, 5, 1, 0), (0, 5, 2, 0), (0, 6, 3, 0), (0, 7, 4, 0)]  # source, token, word, target: 5 is 1 or 2


@pytest.mark.parametrize(
    ("grammar", "finals", "reason"),
    [
        # which of the two words it was shows after any number of them
        ([(0, 1, 1, 1), (0, 2, 2, 2), (1, 1, 1, 1), (2, 2, 2, 2), (1, 3, 3, 3), (2, 4, 4, 3)], [3], "10,016 states"),
        ([(0, 1, 1, 0), (0, 2, 2, 0)], [0], "not functional"),  # it never shows
    ],
)
def test_graph_that_cannot_be_determinised_is_an_error(grammar, finals, reason):
    def fst(arcs, finals):
        columns = np.array(arcs).T
        costs = np.full(columns[[0, 3]].max() + 1, np.inf)
        costs[finals] = 0
        source, token, word, target = columns
        return Fst.from_arcs(0, costs, source, token, word, np.zeros(len(arcs), np.float32), target)

    with pytest.raises(ValueError, match=f"L o G cannot be determinized .*{reason}"):
        compose_and_optimize(fst(SAME_SPELLING, [0]), fst(grammar, finals))


@pytest.mark.parametrize("cache", [False, True])
def test_words_that_the_model_cannot_spell_are_warned_of(tmp_path, caplog, cache):
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, words=("a", "ab", "ZEBRA"))
    for _ in range(2):  # with a cache, the second graph is loaded
        caplog.clear()
        build_graph(arpa, Vocabulary.from_pieces(PIECES), cache=tmp_path / "cache" if cache else False)
        assert "1 of 3 words have no spelling, e.g. ZEBRA, and are left out: phrase 'ZEBRA' has" in caplog.text
    arpa = toy_arpa(tmp_path / "lm.arpa", seed=0, words=("1", "A", "AB"))
    with pytest.raises(ValueError, match=r"no word in common, e\.g\. '1', 'A', 'AB': .* letter case matters"):
        build_graph(arpa, Vocabulary.from_pieces(PIECES), cache=False)
