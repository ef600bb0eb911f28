"""Which pieces continue a word."""

from __future__ import annotations

import pytest

from nemo_gpu_decoding.fusion.word_boundary import word_continuations
from nemo_gpu_decoding.vocabulary import Vocabulary


@pytest.mark.parametrize(
    ("kind", "continuations", "others"),
    [
        ("bpe",
         ["a", "er", "é", "7", "ж", "가", "\N{COMBINING ACUTE ACCENT}", "\N{DEVANAGARI SIGN VIRAMA}"],
         ["▁", "▁a", "'s", "-", ",", "<unk>", "<s>", "<0x41>", "[CLS]", "東京", "カ", "ー", "ไทย"]),
        ("wpe", ["##a", "##7", "##é"], ["a", "##", "#", "##'s", "##東", "[UNK]", "'"]),
        ("byte_bpe", ["a", "7", "Ã©"], ["Ġ", "Ġa", "'s", "Ã", "-", "<|en|>"]),
        ("char", ["a", "ü", "7"], [" ", "'", "-", "東"]),
    ],
)  # fmt: skip
def test_letters_digits_and_accents_continue_a_word(kind, continuations, others):
    vocabulary = Vocabulary((*continuations, *others), kind)
    assert word_continuations(vocabulary).tolist() == [True] * len(continuations) + [False] * len(others)
