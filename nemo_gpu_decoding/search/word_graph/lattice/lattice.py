"""All that a search found within the lattice beam, and what can be asked of it.

A node is a token of a frame, numbered frame by frame (node 0: nothing read); a link leads from a token
to one of the next frame and carries a label, the words that the graph tells there, and a cost. Example,
two frames, "a" against "b" in the second:

    node 0 --blank--> node 1 --a, cost 1.0--> node 2 (end, cost 0.5)
                             --b, cost 1.2--> node 3 (end, cost 0.5)

The links are the search's own, from before recombination: every path that the beam let live and that
costs at most `lattice_beam` more than the best one is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_gpu_decoding.checks import check_int, check_number
from nemo_gpu_decoding.extras import require
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.word_graph.best_path import END, FoundPaths, Steps, all_ends
from nemo_gpu_decoding.search.word_graph.keys import BLANK_MOVE, NEW_TOKEN, NONE
from nemo_gpu_decoding.search.word_graph.large_lm.pair import lm_labels
from nemo_gpu_decoding.search.word_graph.lattice.determinize import closest_words
from nemo_gpu_decoding.search.word_graph.lattice.kbest import (
    backward_costs,
    best_texts,
    forward_costs,
    name_links,
    path_links,
)
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import BEAM_SLACK
from nemo_gpu_decoding.search.word_graph.lattice.rescoring import SecondLM, rescored_links
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice, determinized_lattice, word_arcs
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels, StreamState


@dataclass(frozen=True, eq=False)
class LatticePath:
    """One path through a lattice."""

    cost: float  # from the first frame to the end
    steps: Steps
    state: int  # of the graph, after the last frame
    epsilon: int  # closure arc taken after that, or NONE


def lattice_paths(paths: Sequence[LatticePath], ended: bool) -> FoundPaths:
    """Paths of a lattice, `ended`: whose costs include final costs."""
    ends = np.zeros(len(paths), END)
    for name in ("cost", "state", "epsilon"):
        ends[name] = [getattr(path, name) for path in paths]
    steps = [path.steps for path in paths]
    step_ends = np.cumsum([len(own.arcs) for own in steps])
    return FoundPaths(
        Steps(*map(np.concatenate, zip(*steps, strict=True))), step_ends, ends, np.full(len(paths), ended)
    )


@dataclass(frozen=True, eq=False)
class Lattice:
    """The lattice of one utterance: N nodes, L links, E ends."""

    models: StreamModels  # of the search
    node_frames: np.ndarray  # [N] int64, frames read at each node, ascending
    links: np.ndarray  # [L] LINK; source and target are nodes; sorted by target
    ends: np.ndarray  # [E] END
    reaches_end: bool  # False: no path ends in a final state, so that all tokens count as ends
    second: SecondLM | None = None  # what it was rescored with

    @property
    def graph(self) -> WordGraph:
        return self.models.graph

    @property
    def acoustic_scale(self) -> float:
        return float(self.models.params.acoustic_scale)

    @property
    def num_nodes(self) -> int:
        return len(self.node_frames)

    @property
    def num_links(self) -> int:
        return len(self.links)

    def n_best(self, n: int) -> list[LatticePath]:
        """The n best paths with different words, best first; exact.

        Raises:
            ValueError: n < 1.
        """
        if n < 1:
            raise ValueError(f"n is {n}, expected at least 1")
        ends = self.ends
        graph = self.graph
        entries, last = best_texts(
            n, self.num_nodes, self.links, ends, graph.arrays, len(graph.words), graph.num_spoken
        )
        return [
            LatticePath(
                float(path["cost"]),
                self._steps(self.links[path_links(entries, int(path["previous"]))]),
                int(ends["state"][path["link"]]),
                int(ends["epsilon"][path["link"]]),
            )
            for path in last
        ]

    def pruned(self, beam: float) -> Lattice:
        """The lattice with those paths only that cost at most `beam` more than the best one.

        Raises:
            FieldError: beam is not above 0.
        """
        check_number("beam", beam, above_zero=True)
        frames, links, ends = _pruned(self.node_frames, self.links.copy(), self.ends.copy(), beam)
        return replace(self, node_frames=frames, links=links, ends=ends)

    def rescored(self, lm: PackedLM, weight: float, *, lm_share: float = 0.0) -> Lattice:
        """The lattice with another LM's costs in place of those of the graph and of its LM; exact.

        A path costs what it cost before, less (1 - lm_share) times what the graph, and with paged_biglm the
        large LM, have added, plus weight times the LM's cost of its words and of </s>. Boosting stays. With
        lm_share 0 all costs of the graph go, those of pronunciations and of unknown words' pieces, too. What a request
        for unknown words has paid back of these stays with the boosting, so keep lm_share 1 there.

        Args:
            lm: from `load_packed_lm` or `pack_arpa_in_memory`; words that it does not list are its <unk>.
            weight: of its natural log-probabilities, >= 0.
            lm_share: what stays of the search's own LM costs, >= 0; 0 replaces them, 1 keeps them.

        Returns:
            a lattice with as many paths, which holds the best ones only if they were within the lattice
            beam by the first LM. It may be much larger: a node for each LM state that leads there. Where
            it becomes too large, rescore `pruned(beam)`.

        Raises:
            ValueError: a weight is out of range; a word of the graph is in neither the LM nor its <unk>;
                the lattice is a rescored one.
        """
        check_number("weight", weight)
        check_number("lm_share", lm_share)
        if self.second is not None:
            raise ValueError(f"the lattice was rescored with {self.second.lm.name}, expected the search's own")
        second = SecondLM(lm, lm_labels(self.graph, lm, "lm"), float(weight), float(lm_share))
        links, ends, nodes = rescored_links(
            self.links, self.ends, self.num_nodes, self.models, second, self.reaches_end
        )
        return replace(self, node_frames=self.node_frames[nodes], links=links, ends=ends, second=second)

    def _steps(self, links: np.ndarray) -> Steps:
        """The links of a path as the back-pointers that the search would have kept of it."""
        begins = np.flatnonzero(links["move"] == NEW_TOKEN)
        owner = np.searchsorted(begins, np.arange(len(links)), side="right") - 1
        is_token = (links["move"] != BLANK_MOVE) & (owner >= 0)
        is_token &= links["ilabel"] == links["ilabel"][begins[owner]] if len(begins) else False
        posteriors = np.exp(-links["acoustic_cost"].astype(np.float64) / self.acoustic_scale)
        runs = np.bincount(owner[is_token], minlength=len(begins))
        sums = np.bincount(owner[is_token], posteriors[is_token], minlength=len(begins))
        new = links[begins]
        return Steps(new["arc"], new["epsilon"], new["frame"], runs.astype(np.int32), sums.astype(np.float32))

    # ---------------------------------------------------------------------------------- exports

    def arcs(self) -> np.ndarray:
        """[A] ARC with at most one word each, sorted by source; states are numbered in topological order.

        State 0 is the start; ends are arcs to the last state. A link with several words becomes several arcs over
        states of their own. Boosting is part of the graph cost.
        """
        return word_arcs(self.links, self.ends, self.node_frames, self.graph)

    def oracle(self, reference: str) -> str:
        """The text of the lattice with the fewest word errors against a reference; any of several."""
        arcs, ids = self.arcs(), self.graph.word_ids
        words = np.array([ids.get(word, NONE) for word in reference.split()], np.int32)
        found = closest_words(arcs, int(arcs["target"].max()) + 1, words)
        return " ".join(self.graph.words[word] for word in found.tolist())

    def determinized(self, beam: float | None = None, *, max_states: int = 50_000) -> WordLattice:
        """One path for each sequence of words, the cheapest: Kaldi's compact lattice.

        Args:
            beam: sequences that cost at most so much more than the best one, > 0; None: the lattice beam.
            max_states: where more states would be needed, the beam is narrowed to what they hold, which
                `WordLattice.beam` tells; 1 .. 2**24.

        Raises:
            FieldError: an argument is out of range.
        """
        beam = float(self.models.params.lattice_beam) if beam is None else beam
        check_number("beam", beam, above_zero=True)
        check_int("max_states", max_states, 1, 1 << 24)
        return determinized_lattice(self.arcs(), self.graph.words, beam, max_states)

    def to_kaldi_text(self, key: str = "utterance") -> str:
        """Kaldi's text form (`lattice-copy ark:... ark,t:-`): words, graph and acoustic costs."""
        rows = self.arcs()
        lines = [f"{s} {t} {label} {word} {g:.6g},{a:.6g}" for s, t, label, word, g, a in rows.tolist()]
        return "\n".join([key, *lines, str(rows["target"].max()), "", ""])

    def to_fst(self) -> Any:
        """As `kaldifst.Lattice`.

        Raises:
            ImportError: kaldifst is not installed.
        """
        require("kaldifst")
        import kaldifst

        rows = self.arcs()
        lattice = kaldifst.Lattice()
        final = int(rows["target"].max())
        for _ in range(final + 1):
            lattice.add_state()
        lattice.start = 0
        lattice.set_final(final, kaldifst.LatticeWeight(0.0, 0.0))
        for source, target, label, word, graph_cost, acoustic_cost in rows.tolist():
            weight = kaldifst.LatticeWeight(graph_cost, acoustic_cost)
            lattice.add_arc(source, kaldifst.LatticeArc(label, word, weight, target))
        return lattice

    def to_dot(self, max_arcs: int = 500) -> str:
        """A picture for Graphviz, left to right, of lattices that are small enough to look at.

        Raises:
            ValueError: more than `max_arcs` arcs.
        """
        rows = self.arcs()
        if len(rows) > max_arcs:
            raise ValueError(f"the lattice has {len(rows)} arcs, expected at most {max_arcs} (max_arcs)")
        lines = ["digraph lattice {", "  rankdir = LR;", "  node [shape = circle];"]
        lines.append(f"  {rows['target'].max()} [shape = doublecircle];")
        for source, target, _, word, graph_cost, acoustic_cost in rows.tolist():
            text = self.graph.words[word] if word else "-"
            quoted = text.replace("\\", "\\\\").replace('"', '\\"')
            cost = graph_cost + acoustic_cost
            lines.append(f'  {source} -> {target} [label = "{quoted} / {cost:.2f}"];')
        return "\n".join([*lines, "}", ""])


def lattice_of(state: StreamState, reaches_end: bool) -> Lattice:
    """What the search of an utterance that is over has kept, pruned to the lattice beam.

    Args:
        state: of the utterance.
        reaches_end: it ends in a final state of the graph, not just where the search stands.
    """
    models = state.models
    params = models.params
    ends = all_ends(state.tokens, reaches_end, models.search, models.lm_scorer)
    links = state.links[: int(state.counters["links"][0])].copy()
    sizes = np.ones(state.frames + 1, np.int64)
    np.maximum.at(sizes, links["frame"] + 1, links["target"].astype(np.int64) + 1)
    sizes[-1] = max(sizes[-1], len(state.tokens))  # also of those without a link that is kept
    first = np.append(0, np.cumsum(sizes))  # node of the first token of each frame
    links["source"] += first[links["frame"]].astype(np.int32)
    links["target"] += first[links["frame"] + 1].astype(np.int32)
    links = links[np.argsort(links["target"], kind="stable")]
    ends["node"] += first[state.frames]
    frames = np.repeat(np.arange(len(sizes)), sizes)
    frames, links, ends = _pruned(frames, links, ends, float(params.lattice_beam))
    links, ends = _in_order(frames, links, ends)
    return Lattice(models, frames, links, ends, reaches_end)


def _pruned(
    frames: np.ndarray, links: np.ndarray, ends: np.ndarray, beam: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Without links, ends and nodes that are on no path within the beam of the best; renumbered."""
    nodes = len(frames)
    before, after = np.empty(nodes), np.empty(nodes)
    forward_costs(nodes, links, before)
    backward_costs(nodes, links, ends["node"].copy(), ends["cost"].copy(), after)
    limit = after[0] + beam + BEAM_SLACK
    links = links[before[links["source"]] + links["cost"] + after[links["target"]] <= limit]
    ends = ends[before[ends["node"]] + ends["cost"] <= limit]
    kept = np.zeros(nodes, bool)
    kept[links["source"]] = kept[links["target"]] = kept[ends["node"]] = True
    kept[0] = True
    number = np.cumsum(kept) - 1
    for table, column in ((links, "source"), (links, "target"), (ends, "node")):
        table[column] = number[table[column]]
    return frames[kept], links, ends


def _in_order(frames: np.ndarray, links: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """With numbers of nodes, and in an order, that depend on the paths alone.

    A search on a GPU finds tokens and links in the order in which threads arrive; of paths that cost the
    same the order would decide.
    """
    nodes, names = np.empty(len(frames), np.uint64), np.empty(len(links), np.uint64)
    name_links(links, nodes, names)
    number = np.empty(len(frames), np.int32)
    number[np.lexsort((nodes, frames))] = np.arange(len(frames))
    for table, column in ((links, "source"), (links, "target"), (ends, "node")):
        table[column] = number[table[column]]
    links = links[np.lexsort((names, links["target"]))]
    return links, ends[np.lexsort((ends["epsilon"], ends["node"]))]
