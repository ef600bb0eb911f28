"""Rescore a lattice in a second pass: another LM's costs replace the LM costs of the search.

The lattice is composed with the LM on the fly. A node of the result is a pair of a node of the lattice and a state of
the LM. A link with words leads to the LM state after these words; a link without words keeps the state. Example:
"the cat" and "a cat" lead to node 5. With a 2-gram LM, node 5 stays one node, because both texts end in the state
"cat". With a 3-gram LM, it becomes two nodes.
"""

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.lm.packed import NO_LABEL, PackedArrays, lookup
from nemo_gpu_decoding.search.word_graph.best_path import end_difference
from nemo_gpu_decoding.search.word_graph.keys import NONE
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import difference_of_label
from nemo_gpu_decoding.search.word_graph.lattice.links import words_of_link
from nemo_gpu_decoding.search.word_graph.records import LINK
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels


class SecondLM(NamedTuple):
    """The LM that rescores a lattice, with its weights, in the form that compiled code reads."""

    name: str
    arrays: PackedArrays
    labels: np.ndarray  # [W] int64, the LM's label of each word of the graph; NO_LABEL: not a word
    start: int
    end: int  # label of </s>, or NO_LABEL
    weight: float
    lm_share: float  # factor of the LM costs of the search, >= 0

    def cost(self, words: np.ndarray, *, final: bool) -> float:
        """Return the weighted cost of words [N] int64 of the graph, and if `final` the cost of </s>."""
        state, total, labels = self.start, 0.0, self.labels[words].tolist()
        if final and self.end != NO_LABEL:
            labels.append(self.end)
        for label in labels:
            cost, state = lookup(self.arrays, state, label)
            total += float(cost)
        return self.weight * total


def rescored_links(
    links: np.ndarray, ends: np.ndarray, num_nodes: int, models: StreamModels, second: SecondLM, reaches_end: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compose a lattice of N nodes, L links and E ends with an LM.

    Args:
        links: [L] LINK, sorted by target.
        ends: [E] END.
        num_nodes: N.
        models: models of the search.
        second: the LM.
        reaches_end: the costs of the ends include final costs.

    Returns:
        links, sorted by target; ends; the original node of each new node, ascending.
    """
    link_costs, end_costs, contexts = np.zeros(len(links)), np.zeros(len(ends)), np.zeros(num_nodes, np.int64)
    first_lm_costs(links, ends, reaches_end, contexts, models.search, models.lm_scorer, link_costs, end_costs)
    links, ends = links.copy(), ends.copy()
    links["cost"] -= (1.0 - second.lm_share) * link_costs
    ends["cost"] -= (1.0 - second.lm_share) * end_costs
    lm = second if reaches_end else second._replace(end=NO_LABEL)
    begin, states, links = composed_links(num_nodes, links, models.graph.arrays, lm)
    links = links[np.argsort(links["target"], kind="stable")]
    pairs = np.diff(begin)  # number of pairs of each node
    counts = pairs[ends["node"]]
    ends = np.repeat(ends, counts)
    ends["node"] = begin[ends["node"]] + np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)
    add_end_costs(ends, states, models.graph.arrays, lm)
    return links, ends, np.repeat(np.arange(num_nodes), pairs)


@compiled
def first_lm_costs(links, ends, reaches_end, contexts, search, lm, link_costs, end_costs):
    """Add up the weighted costs that links and ends have from the graph and the large LM.

    Args:
        contexts: [N] int64, filled: the LM context of each node.
        lm: `LmScorer` of the search, or None.
        link_costs: [L] float64, filled.
        end_costs: [E] float64, changed: costs are added if `reaches_end`.
    """
    graph, weights = search.graph, search.weights
    if lm is not None:
        contexts[0] = lm.lms.start
    for i in range(len(links)):
        labels = words_of_link(links[i].epsilon, links[i].arc, graph)
        total = 0.0
        if links[i].epsilon >= 0:
            total += weights.lm_weight * graph.epsilons[links[i].epsilon].cost
        if links[i].arc >= 0:
            total += weights.lm_weight * graph.arcs[links[i].arc].cost
        if lm is not None:
            context = contexts[links[i].source]
            for olabel in labels:
                if olabel != 0:
                    cost, context = difference_of_label(olabel, context, search, lm)
                    total += lm.difference_weight * cost if lm.difference_weight != 0 else 0.0
            contexts[links[i].target] = context
        link_costs[i] = total
    for e in range(len(ends) if reaches_end else 0):
        state, olabel = ends[e].state, np.int32(0)
        if ends[e].epsilon != NONE:
            closure = graph.epsilons[ends[e].epsilon]
            state, olabel = closure.target, closure.olabel
            end_costs[e] += weights.lm_weight * closure.cost
        end_costs[e] += weights.lm_weight * graph.states[state].final_cost
        if lm is not None:
            end_costs[e] += end_difference(olabel, contexts[ends[e].node], search, lm)


@compiled
def composed_links(num_nodes, links, graph, lm):
    """Return links between pairs (node, LM state), which are numbered node by node.

    Args:
        links: [L] LINK, sorted by target.
        lm: `SecondLM`.

    Returns:
        begin [N + 1], the first pair of each node; the LM state of each pair; composed links [M] LINK.
    """
    composed = np.empty(2 * len(links) + 64, LINK)
    begin = np.zeros(num_nodes + 1, np.int64)
    states = np.empty(max(1024, 2 * num_nodes), np.int64)
    states[0], begin[1], count, size, i = lm.start, 1, 1, 0, 0
    for node in range(1, num_nodes):
        pairs: Any = {np.int64(NONE): np.int64(NONE)}  # LM state -> pair of this node
        while i < len(links) and links[i].target == node:
            for pair in range(begin[links[i].source], begin[links[i].source + 1]):
                cost, state = 0.0, states[pair]
                for olabel in words_of_link(links[i].epsilon, links[i].arc, graph):
                    more, state = _cost_of_label(olabel, state, graph, lm)
                    cost += more
                if state not in pairs:
                    if count == len(states):
                        states = np.append(states, np.empty(count, np.int64))
                    pairs[state], states[count] = count, state
                    count += 1
                if size == len(composed):
                    larger = np.empty(2 * size, LINK)
                    for k in range(size):
                        larger[k] = composed[k]
                    composed = larger
                composed[size] = links[i]
                composed[size].source, composed[size].target = pair, pairs[state]
                composed[size].cost = links[i].cost + cost
                size += 1
            i += 1
        begin[node + 1] = count
    return begin, states[:count].copy(), composed[:size]


@compiled
def add_end_costs(ends, states, graph, lm):
    """Add the LM costs of words and of </s> to each end.

    Args:
        ends: [E] END, changed; each node is a pair.
        states: the LM state of each pair.
    """
    for e in range(len(ends)):
        state, olabel = states[ends[e].node], np.int32(0)
        if ends[e].epsilon != NONE:
            olabel = graph.epsilons[ends[e].epsilon].olabel
        cost, state = _cost_of_label(olabel, state, graph, lm)
        if lm.end != NO_LABEL:
            cost += lm.weight * lookup(lm.arrays, state, lm.end)[0]
        ends[e].cost += cost


@linked
def _cost_of_label(olabel, state, graph, lm):
    """Return the weighted LM cost of the words of an output label, and the LM state after them."""
    total, num_words = 0.0, len(lm.labels)
    if olabel != 0:
        for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
            label = lm.labels[word_from_end(olabel, n, graph, num_words)]
            if label != NO_LABEL:  # NO_LABEL: a piece of an unknown word
                cost, state = lookup(lm.arrays, state, label)
                total += cost
    return lm.weight * total, state
