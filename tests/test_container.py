"""Packed LMs and word graphs on disk: what is written is read, what is damaged is refused."""

import errno
import os
import re
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from nemo_gpu_decoding import container
from nemo_gpu_decoding.cache import one_process_at_a_time
from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.container import encode_words, write_text, written_whole
from nemo_gpu_decoding.graph.build import build_graph
from nemo_gpu_decoding.graph.store import WORD_GRAPH, is_word_graph, load_graph, save_graph
from nemo_gpu_decoding.lm.pack import pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import PACKED_LM, is_packed_lm, load_packed_lm
from tests.graph.toy import toy_arpa, toy_lexicon
from tests.oracles.ngram import closed_table, save_packed_lm, write_arpa


class Packed:
    kind, load, save = PACKED_LM, staticmethod(load_packed_lm), save_packed_lm
    is_one = staticmethod(is_packed_lm)

    @staticmethod
    def make(folder, **options):
        return pack_arpa_in_memory(write_arpa(folder / "lm.arpa", closed_table(seed=0, order=2)), **options)


class Graph:
    kind, load, save = WORD_GRAPH, staticmethod(load_graph), save_graph
    is_one = staticmethod(is_word_graph)

    @staticmethod
    def make(folder):
        pytest.importorskip("kaldifst")
        return build_graph(toy_arpa(folder / "toy.arpa", seed=0, order=2), toy_lexicon(), cache=False)


@pytest.fixture(params=[Packed, Graph], ids=["packed", "graph"])
def kept(request):
    return request.param


@pytest.fixture
def path(kept, tmp_path):
    path = tmp_path / "file"
    kept.save(kept.make(tmp_path), path)
    return path


def change(path, place, value=None):
    data = bytearray(path.read_bytes())
    data[place] = data[place] ^ 0xFF if value is None else value
    path.write_bytes(data)


def test_packed_lms_are_read_as_written(tmp_path):
    lm, path = Packed.make(tmp_path), tmp_path / "lm.packed"
    assert save_packed_lm(lm, path) == path.stat().st_size
    loaded = load_packed_lm(path)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.arrays, lm.arrays, strict=True))
    for fact in ("words", "start_state", "sentence_end", "unknown", "counts", "nbytes"):
        assert getattr(loaded, fact) == getattr(lm, fact)
    assert loaded.name == str(path)
    assert loaded.score(["x", "y"]) == lm.score(["x", "y"])


def test_graphs_are_read_as_written(tmp_path):
    graph, path = Graph.make(tmp_path), tmp_path / "toy.graph"
    save_graph(graph, path)
    loaded = load_graph(path)
    assert loaded.fingerprint == graph.fingerprint
    for fact in ("words", "report", "start", "unknown", "name"):
        assert getattr(loaded, fact) == getattr(graph, fact)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.spellings, graph.spellings, strict=True))


def test_words_may_hold_any_unicode_white_space_but_no_line_break(tmp_path):
    table = {("a\u00a0b",): (-1.0, 0.0), ("\u2028",): (-1.0, 0.0), ("\x85",): (-1.0, 0.0)}
    save_packed_lm(pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table)), tmp_path / "lm.packed")
    assert load_packed_lm(tmp_path / "lm.packed").words == ("a\u00a0b", "\u2028", "\x85")
    with pytest.raises(FieldError, match=r"a word is 'b\\nc', expected one without line breaks"):
        encode_words(["a", "b\nc"])


def test_arrays_are_mapped_read_only_and_on_pages(kept, path):
    for array in kept.load(path).arrays:
        if isinstance(array, np.ndarray):
            assert not array.flags.writeable
            assert not array.flags.owndata
            assert array.ctypes.data % 4096 == 0


def test_arrays_in_memory_and_mapped_ones_are_of_one_type_for_compiled_code(kept, path, tmp_path):
    from numba import typeof

    assert typeof(kept.load(path).arrays) == typeof(kept.make(tmp_path).arrays)


def test_container_is_read_by_safetensors(kept, path):
    loaded, arrays = kept.load(path).arrays, pytest.importorskip("safetensors.numpy").load_file(path)
    for name in ("states", "arcs"):
        assert arrays[name].tobytes() == getattr(loaded, name).tobytes()
    with pytest.importorskip("safetensors").safe_open(path, "numpy") as file:
        assert file.metadata()["kind"] == kept.kind.name


def test_damaged_container_is_refused(kept, path):
    whole = path.read_bytes()
    for place in [*range(0, 64, 3), *range(64, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole)
        change(path, place)
        with pytest.raises(ValueError, match=r"damaged|version|not a|truncated") as error:
            kept.load(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 4, 7, 8, 20, 63, 64, 1000, 4096, -4096, -64, -1, "one more"])
def test_another_size_is_refused_without_reading_the_arrays(kept, path, size):
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" if size == "one more" else whole[:size])
    message = "damaged" if size == "one more" else r"is truncated|is not a (packed LM|word graph)"
    with pytest.raises(ValueError, match=message):
        kept.load(path, verify=False)


def test_the_header_is_always_verified(kept, path):
    change(path, path.read_bytes().index(b"start"))
    with pytest.raises(ValueError, match="the checksum of its header does not match"):
        kept.load(path, verify=False)


def test_the_arrays_are_verified_once_and_only_if_wanted(kept, path, monkeypatch):
    read = []

    def checksum(data, inner=container._checksum):
        read.append(len(data))
        return inner(data)

    monkeypatch.setattr(container, "_checksum", checksum)
    kept.load(path, verify=False)
    assert not read
    kept.load(path)
    kept.load(path)
    assert len(read) == 1
    change(path, -1)  # another file now
    remedy = "pack it anew" if kept is Packed else "build it anew"
    with pytest.raises(ValueError, match=f"its checksum does not match; {remedy}"):
        kept.load(path)


def test_other_versions_are_refused(kept, path):
    name, remedy = ("packed LM", "pack") if kept is Packed else ("word graph", "build")
    path.write_bytes(path.read_bytes().replace(b'"version":"2"', b'"version":"3"', 1))
    with pytest.raises(ValueError, match=f"is a {name} of version 3, expected 2: {remedy} it anew"):
        kept.load(path)


def test_files_of_each_kind_are_told_from_others(kept, path, tmp_path):
    other = tmp_path / "other"
    (Graph if kept is Packed else Packed).save((Graph if kept is Packed else Packed).make(tmp_path), other)
    text = tmp_path / "text"
    text.write_text("\\data\\\nngram 1=3\n")
    assert kept.is_one(path)
    for file in (other, text):
        assert not kept.is_one(file)
        with pytest.raises(ValueError, match=f"{re.escape(str(file))} is not a {kept.kind.name}"):
            kept.load(file)
    with pytest.raises(FileNotFoundError):
        kept.load(tmp_path / "none")


def test_checksums_are_those_of_zlib(kept, path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    assert b'"body":"%08x"' % zlib.crc32(body) in header
    own = re.search(rb'"header":"([0-9a-f]{8})"', header)[1]
    assert b"%08x" % zlib.crc32(header.replace(own, b"0" * 8, 1)) == own


# -------------------------------------------------------------------------------------- full disks
def disk_is_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_full_disk(error, path):
    assert error.errno == errno.ENOSPC
    assert str(path) in str(error)
    assert path.is_absolute()


def test_a_full_disk_leaves_the_older_file_and_names_it(tmp_path, monkeypatch):
    target = tmp_path / "words.txt"
    write_text(target, "old\n")
    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(target, "new\n")
    check_full_disk(caught.value, target)
    assert target.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [target]


def test_full_disk_handling_keeps_other_errors(tmp_path):
    with pytest.raises(OSError, match="of the writer"), written_whole(tmp_path / "file"):
        raise OSError("of the writer")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_device_file_is_written_and_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_text(tmp_path / "link", "text")
    check_full_disk(caught.value, Path("/dev/full"))
    write_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_unfinished_copies_of_dead_processes_are_removed(tmp_path):
    def copy_of(name, seconds, *others):
        folder = tmp_path / f".file.{name}"
        folder.mkdir()
        for file in ("lock", "file", *others):
            (folder / file).write_text("unfinished")
        os.utime(folder / "lock", (time.time() - seconds,) * 2)
        return folder

    dead, new, other, held = copy_of("1", 100), copy_of("2", -5), copy_of("3", 100, "mine"), copy_of("4", 100)
    with one_process_at_a_time(held / "lock"):
        os.utime(held / "lock", (time.time() - 100,) * 2)
        write_text(tmp_path / "file", "text")
    assert [folder.exists() for folder in (dead, new, other, held)] == [False, True, True, True]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
