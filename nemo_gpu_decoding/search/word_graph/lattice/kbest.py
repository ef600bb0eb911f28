"""Passes over a lattice, compiled: costs from the start and to the end, names, and the best texts.

**Best texts.** Every node keeps its n cheapest paths from the start with different words. That is exact:
a path that is not among them is beaten by n others, whatever comes after. Words are compared by a hash. Most paths
of a wide lattice belong to no good text: those that cannot cost at most a margin more than the best one are not
followed, and the margin grows until n texts are within it.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.word_graph.keys import NONE

HASH_MULTIPLIER = np.uint64(6364136223846793005)  # Knuth's MMIX generator

FIRST_MARGIN, MARGIN_GROWTH = 0.1, 1.5  # natural log: costs above those of the best path
ROUNDING = 1e-6  # more than sums of costs in another order differ by

# One path from the start to a node
ENTRY = np.dtype(
    [
        ("words", np.uint64),  # hash of its words
        ("cost", np.float64),
        ("previous", np.int64),  # entry of the node before, or NONE
        ("link", np.int64),
    ]
)


@compiled
def forward_costs(num_nodes, links, costs):
    """costs[node]: of the best path from node 0. Links are sorted by target."""
    costs[:] = np.inf
    costs[0] = 0.0
    for i in range(len(links)):
        total = costs[links[i].source] + links[i].cost
        costs[links[i].target] = min(costs[links[i].target], total)


@compiled
def backward_costs(num_nodes, links, end_nodes, end_costs, costs):
    """costs[node]: of the best path to an end."""
    costs[:] = np.inf
    for e in range(len(end_nodes)):
        costs[end_nodes[e]] = min(costs[end_nodes[e]], end_costs[e])
    for i in range(len(links) - 1, -1, -1):
        total = costs[links[i].target] + links[i].cost
        costs[links[i].source] = min(costs[links[i].source], total)


@compiled
def name_links(links, nodes, names):
    """Name nodes and links by how they are reached, whatever their numbers and their order.

    Args:
        links: sorted by target.
        nodes: [N] uint64, filled: the least name of the links that lead there; 0 for node 0.
        names: [L] uint64, filled: a hash of the source's name, the arc and the closure arc, which no
            other link shares.
    """
    nodes[:] = np.uint64(0xFFFFFFFFFFFFFFFF)
    nodes[0] = np.uint64(0)
    for i in range(len(links)):
        name = nodes[links[i].source]
        for part in (links[i].arc, links[i].epsilon):
            name = (name ^ np.uint64(np.int64(part) + 3)) * HASH_MULTIPLIER  # moves are -1 and -2
            name ^= name >> np.uint64(32)
        names[i] = name
        nodes[links[i].target] = min(nodes[links[i].target], name)


@compiled
def best_texts(n, num_nodes, links, ends, graph, num_words, num_spoken):
    """The n cheapest paths to an end with different words.

    Args:
        ends: [E] END.
        num_words: labels from here on are sequences.
        num_spoken: labels from here to `num_words` are no words.

    Returns:
        entries [M] ENTRY; for each of the paths, best first: its last entry, its end, its cost.
    """
    to_end = np.empty(num_nodes, np.float64)
    backward_costs(num_nodes, links, ends.node, ends.cost, to_end)
    margin, is_all = FIRST_MARGIN, False
    while True:
        bound = to_end[0] + margin
        entries, last, is_all = _texts_within(bound, to_end, n, num_nodes, links, ends, graph, num_words, num_spoken)
        if is_all or (len(last) == n and last[n - 1].cost < bound - ROUNDING):
            return entries, last
        margin *= MARGIN_GROWTH


@compiled
def _texts_within(bound, to_end, n, num_nodes, links, ends, graph, num_words, num_spoken):
    """The n cheapest of those that cost at most `bound`; whether there are no dearer ones."""
    is_all = True
    entries = np.empty(max(1024, 2 * num_nodes), ENTRY)
    begin = np.zeros(num_nodes + 1, np.int64)
    entries[0].words, entries[0].cost = np.uint64(0), 0.0
    entries[0].previous = entries[0].link = NONE
    begin[1], count, i = 1, 1, 0
    for node in range(1, num_nodes):
        if count + n > len(entries):
            larger = np.empty(2 * len(entries) + n, ENTRY)
            for k in range(count):  # in a loop: numba takes seconds to compile a slice of records
                larger[k] = entries[k]
            entries = larger
        size = 0
        while i < len(links) and links[i].target == node:
            epsilon_word, arc_word = words_of_link(links[i].epsilon, links[i].arc, graph)
            for previous in range(begin[links[i].source], begin[links[i].source + 1]):
                total = entries[previous].cost + links[i].cost + to_end[node]
                if not total <= bound:
                    is_all = is_all and total == np.inf
                    continue
                words = _hashed(entries[previous].words, epsilon_word, graph, num_words, num_spoken)
                words = _hashed(words, arc_word, graph, num_words, num_spoken)
                cost = entries[previous].cost + links[i].cost
                size = _insert(entries, count, size, n, words, cost, previous, i)
            i += 1
        count += size
        begin[node + 1] = count
    last = np.empty(n, ENTRY)
    size = 0
    for e in range(len(ends)):
        epsilon_word, _ = words_of_link(ends[e].epsilon, NONE, graph)
        for previous in range(begin[ends[e].node], begin[ends[e].node + 1]):
            words = _hashed(entries[previous].words, epsilon_word, graph, num_words, num_spoken)
            cost = entries[previous].cost + ends[e].cost
            size = _insert(last, 0, size, n, words, cost, previous, e)
    return entries, last[:size].copy(), is_all


@linked
def words_of_link(epsilon, arc, graph):
    """Output labels of a closure arc and an arc; 0 for none."""
    first = graph.epsilons[epsilon].olabel if epsilon >= 0 else np.int32(0)
    second = graph.arcs[arc].olabel if arc >= 0 else np.int32(0)
    return first, second


@compiled
def _hashed(words, olabel, graph, num_words, num_spoken):
    """The hash of words and the words that an output label stands for."""
    if olabel == 0:
        return words
    for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
        word = word_from_end(olabel, n, graph, num_words)
        if word < num_spoken:
            words = words * HASH_MULTIPLIER + np.uint64(word)
    return words


@compiled
def _insert(entries, begin, size, n, words, cost, previous, link):
    """Insert a path into entries[begin : begin + size], sorted and with different words; the new size."""
    for k in range(begin, begin + size):
        if entries[k].words == words:
            if not cost < entries[k].cost:
                return size
            for m in range(k, begin + size - 1):
                entries[m] = entries[m + 1]
            size -= 1
            break
    if size == n and not cost < entries[begin + size - 1].cost:
        return size
    size = min(size + 1, n)
    at = begin + size - 1
    while at > begin and cost < entries[at - 1].cost:
        entries[at] = entries[at - 1]
        at -= 1
    entries[at].words, entries[at].cost = words, cost
    entries[at].previous, entries[at].link = previous, link
    return size


@compiled
def path_links(entries, entry):
    """The links of a path, first to last."""
    count, at = 0, entry
    while entries[at].link != NONE:
        at = entries[at].previous
        count += 1
    links = np.empty(count, np.int64)
    for n in range(count - 1, -1, -1):
        links[n] = entries[entry].link
        entry = entries[entry].previous
    return links
