"""Confusion networks of n-best lists and lattices, against alignments that are easy to see."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_gpu_decoding.search import alternatives
from nemo_gpu_decoding.search.alternatives import timed_words, word_alternatives
from nemo_gpu_decoding.search.result import Path, Place, ScoreParts, WordOption, places_as_json, places_in_seconds
from nemo_gpu_decoding.search.word_graph.result import with_posteriors
from nemo_gpu_decoding.vocabulary import Vocabulary
from tests.search.word_graph.test_mbr import path_of, prefix_tree, random_texts

VOCABULARY = Vocabulary(("▁a", "▁b", "▁c", "x"), "bpe")


def spoken(text, score, begin=0):
    """A path of tokens; a token has two frames and a pause of two."""
    tokens = np.array([VOCABULARY.pieces.index(piece) for piece in text.split()], np.int32)
    frames = begin + 4 * np.arange(len(tokens), dtype=np.int32)
    return Path(
        tokens, frames, np.full(len(tokens), 2, np.int32), np.ones(len(tokens), np.float32), score, ScoreParts(score)
    )


def test_words_that_replace_each_other_share_a_slot():
    paths = [spoken("▁a ▁b x", math.log(0.6)), spoken("▁a ▁c", math.log(0.3)), spoken("▁a", math.log(0.1))]
    first, second = word_alternatives(paths, VOCABULARY)
    assert first == Place(0, 0, 2, (WordOption("a", 1.0),))
    assert second == Place(1, 4, 10, (WordOption("bx", 0.6), WordOption("c", 0.3), WordOption("", 0.1)))
    assert json.loads(json.dumps(places_as_json([second])))[0]["alternatives"][1] == {"word": "c", "posterior": 0.3}


def test_a_word_that_others_insert_has_a_slot_with_their_times():
    slots = word_alternatives([spoken("▁a ▁b", math.log(0.5)), spoken("▁a ▁c ▁b", math.log(0.5))], VOCABULARY)
    assert [slot.word_index for slot in slots] == [0, None, 1]
    assert slots[1] == Place(None, 4, 6, (WordOption("", 0.5), WordOption("c", 0.5)))
    spans = [SimpleNamespace(start=1.0, end=1.1), SimpleNamespace(start=1.3, end=1.5)]
    assert [slot[1:3] for slot in places_in_seconds(slots, spans, 0.08)] == [(1.0, 1.1), (1.32, 1.48), (1.3, 1.5)]
    expected = [(0, 1.0, 1.16), (None, 1.32, 1.48), (0, 1.32, 1.48)]  # one word in place of both
    assert [slot[:3] for slot in places_in_seconds(slots, spans[:1], 0.08)] == expected


def test_one_path_or_no_words_have_no_alternatives():
    assert word_alternatives([spoken("", 0.0)], VOCABULARY) == ()
    (slot,) = word_alternatives([spoken("", 0.0), spoken("▁c", 0.0)], VOCABULARY)
    assert slot == Place(None, 0, 2, (WordOption("", 0.5), WordOption("c", 0.5)))


@pytest.mark.parametrize("seed", range(20))
def test_a_list_and_a_lattice_have_the_posteriors_of_minimum_bayes_risk(seed, monkeypatch):
    texts = random_texts(seed)
    paths = [path_of(text, math.log(texts[text])) for text in sorted(texts, key=lambda text: -texts[text])]
    rated = with_posteriors(paths)[0]
    for lattice in (None, prefix_tree(texts)):
        slots = word_alternatives(paths, VOCABULARY, lattice)
        assert [slot.word_index for slot in slots if slot.word_index is not None] == list(range(len(rated.words)))
        for slot in slots:
            assert sum(option.posterior for option in slot.alternatives) == pytest.approx(1, abs=5e-3)
            if slot.word_index is not None:
                posterior = dict(slot.alternatives).get(rated.words[slot.word_index].text, 0.0)
                assert posterior == pytest.approx(rated.words[slot.word_index].posterior, abs=2e-3)
    every = word_alternatives(paths, VOCABULARY)
    monkeypatch.setattr(alternatives, "WINDOW", 1)
    assert word_alternatives(paths, VOCABULARY) == every


def test_the_transcript_is_in_the_network_where_others_insert_two_words():
    others = [spoken("▁a ▁c ▁c ▁b", math.log(0.3)), spoken("▁a ▁c x ▁c ▁b", math.log(0.3))]
    slots = word_alternatives([spoken("▁a ▁b", math.log(0.4)), *others], VOCABULARY)
    (gap,) = [slot for slot in slots if slot.word_index is None]
    assert "" in dict(gap.alternatives)
    assert sum(option.posterior for option in gap.alternatives) == pytest.approx(1, abs=1e-3)


def test_punctuation_does_not_extend_the_word_before_it():
    vocabulary = Vocabulary(("▁a", ",", "▁b", "▁", "."), "bpe")
    tokens = np.array([0, 1, 4, 2, 3, 1], np.int32)
    path = Path(tokens, 4 * np.arange(6, dtype=np.int32), np.full(6, 2, np.int32), np.ones(6), 0.0, ScoreParts(0.0))
    assert timed_words(path, vocabulary) == [("a,.", 0, 2), ("b", 12, 14), (",", 16, 22)]
