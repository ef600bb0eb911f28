"""Packing: any order of n-grams, repairs, errors with their line, files whole or not at all."""

import gzip
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from nemo_gpu_decoding.container import written_whole
from nemo_gpu_decoding.graph.grammar import read_grammar
from nemo_gpu_decoding.lm import arpa as arpa_module
from nemo_gpu_decoding.lm import pack as pack_module
from nemo_gpu_decoding.lm.arpa import read_arpa
from nemo_gpu_decoding.lm.pack import pack_arpa, pack_arpa_in_memory
from nemo_gpu_decoding.lm.packed import load_packed_lm
from nemo_gpu_decoding.lm.prune import prune_ngram_lm
from tests.assets import ROOT
from tests.oracles.ngram import closed_table, missing_suffixes, write_arpa

TRIGRAM = r"""\data\
ngram 1=4
ngram 2=3
ngram 3=1

\1-grams:
-99 <s> -0.5
-1.5 </s>
-0.5 a -0.25
-0.75 b -0.125

\2-grams:
-0.125 <s> a -0.5
-0.25 a </s>
-0.375 a b

\3-grams:
-0.0625 <s> a b

\end\
"""


def same(one, other):
    tables = zip(one.arrays, other.arrays, strict=True)
    return all(np.array_equal(a, b) for a, b in tables) and one.words == other.words


@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_file_holds_what_is_packed_in_memory(tmp_path, order):
    table = closed_table(seed=order, order=order, keep=0.4)
    path = write_arpa(tmp_path / "lm.arpa", table)
    report = pack_arpa(path, tmp_path / "lm.packed")
    lm, expected = load_packed_lm(tmp_path / "lm.packed"), pack_arpa_in_memory(path)
    assert same(lm, expected)
    assert all(getattr(lm, name) == getattr(expected, name) for name in ("start_state", "sentence_end", "unknown"))
    assert report.counts == lm.counts == expected.counts
    assert report.num_ngrams == len(table) == lm.num_arcs
    assert report.states == lm.num_states
    assert report.num_bytes == (tmp_path / "lm.packed").stat().st_size
    assert report.repaired == missing_suffixes(table)
    assert [file.name for file in tmp_path.iterdir() if file != path] == ["lm.packed"]


def test_the_order_of_the_ngrams_in_the_file_does_not_matter(tmp_path):
    table = closed_table(seed=3, order=4, keep=0.5)
    words = [gram for gram in table if len(gram) == 1]
    others = [gram for gram in table if len(gram) > 1]
    random.Random(0).shuffle(others)
    by_suffix = sorted(others, key=lambda gram: gram[::-1])  # as KenLM writes
    expected = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table))
    for number, grams in enumerate((others, by_suffix)):
        path = write_arpa(tmp_path / f"{number}.arpa", {gram: table[gram] for gram in [*words, *grams]})
        assert same(pack_arpa_in_memory(path), expected)


def test_long_lists_of_successors_are_sorted(tmp_path):
    words = [f"w{i}" for i in range(1, 301)]
    table = {(word,): (-1.0, -0.1) for word in words}
    followers = random.Random(1).sample(words, 250)
    table.update({("w7", word): (-float(word[1:]) - 1, -float(word[1:]) / 2) for word in followers})
    table |= {("w7", "w8", "w9"): (-0.5, 0.0), ("w7", "w8"): (-9.0, -4.0)}
    lm = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table))
    state = lm.advance(0, lm.label("w7"))[1]
    for word in followers:
        cost, target = lm.advance(state, lm.label(word))
        assert cost == pytest.approx(-table["w7", word][0] * np.log(10), rel=1e-6)
        backoff = float(lm.arrays.states["backoff_cost"][target])
        assert backoff == pytest.approx(-table["w7", word][1] * np.log(10), rel=1e-6)


@pytest.mark.parametrize("separator", ["\t", "  "])
def test_small_blocks_and_gzip_change_nothing(tmp_path, monkeypatch, separator):
    table = closed_table(seed=5, order=3)
    expected = pack_arpa_in_memory(write_arpa(tmp_path / "lm.arpa", table))
    path = write_arpa(tmp_path / "other.arpa", table, separator)
    path.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(arpa_module, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(pack_module, "_CHUNK", 7)
    assert same(pack_arpa_in_memory(path), expected)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-0.125 <s> a -0.5", "-0.125 b a -0.5", "line 18: the context '<s> a' is not among the 2-grams"),
        ("ngram 2=3", "ngram 2=4000000", "truncated: its header lists 4000005 n-grams, but the file has"),
        ("ngram 1=4", "ngram 1=0", "more 1-grams than the 0 of the header"),
        ("ngram 2=3", "ngram 2=9294967290", "9294967295 n-grams, expected at most 4294967295"),
    ],
)
def test_pack_errors_name_fault_and_line(write, tmp_path, old, new, message):
    assert TRIGRAM.count(old) == 1
    path = write(TRIGRAM.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        pack_arpa(path, tmp_path / "lm.packed")
    assert str(path) in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["lm.arpa"]


@pytest.mark.parametrize("lines", range(1, 18))
def test_a_file_cut_after_any_line_is_refused(write, lines):
    cut = "".join(TRIGRAM.splitlines(keepends=True)[:lines])
    with pytest.raises(ValueError, match=r"truncated|the file ends"):
        pack_arpa_in_memory(write(cut))


def test_a_failure_leaves_an_older_file_alone(write, tmp_path, monkeypatch):
    target = tmp_path / "lm.packed"
    target.write_bytes(b"older")

    def fail(self, arrays):
        raise KeyboardInterrupt

    monkeypatch.setattr(pack_module._Packing, "fill", fail)
    with pytest.raises(KeyboardInterrupt):
        pack_arpa(write(TRIGRAM), target)
    assert target.read_bytes() == b"older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lm.arpa", "lm.packed"]


KILLED = """
import os, signal, sys
from nemo_gpu_decoding import container
from nemo_gpu_decoding.lm import pack
container._checksum = lambda data: os.kill(os.getpid(), signal.SIGKILL)  # arrays written, header not
pack.pack_arpa(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_pack_that_is_killed_keeps_the_older_file(write, tmp_path):
    target = tmp_path / "lm.packed"
    target.write_bytes(b"older")
    command = [sys.executable, "-c", KILLED, str(write(TRIGRAM)), str(target)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"older"
    (abandoned,) = tmp_path.glob(".lm.packed.*")
    set_age(abandoned, -3600)  # new, however slow this machine is
    pack_arpa(tmp_path / "lm.arpa", target)
    assert abandoned.exists()  # for a minute it may belong to somebody
    set_age(abandoned, 3600)
    (mine := tmp_path / ".lm.packed.mine").mkdir()
    pack_arpa(tmp_path / "lm.arpa", target)
    assert sorted(tmp_path.iterdir()) == [mine, tmp_path / "lm.arpa", target]


def test_unfinished_file_of_a_living_process_stays(write, tmp_path):
    pytest.importorskip("fcntl")
    target = tmp_path / "lm.packed"
    with written_whole(target) as unfinished:
        unfinished.write_bytes(b"theirs")
        set_age(unfinished.parent, 3600)
        pack_arpa(write(TRIGRAM), target)
        assert unfinished.read_bytes() == b"theirs"
    assert target.read_bytes() == b"theirs"


def set_age(folder, seconds):
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_memory_does_not_grow_with_the_number_of_ngrams(tmp_path, monkeypatch):
    monkeypatch.setattr(arpa_module, "_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(pack_module, "_CHUNK", 1 << 12)
    peaks = []
    for followers in (20, 20, 200):  # the first run compiles and imports
        table = {(f"w{i}",): (-1.0, -0.5) for i in range(500)}
        table.update({(f"w{i}", f"w{i + j}"): (-1.5, 0.0) for i in range(300) for j in range(followers)})
        path = write_arpa(tmp_path / "lm.arpa", table)
        tracemalloc.start()
        report = pack_arpa(path, tmp_path / "lm.packed")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert report.num_ngrams == 60_500
    assert peaks[2] - peaks[1] < 1e5  # 54,000 n-grams more, about 30 bytes each in the trie


def test_a_full_disk_is_an_error_with_the_size_needed(write, tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = write(TRIGRAM)
    for temporary in (tmp_path, tmp_path.parent):
        with pytest.raises(OSError, match=r"No space left on device: [\d.]+ MB needed") as error:
            pack_arpa(path, tmp_path / "lm.packed", temporary=temporary)
        assert error.value.filename == str(temporary)
    assert [file.name for file in tmp_path.iterdir()] == ["lm.arpa"]


REPEATED = r"""\data\
ngram 1=5
ngram 2=4
ngram 3=2

\1-grams:
-1|<s>|-0.5
-1|</s>
-1.5|a|-0.25
-2|b|-0.75
-3|<unk>

\2-grams:
-0.5|a b|-0.125
-0.25|<s> a|-0.5
-0.75|a b|-1
-0.375|b </s>|0

\3-grams:
-0.0625|<s> a b
-0.5|<s> a b

\end\
""".replace("|", "\t")


def test_the_first_entry_of_an_ngram_counts_as_in_kenlm(write, caplog):
    kenlm = pytest.importorskip("kenlm")
    path = write(REPEATED)
    theirs, packed_lm = kenlm.Model(str(path)), pack_arpa_in_memory(path)
    grammar = read_grammar(path)
    for text in ("a b", "b b", "a a b", "b a b a"):
        expected = theirs.score(text, bos=True, eos=True)
        assert -packed_lm.score(text.split()) / np.log(10) == pytest.approx(expected, rel=1e-5)
        labels = [grammar.words.index(word) for word in text.split()]
        assert grammar.automaton.score(labels) / np.log(10) == pytest.approx(expected, rel=1e-5)
    assert "lists 2-grams more than once: 1 entries are left out" in caplog.text
    assert prune_ngram_lm(read_arpa(path), threshold=0.0).orders[1].symbols.tolist() == [[2, 3], [0, 2], [3, 1]]
    with pytest.raises(ValueError, match=r"lm\.arpa: the context 'b a' is not among"):
        pack_arpa_in_memory(write(REPEATED.replace("-0.5\t<s> a b", "-0.5\tb a b")))
