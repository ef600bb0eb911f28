"""Store the word graph in compressed sparse rows (CSR), the layout for the CPU and the GPU.

    states   [S]  ranges of arcs and epsilon-closure arcs, final cost, lower bound on arc costs
    arcs     [A]  ilabel, olabel, cost, target; sorted by ilabel within a state
    epsilons [E]  closure arcs (see below): olabel, cost, target, the target's lower bound

With the grammar {a: 1.0, b: 2.0}, spelled  a = token 0,  b = tokens 0 1  (#1 ends the word a):

    state    0 (start, final)      1 (token 0 read)         arcs      state 0:  (0, -, 1.0, to 1)
    arcs     0:1                   1:2                                state 1:  (1, b, 1.0, to 0)
    epsilons 0:0                   0:1                      epsilons  state 1:  (a, 0.0, to 0)

Costs are negative natural logs.

**Epsilon closure**, computed once before the search. Epsilons of a word graph are back-off arcs, and ends of words
with a spelling that begins another spelling. Epsilons form chains of two or three arcs. Epsilon removal would multiply
the arcs of the graph (55-131 times for the LMs measured). Instead, each state gets a closure arc to each state that it
reaches by epsilons, with the cost and the word of the chain. A search then takes closure arcs in one step, in any
order:

    0 --eps:the/1--> 1 --eps/2--> 2          closure arcs of 0: (the, 1, to 1), (the, 3, to 2)
                                             closure arcs of 1: (-, 2, to 2)

If several chains have the same words and target, only the cheapest chain is kept. A chain with two words (possible in
ready-made graphs) gets a word-sequence label for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_indices
from nemo_gpu_decoding.fusion.automaton import in_ranges
from nemo_gpu_decoding.graph.openfst import Fst
from nemo_gpu_decoding.jit import CopiedByFields, compiled, linked, read_only

# CTC topologies map frame sequences to token sequences. A decoding graph usually is T o L o G, with a transducer T of
# frames and tokens. The search applies T to L o G on the fly: a search token stores the last label, which is the state
# of T. Words and costs equal those of T o L o G for every topology (measured), with 2-4x fewer arcs.
#
#    name      a token's frames        between two equal tokens     T in NeMo
#    normal    one or more             at least one blank           "default"
#    compact   one or more             any number of blanks         "compact"
#    minimal   exactly one             any number of blanks         "minimal"
#    graph     defined by the graph's arcs, for ready-made T o L o G files
#
# [CUDA-WFST] describes normal and compact, Laptev et al. 2022 minimal; NeMo's `wfst_utils.build_topo` has all three.
TOPOLOGIES = ("compact", "normal", "minimal", "graph")
COMPACT, NORMAL, MINIMAL, GRAPH = range(4)  # numbers in compiled code
NEMO_NAMES = {"default": "normal"}
DEFAULT_TOPOLOGY = "compact"


def topology_number(name: str) -> int:
    """Return the number of a topology; NeMo's names are allowed."""
    ours = NEMO_NAMES.get(name, name)
    if ours not in TOPOLOGIES:
        raise FieldError("topology", name, f"one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES.index(ours)


EPSILON_WORD = "<eps>"
INFINITE = np.float32(np.inf)
MANY_ARCS = 8  # a state has a table if its arcs times this reach the number of labels

GRAPH_STATE = np.dtype(
    [
        ("arc_begin", np.int32),
        ("arc_end", np.int32),
        ("epsilon_begin", np.int32),
        ("epsilon_end", np.int32),
        ("final_cost", np.float32),  # inf: an utterance can't end here
        ("least_cost", np.float32),  # the smallest cost of its arcs; inf without arcs
    ],
    metadata={"align": 8},
)
GRAPH_ARC = np.dtype(
    [
        ("ilabel", np.int32),  # column of the log-probs
        ("olabel", np.int32),  # 0 for none; from the number of words on, a word-sequence label
        ("cost", np.float32),
        ("target", np.int32),
    ]
)
EPSILON = np.dtype(
    [
        ("olabel", np.int32),
        ("cost", np.float32),
        ("target", np.int32),
        ("least_cost", np.float32),  # copy of the target's, to save a memory access
    ]
)


class GraphArrays(NamedTuple):
    """The arrays of a graph that compiled code reads."""

    states: np.ndarray  # [S] GRAPH_STATE
    arcs: np.ndarray  # [A] GRAPH_ARC
    epsilons: np.ndarray  # [E] EPSILON
    word_sequences: np.ndarray  # [C, 2] int32: label W + i (W words) is label [i, 0], then word [i, 1]


class ArcIndex(NamedTuple):
    """An index that finds the arcs of a state with a label, for CPUs."""

    label_sets: np.ndarray  # [S] uint64, the labels of a state's arcs, see `label_bit`
    rows: np.ndarray  # [S] int32, row in `tables` of a state with many arcs
    tables: np.ndarray  # [N, columns] int32, the first arc with each label; the end of the state's arcs if it has none


@linked
def first_arc(index, arcs, s, state, ilabel):
    """Return the first arc of state s with a label; if there is none, another arc or the end of the state's arcs."""
    columns = index.tables.shape[1]
    if ilabel >= columns or index.label_sets[np.uintp(s)] & label_bit(ilabel) == 0:
        return np.int64(state.arc_end)
    if MANY_ARCS * (state.arc_end - state.arc_begin) >= columns:
        return np.int64(index.tables[np.uintp(index.rows[np.uintp(s)]), np.uintp(ilabel)])
    low, count = np.uintp(state.arc_begin), np.uintp(state.arc_end - state.arc_begin)
    while count > np.uintp(0):
        half = (count + np.uintp(1)) >> np.uintp(1)
        low += half * np.uintp(arcs[low + half - np.uintp(1)].ilabel < ilabel)
        count -= half
    return np.int64(low)


@linked
def label_bit(ilabel):
    """Return the bit of a label in a set of labels modulo 64."""
    return np.uint64(1) << np.uint64(ilabel & 63)


@compiled
def _fill_index(states, arcs, index):
    count = 0
    for s in range(len(states)):
        begin, end = states[s].arc_begin, states[s].arc_end
        for a in range(begin, end):
            index.label_sets[s] |= label_bit(arcs[a].ilabel)
        if MANY_ARCS * (end - begin) >= index.tables.shape[1]:
            index.rows[s] = count
            index.tables[count] = end
            for a in range(end - 1, begin - 1, -1):
                index.tables[count, arcs[a].ilabel] = a
            count += 1


@linked
def count_words(olabel, graph, num_words):
    """Return the number of words of an output label."""
    count = 1
    while olabel >= num_words:
        olabel = graph.word_sequences[olabel - num_words, 0]
        count += 1
    return count


@linked
def word_from_end(olabel, n, graph, num_words):
    """Return the word of an output label before its last n words."""
    for _ in range(n):
        olabel = graph.word_sequences[olabel - num_words, 0]
    return olabel if olabel < num_words else graph.word_sequences[olabel - num_words, 1]


class Spellings(NamedTuple):
    """The lexicon of a graph, which maps words to tokens."""

    words: np.ndarray  # [N] int32, ascending; a word with several spellings has several entries
    begin: np.ndarray  # [N + 1] int32
    tokens: np.ndarray  # [total] int32
    beginning: np.ndarray  # int32, tokens that may begin a word that the graph lacks; none: not known


class PieceLabels(NamedTuple):
    """The output labels of the pieces of unknown words (`unknown_words.py`)."""

    first: int  # of the token 0
    end: int  # of the end of an unknown word
    word_cost: float  # natural log, of an unknown word
    piece_cost: float  # and of each of its pieces


@dataclass(frozen=True, eq=False)
class WordGraph(CopiedByFields):
    """A word graph: a transducer from labels to words.

    Raises:
        ValueError: the arrays contradict each other, or the graph has no path.
    """

    arrays: GraphArrays
    start: int
    words: tuple[str, ...]  # words[0] is "<eps>"
    spellings: Spellings | None  # None for ready-made graphs
    unknown: int = 0  # the label of <unk>, with tokens that spell a new word; 0: closed vocabulary
    report: Mapping[str, Any] = field(default_factory=dict)
    name: str = "graph"
    pieces: PieceLabels | None = None  # labels from pieces.first on are pieces; None: all labels are words
    shut: np.ndarray | None = None  # of a graph `with_new_words`: its states for utterances without such words

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", GraphArrays(*map(read_only, self.arrays)))
        if self.spellings is not None:
            object.__setattr__(self, "spellings", Spellings(*map(read_only, self.spellings)))
        states, arcs, epsilons, word_sequences = self.arrays
        if not 0 <= self.start < len(states):
            raise FieldError(f"{self.name}: start", self.start, f"0 .. {len(states) - 1}")
        labels = len(self.words) + len(word_sequences)
        for table, column, size in (
            (states, "arc_begin", len(arcs) + 1), (states, "arc_end", len(arcs) + 1),
            (states, "epsilon_begin", len(epsilons) + 1), (states, "epsilon_end", len(epsilons) + 1),
            (arcs, "target", len(states)), (epsilons, "target", len(states)),
            (arcs, "olabel", labels), (epsilons, "olabel", labels), (arcs, "ilabel", 1 << 31),
        ):  # fmt: skip
            check_indices(f"{self.name}: {column}", table[column], size)
        for table, column in ((states, "final_cost"), (arcs, "cost"), (epsilons, "cost")):
            if not (table[column] > -np.inf).all():
                raise ValueError(f"{self.name}: {column} holds NaN or -inf, expected costs")
        _check_order(self)
        if not np.isfinite(states["final_cost"]).any():
            raise ValueError(f"{self.name} has no final state: no utterance could end in it")

    @classmethod
    def from_fst(
        cls,
        fst: Fst,
        words: Sequence[str],
        *,
        is_epsilon: np.ndarray | None = None,
        spellings: Spellings | None = None,
        unknown: int = 0,
        name: str = "graph",
    ) -> WordGraph:
        """Create a graph from a transducer whose input labels are column + 1.

        Args:
            words: text of each output label.
            is_epsilon: [largest input label + 1] bool, input labels that consume no frame; None means label 0 alone.
        """
        if fst.num_states == 0 or fst.start < 0:
            raise ValueError(f"{name} is empty: it has no start state")
        _check_labels(fst, len(words), name)
        inputs = fst.arcs["input"]
        silent = inputs == 0 if is_epsilon is None else is_epsilon[inputs]
        possible = fst.arcs["cost"] < np.inf
        sources = fst.sources()
        kept = np.flatnonzero(~silent & possible)
        kept = kept[np.lexsort((fst.arcs["output"][kept], inputs[kept], sources[kept]))]
        jumps = np.flatnonzero(silent & possible)
        epsilon_begin, epsilons, sequences = epsilon_closure(
            fst.num_states, sources[jumps], fst.arcs[jumps], len(words), name
        )
        arcs = np.zeros(len(kept), GRAPH_ARC)
        arcs["ilabel"], arcs["olabel"] = inputs[kept] - 1, fst.arcs["output"][kept]
        arcs["cost"], arcs["target"] = fst.arcs["cost"][kept], fst.arcs["target"][kept]
        states = np.zeros(fst.num_states, GRAPH_STATE)
        begin = np.searchsorted(sources[kept], np.arange(fst.num_states + 1))
        states["arc_begin"], states["arc_end"] = begin[:-1], begin[1:]
        states["epsilon_begin"], states["epsilon_end"] = epsilon_begin[:-1], epsilon_begin[1:]
        states["final_cost"], states["least_cost"] = fst.final_costs, INFINITE
        np.minimum.at(states["least_cost"], sources[kept], arcs["cost"])
        epsilons["least_cost"] = states["least_cost"][epsilons["target"]]
        arrays = GraphArrays(states, arcs, epsilons, sequences)
        return cls(arrays, fst.start, tuple(words), spellings, unknown, name=name)

    @property
    def num_states(self) -> int:
        return len(self.arrays.states)

    @property
    def num_arcs(self) -> int:
        return len(self.arrays.arcs)

    @property
    def num_spoken(self) -> int:
        """Return the number of word labels, including 0; later labels are pieces or sequences."""
        return len(self.words) if self.pieces is None else self.pieces.first

    @property
    def largest_label(self) -> int:
        """Return the largest column of the log-probs that an arc reads, -1 without arcs."""
        return int(self.arrays.arcs["ilabel"].max(initial=-1))

    @cached_property
    def word_ids(self) -> dict[str, int]:
        """Return a mapping from words to their labels."""
        return {word: label for label, word in enumerate(self.words[: self.num_spoken])}

    @cached_property
    def least_cost(self) -> float:
        """Return the smallest cost of any arc or epsilon chain, at most 0: a lower bound on the cost of one step."""
        arcs, epsilons = self.arrays.arcs["cost"], self.arrays.epsilons["cost"]
        return float(min(0.0, arcs.min(initial=0.0))) + float(min(0.0, epsilons.min(initial=0.0)))

    @cached_property
    def arc_index(self) -> ArcIndex:
        states, columns = self.arrays.states, self.largest_label + 1
        count = int((MANY_ARCS * (states["arc_end"] - states["arc_begin"]) >= columns).sum())
        sets, rows = np.zeros(len(states), np.uint64), np.zeros(len(states), np.int32)
        index = ArcIndex(sets, rows, np.empty((count, columns), np.int32))
        _fill_index(states, self.arrays.arcs, index)
        return ArcIndex(*map(read_only, index))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the graph's contents; graphs with the same states and arcs have equal hashes."""
        digest = hashlib.sha256(f"{self.start} {self.words}".encode())
        for array in self.arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def expanded(self, label: int) -> list[int]:
        """Return the words that an output label represents."""
        if label < len(self.words):
            return [label] if 0 < label < self.num_spoken else []
        first, second = self.arrays.word_sequences[label - len(self.words)]
        return self.expanded(int(first)) + self.expanded(int(second))

    @cached_property
    def most_words(self) -> int:
        """Return the largest number of words (or of pieces of unknown words) that one output label represents."""
        counts = [1] * len(self.words)
        for first, second in self.arrays.word_sequences.tolist():  # of labels before their own
            counts.append(counts[first] + counts[second])
        return max(counts)

    @cached_property
    def output_words(self) -> np.ndarray:
        """Return the words on arcs and epsilons, including words in word sequences, ascending, int64."""
        arrays = self.arrays
        labels = np.unique(np.concatenate([arrays.arcs["olabel"], arrays.epsilons["olabel"]])).tolist()
        return np.array(sorted({word for label in labels for word in self.expanded(label)}), np.int64)

    @cached_property
    def spelling_index(self) -> np.ndarray:
        """Return index, [words + 1] int64: word w has the spellings index[w] .. index[w + 1] - 1."""
        words = self.spellings.words if self.spellings is not None else np.zeros(0, np.int32)
        return np.searchsorted(words, np.arange(len(self.words) + 1))


def arc_sources(states: np.ndarray, kind: str) -> np.ndarray:
    """Return the source state of each arc, [A], or with kind "epsilon" of each closure arc, [E]."""
    return np.repeat(np.arange(len(states)), states[f"{kind}_end"] - states[f"{kind}_begin"])


def _check_order(graph: WordGraph) -> None:
    """Raise a ValueError unless ranges ascend, sequences use earlier labels, and spellings belong to words."""
    for kind in ("arc", "epsilon"):
        if (graph.arrays.states[f"{kind}_end"] < graph.arrays.states[f"{kind}_begin"]).any():
            raise ValueError(f"{graph.name}: {kind}_end of a state is before {kind}_begin")
    sequences, words = graph.arrays.word_sequences, len(graph.words)
    if sequences.size and (sequences.min() < 0 or (sequences >= words + np.arange(len(sequences))[:, None]).any()):
        raise ValueError(f"{graph.name}: word_sequences holds a label that is no earlier one")
    if not 0 <= graph.unknown < max(1, words):
        raise FieldError(f"{graph.name}: unknown", graph.unknown, f"0 .. {words - 1}")
    if graph.spellings is None:
        return
    spelled, begin, tokens, _ = graph.spellings
    if len(begin) != len(spelled) + 1 or begin[0] < 0 or begin[-1] > len(tokens) or (begin[1:] < begin[:-1]).any():
        raise ValueError(f"{graph.name}: spellings do not ascend in 0 .. {len(tokens)}, the number of their tokens")
    if len(spelled) and (spelled.min() < 0 or spelled.max() >= words):
        raise ValueError(f"{graph.name}: a spelling is that of word {spelled.max()}, expected 0 .. {words - 1}")


def _check_labels(fst: Fst, num_words: int, name: str) -> None:
    for column in ("input", "output"):
        if fst.num_arcs and fst.arcs[column].min() < 0:
            raise ValueError(f"{name}: an arc has the {column} label {fst.arcs[column].min()}")
    largest = int(fst.arcs["output"].max(initial=0))
    if largest >= num_words:
        raise ValueError(
            f"{name}: an arc has the output label {largest}, but the table of words ends at "
            f"{num_words - 1}; give the words.txt that the graph was made with"
        )
    bad = (fst.arcs["target"] < 0) | (fst.arcs["target"] >= fst.num_states)
    if bad.any() or fst.start >= fst.num_states:
        raise ValueError(f"{name}: an arc or the start leads to a state that does not exist")


# ----------------------------------------------------------------------------------- epsilon closure


MAX_CHAIN = 64  # limit, in arcs; a longer chain counts as a cycle
Chains: TypeAlias = "tuple[np.ndarray, ...]"  # source states (of chains), words, costs and target states


def epsilon_closure(
    num_states: int, sources: np.ndarray, arcs: np.ndarray, num_words: int, name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the closure of epsilon arcs, [A] FST_ARC with their source states.

    Returns:
        [S + 1] the first closure arc of each state; [E] EPSILON, sorted by target and word within a state, with
        least_cost 0; [C, 2] int32, the word sequences.

    Raises:
        ValueError: the arcs form a cycle, or a chain of more than `MAX_CHAIN` arcs.
    """
    order = np.argsort(sources, kind="stable")
    sources, arcs = sources[order].astype(np.int64), arcs[order]
    words: np.ndarray = arcs["output"].astype(np.int64)
    costs: np.ndarray = arcs["cost"].astype(np.float64)
    targets: np.ndarray = arcs["target"].astype(np.int64)
    _check_acyclic(num_states, sources, targets, name)
    begin = np.searchsorted(sources, np.arange(num_states + 1))
    sequences: dict[tuple[int, int], int] = {}
    level: Chains = (sources, words, costs, targets)
    levels = [level]
    while len(level[0]):
        level = _extended(level, begin, (words, costs, targets), sequences, num_words)
        levels.append(level)
    origins, words, costs, targets = (np.concatenate(column) for column in zip(*levels, strict=True))
    order = np.lexsort((costs, words, targets, origins))
    origins, words, costs, targets = (v[order] for v in (origins, words, costs, targets))
    best = np.ones(len(origins), bool)
    best[1:] = (np.diff(origins) != 0) | (np.diff(words) != 0) | (np.diff(targets) != 0)
    epsilons = np.zeros(np.count_nonzero(best), EPSILON)
    epsilons["olabel"], epsilons["cost"], epsilons["target"] = words[best], costs[best], targets[best]
    begin = np.searchsorted(origins[best], np.arange(num_states + 1))
    return begin, epsilons, np.array(list(sequences), np.int32).reshape(-1, 2)


def _extended(
    chains: Chains, begin: np.ndarray, arcs: Chains, sequences: dict[tuple[int, int], int], num_words: int
) -> Chains:
    """Extend each chain by each epsilon arc of its target state."""
    origins, words, costs, ends = chains
    chain, arc = in_ranges(begin[ends], begin[ends + 1] - begin[ends])
    first, second = words[chain], arcs[0][arc]
    label = np.where(first == 0, second, first)
    for i in np.flatnonzero((first != 0) & (second != 0)):
        pair = int(first[i]), int(second[i])
        label[i] = num_words + sequences.setdefault(pair, len(sequences))
    return origins[chain], label, costs[chain] + arcs[1][arc], arcs[2][arc]


def _check_acyclic(num_states: int, sources: np.ndarray, targets: np.ndarray, name: str) -> None:
    """Repeatedly remove arcs to states without epsilon arcs; the remaining arcs lead to a cycle."""
    alive = np.arange(len(sources))
    for _ in range(MAX_CHAIN):
        if not len(alive):
            return
        has_arcs = np.zeros(num_states, bool)
        has_arcs[sources[alive]] = True
        alive = alive[has_arcs[targets[alive]]]
    if len(alive):
        raise ValueError(
            f"{name}: epsilon arcs from state {sources[alive[0]]} form a cycle or a chain of more than "
            f"{MAX_CHAIN} arcs, expected finite chains: a search could not end"
        )
