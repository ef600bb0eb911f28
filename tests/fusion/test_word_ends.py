"""Which pieces carry on a word."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.fusion.word_ends import carries_on_word
from nemo_gpu_decoding.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("kind", "carrying", "others"),
    [
        ("bpe",
         ["a", "er", "é", "7", "ж", "가", "\N{COMBINING ACUTE ACCENT}", "\N{DEVANAGARI SIGN VIRAMA}"],
         ["▁", "▁a", "'s", "-", ",", "<unk>", "<s>", "<0x41>", "[CLS]", "東京", "カ", "ー", "ไทย"]),
        ("wpe", ["##a", "##7", "##é"], ["a", "##", "#", "##'s", "##東", "[UNK]", "'"]),
        ("char", ["a", "ü", "7"], [" ", "'", "-", "東"]),
    ],
)  # fmt: skip
def test_letters_digits_and_accents_carry_on(kind, carrying, others):
    vocabulary = Vocabulary((*carrying, *others), kind)
    assert carries_on_word(vocabulary).tolist() == [True] * len(carrying) + [False] * len(others)
