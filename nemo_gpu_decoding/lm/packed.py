"""Store large n-gram LMs over words as back-off automata in flat arrays, and look words up in them.

A state is a context: an n-gram that other n-grams extend, or that has a back-off weight. State 0 is the
root, the empty context. The root has an arc for every word: arc i has label i. `lookup` searches a state
for an arc with the label. If there is none, it adds the back-off cost and searches the back-off state.

Costs are negative natural logs; a back-off cost may be negative. A sentence begins in `start_state` (the
context "<s>") and ends with the label `sentence_end`. The final cost of a state is the cost of that label.

A worked example: the words {0: <s>, 1: </s>, 2: a, 3: b}, the 2-grams "<s> a", "a b", "a </s>":

    state        0 (root)            1 (<s>)   2 (a)
    arc_begin    0                   4         5           and 7 in one more row, the end of the arcs
    backoff_to   0                   0         0
    backoff_cost 0                   B(<s>)    B(a)

    arc          0    1    2    3    4         5      6
    label        0    1    2    3    2         1      3
    cost         C()  C()  C()  C()  C(a|<s>)  C(</s>|a)  C(b|a)
    target       1    0    2    0    2         0      0

"b" is no state, because no n-gram extends it. The arcs with label 3 lead to its longest suffix that is a
state, the root. `lookup(arrays, 1, 3)` finds no arc 3 in state 1; the cost is B(<s>) + C(b), the target 0.

`labels` and `arcs` are bit-packed integers: integer i takes the bits [i * bits, (i + 1) * bits) of 64-bit
words, least significant first. So each integer is in at most two neighbouring words. [5, 1, 6] with 3 bits
each is the word 0b110_001_101. In the example, labels have 2 bits and arcs 2 + 32 bits. `labels` is
separate because a search reads many labels and only one arc. On a GPU, states and labels are in device
memory, and arcs may be in host memory. An arc is

    bits [0, target_bits)                          the target
    bits [target_bits, target_bits + 32)           the cost, the bits of a float32

With 400,000 words, 100 M n-grams and 11 M states, a label takes 19 bits and a target 24. An n-gram then
takes 10.7 bytes, including states. `packed.cuh` is the counterpart of this file on a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding import container
from nemo_gpu_decoding.checks import FieldError, check_int
from nemo_gpu_decoding.jit import CopiedByFields, compiled, linked, no_refcount, read_only
from nemo_gpu_decoding.lm.records import LM_STATE
from nemo_gpu_decoding.plain_text import path_of

COST_BITS = 32
MAX_BITS = 63  # of a packed integer
NO_LABEL = -1
ROOT = 0


class PackedArrays(NamedTuple):
    """The arrays of an LM with S states and A arcs that compiled code reads; may be memory-mapped."""

    states: np.ndarray  # [S + 1] LM_STATE; arc_begin of the last row is A
    labels: np.ndarray  # A labels, packed in uint64 words; ascending within a state
    arcs: np.ndarray  # A pairs (target, cost), packed in uint64 words
    label_bits: int
    target_bits: int


TABLES = PackedArrays._fields[:3]  # the arrays themselves


def bits_for(largest: int) -> int:
    """Return the number of bits (at least 1) needed to hold 0 .. largest."""
    return max(1, int(largest).bit_length())


def num_words(length: int, bits: int) -> int:
    """Return one more than the number of 64-bit words for `length` integers, because a read touches two words."""
    return -(-length * bits // 64) + 1


@no_refcount
def read_bits(words, bits, index):
    """Return the integer at position `index` of a bit-packed array, as uint64."""
    position = np.int64(index) * np.int64(bits)
    word = position >> 6
    shift = np.uint64(position & 63)
    # shifted in two steps, because a shift by all 64 bits is undefined
    above = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    return ((words[word] >> shift) | above) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1))


@compiled
def write_bits(words, bits, first, values):
    """Write `values` (uint64) to the integers `first`, `first` + 1, ..., which must be zero before."""
    for i in range(len(values)):
        position = np.int64(first + i) * np.int64(bits)
        word = position >> 6
        shift = np.uint64(position & 63)
        words[word] |= values[i] << shift
        words[word + 1] |= (values[i] >> np.uint64(1)) >> (np.uint64(63) - shift)


@compiled
def largest_of(words, bits, mask, length):
    """Return the largest value, masked by `mask` (uint64), of `length` packed integers; int64, -1 if length is 0."""
    largest = np.int64(-1)
    for i in range(length):
        largest = max(largest, np.int64(read_bits(words, bits, i) & mask))
    return largest


@compiled
def first_bad_state(states, num_labels):
    """Return the first invalid state, or -1: arcs ascend, back-offs lead to earlier states, the root has all words."""
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
    """Return the label of an arc."""
    return np.int64(read_bits(lm.labels, lm.label_bits, arc))


@linked
def arc_cost_and_target(lm, arc):
    """Return the cost (float32) and the target (int64) of an arc."""
    bits = read_bits(lm.arcs, lm.target_bits + COST_BITS, arc)
    target = np.int64(bits & ((np.uint64(1) << np.uint64(lm.target_bits)) - np.uint64(1)))
    return np.uint32(bits >> np.uint64(lm.target_bits)).view(np.float32), target


@linked
def find_arc(lm, state, label):
    """Return the arc with `label` in this state (int64), or -1."""
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
    """Return the cost (float32) of `label`, 0 .. V-1, after `state`, including back-offs, and the state after it."""
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
    """A packed n-gram LM; `load_packed_lm` or `pack.pack_arpa_in_memory` creates it."""

    arrays: PackedArrays
    words: Sequence[str]  # [V] the text of each label
    start_state: int  # state at the beginning of a sentence: <s>, or the root if the LM has no <s>
    sentence_end: int  # the label of </s>, NO_LABEL if the LM has none
    unknown: int  # the label of <unk>, NO_LABEL if the LM has none
    counts: tuple[int, ...]  # n-grams of each order
    name: str = "lm"  # for messages

    def __post_init__(self) -> None:
        tables: Any = {name: read_only(getattr(self.arrays, name)) for name in TABLES}
        object.__setattr__(self, "arrays", self.arrays._replace(**tables))
        object.__setattr__(self, "counts", tuple(self.counts))

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
        """Return the number of bytes of each array."""
        return {name: getattr(self.arrays, name).nbytes for name in TABLES}

    @cached_property
    def word_ids(self) -> Mapping[str, int]:
        """Return the label of each word."""
        return {word: label for label, word in enumerate(self.words)}

    def label(self, word: str) -> int:
        """Return a word's label; for an unlisted word the label of <unk> (NO_LABEL if the LM has no <unk>)."""
        return self.word_ids.get(word, self.unknown)

    def advance(self, state: int, label: int) -> tuple[float, int]:
        """Return the cost of `label` after `state`, natural log, and the state after it.

        Raises:
            ValueError: the state or the label is out of range.
        """
        for name, value, size in (("state", state, self.num_states), ("label", label, self.vocab_size)):
            if not 0 <= value < size:
                raise FieldError(name, value, f"0 .. {size - 1}")
        cost, target = lookup(self.arrays, state, label)
        return float(cost), int(target)

    def score(self, words: Sequence[str], *, final: bool = True) -> float:
        """Return the cost of a whole sentence, natural log, with </s> if `final`."""
        total, state = 0.0, self.start_state
        labels = [self.label(word) for word in words] + ([self.sentence_end] if final else [])
        for label in labels:
            cost, state = self.advance(state, label)
            total += cost
        return total


# -- files ----------------------------------------------------------------------------------------------

DTYPES = {  # of the arrays, each [length]
    "words": np.dtype(np.uint8),
    "states": LM_STATE,
    "labels": np.dtype(np.uint64),
    "arcs": np.dtype(np.uint64),
}
PACKED_LM = container.Kind("packed LM", 2, DTYPES, "pack it anew")
_BITS = ("label_bits", "target_bits")
_FACTS = ("start_state", "sentence_end", "unknown", "counts")


def is_packed_lm(path: str | PathLike[str]) -> bool:
    """Return whether a file is a packed LM, by its first bytes."""
    return PACKED_LM.is_kind_of(path)


def load_packed_lm(path: str | PathLike[str], *, verify: bool = True) -> PackedLM:
    """Return the packed LM in a file, mapped into memory.

    Args:
        verify: compare the checksum of the arrays, and check targets and back-offs. Verification reads the whole file
            once per process (about a second per GB). With False, only sizes and the header's checksum
            are compared, and look-ups in a damaged file may crash the process.

    Raises:
        ValueError: the file is damaged, truncated, or no packed LM of this version; the message names it.
        OSError: the file cannot be read.
    """

    def check(content: container.Content) -> None:
        _check_arcs(assemble(content.arrays, content.facts, str(path)))

    path = path_of(path)
    content = container.map_container(path, PACKED_LM, verify, check)
    with container.naming_damage(path, PACKED_LM.remedy):
        lm = assemble(content.arrays, content.facts, str(path))
        _check_facts(lm)
    return lm


def _check_facts(lm: PackedLM) -> None:
    """Raise a FieldError unless the header and the sizes of arrays agree; reads no array."""
    arrays, words, states = lm.arrays, lm.vocab_size, lm.num_states
    check_int("the number of words", words, 1, 1 << 32)
    check_int("the number of states", states, 1, 1 << 32)
    check_int("label_bits", arrays.label_bits, bits_for(words - 1), 32)
    check_int("target_bits", arrays.target_bits, bits_for(states - 1), 32)
    check_int("start_state", lm.start_state, 0, states - 1)
    for name in ("sentence_end", "unknown"):
        check_int(name, getattr(lm, name), NO_LABEL, words - 1)
    for name, bits in (("labels", arrays.label_bits), ("arcs", arrays.target_bits + COST_BITS)):
        check_int(f"the size of {name}", len(getattr(arrays, name)), num_words(lm.num_arcs, bits), 1 << 62)


def _check_arcs(lm: PackedLM) -> None:
    """Raise a ValueError if a target or back-off is out of range; look-ups do not check indices.

    Reads all arrays except the costs: about 2 s for 10^9 arcs, plus the time of the disk.
    """
    _check_facts(lm)
    arrays, states, count = lm.arrays, lm.arrays.states, lm.num_arcs
    if (bad := first_bad_state(states, lm.vocab_size)) >= 0:
        raise ValueError(
            f"state {bad} is {states[bad]}, expected an arc_begin that ascends from 0 and {lm.vocab_size}, "
            "and a backoff_to before the state"
        )
    for name, words, bits, value_bits, size in (
        ("the label", arrays.labels, arrays.label_bits, arrays.label_bits, lm.vocab_size),
        ("the target", arrays.arcs, arrays.target_bits + COST_BITS, arrays.target_bits, lm.num_states),
    ):
        largest = largest_of(words, bits, np.uint64((1 << value_bits) - 1), count)
        if largest >= size:
            raise ValueError(f"{name} of an arc is {largest}, expected 0 .. {size - 1}")


def assemble(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str) -> PackedLM:
    """Create a packed LM from its arrays and from the fields in the header of its file."""
    tables = [arrays[part] for part in TABLES]
    bits = [int(facts[part]) for part in _BITS]
    others = {part: facts[part] for part in _FACTS}
    words = container.decode_words(arrays["words"])
    return PackedLM(PackedArrays(*tables, *bits), words, name=name, **others)  # type: ignore[arg-type]
