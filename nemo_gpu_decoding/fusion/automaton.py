"""Define `BackoffAutomaton`, the common data structure of n-gram LMs and boosting trees.

A `BackoffAutomaton` reads labels one by one. In state `s` it looks for an arc with the label. If there is no such arc,
it adds the back-off weight of `s`, moves to the back-off state and looks again. The root backs off to itself. A label
without an arc in the root adds the root's back-off weight; the next state is then the root.

A worked example, vocabulary {0: a, 1: b}, the bigram LM  p(a) p(b) p(b|a):

    state        0 (root)   1 (start, "<s>")   2 ("a")     3 ("b")
    arcs         a:2 b:3    -                  b:3         -
    arc_begin    0          2                  2           3
    arc_end      2          2                  3           3
    backoff_to   0          0                  0           0

The arcs have labels [0, 1, 1], targets [2, 3, 3] and weights [log p(a), log p(b), log p(b|a)]. The arcs of
a state are sorted by label. The arc of a label is found by index in a state with one arc for every label
("dense"), and by binary search in any other state.

The layout is NGPU-LM's [NGPU-LM, arXiv 2505.22857, section 2]. The input columns of a root may have few
arcs, as in boosting trees. The automaton adds the missing arcs, so that every look-up ends in the root.

Each state has two upper bounds on weights. `upper_bound` holds for every label, `backoff_bound` for the
labels without an arc in the state. In a state with one likely successor, `upper_bound` is near 0, while
`backoff_bound` is close to the weights of the other labels:

    state "new yor", arcs k:-0.01; backs off with -3.2 to "yor", arcs k:-0.05 e:-4.1
    upper_bound = -0.01 (k)        backoff_bound = -3.2 + max(-4.1, ...), without k

A search scores the few arcs of such a state one by one and bounds all other labels by `backoff_bound`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_indices
from nemo_gpu_decoding.fusion.phrases import Aliases
from nemo_gpu_decoding.jit import linked, no_refcount

ANY_WEIGHT = np.float32(-np.inf)


@no_refcount
def lookup(automaton, vocab_size, state, label, least):
    """Return the weight (float32, natural log) of `label` in `state`, and the state after it.

    The weight is -inf as soon as the upper bounds show that it is below `least`. An unlikely label then
    costs one step instead of a whole back-off chain. With least=`ANY_WEIGHT` the look-up always ends at an
    arc. Back-off weights are added in the order of NeMo's NGPU-LM, so that sums are equal to the bit.
    """
    states, arcs = automaton.states, automaton.arcs
    weight = np.float32(0.0)
    while True:
        at = np.uintp(state)
        low = np.uintp(states[at].arc_begin)
        end = np.uintp(states[at].arc_end)
        low = low + np.uintp(label) if end - low == vocab_size else first_not_below(arcs, low, end, label)
        if low < end and arcs[low].label == label:
            return weight + arcs[low].weight, arcs[low].target
        if not weight + states[at].backoff_bound >= least:
            return ANY_WEIGHT, np.int32(state)
        weight += states[at].backoff_weight
        state = states[at].backoff_to


@linked
def first_not_below(arcs, low, end, label):
    """Return the index of the first arc in low .. end-1 with a label >= `label`, or `end` if there is no such arc.

    The binary search has no branches, because the CPU would mispredict every other branch.
    """
    count = end - low
    while count > 1:
        half = count >> np.uintp(1)
        low = low + half if arcs[low + half - np.uintp(1)].label < label else low
        count -= half
    return low + np.uintp(count == 1 and arcs[low].label < label)


# Weights are natural log. One state, one cache line; one arc is read whole once it is found.
STATE = np.dtype(
    [
        ("arc_begin", np.int32),  # first arc of the state
        ("arc_end", np.int32),  # one past its last arc
        ("backoff_to", np.int32),  # the state itself for a root
        ("backoff_weight", np.float32),
        ("final_weight", np.float32),  # added when an utterance ends here
        ("upper_bound", np.float32),  # no label gets a larger weight from this state
        ("backoff_bound", np.float32),  # no label without an arc here does; -inf for a root
    ]
)
MOST_JOINED = (1 << 31) - 1  # states or arcs of joined automata: their numbers are int32
ARC = np.dtype([("label", np.int32), ("weight", np.float32), ("target", np.int32)])


Arc = tuple[int, float, int]  # label, weight, target


class AutomatonArrays(NamedTuple):
    """The states and arcs of one or several automata, as arrays that compiled code reads."""

    states: np.ndarray  # [S] STATE
    arcs: np.ndarray  # [A] ARC, grouped by state; within a state sorted by label


class Columns(NamedTuple):
    """The unchecked columns of an automaton with S states and A arcs, in the order of STATE and ARC; natural log."""

    arc_begin: np.ndarray  # [S] first arc of each state
    arc_end: np.ndarray  # [S] one past its last arc
    backoff_to: np.ndarray  # [S] the state itself for a root
    backoff_weights: np.ndarray  # [S]
    final_weights: np.ndarray  # [S]
    arc_labels: np.ndarray  # [A] ascending within a state
    arc_weights: np.ndarray  # [A]
    arc_targets: np.ndarray  # [A]

    @classmethod
    def grouped(cls, counts: Sequence[int] | np.ndarray, *others: np.ndarray) -> Columns:
        """Return the `Columns` of an automaton whose arcs are ordered by source state.

        Args:
            counts: [S] number of arcs of each state.
            others: the columns from `backoff_to` on.
        """
        ends = np.cumsum(counts)
        return cls(ends - counts, ends, *others)

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Arc]], *of_states: Any) -> Columns:
        """Return the `Columns` of an automaton from the arcs of each state, in any order.

        Args:
            of_states: the columns from `backoff_to` to `final_weights`.
        """
        arcs = np.array([arc for row in rows for arc in sorted(row)], np.float64).reshape(-1, 3)
        return cls.grouped(list(map(len, rows)), *map(np.array, of_states), *arcs.T)


@dataclass(frozen=True, eq=False)
class BackoffAutomaton:
    """A deterministic automaton with back-off arcs over the labels 0 .. vocab_size-1.

    Raises:
        ValueError: the arrays contradict each other (shapes, ranges, unsorted arcs, back-off cycles).
    """

    arrays: AutomatonArrays
    vocab_size: int
    start_state: int  # where an utterance begins
    name: str = "automaton"  # for messages: the file or list it was made from
    aliases: Aliases | None = None  # of boosted phrases, which results replace

    @classmethod
    def from_columns(
        cls, columns: Columns, vocab_size: int, start_state: int, name: str = "automaton"
    ) -> BackoffAutomaton:
        """Create an automaton from columns: check them, give each root an arc per label, and add upper bounds."""
        states = np.zeros(len(columns.arc_begin), STATE)
        arcs = np.zeros(len(columns.arc_labels), ARC)
        members = [*(STATE.names or ())[:5], *(ARC.names or ())]
        for n, (column, values) in enumerate(columns._asdict().items()):
            table, member = (states if n < 5 else arcs), members[n]
            if len(values) != len(table):
                raise ValueError(f"{name}: {column} has {len(values)} entries, expected {len(table)}")
            table[member] = values
        return cls.from_records(states, arcs, vocab_size, start_state, name)

    @classmethod
    def from_records(
        cls, states: np.ndarray, arcs: np.ndarray, vocab_size: int, start_state: int, name: str
    ) -> BackoffAutomaton:
        """Create an automaton from arrays [S] STATE and [A] ARC; write the upper bounds into the states."""
        _check_structure(name, vocab_size, start_state, states, arcs)
        arcs = _with_dense_roots(states, arcs, vocab_size)
        _add_bounds(name, states, arcs)
        return cls(AutomatonArrays(states, arcs), vocab_size, start_state, name)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of this automaton; automata with the same states and arcs have the same hash."""
        digest = hashlib.sha256(f"{self.vocab_size} {self.start_state}".encode())
        digest.update(self.arrays.states.tobytes())
        digest.update(self.arrays.arcs.tobytes())
        return digest.hexdigest()

    @property
    def num_states(self) -> int:
        return len(self.arrays.states)

    @property
    def num_arcs(self) -> int:
        return len(self.arrays.arcs)

    def advance(self, state: int, label: int) -> tuple[float, int]:
        """Return the weight of `label` in `state` and the state after it (readable counterpart of `lookup`)."""
        states, arcs = self.arrays
        weight = np.float32(0.0)
        while True:
            begin, end = states["arc_begin"][state], states["arc_end"][state]
            arc = begin + np.searchsorted(arcs["label"][begin:end], label)
            if arc < end and arcs["label"][arc] == label:
                return float(weight + arcs["weight"][arc]), int(arcs["target"][arc])
            weight += states["backoff_weight"][state]
            state = int(states["backoff_to"][state])

    def score(self, labels: Sequence[int], *, final: bool = True) -> float:
        """Return the total weight of a label sequence that begins in the start state, natural log."""
        total, state = 0.0, self.start_state
        for label in labels:
            weight, state = self.advance(state, int(label))
            total += weight
        return total + (float(self.arrays.states["final_weight"][state]) if final else 0.0)

    def with_costs(self, costs: np.ndarray) -> BackoffAutomaton:
        """Return a copy that subtracts costs[label], which may be inf, from each weight; costs [V]."""
        states, arcs = self.arrays.states.copy(), self.arrays.arcs.copy()
        arcs["weight"] -= costs[arcs["label"]].astype(np.float32)
        _add_bounds(self.name, states, arcs)
        return replace(self, arrays=AutomatonArrays(states, arcs))


def empty_automaton(vocab_size: int) -> BackoffAutomaton:
    """Return an automaton with one state and weight 0 for every label; it replaces an absent LM or boosting tree."""
    zero, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    columns = Columns(zero, zero, zero, zero, zero, none, none, none)
    return BackoffAutomaton.from_columns(columns, vocab_size, 0, "none")


def concatenate(automata: Sequence[BackoffAutomaton]) -> tuple[AutomatonArrays, np.ndarray]:
    """Concatenate the arrays of several automata, for batches whose utterances have different automata.

    Returns:
        the arrays, and the start state of each automaton in them, [len(automata)] int32.
    """
    if len(automata) == 1:
        return automata[0].arrays, np.array([automata[0].start_state], np.int32)
    # as bytes, because np.concatenate compares the types of records member by member
    states = np.frombuffer(bytearray().join(a.arrays.states.data for a in automata), STATE)
    arcs = np.frombuffer(bytearray().join(a.arrays.arcs.data for a in automata), ARC)
    starts = []
    state, arc = 0, 0
    for automaton in automata:
        own_states = states[state : state + automaton.num_states]
        own_arcs = arcs[arc : arc + automaton.num_arcs]
        own_states["arc_begin"] += arc
        own_states["arc_end"] += arc
        own_states["backoff_to"] += state
        own_arcs["target"] += state
        starts.append(state + automaton.start_state)
        state += automaton.num_states
        arc += automaton.num_arcs
    return AutomatonArrays(states, arcs), np.array(starts, np.int32)


def joined(automata: Sequence[BackoffAutomaton]) -> tuple[BackoffAutomaton, list[int]]:
    """Join automata over the same labels into one; return it and the start states of the originals in it.

    Raises:
        ValueError: they have too many states or arcs for int32 numbers.
    """
    for what, total in (("states", sum(a.num_states for a in automata)), ("arcs", sum(a.num_arcs for a in automata))):
        if total > MOST_JOINED:
            raise ValueError(f"{len(automata)} LMs have {total} {what} together, expected at most {MOST_JOINED}")
    arrays, starts = concatenate(automata)
    name = ", ".join(automaton.name for automaton in automata)
    return BackoffAutomaton(arrays, automata[0].vocab_size, int(starts[0]), name), starts.tolist()


def arcs_by_state(states: np.ndarray, arcs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the arcs [A], sorted by source state and label, and the source state of each arc, [A]."""
    sources, places = in_ranges(states["arc_begin"], states["arc_end"] - states["arc_begin"])
    return sources, arcs[places]


def in_ranges(begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each item of the ranges, which begin at `begins`, the number of its range, and its position."""
    counts = counts.astype(np.int64)
    ranges = np.repeat(np.arange(len(counts)), counts)
    return ranges, np.arange(len(ranges)) + (begins - np.cumsum(counts) + counts)[ranges]


def _check_structure(name: str, vocab_size: int, start_state: int, states: np.ndarray, arcs: np.ndarray) -> None:
    if not 0 <= start_state < len(states):
        raise FieldError(f"{name}: start_state", start_state, f"0 .. {len(states) - 1}")
    for column, values, size in (
        ("arc_labels", arcs["label"], vocab_size),
        ("arc_targets", arcs["target"], len(states)),
        ("backoff_to", states["backoff_to"], len(states)),
        ("arc_begin", states["arc_begin"], len(arcs) + 1),
        ("arc_end", states["arc_end"], len(arcs) + 1),
    ):
        check_indices(f"{name}: {column}", values, size)
    if (states["arc_end"] < states["arc_begin"]).any():
        raise ValueError(f"{name}: a state's arc_end is before its arc_begin")
    for column, values in (
        ("arc_weights", arcs["weight"]),
        ("backoff_weights", states["backoff_weight"]),
        ("final_weights", states["final_weight"]),
    ):
        if np.isnan(values).any() or np.isposinf(values).any():
            raise ValueError(f"{name}: {column} holds NaN or +inf")
    _check_sorted(name, states, arcs["label"])


def _check_sorted(name: str, states: np.ndarray, labels: np.ndarray) -> None:
    """Check that the labels of the arcs of each state are strictly ascending."""
    if len(labels) < 2:
        return
    grows = np.ones(len(labels), bool)
    grows[1:] = labels[1:] > labels[:-1]
    has_arcs = states["arc_end"] > states["arc_begin"]
    grows[states["arc_begin"][has_arcs]] = True  # the first arc of a state has nothing to exceed
    if not grows.all():
        arc = int(np.flatnonzero(~grows)[0])
        raise ValueError(f"{name}: arc {arc} (label {labels[arc]}) breaks the order of its state's labels")


def _with_dense_roots(states: np.ndarray, arcs: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the arcs with one arc per label in each root, and update `arc_begin` and `arc_end` of `states`."""
    for root in np.flatnonzero(states["backoff_to"] == np.arange(len(states))):
        begin, end = int(states["arc_begin"][root]), int(states["arc_end"][root])
        if end - begin == vocab_size:
            continue
        dense = np.zeros(vocab_size, ARC)
        dense["label"] = np.arange(vocab_size)
        dense["weight"] = states["backoff_weight"][root]
        dense["target"] = root
        dense[arcs["label"][begin:end]] = arcs[begin:end]
        arcs = np.concatenate([arcs[:begin], arcs[end:], dense])
        for column in ("arc_begin", "arc_end"):
            states[column][states[column] >= end] -= end - begin
        states["arc_begin"][root], states["arc_end"][root] = len(arcs) - vocab_size, len(arcs)
    return arcs


def _add_bounds(name: str, states: np.ndarray, arcs: np.ndarray) -> None:
    """Compute `upper_bound` and `backoff_bound` of each state, whose data must be valid; refuse back-off cycles.

    The bounds are computed in float64 and rounded up, since the search adds the same weights in another order.
    """
    backoff_to = states["backoff_to"]
    ranked = _ByWeight(states, arcs)
    backoff_bounds = np.full(len(states), -np.inf)
    for level in _levels(name, backoff_to):
        parents = backoff_to[level]
        others = np.maximum(ranked.best_without_own_arc(level, parents), backoff_bounds[parents])
        backoff_bounds[level] = states["backoff_weight"][level].astype(np.float64) + others
    upper_bounds, has_arcs = backoff_bounds.copy(), ranked.counts > 0
    upper_bounds[has_arcs] = np.maximum(backoff_bounds[has_arcs], ranked.weights[ranked.begins[has_arcs]])
    states["upper_bound"] = _rounded_up(upper_bounds)
    states["backoff_bound"] = _rounded_up(backoff_bounds)


def _levels(name: str, backoff_to: np.ndarray) -> Iterator[np.ndarray]:
    """Yield all states except roots, grouped by the length of their back-off chains, shortest first."""
    is_pending = backoff_to != np.arange(len(backoff_to))
    while len(pending := np.flatnonzero(is_pending)):
        ready = pending[~is_pending[backoff_to[pending]]]
        if not len(ready):
            raise ValueError(f"{name}: the back-off arcs from state {pending[0]} form a cycle")
        yield ready
        is_pending[ready] = False


class SortedArcs:
    """The arcs of an automaton, sorted by state and label for vectorised look-up."""

    def __init__(self, states: np.ndarray, arcs: np.ndarray) -> None:
        self.sources, self.arcs = arcs_by_state(states, arcs)  # [A]
        self.counts = np.bincount(self.sources, minlength=len(states))  # [S] arcs of each state
        self.begins = np.cumsum(self.counts) - self.counts  # [S] first arc of each state
        self._span = int(arcs["label"].max(initial=0)) + 1
        self._keys = self.sources * self._span + self.arcs["label"]  # ascending

    def find(self, states: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the arc with labels[i] in states[i], or any index, and whether the arc exists."""
        keys = states.astype(np.int64) * self._span + labels
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return places, self._keys[places] == keys


class _ByWeight(SortedArcs):
    """The arcs of an automaton, in each state by descending weight, to compute upper bounds."""

    def __init__(self, states: np.ndarray, arcs: np.ndarray) -> None:
        super().__init__(states, arcs)
        weights = self.arcs["weight"].astype(np.float64)
        heaviest_first = np.lexsort((-weights, self.sources))
        self.labels = self.arcs["label"][heaviest_first]
        self.weights = weights[heaviest_first]

    def best_without_own_arc(self, states: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Return, for each i, the largest weight among arcs of parents[i] whose label has no arc in states[i]."""
        best = np.full(len(states), -np.inf)
        undecided = np.arange(len(states))
        rank = 0
        while len(undecided):
            undecided = undecided[self.counts[parents[undecided]] > rank]
            arc = self.begins[parents[undecided]] + rank
            _, owned = self.find(states[undecided], self.labels[arc])
            best[undecided[~owned]] = self.weights[arc[~owned]]
            undecided = undecided[owned]
            rank += 1
        return best


def _rounded_up(bounds: np.ndarray) -> np.ndarray:
    slack = np.where(np.isfinite(bounds), 1e-5 * (1.0 + np.abs(bounds)), 0.0)
    return (bounds + slack).astype(np.float32)
