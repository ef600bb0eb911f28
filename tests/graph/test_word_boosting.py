"""Boosting per utterance against the same bonuses composed into the graph."""

import logging
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.boosting import BoostingConfig, Phrase
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.store import save_graph
from nemo_gpu_decoding.graph.unknown_words import Speller, with_piece_labels
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting, word_boosting, words_of
from nemo_gpu_decoding.vocabulary import OTHER_CASE, Vocabulary
from tests.graph.toy import PIECES, toy_lexicon, toy_table
from tests.oracles.ngram import arpa_text, earned
from tests.oracles.viterbi import all_texts, viterbi
from tests.random_models import random_log_probs
from tests.search.word_graph.models import fst_of, make, toy_graph

pytest.importorskip("kaldifst")
FRAMES = 20


def log_probs_of(seed):
    return random_log_probs(4, FRAMES, len(PIECES) + 1, seed=seed)


@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
@pytest.mark.parametrize("seed", range(3))
def test_words_are_boosted_as_by_composition(topology, seed):
    graph, bonuses = toy_graph(seed), {"cab": 3.0, "bb": 1.5, "AB": 2.0, "a": -1.0}
    composed = fst_of(graph)
    for word, bonus in bonuses.items():
        composed.arcs["cost"][composed.arcs["output"] == graph.word_ids[word]] -= np.float32(bonus)
    static = WordGraph.from_fst(composed, graph.words)
    log_probs = log_probs_of(seed)
    request = Request(boosting=build_word_boosting(bonuses, graph))
    boosted = make(graph, topology=topology).decode(log_probs, [FRAMES] * 4, [request] * 4)
    plain = make(graph, topology=topology).decode(log_probs, [FRAMES] * 4)
    for ours, theirs in zip(boosted, make(static, topology=topology).decode(log_probs, [FRAMES] * 4), strict=True):
        assert ours.best.score == pytest.approx(theirs.best.score, abs=1e-4)
        assert ours.best.text == theirs.best.text
        counted = sum(bonuses.get(word.text, 0.0) for word in ours.best.words)
        assert ours.best.parts.boosting == pytest.approx(counted, abs=1e-6)
    assert [n.best.text for n in boosted] != [n.best.text for n in plain]


@pytest.mark.parametrize("seed", range(3))
def test_words_are_boosted_in_the_exact_search(seed):
    graph, bonuses = toy_graph(seed), {"abc": 2.5, "a": 1.0}
    by_label = {graph.word_ids[word]: bonus for word, bonus in bonuses.items()}
    decoder = make(graph, boosting=build_word_boosting(bonuses, graph))
    for b, nbest in enumerate(decoder.decode(log_probs_of(seed), [FRAMES] * 4)):
        cost, words = viterbi(fst_of(graph), log_probs_of(seed)[b].numpy(), len(PIECES), "compact", bonus=by_label)
        assert nbest.best.score == pytest.approx(-cost, abs=1e-4)
        assert tuple(word.label for word in nbest.best.words) == words


@pytest.mark.parametrize("seed", range(4))
def test_phrase_earns_its_bonus_only_if_complete(seed):
    graph = toy_graph(1)
    bonuses = {"a bb": 3.0, "bb cab": 2.0, "abc abc abc": 5.0, "cab": 1.0, "a a": -2.5, "abc": -0.5}
    boosting = build_word_boosting(bonuses, graph)
    by_labels = {tuple(graph.word_ids[word] for word in phrase.split()): bonus for phrase, bonus in bonuses.items()}
    results = make(graph, boosting=boosting).decode(log_probs_of(seed), [FRAMES] * 4)
    for ours, theirs in zip(results, make(graph).decode(log_probs_of(seed), [FRAMES] * 4), strict=True):
        labels = [word.label for word in ours.best.words]
        assert ours.best.parts.boosting == pytest.approx(earned(labels, by_labels), abs=1e-4)
        least = theirs.best.score + earned([word.label for word in theirs.best.words], by_labels)
        assert ours.best.score >= least - 1e-4  # what was best before is still there, bonus included


@pytest.mark.parametrize("seed", range(3))
def test_phrases_are_searched_exactly_among_all_texts(seed):
    graph, bonuses = toy_graph(2), {"a bb": 4.0, "bb a a": 3.0, "a": -0.5}
    by_labels = {tuple(graph.word_ids[word] for word in phrase.split()): bonus for phrase, bonus in bonuses.items()}
    log_probs = random_log_probs(1, 7, len(PIECES) + 1, seed=seed)
    costs = all_texts(fst_of(graph), log_probs[0].numpy(), len(PIECES), "compact")
    score, text = max((earned(text, by_labels) - cost, text) for text, cost in costs.items())
    best = make(graph, boosting=build_word_boosting(bonuses, graph)).decode(log_probs, [7])[0].best
    assert best.score == pytest.approx(score, abs=1e-4)
    assert tuple(word.label for word in best.words) == text


def test_word_sequence_labels_are_boosted():
    """a, then the words one and two emitted by epsilons one after the other."""
    from tests.graph.test_store import fst

    words = ("<eps>", "zero", "one", "two")
    arcs = [(0, 1, 1, 0.1, 1), (1, 0, 2, 0.2, 2), (2, 0, 3, 0.3, 3), (3, 2, 0, 0.0, 4)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), words)
    assert len(graph.arrays.word_sequences) == 1
    assert graph.most_words == 2
    log_probs = random_log_probs(1, 6, 4, seed=0)
    plain = make(graph, vocab_size=3, blank_id=3).decode(log_probs, [6])[0].best
    for phrases, bonus in (({"one": 1.0}, 1.0), ({"one two": 2.0}, 2.0), ({"zero one two": 2.5, "two": 1.0}, 3.5)):
        boosting = build_word_boosting(phrases, graph)
        best = make(graph, vocab_size=3, blank_id=3, boosting=boosting).decode(log_probs, [6])[0].best
        assert best.text == plain.text == "zero one two"
        assert best.score == pytest.approx(plain.score + bonus, abs=1e-4)


def test_unknown_phrases_and_phrases_to_be_avoided_can_be_left_out(caplog):
    assert words_of([Phrase("a bb"), Phrase("bb cab", 0.5), Phrase("d", -1.0)]) == ["a", "bb", "cab"]
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    phrases, config = [Phrase("a"), Phrase("zebra")], BoostingConfig(score_per_phrase=1.0)
    boosting = word_boosting(phrases, config, toy_graph(0), name="names.txt")
    assert boosting.score([toy_graph(0).word_ids["a"]]) == pytest.approx(1.0)
    assert "names.txt: 1 of 2 phrases left out: the graph has not all words of 'zebra'" in caplog.text


def test_word_in_another_letter_case_than_in_the_graph_is_boosted_with_a_warning(messages):
    graph, config = toy_graph(0), BoostingConfig()
    boosted = word_boosting([Phrase("Cab")], config, graph, name="phrases")
    assert messages == [OTHER_CASE]
    assert boosted.fingerprint == word_boosting([Phrase("cab")], config, graph, name="phrases").fingerprint


def test_invalid_phrase_raises_an_error_that_names_it():
    graph = toy_graph(0)
    for phrases, message in (
        ({"a zebra": 1.0}, "the graph has not all words of 'a zebra'"),
        ({" ": 1.0}, "an empty phrase"),
        ({"a": 0.0}, "the bonus of 'a' is 0.0"),
        ({}, "phrases has no phrase"),
    ):
        with pytest.raises(ValueError, match=message):
            build_word_boosting(phrases, graph)


def test_bonuses_beyond_half_the_beam_are_warned_of_once(caplog):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    boosting = build_word_boosting({"a": 5.0, "bb cab": 8.0}, toy_graph(0), name="names.txt")
    for beam, expected in ((10.0, 0), (9.0, 1), (9.0, 1)):
        make(toy_graph(0), boosting=boosting, beam=beam).decode(log_probs_of(0)[:1, :2], [2])
        message = "names.txt: a boosted word gains up to 5.0, more than half of beam_width (9.0 / 2 = 4.5)"
        assert sum(message in text for text in caplog.messages) == expected


# -- Words that the graph lacks: as in a graph that is built with them, their bonuses included ---------

UNKNOWN = OpenVocabulary(word_cost=0.5, piece_cost=0.75)
NEW_WORDS = ("ad", "bcd", "add")
VOCABULARY = Vocabulary.from_pieces(PIECES)


@lru_cache(maxsize=8)
def open_graphs(seed):
    """An open graph, and that of the same LM with more words. Only 1-grams have <unk>, as those of added words."""
    table = {
        ngram: (log10_prob, 0.0 if ngram == ("<unk>",) else backoff)
        for ngram, (log10_prob, backoff) in toy_table(seed=seed).items()
        if len(ngram) == 1 or "<unk>" not in ngram
    }
    table["<unk>",] = (-0.7, 0.0)
    path = Path(mkdtemp()) / "lm.arpa"
    path.write_text(arpa_text(table))
    lexicon = toy_lexicon()
    more = {**lexicon.spellings, **{word: (tuple(VOCABULARY.tokenize(word)),) for word in NEW_WORDS}}
    options = {"open_vocabulary": UNKNOWN, "cache": False}
    return (
        build_graph(path, lexicon, **options),
        build_graph(path, Lexicon(more, len(PIECES), beginning_tokens=(0, 1)), added_words=NEW_WORDS, **options),
    )


PHRASES = {"ad": 2.0, "bb add": 3.0, "bcd ad": 2.5, "a bcd": -1.5, "add add a": 4.0, "cab": -0.5, "bcd": 0.75}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("lm_weight", "boosting_weight"), [(1.0, 1.0), (0.6, 1.5)])
def test_words_that_the_graph_lacks_are_found_as_if_it_had_them(seed, lm_weight, boosting_weight):
    graph, rebuilt = open_graphs(seed)
    labelled = with_piece_labels(graph)
    ours = build_word_boosting(PHRASES, labelled, speller=Speller(VOCABULARY, lm_weight / boosting_weight))
    theirs = build_word_boosting(PHRASES, rebuilt)
    log_probs, frames = log_probs_of(seed), [FRAMES, FRAMES, 11, 7]

    def decoded(graph, boosting):
        fusion = Fusion(lm_weight=lm_weight, boosting=boosting, boosting_weight=boosting_weight)
        return make(graph, pieces=PIECES).with_options(make(graph).config, fusion).decode(log_probs, frames)

    found, expected = decoded(labelled, ours), decoded(rebuilt, theirs)
    for one, two in zip(found, expected, strict=True):
        assert one.best.score == pytest.approx(two.best.score, abs=1e-3)
        assert one.best.text == two.best.text
        assert one.best.tokens.tolist() == two.best.tokens.tolist()
    assert any(set(nbest.best.text.split()) & set(NEW_WORDS) for nbest in found)


@pytest.mark.parametrize("seed", range(3))
def test_piece_labels_alone_change_no_result(seed):
    graph, log_probs = open_graphs(seed)[0], log_probs_of(seed)
    labelled = with_piece_labels(graph)
    assert with_piece_labels(labelled) is labelled
    options = {"n_best": 5, "lattice": True, "pieces": PIECES}
    with pytest.raises(ValueError, match=r"pieces is \('a',\), expected .* one per token"):
        make(graph, pieces=("a",))
    for boosting in (None, {"a bb": 2.0, "cab": 1.0, "bb <unk>": 1.5}):
        both = [
            make(g, boosting=boosting and build_word_boosting(boosting, g), **options).decode(log_probs, [FRAMES] * 4)
            for g in (graph, labelled)
        ]
        for one, two in zip(*both, strict=True):
            assert [(path.text, path.score) for path in one] == [(path.text, path.score) for path in two]
    assert any("<unk>" in [graph.words[w.label] for w in nbest.best.words] for nbest in both[0])


def test_piece_loop_writes_the_pieces_that_it_reads():
    plain = open_graphs(0)[0]
    graph = with_piece_labels(plain)
    pieces, arrays = graph.pieces, graph.arrays
    spelled = arrays.arcs["olabel"] >= pieces.first
    assert (arrays.arcs["olabel"][spelled] == pieces.first + arrays.arcs["ilabel"][spelled]).all()
    assert arrays.arcs["cost"][spelled] == pytest.approx(UNKNOWN.piece_cost)
    assert graph.expanded(pieces.first) == graph.expanded(pieces.end) == []
    assert set(graph.output_words) == set(plain.output_words)
    assert graph.most_words == plain.most_words == 2
    for before, after in ((plain.arrays.arcs, arrays.arcs), (plain.arrays.epsilons, arrays.epsilons)):
        assert [plain.expanded(n) for n in before["olabel"]] == [graph.expanded(n) for n in after["olabel"]]


def test_unknown_words_that_cannot_be_spelled_are_named(tmp_path):
    graph = open_graphs(0)[0]
    labelled, speller = with_piece_labels(graph), Speller(VOCABULARY)
    for phrases, message in (
        ({"zebra": 1.0}, "has the character 'z', which is not in the model's vocabulary"),
        ({"a▁b": 1.0}, "the word 'a▁b' is spelled '▁a' '▁b', expected pieces of which the first begins a word"),
        ({"<unk> a": 1.0}, "'<unk> a' goes on after <unk>"),
    ):
        with pytest.raises(ValueError, match=message):
            build_word_boosting(phrases, labelled, speller=speller)
    with pytest.raises(ValueError, match="is not one with_piece_labels, expected None"):
        build_word_boosting({"ad": 1.0}, graph, speller=speller)
    with pytest.raises(ValueError, match="was built without an open vocabulary"):
        with_piece_labels(toy_graph(0))
    with pytest.raises(ValueError, match="weight_ratio is -1"):
        Speller(VOCABULARY, -1.0)
    with pytest.raises(ValueError, match="expected the graph that it was made of"):
        save_graph(labelled, tmp_path / "g.graph")


def test_phrase_of_a_request_needs_tokens_only_for_words_that_the_graph_lacks(messages):
    labelled = with_piece_labels(open_graphs(0)[0])
    speller = Speller(Vocabulary.from_pieces([piece for piece in PIECES if piece.strip("▁") != "b"]))
    phrases = [Phrase("cab ad", aliases=("cab",)), Phrase("zebra ad"), Phrase("<unk> a")]
    boosting = word_boosting(phrases, BoostingConfig(), labelled, name="requests", speller=speller)
    assert {("cab", "ad"), ("cab",)} <= set(boosting.table.keys)
    assert any(
        "2 of 4 phrases left out: 'zebra ad': phrase 'zebra' has the character" in message for message in messages
    )
