"""Words of a request that a closed vocabulary lacks: as in a graph that has them, in both searches."""

from dataclasses import replace
from functools import lru_cache

import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.store import load_graph, save_graph
from nemo_gpu_decoding.graph.unknown_words import NEW_WORDS, Speller, with_new_words
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph.config import COMPOSITIONS
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.contract.subject import all_facts
from tests.graph.toy import PIECES, toy_lexicon
from tests.random_models import random_log_probs
from tests.search.word_graph.models import LM, VOCAB, lm_table, make, make_paged, random_lm

pytest.importorskip("kaldifst")
FRAMES = [14, 9, 14, 5]
PHRASES = {"ad": 8.0, "bb add": 9.0, "bcd ad": 7.0, "cab": 1.0}
VOCABULARY = Vocabulary.from_pieces(PIECES)
SEARCHES = [("cuda_wfst", "cpu", ""), ("cuda_wfst", "cuda", ""), ("paged_biglm", "cuda", "lazy")]
SEARCHES += [("paged_biglm", "cpu", composition) for composition in COMPOSITIONS]


@lru_cache(maxsize=4)
def small_lm(seed):
    """Without longer n-grams with <unk>: added words have none either."""
    table = {gram: value for gram, value in lm_table(seed=seed).items() if len(gram) == 1 or "<unk>" not in gram}
    return LM({**table, ("<unk>",): (-0.7, 0.0)})


def closed_graph(seed):
    return small_lm(seed).graph


def open_graph_with_the_words(seed):
    spelled = {word: (tuple(VOCABULARY.tokenize(word)),) for word in ("ad", "bcd", "add")}
    lexicon = Lexicon({**toy_lexicon().spellings, **spelled}, len(PIECES), beginning_tokens=(0, 1))
    unknown = OpenVocabulary()
    return build_graph(small_lm(seed).path, lexicon, open_vocabulary=unknown, added_words=tuple(spelled), cache=False)


def decoder_of(search, seed, graph, **options):
    strategy, backend, composition = search
    options = {"backend": backend, "max_active": 500, **options}
    if strategy == "cuda_wfst":
        return make(graph, pieces=PIECES, **options)
    small, large = small_lm(seed), random_lm(seed + 10, keep=0.7)
    return make_paged(small, large, graph=graph, pieces=PIECES, composition=composition, **options)


def request_of(graph, **options):
    return Request(boosting=build_word_boosting(PHRASES, graph, **options), boosting_weight=1.0)


@pytest.mark.parametrize("search", SEARCHES, ids=" ".join)
@pytest.mark.parametrize("seed", range(2))
def test_new_words_of_a_request_equal_those_of_a_larger_graph(search, seed, emulated_runtime):
    decoder = decoder_of(search, seed, closed_graph(seed))
    other = decoder_of(search, seed, open_graph_with_the_words(seed))
    own = request_of(decoder.opened_graph, speller=Speller(VOCABULARY))
    theirs = request_of(other.graph)
    log_probs = random_log_probs(4, FRAMES[0], VOCAB + 1, seed=seed)
    found = decoder.decode(log_probs, FRAMES, [own, None, own, own])
    expected = other.decode(log_probs, FRAMES, [theirs] * 4)
    for n in (0, 2, 3):
        assert found[n].best.score == pytest.approx(expected[n].best.score, abs=1e-3)
        assert found[n].best.text == expected[n].best.text
        assert found[n].best.tokens.tolist() == expected[n].best.tokens.tolist()
        assert found[n].best.parts.boosting > 0
    assert {"ad", "add", "bcd"} & set(" ".join(nbest.best.text for nbest in found).split())


@pytest.mark.parametrize("search", SEARCHES, ids=" ".join)
def test_new_words_do_not_change_other_utterances(search, emulated_runtime):
    decoder = decoder_of(search, 0, closed_graph(0), beam=9.0)
    own = request_of(decoder.opened_graph, speller=Speller(VOCABULARY))
    known = Request(boosting=build_word_boosting({"cab": 4.0, "a bb": 3.0}, decoder.graph), boosting_weight=1.0)
    log_probs = random_log_probs(4, FRAMES[0], VOCAB + 1, seed=5)
    expected = decoder.decode(log_probs, FRAMES, [None, known, None, known])
    mixed = decoder.decode(log_probs, FRAMES, [None, known, own, known])
    for n in (0, 1, 3):
        assert all_facts([mixed[n]]) == all_facts([expected[n]])
    streams = decoder.open(4, [own] * 4)
    decoder.push(streams, log_probs[:, :5], [5] * 4)
    decoder.close(streams)
    decoder.reopen(streams, range(4), [own, known, None, known])
    decoder.push(streams, log_probs, FRAMES)
    again = decoder.close(streams)
    for n in (1, 2, 3):
        assert all_facts([again[n]]) == all_facts([expected[n]])


def test_graphs_of_other_versions_are_to_be_built_anew(tmp_path):
    graph = closed_graph(0)
    save_graph(graph, tmp_path / "new.graph")
    assert with_new_words(load_graph(tmp_path / "new.graph")).words == with_new_words(graph).words
    report = {name: value for name, value in graph.report.items() if name != NEW_WORDS}
    save_graph(replace(graph, report=report), tmp_path / "old.graph")
    old = load_graph(tmp_path / "old.graph")
    log_probs = random_log_probs(1, 9, VOCAB + 1, seed=1)
    assert all_facts(make(old).decode(log_probs, [9])) == all_facts(make(graph).decode(log_probs, [9]))
    with pytest.raises(ValueError, match="does not say where words that it lacks begin: build it anew"):
        _ = make(old).opened_graph


def test_both_lms_need_unk_for_new_words():
    small = small_lm(0)
    decoder = make_paged(small, LM({gram: value for gram, value in lm_table(seed=10).items() if "<unk>" not in gram}))
    with pytest.raises(ValueError, match=r"large .* has no <unk>, expected one for words that the graph lacks"):
        _ = decoder.opened_graph
