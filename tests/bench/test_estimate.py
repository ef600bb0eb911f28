from __future__ import annotations

import math

import numpy as np
import pytest

from nemo_gpu_decoding.bench.estimate import write_witten_bell
from nemo_gpu_decoding.fusion.ngram import load_ngram_lm

TEXT = ["0 1 2 0 1 2", "0 1 2 3", "3 3 0 1", "1 2 0 1 2"]


@pytest.fixture
def arpa(tmp_path):
    path = tmp_path / "lm.arpa"
    write_witten_bell([line.split() for line in TEXT], 3, path, words="01234")
    return path


def test_probabilities_of_every_state_sum_to_one(arpa):
    lm = load_ngram_lm(arpa, 5, encoding="ids")
    unknown = next(
        10 ** float(line.split()[0]) for line in arpa.read_text().splitlines() if "<unk>" in line
    )
    for state in range(1, lm.num_states):  # the first is no place to be: it has no end of sentence
        total = sum(math.exp(lm.advance(state, label)[0]) for label in range(5))
        total += math.exp(lm.arrays.states["final_weight"][state])
        assert total <= 1 + 1e-5
        assert total >= 1 - unknown - 1e-5


def test_seen_words_are_likelier_than_unseen_ones(arpa):
    lm = load_ngram_lm(arpa, 5, encoding="ids")
    assert lm.score([0, 1, 2]) > lm.score([2, 1, 0]) > lm.score([4, 4, 4])


def test_rare_trigrams_are_left_out_and_their_parts_stay(arpa):
    text = arpa.read_text()
    assert "0 1 2" in text  # seen four times
    assert "1 2 3" not in text  # seen once
    assert "2 3" in text


def test_histories_of_the_highest_order_exist_in_the_order_below(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "lm.arpa"
    sentences = [[str(w) for w in rng.integers(0, 6, 12)] for _ in range(100)]
    write_witten_bell(sentences, 4, path)
    grams = {
        tuple(line.split("\t")[1].split()) for line in path.read_text().splitlines() if "\t" in line
    }
    longest = [gram for gram in grams if len(gram) == 4]
    assert longest
    assert all(gram[:-1] in grams and gram[1:] in grams for gram in longest)
