"""Exact Viterbi search of a word graph: every state, every frame, no beam, plain dictionaries.

The graph is an `openfst.Fst` with input labels column + 1 and epsilons 0. A CTC topology is unrolled
into the key (graph state, last label), as its definition says and not as the search does it.
"""

import math


def viterbi(fst, log_probs, blank_id, topology, *, lm_weight=1.0, acoustic_scale=1.0, bonus=None):
    """Cost and output labels of the best path that ends in a final state; (inf, ()) if there is none.

    Args:
        topology: compact, normal, minimal, or graph.
        bonus: {output label: what it takes off the cost}.
    """
    frontier = {(fst.start, 0): (0.0, ())}
    arcs = [fst.arcs[b:e] for b, e in zip(fst.arc_begin[:-1], fst.arc_begin[1:], strict=True)]
    frontier = _silent(frontier, arcs, lm_weight, bonus or {})
    for row in log_probs:
        following: dict = {}
        for (state, last), (cost, words) in frontier.items():
            for label, target, arc_cost, word in _steps(state, last, arcs, blank_id, topology):
                total = cost - acoustic_scale * float(row[label - 1]) + lm_weight * arc_cost
                remembered = 0 if topology in ("minimal", "graph") or label == blank_id + 1 else label
                _relax(following, (target, remembered), total, words, word, bonus or {})
        frontier = _silent(following, arcs, lm_weight, bonus or {})
    ends = [
        (cost + lm_weight * float(fst.final_costs[state]), words)
        for (state, _), (cost, words) in frontier.items()
        if fst.final_costs[state] < math.inf
    ]
    return min(ends, default=(math.inf, ()))


def all_texts(fst, log_probs, blank_id, topology, *, lm_weight=1.0, acoustic_scale=1.0):
    """{output labels: cost of its best path} of all texts; for tiny problems."""
    arcs = [fst.arcs[b:e] for b, e in zip(fst.arc_begin[:-1], fst.arc_begin[1:], strict=True)]

    def closed(frontier):
        table, pending = dict(frontier), list(frontier)
        while pending:
            state, last, words = pending.pop()
            for arc in arcs[state]:
                if arc["input"] == 0:
                    key = int(arc["target"]), last, words + _emitted(int(arc["output"]))
                    total = table[state, last, words] + lm_weight * float(arc["cost"])
                    if total < table.get(key, math.inf):
                        table[key] = total
                        pending.append(key)
        return table

    frontier = closed({(fst.start, 0, ()): 0.0})
    for row in log_probs:
        following: dict = {}
        for (state, last, words), cost in frontier.items():
            for label, target, arc_cost, word in _steps(state, last, arcs, blank_id, topology):
                total = cost - acoustic_scale * float(row[label - 1]) + lm_weight * arc_cost
                remembered = 0 if topology in ("minimal", "graph") or label == blank_id + 1 else label
                key = target, remembered, words + _emitted(word)
                following[key] = min(total, following.get(key, math.inf))
        frontier = closed(following)
    texts: dict = {}
    for (state, _, words), cost in frontier.items():
        total = cost + lm_weight * float(fst.final_costs[state])
        if total < texts.get(words, math.inf):
            texts[words] = total
    return texts


def _emitted(word):
    return (word,) if word else ()


def _steps(state, last, arcs, blank_id, topology):
    """(label, target, cost, word) of all that may be read in a state after the label `last`."""
    if topology != "graph":
        yield blank_id + 1, state, 0.0, 0
        if topology != "minimal" and last:
            yield last, state, 0.0, 0
    for arc in arcs[state]:
        closed = topology == "normal" and arc["input"] == last
        if arc["input"] and not closed:
            yield int(arc["input"]), int(arc["target"]), float(arc["cost"]), int(arc["output"])


def _relax(table, key, cost, words, word, bonus):
    if word:
        words, cost = (*words, word), cost - bonus.get(word, 0.0)
    if cost < math.inf and (key not in table or (cost, words) < table[key]):
        table[key] = cost, words
        return True
    return False


def _silent(frontier, arcs, lm_weight, bonus):
    """Follow epsilons until nothing changes."""
    table, pending = dict(frontier), list(frontier)
    while pending:
        key = pending.pop()
        cost, words = table[key]
        for arc in arcs[key[0]]:
            if arc["input"] == 0:
                target = int(arc["target"]), key[1]
                total = cost + lm_weight * float(arc["cost"])
                if _relax(table, target, total, words, int(arc["output"]), bonus):
                    pending.append(target)
    return table
