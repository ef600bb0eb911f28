"""What is found, and which words are asked for, does not depend on the order of work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph import cpu_engine
from nemo_gpu_decoding.search.word_graph.cpu_engine import new_workspace, read_chunk
from tests.random_models import random_log_probs
from tests.search.paged_biglm.models import LM, VOCAB, make, random_lm

pytest.importorskip("kaldifst")
FRAMES = 15
LASTING = ["look_ups", "groups", "cost", "links", "limited", "overflowed"]


def coarse(seed: int, **options) -> LM:
    """An LM with few different weights, so that many ways cost the same."""
    table = random_lm(seed, **options).table
    return LM({gram: (round(prob), round(backoff)) for gram, (prob, backoff) in table.items()})


def with_shuffled_tokens(utterance, rng):
    """The same hypotheses, stored in another order."""
    order, links = rng.permutation(len(utterance.tokens)), utterance.links.copy()
    known = links["frame"][: int(utterance.counters["links"][0])]
    newest = np.flatnonzero(known == utterance.frames - 1)
    links["target"][newest] = np.argsort(order)[links["target"][newest]]
    return replace(utterance, tokens=utterance.tokens[order], links=links)


def facts(before, after):
    """All that a frame has brought, but not where it is stored."""
    names = ["key", "lm", "cost", "run", "probability", "arc", "epsilon"]
    key = ["key", "lm"]
    first, last = int(before.counters["links"][0]), int(after.counters["links"][0])
    links = [
        (*before.tokens[key][link["source"]].tolist(), *after.tokens[key][link["target"]].tolist(),
         *link[["arc", "epsilon", "cost", "acoustic_cost", "label", "move"]].tolist())
        for link in after.links[first:last]
    ]  # fmt: skip
    return sorted(after.tokens[names].tolist()), sorted(links), after.counters[LASTING].tolist()


def read(decoder, log_probs, request, rng=None):
    """What each frame brings; with `rng`, the tokens are shuffled before it."""
    config, all_facts = decoder.config, []
    (models,) = decoder._models(decoder.open(1, [request]))
    utterance = models.new_stream()
    space = new_workspace(config.max_active, VOCAB + 1, keeps_links=config.keeps_links, composes=True)
    for t in range(log_probs.shape[1]):
        before = utterance if rng is None else with_shuffled_tokens(utterance, rng)
        utterance, space = read_chunk(before, log_probs[:, t : t + 1].numpy(), 1, 0, space)
        all_facts.append(facts(before, utterance))
    return all_facts


OPTIONS = {
    "compact": {},
    "normal": {"topology": "normal"},
    "minimal": {"topology": "minimal"},
    "groups of 2": {"group_size": 2},
    "two automata": {"difference": "never"},
    "max_active": {"max_active": 30},
    "lattice": {"n_best": 2, "lattice_beam": 5.0},
    "lattice, normal": {"n_best": 2, "lattice_beam": 5.0, "topology": "normal"},
    "eager": {"composition": "eager"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_order_of_tokens_changes_nothing(options):
    small, large = coarse(1), coarse(20, keep=0.8)
    decoder = make(small, large, **{"beam": 7.0, **options})
    boosting = build_word_boosting({"cab": 2.0, "a bb": 1.0}, small.graph)
    rng, most = np.random.default_rng(0), 0
    for seed in range(3):
        log_probs = (2 * random_log_probs(1, FRAMES, VOCAB + 1, seed=seed, sharpness=1.0)).round() / 2
        for request in (None, Request(boosting=boosting, boosting_weight=1.0)):
            expected = read(decoder, log_probs, request)
            assert read(decoder, log_probs, request, rng) == expected
            most = max(most, *(len(found) for found, _, _ in expected))
    assert most > 20


@pytest.mark.parametrize("size", [4, 5, 7, 16])
def test_a_small_table_of_candidates_changes_nothing_and_is_kept_to(monkeypatch, size):
    small, large = random_lm(1), random_lm(20, keep=0.8)
    log_probs = random_log_probs(3, FRAMES, VOCAB + 1, seed=1, sharpness=1.0)
    guards = []

    def tight(*sizes, **options):
        space = new_workspace(*sizes, **options)
        space.candidates["source"] = 77
        guards.append(space.candidates[size:])
        return space._replace(candidates=space.candidates[:size])

    for options in ({}, {"n_best": 5}, {"composition": "eager"}):
        decoder = make(small, large, beam=9.0, **options)
        expected = decoder.decode(log_probs, [FRAMES] * 3)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_engine, "new_workspace", tight)
            results = decoder.decode(log_probs, [FRAMES] * 3)
        for ours, theirs in zip(results, expected, strict=True):
            assert [(p.text, p.score) for p in ours] == [(p.text, p.score) for p in theirs]
            assert ours.work.look_ups == theirs.work.look_ups
        assert guards
        assert all((guard["source"] == 77).all() for guard in guards)


def test_words_that_the_large_lm_likes_beyond_the_beam_are_found():
    """All words gain more by the large LM than the beam is wide; the look-ahead gains first."""
    large, gain = random_lm(1), 3.5  # log10, so 8 in the unit of the beam
    small = LM({gram: (prob - gain, backoff) for gram, (prob, backoff) in large.table.items()})
    log_probs = random_log_probs(4, FRAMES, VOCAB + 1, seed=2, sharpness=3.0)
    for result in make(small, large, beam=4.0).decode(log_probs, [FRAMES] * 4):
        assert result.best.tokens.size
