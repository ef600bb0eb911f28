"""Determinise an acyclic lattice: find the cheapest path for each word sequence [Povey et al. 2012].

A state of the result is a subset of the lattice's nodes: the nodes that the same words lead to. Each node has its
cost above the cheapest node of the subset, and its labels after the prefix that all nodes share. Example: "a" leads
to node 4 at cost 2.0 over the labels 1 1 2, and to node 5 at cost 2.5 over 1 2. An arc with the word "a", the cost
2.0 and the label 1 leads to the subset {(4, 0.0, 1 2), (5, 0.5, 2)}. If different words lead to the same subset, they
lead to the same state.

States are expanded in the order of the cost of the best path through them. This cost is exact, because the costs to
the end are known from the lattice. Each state therefore has its final cost when it is expanded, and no arc beyond
the beam is created. If the search stops early, its result is complete within a narrower beam. Costs are integers in
units of 2**-24: sums do not depend on the order of addition, and equal subsets compare equal.
"""

import heapq
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled


class Strings(NamedTuple):
    """Label sequences that form a prefix tree: a string is a parent string and one more label; 0 is empty."""

    numbers: Any  # parent << 32 | label -> string
    parents: Any  # lists of int64
    labels: Any
    lengths: Any


class Subsets(NamedTuple):
    """The nodes of all states, concatenated, as lists."""

    begin: Any  # int64, index of the first node of each state
    # (node, cost, graph cost, string): costs relative to the cheapest node of the state, >= 0; the labels after the
    # prefix that all nodes of the state share
    entries: Any


class CostLattice(NamedTuple):
    """A lattice whose arcs have costs."""

    arcs: Any  # [A] ARC, sorted by source
    begin: Any  # [N + 1], index of the first arc of each state
    costs: Any  # [A] int64, in units of COST_UNIT
    graph_costs: Any  # [A] int64, part of `costs`
    to_end: Any  # [N] int64, result of `costs_to_end`


class Paths(NamedTuple):
    """The cheapest paths that lead to the N nodes of a lattice; arrays [N] int64."""

    costs: Any  # FAR: no path
    graph_costs: Any
    strings: Any


COST_UNIT = 1.0 / (1 << 24)
FAR = np.int64(1) << 60
_MIX = np.int64(0x1E3779B97F4A7C15)

# An arc of an acyclic lattice. The last state is the only final state
ARC = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),  # > source
        ("label", np.int32),  # column of the log-probs + 1; 0: the arc reads no frame
        ("word", np.int32),  # 0: no word
        ("graph_cost", np.float64),  # includes LM and boosting
        ("acoustic_cost", np.float64),
    ]
)
# An arc of a determinised lattice: one word (0 on arcs to the final state) and any number of labels
WORD_ARC = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("word", np.int32),
        ("graph_cost", np.float64),
        ("acoustic_cost", np.float64),
        ("begin", np.int64),  # its labels are [begin:end] of the label array
        ("end", np.int64),
    ]
)


@compiled
def costs_to_end(arcs, num_states, costs):
    """Return the lowest cost from each state to the final state, [N] int64; costs: [A] int64, cost of each arc."""
    least = np.full(num_states, FAR)
    least[num_states - 1] = 0
    for i in range(len(arcs) - 1, -1, -1):
        least[arcs[i].source] = min(least[arcs[i].source], costs[i] + least[arcs[i].target])
    return least


@compiled
def determinized(lattice, beam, max_states):
    """Determinise a lattice: the result has each word sequence within a beam of the best sequence once.

    Args:
        lattice: CostLattice.
        beam: int64, in units of COST_UNIT.
        max_states: largest number of states to expand. The best word sequence is always completed.

    Returns:
        rows [M, 6] int64: state (in order of discovery), next state or -1 for the final state, word, cost, graph
        cost, string; the first node of each state; parents, labels and lengths of the strings (see `Strings`);
        the beam within which the result is complete.
    """
    strings = Strings({np.int64(0): np.int64(0)}, [np.int64(0)], [np.int64(0)], [np.int64(0)])
    zero, to_end = np.int64(0), lattice.to_end
    subsets = Subsets([zero, np.int64(1)], [(zero, zero, zero, zero)])
    known = {np.int64(0): np.int64(-1)}  # hash -> newest state with that hash
    older = [np.int64(-1)]  # for each state: the previous state with the same hash, or -1
    reached, rest_costs, is_done = [zero], [to_end[0]], [False]
    heap = [(to_end[0], zero)]
    rows = [(zero, zero, zero, zero, zero, zero)]
    limit, expanded = to_end[0] + beam, 0
    paths = Paths(np.full(len(to_end), FAR), np.zeros(len(to_end), np.int64), np.zeros(len(to_end), np.int64))
    while len(heap) > 0:
        total, state = heapq.heappop(heap)
        if is_done[state]:
            continue
        if expanded >= max_states and total > to_end[0]:  # states of the best text have the total to_end[0]
            limit = total - 1
            break
        is_done[state] = True
        expanded += 1
        keys, entries = _next_words(lattice, subsets, state, limit - reached[state], paths, strings)
        order, first = np.argsort(np.array(keys), kind="mergesort"), 1
        while first < len(order):
            word = keys[order[first]] >> 32
            subset, first = _cheapest_paths(keys, entries, order, first)
            if word == 0:  # the final node
                rows.append((state, np.int64(-1), word, subset[0][1], subset[0][2], subset[0][3]))
                continue
            best = subset[0][1] + to_end[subset[0][0]]
            for entry in subset:
                best = min(best, entry[1] + to_end[entry[0]])
            subset = [entry for entry in subset if entry[1] + to_end[entry[0]] <= best + beam]
            cost, graph_cost, prefix = _append_subset(subset, subsets, strings)
            other, is_new = _known_state(subsets, known, older)
            if is_new:
                reached.append(FAR)
                rest_costs.append(best - cost)
                is_done.append(False)
            rows.append((state, other, word, cost, graph_cost, prefix))
            if reached[state] + cost < reached[other]:
                reached[other] = reached[state] + cost
                heapq.heappush(heap, (reached[other] + rest_costs[other], other))
    kept = _rows_within(limit, rows, reached, rest_costs)
    first_nodes = np.empty(len(reached), np.int64)
    for s in range(len(reached)):
        first_nodes[s] = subsets.entries[subsets.begin[s]][0]
    parents, labels, lengths = np.array(strings.parents), np.array(strings.labels), np.array(strings.lengths)
    return kept, first_nodes, parents, labels, lengths, limit - to_end[0]


@compiled
def _next_words(lattice, subsets, state, within, paths, strings):
    """Return the next words of a state: arcs with a word after any number of arcs without a word.

    Args:
        within: largest cost of a path from the state to the end.
        paths: work space; its costs are FAR before and after the call.

    Returns:
        keys, word << 32 | node; the word is 0 if the path reaches the final node without a word;
        (node, cost, graph cost, string) of each key. The first entry of both lists is a placeholder.
    """
    pending = [np.int64(-1)]
    for e in range(subsets.begin[state], subsets.begin[state + 1]):
        node, cost, graph_cost, string = subsets.entries[e]
        paths.costs[node], paths.graph_costs[node], paths.strings[node] = cost, graph_cost, string
        heapq.heappush(pending, node)
    heapq.heappop(pending)
    keys, entries = [np.int64(-1)], [(np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    last = np.int64(-1)
    while len(pending) > 0:
        node = heapq.heappop(pending)
        if node == last:
            continue
        last = node
        if node == len(lattice.to_end) - 1:
            keys.append(node)
            entries.append((node, paths.costs[node], paths.graph_costs[node], paths.strings[node]))
        for i in range(lattice.begin[node], lattice.begin[node + 1]):
            arc = lattice.arcs[i]
            target, cost = np.int64(arc.target), paths.costs[node] + lattice.costs[i]
            graph_cost = paths.graph_costs[node] + lattice.graph_costs[i]
            if cost + lattice.to_end[target] > within:
                continue
            if arc.word == 0 and (cost, graph_cost) >= (paths.costs[target], paths.graph_costs[target]):
                continue
            string = paths.strings[node]
            if arc.label != 0:
                string = _longer(string, np.int64(arc.label), strings)
            if arc.word != 0:
                keys.append((np.int64(arc.word) << 32) | target)
                entries.append((target, cost, graph_cost, string))
                continue
            if paths.costs[target] == FAR:
                heapq.heappush(pending, target)
            paths.costs[target], paths.graph_costs[target], paths.strings[target] = cost, graph_cost, string
        paths.costs[node] = FAR
    return keys, entries


@compiled
def _cheapest_paths(keys, entries, order, first):
    """Return the cheapest path to each node for one word, and the index in `order` where the next word begins.

    Args:
        order: indices that sort the keys.
        first: index in `order` where the word begins.
    """
    word, end = keys[order[first]] >> 32, first + 1
    subset = [entries[order[first]]]
    while end < len(order) and keys[order[end]] >> 32 == word:
        entry = entries[order[end]]
        if subset[-1][0] != entry[0]:
            subset.append(entry)
        elif (entry[1], entry[2]) < (subset[-1][1], subset[-1][2]):
            subset[-1] = entry
        end += 1
    return subset, end


@compiled
def _rows_within(limit, rows, reached, rest_costs):
    """Return the rows that are on paths with a cost of at most `limit`, [M, 6] int64 as in `determinized`.

    Args:
        reached: cost of the best path to each state.
        rest_costs: cost of the best path from each state to the end.
    """
    kept = np.empty((len(rows), 6), np.int64)
    count = 0
    for i in range(1, len(rows)):
        state, other, word, cost, graph_cost, string = rows[i]
        rest = rest_costs[other] if other >= 0 else np.int64(0)
        if reached[state] + cost + rest <= limit:
            kept[count, 0], kept[count, 1], kept[count, 2] = state, other, word
            kept[count, 3], kept[count, 4], kept[count, 5] = cost, graph_cost, string
            count += 1
    return kept[:count].copy()


@compiled
def _append_subset(entries, subsets, strings):
    """Append entries (node, cost, graph cost, string) minus the cheapest costs and the common prefix; return both."""
    cost, graph_cost, prefix = entries[0][1], entries[0][2], entries[0][3]
    for entry in entries:
        if (entry[1], entry[2]) < (cost, graph_cost):
            cost, graph_cost = entry[1], entry[2]
        prefix = _common_prefix(prefix, entry[3], strings)
    for entry in entries:
        string = _without_prefix(entry[3], strings.lengths[prefix], strings)
        subsets.entries.append((entry[0], entry[1] - cost, entry[2] - graph_cost, string))
    subsets.begin.append(np.int64(len(subsets.entries)))
    return cost, graph_cost, prefix


@compiled
def _known_state(subsets, known, older):
    """Return the state of the last subset, and whether it is new. If an older subset is equal, remove the last subset.

    Args:
        known: hash -> newest state with that hash.
        older: for each state, the previous state with the same hash, or -1.
    """
    last = np.int64(len(subsets.begin) - 2)
    begin, end = subsets.begin[last], subsets.begin[last + 1]
    value = np.int64(0)
    for e in range(begin, end):
        for part in subsets.entries[e]:
            value = (value ^ part) * _MIX
            value ^= value >> 29
    newest = known[value] if value in known else np.int64(-1)
    other = newest
    while other >= 0 and not _is_same(subsets, other, last):
        other = older[other]
    if other < 0:
        older.append(newest)
        known[value] = last
        return last, True
    subsets.begin.pop()
    for _ in range(begin, end):
        subsets.entries.pop()
    return other, False


@compiled
def _is_same(subsets, state, other):
    """Return whether the subsets of two states are equal."""
    a, b = subsets.begin[state], subsets.begin[other]
    count = subsets.begin[state + 1] - a
    same = subsets.begin[other + 1] - b == count
    for k in range(count if same else 0):
        same = same and subsets.entries[a + k] == subsets.entries[b + k]
    return same


@compiled
def _longer(string, label, strings):
    """Return the number of a string with one more label; create the string if it is new."""
    key = (string << 32) | label
    if key not in strings.numbers:
        strings.numbers[key] = np.int64(len(strings.parents))
        strings.parents.append(string)
        strings.labels.append(label)
        strings.lengths.append(strings.lengths[string] + 1)
    return strings.numbers[key]


@compiled
def _common_prefix(first, second, strings):
    while first != second:
        if strings.lengths[first] >= strings.lengths[second]:
            first = strings.parents[first]
        else:
            second = strings.parents[second]
    return first


@compiled
def _without_prefix(string, length, strings):
    """Return the number of the string that lacks the first `length` labels of this one."""
    size = strings.lengths[string] - length
    rest = np.empty(size, np.int64)
    while size > 0:
        size -= 1
        rest[size] = strings.labels[string]
        string = strings.parents[string]
    shorter: Any = np.int64(0)
    for label in rest:
        shorter = _longer(shorter, label, strings)
    return shorter


@compiled
def spelled(string, parents, labels, lengths):
    """Return the labels of a string, [n] int32."""
    spelling = np.empty(lengths[string], np.int32)
    for n in range(len(spelling) - 1, -1, -1):
        spelling[n] = labels[string]
        string = parents[string]
    return spelling
