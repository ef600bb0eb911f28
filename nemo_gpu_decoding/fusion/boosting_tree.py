"""Boosting trees with their phrases: find the phrases in a hypothesis, and build the tree of some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.context_graph import ScoredSequence

Key = tuple[Hashable, ...]
_NUMBER = ...  # no unit; a copy of a tree has the same object


class Occurrence(NamedTuple):
    """A phrase in a hypothesis, which is a sequence of units: labels or words."""

    number: int  # of the sequence in the tree
    begin: int  # first unit
    end: int  # one past the last unit


class PhraseTable(NamedTuple):
    """The sequences of a boosting tree, and how hypotheses show them."""

    sequences: Sequence[ScoredSequence]
    keys: Sequence[Key]  # units that a hypothesis has for each sequence: labels, for word graphs words
    texts: Sequence[str]  # phrase of each sequence
    build: Callable[[Sequence[ScoredSequence]], BackoffAutomaton]
    is_continuation: np.ndarray | None = None  # as in `build_context_graph`, as `label_before`
    label_before: int | None = None


@dataclass(frozen=True, eq=False)
class BoostingTree(BackoffAutomaton):
    """The automaton of phrases, with the phrases themselves."""

    table: PhraseTable | None = None
    ac_threshold: float = 0.0  # least probability of a phrase in a result, 0 .. 1

    @classmethod
    def of(cls, table: PhraseTable, ac_threshold: float) -> BoostingTree:
        """Build the tree of all sequences of a table."""
        tree = table.build(table.sequences)
        fields = (tree.arrays, tree.vocab_size, tree.start_state, tree.name)
        return cls(*fields, table=table, ac_threshold=ac_threshold)

    def only(self, keys: Collection[Key]) -> BoostingTree | None:
        """The tree without phrases other than these; penalties stay. None: nothing is left."""
        assert self.table is not None
        sequences, all_keys, texts = self.table[:3]
        numbers, penalties = self._numbers
        kept = sorted([*penalties, *(n for key in keys for n in numbers.get(key, ()))])
        if not kept:
            return None
        chosen = ([sequences[n] for n in kept], [all_keys[n] for n in kept], [texts[n] for n in kept])
        table = PhraseTable(*chosen, *self.table[3:])
        tree = table.build(table.sequences)
        return replace(self, arrays=tree.arrays, start_state=tree.start_state, table=table)

    def occurrences(self, units: Sequence[Hashable]) -> Iterator[Occurrence]:
        """The phrases of a hypothesis, from its begin; those inside of longer ones are omitted."""
        assert self.table is not None
        before, sequences, trie, continues = self.table.label_before, self.table.sequences, self._trie, self._continues
        shift = 0 if before is None else 1
        read = (*[before] * shift, *units)
        covered = 0
        for begin, first in enumerate(read):
            node = trie.get(first)
            if node is None:
                continue
            matches, end = [], begin + 1
            while type(node) is dict:
                if _NUMBER in node and covered < end:
                    matches.append((node[_NUMBER], end))
                node = node.get(read[end]) if end < len(read) else None
                end += 1
            if node is not None:
                key, number = node
                end = begin + len(key)
                if covered < end and read[begin:end] == key:
                    matches.append((number, end))
            for number, end in reversed(matches):
                if end < len(read) and continues and continues[read[end]] and sequences[number].ends_in_word:
                    continue
                yield Occurrence(number, max(0, begin - shift), end - shift)
                covered = end
                break

    @property
    def num_phrases(self) -> int:
        """Number of phrases with different units, without penalties."""
        return len(self._numbers[0])

    @property
    def longest(self) -> int:
        """Units of the longest phrase."""
        return max(map(len, self._numbers[0]), default=0)

    @cached_property
    def _numbers(self) -> tuple[dict[Key, list[int]], list[int]]:
        """The sequences of each key, without penalties; the penalties."""
        assert self.table is not None
        numbers: dict[Key, list[int]] = {}
        penalties = []
        for n, (key, sequence) in enumerate(zip(self.table.keys, self.table.sequences, strict=True)):
            total = sequence.scores.sum()
            if total > 0:
                numbers.setdefault(key, []).append(n)
            elif total < 0:
                penalties.append(n)
        return numbers, penalties

    @cached_property
    def _continues(self) -> Any:
        """`is_continuation` as a list: single items of arrays are slow. []: None."""
        assert self.table is not None
        return [] if self.table.is_continuation is None else self.table.is_continuation.tolist()

    @cached_property
    def _trie(self) -> dict[Hashable, Any]:
        """Units -> the same for the units after it; under `_NUMBER` the first sequence of the key that ends here.

        A long list has phrases of many lengths. The trie replaces a look-up of each length at each unit. Where one key
        is left, a pair of it and its sequence takes the place of dictionaries: long lists exceed the CPU's caches.
        """
        trie: dict[Hashable, Any] = {}
        for key, (first, *_) in self._numbers[0].items():
            node = trie
            for depth, unit in enumerate(key, 1):
                child = node.setdefault(unit, (key, first))
                if type(child) is tuple and child[0] is not key:  # two keys: the older one moves down
                    older, number = child
                    child = node[unit] = {_NUMBER: number} if len(older) == depth else {older[depth]: child}
                if type(child) is tuple:
                    break
                node = child
            else:
                node[_NUMBER] = first
        return trie
