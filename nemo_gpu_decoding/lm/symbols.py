"""A table of symbols (words or tokens) for compiled code: the bytes of a symbol to its index.

Open addressing with linear probing. A slot is 0 if free, else

    bits [0, 32)    index + 1
    bits [32, 64)   the upper half of the symbol's hash, which spares most comparisons of bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined

_FIRST_SLOTS = 1 << 10
_FNV_OFFSET, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_LOWER_HALF, _UPPER_HALF = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # FNV's low bits alone would crowd some slots
_HALF = np.uint64(32)


class SymbolArrays(NamedTuple):
    """What compiled code sees of a table."""

    slots: np.ndarray  # [power of two] uint64
    names: np.ndarray  # uint8, the bytes of all symbols
    begins: np.ndarray  # [N + 1] int64, where the bytes of a symbol begin


class SymbolTable:
    """Symbols in the order in which they were added."""

    def __init__(self) -> None:
        self.arrays = SymbolArrays(np.zeros(_FIRST_SLOTS, np.uint64), np.zeros(0, np.uint8), np.zeros(1, np.int64))

    def __len__(self) -> int:
        return len(self.arrays.begins) - 1

    def __contains__(self, symbol: bytes) -> bool:
        text = np.frombuffer(symbol, np.uint8)
        value = np.uint64(hashed(text, 0, len(text)))
        return bool(find_symbol(self.arrays, text, 0, len(text), value) >= 0)

    def add(self, symbols: Sequence[bytes]) -> int:
        """Append symbols; the position of the first that is there already, or -1."""
        if not symbols:
            return -1
        old = len(self)
        names = np.concatenate([self.arrays.names, np.frombuffer(b"".join(symbols), np.uint8)])
        ends = len(self.arrays.names) + np.cumsum(np.fromiter(map(len, symbols), np.int64, len(symbols)))
        slots, first = self.arrays.slots, old
        if 2 * (old + len(symbols)) > len(slots):
            slots, first = np.zeros(4 << (old + len(symbols)).bit_length(), np.uint64), 0
        self.arrays = SymbolArrays(slots, names, np.concatenate([self.arrays.begins, ends]))
        double = int(_insert(self.arrays, first))
        return double - old if double >= 0 else -1


@compiled
def hashed(text, begin, end):
    """The hash (uint64) of text[begin:end], FNV-1a."""
    value = _FNV_OFFSET
    for position in range(begin, end):
        value = (value ^ np.uint64(text[position])) * _FNV_PRIME
    return value * _SPREAD


@compiled
def find_symbol(symbols, text, begin, end, value):
    """The index of the symbol text[begin:end], whose hash is `value`, or -1."""
    last = np.int64(len(symbols.slots) - 1)
    position = np.int64(value >> _HALF) & last
    while True:
        slot = symbols.slots[position]
        if slot == 0:
            return np.int64(-1)
        if (slot ^ value) & _UPPER_HALF == 0:
            index = np.int64(slot & _LOWER_HALF) - 1
            if _is_equal(symbols, index, text, begin, end):
                return index
        position = (position + 1) & last


@inlined
def _is_equal(symbols, index, text, begin, end):
    own = symbols.begins[index]
    if symbols.begins[index + 1] - own != end - begin:
        return False
    for offset in range(end - begin):  # noqa: SIM110  (compiled)
        if symbols.names[own + offset] != text[begin + offset]:
            return False
    return True


@compiled
def _insert(symbols, first):
    """Enter the symbols from `first` on into the slots; the first that is there already, or -1."""
    last = np.int64(len(symbols.slots) - 1)
    for index in range(first, len(symbols.begins) - 1):
        begin, end = symbols.begins[index], symbols.begins[index + 1]
        value = hashed(symbols.names, begin, end)
        if find_symbol(symbols, symbols.names, begin, end, value) >= 0:
            return np.int64(index)
        position = np.int64(value >> _HALF) & last
        while symbols.slots[position] != 0:
            position = (position + 1) & last
        symbols.slots[position] = (value & _UPPER_HALF) | np.uint64(index + 1)
    return np.int64(-1)
