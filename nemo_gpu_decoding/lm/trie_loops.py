"""The n-grams of an LM as a trie in flat arrays, filled order by order, and its states; compiled.

Node i is an n-gram. The nodes of order 1 come first, in the order of their labels, then those of order
2, and so on; within an order they are sorted by their words, so that the nodes that extend a node lie
together, sorted by label. With the words a = 0, b = 1 and the n-grams "a", "b", "a a", "b b", "a a b":

    node      0 (a)  1 (b)  2 (a a)  3 (b b)  4 (a a b)
    labels    0      1      0        1        1
    children  2      3      4        5        5          of node i: children[i] .. children[i + 1]

The arcs of a packed LM are these nodes: the arc to an n-gram begins in the state of its context.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.jit import compiled, inlined

STAGED = np.dtype(
    [("context", np.uint32), ("label", np.uint32), ("cost", np.float32), ("backoff_cost", np.float32)]
)
NO_STATE = 0  # in `state_of`: state 0 is the root, which is no n-gram


@inlined
def find_label(labels, low, end, label):
    """The first index in labels[low:end], ascending, whose label is not below `label`."""
    while low < end:
        middle = (low + end) >> 1
        if labels[middle] < label:
            low = middle + 1
        else:
            end = middle
    return low


@compiled
def find_contexts(labels, children, ngrams, staged, counts, first):
    """Enter the context of each n-gram and its label in `staged`, and count the n-grams of each context.

    Args:
        ngrams: [M, n >= 2] int32 labels of words.
        counts: one for each node of order n - 1; the first of these nodes is `first`.

    Returns:
        the first row whose context is not listed, or -1.
    """
    size = ngrams.shape[1]
    path = np.zeros(size, np.int64)  # the nodes of the words before the last, from the row before
    for row in range(len(ngrams)):
        is_same = row > 0
        for depth in range(size - 1):
            label = np.int64(ngrams[row, depth])
            is_same = is_same and ngrams[row - 1, depth] == label
            if is_same:
                continue
            if depth == 0:
                path[0] = label
                continue
            begin, end = np.int64(children[path[depth - 1]]), np.int64(children[path[depth - 1] + 1])
            node = find_label(labels, begin, end, label)
            if node == end or labels[node] != label:
                return row
            path[depth] = node
        staged[row].context = path[size - 2] - first
        staged[row].label = ngrams[row, size - 1]
        counts[path[size - 2] - first] += 1
    return -1


@compiled
def count_to_children(counts, children, first, next_node):
    """`children` of the nodes from `first` on, from the number of each one's children."""
    for i in range(len(counts)):
        children[first + i] = next_node
        next_node += counts[i]
    children[first + len(counts)] = next_node


@compiled
def move_to_contexts(staged, counts, children, first, labels, costs, backoff_costs):
    """Move staged n-grams to their contexts' children; uses `counts` up.

    `backoff_costs` ends where the highest order begins, whose n-grams have none.
    """
    for row in range(len(staged)):
        context = np.int64(staged[row].context)
        node = np.int64(children[first + context + 1]) - counts[context]
        counts[context] -= 1
        labels[node] = staged[row].label
        costs[node] = staged[row].cost
        if node < len(backoff_costs):
            backoff_costs[node] = staged[row].backoff_cost


@compiled
def sort_children(children, begin, end, labels, costs, backoff_costs):
    """Sort the children of nodes begin .. end-1 by label; the first n-gram listed twice, or -1."""
    for parent in range(begin, end):
        low, high = np.int64(children[parent]), np.int64(children[parent + 1])
        _sort(low, high, labels, costs, backoff_costs)
        for node in range(low + 1, high):
            if labels[node] == labels[node - 1]:
                return node
    return -1


@compiled
def _sort(low, high, labels, costs, backoff_costs):
    """Shell sort of nodes low .. high-1 by label, all columns along; quick where they are in order."""
    gap = high - low
    while gap > 1:
        gap = max(1, (5 * gap - 1) // 11)
        for node in range(low + gap, high):
            label, cost = labels[node], costs[node]
            backoff_cost = backoff_costs[node] if node < len(backoff_costs) else np.float32(0.0)
            to = node
            while to >= low + gap and labels[to - gap] > label:
                _move(to - gap, to, labels, costs, backoff_costs)
                to -= gap
            labels[to], costs[to] = label, cost
            if to < len(backoff_costs):
                backoff_costs[to] = backoff_cost


@inlined
def _move(node, to, labels, costs, backoff_costs):
    labels[to], costs[to] = labels[node], costs[node]
    if to < len(backoff_costs):
        backoff_costs[to] = backoff_costs[node]


@compiled
def number_states(children, backoff_costs, start, state_of):
    """Number the n-grams that are states: extended ones, ones with a back-off weight, and `start`.

    Returns:
        the number of states, the root included.
    """
    count = 1
    for node in range(len(state_of)):
        is_state = children[node + 1] > children[node] or backoff_costs[node] != 0 or node == start
        state_of[node] = count if is_state else NO_STATE
        count += is_state
    return count


@compiled
def enter_states(children, backoff_costs, state_of, states, num_arcs):
    """Fill `states` but for `backoff_to`, which `link` does."""
    states[0].arc_begin = 0
    states[0].backoff_to = 0
    states[0].backoff_cost = 0.0
    for node in range(len(state_of)):
        state = state_of[node]
        if state != NO_STATE:
            states[state].arc_begin = children[node]
            states[state].backoff_cost = backoff_costs[node]
    states[len(states) - 1].arc_begin = num_arcs
    states[len(states) - 1].backoff_to = 0
    states[len(states) - 1].backoff_cost = 0.0


@compiled
def link_words(state_of, num_words, states, targets):
    """Targets of the arcs of the root, which are the 1-grams."""
    for node in range(num_words):
        state = state_of[node] if node < len(state_of) else NO_STATE
        targets[node] = state
        states[state].backoff_to = 0


@compiled
def link(begin, end, state_of, children, labels, states, targets, suffix_states):
    """Targets of the arcs out of nodes begin .. end-1, all of one order n - 1 >= 1, and the back-offs of
    the states they lead to. Lower orders must be linked already.

    The longest suffix of "h w" that is a state is what the LM gets to by reading w in the back-off
    state of h: either "h w" itself is a state, or one looks there.

    Args:
        suffix_states: the range of states of order n - 2.

    Returns:
        how many of the n-grams have a suffix (the n-gram without its first word) that is not listed.
        These n-grams are bridged: scores are those of an LM that lists it with its backed-off weight.
    """
    unlisted = 0
    for parent in range(begin, end):
        if children[parent] == children[parent + 1]:
            continue
        suffix = np.int64(states[state_of[parent]].backoff_to)
        is_listed_parent = suffix_states[0] <= suffix < suffix_states[1]
        low = np.int64(states[suffix].arc_begin)
        for arc in range(children[parent], children[parent + 1]):
            label = np.int64(labels[arc])
            state, found = suffix, label
            if suffix != 0:
                stop = np.int64(states[suffix + 1].arc_begin)
                low = found = find_label(labels, low, stop, label)
                if found == stop or labels[found] != label:
                    state = np.int64(states[suffix].backoff_to)
                    found = _find_backing_off(states, labels, state, label)
            unlisted += not (is_listed_parent and state == suffix)
            own = state_of[arc] if arc < len(state_of) else NO_STATE
            targets[arc] = targets[found] if own == NO_STATE else own
            if own != NO_STATE:
                states[own].backoff_to = targets[found]
    return unlisted


@inlined
def _find_backing_off(states, labels, state, label):
    """The arc with `label` in the first state of the chain of back-offs that has one."""
    while state != 0:
        stop = np.int64(states[state + 1].arc_begin)
        found = find_label(labels, np.int64(states[state].arc_begin), stop, label)
        if found < stop and labels[found] == label:
            return found
        state = np.int64(states[state].backoff_to)
    return label
