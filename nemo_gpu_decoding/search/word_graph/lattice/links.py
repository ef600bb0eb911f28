"""Compute costs, names and n-best texts over the links of a lattice, and prune links during the search.

**n-best texts.** Every node keeps its n cheapest paths from the start with different words. The result is exact,
because for every continuation n other paths cost no more than a path that is dropped. Words are compared by a hash.
Most paths of a wide lattice spell poor texts. The search therefore skips paths whose cost exceeds the best path's by
more than a margin. The margin grows until n texts are within it.
"""

import numpy as np

from nemo_gpu_decoding.graph.csr import count_words, word_from_end
from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.search.numerics import HASH_MULTIPLIER
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.keys import NONE
from nemo_gpu_decoding.search.word_graph.records import LINK

FIRST_MARGIN, MARGIN_GROWTH = 0.1, 1.5  # margin above the best path, natural log; its growth factor
ROUNDING = 1e-6  # above the difference between sums of the same costs in different orders

# One path from the start to a node
ENTRY = np.dtype(
    [
        ("words", np.uint64),  # hash of the words of the path
        ("cost", np.float64),
        ("previous", np.int64),  # entry of the previous node, or NONE
        ("link", np.int64),
    ]
)


@compiled
def forward_costs(num_nodes, links):
    """Return the cost of the best path from node 0 to each node, [N] float64. Links are sorted by target."""
    costs = np.full(num_nodes, np.inf)
    costs[0] = 0.0
    for i in range(len(links)):
        total = costs[links[i].source] + links[i].cost
        costs[links[i].target] = min(costs[links[i].target], total)
    return costs


@compiled
def backward_costs(num_nodes, links, end_nodes, end_costs):
    """Return the cost of the best path from each node to an end, [N] float64. Links are sorted by target."""
    costs = np.full(num_nodes, np.inf)
    for e in range(len(end_nodes)):
        costs[end_nodes[e]] = min(costs[end_nodes[e]], end_costs[e])
    for i in range(len(links) - 1, -1, -1):
        total = costs[links[i].target] + links[i].cost
        costs[links[i].source] = min(costs[links[i].source], total)
    return costs


@compiled
def name_links(links, nodes, names):
    """Name nodes and links after the paths that lead to them, so that names do not depend on numbers and order.

    Args:
        links: [L] LINK, sorted by target.
        nodes: [N] uint64, filled: the smallest name of the links to each node; 0 for node 0.
        names: [L] uint64, filled: a hash of the source's name, the arc and the closure arc. No two links have all
            three in common.
    """
    nodes[:] = np.uint64(0xFFFFFFFFFFFFFFFF)
    nodes[0] = np.uint64(0)
    for i in range(len(links)):
        name = nodes[links[i].source]
        for part in (links[i].arc, links[i].epsilon):
            name = (name ^ np.uint64(np.int64(part) + 3)) * HASH_MULTIPLIER  # + 3: moves are -1 and -2
            name ^= name >> np.uint64(32)
        names[i] = name
        nodes[links[i].target] = min(nodes[links[i].target], name)


@compiled
def best_texts(n, num_nodes, links, ends, graph, num_words, num_spoken):
    """Return the n cheapest paths to an end with different words.

    Args:
        links: [L] LINK, sorted by target.
        ends: [E] END.
        num_words: output labels >= num_words are word-sequence labels.
        num_spoken: labels in [num_spoken, num_words) are pieces, not words.

    Returns:
        entries [M] ENTRY; paths [K] ENTRY, best first: `previous` is the last entry, `link` the index of the end.
    """
    to_end = backward_costs(num_nodes, links, ends.node, ends.cost)
    margin, is_all = FIRST_MARGIN, False
    while True:
        bound = to_end[0] + margin
        entries, last, is_all = _texts_within(bound, to_end, n, num_nodes, links, ends, graph, num_words, num_spoken)
        if is_all or (len(last) == n and last[n - 1].cost < bound - ROUNDING):
            return entries, last
        margin *= MARGIN_GROWTH


@compiled
def _texts_within(bound, to_end, n, num_nodes, links, ends, graph, num_words, num_spoken):
    """Return `best_texts` of the paths that cost at most `bound`, and whether these are all paths."""
    is_all = True
    entries = np.empty(max(1024, 2 * num_nodes), ENTRY)
    begin = np.zeros(num_nodes + 1, np.int64)
    entries[0].words, entries[0].cost = np.uint64(0), 0.0
    entries[0].previous = entries[0].link = NONE
    begin[1], count, i = 1, 1, 0
    for node in range(1, num_nodes):
        if count + n > len(entries):
            larger = np.empty(2 * len(entries) + n, ENTRY)
            for k in range(count):  # a loop, because numba takes seconds to compile a slice of records
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
    """Return the output labels of a closure arc and an arc; 0: no label."""
    first = graph.epsilons[epsilon].olabel if epsilon >= 0 else np.int32(0)
    second = graph.arcs[arc].olabel if arc >= 0 else np.int32(0)
    return first, second


@compiled
def _hashed(words, olabel, graph, num_words, num_spoken):
    """Append the words of an output label to a hash of words."""
    if olabel == 0:
        return words
    for n in range(count_words(olabel, graph, num_words) - 1, -1, -1):
        word = word_from_end(olabel, n, graph, num_words)
        if word < num_spoken:
            words = words * HASH_MULTIPLIER + np.uint64(word)
    return words


@compiled
def _insert(entries, begin, size, n, words, cost, previous, link):
    """Insert a path into entries[begin : begin + size], sorted by cost, one per word hash; return the new size."""
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
    """Return the indices of the links of a path, first to last, int64."""
    count, at = 0, entry
    while entries[at].link != NONE:
        at = entries[at].previous
        count += 1
    links = np.empty(count, np.int64)
    for n in range(count - 1, -1, -1):
        links[n] = entries[entry].link
        entry = entries[entry].previous
    return links


# ----------------------------------------------------------------------- pruning during the search

BEAM_SLACK = 1e-4  # added to the lattice beam: rounding must not drop the best path


def grown_links(links: np.ndarray, counters: np.ndarray, lattice_beam: float) -> np.ndarray:
    """Drop links that are on no path within the lattice beam; double the array if it is still more than half full."""
    used, kept = int(counters["links"][0]), np.empty(len(links), LINK)
    size = prune_links(links, used, int(counters["frames"][0]), lattice_beam + BEAM_SLACK, kept)
    counters["links"] = size
    return kept if size < used and 2 * size <= len(links) else grown(kept, size)


def with_links(
    former: tuple[np.ndarray, ...], links: np.ndarray, frames: int, lattice_beam: float
) -> tuple[np.ndarray, ...]:
    """Append new links to the links of a stream, a tuple of arrays in order of time.

    The first array is the result of the last pruning. All links are pruned again when their number exceeds twice the
    length of that array. The time per link therefore stays constant in a long stream, and the memory at most doubles.

    Args:
        former: arrays of LINK; empty at first.
        links: LINK, links of the frames after those of `former`.
        frames: number of frames read so far.
    """
    arrays = (*former, links)
    if former and sum(map(len, arrays)) <= 2 * len(former[0]):
        return arrays
    links = concatenated(arrays)
    kept = np.empty(len(links), LINK)
    return (kept[: prune_links(links, len(links), frames, lattice_beam + BEAM_SLACK, kept)].copy(),)


@compiled
def prune_links(links, count, frames, beam, kept):
    """Copy the links that may be on a path within a beam of the best path to `kept`, in order.

    The method is Kaldi's PruneActiveTokens. A token of the last frame may be on the best path, so its extra cost is
    0. The extra cost of a link is its cost above the best path to its target, plus the least extra cost of the links
    from the target. Any path with the link costs at least this much more than another, whatever later frames cost.

    Returns:
        the number of links copied.
    """
    first = np.zeros(frames + 3, np.int64)  # node of the first token of each frame
    for i in range(count):
        first[links[i].frame + 1] = max(first[links[i].frame + 1], links[i].source + 1)
        first[links[i].frame + 2] = max(first[links[i].frame + 2], links[i].target + 1)
    first = np.cumsum(first)
    costs, extra = np.full(first[-1] + 1, np.inf), np.full(first[-1] + 1, np.inf)
    costs[0], extra[first[frames] :] = 0.0, 0.0
    for i in range(count):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        costs[target] = min(costs[target], costs[source] + links[i].cost)
    is_kept, size = np.zeros(count, np.bool_), 0
    for i in range(count - 1, -1, -1):
        source, target = first[links[i].frame] + links[i].source, first[links[i].frame + 1] + links[i].target
        more = costs[source] + links[i].cost - costs[target] + extra[target]
        if more <= beam:
            is_kept[i] = True
            extra[source] = min(extra[source], more)
    for i in range(count):
        if is_kept[i]:
            kept[size] = links[i]
            size += 1
    return size


def grown(array: np.ndarray, used: int, more: int = 0) -> np.ndarray:
    """Copy array[:used] into an array of twice the capacity, or of `used + more` entries if that is larger."""
    larger = np.empty(2 * max(len(array), used + more), array.dtype)
    larger[:used] = array[:used]
    return larger
