"""A trie in flat arrays, with the suffix links that n-gram LMs and context graphs both need.

Node 0 is the root. A child is found by the key  parent * radix + label  in a sorted array: many nodes
take a step at once, without one Python object per node. With the sequences "ab" and "ba" over
{0: a, 1: b} (radix 2), added level by level:

    node     0 (root)   1 "a"   2 "b"   3 "ab"   4 "ba"
    parent   -1         0       0       1        2
    label    -1         0       1       1        0
    key      -          0       1       3        4
    suffix   0          0       0       2        1

The suffix link of a node leads to the longest proper suffix of its sequence that is a node too: the
back-off state of an n-gram, the failure link of Aho & Corasick (1975).
"""

from __future__ import annotations

import numpy as np

ROOT = 0


class Trie:
    """Grows by `find_or_add`, a level at a time. Labels are 0 .. radix-1; all ids are int64 arrays."""

    def __init__(self, radix: int) -> None:
        self.radix = radix
        self.parents = np.array([-1], np.int64)
        self.labels = np.array([-1], np.int64)
        self.depths = np.array([0], np.int64)
        self._keys = np.zeros(0, np.int64)  # sorted
        self._nodes = np.zeros(0, np.int64)  # node of each key

    def __len__(self) -> int:
        return len(self.parents)

    def find(self, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The child of each node under each label, -1 where there is none."""
        if not len(self._keys):
            return np.full(len(nodes), -1)
        keys = nodes * self.radix + labels
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        return np.where(self._keys[at] == keys, self._nodes[at], -1)

    def find_or_add(self, nodes: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """As `find`, but children that do not exist yet are made."""
        children = self.find(nodes, labels)
        missing = np.flatnonzero(children < 0)
        if len(missing):
            new = np.unique(nodes[missing] * self.radix + labels[missing])
            self._append(new)
            children[missing] = self.find(nodes[missing], labels[missing])
        return children

    def _append(self, keys: np.ndarray) -> None:
        first = len(self)
        parents = keys // self.radix
        self.parents = np.append(self.parents, parents)
        self.labels = np.append(self.labels, keys % self.radix)
        self.depths = np.append(self.depths, self.depths[parents] + 1)
        merged = np.append(self._keys, keys)
        order = np.argsort(merged, kind="stable")  # two sorted runs: close to a merge
        self._keys = merged[order]
        self._nodes = np.append(self._nodes, np.arange(first, len(self)))[order]

    def levels(self) -> list[np.ndarray]:
        """The nodes of depth 1, of depth 2, and so on."""
        order = np.argsort(self.depths, kind="stable")
        ends = np.searchsorted(self.depths[order], np.arange(self.depths.max() + 1), side="right")
        return np.split(order, ends)[1:-1]

    def suffix_links(self) -> np.ndarray:
        """For every node the node of its longest proper suffix; the root's is itself."""
        links = np.zeros(len(self), np.int64)
        for level in self.levels()[1:]:
            links[level] = self.follow(links[self.parents[level]], self.labels[level], links)
        return links

    def follow(self, nodes: np.ndarray, labels: np.ndarray, links: np.ndarray) -> np.ndarray:
        """The node of the longest suffix of "node, label": a child of the node or of one it links to."""
        nodes, found = nodes.copy(), np.full(len(nodes), ROOT)
        pending = np.arange(len(nodes))
        while len(pending):
            children = self.find(nodes[pending], labels[pending])
            hit = children >= 0
            found[pending[hit]] = children[hit]
            pending = pending[~hit & (nodes[pending] != ROOT)]
            nodes[pending] = links[nodes[pending]]
        return found
