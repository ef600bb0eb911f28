"""Build the lattice of an utterance, which contains all paths of the search within the lattice beam.

A node is a token of a frame. Nodes are numbered frame by frame; node 0 is the start, before the first frame. A link
leads from a token to a token of the next frame. A link has a label, the words that the graph emits there, and a cost.
Example of two frames, with "a" or "b" in the second frame:

    node 0 --blank--> node 1 --a, cost 1.0--> node 2 (end, cost 0.5)
                             --b, cost 1.2--> node 3 (end, cost 0.5)

The search records its links before recombination. The lattice therefore holds every path that survived beam
pruning and costs at most `lattice_beam` more than the best path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_gpu_decoding.checks import check_int, check_number
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.lm.packed import PackedLM
from nemo_gpu_decoding.search.word_graph.best_path import FoundPaths, Steps, all_ends
from nemo_gpu_decoding.search.word_graph.keys import BLANK_MOVE, NEW_TOKEN
from nemo_gpu_decoding.search.word_graph.large_lm.pair import lm_labels
from nemo_gpu_decoding.search.word_graph.lattice import links as of_links
from nemo_gpu_decoding.search.word_graph.lattice.rescoring import SecondLM, rescored_links
from nemo_gpu_decoding.search.word_graph.lattice.word_lattice import WordLattice, determinized_lattice, word_arcs
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels, WordGraphStream


@dataclass(frozen=True, eq=False)
class Lattice:
    """The lattice of one utterance, with N nodes, L links and E ends."""

    models: StreamModels  # models of the search
    node_frames: np.ndarray  # [N] int64, number of frames read at each node, ascending
    links: np.ndarray  # [L] LINK, sorted by target; source and target are nodes
    ends: np.ndarray  # [E] END
    reaches_end: bool  # False: no path ends in a final state; every token of the last frame is an end
    second: SecondLM | None = None  # LM of the rescoring, if rescored

    @property
    def graph(self) -> WordGraph:
        return self.models.graph

    @property
    def num_nodes(self) -> int:
        return len(self.node_frames)

    @property
    def num_links(self) -> int:
        return len(self.links)

    def n_best(self, n: int) -> FoundPaths:
        """Return exactly the n cheapest paths with different words, best first.

        Raises:
            ValueError: n < 1.
        """
        if n < 1:
            raise ValueError(f"n is {n}, expected at least 1")
        links, graph = self.links, self.graph
        entries, last = of_links.best_texts(
            n, self.num_nodes, links, self.ends, graph.arrays, len(graph.words), graph.num_spoken
        )
        steps = [self._steps(links[of_links.path_links(entries, entry)]) for entry in last["previous"].tolist()]
        stops, ends = np.cumsum([len(steps_of_path.arcs) for steps_of_path in steps]), self.ends[last["link"]]
        ends["cost"] = last["cost"]
        all_steps = Steps(*map(np.concatenate, zip(*steps, strict=True)))
        return FoundPaths(all_steps, stops, ends, np.full(len(ends), self.reaches_end))

    def pruned(self, beam: float) -> Lattice:
        """Return the lattice without paths that cost more than `beam` (natural log) above the best path.

        Raises:
            FieldError: beam is not > 0.
        """
        check_number("beam", beam, above_zero=True)
        frames, links, ends = _pruned(self.node_frames, self.links.copy(), self.ends.copy(), beam)
        return replace(self, node_frames=frames, links=links, ends=ends)

    def rescored(self, lm: PackedLM, weight: float, *, lm_share: float = 0.0) -> Lattice:
        """Return a lattice in which another LM's costs replace those of the graph and its LM, exactly.

        The cost of a path is reduced by (1 - lm_share) times its costs of the graph. The cost of a path is increased
        by weight times the LM's cost of its words and of </s>. With paged_biglm, the costs of the graph include the
        large LM's. Boosting is unchanged. lm_share 0 also removes costs of pronunciations and of pieces of unknown
        words. Boosting refunds such costs of unknown words, and the refunds remain: use lm_share 1 if unknown words
        are boosted.

        Args:
            lm: an LM from `load_packed_lm` or `pack_arpa_in_memory`; words that it does not list are its <unk>.
            weight: factor of the LM's natural log-probabilities, >= 0.
            lm_share: factor of the search's own LM costs, >= 0; 0 replaces them, 1 keeps them.

        Returns:
            a lattice with the same number of paths. A path that is best by the new LM is missing if the first LM
            placed it outside the lattice beam. Each node is split by LM state, so the lattice may be much larger.
            If it becomes too large, rescore `pruned(beam)`.

        Raises:
            ValueError: a weight is out of range; the LM has neither a word of the graph nor <unk>;
                the lattice is already rescored.
        """
        check_number("weight", weight)
        check_number("lm_share", lm_share)
        if self.second is not None:
            raise ValueError(f"the lattice was rescored with {self.second.name}, expected the search's own")
        labels, weights = lm_labels(self.graph, lm, "lm"), (float(weight), float(lm_share))
        second = SecondLM(lm.name, lm.arrays, labels, lm.start_state, lm.sentence_end, *weights)
        new, ends, nodes = rescored_links(self.links, self.ends, self.num_nodes, self.models, second, self.reaches_end)
        return replace(self, node_frames=self.node_frames[nodes], links=new, ends=ends, second=second)

    def _steps(self, links: np.ndarray) -> Steps:
        """Convert the links of a path to the back-pointers that the search keeps for it."""
        begins = np.flatnonzero(links["move"] == NEW_TOKEN)
        owner = np.searchsorted(begins, np.arange(len(links)), side="right") - 1
        is_token = (links["move"] != BLANK_MOVE) & (owner >= 0)
        is_token &= links["ilabel"] == links["ilabel"][begins[owner]] if len(begins) else False
        posteriors = np.exp(-links["acoustic_cost"].astype(np.float64) / float(self.models.params.acoustic_scale))
        runs = np.bincount(owner[is_token], minlength=len(begins))
        sums = np.bincount(owner[is_token], posteriors[is_token], minlength=len(begins))
        new = links[begins]
        return Steps(new["arc"], new["epsilon"], new["frame"], runs.astype(np.int32), sums.astype(np.float32))

    # ---------------------------------------------------------------------------------- exports

    def arcs(self) -> np.ndarray:
        """Return arcs with at most one word each, [A] ARC sorted by source; states are numbered in topological order.

        State 0 is the start. Ends become arcs to the last state. A link with several words becomes several arcs
        through additional states. The graph cost includes boosting.
        """
        return word_arcs(self.links, self.ends, self.node_frames, self.graph)

    def determinized(self, beam: float | None = None, *, max_states: int = 50_000) -> WordLattice:
        """Return the cheapest path for each word sequence: Kaldi's compact lattice [Povey et al. 2012].

        Args:
            beam: largest cost of a sequence above the best one, natural log, > 0; None means the lattice beam.
            max_states: largest number of states to expand, 1 .. 2**24. If more are needed, the result has a
                narrower beam, which is in `WordLattice.beam`.

        Raises:
            FieldError: an argument is out of range.
        """
        beam = float(self.models.params.lattice_beam) if beam is None else beam
        check_number("beam", beam, above_zero=True)
        check_int("max_states", max_states, 1, 1 << 24)
        return determinized_lattice(self.arcs(), self.graph.words, beam, max_states)

    def to_kaldi_text(self, key: str = "utterance") -> str:
        """Return Kaldi's text format (`lattice-copy ark:... ark,t:-`): words, graph costs and acoustic costs."""
        rows = self.arcs()
        lines = [f"{s} {t} {label} {word} {g:.6g},{a:.6g}" for s, t, label, word, g, a in rows.tolist()]
        return "\n".join([key, *lines, str(rows["target"].max()), "", ""])


def lattice_of(state: WordGraphStream, reaches_end: bool) -> Lattice:
    """Build the lattice of an utterance from the links that its search recorded, pruned to the lattice beam.

    Args:
        state: state of the utterance after the last frame read.
        reaches_end: the ends are final states of the graph; False: every token of the last frame is an end.
    """
    models, params = state.models, state.models.params
    ends = all_ends(state.tokens, reaches_end, models.search, models.lm_scorer)
    links = state.links[: int(state.counters["links"][0])].copy()
    sizes = np.ones(state.frames + 1, np.int64)
    np.maximum.at(sizes, links["frame"] + 1, links["target"].astype(np.int64) + 1)
    sizes[-1] = max(sizes[-1], len(state.tokens))  # counts tokens without a kept link
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
    """Drop links, ends and nodes that are on no path within the beam of the best path, and renumber the nodes."""
    before = of_links.forward_costs(len(frames), links)
    after = of_links.backward_costs(len(frames), links, ends["node"].copy(), ends["cost"].copy())
    limit = after[0] + beam + of_links.BEAM_SLACK
    links = links[before[links["source"]] + links["cost"] + after[links["target"]] <= limit]
    ends = ends[before[ends["node"]] + ends["cost"] <= limit]
    kept = np.zeros(len(frames), bool)
    kept[links["source"]] = kept[links["target"]] = kept[ends["node"]] = True
    kept[0] = True
    number = np.cumsum(kept) - 1
    for table, column in ((links, "source"), (links, "target"), (ends, "node")):
        table[column] = number[table[column]]
    return frames[kept], links, ends


def _in_order(frames: np.ndarray, links: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Renumber the nodes, and sort links and ends, in an order that depends on the paths alone.

    A GPU search finds tokens and links in the order in which its threads arrive. Without sorting, that order would
    decide between paths of equal cost.
    """
    nodes, names = np.empty(len(frames), np.uint64), np.empty(len(links), np.uint64)
    of_links.name_links(links, nodes, names)
    number = np.empty(len(frames), np.int32)
    number[np.lexsort((nodes, frames))] = np.arange(len(frames))
    for table, column in ((links, "source"), (links, "target"), (ends, "node")):
        table[column] = number[table[column]]
    links = links[np.lexsort((names, links["target"]))]
    return links, ends[np.lexsort((ends["epsilon"], ends["node"]))]
