"""Dominated LM contexts: the bounds hold for all words, and dropping these contexts changes no best path."""

import itertools

import numpy as np
import pytest

from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.word_boosting import build_word_boosting
from nemo_gpu_decoding.search.word_graph.config import COMPOSITIONS
from nemo_gpu_decoding.search.word_graph.large_lm.pair import difference_of
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import context_bounds
from tests.contract.subject import all_facts
from tests.random_models import random_log_probs
from tests.search.word_graph.models import VOCAB, make_paged, nested_pair, random_lm, without_bounds

pytest.importorskip("kaldifst")


@pytest.mark.parametrize("seed", range(3))
def test_dominance_bounds_hold_for_all_words(seed):
    """All sequences of up to 3 words, with and without an end, from all states; each bound is reached by some."""
    small, large = nested_pair(seed)
    lm = difference_of(large.packed, small.packed)
    bounds, reached = context_bounds(lm.arrays), 0
    labels = [lm.word_ids[word] for word in lm.words if word != "<s>"]
    ends = [text for n in range(4) for text in itertools.product(labels, repeat=n)]
    for state in range(1, lm.num_states):
        shorter, gains = int(bounds["backoff_to"][state]), []
        for text in ends:
            costs = []
            for at in (state, shorter):
                total = 0.0
                for label in text:
                    cost, at = lm.advance(at, label)
                    total += cost
                costs.append(total)
            gains.append(costs[0] - costs[1])
        assert max(gains) <= bounds["over"][state] + 1e-5
        assert -min(gains) <= bounds["under"][state] + 1e-5
        reached += max(gains) == pytest.approx(bounds["over"][state], abs=1e-4)
        reached += -min(gains) == pytest.approx(bounds["under"][state], abs=1e-4)
    assert reached > 1.5 * lm.num_states


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("topology", ["compact", "normal", "minimal"])
def test_dropping_dominated_contexts_changes_no_result(composition, topology):
    lms, frames, dropped = nested_pair(1), 40, 0
    boosting = build_word_boosting({"cab": 2.0, "a bb": 1.0}, lms[0].graph)
    requests = [None, Request(boosting=boosting, boosting_weight=1.0)] * 4
    log_probs = random_log_probs(8, frames, VOCAB + 1, seed=2, sharpness=1.5)
    for beam in (6.0, 14.0):
        options = {"composition": composition, "topology": topology, "beam": beam, "group_size": 0}
        expected = without_bounds(make_paged(*lms, **options)).decode(log_probs, [frames] * 8, requests)
        found = make_paged(*lms, **options).decode(log_probs, [frames] * 8, requests)
        for ours, theirs in zip(all_facts(found), all_facts(expected), strict=True):
            assert ours == theirs
        dropped += sum(b.work.expanded - a.work.expanded for a, b in zip(found, expected, strict=True))
    # lazy drops contexts of a group, too, before it expands them; without that 1,500 are dropped
    least = 100 if composition == "let" else 0 if topology == "normal" else 5000
    assert dropped >= least


def test_pair_of_two_automata_has_no_dominance_bounds():
    assert len(make_paged(random_lm(1), random_lm(20, keep=0.8))._lms.bounds) == 0
    assert len(make_paged(*nested_pair(0), difference="never")._lms.bounds) == 0
    assert np.isfinite(make_paged(*nested_pair(0))._lms.bounds["over"]).all()
