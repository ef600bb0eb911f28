"""Arrays of small integers, packed without gaps: integer i takes the bits [i * bits, (i + 1) * bits).

The bits are those of 64-bit words, least significant first, so that two neighbouring words always hold
a whole integer. [5, 1, 6] with 3 bits each is the one word 0b110_001_101 = 397.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined

MAX_BITS = 63


def bits_for(largest: int) -> int:
    """The number of bits (at least 1) that hold 0 .. largest."""
    return max(1, int(largest).bit_length())


def num_words(length: int, bits: int) -> int:
    """The 64-bit words that `length` integers take, with one more: reads touch two words at a time."""
    return -(-length * bits // 64) + 1


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """The packed form of `values` [N] uint64, each below 2 ** bits. [num_words(N, bits)] uint64"""
    words = np.zeros(num_words(len(values), bits), np.uint64)
    write_bits(words, bits, 0, np.ascontiguousarray(values, np.uint64))
    return words


def unpacked(words: np.ndarray, bits: int, length: int) -> np.ndarray:
    """The first `length` integers of a packed array. [length] uint64"""
    values = np.empty(length, np.uint64)
    _read_all(words, bits, values)
    return values


@inlined
def read_bits(words, bits, index):
    """Integer `index` of a packed array (uint64)."""
    position = np.int64(index) * np.int64(bits)
    word = position >> 6
    shift = np.uint64(position & 63)
    # shifted in two steps, because a shift by all 64 bits is undefined
    above = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    return ((words[word] >> shift) | above) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))


@compiled
def write_bits(words, bits, first, values):
    """Put `values` (uint64) at the integers `first`, `first` + 1, ... of an array that is zero there."""
    for i in range(len(values)):
        position = np.int64(first + i) * np.int64(bits)
        word = position >> 6
        shift = np.uint64(position & 63)
        words[word] |= values[i] << shift
        words[word + 1] |= (values[i] >> np.uint64(1)) >> (np.uint64(63) - shift)


@compiled
def _read_all(words, bits, values):
    for i in range(len(values)):
        values[i] = read_bits(words, bits, i)
