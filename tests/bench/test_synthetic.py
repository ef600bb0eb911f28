from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from nemo_gpu_decoding.bench.language import make_language
from nemo_gpu_decoding.bench.peers.base import collapse
from nemo_gpu_decoding.bench.sources import make_task
from nemo_gpu_decoding.bench.verify import Errors


def test_the_same_seed_gives_the_same_task(tiny_options, tiny_task):
    again = make_task(tiny_options)
    assert torch.equal(again.log_probs, tiny_task.log_probs)
    assert again.texts == tiny_task.texts
    other = make_task(replace(tiny_options, seed=2))
    assert other.texts != tiny_task.texts


def test_shapes_and_lengths_are_as_asked(tiny_options, tiny_task):
    assert tiny_task.log_probs.shape == (2, int(tiny_task.lengths.max()), 33)
    assert all(20 <= length <= 40 for length in tiny_task.lengths)


def test_posteriors_sum_to_one(tiny_task):
    for row, length in zip(tiny_task.log_probs, tiny_task.lengths, strict=True):
        assert torch.allclose(row[:length].logsumexp(-1), torch.zeros(int(length)), atol=1e-4)


def test_texts_are_what_the_tokens_spell(tiny_task):
    assert [tiny_task.vocabulary.text(tokens) for tokens in tiny_task.tokens] == tiny_task.texts


def test_greedy_search_finds_most_but_not_all(tiny_options):
    task = make_task(replace(tiny_options, batch=20))
    greedy = [
        collapse(row[:length].argmax(-1).tolist(), 32)
        for row, length in zip(task.log_probs, task.lengths, strict=True)
    ]
    assert 2 < Errors.of(task, greedy).ter < 30


def test_impossible_lengths_are_an_error(tiny_options):
    with pytest.raises(ValueError, match="min_frames is 1 and max_frames 1: hardly any utterance"):
        make_task(replace(tiny_options, min_frames=1, max_frames=1))


def test_all_words_and_pieces_differ():
    language = make_language(700, np.random.default_rng(0))
    assert len(set(language.pieces)) == 700
    assert len(language.lexicon) == 2800


def test_half_of_the_phrases_were_said(tiny_task):
    phrases = tiny_task.phrases(4)
    said = " ".join(tiny_task.texts).split()
    assert [phrase in said for phrase in phrases] == [True, True, False, False]
    spelled = [tiny_task.vocabulary.tokenize(phrase) for phrase in phrases]
    assert [tiny_task.vocabulary.text(tokens) for tokens in spelled] == phrases


def test_long_phrase_lists_go_on_with_pairs_of_words(tiny_task):
    phrases = tiny_task.phrases(2000)
    assert len(phrases) == 2000
    assert " " in phrases[-1]


def test_the_first_utterances_keep_their_references(tiny_task):
    first = tiny_task.first(1)
    assert first.texts == tiny_task.texts[:1]
    assert first.log_probs.shape[:2] == (1, int(tiny_task.lengths[0]))
