"""The search against exact Viterbi, and with a large LM against all texts rescored by definition."""

import itertools
import threading

import numpy as np
import pytest
import torch

from benchmarks.ours import ABLATIONS
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.build import build_graph, load_fst_graph
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.graph.lexicon import Lexicon, OpenVocabulary
from nemo_gpu_decoding.graph.unknown_words import Speller
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cpu_engine
from nemo_gpu_decoding.search.word_graph.config import COMPOSITIONS, PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.decoder import NO_END, CudaWFST, PagedBigLM
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.graph.test_store import fst
from tests.graph.toy import BLANK, LEXICON, PIECES, WORDS, toy_lexicon, write_tlg
from tests.oracles.ngram import rescored, sentence_cost
from tests.oracles.viterbi import all_texts, viterbi
from tests.random_models import random_log_probs
from tests.search.word_graph.both import limit_tokens
from tests.search.word_graph.models import (
    ALL,
    LM,
    VOCAB,
    WIDE,
    fst_of,
    lm_table,
    make,
    make_paged,
    nested_pair,
    open_graph,
    random_lm,
    toy_graph,
)

pytest.importorskip("kaldifst")
TOPOLOGIES = ("compact", "normal", "minimal")


# graphs with words that the LM does not list
OPEN = OpenVocabulary(word_cost=0.5, piece_cost=0.5)
RARE = OpenVocabulary(word_cost=5.0, piece_cost=2.0)


def labels(path):
    return tuple(word.label for word in path.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("open_vocabulary", [None, OPEN])
def test_best_path_equals_that_of_viterbi(topology, seed, open_vocabulary):
    graph = toy_graph(seed % 3, open_vocabulary=open_vocabulary)
    log_probs = random_log_probs(4, 14, len(PIECES) + 1, seed=seed)
    weights = {"lm_weight": 0.7, "acoustic_scale": 1.3}
    for b, nbest in enumerate(make(graph, topology=topology, **weights).decode(log_probs, [14, 11, 6, 3])):
        frames = log_probs[b, : nbest.num_frames].numpy()
        cost, words = viterbi(fst_of(graph), frames, len(PIECES), topology, **weights)
        if np.isinf(cost):
            assert nbest.notes == (NO_END,)
            continue
        assert not nbest.notes
        assert nbest.best.score == pytest.approx(-cost, abs=1e-4)
        assert labels(nbest.best) == words


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_narrow_beam_never_scores_better(topology):
    log_probs = random_log_probs(3, 30, len(PIECES) + 1, seed=8)
    results = [
        make(toy_graph(1), topology=topology, beam=beam).decode(log_probs, [30] * 3) for beam in (2.0, 4.0, 8.0, 100.0)
    ]
    # a path that has not come to a final state has not paid for the end yet
    scores = [[-np.inf if n.notes else n.best.score for n in nbests] for nbests in results]
    assert np.isfinite(scores[-1]).all()
    for narrow, wide in itertools.pairwise(scores):
        assert all(a <= b + 1e-4 for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize(("given", "beam"), [({}, 0.5), ({"composition": "lazy"}, 0.5), ({"composition": "let"}, 1.0)])
def test_min_active_keeps_tokens_outside_the_beam(given, beam):
    """All tokens if there are fewer; the results are then those of a wide beam."""
    log_probs = random_log_probs(2, 30, len(PIECES) + 1, seed=8, sharpness=0.5)

    def decoder(**more):
        if given:
            return make_paged(random_lm(1), random_lm(20, keep=0.8), **given, **more)
        return make(toy_graph(1), **more)

    def counts(**more):
        own = decoder(**more)
        streams, found = own.open(2), []
        for t in range(30):
            own.push(streams, log_probs[:, t : t + 1], [1, 1])
            states = streams.engine.results([0, 1], 1, final=False)
            found.append([int(state.counters["tokens"][0]) for state in states])
        return np.array(found), [nbest.best.score for nbest in own.close(streams)]

    narrow, scores = counts(beam=beam)
    wider, better = counts(beam=beam, min_active=12)
    wide, best = counts(beam=60.0)
    assert narrow.min() < 12 < wide[2:].min()
    assert (wider[2:] >= 12).all()
    assert wider.mean() < 0.7 * wide.mean()
    assert sum(scores) <= sum(better)
    same, own = counts(beam=8.0, min_active=50000)
    if given.get("composition") != "let":  # there the LM contexts of a group stay within the beam
        assert own == best
    assert (same <= wide).all()


@pytest.mark.parametrize("paged", [False, True])
def test_full_token_table_is_noted_and_keeps_max_active(monkeypatch, paged):
    log_probs, options = (
        random_log_probs(2, 30, len(PIECES) + 1, seed=8, sharpness=0.3),
        {"beam": 20.0, "max_active": 6},
    )

    def decoded():
        lms = random_lm(1), random_lm(20, keep=0.8)
        decoder = make_paged(*lms, **options) if paged else make(toy_graph(1), **options)
        return decoder.decode(log_probs, [30] * 2)

    expected = decoded()
    limit_tokens(monkeypatch, 4 * 6)
    tight = decoded()
    assert all("table was full" in n.notes[0] for n in tight)
    assert [n.best.score for n in tight] == [n.best.score for n in expected]


def two_words(first, second):
    """A graph that reads label 0 and then writes w1 or w2; (source, input, output, cost, target) rows of both."""
    return WordGraph.from_fst(fst([*first, *second, (1, 1, 0, 0.0, 2)], 4, [1, 2]), ("<eps>", "w1", "w2"))


def test_equal_paths_keep_the_first_arc():
    graph = two_words([(0, 1, 1, 1.0, 1)], [(0, 1, 2, 1.0, 1)])
    first = graph.words[graph.arrays.arcs["olabel"][0]]
    assert make(graph, vocab_size=1, blank_id=1).decode(random_log_probs(1, 3, 2, seed=0), [3])[0].best.text == first


def test_penalty_behind_an_epsilon_does_not_prune():
    """The path by the epsilon leads at first, and falls behind by its word's penalty."""
    graph = two_words([(0, 0, 1, 0.0, 3), (3, 1, 0, 0.0, 1)], [(0, 1, 2, 6.0, 1)])
    assert len(graph.arrays.epsilons) == 1
    says = torch.tensor([[[0.0, -50.0]]])
    found = [
        make(graph, vocab_size=1, blank_id=1, beam=5.0, boosting=boosting).decode(says, [1])[0].best
        for boosting in (None, build_word_boosting({"w1": -20.0}, graph))
    ]
    assert [(path.text, path.score) for path in found] == [("w1", 0.0), ("w2", -6.0)]


def test_loops_of_ready_made_graphs_extend_only_their_token():
    """The loop behind both words reads label 0: it goes on with the token of w1 and not with that of w2."""
    rows = [(0, 1, 1, 0.0, 1), (0, 2, 2, 0.0, 1), (1, 1, 0, 0.0, 1)]
    graph = WordGraph.from_fst(fst(rows, 2, [1]), ("<eps>", "w1", "w2"))
    log_probs = torch.tensor([[[0.6, 0.3, 0.1], [0.8, 0.1, 0.1]]]).log()
    decoder = make(graph, vocab_size=2, blank_id=2, topology="graph", n_best=2, lattice_beam=10.0)
    first, second = decoder.decode(log_probs, [2])[0]
    assert [(path.text, path.repeats.tolist()) for path in (first, second)] == [("w1", [2]), ("w2", [1])]
    assert [float(path.token_confidence[0]) for path in (first, second)] == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_words_are_spelled_by_their_tokens(topology):
    graph = toy_graph(2)
    for nbest in make(graph, topology=topology).decode(random_log_probs(6, 40, len(PIECES) + 1, seed=3), [40] * 6):
        path, end = nbest.best, 0
        assert path.words
        for word in path.words:
            assert tuple(PIECES[t] for t in path.tokens[word.first_token : word.end_token]) in LEXICON[word.text]
            assert word.first_token == end
            end = word.end_token
            assert word.start_frame == path.frames[word.first_token]
            last = word.end_token - 1
            assert word.end_frame == path.frames[last] + path.repeats[last]
        assert end == len(path.tokens)
        assert path.text == " ".join(word.text for word in path.words)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_parts_add_up_and_the_acoustic_part_is_the_alignments(topology):
    graph = toy_graph(0)
    log_probs = random_log_probs(3, 25, len(PIECES) + 1, seed=5)
    for b, nbest in enumerate(make(graph, topology=topology, acoustic_scale=2.0).decode(log_probs, [25] * 3)):
        path = nbest.best
        alignment = np.full(25, len(PIECES))
        for token, frame, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
            alignment[frame : frame + repeats] = token
        row = log_probs[b].numpy().astype(np.float64)
        assert path.parts.acoustic == pytest.approx(2 * row[np.arange(25), alignment].sum(), abs=1e-3)
        assert path.parts.acoustic + path.parts.lm == pytest.approx(path.score, abs=1e-9)
        for token, frame, repeats, confidence in zip(
            path.tokens, path.frames, path.repeats, path.token_confidence, strict=True
        ):
            assert confidence == pytest.approx(np.exp(row[frame : frame + repeats, token]).mean(), rel=1e-4)


def test_long_streams_keep_their_precision():
    log_probs = random_log_probs(1, 6000, len(PIECES) + 1, seed=5)
    path = make(toy_graph(0), beam=30.0, acoustic_scale=50.0).decode(log_probs, [6000])[0].best
    alignment = np.full(6000, len(PIECES))
    for token, frame, repeats in zip(path.tokens, path.frames, path.repeats, strict=True):
        alignment[frame : frame + repeats] = token
    acoustic = 50 * log_probs[0].numpy().astype(np.float64)[np.arange(6000), alignment].sum()
    assert path.parts.acoustic == pytest.approx(acoustic, abs=0.05)


def test_blank_may_be_any_column():
    graph = toy_graph(0)
    log_probs = random_log_probs(2, 20, len(PIECES) + 1, seed=1)
    usual = make(graph).decode(log_probs, [20, 20])
    shifted = graph.arrays.arcs.copy()
    shifted["ilabel"] += 1
    moved = WordGraph(graph.arrays._replace(arcs=shifted), graph.start, graph.words, None, name="moved")
    first = make(moved, blank_id=0).decode(log_probs[:, :, [5, 0, 1, 2, 3, 4]], [20, 20])
    assert [n.best.score for n in first] == [n.best.score for n in usual]
    assert [n.best.text for n in first] == [n.best.text for n in usual]


# ---------------- Words that the LM does not list: spelled by their pieces, and never an empty result
def sharp(pieces):
    """Log-probs that all but dictate the pieces, a blank after each."""
    log_probs = torch.full((1, 2 * len(pieces), len(PIECES) + 1), -12.0)
    for n, piece in enumerate(pieces):
        log_probs[0, 2 * n, PIECES.index(piece)] = 0.0
        log_probs[0, 2 * n + 1, BLANK] = 0.0
    return log_probs


def test_unknown_words_are_spelled():
    pieces = ["▁a", "b", "▁a", "d", "c", "▁b"]  # ab, adc, b: the second is no word
    graph = toy_graph(0, open_vocabulary=RARE)
    path = make(graph, pieces=PIECES).decode(sharp(pieces), [2 * len(pieces)])[0].best
    assert path.text in ("ab adc b", "AB adc b")
    unknown = path.words[1]
    assert unknown.label == graph.unknown
    assert (unknown.first_token, unknown.end_token) == (2, 5)
    assert (unknown.start_frame, unknown.end_frame) == (4, 9)


def test_several_unknown_words_are_told_apart_and_without_pieces_are_the_lms_symbol():
    pieces = ["▁a", "d", "▁a", "d", "c", "▁b", "d"]  # no words; bd begins cab's second spelling
    path = make(toy_graph(0, open_vocabulary=OPEN), pieces=PIECES).decode(sharp(pieces), [2 * len(pieces)])[0].best
    assert path.text == "ad adc bd"
    path = make(toy_graph(0, open_vocabulary=OPEN)).decode(sharp(["▁a", "d"]), [4])[0].best
    assert path.text == "<unk>"


def test_unknown_words_of_a_batch_are_spelled_by_their_own_tokens():
    """Those that begin an utterance, too, and after an utterance without words."""
    rows = [sharp(pieces)[0] for pieces in [["▁a", "d"], [], ["▁a", "d", "c"], ["▁a", "d", "▁a", "d", "c"]]]
    log_probs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    found = make(toy_graph(0, open_vocabulary=OPEN), pieces=PIECES).decode(log_probs, [len(row) for row in rows])
    assert [nbest.best.text for nbest in found] == ["ad", "", "adc", "ad adc"]


# ----------- The search against all texts rescored by definition, and against a graph of the large LM
FRAMES = 6


def expected_texts(small, large, log_probs, topology, weight=1.0, lm_weight=1.0, **scales):
    """{words: cost}, cheapest first."""
    graph = small.graph
    labelled = all_texts(fst_of(graph), log_probs.numpy(), BLANK, topology, lm_weight=lm_weight, **scales)
    texts = {tuple(graph.words[w] for w in text): cost for text, cost in labelled.items()}
    return rescored(texts, small.table, large.table, lm_weight * weight)


def assert_best(nbest, expected):
    text, cost = next(iter(expected.items()))
    assert not nbest.notes
    assert nbest.best.score == pytest.approx(-cost, abs=2e-4)
    assert tuple(nbest.best.text.split()) == text


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_best_of_all_texts_is_found(topology, composition):
    scales = {"lm_weight": 0.8, "acoustic_scale": 1.3}
    for seed, weight in enumerate((0.6, 0.6, 1.5)):  # above 1 the small LM is subtracted
        small, large = random_lm(seed), random_lm(seed + 10, keep=0.7)
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        options = {"topology": topology, "composition": composition, "large_lm_weight": weight, **scales}
        decoder = make_paged(small, large, **options)
        expected = expected_texts(small, large, log_probs[0], topology, weight=weight, **scales)
        assert_best(decoder.decode(log_probs, [FRAMES])[0], expected)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("difference", ["always", "never"])
def test_nested_lms_are_one_automaton_or_two(difference, composition):
    for seed in range(3):
        small, large = nested_pair(seed)
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        nbest = make_paged(small, large, difference=difference, composition=composition).decode(log_probs, [FRAMES])[0]
        assert_best(nbest, expected_texts(small, large, log_probs[0], "compact"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("large_seed", [20, 21])
def test_static_graph_and_all_compositions_agree(topology, large_seed):
    small, large = random_lm(1), random_lm(large_seed, keep=0.8)
    log_probs = random_log_probs(16, 25, VOCAB + 1, seed=large_seed)
    config = WFSTConfig(topology=topology, beam=WIDE, max_active=ALL, threads=1)
    static = CudaWFST(large.graph, VOCAB, BLANK, config).decode(log_probs, [25] * 16)
    decoders = [make_paged(small, large, topology=topology, composition=name) for name in COMPOSITIONS]
    decoders += [make_paged(small, large, topology=topology, kind=kind) for kind in ABLATIONS.values()]
    for decoder in decoders:
        for ours, theirs in zip(decoder.decode(log_probs, [25] * 16), static, strict=True):
            assert ours.best.score == pytest.approx(theirs.best.score, abs=2e-4)
            assert ours.best.text == theirs.best.text
            assert ours.best.parts.lm == pytest.approx(theirs.best.parts.lm, abs=2e-4)
    plain = CudaWFST(small.graph, VOCAB, BLANK, config).decode(log_probs, [25] * 16)
    assert [n.best.text for n in plain] != [n.best.text for n in static]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_query_cache_of_two_slots_changes_nothing(monkeypatch, composition):
    """Different words after one LM context meet in a slot, and one word after different LM contexts."""
    log_probs = random_log_probs(2, 12, VOCAB + 1, seed=1)
    decoder = make_paged(random_lm(1), random_lm(21, keep=0.7), composition=composition)
    expected = decoder.decode(log_probs, [12] * 2)
    monkeypatch.setattr(cpu_engine, "CACHED_SCORES", 2)
    monkeypatch.setattr(cpu_engine, "_kept", threading.local())  # workspaces of other sizes
    for ours, theirs in zip(decoder.decode(log_probs, [12] * 2), expected, strict=True):
        assert ours.best.text == theirs.best.text
        assert ours.best.score == theirs.best.score
        assert ours.work.look_ups == theirs.work.look_ups
        assert ours.work.query_hits < theirs.work.query_hits


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_words_missing_from_the_large_lm_are_scored_as_unk(composition):
    small = random_lm(5)
    large = LM(random_lm(6, words=tuple(w for w in WORDS if w not in ("a", "bb"))).table)
    for seed in range(3):
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        nbest = make_paged(small, large, composition=composition).decode(log_probs, [FRAMES])[0]
        assert_best(nbest, expected_texts(small, large, log_probs[0], "compact"))


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_lm_without_sentence_end_costs_nothing_at_the_end(composition):
    small = random_lm(5)
    table = {gram: value for gram, value in random_lm(7).table.items() if "</s>" not in gram}
    log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=2)
    nbest = make_paged(small, LM(table), composition=composition).decode(log_probs, [FRAMES])[0]
    assert_best(nbest, expected_texts(small, LM(table), log_probs[0], "compact"))


def test_the_end_of_the_sentence_is_rescored():
    small = random_lm(8)
    table = dict(small.table)
    for gram, (prob, backoff) in small.table.items():
        if gram[-1] == "</s>":
            table[gram] = prob - 5.0 * (gram[-2:-1] != ("cab",)), backoff
    log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=5)
    nbest = make_paged(small, LM(table)).decode(log_probs, [FRAMES])[0]
    expected = expected_texts(small, LM(table), log_probs[0], "compact")
    assert_best(nbest, expected)
    assert next(iter(expected)) != next(iter(expected_texts(small, small, log_probs[0], "compact")))


def test_lattices_hold_every_text_within_their_beam_at_its_true_cost():
    small, large = random_lm(1), random_lm(22, keep=0.7)
    for seed in range(3):
        log_probs = random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        expected = expected_texts(small, large, log_probs[0], "compact")
        least = next(iter(expected.values()))
        near = {text: cost for text, cost in expected.items() if cost < least + 5.9}
        nbest = make_paged(small, large, n_best=400, lattice_beam=6.0).decode(log_probs, [FRAMES])[0]
        found = {tuple(path.text.split()): -path.score for path in nbest}
        assert len(near) > 5
        for text, cost in near.items():
            assert found[text] == pytest.approx(cost, abs=2e-4)
        assert [path.score for path in nbest] == sorted((p.score for p in nbest), reverse=True)


def test_word_sequences_of_epsilons_are_looked_up_in_order():
    """a, then the words one and two emitted without a frame: one look-up each, in their order."""
    words = ("zero", "one", "two")
    arcs = [(0, 1, 1, 0.1, 1), (1, 0, 2, 0.2, 2), (2, 0, 3, 0.3, 3), (3, 2, 0, 0.0, 4)]
    graph = WordGraph.from_fst(fst(arcs, 5, [4]), ("<eps>", *words))
    assert len(graph.arrays.word_sequences) == 1
    small, large = (LM(lm_table(seed=seed, words=words)) for seed in (1, 2))
    log_probs = random_log_probs(1, 6, 4, seed=0)
    plain = CudaWFST(graph, 3, 3).decode(log_probs, [6])[0].best
    difference = sentence_cost(large.table, words) - sentence_cost(small.table, words)
    for composition in COMPOSITIONS:
        decoder = PagedBigLM(graph, 3, 3, large.packed, small.packed, PagedBigLMConfig(composition=composition))
        best = decoder.decode(log_probs, [6])[0].best
        assert best.text == "zero one two"
        assert best.score == pytest.approx(plain.score - difference, abs=1e-4)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("topology", ["compact", "normal"])
def test_ready_made_graphs_are_rescored_too(tmp_path, topology, composition):
    small, large = random_lm(1), random_lm(20, keep=0.8)
    write_tlg(fst_of(small.graph), topology, BLANK, VOCAB, tmp_path / "tlg.fst")
    ready_made = load_fst_graph(tmp_path / "tlg.fst", small.graph.words)
    log_probs = random_log_probs(4, 15, VOCAB + 1, seed=6)
    native = make_paged(small, large, topology=topology, composition=composition)
    loaded = make_paged(small, large, graph=ready_made, topology="graph", composition=composition)
    for ours, theirs in zip(loaded.decode(log_probs, [15] * 4), native.decode(log_probs, [15] * 4), strict=True):
        assert ours.best.score == pytest.approx(theirs.best.score, abs=2e-4)
        assert ours.best.text == theirs.best.text


# -------------------------------- Words for single utterances, spelled by <unk> (`graph/unknown_words.py`)
NEW_WORDS = {"ad": 5.0, "bcd": 4.0}  # their bonuses


def cheapest_with_new_words(small, large, log_probs, lm_weight):
    """Words and cost of the best text by definition, in a graph that was built with the new words."""
    vocabulary, unknown = Vocabulary.from_pieces(PIECES), OpenVocabulary(0.5, 0.5)
    own = {word: (tuple(vocabulary.tokenize(word)),) for word in NEW_WORDS}
    lexicon = Lexicon({**toy_lexicon().spellings, **own}, len(PIECES), beginning_tokens=(0, 1))
    graph = build_graph(small.path, lexicon, open_vocabulary=unknown, added_words=tuple(NEW_WORDS), cache=False)
    labelled = all_texts(fst_of(graph), log_probs.numpy(), BLANK, "compact", lm_weight=lm_weight)
    texts = {tuple(graph.words[w] for w in text): cost for text, cost in labelled.items()}
    costs = rescored(texts, small.table, large.table, lm_weight)
    return min((cost - sum(NEW_WORDS.get(word, 0.0) for word in text), text) for text, cost in costs.items())


@pytest.mark.parametrize(("backend", "composition"), [("cuda", "lazy"), *(("cpu", name) for name in COMPOSITIONS)])
def test_new_words_of_a_request_equal_the_definition(composition, backend, emulated_runtime):
    """Both LMs score them as <unk>; the large one also by longer n-grams with <unk>."""
    lm_weight, found = 0.8, set()
    for seed in range(4):
        table = {gram: value for gram, value in lm_table(seed=seed).items() if len(gram) == 1 or "<unk>" not in gram}
        small, large = LM({**table, ("<unk>",): (-1.0, 0.0)}), random_lm(seed + 10, keep=0.7)
        graph, log_probs = open_graph(small.path), random_log_probs(1, FRAMES, VOCAB + 1, seed=seed)
        boosting = build_word_boosting(NEW_WORDS, graph, speller=Speller(Vocabulary.from_pieces(PIECES), lm_weight))
        options = {"graph": graph, "composition": composition, "backend": backend, "lm_weight": lm_weight}
        decoder = make_paged(small, large, pieces=PIECES, **options)
        best = decoder.decode(log_probs, [FRAMES], [Request(boosting=boosting, boosting_weight=1.0)])[0].best
        cost, text = cheapest_with_new_words(small, large, log_probs[0], lm_weight)
        assert best.score == pytest.approx(-cost, abs=5e-4)
        assert best.parts.acoustic < 0
        spelled = [w.text if w.text in graph.word_ids or w.text in NEW_WORDS else "<unk>" for w in best.words]
        assert spelled == list(text)
        assert make_paged(small, large, **options).decode(log_probs, [FRAMES])[0].best.score <= best.score + 1e-4
        found |= set(spelled) & set(NEW_WORDS)
    assert found == set(NEW_WORDS)


def test_let_composition_has_no_kernels(emulated_runtime):
    decoder = make_paged(random_lm(1), random_lm(20), composition="let", backend="cuda")
    with pytest.raises(ValueError, match="composition is 'let', expected 'lazy': 'let' has no CUDA kernels"):
        decoder.decode(random_log_probs(1, 3, VOCAB + 1, seed=1), [3])


@pytest.mark.parametrize(("backend", "composition"), [("cuda", "lazy"), *(("cpu", name) for name in COMPOSITIONS)])
def test_piece_labels_are_not_scored_as_words(composition, backend, emulated_runtime):
    """With one LM as both, words and phrases are found as without a large one; with two, as without labels."""
    small, large = LM(lm_table(seed=1)), LM(lm_table(seed=2, order=2))
    graph, log_probs = open_graph(small.path), random_log_probs(2, FRAMES, len(PIECES) + 1, seed=3)
    plain = build_graph(small.path, toy_lexicon(), open_vocabulary=OpenVocabulary(0.5, 0.5), cache=False)
    boosting = build_word_boosting({"ad": 15.0, "bb ad": 8.0}, graph, speller=Speller(Vocabulary.from_pieces(PIECES)))
    options = {"graph": graph, "composition": composition, "backend": backend}
    found = make_paged(small, small, boosting=boosting, **options).decode(log_probs, [FRAMES] * 2)
    expected = make(graph, boosting=boosting).decode(log_probs, [FRAMES] * 2)
    other = make_paged(small, large, **options).decode(log_probs, [FRAMES] * 2)
    unlabelled = make_paged(small, large, **options | {"graph": plain}).decode(log_probs, [FRAMES] * 2)
    for ours, theirs in (*zip(found, expected, strict=True), *zip(other, unlabelled, strict=True)):
        assert ours.best.score == pytest.approx(theirs.best.score, abs=1e-3)
        assert labels(ours.best) == labels(theirs.best)
        assert ours.best.tokens.tolist() == theirs.best.tokens.tolist()
    assert any(graph.unknown in labels(nbest.best) for nbest in found)
