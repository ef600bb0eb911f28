"""Arrays of small integers."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.lm.bits import MAX_BITS, bits_for, num_words, packed, unpacked, write_bits


def test_worked_example():
    assert packed(np.array([5, 1, 6], np.uint64), bits=3).tolist() == [0b110_001_101, 0]


@pytest.mark.parametrize(("largest", "bits"), [(0, 1), (1, 1), (2, 2), (255, 8), (256, 9)])
def test_bits_for(largest, bits):
    assert bits_for(largest) == bits


@pytest.mark.parametrize("bits", [1, 3, 18, 32, 33, 50, MAX_BITS])
@pytest.mark.parametrize("length", [0, 1, 64, 131])
def test_what_is_packed_can_be_read(bits, length):
    values = np.random.default_rng(bits).integers(0, 1 << bits, length, np.uint64)
    words = packed(values, bits)
    assert len(words) == num_words(length, bits)
    assert (unpacked(words, bits, length) == values).all()


def test_writing_in_pieces_gives_the_same():
    values = np.random.default_rng(0).integers(0, 1 << 37, 100, np.uint64)
    words = np.zeros(num_words(100, 37), np.uint64)
    for begin, end in ((0, 1), (1, 40), (40, 100)):
        write_bits(words, 37, begin, values[begin:end])
    assert (words == packed(values, 37)).all()
