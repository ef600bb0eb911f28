from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_gpu_decoding.fusion.trie import ROOT, Trie

RADIX = 3
SEQUENCES = st.lists(
    st.lists(st.integers(0, RADIX - 1), min_size=1, max_size=6), min_size=1, max_size=12
)


def grow(sequences):
    trie, spelled = Trie(RADIX), {(): ROOT}
    for depth in range(max(map(len, sequences))):
        prefixes = sorted({tuple(s[: depth + 1]) for s in sequences if len(s) > depth})
        parents = np.array([spelled[p[:-1]] for p in prefixes])
        nodes = trie.find_or_add(parents, np.array([p[-1] for p in prefixes]))
        spelled.update(zip(prefixes, nodes.tolist(), strict=True))
    return trie, spelled


@settings(deadline=None)
@given(SEQUENCES)
def test_every_prefix_has_one_node(sequences):
    trie, spelled = grow(sequences)
    assert sorted(spelled.values()) == list(range(len(trie)))
    for prefix, node in spelled.items():
        assert trie.depths[node] == len(prefix)
        for label in range(RADIX):
            child = trie.find(np.array([node]), np.array([label]))[0]
            assert child == spelled.get((*prefix, label), -1)


@settings(deadline=None)
@given(SEQUENCES)
def test_links_lead_to_the_longest_proper_suffix(sequences):
    trie, spelled = grow(sequences)
    links = trie.suffix_links()
    for prefix, node in spelled.items():
        suffixes = [prefix[k:] for k in range(1, len(prefix) + 1)]
        longest = next((s for s in suffixes if s in spelled), ())
        assert links[node] == spelled[longest]


def test_the_example_of_the_module():
    trie, spelled = grow([[0, 1], [1, 0]])
    assert spelled == {(): 0, (0,): 1, (1,): 2, (0, 1): 3, (1, 0): 4}
    assert trie.suffix_links().tolist() == [0, 0, 0, 2, 1]
    assert [level.tolist() for level in trie.levels()] == [[1, 2], [3, 4]]


def test_adding_twice_changes_nothing():
    trie = Trie(RADIX)
    roots, labels = np.zeros(3, np.int64), np.array([1, 1, 2])
    first = trie.find_or_add(roots, labels)
    assert (trie.find_or_add(roots, labels) == first).all()
    assert len(trie) == 3
