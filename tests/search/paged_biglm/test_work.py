"""What the search does for its result: look-ups, groups, room; boosting beside the large LM."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cpu_engine
from tests.graph.toy import BLANK
from tests.oracles.phrases import earned
from tests.oracles.rescoring import rescored
from tests.oracles.viterbi import all_texts
from tests.random_models import random_log_probs
from tests.search.cuda_wfst.both import limit_tokens
from tests.search.cuda_wfst.models import fst_of
from tests.search.paged_biglm.models import VOCAB, make, nested_pair, random_lm

pytest.importorskip("kaldifst")
FRAMES = 30


def log_probs_of(seed, batch=3, frames=FRAMES, **options):
    return random_log_probs(batch, frames, VOCAB + 1, seed=seed, **options)


def work_of(results):
    return np.array([nbest.work for nbest in results]).sum(0)


def test_lazy_composition_asks_and_looks_far_less():
    small, large = random_lm(1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(2, sharpness=4.0)
    lazy, eager = (
        make(small, large, composition=name, beam=8.0).decode(log_probs, [FRAMES] * 3)
        for name in ("lazy", "eager")
    )
    (asked, hits, arcs, groups, expanded, frames), by_eager = work_of(lazy), work_of(eager)
    assert 0 < 4 * asked < by_eager[0]
    assert 0 < 4 * arcs < by_eager[2]
    assert 0 < hits < asked
    assert groups > 0
    assert 0 < expanded < by_eager[4]
    assert by_eager[3] == 0
    assert frames == by_eager[5] == 3 * FRAMES


def test_work_does_not_depend_on_chunks():
    decoder = make(random_lm(1), random_lm(20, keep=0.8), beam=9.0)
    log_probs = log_probs_of(5, batch=1)
    streams = decoder.open(1)
    for begin in range(0, FRAMES, 7):
        size = min(7, FRAMES - begin)
        decoder.push(streams, log_probs[:, begin : begin + size], [size])
    whole = decoder.decode(log_probs, [FRAMES])[0].work
    assert decoder.close(streams)[0].work._replace(cache_hits=0) == whole._replace(cache_hits=0)


def test_group_size_limits_what_is_prolonged():
    small, large = random_lm(1, keep=0.1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(7, batch=8, sharpness=0.8)
    full, one, many = (
        make(small, large, beam=12.0, group_size=size).decode(log_probs, [FRAMES] * 8)
        for size in (0, 1, 10000)
    )
    assert [n.best.score for n in many] == [n.best.score for n in full]
    assert [n.work for n in many] == [n.work for n in full]
    assert work_of(one)[4] < work_of(full)[4] / 2
    ended = [(a.best.score, b.best.score) for a, b in zip(one, full, strict=True) if not a.notes]
    assert ended
    assert all(a <= b + 1e-4 for a, b in ended)
    assert any(a < b - 1e-3 for a, b in ended)


def test_room_is_made_where_groups_need_more(monkeypatch):
    lms = random_lm(1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(3)
    expected = make(*lms, beam=9.0, n_best=4).decode(log_probs, [FRAMES] * 3)
    rooms, new_workspace = [], cpu_engine.new_workspace

    def tight(*sizes, **options):
        rooms.append(new_workspace(*sizes, **{"entries": 2, **options}))
        return rooms[-1]

    monkeypatch.setattr(cpu_engine, "new_workspace", tight)
    results = make(*lms, beam=9.0, n_best=4).decode(log_probs, [FRAMES] * 3)
    assert rooms
    for ours, theirs in zip(results, expected, strict=True):
        assert [(p.text, p.score) for p in ours] == [(p.text, p.score) for p in theirs]
        assert ours.work._replace(cache_hits=0) == theirs.work._replace(cache_hits=0)


def test_a_full_table_is_told_and_loses_nothing_that_max_active_keeps(monkeypatch):
    lms = random_lm(1), random_lm(20, keep=0.8)
    log_probs = log_probs_of(8, batch=2, sharpness=0.3)
    options = {"beam": 20.0, "max_active": 6}
    expected = make(*lms, **options).decode(log_probs, [FRAMES] * 2)

    limit_tokens(monkeypatch, 4 * 6)
    tight = make(*lms, **options).decode(log_probs, [FRAMES] * 2)
    assert all("table was full" in n.notes[0] for n in tight)
    assert [n.best.score for n in tight] == [n.best.score for n in expected]


@pytest.mark.parametrize("composition", ["lazy", "eager"])
def test_phrases_are_boosted_beside_the_large_lm(composition):
    small, large = random_lm(2), random_lm(23, keep=0.7)
    bonuses = {"a bb": 4.0, "cab": 1.5, "bb a a": 3.0}
    graph, frames = small.graph, 7
    boosting = build_word_boosting(bonuses, graph)
    by_labels = {
        tuple(graph.word_ids[word] for word in phrase.split()): bonus
        for phrase, bonus in bonuses.items()
    }
    decoder = make(small, large, composition=composition, topology="normal")
    for seed in range(3):
        log_probs = log_probs_of(seed, batch=1, frames=frames)
        labelled = all_texts(fst_of(graph), log_probs[0].numpy(), BLANK, "normal")
        texts = {
            tuple(graph.words[w] for w in text): cost - earned(text, by_labels)
            for text, cost in labelled.items()
        }
        text, cost = next(iter(rescored(texts, small.table, large.table, 1.0).items()))
        path = decoder.decode(log_probs, [frames], [Request(boosting=boosting)])[0].best
        assert path.score == pytest.approx(-cost, abs=2e-4)
        assert tuple(path.text.split()) == text
        assert path.parts.boosting == pytest.approx(
            earned([word.label for word in path.words], by_labels), abs=1e-5
        )


def test_differences_are_those_of_both_lms():
    from nemo_gpu_decoding.search.word_graph.difference import difference_of

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
