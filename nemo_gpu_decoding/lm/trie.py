"""Store the n-grams of an LM as a trie in flat arrays, filled order by order, and build its automaton.

Node i is an n-gram. The nodes of order 1 come first, then the nodes of order 2, and so on. Within an order, nodes are
sorted by their words, so that the nodes that extend a node lie together, sorted by label. With the words a = 0, b = 1
and the n-grams "a", "b", "a a", "b b", "a a b":

    node      0 (a)  1 (b)  2 (a a)  3 (b b)  4 (a a b)
    labels    0      1      0        1        1
    children  2      3      4        5        5          of node i: children[i] .. children[i + 1]

Packed LMs (`pack.py`) and token-level LMs (`fusion/ngram.py`) have the back-off automaton of a trie. Each node is an
arc of the automaton: it leaves the state of an n-gram's context; its label is the n-gram's last word. `BackoffArcs`
adds the states with their back-offs and the target of each arc, in the layout of `packed.py`. An n-gram is a state if
longer n-grams extend it or if it has a back-off weight. Scores would be equal if all n-grams were states.

Pruning may remove the suffix (all but the first word) of an n-gram. Only the targets of arcs depend on removed
suffixes, because an absent context has back-off weight 0. A context that the file does not list has cost NaN in
the trie; its arc gets the cost of backing off.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked
from nemo_gpu_decoding.lm.arpa import ArpaReader, NGramBlock, read_arpa, without_repetitions
from nemo_gpu_decoding.lm.packed import NO_LABEL, ROOT
from nemo_gpu_decoding.lm.records import LM_STATE

MAX_NGRAMS = (1 << 32) - 1
STAGED = np.dtype([("context", np.uint32), ("label", np.uint32), ("cost", np.float32), ("backoff_cost", np.float32)])


Zeros = Callable[[int, Any], np.ndarray]  # length and type: `np.zeros`


class NGramTrie:
    """The n-grams of orders 1 .. `order`, as costs (negative natural log); node i is an n-gram.

    Add the orders in ascending order: all blocks of an order by `add`, then `close`. Until `close`, an order has two
    mapped copies: the n-grams in the order of the blocks, and sorted n-grams.

    Args:
        counts: number of n-grams of each order. The first is the number of labels: node i of order 1 has
            the label i, and infinite cost until it is added.
        zeros: allocates all arrays.
    """

    def __init__(self, counts: Iterable[int], zeros: Zeros = np.zeros) -> None:
        self.counts = tuple(counts)
        self.first = np.append(0, np.cumsum(self.counts)).tolist()  # nodes of order n: first[n - 1] on
        self.labels = zeros(self.first[-1], np.uint32)
        self.costs = zeros(self.first[-1], np.float32)
        self.backoff_costs = zeros(self.num_inner, np.float32)
        self.children = zeros(self.num_inner + 1, np.uint32)
        self.labels[: self.counts[0]] = np.arange(self.counts[0], dtype=np.uint32)
        self.costs[: self.counts[0]] = np.inf
        for order in range(2, self.order + 1):  # every order is empty until it is added
            self.children[self.first[order - 2] : self.first[order - 1] + 1] = self.first[order - 1]
        self.zeros = zeros
        self._staged = np.zeros(0, STAGED)  # [n-grams of the order that is being added]
        self._extensions = np.zeros(0, np.uint32)  # [contexts] n-grams of that order with each context
        self._added = 0

    @property
    def order(self) -> int:
        return len(self.counts)

    @property
    def num_inner(self) -> int:
        """Return the number of nodes below the highest order, which may have children."""
        return self.first[-2]

    def add(self, block: NGramBlock) -> int:
        """Add n-grams; their symbols are labels.

        Returns:
            the first row whose context (all but its last word) is not in the trie, or -1.
        """
        costs, backoff_costs = _cost(block.log10_probs), _cost(block.log10_backoffs)
        if block.order == 1:
            nodes = block.symbols[:, 0]
            self.costs[nodes] = costs
            if self.order > 1:
                self.backoff_costs[nodes] = backoff_costs
            return -1
        begin, end = self._contexts(block.order)
        if not self._added:
            self._staged = self.zeros(self.counts[block.order - 1], STAGED)
            self._extensions = self.zeros(end - begin, np.uint32)
        rows = self._staged[self._added : self._added + len(block.symbols)]
        rows["cost"], rows["backoff_cost"] = costs, backoff_costs
        self._added += len(rows)
        return find_contexts(self.labels, self.children, block.symbols, rows, self._extensions, begin)

    def close(self, order: int) -> int:
        """Move the n-grams of an order behind their contexts, and sort the n-grams.

        Returns:
            the node of an n-gram that was added twice, or -1.
        """
        if order == 1 or not self._added:
            return -1
        begin, end = self._contexts(order)
        columns = (self.labels, self.costs, self.backoff_costs)
        ends = self.children[begin + 1 : end + 1]
        np.cumsum(self._extensions, dtype=np.uint32, out=ends)
        ends += np.uint32(end)
        self.children[begin] = end
        move_to_contexts(self._staged, self._extensions, self.children, begin, *columns)
        self._staged, self._extensions, self._added = np.zeros(0, STAGED), np.zeros(0, np.uint32), 0
        return int(sort_children(self.children, begin, end, *columns))

    def _contexts(self, order: int) -> tuple[int, int]:
        """Return the range of nodes that have the next lower order."""
        return self.first[order - 2], self.first[order - 1]


def read_trie(reader: ArpaReader, zeros: Zeros, progress: Callable[[], None]) -> NGramTrie:
    """Return all n-grams of an ARPA file.

    Args:
        zeros: allocates the arrays.
        progress: function that is called after each block.
    """
    total = sum(reader.counts.values())
    if total > MAX_NGRAMS:
        raise ValueError(f"{reader.path} has {total} n-grams, expected at most {MAX_NGRAMS}")
    # a line has 6 bytes or more: checked before space is reserved
    least = sum(2 * (order + 1) * count for order, count in reader.counts.items()) - 4 * len(reader.added)
    if not reader.is_compressed and reader.num_bytes < least - 1:
        found = f"its header lists {total} n-grams, but the file has only {reader.num_bytes} bytes"
        raise ValueError(f"{reader.path} is truncated: {found}")
    trie = NGramTrie(reader.counts.values(), zeros)
    if _is_filled(trie, reader.blocks(), reader.symbols, progress, reader.fault):
        return trie
    orders = [without_repetitions(block, str(reader.path)) for block in read_arpa(reader.path, reader.added).orders]
    trie = NGramTrie([len(block.symbols) for block in orders], zeros)
    _is_filled(trie, orders, reader.symbols, progress, lambda row, message: ValueError(f"{reader.path}: {message}"))
    return trie


def _is_filled(
    trie: NGramTrie, ngrams: Iterable[NGramBlock], symbols: Sequence[str], progress: Callable, fault: Callable
) -> bool:
    """Add n-grams, up to the first duplicate; return whether there is none. `fault` makes a row's error."""
    for order, blocks in groupby(ngrams, attrgetter("order")):
        for block in blocks:
            orphan = trie.add(block)
            if orphan >= 0:
                context = " ".join(symbols[label] for label in block.symbols[orphan, :-1])
                raise fault(orphan, f"the context {context!r} is not among the {order - 1}-grams")
            progress()
        if trie.close(order) >= 0:
            return False
    return True


def _cost(log10_weights: np.ndarray) -> np.ndarray:
    """Convert log10 p to -ln p, float32, by a division as in NeMo, because a product rounds differently."""
    return (log10_weights / -np.log10(np.e)).astype(np.float32)


# -- compiled loops -----------------------------------------------------------------------------------


@linked
def find_label(labels, low, end, label):
    """Return the first index in low .. end-1 with labels[index] >= label, else end; labels ascend there."""
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
def move_to_contexts(staged, counts, children, first, labels, costs, backoff_costs):
    """Move staged n-grams to their contexts' children; overwrites `counts`. The highest order has no back-offs."""
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
    """Sort the children of nodes begin .. end-1 by label; return the first n-gram listed twice, or -1."""
    for parent in range(begin, end):
        low, high = np.int64(children[parent]), np.int64(children[parent + 1])
        _sort(low, high, labels, costs, backoff_costs)
        for node in range(low + 1, high):
            if labels[node] == labels[node - 1]:
                return node
    return -1


@compiled
def _sort(low, high, labels, costs, backoff_costs):
    """Sort all columns of nodes low .. high-1 by label with Shell sort, which is fast for nearly sorted nodes."""
    gap = high - low
    while gap > 1:
        gap = max(1, (5 * gap - 1) // 11)
        for node in range(low + gap, high):
            label, cost = labels[node], costs[node]
            backoff_cost = backoff_costs[node] if node < len(backoff_costs) else np.float32(0.0)
            to = node
            while to >= low + gap and labels[to - gap] > label:
                labels[to], costs[to] = labels[to - gap], costs[to - gap]
                if to < len(backoff_costs):
                    backoff_costs[to] = backoff_costs[to - gap]
                to -= gap
            labels[to], costs[to] = label, cost
            if to < len(backoff_costs):
                backoff_costs[to] = backoff_cost


# -------------------------------------------------------------------------------- states and targets


NO_STATE = 0  # in `state_of`: 0 is the root, the empty context
_CHUNK = 1 << 20  # contexts per progress update


class BackoffArcs:
    """The arrays of an LM's automaton; A arcs, S states. `BackoffArcs` takes over the arrays of the `NGramTrie`.

    Args:
        start: the label of <s>, which is always a state, or NO_LABEL.
        progress: called with the number of n-grams linked since the last call, of all possible contexts.
    """

    def __init__(self, trie: NGramTrie, start: int, progress: Callable[[int], None] = lambda ngrams: None) -> None:
        self.counts = trie.counts
        self.labels = trie.labels  # [A] uint32; ascending within a state
        self.costs = trie.costs  # [A] float32
        self.targets = trie.zeros(len(self.labels), np.uint32)  # [A]
        state_of = trie.zeros(trie.num_inner, np.uint32)  # of each n-gram that may be a context
        num_states = number_states(trie.children, trie.backoff_costs, start, state_of)
        self.states = trie.zeros(num_states + 1, LM_STATE)  # as in `PackedArrays`
        enter_states(trie.children, trie.backoff_costs, state_of, self.states, len(self.labels))
        has_start = NO_LABEL != start < len(state_of)  # an LM of 1-grams has no contexts
        self.start_state = int(state_of[start]) if has_start else ROOT
        # n-grams whose suffix (all but the first word) is not listed, see `link`
        self.repaired = self._link(trie, state_of, progress)

    @property
    def num_states(self) -> int:
        return len(self.states) - 1

    def _link(self, trie: NGramTrie, state_of: np.ndarray, progress: Callable[[int], None]) -> int:
        repaired = 0
        words = min(trie.counts[0], len(state_of))  # an LM of 1-grams has no contexts
        self.targets[:words] = state_of[:words]  # of the root's arcs
        arcs = self.labels, self.costs, self.targets
        suffixes = (0, 1)  # range of the states of the order two below; at first the root alone
        for first, end in zip(trie.first[:-2], trie.first[1:-1], strict=True):
            for begin in range(first, end, _CHUNK):
                parents = (begin, min(begin + _CHUNK, end))
                repaired += link(parents, state_of, trie.children, arcs, self.states, suffixes)
                progress(parents[1] - begin)
            suffixes = (suffixes[1], suffixes[1] + int(np.count_nonzero(state_of[first:end])))
        return repaired


@compiled
def number_states(children, backoff_costs, start, state_of):
    """Number the n-grams that are states: those that longer n-grams extend, those with a back-off weight, and `start`.

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
    """Fill all columns of `states`, which are zeros, except `backoff_to`, which `link` fills for longer contexts."""
    for node in range(len(state_of)):
        state = state_of[node]
        if state != NO_STATE:
            states[state].arc_begin = children[node]
            states[state].backoff_cost = backoff_costs[node]
    states[len(states) - 1].arc_begin = num_arcs


@compiled
def link(parents, state_of, children, arcs, states, suffix_states):
    """Set the targets of the arcs from the nodes parents[0] .. parents[1]-1, all of one order n - 1 >= 1.

    Also set the back-offs of the target states, and replace costs that are NaN. Lower orders must be
    linked already. If "h w" is no state, its target is the target of w in the back-off state of h: the
    longest suffix of "h w" that is a state.

    Args:
        suffix_states: the range of states of order n - 2.

    Returns:
        the number of n-grams with a suffix (all but the first word) that is not listed. Such n-grams have the scores
        of an LM that lists the suffix with its backed-off weight.
    """
    labels, costs, targets = arcs
    unlisted = 0
    for parent in range(parents[0], parents[1]):
        if children[parent] == children[parent + 1]:
            continue
        suffix = np.int64(states[state_of[parent]].backoff_to)
        is_listed_parent = suffix_states[0] <= suffix < suffix_states[1]
        low = np.int64(states[suffix].arc_begin)
        for arc in range(children[parent], children[parent + 1]):
            label = np.int64(labels[arc])
            state, place = suffix, label
            if suffix != 0:
                stop = np.int64(states[suffix + 1].arc_begin)
                low = place = find_label(labels, low, stop, label)
                if place == stop or labels[place] != label:
                    state = np.int64(states[suffix].backoff_to)
                    place, _ = _find_backing_off(states, labels, state, label, np.float32(0.0))
            unlisted += not (is_listed_parent and state == suffix)
            if np.isnan(costs[arc]):
                lower, paid = _find_backing_off(states, labels, suffix, label, states[state_of[parent]].backoff_cost)
                costs[arc] = paid + costs[lower]
            target = state_of[arc] if arc < len(state_of) else NO_STATE
            targets[arc] = targets[place] if target == NO_STATE else target
            if target != NO_STATE:
                states[target].backoff_to = targets[place]
    return unlisted


@linked
def _find_backing_off(states, labels, state, label, cost):
    """Find `label` along the back-off chain: return the first arc with it, and `cost` plus the back-offs before it."""
    while state != 0:
        stop = np.int64(states[state + 1].arc_begin)
        place = find_label(labels, np.int64(states[state].arc_begin), stop, label)
        if place < stop and labels[place] == label:
            return place, cost
        cost += states[state].backoff_cost
        state = np.int64(states[state].backoff_to)
    return label, cost
