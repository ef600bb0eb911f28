"""List the links between LM contexts of composition "let" when a result needs a lattice [LET, III-A].

The search keeps links between token groups. A way from a context of one frame to a context of the next is a chain of
one to three such links:

    from a node of the frame before                    to a node of the frame, by an arc, a blank or a repeat
    ... to a token group (JOIN_MOVE)                   by an arc without a word
    ... to contexts after closure arcs (CLOSURE_WORD)  by an arc
    ... to one of these, to contexts after a word      by the arc with that word (ARC_WORD)

`more_links` lists the ways to expanded nodes before the search drops these links. `links_to_ends` lists the ways to
the remaining nodes. Both functions go from the last frame back. The cost of a way is the cost of the best path
through it, relative to the best path. The future cost of live contexts is unknown, so each live context may be on the
best path. Ways beyond the lattice beam are left out. The result equals the links that composition "lazy" keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.search.word_graph import keys, records
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.candidates import boosted
from nemo_gpu_decoding.search.word_graph.large_lm import let_nodes
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LmScorer, query
from nemo_gpu_decoding.search.word_graph.prune import label_read, move_of

ROUNDING = 1e-4  # error bound of costs relative to a node
SLACK = 5e-3  # added to the lattice beam, for sums of such costs; `lattice_of` prunes exactly


class LatticeLinks(NamedTuple):
    """The links of a stream's lattice that are listed so far."""

    links: tuple[np.ndarray, ...]  # arrays of LINK
    sizes: np.ndarray  # [frames + 2 or fewer] int32, numbered tokens of each frame


class Reached(NamedTuple):
    """The LM contexts and links of the lattice that `list_links` has reached."""

    extra: np.ndarray  # [contexts] float64, cost of the best path through it above the best path; inf: no path
    links: np.ndarray  # [capacity] LINK; source and target are contexts
    total: np.ndarray  # [1] int64, number of links, including links beyond the capacity


Models = tuple[records.Search, LmScorer | None]


def more_links(
    state: let_nodes.NodeArrays, tokens: np.ndarray, lattice: LatticeLinks, models: Models, work: records.Workspace
) -> tuple[let_nodes.NodeArrays, LatticeLinks]:
    """List the ways to all expanded nodes that lead to a context from which the search may go on.

    Returns:
        the arrays with numbered contexts; the lattice with the new links.
    """
    extra = np.full(len(state.contexts), np.inf)
    reach_live(tokens, state, extra)
    links = _listed(state, extra, models, work)
    contexts, numbers, sizes = state.contexts.copy(), state.contexts["number"].copy(), _sizes(lattice, state)
    number_links(links, numbers, sizes)
    contexts["number"] = numbers
    return state._replace(contexts=contexts), LatticeLinks((*lattice.links, links), sizes)


def links_to_ends(
    state: let_nodes.NodeArrays,
    listed: np.ndarray,
    extra: np.ndarray,
    lattice: LatticeLinks,
    models: Models,
    work: records.Workspace,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the links of a lattice and the tokens at its end.

    Args:
        state: the stream's arrays; all nodes that lead to the ends are expanded.
        listed: [L] LM_TOKEN of `list_ends`; `source` is the number of the context.
        extra: [L] float64, cost of the best path to this end above the best path; inf: not an end.

    Returns:
        [n] LINK, sorted by frame; [m] LM_TOKEN, with infinite cost for tokens that `listed` lacks.
    """
    contexts, numbers, sizes = listed["source"], state.contexts["number"].copy(), _sizes(lattice, state)
    costs = np.full(len(state.contexts), np.inf)
    costs[contexts] = extra
    links = _listed(state, costs, models, work)
    frames = int(state.counters["frames"][0])
    new = contexts[numbers[contexts] == keys.NONE]
    numbers[new] = np.arange(sizes[frames], sizes[frames] + len(new))
    sizes[frames] += len(new)
    number_links(links, numbers, sizes)
    tokens = np.zeros(sizes[frames], records.LM_TOKEN)
    tokens["cost"], tokens["back_pointer"] = np.inf, keys.NONE
    tokens[numbers[contexts]] = listed
    links = concatenated([*lattice.links, links])
    return links[np.argsort(links["frame"], kind="stable")], tokens


def _sizes(lattice: LatticeLinks, state: let_nodes.NodeArrays) -> np.ndarray:
    sizes = np.zeros(int(state.counters["frames"][0]) + 2, np.int32)
    sizes[: len(lattice.sizes)] = lattice.sizes[: len(sizes)]
    return sizes


def _listed(state: let_nodes.NodeArrays, extra: np.ndarray, models: Models, work: records.Workspace) -> np.ndarray:
    """Return the links from context to context, [n] LINK."""
    capacity = 4 * int(state.counters["links"][0]) + 64
    while True:
        reached = Reached(extra.copy(), np.empty(capacity, records.LINK), np.zeros(1, np.int64))
        list_links(state, reached, models, work)
        if (count := int(reached.total[0])) <= capacity:
            return reached.links[:count].copy()
        capacity = count


@linked
def is_open(n, state, keeps_links):
    """Return whether the nodes before this one are still needed: it is not expanded, or a lattice needs its links."""
    return state.nodes[n].begin == keys.NONE or (keeps_links and let_nodes.is_within(n, state))


@linked
def mark_live(tokens, state, marks, keeps_links):
    """Set `marks` [nodes] to 1 for live nodes: from the nodes of the tokens back to expanded nodes."""
    links = state.links
    for i in range(len(tokens)):
        marks[tokens[i].back_pointer] = 1
    for n in range(state.counters[0].nodes - 1, -1, -1):
        at = state.nodes[n].newest if marks[n] == 1 and is_open(n, state, keeps_links) else np.int32(keys.NONE)
        while at != keys.NONE:
            marks[links[at].node] = 1
            at = links[at].next


@compiled
def reach_live(tokens, state, extra):
    """Set `extra` [contexts] to 0 for the contexts of the expanded nodes at which `mark_live` stops."""
    marks = np.zeros(state.counters[0].nodes, np.int32)
    mark_live(tokens, state, marks, True)
    for n in range(len(marks)):
        node = state.nodes[n]
        if marks[n] == 1 and not is_open(n, state, True):
            extra[node.begin : node.begin + node.count] = 0.0


@compiled
def number_links(links, numbers, sizes):
    """Replace the contexts of links by their numbers. A context without a number gets the next number of its frame."""
    for i in range(len(links)):
        link = links[i]
        if numbers[link.source] == keys.NONE:
            numbers[link.source] = sizes[link.frame]
            sizes[link.frame] += 1
        if numbers[link.target] == keys.NONE:
            numbers[link.target] = sizes[link.frame + 1]
            sizes[link.frame + 1] += 1
        link.source, link.target = numbers[link.source], numbers[link.target]


@no_refcount
def list_links(state, reached, models, work):
    """Fill `reached.links` from the last frame back."""
    beam = models[0].params.lattice_beam + np.float64(SLACK)
    for n in range(state.counters[0].nodes - 1, 0, -1):
        node, least = state.nodes[n], np.float64(np.inf)
        if node.begin == keys.NONE or let_nodes.is_within(n, state):
            continue
        for c in range(node.begin, node.begin + node.count):
            least = min(least, reached.extra[c])
        if least <= beam:
            begin = reached.total[0]
            _list_ways(n, False, begin, reached, state, models, work)
            _list_ways(n, True, begin, reached, state, models, work)


@linked
def _list_ways(n, of_best_only, begin, reached, state, models, work):
    """List the ways to the contexts of a node.

    Args:
        of_best_only: True: list only ways that tightened the cutoff and are not among the other ways to this node,
            which start at index `begin` of `reached.links`. False: list the other ways.
    """
    nodes, links = state.nodes, state.links
    none, first = np.int64(keys.NONE), np.int64(nodes[n].newest)
    while first != none:
        node = links[first].node
        if not let_nodes.is_within(node, state):
            if not of_best_only:
                _list_chain(n, (first, none, none), none, reached, state, models, work)
        else:
            second = np.int64(nodes[node].newest)
            while second != none:
                is_best_only = (
                    links[second].arc <= let_nodes.CLOSURE_WORD and links[second].log_prob == let_nodes.BEST_ONLY
                )
                before = links[second].node
                if is_best_only != of_best_only:
                    pass
                elif let_nodes.is_within(before, state):
                    third = np.int64(nodes[before].newest)
                    while third != none:
                        _list_chain(n, (first, second, third), none, reached, state, models, work)
                        third = np.int64(links[third].next)
                else:
                    known = begin if is_best_only else none
                    _list_chain(n, (first, second, none), known, reached, state, models, work)
                second = np.int64(links[second].next)
        first = np.int64(links[first].next)


@linked
def _list_chain(n, chain, known, reached, state, models, work):
    """List the ways by a chain of links to node n, for each context of the node that the chain begins at.

    Args:
        chain: the link to the node, the link before it or NONE, the link before that or NONE.
        known: NONE, or the first index in `reached.links` of ways to this node. Then only the best context has taken
            the chain, and a way that is already listed from this index on is skipped.
    """
    last = chain[2] if chain[2] != keys.NONE else (chain[1] if chain[1] != keys.NONE else chain[0])
    source = state.nodes[state.links[last].node]
    beam = models[0].params.lattice_beam + np.float64(SLACK)
    for c in range(source.begin, source.begin + source.count):
        if known != keys.NONE and c != let_nodes.best_context(source, state.contexts):
            continue
        target, cost, difference, epsilon = _follow(n, c, chain, state, models, work)
        if target == keys.NONE:
            continue
        extra = cost - state.contexts[target].cost + reached.extra[target]
        if extra > beam or (known != keys.NONE and _is_listed(known, c, state.links[chain[0]].arc, epsilon, reached)):
            continue
        reached.extra[c] = min(reached.extra[c], extra)
        at = reached.total[0]
        reached.total[0] += 1
        if at < len(reached.links):
            link = reached.links[at]
            link.source, link.target, link.epsilon = c, target, epsilon
            _fill_link(link, n, (source, state.contexts[c]), (chain[0], difference), state, models[0])


@linked
def _follow(n, c, chain, state, models, work):
    """Take a chain of links to node n from context c.

    Returns:
        the context at the end of the chain, or NONE if the search did not reach it; its cost above the node's cost;
        the LM score difference of the words on the way; the closure arc, or NONE.
    """
    search, lm = models
    links, graph, none = state.links, search.graph, np.int64(keys.NONE)
    context, cost, total, epsilon = state.contexts[c].lm, np.float64(state.contexts[c].cost), np.float32(0.0), none
    after = none
    for i in range(2, -1, -1):
        if chain[i] == none:
            continue
        link, olabel, second = links[chain[i]], np.int32(0), np.int32(0)
        if link.epsilon != keys.NONE:
            epsilon = np.int64(link.epsilon)
        if link.arc <= let_nodes.CLOSURE_WORD:
            if link.log_prob != let_nodes.BEST_ONLY and cost > link.log_prob + ROUNDING:
                return none, cost, total, epsilon
            olabel = graph.epsilons[link.epsilon].olabel if link.epsilon != keys.NONE else olabel
            second = graph.arcs[let_nodes.ARC_WORD - link.arc].olabel if link.arc <= let_nodes.ARC_WORD else second
        for word in (olabel, second):
            if word != 0:
                difference, context = query(word, context, search, lm, work)
                total += difference
                cost += difference
        cost += link.cost
        after = _context_with(context, n if i == 0 else links[chain[i - 1]].node, state)
        if after == none:
            return none, cost, total, epsilon
    if cost > let_nodes.most_above(n, state, search) + ROUNDING and cost > 0:
        after = none
    return after, cost, total, epsilon


@linked
def _context_with(lm, n, state):
    """Return the number of a node's context with this LM context, or NONE."""
    node = state.nodes[n]
    for c in range(node.begin, node.begin + node.count):
        if state.contexts[c].lm == lm:
            return np.int64(c)
    return np.int64(keys.NONE)


@linked
def _is_listed(begin, c, arc, epsilon, reached):
    """Return whether a link from a context by these arcs is listed from `begin` on."""
    is_listed = False
    for at in range(begin, min(reached.total[0], len(reached.links))):
        link = reached.links[at]
        is_listed = is_listed or (link.source == c and link.arc == arc and link.epsilon == epsilon)
    return is_listed


@linked
def _fill_link(link, n, before, step, state, search):
    """Fill the fields of a LINK other than source, target and closure arc, which are set already.

    Args:
        before: node and context at the begin of the step.
        step: link to node n; LM score difference of all words on the way.
    """
    (source, context), (last, difference) = before, step
    last_link, weights, node = state.links[last], search.weights, state.nodes[n]
    cost, boost = np.float32(0.0), keys.boost_of(source.key)
    if link.epsilon != keys.NONE:
        closure = search.graph.epsilons[link.epsilon]
        bonus, boost = boosted(closure.olabel, boost, search)
        cost += weights.lm_weight * closure.cost - bonus
    if last_link.arc >= 0:
        arc = search.graph.arcs[last_link.arc]
        bonus, boost = boosted(arc.olabel, boost, search)
        cost += weights.lm_weight * arc.cost - bonus
    link.arc, link.frame = last_link.arc, node.frame
    link.acoustic_cost = -(search.params.acoustic_scale * last_link.log_prob)
    link.cost = cost + link.acoustic_cost + difference
    link.ilabel = label_read(last_link.arc, node.key, search)
    link.move = move_of(last_link.arc, link.epsilon, let_nodes.Past(source.key, context.back_pointer), state, search)
