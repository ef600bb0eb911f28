"""KenLM's binary files. `kenlm/` has one n-gram LM as ARPA file and as KenLM's build_binary writes it:

build_binary probing small.arpa probing.bin
build_binary trie small.arpa trie.bin
build_binary -q 3 -b 3 trie small.arpa quantised.bin
build_binary -a 22 trie small.arpa compressed.bin
build_binary -q 3 -b 3 -a 22 trie small.arpa both.bin
"""

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from nemo_gpu_decoding import pack_arpa_in_memory, read_arpa
from nemo_gpu_decoding.graph.grammar import read_grammar
from nemo_gpu_decoding.lm import kenlm_binary
from tests.lm.test_estimate import table_of

FOLDER = Path(__file__).parent / "kenlm"
ARPA = FOLDER / "small.arpa"
EXACT, QUANTISED = ("probing", "trie", "compressed"), ("quantised", "both")


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("added", [(), ("zebra", "the")])
def test_ngrams_of_a_binary_equal_those_of_the_arpa_file(name, added):
    expected, found = (table_of(read_arpa(path, added)) for path in (ARPA, FOLDER / f"{name}.bin"))
    assert found.keys() == expected.keys()
    for ngram, values in expected.items():
        assert found[ngram] == pytest.approx(values, abs=1e-6), ngram


@pytest.mark.parametrize("name", EXACT + QUANTISED)
def test_scores_of_a_binary_equal_those_of_kenlm(name):
    """Of the grammar that word graphs are built of: the words of all n-grams one after the other, and others."""
    kenlm = pytest.importorskip("kenlm")
    path = FOLDER / f"{name}.bin"
    model, grammar = kenlm.Model(str(path)), read_grammar(path)
    ngrams = table_of(read_arpa(ARPA)).keys()
    assert table_of(read_arpa(path)).keys() == ngrams
    listed = [[word for word in ngram if word in grammar.words] for ngram in ngrams]
    for sentence in [*listed, *map(list, itertools.pairwise(grammar.words)), [w for ngram in listed for w in ngram]]:
        ours = grammar.automaton.score([grammar.words.index(word) for word in sentence])
        assert ours == pytest.approx(model.score(" ".join(sentence)) * math.log(10), rel=1e-5), sentence


def test_a_large_lm_can_be_packed_from_it():
    packed, expected = pack_arpa_in_memory(FOLDER / "trie.bin"), pack_arpa_in_memory(ARPA)
    assert sorted(packed.words) == sorted(expected.words)
    assert packed.num_arcs == expected.num_arcs


def test_a_probing_file_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(kenlm_binary, "MOST_TRIALS", 100)
    with pytest.raises(
        ValueError, match=r"probing.*trials to read its 2-grams, expected at most 100.*build_binary trie"
    ):
        read_arpa(FOLDER / "probing.bin")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (49, b"4", "another version than 5"),
        (kenlm_binary._SANITY - 28, b"\0\0\0\0", "other numbers"),
        (kenlm_binary._SANITY + 8, b"\x01", r"order 3 \(rest probing\), expected .* probing or trie"),
        (kenlm_binary._SANITY + 8, b"\x09", r"order 3 \(kind 9\)"),
        (kenlm_binary._SANITY + 12, b"\0", "does not have the words"),
    ],
)
def test_binary_of_another_kind_is_refused(tmp_path, at, value, message):
    path = tmp_path / "lm.bin"
    shutil.copy(FOLDER / "trie.bin", path)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(ValueError, match=message):
        read_arpa(path)


@pytest.mark.parametrize("name", EXACT + QUANTISED)
def test_truncated_binary_is_refused(tmp_path, name):
    data, path = (FOLDER / f"{name}.bin").read_bytes(), tmp_path / "lm.bin"
    for size in np.linspace(60, len(data) - 20, 12).astype(int).tolist():
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"truncated|incomplete|words"):
            read_arpa(path)
