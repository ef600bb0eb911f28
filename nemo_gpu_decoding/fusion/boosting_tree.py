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
        own = (tree.arrays, tree.vocab_size, tree.start_state, tree.name)
        return cls(*own, table=table, ac_threshold=ac_threshold)

    def only(self, keys: Collection[Key]) -> BoostingTree | None:
        """The tree without phrases other than these; penalties stay. None: nothing is left."""
        assert self.table is not None
        sequences, all_keys, texts = self.table[:3]
        kept = [n for n, key in enumerate(all_keys) if key in keys or sequences[n].scores.sum() < 0]
        if not kept:
            return None
        chosen = ([sequences[n] for n in kept], [all_keys[n] for n in kept], [texts[n] for n in kept])
        table = PhraseTable(*chosen, *self.table[3:])
        tree = table.build(table.sequences)
        return replace(self, arrays=tree.arrays, start_state=tree.start_state, table=table)

    def occurrences(self, units: Sequence[Hashable]) -> Iterator[Occurrence]:
        """The phrases of a hypothesis, from its begin; those inside of longer ones are omitted."""
        assert self.table is not None
        is_continuation, before = self.table.is_continuation, self.table.label_before
        shift = 0 if before is None else 1
        read = (*[before] * shift, *units)
        covered = 0
        for begin in range(len(read)):
            for length in self._lengths:
                end = begin + length
                number = self._numbers.get(read[begin:end]) if covered < end <= len(read) else None
                if number is None:
                    continue
                checks = is_continuation is not None and self.table.sequences[number].ends_in_word
                following: Any = read[end] if checks and end < len(read) else None
                if is_continuation is not None and following is not None and is_continuation[following]:
                    continue
                yield Occurrence(number, max(0, begin - shift), end - shift)
                covered = end
                break

    @property
    def num_phrases(self) -> int:
        """Number of phrases with different units, without penalties."""
        return len(self._numbers)

    @property
    def longest(self) -> int:
        """Units of the longest phrase."""
        return max(self._lengths, default=0)

    @cached_property
    def _numbers(self) -> dict[Key, int]:
        """The first sequence of each key, without penalties."""
        assert self.table is not None
        numbers: dict[Key, int] = {}
        for n, (key, sequence) in enumerate(zip(self.table.keys, self.table.sequences, strict=True)):
            if sequence.scores.sum() > 0:
                numbers.setdefault(key, n)
        return numbers

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(key) for key in self._numbers}, reverse=True)
