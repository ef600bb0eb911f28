"""Store the token groups of earlier frames as nodes, with `composition: let` [LET, III-A].

A node is a token of the base search (graph state, boosting state, last label) in one frame: a token group
of [LET]. A new node has links back to its predecessors, and no LM contexts. Example, with two contexts
after the words "a" and "b" at node 0:

    node  0 (expanded)       1 (blank)    2 ("hel")    3 ("hel" again, or from 1)
    links -                  to 0         to 0         to 2 at cost 0, to 1 at cost 0.7
    contexts a 0.0, b 1.5    -            -            -

When the search emits "hello" at node 3, `expand` follows the links back to expanded nodes (0). `expand` fills nodes 1,
2 and 3 with the contexts a and b, their costs, and back-pointers for "hel". Costs of contexts are relative to the
best context of their node, and costs of links to the best way to their node. So the expansion does not change
the cost of a node (the group is alpha-stable), and the time of the expansion does not matter. The expansion
leaves out contexts above the beam in the frame of a node.

Two other kinds of nodes represent steps within a frame. Nodes with JOIN_MOVE links are tokens that meet in a graph
state after closure arcs. Nodes after a word (`let_groups.py`) are expanded from the start. The number of a node is
higher than the numbers of the nodes that it links to. `let_engine.py` drops nodes that no token leads to.
"""

from typing import Any, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.candidates import fill_slot
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, is_dominated
from nemo_gpu_decoding.search.word_graph.prune import label_read, move_of, take_step

ARENA_FULL = 101  # status of a frame: collect nodes, or grow their arrays, and go on at the same frame
FEW = 16  # up to this many contexts, a linear search replaces the hash table

# Values of `arc` in links within a frame. JOIN_MOVE: a token joins others in a graph state.
JOIN_MOVE = -3
# Links with LM queries, kept for lattices only. CLOSURE_WORD: the word of the closure arc. ARC_WORD or less: the word
# of arc number ARC_WORD - (this value), after the word of the closure arc if it has one.
CLOSURE_WORD, ARC_WORD = -4, -5
BEST_ONLY = np.float32(-1)  # `most` of a link that only the best context has taken

NODE = np.dtype(
    [
        ("key", np.int64),
        ("cost", np.float32),  # of its best context, relative to the best token of the frame
        ("frame", np.int32),
        ("newest", np.int32),  # its newest link, or NONE
        ("begin", np.int32),  # number of its first context; NONE: not expanded
        ("count", np.int32),  # number of its contexts
    ],
    align=True,
)
NODE_LINK = np.dtype(
    [
        ("node", np.int32),  # node before the link
        ("next", np.int32),  # next link to the same node, or NONE
        ("arc", np.int32),  # of the graph, or a move: BLANK_MOVE, REPEAT_MOVE, or one within a frame
        ("epsilon", np.int32),  # closure arc before the arc; NONE: the context's `epsilon` applies
        ("cost", np.float32),  # relative to the best way to the node; before a word, without the word's difference
        ("log_prob", np.float32),  # of the label that the arc reads; before a word `most`: contexts whose cost
        # relative to their node is higher did not query the LMs
    ]
)
NODE_CONTEXT = np.dtype(
    [
        ("lm", np.int64),
        ("cost", np.float32),  # relative to the node
        ("back_pointer", np.int32),  # during the expansion: the link, or the context before a word
        ("run", np.int32),  # during the expansion: the context before the link, or the group's member
        ("probability", np.float32),
        ("epsilon", np.int32),  # closure arc since the last frame, or NONE
        ("number", np.int32),  # among the tokens of its frame in the links of a lattice; NONE: no link yet
    ],
    align=True,
)
LET_COUNTERS = np.dtype([("nodes", np.int64), ("contexts", np.int64), *LM_COUNTERS.descr])


class NodeArrays(NamedTuple):
    """The nodes of an utterance's search; the `back_pointer` of a token is a node.

    The expansion of a node fills the node in place, with contexts beyond `counters.contexts`. Only an expansion
    changes existing entries of `nodes`; `let_engine.forget_contexts` undoes it.
    """

    counters: np.ndarray  # [1] LET_COUNTERS
    back_pointers: np.ndarray  # [capacity] BACK_POINTER
    links: np.ndarray  # [capacity] NODE_LINK
    nodes: np.ndarray  # [capacity] NODE
    contexts: np.ndarray  # [capacity] NODE_CONTEXT


class Past(NamedTuple):
    """The fields that `move_of` reads of the token before a step."""

    key: np.int64
    back_pointer: np.int32


@linked
def has_room(nodes, links, contexts, state):
    counters = state.counters[0]
    return (
        counters.nodes + nodes <= len(state.nodes)
        and counters.links + links <= len(state.links)
        and counters.contexts + contexts < len(state.contexts)  # one spare: `limit_contexts` exchanges two
    )


@linked
def new_node(key, cost, state):
    counters = state.counters[0]
    n = np.int32(counters.nodes)
    counters.nodes += 1
    node = state.nodes[n]
    node.key, node.cost, node.frame, node.newest, node.begin = key, cost, counters.frames, keys.NONE, keys.NONE
    return n


@linked
def add_link(n, source, arc, epsilon, cost, log_prob, state):
    counters = state.counters[0]
    link = state.links[counters.links]
    link.node, link.next, link.arc, link.epsilon = source, state.nodes[n].newest, arc, epsilon
    link.cost, link.log_prob = cost, log_prob
    state.nodes[n].newest = counters.links
    counters.links += 1


@linked
def is_within(n, state):
    """Return whether a node represents a step within a frame, or False if it has no links."""
    newest = state.nodes[n].newest
    return newest != keys.NONE and state.links[newest].arc <= JOIN_MOVE


# --------------------------------------------------------------------------------------- expansion


@linked
def expand(root, state, search, lm, work):
    """Fill a node, and all unexpanded nodes that lead to it, with contexts [LET, III-A].

    Returns:
        DONE; ARENA_FULL or GROUPS_FULL after a partial expansion: the caller grows the arrays or the workspace and
        calls again.
    """
    nodes, links, stack = state.nodes, state.links, work.lm.stack
    if nodes[root].begin != keys.NONE:
        return keys.DONE
    stack[0], depth = root, 1
    while depth > 0:
        n = stack[depth - 1]
        if nodes[n].begin != keys.NONE:
            depth -= 1
            continue
        total, ready, at = 0, True, nodes[n].newest
        while at != keys.NONE:
            source = links[at].node
            if nodes[source].begin != keys.NONE:
                total += nodes[source].count
            elif depth == len(stack):
                return keys.GROUPS_FULL
            else:
                stack[depth], ready = source, False
                depth += 1
            at = links[at].next
        if ready:
            status = _fill(n, total, state, search, lm, work)
            if status != keys.DONE:
                return status
            depth -= 1
    return keys.DONE


@linked
def _fill(n, total, state, search, lm, work):
    """Fill a node with the recombined contexts of all nodes before it, `total` contexts in all."""
    counters, contexts, links, node = state.counters[0], state.contexts, state.links, state.nodes[n]
    if not has_room(0, 0, total, state) or counters.back_pointers + total > len(state.back_pointers):
        return ARENA_FULL
    if not begin_merge(total, work):
        return keys.GROUPS_FULL
    begin, count, at = counters.contexts, 0, node.newest
    is_joined, single = links[at].arc == JOIN_MOVE, links[at].next == keys.NONE
    most = most_above(n, state, search)
    while at != keys.NONE:
        link = links[at]
        source = state.nodes[link.node]
        for c in range(source.begin, source.begin + source.count):
            cost = contexts[c].cost + link.cost
            if cost > most and cost > 0:
                continue
            index = count if single else number_of(contexts[c].lm, begin, count, total, state, work)
            context = contexts[begin + index]
            if (
                index == count
                or cost < context.cost
                or (cost == context.cost and _is_before(at, c, context.back_pointer, context.run, state))
            ):
                context.lm, context.cost, context.back_pointer, context.run = contexts[c].lm, cost, at, c
            count += index == count
        at = link.next
    count = limit_contexts(begin, without_dominated(begin, count, search, lm, state), lm, state)
    for i in range(begin, begin + count):
        _add_back_pointer(contexts[i], node, state, search)
    node.begin, node.count = begin, count
    counters.contexts += count
    if not is_joined:
        counters.expanded += count
    return keys.DONE


@linked
def most_above(n, state, search):
    """Return the highest cost, relative to the node, of a context in the beam. The beam always has the best context.

    The bound is infinite within a frame, and after a blank alone: without a lattice, no node is made there.
    """
    link = state.links[state.nodes[n].newest]
    is_open = link.arc == JOIN_MOVE or (link.arc == keys.BLANK_MOVE and link.next == keys.NONE)
    return np.float32(np.inf) if is_open else search.params.beam - state.nodes[n].cost


@linked
def _is_before(at, c, other_at, other_c, state):
    """Return whether the first of two ways to one context precedes the other one at the same cost.

    The order is by arc, key of the source, frame of the source and closure arcs, so it does not depend on the order of
    work.
    """
    link, other = state.links[at], state.links[other_at]
    if link.arc != other.arc:
        return link.arc < other.arc
    key, other_key = state.nodes[link.node].key, state.nodes[other.node].key
    if key != other_key:
        return key < other_key
    frame, other_frame = state.nodes[link.node].frame, state.nodes[other.node].frame
    if frame != other_frame:  # the key does not show a blank since then, see `let.py`
        return frame < other_frame
    if link.epsilon != other.epsilon:
        return link.epsilon < other.epsilon
    return state.contexts[c].epsilon < state.contexts[other_c].epsilon


@linked
def _add_back_pointer(context, node, state, search):
    """Copy the past of a context from its source, and add a back-pointer if the context has a new label."""
    link, source = state.links[context.back_pointer], state.contexts[context.run]
    epsilon = link.epsilon if link.epsilon != keys.NONE else source.epsilon
    context.epsilon = epsilon if link.arc == JOIN_MOVE else np.int32(keys.NONE)
    context.number = keys.NONE
    is_blank, probability = label_read(link.arc, node.key, search) == search.params.blank_id, np.float32(0.0)
    if not is_blank:  # in double precision, so that libraries and devices agree to the last bit of float32
        probability = np.float32(np.exp(np.float64(link.log_prob)))
    past = Past(state.nodes[link.node].key, source.back_pointer)
    move = move_of(link.arc, epsilon, past, state, search)
    take_step(context, source, move, (link.arc, epsilon, node.frame, probability, is_blank), state)


# ---------------------------------------------------------------------------------------- contexts


@linked
def best_context(node, contexts):
    """Return the number of a node's cheapest context."""
    best = node.begin
    for n in range(node.begin + 1, node.begin + node.count):
        if _is_cheaper(contexts[n], contexts[best]):
            best = n
    return best


@linked
def _is_cheaper(context, other):
    return context.cost < other.cost or (context.cost == other.cost and context.lm < other.lm)


@linked
def without_dominated(begin, count, search, lm, state):
    """Drop, of `count` contexts from `begin` on, those that the cheapest dominates; return the remaining number."""
    contexts, best = state.contexts, begin
    for n in range(begin + 1, begin + count):
        best = n if contexts[n].cost < contexts[best].cost else best
    least, context, kept = contexts[best].cost, contexts[best].lm, begin
    for n in range(begin, begin + count):
        if not is_dominated(contexts[n].cost - least, context, contexts[n].lm, search, lm):
            if kept != n:
                contexts[kept] = contexts[n]
            kept += 1
    return kept - begin


@linked
def limit_contexts(begin, count, lm, state):
    """Keep the `group_size` cheapest of `count` contexts from `begin` on; return the number of contexts kept."""
    contexts, spare = state.contexts, len(state.contexts) - 1
    if count <= lm.group_size:
        return count
    for first in range(begin, begin + lm.group_size):
        best = first
        for n in range(first + 1, begin + count):
            if _is_cheaper(contexts[n], contexts[best]):
                best = n
        contexts[spare] = contexts[first]
        contexts[first] = contexts[best]
        contexts[best] = contexts[spare]
    return lm.group_size


# -------------------------------------------------------------------------------------- hash table


@linked
def begin_merge(total, work):
    """Empty the hash table and size it for `total` contexts; return False if the table is too small."""
    size: Any = 4 * FEW
    if total > FEW:
        while size < 2 * total:
            size *= 2
        work.stamps[2] += 1
    if size > len(work.lm.context_slots):
        return False
    work.frame[0].context_mask = size - 1
    return True


@linked
def number_of(lm, begin, count, total, state, work):
    """Return the number, counted from `begin`, of the context with this LM context; `count` if there is none."""
    contexts, number = state.contexts, count
    if total <= FEW:
        for n in range(count):
            if contexts[begin + n].lm == lm:
                number = n
                break
        return number
    slots, stamp, mask = work.lm.context_slots, work.stamps[2], np.uint64(work.frame[0].context_mask)
    at = (keys.hash_of(0, lm) >> keys.SLOT_SHIFT) & mask
    while slots[at].stamp == stamp and contexts[begin + slots[at].entry].lm != lm:
        at = (at + np.uint64(1)) & mask
    if slots[at].stamp == stamp:
        return np.int64(slots[at].entry)
    fill_slot(slots, at, stamp, count)
    return number
