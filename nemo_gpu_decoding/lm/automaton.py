"""The back-off automaton of an n-gram trie: its states, and where its arcs lead.

The arcs are the nodes of the trie (`trie_loops.py`): an arc leaves the state of an n-gram's context and
its label is the last word. What is added here is what `packed.py` describes: the states with their
back-offs, and the target of each arc.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nemo_gpu_decoding.lm.packed import LM_STATE, NO_LABEL, ROOT
from nemo_gpu_decoding.lm.scratch import Scratch
from nemo_gpu_decoding.lm.trie import NGramTrie
from nemo_gpu_decoding.lm.trie_loops import enter_states, link, link_words, number_states

_CHUNK = 1 << 20  # contexts at a time, to show progress


class BackoffArcs:
    """An LM's automaton; A arcs, S states. The trie is used up.

    Args:
        start: the label of <s>, or NO_LABEL.
        progress: called with the number of n-grams linked since the last call, of all possible contexts.
    """

    def __init__(
        self, trie: NGramTrie, start: int, scratch: Scratch, progress: Callable[[int], None]
    ) -> None:
        self.counts = trie.counts
        self.labels = trie.labels  # [A] uint32; those of a state ascending
        self.costs = trie.costs  # [A] float32
        self.targets = scratch.zeros(len(self.labels), np.uint32)  # [A]
        state_of = scratch.zeros(trie.num_inner, np.uint32)  # of each n-gram that may be a context
        num_states = number_states(trie.children, trie.backoff_costs, start, state_of)
        self.states = scratch.zeros(num_states + 1, LM_STATE)  # as in `PackedArrays`
        enter_states(trie.children, trie.backoff_costs, state_of, self.states, len(self.labels))
        has_start = NO_LABEL != start < len(state_of)  # an LM of 1-grams has no contexts
        self.start_state = int(state_of[start]) if has_start else ROOT
        # n-grams whose suffix (all but the first word) is not listed, see `trie_loops.link`
        self.repaired = self._link(trie, state_of, progress)

    @property
    def num_states(self) -> int:
        return len(self.states) - 1

    def _link(self, trie: NGramTrie, state_of: np.ndarray, progress: Callable[[int], None]) -> int:
        repaired = 0
        link_words(state_of, trie.counts[0], self.states, self.targets)
        first_states = _first_states(trie, state_of)
        for order in range(2, trie.order + 1):
            suffixes = (first_states[order - 2], first_states[order - 1])
            for begin in range(trie.first[order - 2], trie.first[order - 1], _CHUNK):
                end = min(begin + _CHUNK, trie.first[order - 1])
                repaired += link(
                    begin, end, state_of, trie.children, self.labels, self.states, self.targets, suffixes
                )
                progress(end - begin)
        return repaired


def _first_states(trie: NGramTrie, state_of: np.ndarray) -> list[int]:
    """The first state of each order of contexts, 0 .. order - 1, and the number of states."""
    first = [0, 1]
    for begin, end in zip(trie.first[:-2], trie.first[1:-1], strict=True):
        first.append(first[-1] + int(np.count_nonzero(state_of[begin:end])))
    return first
