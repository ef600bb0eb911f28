"""Large n-gram LMs over words as one back-off automaton, in few and flat arrays.

A state is a context: the n-grams that others extend, or that have a back-off weight. State 0 is the
root, the empty context, which has an arc for every word: its arc i has label i. In a state, look for
an arc with the label; if there is none, pay the back-off cost, go to the back-off state, look again.

Costs are negative natural logs, so the back-off cost may be negative. A sentence begins in
`start_state` (the context "<s>") and ends with the label `sentence_end`: its final cost in a state is
what `lookup` gives for that label.

A worked example: the words {0: <s>, 1: </s>, 2: a, 3: b}, the 2-grams "<s> a", "a b", "a </s>":

    state        0 (root)            1 (<s>)   2 (a)
    arc_begin    0                   4         5           and 7, in one row more, where the arcs end
    backoff_to   0                   0         0
    backoff_cost 0                   B(<s>)    B(a)

    arc          0    1    2    3    4         5      6
    label        0    1    2    3    2         1      3
    cost         C()  C()  C()  C()  C(a|<s>)  C(</s>|a)  C(b|a)
    target       1    0    2    0    2         0      0

"b" is no state, as nothing extends it; the arcs with label 3 lead to the longest suffix that is a state,
here the root. `lookup(arrays, 1, 3)`: state 1 has no arc 3, so B(<s>) + C(b), and the search goes on in
state 0.

`labels` and `arcs` are arrays of small integers without gaps: integer i takes the bits [i * bits,
(i + 1) * bits) of 64-bit words, least significant first, so that two neighbouring words always hold a
whole one; [5, 1, 6] with 3 bits each is the one word 0b110_001_101. Here they have 2 bits per label and
2 + 32 bits per arc. `labels` is apart because a search for a label reads many of them and only one arc:
on a GPU, states and labels stay in its memory, arcs may be anywhere. An arc is

    bits [0, target_bits)                          the target
    bits [target_bits, target_bits + cost_bits)    the cost: a code, an index into `codebook`; or, when
                                                   cost_bits is 32, the bits of the float32 itself

Layout "exact" has 32 cost bits; "quantised" has fewer. Back-off costs are exact in both, so a word's
cost is off by at most `max_error` however often the model backs off. With 400,000 words, 100 M n-grams
and 11 M states a label takes 19 bits, a target 24: 10.7 bytes per n-gram if exact, 8.0 with 10 cost
bits, states included. `packed.cuh` is the counterpart of this file on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.jit import CopiedByFields, compiled, linked, no_refcount, read_only

LAYOUTS = ("exact", "quantised")
EXACT_BITS = 32
MAX_BITS = 63  # of a packed integer
NO_LABEL = -1
ROOT = 0


class PackedArrays(NamedTuple):
    """What compiled code sees of an LM. S states, A arcs; all arrays may be memory-mapped."""

    states: np.ndarray  # [S + 1] LM_STATE; the last row only says where the arcs end
    labels: np.ndarray  # A labels, packed in uint64 words; those of a state ascending
    arcs: np.ndarray  # A pairs (target, cost), packed in uint64 words
    codebook: np.ndarray  # [2 ** cost_bits] float32; [1] and not used where cost_bits is 32
    label_bits: int
    target_bits: int
    cost_bits: int


TABLES = PackedArrays._fields[:4]  # the arrays themselves


def bits_for(largest: int) -> int:
    """The number of bits (at least 1) that hold 0 .. largest."""
    return max(1, int(largest).bit_length())


def num_words(length: int, bits: int) -> int:
    """The 64-bit words that `length` integers take, with one more: reads touch two words at a time."""
    return -(-length * bits // 64) + 1


@no_refcount
def read_bits(words, bits, index):
    """Integer `index` of a packed array (uint64)."""
    position = np.int64(index) * np.int64(bits)
    word = position >> 6
    shift = np.uint64(position & 63)
    # shifted in two steps, because a shift by all 64 bits is undefined
    above = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    return ((words[word] >> shift) | above) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))


@compiled
def write_bits(words, bits, first, values):
    """Put `values` (uint64) at the integers `first`, `first` + 1, ... of an array that is zero there."""
    for i in range(len(values)):
        position = np.int64(first + i) * np.int64(bits)
        word = position >> 6
        shift = np.uint64(position & 63)
        words[word] |= values[i] << shift
        words[word + 1] |= (values[i] >> np.uint64(1)) >> (np.uint64(63) - shift)


@compiled
def largest_of(words, bits, mask, length):
    """The largest of `length` integers of a packed array, of each the bits of `mask` (uint64). int64, -1 for none."""
    largest = np.int64(-1)
    for i in range(length):
        largest = max(largest, np.int64(read_bits(words, bits, i) & mask))
    return largest


@compiled
def first_bad_state(states, num_labels):
    """The first state whose arcs do not follow those of the one before it, or that backs off to no earlier one; or -1.

    The root has `num_labels` arcs and backs off to itself.
    """
    for s in range(len(states)):
        begin, last = np.int64(states[s].arc_begin), s == len(states) - 1
        least = np.int64(0) if s == 0 else np.int64(states[s - 1].arc_begin)
        if begin < least or (s == 0 and begin != 0) or (s == 1 and begin != num_labels):
            return s
        if not last and np.int64(states[s].backoff_to) > max(0, s - 1):
            return s
    return -1


@linked
def arc_label(lm, arc):
    """The label of an arc."""
    return np.int64(read_bits(lm.labels, lm.label_bits, arc))


@linked
def arc_cost_and_target(lm, arc):
    """The cost (float32) and the target (int64) of an arc."""
    bits = read_bits(lm.arcs, lm.target_bits + lm.cost_bits, arc)
    target = np.int64(bits & ((np.uint64(1) << np.uint64(lm.target_bits)) - np.uint64(1)))
    code = bits >> np.uint64(lm.target_bits)
    if lm.cost_bits == EXACT_BITS:
        return np.uint32(code).view(np.float32), target
    return lm.codebook[code], target


@linked
def find_arc(lm, state, label):
    """The state's own arc with `label` (int64), or -1."""
    if state == ROOT:
        return np.int64(label)
    low = np.int64(lm.states[state].arc_begin)
    end = np.int64(lm.states[state + 1].arc_begin)
    high = end
    while low < high:
        middle = (low + high) >> 1
        if arc_label(lm, middle) < label:
            low = middle + 1
        else:
            high = middle
    if low < end and arc_label(lm, low) == label:
        return low
    return np.int64(-1)


@no_refcount
def lookup(lm, state, label):
    """Cost (float32) of `label`, 0 .. V-1, after `state`, back-offs included, and the state after it."""
    cost = np.float32(0.0)
    here = np.int64(state)
    while True:
        arc = find_arc(lm, here, label)
        if arc >= 0:
            own_cost, target = arc_cost_and_target(lm, arc)
            return cost + own_cost, target
        cost += lm.states[here].backoff_cost
        here = np.int64(lm.states[here].backoff_to)


@dataclass(frozen=True, eq=False)
class PackedLM(CopiedByFields):
    """An n-gram LM in packed form: of a file (`packed_file.load_packed_lm`) or made in memory
    (`pack.pack_arpa_in_memory`)."""

    arrays: PackedArrays
    words: Sequence[str]  # [V] the text of each label
    start_state: int  # where a sentence begins: the context <s>, or the root if the LM has none
    sentence_end: int  # the label of </s>, NO_LABEL if the LM has none
    unknown: int  # the label of <unk>, NO_LABEL if the LM has none
    counts: tuple[int, ...]  # n-grams of each order
    max_error: float  # of a word's cost against the ARPA file, natural log; 0 if exact (float32)
    name: str = "lm"  # for messages

    def __post_init__(self) -> None:
        tables: Any = {name: read_only(getattr(self.arrays, name)) for name in TABLES}
        object.__setattr__(self, "arrays", self.arrays._replace(**tables))
        object.__setattr__(self, "counts", tuple(self.counts))

    @property
    def layout(self) -> str:
        return "exact" if self.arrays.cost_bits == EXACT_BITS else "quantised"

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @property
    def num_states(self) -> int:
        return len(self.arrays.states) - 1

    @property
    def num_arcs(self) -> int:
        return int(self.arrays.states["arc_begin"][-1])

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Bytes of each array."""
        return {name: getattr(self.arrays, name).nbytes for name in TABLES}

    @cached_property
    def word_ids(self) -> Mapping[str, int]:
        """The label of each word."""
        return {word: label for label, word in enumerate(self.words)}

    def label(self, word: str) -> int:
        """The label of a word; that of <unk> for an unlisted one (NO_LABEL if the LM has no <unk>)."""
        return self.word_ids.get(word, self.unknown)

    def advance(self, state: int, label: int) -> tuple[float, int]:
        """Cost of `label` after `state`, natural log, and the state after it.

        Raises:
            ValueError: the state or the label is out of range.
        """
        for name, value, size in (("state", state, self.num_states), ("label", label, self.vocab_size)):
            if not 0 <= value < size:
                raise FieldError(name, value, f"0 .. {size - 1}")
        cost, target = lookup(self.arrays, state, label)
        return float(cost), int(target)

    def score(self, words: Sequence[str], *, final: bool = True) -> float:
        """Cost of a whole sentence, natural log, with </s> if `final`."""
        total, state = 0.0, self.start_state
        labels = [self.label(word) for word in words] + ([self.sentence_end] if final else [])
        for label in labels:
            cost, state = self.advance(state, label)
            total += cost
        return total
