"""Determinisation of an acyclic lattice: of all paths with the same words, the cheapest one [Povey et al. 2012].

A state of the result is a subset: nodes of the lattice that the same words lead to, each with what it costs more
than the cheapest of them and with the labels read since the labels that all have in common. Example: "a" leads to
node 4 at cost 2.0 over the labels 1 1 2, and to node 5 at cost 2.5 over 1 2. An arc with the word "a", the cost 2.0
and the label 1 leads to the subset {(4, 0.0, 1 2), (5, 0.5, 2)}; where the same subset is reached after other
words, it is the same state.

States are expanded in the order of the cost of the best path through them, which is known: costs to the end are
those of the lattice. So every state has its final cost when its turn comes, nothing beyond the beam is ever made,
and what stands when the search ends early is all that is within a narrower beam. Costs are integers, in units of
2**-24: sums do not depend on their order, and equal subsets are equal.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled


class Strings(NamedTuple):
    """Sequences of labels, each a label after another string; string 0 is the empty one."""

    numbers: Any  # parent << 32 | label -> string
    parents: Any  # lists of int64
    labels: Any
    lengths: Any


class Subsets(NamedTuple):
    """The nodes of all states, one state after the other; lists of int64."""

    begin: Any  # where the nodes of each state begin
    nodes: Any
    costs: Any  # above those of the cheapest node of the state
    graph_costs: Any
    strings: Any  # labels that the nodes of the state have not in common


class CostLattice(NamedTuple):
    """A lattice with the costs of its arcs."""

    arcs: Any  # [A] ARC, sorted by source
    begin: Any  # [N + 1], where the arcs of each state begin
    costs: Any  # [A] int64
    graph_costs: Any  # [A] int64, part of these
    to_end: Any  # [N] int64, see `costs_to_end`


class Paths(NamedTuple):
    """The cheapest path to each of the N nodes of a lattice; int64."""

    costs: Any  # FAR where there is none
    graph_costs: Any
    strings: Any


COST_UNIT = 1.0 / (1 << 24)
FAR = np.int64(1) << 60
_MIX = np.int64(0x1E3779B97F4A7C15)

# An arc of an acyclic lattice with one final state, the last
ARC = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),  # > source
        ("label", np.int32),  # column of the log-probs + 1; 0: no frame is read
        ("word", np.int32),  # 0 for none
        ("graph_cost", np.float64),  # with LM and boosting
        ("acoustic_cost", np.float64),
    ]
)
# The same with a word (0 on arcs to the final state) and all labels that are read meanwhile
WORD_ARC = np.dtype(
    [
        ("source", np.int32),
        ("target", np.int32),
        ("word", np.int32),
        ("graph_cost", np.float64),
        ("acoustic_cost", np.float64),
        ("begin", np.int64),  # of its labels
        ("end", np.int64),
    ]
)


@compiled
def costs_to_end(arcs, num_states, costs):
    """costs [A] int64, of each arc; least cost from each state to the final one, [N] int64."""
    least = np.full(num_states, FAR)
    least[num_states - 1] = 0
    for i in range(len(arcs) - 1, -1, -1):
        least[arcs[i].source] = min(least[arcs[i].source], costs[i] + least[arcs[i].target])
    return least


@compiled
def closest_words(arcs, num_states, reference):
    """The words of the path with the fewest word errors against a reference.

    Args:
        arcs: [A] ARC, sorted by source.
        num_states: N.
        reference: [Q] int32 words; those that the lattice does not know are below 0.
    """
    size, skip = len(reference) + 1, np.int32(-2)
    errors, last = np.full((num_states, size), np.int32(1 << 30)), np.full((num_states, size), skip)
    errors[0] = np.arange(size)  # against the first q words of the reference
    for i in range(len(arcs) + 1):
        source = arcs[i].source if i < len(arcs) else num_states - 1
        if i == 0 or i == len(arcs) or source != arcs[i - 1].source:
            for q in range(1, size):  # all arcs to this state are done: a word of the reference may be left out
                if errors[source, q - 1] + 1 < errors[source, q]:
                    errors[source, q], last[source, q] = errors[source, q - 1] + 1, skip
        if i == len(arcs):
            break
        target, word = arcs[i].target, arcs[i].word
        for q in range(size):
            count = errors[source, q] + (word != 0)
            if word != 0 and q > 0:
                count = min(count, errors[source, q - 1] + (word != reference[q - 1]))
            if count < errors[target, q]:
                errors[target, q], last[target, q] = count, i
    words = [np.int32(0)]
    state, q = np.int64(num_states - 1), size - 1
    while state != 0 or q != 0:
        i = last[state, q]
        if i == skip:
            q -= 1
            continue
        word, source = arcs[i].word, arcs[i].source
        if word != 0:
            words.append(word)
            if q > 0 and errors[state, q] == errors[source, q - 1] + (word != reference[q - 1]):
                q -= 1
        state = np.int64(source)
    return np.array(words)[:0:-1].copy()


@compiled
def determinized(lattice, beam, max_states):
    """All word sequences within a beam of the best, each once.

    Args:
        lattice: CostLattice.
        beam: int64.
        max_states: to expand.

    Returns:
        rows [M, 6] int64: state (by order of discovery), next state or -1 for the final one, word, cost, graph
        cost, string; the first node of each state; parents, labels and lengths of strings, each a label after
        another string, 0 being the empty one; the beam within which all is there.
    """
    strings = Strings({np.int64(0): np.int64(0)}, [np.int64(0)], [np.int64(0)], [np.int64(0)])
    zero, to_end = np.int64(0), lattice.to_end
    subsets = Subsets([zero, np.int64(1)], [zero], [zero], [zero], [zero])
    known = {np.int64(0): np.int64(-1)}  # hash -> the newest state with it
    older = [np.int64(-1)]  # of each state, the one before with its hash
    reached, rest_costs, is_done = [zero], [to_end[0]], [False]
    heap = [(to_end[0], zero)]
    rows = [(zero, zero, zero, zero, zero, zero)]
    limit, expanded = to_end[0] + beam, 0
    paths = Paths(np.full(len(to_end), FAR), np.zeros(len(to_end), np.int64), np.zeros(len(to_end), np.int64))
    while len(heap) > 0:
        total, state = heapq.heappop(heap)
        if is_done[state]:
            continue
        if expanded >= max_states and total > to_end[0]:  # never before the best text is there
            limit = total - 1
            break
        is_done[state] = True
        expanded += 1
        keys, found = _next_words(lattice, subsets, state, limit - reached[state], paths, strings)
        order, first = np.argsort(np.array(keys), kind="mergesort"), 1
        while first < len(order):
            word = keys[order[first]] >> 32
            subset, first = _cheapest_paths(keys, found, order, first)
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
        first_nodes[s] = subsets.nodes[subsets.begin[s]]
    parents, labels, lengths = np.array(strings.parents), np.array(strings.labels), np.array(strings.lengths)
    return kept, first_nodes, parents, labels, lengths, limit - to_end[0]


@compiled
def _next_words(lattice, subsets, state, within, paths, strings):
    """The arcs with a word that follow a state, after any number of arcs without one.

    Args:
        within: the most that a path may cost from the state to the end.
        paths: all FAR; left so.

    Returns:
        keys, word << 32 | node, with the word 0 for the final node if it is reached without a word; and
        (node, cost, graph cost, string) for each. The first of both is none.
    """
    pending = [np.int64(-1)]
    for e in range(subsets.begin[state], subsets.begin[state + 1]):
        node = subsets.nodes[e]
        paths.costs[node], paths.graph_costs[node] = subsets.costs[e], subsets.graph_costs[e]
        paths.strings[node] = subsets.strings[e]
        heapq.heappush(pending, node)
    heapq.heappop(pending)
    keys, found = [np.int64(-1)], [(np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    last = np.int64(-1)
    while len(pending) > 0:
        node = heapq.heappop(pending)
        if node == last:
            continue
        last = node
        if node == len(lattice.to_end) - 1:
            keys.append(node)
            found.append((node, paths.costs[node], paths.graph_costs[node], paths.strings[node]))
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
                found.append((target, cost, graph_cost, string))
                continue
            if paths.costs[target] == FAR:
                heapq.heappush(pending, target)
            paths.costs[target], paths.graph_costs[target], paths.strings[target] = cost, graph_cost, string
        paths.costs[node] = FAR
    return keys, found


@compiled
def _cheapest_paths(keys, found, order, first):
    """Of what follows with one word, the cheapest path to each node; and where the next word begins.

    Args:
        order: of the keys.
        first: where the word begins in it.
    """
    word, end = keys[order[first]] >> 32, first + 1
    subset = [found[order[first]]]
    while end < len(order) and keys[order[end]] >> 32 == word:
        entry = found[order[end]]
        if subset[-1][0] != entry[0]:
            subset.append(entry)
        elif (entry[1], entry[2]) < (subset[-1][1], subset[-1][2]):
            subset[-1] = entry
        end += 1
    return subset, end


@compiled
def _rows_within(limit, rows, reached, rest_costs):
    """[M, 6] int64, see `determinized`: the arcs on paths that cost `limit` at most; rows[0] is none.

    Args:
        reached: cost of the best path to each state.
        rest_costs: cost of the best one from there to the end.
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
    """Append nodes (node, cost, graph cost, string) to the subsets, less what all have in common: that is returned."""
    cost, graph_cost, prefix = entries[0][1], entries[0][2], entries[0][3]
    for entry in entries:
        if (entry[1], entry[2]) < (cost, graph_cost):
            cost, graph_cost = entry[1], entry[2]
        prefix = _common_prefix(prefix, entry[3], strings)
    for entry in entries:
        subsets.nodes.append(entry[0])
        subsets.costs.append(entry[1] - cost)
        subsets.graph_costs.append(entry[2] - graph_cost)
        subsets.strings.append(_without_prefix(entry[3], strings.lengths[prefix], strings))
    subsets.begin.append(np.int64(len(subsets.nodes)))
    return cost, graph_cost, prefix


@compiled
def _known_state(subsets, known, older):
    """The state with the last subset, which is taken away where an older one is the same; and whether it is new.

    Args:
        known: hash -> the newest state with it.
        older: of each state, the one before with its hash, or -1.
    """
    last = np.int64(len(subsets.begin) - 2)
    begin, end = subsets.begin[last], subsets.begin[last + 1]
    value = np.int64(0)
    for e in range(begin, end):
        for part in (subsets.nodes[e], subsets.costs[e], subsets.graph_costs[e], subsets.strings[e]):
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
        subsets.nodes.pop()
        subsets.costs.pop()
        subsets.graph_costs.pop()
        subsets.strings.pop()
    return other, False


@compiled
def _is_same(subsets, state, other):
    """Whether two states have the same subset."""
    a, b = subsets.begin[state], subsets.begin[other]
    count = subsets.begin[state + 1] - a
    same = subsets.begin[other + 1] - b == count
    for k in range(count if same else 0):
        same = same and subsets.nodes[a + k] == subsets.nodes[b + k] and subsets.costs[a + k] == subsets.costs[b + k]
        same = same and subsets.graph_costs[a + k] == subsets.graph_costs[b + k]
        same = same and subsets.strings[a + k] == subsets.strings[b + k]
    return same


@compiled
def _longer(string, label, strings):
    """The number of a string and one label more."""
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
    """A string without its first labels."""
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
    """The labels of a string."""
    found = np.empty(lengths[string], np.int32)
    for n in range(len(found) - 1, -1, -1):
        found[n] = labels[string]
        string = parents[string]
    return found
