"""What the search does for its result: look-ups, groups, room; boosting; in any order of work."""

import itertools
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.build import load_fst_graph
from nemo_gpu_decoding.graph.lexicon import OpenVocabulary
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cpu_engine, records
from nemo_gpu_decoding.search.word_graph import decoder as decoder_module
from nemo_gpu_decoding.search.word_graph.best_path import Steps, count_back_pointers, trace_back
from nemo_gpu_decoding.search.word_graph.config import COMPOSITIONS
from nemo_gpu_decoding.search.word_graph.cpu_engine import new_workspace
from nemo_gpu_decoding.search.word_graph.large_lm import contexts, let_engine, let_groups, let_nodes, scorer
from nemo_gpu_decoding.search.word_graph.large_lm.let_engine import (
    LET_NODES,
    listed_stream,
    new_let_stream,
    new_let_workspace,
    read_let_chunk,
)
from tests.contract.subject import all_facts
from tests.graph.toy import BLANK, PIECES, write_tlg
from tests.oracles.ngram import earned, rescored
from tests.oracles.viterbi import all_texts
from tests.random_models import random_log_probs
from tests.search.word_graph.models import (
    LM,
    VOCAB,
    fst_of,
    make,
    make_paged,
    nested_pair,
    random_graph,
    random_lm,
    toy_graph,
)

pytest.importorskip("kaldifst")
FRAMES = 30


def log_probs_of(seed, batch=3, frames=FRAMES, **options):
    return random_log_probs(batch, frames, VOCAB + 1, seed=seed, **options)


def outcomes(results):
    """Texts, scores and the work that no LM query cache changes."""
    return [([(path.text, path.score) for path in n], n.work._replace(query_hits=0)) for n in results]


def work_of(results):
    return np.array([nbest.work for nbest in results]).sum(0)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_work_does_not_depend_on_chunks(composition):
    decoder = make_paged(random_lm(1), random_lm(20, keep=0.8), beam=9.0, composition=composition)
    log_probs = log_probs_of(5, batch=1)
    streams = decoder.open(1)
    for begin in range(0, FRAMES, 7):
        size = min(7, FRAMES - begin)
        decoder.push(streams, log_probs[:, begin : begin + size], [size])
    whole = decoder.decode(log_probs, [FRAMES])[0].work
    assert decoder.close(streams)[0].work._replace(query_hits=0) == whole._replace(query_hits=0)


@pytest.mark.parametrize("composition", ["lazy", "let"])
def test_group_size_limits_expanded_contexts(composition):
    small, large = random_lm(1, keep=0.1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(7, batch=8, sharpness=0.8)
    full, one, many = (
        make_paged(small, large, beam=12.0, group_size=size, composition=composition).decode(log_probs, [FRAMES] * 8)
        for size in (0, 1, 10000)
    )
    assert [n.best.score for n in many] == [n.best.score for n in full]
    assert [n.work for n in many] == [n.work for n in full]
    assert work_of(one)[4] < work_of(full)[4] / 2
    ended = [(a.best.score, b.best.score) for a, b in zip(one, full, strict=True) if not a.notes]
    assert ended
    assert all(a <= b + 1e-4 for a, b in ended)
    assert any(a < b - 1e-3 for a, b in ended)


@pytest.mark.parametrize("composition", ["lazy", "let"])
def test_workspace_grows(monkeypatch, composition):
    """With room for two entries at first, or two nodes, links and groups."""
    lms, log_probs = (random_lm(1), random_lm(20, keep=0.8)), log_probs_of(3)
    decoder = make_paged(*lms, beam=9.0, composition=composition, n_best=4 if composition == "lazy" else 1)
    expected, made, grown = decoder.decode(log_probs, [FRAMES] * 3), [], []
    module, name = (cpu_engine, "new_workspace") if composition == "lazy" else (let_engine, "new_let_workspace")
    new, collected = getattr(module, name), let_engine.collected

    def tight(*sizes, **options):
        made.append(options)
        return new(*sizes, **{"entries": 2, **options})

    def counted(*arguments, **options):
        grown.append(options)
        return collected(*arguments, **options)

    monkeypatch.setattr(module, name, tight)
    monkeypatch.setattr(let_engine, "LET_NODES", 2)
    monkeypatch.setattr(let_engine, "collected", counted)
    results = decoder.decode(log_probs, [FRAMES] * 3)
    assert len(made) > 1
    assert composition == "lazy" or any(options.get("more") for options in grown)
    assert outcomes(results) == outcomes(expected)


def test_workspace_is_reused_until_stamps_overflow(monkeypatch):
    """Of another LM, too, whose scores nobody may find in the LM query cache."""
    made, new_workspace, log_probs = [], cpu_engine.new_workspace, log_probs_of(3)
    decoders = [make_paged(random_lm(seed), random_lm(20, keep=0.8), beam=9.0, max_active=1000) for seed in (1, 2)]
    expected = [decoder.decode(log_probs, [FRAMES] * 3) for decoder in decoders]

    def counted(*sizes, **options):
        made.append(new_workspace(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(cpu_engine, "new_workspace", counted)
    for _ in range(2):
        for decoder, alone in zip(decoders, expected, strict=True):
            results = decoder.decode(log_probs, [FRAMES] * 3)
            assert outcomes(results) == outcomes(alone)
            assert [nbest.work for nbest in results] == [nbest.work for nbest in alone]
    assert len(made) == 1
    made[0].stamps[:] = cpu_engine.MOST_STAMPS + 1
    decoders[0].decode(log_probs, [FRAMES] * 3)
    assert len(made) == 2
    with pytest.raises(ValueError, match="nan"):  # a workspace whose call failed is let go
        decoders[0].decode(torch.full_like(log_probs, float("nan")), [FRAMES] * 3)
    decoders[0].decode(log_probs, [FRAMES] * 3)
    assert len(made) == 3


def test_let_composition_expands_fewer_contexts_than_there_are():
    """A word-graph token is expanded only if a word is emitted after it, and then once."""
    small, large = random_lm(1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(2, sharpness=4.0)
    lazy, let = (
        work_of(make_paged(small, large, composition=name, beam=8.0).decode(log_probs, [FRAMES] * 3))
        for name in ("lazy", "let")
    )
    assert 0 < let[4] < lazy[4]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_phrases_are_boosted_beside_the_large_lm(composition):
    small, large = random_lm(2), random_lm(23, keep=0.7)
    bonuses = {"a bb": 4.0, "cab": 1.5, "bb a a": 3.0}
    graph, frames = small.graph, 7
    boosting = build_word_boosting(bonuses, graph)
    by_labels = {tuple(graph.word_ids[word] for word in phrase.split()): bonus for phrase, bonus in bonuses.items()}
    decoder = make_paged(small, large, composition=composition, topology="normal")
    for seed in range(3):
        log_probs = log_probs_of(seed, batch=1, frames=frames)
        listed = all_texts(fst_of(graph), log_probs[0].numpy(), BLANK, "normal")
        texts = {tuple(graph.words[w] for w in text): cost - earned(text, by_labels) for text, cost in listed.items()}
        text, cost = next(iter(rescored(texts, small.table, large.table, 1.0).items()))
        path = decoder.decode(log_probs, [frames], [Request(boosting=boosting)])[0].best
        assert path.score == pytest.approx(-cost, abs=2e-4)
        assert tuple(path.text.split()) == text
        assert path.parts.boosting == pytest.approx(earned([word.label for word in path.words], by_labels), abs=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_requests_that_differ_in_one_value_are_kept_apart(paged):
    """They end differently, too, where phrases of the same bonus break off."""
    decoder = make_paged(random_lm(1), random_lm(20, keep=0.8), beam=9.0) if paged else make(toy_graph(0), beam=9.0)
    one, other = (
        build_word_boosting({f"{begin} a": 3.0, whole: 1.0}, decoder.graph)
        for begin, whole in (("cab", "bb"), ("bb", "cab"))
    )
    requests = [
        None, Request(lm_weight=0.3), Request(boosting=one), Request(boosting=other),
        Request(boosting=one, boosting_weight=0.4), Request(boosting=other, lm_weight=0.3),
    ]  # fmt: skip
    scores = []
    for seed in range(8):
        log_probs = log_probs_of(seed, batch=1, frames=9)
        together = decoder.decode(log_probs.expand(len(requests), -1, -1), [9] * len(requests), requests)
        alone = [decoder.decode(log_probs, [9], [request])[0] for request in requests]
        assert all_facts(together) == all_facts(alone)
        scores.append([nbest.best.score for nbest in alone])
    assert len(set(zip(*scores, strict=True))) == len(requests)


def test_differences_are_those_of_both_lms():
    from nemo_gpu_decoding.search.word_graph.large_lm.pair import difference_of

    small, large = nested_pair(2)
    difference = difference_of(large.packed, small.packed)
    rng = np.random.default_rng(0)
    words = [word for word in large.packed.words if word not in ("<s>", "</s>")]
    for _ in range(200):
        sentence = rng.choice(words, rng.integers(0, 8)).tolist()
        expected = large.packed.score(sentence) - small.packed.score(sentence)
        assert difference.score(sentence) == pytest.approx(expected, abs=1e-4)
    assert difference_of(random_lm(1).packed, random_lm(2, keep=0.8).packed) is None
    assert difference.num_states == large.packed.num_states


# ----------------- What is found, and which words are asked for, does not depend on the order of work
T = 15
LASTING = ["look_ups", "groups", "cost", "links", "limited", "overflowed", "expanded"]


def coarse(seed: int, **options) -> LM:
    """An LM with few different weights, so that many ways cost the same."""
    table = random_lm(seed, **options).table
    return LM({gram: (round(prob), round(backoff)) for gram, (prob, backoff) in table.items()})


def steps_of(back_pointers, token):
    count = count_back_pointers(back_pointers, token["back_pointer"])
    steps = Steps(*np.empty((4, count), np.int32), np.empty(count, np.float32))
    trace_back(back_pointers, token, *steps, 0)
    return steps


def read(decoder, log_probs, request, rng=None):
    """The groups of each frame, and the contexts that matter. With `rng`, tokens are shuffled before each frame."""
    config, seen = decoder.config, []
    utterance = new_let_stream(decoder._models_of(decoder.open(1, [request]).fusion, 0))
    space = new_let_workspace(config.max_active, VOCAB + 1)
    for t in range(log_probs.shape[1]):
        if rng is not None:
            utterance = replace(utterance, tokens=rng.permutation(utterance.tokens))
        utterance, space = read_let_chunk(utterance, log_probs[:, t : t + 1].numpy(), 1, 0, space)
        utterance, listed, space = listed_stream(utterance, space, final=True)
        counters = utterance.arrays.counters
        contexts = sorted(listed.tokens[["key", "lm", "cost", "run", "probability"]].tolist())
        paths = sorted(
            (token[["key", "lm"]].tolist(), [part.tolist() for part in steps_of(listed.back_pointers, token)])
            for token in listed.tokens
        )
        groups = sorted(utterance.tokens[["key", "cost"]].tolist())
        seen.append((groups, (contexts, paths), counters[LASTING].tolist()))
    return seen


OPTIONS = {
    "compact": {},
    "normal": {"topology": "normal"},
    "groups of 2": {"group_size": 2},
    "max_active": {"max_active": 30},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_let_results_do_not_depend_on_the_order_of_tokens(options):
    """Kernels store tokens in another order than the CPU: for other searches test_kernel.py finds the same."""
    small, large = coarse(1), coarse(20, keep=0.8)
    decoder = make_paged(small, large, beam=7.0, composition="let", **options)
    boosting = build_word_boosting({"cab": 2.0, "a bb": 1.0}, small.graph)
    rng, most = np.random.default_rng(0), 0
    for seed in range(3):
        log_probs = (2 * random_log_probs(1, T, VOCAB + 1, seed=seed, sharpness=1.0)).round() / 2
        for request in (None, Request(boosting=boosting, boosting_weight=1.0)):
            expected = read(decoder, log_probs, request)
            assert read(decoder, log_probs, request, rng) == expected
            most = max(most, *(len(groups) for groups, _, _ in expected))
    assert most > 20


@pytest.mark.parametrize("size", [4, 5, 7, 16])
def test_small_candidate_table_changes_no_result(monkeypatch, size):
    small, large = random_lm(1), random_lm(20, keep=0.8)
    log_probs = random_log_probs(3, T, VOCAB + 1, seed=1, sharpness=1.0)
    guards = []

    def tight(*sizes, **options):
        work = new_workspace(*sizes, **options)
        work.candidates["source"] = 77
        guards.append(work.candidates[size:])
        return work._replace(candidates=work.candidates[:size])

    for options in ({}, {"n_best": 5}):
        decoder = make_paged(small, large, beam=9.0, **options)
        expected = decoder.decode(log_probs, [T] * 3)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_engine, "new_workspace", tight)
            results = decoder.decode(log_probs, [T] * 3)
        for ours, theirs in zip(results, expected, strict=True):
            assert [(p.text, p.score) for p in ours] == [(p.text, p.score) for p in theirs]
            assert ours.work.look_ups == theirs.work.look_ups
        assert guards
        assert all((guard["source"] == 77).all() for guard in guards)


def test_lookahead_keeps_words_beyond_the_beam():
    """All words gain more by the large LM than the beam is wide; the look-ahead gains first."""
    large, gain = random_lm(1), 3.5  # log10, so 8 in the unit of the beam
    small = LM({gram: (prob - gain, backoff) for gram, (prob, backoff) in large.table.items()})
    log_probs = random_log_probs(4, T, VOCAB + 1, seed=2, sharpness=3.0)
    for result in make_paged(small, large, beam=4.0).decode(log_probs, [T] * 4):
        assert result.best.tokens.size


@pytest.mark.parametrize("composition", [None, "lazy", "let"])
def test_partial_results_of_long_streams_look_at_the_last_words_only(monkeypatch, composition):
    """Back-pointers traced back, tokens put together, records and nodes kept: as many late as early."""
    small, large = nested_pair(0)
    decoder = make(toy_graph(0), beam=9.0)
    if composition is not None:
        decoder = make_paged(small, large, beam=9.0, composition=composition)
    frames, chunk, streams, steps, tails, kept = 6000, 50, decoder.open(1), [], [], []
    noted(monkeypatch, steps)
    log_probs = random_log_probs(1, frames, decoder.vocab_size + 1, seed=3, sharpness=4.0)
    for begin in range(0, frames, chunk):
        decoder.push(streams, log_probs[:, begin : begin + chunk], [chunk])
        (partial,) = decoder.partial(streams)
        tails.append(len(partial.best) - len(getattr(partial.best, "_head", {"tokens": ()})["tokens"]))
        (stream,) = streams.engine._streams
        kept.append(max(map(len, stream.arrays[1:])) if composition == "let" else len(stream.back_pointers))
    assert len(steps) == len(tails)
    (whole,), (closed,) = decoder.decode(log_probs, [frames]), decoder.close(streams)
    assert all_facts([closed]) == all_facts([whole])
    assert len(whole.best) > 1000
    assert composition != "let" or int(stream.arrays.counters["groups"][0]) > 4 * LET_NODES
    half = len(tails) // 2
    for counts, most in ((steps, 600), (tails, 600), (kept, 4 * LET_NODES)):
        assert max(counts[half : len(tails)]) <= 1.5 * max(counts[:half]) < most


def noted(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Note how many back-pointers each call for results traces back."""
    best_paths = decoder_module.best_paths

    def counted(*given: Any) -> Any:
        found = best_paths(*given)
        steps.append(len(found.steps.arcs))
        return found

    monkeypatch.setattr(decoder_module, "best_paths", counted)


def kinds_of_graphs(folder):
    """Decoders of graphs whose words come with other arcs than those of the lexicon, and frames' columns."""
    graph = toy_graph(1)
    for topology in ("compact", "normal"):
        write_tlg(fst_of(graph), topology, BLANK, len(PIECES), folder / f"{topology}.fst")
        yield make(load_fst_graph(folder / f"{topology}.fst", graph.words), topology="graph", beam=8.0), VOCAB + 1
    for word_cost in (0.5, 3.0):
        unknown = OpenVocabulary(word_cost=word_cost, piece_cost=0.5)
        yield make(toy_graph(0, open_vocabulary=unknown), pieces=PIECES, beam=8.0), VOCAB + 1
    for seed, blank, topology in ((0, None, "compact"), (1, None, "normal"), (2, None, "minimal"), (3, 11, "graph")):
        graph = random_graph(seed, columns=12, blank=blank, coarse=seed % 2 == 1)
        yield make(graph, vocab_size=11, blank_id=11, topology=topology, beam=5.0), 12


def test_partial_results_are_as_if_nothing_were_committed_whatever_the_graph(monkeypatch, tmp_path):
    """To the bit, with words that the graph emits before, with or after their tokens."""
    frames = 150
    for number, (decoder, columns) in enumerate(kinds_of_graphs(tmp_path)):
        log_probs = random_log_probs(1, frames, columns, seed=number, sharpness=2.0 + number % 3)
        seen: list[list[Any]] = []
        for fewest in (10**9, 8):
            monkeypatch.setattr("nemo_gpu_decoding.search.committed.MIN_COMMIT", fewest)
            rng, streams, first = np.random.default_rng(number), decoder.open(1), 0
            seen.append([])
            while first < frames:
                chunk = log_probs[:, first : first + int(rng.integers(1, 9))]
                decoder.push(streams, chunk, [chunk.shape[1]])
                first += chunk.shape[1]
                # before words are committed, and after
                for nbest in (*decoder.partial(streams), *decoder.partial(streams)):
                    seen[-1].append((all_facts([nbest]), nbest.committed, nbest.relative_cost))
            tokens = streams.engine._streams[0].committed.tokens
            seen[-1].append(all_facts(decoder.close(streams)))
        assert seen[0] == seen[1]
        assert tokens > frames / 8


def test_record_types_do_not_convert_to_each_other():
    """A record whose first fields are those of another one would be accepted in its place."""
    modules = records, scorer, contexts, let_groups, let_nodes
    kinds = {numba.from_dtype(kind) for module in modules for kind in vars(module).values()
             if isinstance(kind, np.dtype) and kind.fields}  # fmt: skip
    assert len(kinds) > 20
    assert not [pair for pair in itertools.permutations(kinds, 2) if pair[0].can_convert_to(None, pair[1])]
