"""Words of dropped hypotheses, against all paths of small lattices and a search that is easy to follow."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding import FlexCTCBeam, FlexCTCConfig
from nemo_gpu_decoding.search.alternatives import word_alternatives
from nemo_gpu_decoding.search.detours import WIDER, Detour, _Reader, find_detours, wider
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE
from nemo_gpu_decoding.search.result import NBest
from nemo_gpu_decoding.search.timed_words import TimedWord
from tests.search.test_alternatives import VOCABULARY, spoken

BEST = "▁a ▁b x ▁c"


def read(hypothesis, *, best=BEST, ended=False, score=-2.0):
    """The detours of one hypothesis: begin, end, words, cost."""
    reader = _Reader(spoken(best, 0.0), VOCABULARY)
    reader.add(NBest((spoken(hypothesis, score),), num_frames=8), 0.0, ended=ended)
    return [(d.begin, d.end, " ".join(word.text for word in d.words), d.cost) for d in reader.detours]


@pytest.mark.parametrize(
    ("hypothesis", "ended", "expected"),
    [
        (BEST, True, []),
        ("▁a ▁b x", False, []),  # the beginning of the best path
        ("▁b x", False, []),  # no complete word
        ("▁b ▁b", False, [(0, 1, "b", 2.0)]),
        ("▁a ▁b ▁c", False, [(1, 2, "b", 2.0)]),  # the best path's word continues after the same token
        ("▁a ▁c ▁c ▁a", False, [(1, 2, "c c", 2.0)]),
        ("▁a ▁c", False, []),  # its last word may be incomplete
        ("▁a ▁c", True, [(1, 2, "", 2.0)]),  # without "bx"
        ("▁a ▁b x", True, [(2, 3, "", 2.0)]),
        ("▁a ▁b x ▁a ▁c", True, [(2, 3, "a c", 2.0)]),  # inserted
        ("▁a ▁b x ▁c ▁a", True, [(2, 3, "c a", 2.0)]),
        ("", True, [(0, 3, "", 2.0)]),
    ],
)
def test_words_in_place_of_those_of_the_best_path(hypothesis, ended, expected):
    assert read(hypothesis, ended=ended) == expected


def test_a_best_path_without_words():
    reader = _Reader(spoken("", 0.0), VOCABULARY)
    reader.add(NBest((spoken("▁c", -1.0), spoken("", 0.0)), num_frames=8), 0.0, ended=True)
    assert [detour[:2] for detour in reader.detours] == [(0, 1)]
    (slot,) = word_alternatives([spoken("", 0.0)], VOCABULARY, detours=reader.detours)
    assert dict(slot.alternatives)["c"] == pytest.approx(1 / (1 + math.e), abs=1e-4)


def test_costs_are_those_of_the_last_time_and_of_its_best_hypothesis():
    reader = _Reader(spoken(BEST, 0.0), VOCABULARY)
    for frames, scores in ((6, (-1.0, -4.0)), (8, (-5.0, -3.0))):
        paths = [spoken(f"▁c ▁b {end}", score) for end, score in zip(("x", "▁a"), scores, strict=True)]
        reader.add(NBest(tuple(paths), num_frames=frames), 0.0, ended=False)
    assert {(d.end, len(d.words), d.cost) for d in reader.detours} == {(1, 1, 5.0), (2, 2, 3.0)}


def test_detours_have_independent_posteriors():
    c, x = TimedWord("c", 0, 2), TimedWord("x", 8, 10)
    detours = [Detour(0, 1, (c,), 1.0), Detour(2, 3, (x,), 2.0), Detour(2, 3, (), 2.0)]
    slots = word_alternatives([spoken(BEST, 0.0)], VOCABULARY, detours=detours)
    found = {(slot.word_index, option.word): option.confidence for slot in slots for option in slot.alternatives}
    assert found[0, "c"] == pytest.approx(math.exp(-1) / (1 + math.exp(-1)), abs=1e-4)
    assert found[2, "x"] == found[2, ""] == pytest.approx(math.exp(-2) / (1 + 2 * math.exp(-2)), abs=1e-4)


def test_detours_that_overlap_have_the_posteriors_of_all_paths():
    c = TimedWord("c", 0, 2)
    detours = [Detour(0, 2, (c,), 1.0), Detour(1, 3, (c, c), 0.5), Detour(0, 1, (c,), 2.0)]
    slots = word_alternatives([spoken(BEST, 0.0)], VOCABULARY, detours=detours)
    # texts: a bx c, [c] c, a [c c], [c] bx c, [c] [c c]
    texts = {"a bx c": 0.0, "c c": 1.0, "a c c": 0.5, "c bx c": 2.0, "c c c": 2.5}
    total = sum(math.exp(-cost) for cost in texts.values())
    a = sum(math.exp(-cost) for text, cost in texts.items() if text.startswith("a")) / total
    (first,) = [slot for slot in slots if slot.word_index == 0]
    assert dict(first.alternatives)["a"] == pytest.approx(a, abs=1e-4)


def emissions(rng, frames):
    """Log-probs of frames that are a word and a blank in turn."""
    logits = rng.normal(scale=2.0, size=(frames, 5))
    logits[::2, 4] = -20.0
    logits[1::2, :4] = -20.0
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1)


def test_the_words_that_a_beam_drops_are_found():
    """Each word has two possible forms, the beam keeps three hypotheses: at the end they differ in two words.

    With twice the beam, all words are found although only every fourth frame is read.
    """
    logits = np.full((16, 5), -30.0)
    for n in range(8):
        logits[2 * n, n % 2], logits[2 * n, 2] = math.log(0.6), math.log(0.4)
        logits[2 * n + 1, 4] = 0.0
    log_probs = torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1)
    decoder = FlexCTCBeam(4, 4, FlexCTCConfig(beam_size=3, n_best=3))
    (nbest,) = decoder.decode(log_probs[None], [16])
    known = word_alternatives(nbest.paths, VOCABULARY)
    assert sum(len(slot.alternatives) > 1 for slot in known) == 2
    second = wider(decoder, log_probs.device)
    (detours,) = find_detours(second, log_probs[None], [16], None, [nbest], VOCABULARY)
    slots = word_alternatives(nbest.paths, VOCABULARY, detours=detours)
    for slot in slots:
        assert dict(slot.alternatives)["c"] == pytest.approx(0.4, abs=0.01)
    assert [slot.word_index for slot in slots] == list(range(8))


def test_improbable_words_of_detours_are_kept():
    """Down to a posterior of 0.0001; in n-best lists down to 0.001."""
    detours = [Detour(0, 1, (TimedWord(word, 0, 2),), cost) for word, cost in (("c", 8.0), ("x", 10.0))]
    slots = word_alternatives([spoken(BEST, 0.0)], VOCABULARY, detours=detours)
    assert [option.word for option in slots[0].alternatives] == ["a", "c"]
    known = word_alternatives([spoken(BEST, 0.0), spoken("▁c ▁b x ▁c", -8.0)], VOCABULARY)
    assert [option.word for option in known[0].alternatives] == ["a"]


def test_the_second_search_has_a_wider_beam_where_it_can():
    cpu = torch.device("cpu")
    decoder = FlexCTCBeam(4, 4, FlexCTCConfig(beam_size=3, n_best=3, beam_threshold=7.0))
    wide = wider(decoder, cpu)
    assert wide.config == replace(decoder.config, beam_size=WIDER * 3)
    assert wide.fusion is decoder.fusion
    largest = FlexCTCBeam(4, 4, FlexCTCConfig(beam_size=MAX_BEAM_SIZE))
    assert wider(largest, cpu) is largest


@pytest.mark.parametrize("seed", range(8))
def test_utterances_of_a_batch_are_independent_and_detours_join_the_best_path(seed):
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(0, 24, size=4)]
    inputs = torch.zeros(4, 24, 5)
    for row, length in zip(inputs, lengths, strict=True):
        row[:length] = emissions(rng, length)
    decoder = FlexCTCBeam(4, 4, FlexCTCConfig(beam_size=3, n_best=3))
    results = decoder.decode(inputs, lengths)
    found = find_detours(decoder, inputs, lengths, None, results, VOCABULARY)
    for b, detours in enumerate(found):
        (alone,) = find_detours(decoder, inputs[b : b + 1], lengths[b : b + 1], None, results[b : b + 1], VOCABULARY)
        assert detours == alone
        count = len(VOCABULARY.words(results[b].best.tokens.tolist()))
        for detour in detours:
            assert 0 <= detour.begin < detour.end <= max(count, 1)
        slots = word_alternatives(results[b].paths, VOCABULARY, detours=detours)
        known = word_alternatives(results[b].paths, VOCABULARY)
        for slot in slots:
            assert sum(option.confidence for option in slot.alternatives) == pytest.approx(1, abs=1e-2)
        words = {option.word for slot in slots for option in slot.alternatives}
        assert words >= {o.word for slot in known for o in slot.alternatives if o.confidence > 0.01 and o.word}
