"""Find the token with which an utterance ends at the lowest cost, and trace back its path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemo_gpu_decoding.jit import compiled, linked, no_refcount
from nemo_gpu_decoding.lm.packed import NO_LABEL, lookup
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.candidates import boosted
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import difference_of_label, large_of, small_of

if TYPE_CHECKING:
    from nemo_gpu_decoding.search.word_graph.stream_state import WordGraphStream

END = np.dtype(
    [
        ("node", np.int64),  # index of a token of the last frame, or node of a lattice
        ("epsilon", np.int32),  # closure arc after the last frame, or NONE
        ("state", np.int32),  # state of the graph before the closure arc
        ("cost", np.float64),
    ],
    align=True,
)


class Steps(NamedTuple):
    """The back-pointers of a path, oldest first, as arrays [N]."""

    arcs: np.ndarray  # int32
    epsilons: np.ndarray  # int32, closure arc before the arc, or NONE
    frames: np.ndarray  # int32, first frame of the arc's label
    runs: np.ndarray  # int32, frames of the label
    probabilities: np.ndarray  # float32, sum of the label's posteriors over these frames


@no_refcount
def best_ends(tokens, counts, final, search, lm, ends):
    """Find, for each of R utterances, the end with the lowest cost.

    Args:
        tokens: the tokens of all utterances, one utterance after the other.
        counts: [R] number of tokens of each utterance.
        final: add final costs; an utterance then ends in a final state, perhaps by a closure arc.
        ends: [R] END, the output. `node` is the index of the token within its utterance, or NONE if no token reaches a
            final state; `cost` is the cost of the token plus the cost of the end.
    """
    first = 0
    for r in range(len(counts)):
        end = ends[r]
        end.node, end.epsilon, end.state, end.cost = keys.NONE, keys.NONE, keys.NONE, np.inf
        for i in range(first, first + counts[r]):
            state = search.graph.states[keys.state_of(tokens[i].key)]
            begin = state.epsilon_begin
            for e in range(begin - 1, state.epsilon_end if final else begin):
                epsilon, total = keys.NONE if e < begin else e, np.float64(tokens[i].cost)
                if final:
                    total += end_cost(tokens[i], epsilon, search, lm)
                if total == np.inf:
                    continue
                if total < end.cost or (total == end.cost and keys.precedes(tokens[i], tokens[first + end.node], lm)):
                    end.node, end.epsilon, end.cost = i - first, epsilon, total
                    end.state = keys.state_of(tokens[i].key)
        first += counts[r]


@compiled
def all_ends(tokens, final, search, lm):
    """Return all ways to end an utterance.

    Args:
        final: as in `best_ends`; if False, every token is an end and costs nothing more.

    Returns:
        [E] END, in the order of tokens and closure arcs; their costs do not include the costs of tokens.
    """
    states, most = search.graph.states, 0
    for i in range(len(tokens)):
        state = states[keys.state_of(tokens[i].key)]
        most += 1 + state.epsilon_end - state.epsilon_begin
    ends, count = np.empty(most, END), 0
    for i in range(len(tokens)):
        s = keys.state_of(tokens[i].key)
        begin = states[s].epsilon_begin
        for e in range(begin - 1, states[s].epsilon_end if final else begin):
            epsilon, cost = keys.NONE if e < begin else e, 0.0
            if final:
                cost = end_cost(tokens[i], epsilon, search, lm)
            if cost < np.inf:
                ends[count].node, ends[count].epsilon = i, epsilon
                ends[count].state, ends[count].cost = s, cost
                count += 1
    return ends[:count].copy()


@linked
def end_cost(token, epsilon, search, lm):
    """Return the cost to end after a token, or after its closure arc; inf if the state there is not final."""
    graph, weights, cost = search.graph, search.weights, 0.0
    state, boost, olabel = keys.state_of(token.key), keys.boost_of(token.key), np.int32(0)
    if epsilon != keys.NONE:
        closure = graph.epsilons[epsilon]
        olabel = closure.olabel
        bonus, boost = boosted(olabel, boost, search)
        cost += weights.lm_weight * closure.cost - bonus
        state = np.int64(closure.target)
    final_cost = graph.states[state].final_cost
    if final_cost == np.inf:
        return np.inf
    cost += weights.lm_weight * final_cost
    if weights.boosts:
        cost -= weights.boosting_weight * search.boosting.states[boost].final_weight
    if lm is None:
        return cost
    else:
        return cost + end_difference(olabel, keys.context_of(token, lm), search, lm)


@linked
def end_difference(olabel, context, search, lm):
    """Return the weighted LM score difference of a closure arc's word, if it has one, and of the end after it."""
    difference = 0.0
    if lm.difference_weight == 0:
        return difference
    if olabel != 0:
        cost, context = difference_of_label(olabel, context, search, lm)
        difference += lm.difference_weight * cost
    return difference + final_difference(context, lm)


@linked
def final_difference(context, lm):
    """Return the weighted LM score difference of </s> after an LM context, or 0 if the large LM has no </s>."""
    cost, lms = np.float32(0.0), lm.lms
    if lm.difference_weight == 0:
        return cost
    if lms.large_end != NO_LABEL:
        cost += lookup(lms.large, large_of(context), lms.large_end)[0]
    if not lms.is_difference and lms.small_end != NO_LABEL:
        cost -= lookup(lms.small, small_of(context), lms.small_end)[0]
    return lm.difference_weight * cost


@no_refcount
def count_back_pointers(back_pointers, at):
    """Return the length of the chain of back-pointers that begins with number `at`."""
    count = 0
    while at != keys.NONE:
        at = back_pointers[at].previous
        count += 1
    return count


@no_refcount
def trace_back(back_pointers, token, arcs, epsilons, frames, runs, probabilities, begin):
    """Write a token's back-pointers, oldest first, to `Steps` arrays from `begin` on; return the end of the path."""
    end = begin + count_back_pointers(back_pointers, token.back_pointer)
    at, run, probability = token.back_pointer, token.run, token.probability
    for n in range(end - 1, begin - 1, -1):
        arcs[n], epsilons[n], frames[n] = back_pointers[at].arc, back_pointers[at].epsilon, back_pointers[at].frame
        runs[n], probabilities[n] = run, probability
        run, probability = back_pointers[at].run, back_pointers[at].probability
        at = back_pointers[at].previous
    return end


class FoundPaths(NamedTuple):
    """P paths of a search or of a lattice."""

    steps: Steps  # the steps of all paths, one path after the other
    step_ends: np.ndarray  # [P] int64, end of each path in `steps`
    ends: np.ndarray  # [P] END; costs are totals from the first frame on
    ended: np.ndarray  # [P] bool, whether the costs contain final costs

    def steps_of(self, n: int) -> Steps:
        """Return the steps of path n."""
        part = slice(int(self.step_ends[n - 1]) if n else 0, int(self.step_ends[n]))
        return Steps(*(values[part] for values in self.steps))


def ends_of(states: Sequence[WordGraphStream], final: bool) -> np.ndarray:
    """Return the best end of each stream, as `best_ends`, [R] END; its cost is the total from the first frame on."""
    ends, alike = np.empty(len(states), END), defaultdict(list)
    for r, state in enumerate(states):  # one call serves the streams of a decoder with equal weights and models
        models, scorer = state.models, state.models.lm_scorer
        large = None if scorer is None else (id(scorer.lms), scorer.difference_weight)
        alike[models.weights, id(models.boosting), large].append(r)
    for rows in alike.values():
        models, tokens = states[rows[0]].models, [states[r].tokens for r in rows]
        ends_of_group = ends if len(alike) == 1 else np.empty(len(rows), END)
        counts = np.array([len(tokens_of_stream) for tokens_of_stream in tokens])
        best_ends(together(tokens), counts, final, models.search, models.lm_scorer, ends_of_group)
        if ends_of_group is not ends:
            ends[rows] = ends_of_group
    ends["cost"] += together([state.counters for state in states])["cost"]
    return ends


def concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate records of one type as bytes, because np.concatenate copies records field by field."""
    return np.concatenate([array.view(np.uint8) for array in arrays]).view(arrays[0].dtype)


def together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays `concatenated`, for reading only, because a single array is not copied."""
    return arrays[0] if len(arrays) == 1 else concatenated(arrays)


def best_paths(states: Sequence[WordGraphStream], final: bool) -> FoundPaths:
    """Return the best path of each stream. If a stream reaches no final state, its path has no final cost."""
    ends, ended = ends_of(states, final), np.full(len(states), final)
    if keys.NONE in ends["node"].tolist():
        missing = np.flatnonzero(ends["node"] == keys.NONE)
        ends[missing], ended[missing] = ends_of([states[r] for r in missing.tolist()], final=False), False
    # a path has at most one back-pointer per frame
    most = sum(min(state.frames, len(state.back_pointers)) for state in states)
    arcs, epsilons, frames, runs = np.empty((4, most), np.int32)
    steps = Steps(arcs, epsilons, frames, runs, np.empty(most, np.float32))
    step_ends, at = np.empty(len(states), np.int64), 0
    for r, (state, node) in enumerate(zip(states, ends["node"].tolist(), strict=True)):
        step_ends[r] = at = trace_back(state.back_pointers, state.tokens[node], *steps, at)
    return FoundPaths(Steps(*(values[:at] for values in steps)), step_ends, ends, ended)
