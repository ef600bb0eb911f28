"""The table of symbols: indices, doubles, growth."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_gpu_decoding.lm import symbols as symbols_module
from nemo_gpu_decoding.lm.symbols import SymbolTable, find_symbol, hashed


def index_of(table, symbol):
    text = np.frombuffer(b"<" + symbol + b">", np.uint8)  # within other text
    end = len(text) - 1
    return find_symbol(table.arrays, text, 1, end, np.uint64(hashed(text, 1, end)))


@pytest.mark.parametrize("pieces", [1, 7, 5000])
def test_symbols_have_the_index_in_which_they_were_added(pieces):
    names = [b"w%d" % i for i in range(5000)]
    table = SymbolTable()
    for begin in range(0, len(names), pieces):
        assert table.add(names[begin : begin + pieces]) == -1
    assert len(table) == len(names)
    assert [index_of(table, name) for name in names[::97]] == list(range(0, 5000, 97))
    assert index_of(table, b"w") == index_of(table, b"w50001") == -1


def test_a_symbol_that_is_there_is_reported_by_its_place_among_the_new_ones():
    table = SymbolTable()
    assert table.add([b"a", b"b"]) == -1
    assert table.add([b"c", b"a"]) == 1
    assert SymbolTable().add([b"a", b"", b"a"]) == 2


def test_equal_hashes_do_not_make_symbols_equal(monkeypatch):
    table = SymbolTable()
    table.add([b"ab"])
    text = np.frombuffer(b"ba", np.uint8)
    same = np.uint64(hashed(np.frombuffer(b"ab", np.uint8), 0, 2))
    assert find_symbol(table.arrays, text, 0, 2, same) == -1


def test_membership():
    table = SymbolTable()
    assert b"a" not in table
    table.add([b"a"])
    assert b"a" in table
    assert symbols_module._FIRST_SLOTS >= 2
