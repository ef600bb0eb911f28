"""The n-grams of an ARPA file as a trie in flat arrays; `trie_loops.py` shows the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

import numpy as np

from nemo_gpu_decoding.lm.arpa import ArpaReader, NGramBlock
from nemo_gpu_decoding.lm.scratch import Scratch
from nemo_gpu_decoding.lm.trie_loops import (
    STAGED,
    count_to_children,
    find_contexts,
    move_to_contexts,
    sort_children,
)

MAX_NGRAMS = (1 << 32) - 1


class NGramTrie:
    """All n-grams of an LM, the orders up to `order`; node i is an n-gram.

    Reading one takes two mapped copies of the largest order at a time: as staged, in the order of the
    file, and in its final order.

    Raises:
        ValueError: the file is not well-formed; an n-gram's context (all but its last word) is not
            listed, or an n-gram is listed twice. Names file and line.
    """

    def __init__(self, reader: ArpaReader, scratch: Scratch, progress: Callable[[], None]) -> None:
        self.counts = tuple(reader.counts.values())
        self.first = np.append(0, np.cumsum(self.counts)).tolist()  # nodes of order n: first[n - 1] on
        if self.first[-1] > MAX_NGRAMS:
            raise ValueError(
                f"{reader.path} has {self.first[-1]} n-grams, expected at most {MAX_NGRAMS}"
            )
        _check_size(reader)
        self.labels = scratch.zeros(self.first[-1], np.uint32)
        self.costs = scratch.zeros(self.first[-1], np.float32)
        self.backoff_costs = scratch.zeros(self.num_inner, np.float32)
        self.children = scratch.zeros(self.num_inner + 1, np.uint32)
        self._read(reader, scratch, progress)

    @property
    def order(self) -> int:
        return len(self.counts)

    @property
    def num_inner(self) -> int:
        """Nodes below the highest order: those that may have children."""
        return self.first[-2]

    def ngram(self, node: int) -> list[int]:
        """The labels of the n-gram of a node."""
        order = int(np.searchsorted(self.first, node, "right"))
        labels = [int(self.labels[node])]
        for lower in range(order - 1, 0, -1):
            begin, end = self.first[lower - 1], self.first[lower]
            children = self.children[begin : end + 1]
            node = begin + int(np.searchsorted(children, np.uint32(node), "right")) - 1
            labels.insert(0, int(self.labels[node]))
        return labels

    def _read(self, reader: ArpaReader, scratch: Scratch, progress: Callable[[], None]) -> None:
        for order in range(2, self.order + 1):  # as if the order were empty
            self.children[self.first[order - 2] : self.first[order - 1] + 1] = self.first[order - 1]
        for order, blocks in groupby(reader.blocks(), attrgetter("order")):
            if order == 1:
                self._read_words(blocks, progress)
            else:
                self._read_order(order, blocks, reader, scratch, progress)

    def _read_words(self, blocks: Iterable[NGramBlock], progress: Callable[[], None]) -> None:
        for block in blocks:
            begin = int(block.symbols[0, 0])
            nodes = slice(begin, begin + len(block.symbols))
            self.labels[nodes] = block.symbols[:, 0]
            self.costs[nodes] = _cost(block.log10_probs)
            if self.order > 1:
                self.backoff_costs[nodes] = _cost(block.log10_backoffs)
            progress()

    def _read_order(
        self,
        order: int,
        blocks: Iterable[NGramBlock],
        reader: ArpaReader,
        scratch: Scratch,
        progress: Callable[[], None],
    ) -> None:
        begin, end = self.first[order - 2], self.first[order - 1]  # the contexts
        staged = scratch.zeros(self.counts[order - 1], STAGED)
        counts = scratch.zeros(end - begin, np.uint32)
        done = 0
        for block in blocks:
            rows = staged[done : done + len(block.symbols)]
            rows["cost"] = _cost(block.log10_probs)
            rows["backoff_cost"] = _cost(block.log10_backoffs)
            orphan = find_contexts(self.labels, self.children, block.symbols, rows, counts, begin)
            if orphan >= 0:
                context = " ".join(reader.symbols[label] for label in block.symbols[orphan, :-1])
                raise reader.fault(orphan, f"the context {context!r} is not among the {order - 1}-grams")
            done += len(rows)
            progress()
        count_to_children(counts, self.children, begin, end)
        move_to_contexts(
            staged, counts, self.children, begin, self.labels, self.costs, self.backoff_costs
        )
        double = sort_children(self.children, begin, end, self.labels, self.costs, self.backoff_costs)
        if double >= 0:
            raise _listed_twice(reader, self.ngram(int(double)))


def _cost(log10_weights: np.ndarray) -> np.ndarray:
    """-ln p of log10 p."""
    return (log10_weights * -math.log(10.0)).astype(np.float32)


def _check_size(reader: ArpaReader) -> None:
    """Don't reserve space for what cannot be in the file: no line is shorter than "0 a b\\n"."""
    least = sum(2 * (order + 1) * count for order, count in reader.counts.items())
    if not reader.is_compressed and reader.num_bytes < least - 1:
        raise ValueError(
            f"{reader.path} is truncated: its header lists {sum(reader.counts.values())} n-grams, "
            f"but the file has only {reader.num_bytes} bytes"
        )


def _listed_twice(reader: ArpaReader, ngram: list[int]) -> ValueError:
    """The error for an n-gram, with the line at which it is found the second time."""
    seen = 0
    with ArpaReader(reader.path) as again:
        for block in again.blocks():
            if block.order != len(ngram):
                continue
            for row in np.flatnonzero((block.symbols == ngram).all(axis=1)).tolist():
                seen += 1
                if seen == 2:
                    return again.fault(row, "the n-gram is listed twice")
    raise RuntimeError("the file has changed while it was read")
