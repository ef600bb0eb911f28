"""Packed LMs on disk: what is written is read, what is damaged is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from nemo_gpu_decoding.lm import packed_file
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed_file import VERSION, load_packed_lm, save_packed_lm
from tests.lm.ngrams import closed_table, write_arpa


@pytest.fixture
def lm(tmp_path):
    return pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", closed_table(seed=0)))


@pytest.fixture
def path(lm, tmp_path):
    path = tmp_path / "lm.packed"
    save_packed_lm(lm, path)
    return path


def change(path, place, value=None):
    data = bytearray(path.read_bytes())
    data[place] = data[place] ^ 0xFF if value is None else value
    path.write_bytes(data)


def test_what_is_saved_can_be_loaded(lm, path):
    loaded = load_packed_lm(path)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.arrays, lm.arrays, strict=True))
    for fact in ("words", "start_state", "sentence_end", "unknown", "counts", "max_error", "nbytes"):
        assert getattr(loaded, fact) == getattr(lm, fact)
    assert loaded.name == str(path)
    assert loaded.score(["x", "y"]) == lm.score(["x", "y"])


def test_words_may_hold_any_unicode_white_space(tmp_path):
    table = {("a\u00a0b",): (-1.0, 0.0), ("\u2028",): (-1.0, 0.0), ("\x85",): (-1.0, 0.0)}
    lm = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table))
    save_packed_lm(lm, tmp_path / "lm.packed")
    assert load_packed_lm(tmp_path / "lm.packed").words == ("a\u00a0b", "\u2028", "\x85")


def test_arrays_are_mapped_read_only_and_on_pages(path):
    arrays = load_packed_lm(path).arrays
    for table in (arrays.states, arrays.labels, arrays.arcs, arrays.codebook):
        assert not table.flags.writeable
        assert not table.flags.owndata
        assert table.ctypes.data % 4096 == 0


def test_arrays_in_memory_and_mapped_ones_are_of_one_type_for_compiled_code(lm, path):
    from numba import typeof

    assert typeof(load_packed_lm(path).arrays) == typeof(lm.arrays)


@pytest.mark.parametrize("layout", ["exact", "quantised"])
def test_damage_anywhere_is_refused(tmp_path, layout):
    lm = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", closed_table(seed=0)), layout=layout)
    path = tmp_path / "lm.packed"
    size = save_packed_lm(lm, path)
    whole = path.read_bytes()
    assert size == len(whole)
    for place in [*range(0, 64, 3), *range(64, size, 997), size - 1]:
        path.write_bytes(whole)
        change(path, place)
        with pytest.raises(ValueError, match=r"damaged|version|not a packed LM|truncated") as error:
            load_packed_lm(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 4, 20, 63, 64, 1000, 4096, -4096, -1])
def test_truncation_is_refused_without_reading_the_arrays(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"truncated|not a packed LM"):
        load_packed_lm(path, verify=False)


def test_more_bytes_than_expected(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        load_packed_lm(path, verify=False)


def test_the_header_is_always_verified(path):
    change(path, path.read_bytes().index(b"start_state"))
    with pytest.raises(ValueError, match="the checksum of its header does not match"):
        load_packed_lm(path, verify=False)


def test_the_arrays_are_verified_once_and_only_if_wanted(path, monkeypatch):
    read = []

    def checksum(data, inner=packed_file._checksum):
        read.append(len(data))
        return inner(data)

    monkeypatch.setattr(packed_file, "_checksum", checksum)
    load_packed_lm(path, verify=False)
    assert not read
    load_packed_lm(path)
    load_packed_lm(path)
    assert len(read) == 1
    change(path, -1)  # another file now
    with pytest.raises(ValueError, match="its checksum does not match; pack it anew"):
        load_packed_lm(path)


def test_other_versions_are_refused(path):
    change(path, slice(8, 12), struct.pack("<I", VERSION + 1))
    with pytest.raises(ValueError, match=f"version {VERSION + 1}, expected {VERSION}: pack it anew"):
        load_packed_lm(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text("\\data\\\nngram 1=3\n")
    with pytest.raises(ValueError, match="not a packed LM: it does not begin with 'NGDNGRAM'"):
        load_packed_lm(path)
    with pytest.raises(FileNotFoundError):
        load_packed_lm(tmp_path / "none")
