"""Build word lattices, whose arcs have at most one word, and determinise them: one path per word sequence."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.search.word_graph.lattice import determinize
from nemo_gpu_decoding.words import joined


@dataclass(frozen=True, eq=False)
class WordSequence:
    """A path through a determinised lattice, with n words and T frames."""

    words: tuple[str, ...]  # [n]
    graph_cost: float  # includes LM and boosting
    acoustic_cost: float
    ilabels: np.ndarray  # [T] int32, columns of the log-probs on the best path with these words

    @property
    def cost(self) -> float:
        return self.graph_cost + self.acoustic_cost

    @property
    def text(self) -> str:
        return joined(self.words)


@dataclass(frozen=True, eq=False)
class WordLattice:
    """A determinised lattice (Kaldi's compact lattice) with S states and A arcs: a path for each word sequence.

    State 0 is the start and the last state is the end. Arcs lead to higher states. The labels of an arc may end before
    or after its word: all paths with the same words so far share these labels.
    """

    words: tuple[str, ...]  # words of the graph
    state_frames: np.ndarray  # [S] int32, number of frames read at each state
    arcs: np.ndarray  # [A] WORD_ARC, sorted by source
    ilabels: np.ndarray  # int32, columns of the log-probs; an arc reads ilabels[begin:end]
    beam: float  # natural log; the lattice has every word sequence that costs at most `beam` more than the best

    @property
    def num_states(self) -> int:
        return len(self.state_frames)

    @property
    def costs(self) -> np.ndarray:
        """Return graph cost plus acoustic cost of each arc, [A] float64."""
        return self.arcs["graph_cost"] + self.arcs["acoustic_cost"]

    def n_best(self, n: int) -> list[WordSequence]:
        """Return the n cheapest word sequences, best first.

        Raises:
            ValueError: n < 1.
        """
        if n < 1:
            raise ValueError(f"n is {n}, expected at least 1")
        begin = np.searchsorted(self.arcs["source"], np.arange(self.num_states + 1)).tolist()
        targets, costs = self.arcs["target"].tolist(), self.costs.tolist()
        rest_costs = [np.inf] * (self.num_states - 1) + [0.0]
        for state in range(self.num_states - 2, -1, -1):
            rest_costs[state] = min(
                (costs[i] + rest_costs[targets[i]] for i in range(begin[state], begin[state + 1])), default=np.inf
            )
        heap: list[tuple[float, tuple[int, ...], float, int]] = [(rest_costs[0], (), 0.0, 0)]
        sequences: list[WordSequence] = []
        while heap and len(sequences) < n:
            _, path, cost, state = heapq.heappop(heap)
            if state == self.num_states - 1:
                sequences.append(self._sequence(path))
                continue
            for i in range(begin[state], begin[state + 1]):
                total = cost + costs[i]
                heapq.heappush(heap, (total + rest_costs[targets[i]], (*path, i), total, targets[i]))
        return sequences

    def _sequence(self, path: Sequence[int]) -> WordSequence:
        arcs = self.arcs[list(path)]
        spans = [self.ilabels[arc["begin"] : arc["end"]] for arc in arcs]
        return WordSequence(
            tuple(self.words[word] for word in arcs["word"].tolist() if word),
            float(arcs["graph_cost"].sum()),
            float(arcs["acoustic_cost"].sum()),
            np.concatenate([self.ilabels[:0], *spans]),
        )

    def to_kaldi_text(self, key: str = "utterance") -> str:
        """Return Kaldi's text of a compact lattice: words, graph and acoustic costs, columns + 1 as transition ids."""
        lines, last = [key], self.num_states - 1
        for arc in self.arcs:
            labels = "_".join(str(label + 1) for label in self.ilabels[arc["begin"] : arc["end"]].tolist())
            weight = f"{arc['graph_cost']:.6g},{arc['acoustic_cost']:.6g},{labels}"
            is_end = arc["target"] == last
            lines.append(
                f"{arc['source']} {weight}" if is_end else f"{arc['source']} {arc['target']} {arc['word']} {weight}"
            )
        return "\n".join([*lines, "", ""])

    def to_openfst_text(self) -> str:
        """Return the lattice as OpenFst and k2 acceptor text: source, target, word, cost; then the final state."""
        rows = zip(self.arcs["source"], self.arcs["target"], self.arcs["word"], self.costs, strict=True)
        lines = [f"{source} {target} {word} {cost:.6g}" for source, target, word, cost in rows]
        return "\n".join([*lines, str(self.num_states - 1), ""])


def word_arcs(links: np.ndarray, ends: np.ndarray, frames: np.ndarray, graph: WordGraph) -> np.ndarray:
    """Return arcs with at most one word each, [A] ARC sorted by source; states are numbered in topological order.

    A link with several words becomes several arcs. The first of these arcs has the link's label and costs. Ends become
    arcs to the last state.

    Args:
        links: [L] LINK.
        ends: [E] END.
        frames: [N] number of frames read at each node.
        graph: graph of the search.
    """
    arrays, num_nodes = graph.arrays, len(frames)
    pairs = np.zeros((len(links) + len(ends), 2), np.int64)  # output labels
    for column, table, numbers in ((0, arrays.epsilons, links["epsilon"]), (1, arrays.arcs, links["arc"])):
        with_arc = np.flatnonzero(numbers >= 0)
        pairs[with_arc, column] = table["olabel"][numbers[with_arc]]
    with_arc = np.flatnonzero(ends["epsilon"] >= 0)
    pairs[len(links) + with_arc, 0] = arrays.epsilons["olabel"][ends["epsilon"][with_arc]]
    known, row_of = np.unique(pairs, axis=0, return_inverse=True)
    texts = [graph.expanded(int(first)) + graph.expanded(int(second)) for first, second in known]
    counts = np.array([max(1, len(text)) for text in texts], np.int64)[row_of.reshape(-1)]
    table = np.zeros((len(texts), max(map(len, texts), default=0) + 1), np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    owner = np.repeat(np.arange(len(pairs)), counts)
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # index of a word in its link
    is_first, is_last = rank == 0, rank == counts[owner] - 1
    # an inner state comes after the states of the source frame of its link and before those of the next frame
    sources = np.concatenate([links["source"], ends["node"]]).astype(np.int64)
    inner = np.flatnonzero(~is_last)
    when = np.concatenate([2 * frames, 2 * frames[sources[owner[inner]]] + 1])
    order = np.lexsort((np.concatenate([np.zeros(num_nodes, np.int64), rank[inner]]), when))
    number = np.empty(len(order) + 1, np.int64)
    number[order] = np.arange(len(order))
    number[-1] = len(order)  # the end
    targets = np.concatenate([links["target"], np.full(len(ends), len(order))]).astype(np.int64)
    own_state = np.full(len(owner), -1)  # the inner state that an arc leads to
    own_state[inner] = num_nodes + np.arange(len(inner))
    arcs = np.zeros(len(owner), determinize.ARC)
    arcs["source"] = number[np.where(is_first, sources[owner], np.roll(own_state, 1))]
    arcs["target"] = number[np.where(is_last, targets[owner], own_state)]
    arcs["word"] = table[row_of.reshape(-1)[owner], rank]
    acoustic = np.concatenate([links["acoustic_cost"], np.zeros(len(ends))]).astype(np.float64)
    costs = np.concatenate([links["cost"], ends["cost"]]).astype(np.float64)
    labels = np.concatenate([links["ilabel"] + 1, np.zeros(len(ends), np.int32)])
    for name, values in (("label", labels), ("acoustic_cost", acoustic), ("graph_cost", costs - acoustic)):
        arcs[name] = np.where(is_first, values[owner], 0)
    return arcs[np.argsort(arcs["source"], kind="stable")]


def determinized_lattice(arcs: np.ndarray, words: tuple[str, ...], beam: float, max_states: int) -> WordLattice:
    """Determinise arcs [A] ARC of `word_arcs`: the best path of each word sequence within a beam (natural log)."""
    num_states = int(arcs["target"].max()) + 1
    graph_costs = np.rint(arcs["graph_cost"] / determinize.COST_UNIT).astype(np.int64)
    costs = graph_costs + np.rint(arcs["acoustic_cost"] / determinize.COST_UNIT).astype(np.int64)
    begin = np.searchsorted(arcs["source"], np.arange(num_states + 1))
    given = determinize.CostLattice(arcs, begin, costs, graph_costs, determinize.costs_to_end(arcs, num_states, costs))
    rows, first_nodes, *strings, within = determinize.determinized(
        given, np.int64(beam / determinize.COST_UNIT), max_states
    )
    # topological order: the first node of a subset precedes those of the subsets that it leads to
    states = np.unique(np.append(rows[:, 0], 0))
    states = states[np.argsort(first_nodes[states], kind="stable")]
    number = np.full(len(first_nodes) + 1, len(states), np.int64)  # -1 (the end) becomes the last state
    number[states] = np.arange(len(states))
    table = np.zeros(len(rows), determinize.WORD_ARC)
    table["source"], table["target"], table["word"] = number[rows[:, 0]], number[rows[:, 1]], rows[:, 2]
    table["graph_cost"] = rows[:, 4] * determinize.COST_UNIT
    table["acoustic_cost"] = (rows[:, 3] - rows[:, 4]) * determinize.COST_UNIT
    lengths = strings[2][rows[:, 5]]
    table["end"] = np.cumsum(lengths)
    table["begin"] = table["end"] - lengths
    spans = [determinize.spelled(string, *strings) - 1 for string in rows[:, 5].tolist()]
    order = np.lexsort((table["word"], table["source"]))
    table = table[order]
    frames = np.zeros(len(states) + 1, np.int32)
    for arc, length in zip(table, lengths[order], strict=True):  # all paths to a state read the same number of frames
        frames[arc["target"]] = frames[arc["source"]] + length
    ilabels = np.concatenate([np.zeros(0, np.int32), *spans])
    return WordLattice(words, frames, table, ilabels, float(within * determinize.COST_UNIT))
