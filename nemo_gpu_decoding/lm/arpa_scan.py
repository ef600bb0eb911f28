"""Scan lines of an ARPA file into numbers and symbol indices, in compiled code.

This module reads numbers with few digits, with the same result as `float()`. For other numbers, the caller gets their
ranges in the text.

Symbols (words or tokens) are in a hash table with open addressing and linear probing. A slot is 0 if free, else

    bits [0, 32)    index + 1
    bits [32, 64)   the upper half of the symbol's hash, which avoids most comparisons of bytes
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked

END_OF_TEXT, MARKER, FAULT = 0, 1, 2  # why a scan stopped: at a line with a backslash, at a bad line
_NEWLINE, _BACKSLASH, _MINUS, _PLUS, _POINT, _ZERO, _NINE = (ord(c) for c in "\n\\-+.09")
_LOWER_E, _UPPER_E = ord("e"), ord("E")
# Numbers below 2^53 times or by a power of ten up to 10^22 take one rounding: Clinger, "How to read
# floating point numbers accurately", 1990.
_EXACT_INTEGER = 1 << 53
_EXACT_POWER = 22
_POWERS = 10.0 ** np.arange(_EXACT_POWER + 1)
_MOST_DIGITS = 18  # of an int64
_NEVER = -99.0  # what SRILM writes for log10 0

_FNV_OFFSET, _FNV_PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
_LOWER_HALF, _UPPER_HALF = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFF00000000)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # the low bits of FNV alone give more collisions
_HALF = np.uint64(32)


class SymbolArrays(NamedTuple):
    """A symbol table in the form that compiled code reads."""

    slots: np.ndarray  # [power of two] uint64
    names: np.ndarray  # uint8, the bytes of all symbols
    begins: np.ndarray  # [N + 1] int64, where the bytes of a symbol begin


class SymbolTable:
    """A table from symbols to numbers; the number of a symbol is its position in a list."""

    def __init__(self, symbols: Sequence[str]) -> None:
        names = [symbol.encode() for symbol in symbols]
        slots = np.zeros(4 << len(names).bit_length(), np.uint64)
        begins = np.array([0, *map(len, names)], np.int64).cumsum()
        self.arrays = SymbolArrays(slots, np.frombuffer(b"".join(names), np.uint8), begins)
        self.double = int(_insert(self.arrays))  # the position of the first repeated symbol, or -1


@compiled
def hashed(text, begin, end):
    """Return the hash (uint64) of text[begin:end], FNV-1a."""
    value = _FNV_OFFSET
    for position in range(begin, end):
        value = (value ^ np.uint64(text[position])) * _FNV_PRIME
    return value * _SPREAD


@compiled
def find_symbol(symbols, text, begin, end, value):
    """Return the index of the symbol text[begin:end], whose hash is `value`, or -1."""
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


@linked
def _is_equal(symbols, index, text, begin, end):
    own = symbols.begins[index]
    if symbols.begins[index + 1] - own != end - begin:
        return False
    for offset in range(end - begin):  # noqa: SIM110  (compiled)
        if symbols.names[own + offset] != text[begin + offset]:
            return False
    return True


@compiled
def _insert(symbols):
    """Enter the symbols into the hash table; return the first duplicate, or -1."""
    last = np.int64(len(symbols.slots) - 1)
    for index in range(len(symbols.begins) - 1):
        begin, end = symbols.begins[index], symbols.begins[index + 1]
        value = hashed(symbols.names, begin, end)
        if find_symbol(symbols, symbols.names, begin, end, value) >= 0:
            return np.int64(index)
        position = np.int64(value >> _HALF) & last
        while symbols.slots[position] != 0:
            position = (position + 1) & last
        symbols.slots[position] = (value & _UPPER_HALF) | np.uint64(index + 1)
    return np.int64(-1)


# -- lines ----------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """The arrays that `scan_ngrams` fills: M n-grams, and K numbers that the caller must convert."""

    symbols: np.ndarray  # [M, order] int32; unused for 1-grams
    names: np.ndarray  # [M, 2] int64: begin and end of the symbol in the text; only for 1-grams
    log10_probs: np.ndarray  # [M] float64
    log10_backoffs: np.ndarray  # [M] float64
    unread: np.ndarray  # [K, 3] int64: 2 * row (+ 1 for a back-off), begin and end in the text


def new_scan(text: np.ndarray, order: int) -> Scan:
    """Return arrays for all n-grams that the lines of a text, [bytes] uint8, may hold."""
    rows = np.count_nonzero(text == _NEWLINE)
    return Scan(
        np.empty((rows if order > 1 else 0, order), np.int32),
        np.empty((rows if order == 1 else 0, 2), np.int64),
        np.empty(rows),
        np.empty(rows),
        np.empty((2 * rows, 3), np.int64),
    )


@compiled
def scan_ngrams(text, begin, order, symbols: SymbolArrays, scan: Scan):
    """Read lines of n-grams from `begin` on, up to a line with a backslash or with an error.

    Args:
        text: [bytes] uint8, whole lines, each with its newline.

    Returns:
        why the scan stopped, the begin of that line, numbers of lines passed, n-grams read, numbers unread.
    """
    position, lines, rows, unread = begin, 0, 0, 0
    while position < len(text):
        if text[position] == _BACKSLASH:
            return MARKER, position, lines, rows, unread
        field_begin, field_end = _next_field(text, position)
        if field_begin == field_end:  # a blank line
            position = field_end + 1
            lines += 1
            continue
        field, end, unread_here = _scan_line(text, field_begin, field_end, symbols, scan, rows, unread)
        if not order + 1 <= field <= order + 2:
            return FAULT, position, lines, rows, unread
        if field == order + 1:
            scan.log10_backoffs[rows] = 0.0
        position = end + 1
        unread = unread_here
        lines += 1
        rows += 1
    return END_OF_TEXT, position, lines, rows, unread


@compiled
def _scan_line(text, begin, end, symbols, scan, row, unread):
    """Read the fields of one line; `begin` and `end` are those of the first field.

    Returns:
        the number of fields, 0 for an unknown symbol; the position of the newline; the count of unread numbers.
    """
    field, order = 0, scan.symbols.shape[1]
    if order == 1 and _is_start_symbol(text, begin, end):
        # some writers leave out the probability of <s>, which is never used
        scan.log10_probs[row] = _NEVER
        field = 1
    while begin < end:
        if field == 0 or field > order:
            value, is_read = _number(text, begin, end)
            if not is_read:
                scan.unread[unread, 0] = 2 * row + (field > order)
                scan.unread[unread, 1] = begin
                scan.unread[unread, 2] = end
                unread += 1
            if field == 0:
                scan.log10_probs[row] = value
            elif field == order + 1:
                scan.log10_backoffs[row] = value
            else:
                return field + 1, end, unread
        elif order == 1:
            scan.names[row, 0], scan.names[row, 1] = begin, end
        else:
            symbol = find_symbol(symbols, text, begin, end, hashed(text, begin, end))
            if symbol < 0:
                return 0, end, unread
            scan.symbols[row, field - 1] = symbol
        field += 1
        begin, end = _next_field(text, end)
    return field, end, unread


@linked
def _next_field(text, position):
    """Return begin and end of the next field in the line; both are at the newline if there is none."""
    while text[position] != _NEWLINE and _is_space(text[position]):
        position += 1
    begin = position
    while not _is_space(text[position]):
        position += 1
    return begin, position


@linked
def _is_space(character):
    """Return whether a byte is a space, tab or line end; other white space may be in a symbol, as in KenLM."""
    return character == 32 or character == 9 or character == 10 or character == 13


@linked
def _is_start_symbol(text, begin, end):
    return end - begin == 3 and text[begin] == 60 and text[begin + 1] == 115 and text[begin + 2] == 62  # <s>


@compiled
def _number(text, begin, end):
    """Return the number at text[begin:end] as float64, and True; (0, False) if the caller must convert it."""
    position = begin
    negative = text[position] == _MINUS
    if negative or text[position] == _PLUS:
        position += 1
    mantissa, power, position, digits = _mantissa(text, position, end)
    if digits == 0 or digits > _MOST_DIGITS or mantissa > _EXACT_INTEGER:
        return 0.0, False
    if position < end:
        exponent, is_read = _exponent(text, position, end)
        if not is_read:
            return 0.0, False
        power += exponent
    if not -_EXACT_POWER <= power <= _EXACT_POWER:
        return 0.0, False
    value = float(mantissa)
    value = value / _POWERS[-power] if power < 0 else value * _POWERS[power]
    return (-value if negative else value), True


@linked
def _mantissa(text, position, end):
    """Read digits with an optional point; return integer value, power of ten, end, and number of digits."""
    mantissa, digits, decimals = np.int64(0), 0, 0
    has_point = False
    while position < end:
        character = text[position]
        if _ZERO <= character <= _NINE:
            if digits < _MOST_DIGITS:
                mantissa = mantissa * 10 + np.int64(character - _ZERO)
            digits += 1
            decimals += has_point
        elif character == _POINT and not has_point:
            has_point = True
        else:
            break
        position += 1
    return mantissa, -decimals, position, digits


@linked
def _exponent(text, position, end):
    """Return the exponent in text such as "e-05", and whether it is valid (at most three digits)."""
    if text[position] != _LOWER_E and text[position] != _UPPER_E:
        return 0, False
    position += 1
    negative = position < end and text[position] == _MINUS
    if position < end and (negative or text[position] == _PLUS):
        position += 1
    if not 1 <= end - position <= 3:
        return 0, False
    exponent = np.int64(0)
    while position < end:
        if not _ZERO <= text[position] <= _NINE:
            return 0, False
        exponent = exponent * 10 + np.int64(text[position] - _ZERO)
        position += 1
    return (-exponent if negative else exponent), True
