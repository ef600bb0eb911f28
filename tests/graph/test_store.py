"""Graphs on disk, ready-made FST files, and everything that may be wrong with either."""

import copy
import logging
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from nemo_gpu_decoding.container import write_arrays
from nemo_gpu_decoding.graph.build import build_graph, load_fst_graph
from nemo_gpu_decoding.graph.csr import WordGraph, epsilon_closure
from nemo_gpu_decoding.graph.openfst import FST_ARC, Fst, read_fst, write_fst
from nemo_gpu_decoding.graph.store import is_word_graph, load_graph, save_graph
from tests.assets import ROOT
from tests.graph.toy import toy_arpa, toy_lexicon


def fst(arcs, states, final, start=0):
    """An FST from (source, input, output, cost, target) rows."""
    costs = np.full(states, np.inf)
    costs[final] = 0.0
    columns = [np.array(column) for column in zip(*arcs, strict=True)] if arcs else [np.zeros(0, int)] * 5
    sources, inputs, outputs, weights, targets = columns
    return Fst.from_arcs(start, costs, sources, inputs, outputs, weights, targets)


SMALL = [(0, 1, 1, 0.5, 1), (1, 0, 0, 0.25, 2), (1, 2, 2, 1.5, 1), (2, 3, 0, 0.0, 0)]
WORDS = ("<eps>", "one", "two")


@pytest.fixture
def graph(tmp_path):
    pytest.importorskip("kaldifst")
    return build_graph(toy_arpa(tmp_path / "lm.arpa", seed=0), toy_lexicon(), cache=False)


def test_cached_graph_is_not_built_again(tmp_path, monkeypatch):
    pytest.importorskip("kaldifst")
    from nemo_gpu_decoding.graph import build

    arpa, folder = toy_arpa(tmp_path / "lm.arpa", seed=0), tmp_path / "cache"
    first = build_graph(arpa, toy_lexicon(), cache=folder)
    assert len(list(folder.iterdir())) == 1
    moved = arpa.rename(tmp_path / "renamed.arpa")
    with monkeypatch.context() as patch:
        patch.setattr(build, "compose_and_optimize", None)
        again = build_graph(moved, toy_lexicon(), cache=folder)
    assert again.fingerprint == first.fingerprint
    other = build_graph(toy_arpa(tmp_path / "lm.arpa", seed=1), toy_lexicon(), cache=folder)
    assert other.fingerprint != first.fingerprint


KILLED = """
import os, signal, sys
from nemo_gpu_decoding import container
from nemo_gpu_decoding.graph.build import build_graph
from tests.graph.toy import toy_lexicon
container._checksum = lambda data: os.kill(os.getpid(), signal.SIGKILL)  # arrays written, header not
build_graph(sys.argv[1], toy_lexicon(), cache=sys.argv[2])
"""


@pytest.mark.slow
def test_a_build_that_is_killed_while_it_fills_the_cache_leaves_no_half_graph(tmp_path, graph):
    arpa, folder = tmp_path / "lm.arpa", tmp_path / "cache"  # the LM of `graph`
    command = [sys.executable, "-c", KILLED, str(arpa), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [file.name for file in folder.iterdir() if not file.name.startswith(".")] == []
    assert build_graph(arpa, toy_lexicon(), cache=folder).fingerprint == graph.fingerprint
    (kept,) = [file for file in folder.iterdir() if not file.name.startswith(".")]
    assert load_graph(kept).fingerprint == graph.fingerprint


@pytest.mark.slow
def test_two_processes_that_fill_one_cache_both_have_the_graph(tmp_path, graph):
    code = KILLED.replace("container._checksum", "_")
    command = [sys.executable, "-c", code, str(tmp_path / "lm.arpa"), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [subprocess.Popen(command, cwd=ROOT, env=environment) for _ in range(2)]
    assert [process.wait(300) for process in both] == [0, 0]
    (kept,) = (tmp_path / "cache").iterdir()
    assert load_graph(kept).fingerprint == graph.fingerprint


def test_unusable_cache_does_not_stop_the_build(tmp_path, graph, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "nemo_gpu_decoding")
    arpa, folder = tmp_path / "lm.arpa", tmp_path / "cache"
    folder.write_text("no folder")
    assert build_graph(arpa, toy_lexicon(), cache=folder).fingerprint == graph.fingerprint
    assert "can't keep the graph in" in caplog.text
    folder.unlink()
    build_graph(arpa, toy_lexicon(), cache=folder)
    (kept,) = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])  # cut off
    assert build_graph(arpa, toy_lexicon(), cache=folder).fingerprint == graph.fingerprint
    assert f"building it anew: {kept} is truncated" in caplog.text
    assert load_graph(kept).fingerprint == graph.fingerprint  # the new one took its place

    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert build_graph(arpa, toy_lexicon(), cache=tmp_path / "full").fingerprint == graph.fingerprint
    assert re.search(r"No space left on device: [\d.]+ MB needed", caplog.text)
    assert list((tmp_path / "full").iterdir()) == []


def test_fst_files_are_read_back_and_are_graphs_too(tmp_path):
    written = fst(SMALL, 4, [2])
    write_fst(written, tmp_path / "small.fst")
    read = read_fst(tmp_path / "small.fst")
    assert read.start == 0
    assert np.array_equal(read.arcs, written.arcs)
    assert np.array_equal(read.arc_begin, written.arc_begin)
    assert np.array_equal(read.final_costs, written.final_costs)
    write_fst(fst(SMALL, 3, [2]), tmp_path / "toy.fst")
    assert is_word_graph(tmp_path / "toy.fst")


def test_fst_file_equals_that_of_kaldifst(tmp_path):
    kaldifst = pytest.importorskip("kaldifst")
    write_fst(fst(SMALL, 4, [2]), tmp_path / "small.fst")
    theirs = kaldifst.StdVectorFst.read(str(tmp_path / "small.fst"))
    rows = [
        (s, arc.ilabel, arc.olabel, arc.weight.value, arc.nextstate)
        for s in range(theirs.num_states)
        for arc in kaldifst.ArcIterator(theirs, s)
    ]
    assert sorted(rows) == sorted(SMALL)
    symbols = kaldifst.SymbolTable()
    for label, word in enumerate(WORDS):
        symbols.add_symbol(symbol=word, key=label)
    theirs.output_symbols = symbols
    theirs.write(str(tmp_path / "named.fst"))
    assert load_fst_graph(tmp_path / "named.fst").words == WORDS


@pytest.mark.parametrize("keep", [0, 3, 30, 70, -1])
def test_truncated_fst_files_are_named(tmp_path, keep):
    path = tmp_path / "small.fst"
    write_fst(fst(SMALL, 4, [2]), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"small\.fst is (truncated|not a binary)"):
        load_fst_graph(path, WORDS)


def test_ready_made_graphs_need_words(tmp_path):
    write_fst(fst(SMALL, 4, [2]), tmp_path / "small.fst")
    with pytest.raises(ValueError, match=r"words is None, expected the words\.txt of .*, which has no"):
        load_fst_graph(tmp_path / "small.fst")
    (tmp_path / "words.txt").write_text("<eps> 0\none 1\ntwo 2\n")
    assert load_fst_graph(tmp_path / "small.fst", tmp_path / "words.txt").words == WORDS
    (tmp_path / "words.txt").write_text("<eps> 0\none\n")
    with pytest.raises(ValueError, match=r"words\.txt, line 2: expected a word and its number"):
        load_fst_graph(tmp_path / "small.fst", tmp_path / "words.txt")


@pytest.mark.parametrize(
    ("arcs", "final", "message"),
    [
        ([*SMALL, (2, 0, 0, 1.0, 0), (0, 0, 0, 1.0, 1)], [2], "epsilon arcs from state . form a cycle"),
        ([*SMALL, (1, 0, 0, 1.0, 1)], [2], "epsilon arcs from state . form a cycle"),
        (SMALL, [], "no final state"),
        ([*SMALL, (0, 1, 3, 0.0, 1)], [2], "output label 3, but the table of words ends at 2"),
        ([*SMALL, (0, 1, 1, np.nan, 1), (0, 1, 1, -np.inf, 1)], [2], "cost holds NaN or -inf"),
        ([*SMALL, (0, -1, 1, 0.0, 1)], [2], "an arc has the input label -1"),
        ([*SMALL, (0, 1, 1, 0.0, 9)], [2], "leads to a state that does not exist"),
    ],
)
def test_invalid_graph_raises_an_error_that_names_it(arcs, final, message):
    with pytest.raises(ValueError, match=message):
        WordGraph.from_fst(fst(arcs, 4, final), WORDS)


def test_empty_graph_raises_an_error_that_names_it():
    with pytest.raises(ValueError, match="is empty: it has no start state"):
        WordGraph.from_fst(fst([], 0, [], start=-1), WORDS)


def test_epsilon_chains_are_followed_once():
    # 0 -the/1-> 1 -/2-> 2, and a dearer direct way from 0 to 2
    arcs = np.array([(0, 1, 1.0, 1), (0, 0, 2.0, 2), (0, 1, 9.0, 2)], FST_ARC)
    begin, epsilons, _ = epsilon_closure(3, np.array([0, 1, 0]), arcs, 5, "toy")
    assert begin.tolist() == [0, 2, 3, 3]
    assert epsilons.tolist() == [(1, 1.0, 1, 0.0), (1, 3.0, 2, 0.0), (0, 2.0, 2, 0.0)]


def test_two_words_on_a_chain_get_a_word_sequence_label():
    graph = WordGraph.from_fst(
        fst([(0, 0, 1, 0.0, 1), (1, 0, 2, 0.0, 2), (2, 0, 1, 0.5, 3), (3, 1, 0, 0.0, 3)], 4, [3]), WORDS
    )
    reached = {
        int(arc["target"]): graph.expanded(int(arc["olabel"]))
        for arc in graph.arrays.epsilons[: graph.arrays.states["epsilon_end"][0]]
    }
    assert reached == {1: [1], 2: [1, 2], 3: [1, 2, 1]}


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("states", {"epsilon_begin": 2, "epsilon_end": 1}, "epsilon_end of a state is before epsilon_begin"),
        ("states", {"arc_begin": 2, "arc_end": 1}, "arc_end of a state is before arc_begin"),
        ("arcs", {"target": 1 << 20}, "target holds 1048576"),
        ("word_sequences", None, "word_sequences holds a label that is no earlier one"),
    ],
)
def test_graph_file_with_targets_out_of_range_is_refused(tmp_path, graph, table, changes, message):
    path, changed = tmp_path / "changed.graph", np.array(getattr(graph.arrays, table))
    if changes is None:
        changed = np.full((1, 2), len(graph.words), np.int32)
    for name, value in (changes or {}).items():
        changed[0][name] = value
    wrong = copy.copy(graph)
    object.__setattr__(wrong, "arrays", graph.arrays._replace(**{table: changed}))
    save_graph(wrong, path)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} is damaged: .*{message}.*; build it anew"):
        load_graph(path)


@pytest.mark.parametrize("fact", ["start", "unknown", "name"])
def test_missing_metadata_of_a_graph_file_is_named(tmp_path, graph, fact, monkeypatch):
    path = tmp_path / "short.graph"
    monkeypatch.setattr(
        "nemo_gpu_decoding.graph.store.write_arrays",
        lambda path, kind, facts, arrays: write_arrays(
            path, kind, {name: value for name, value in facts.items() if name != fact}, arrays
        ),
    )
    save_graph(graph, path)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged: '{fact}' is missing; build it anew"):
        load_graph(path)
