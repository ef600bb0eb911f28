"""From the tokens of the last frame back to texts: where utterances end best, and how they got there."""

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
    from nemo_gpu_decoding.search.word_graph.stream_state import StreamState

END = np.dtype(
    [
        ("node", np.int64),  # token of the last frame, or node of a lattice
        ("epsilon", np.int32),  # closure arc taken after the last frame, or NONE
        ("state", np.int32),  # of the graph, after the last frame and before the closure arc
        ("cost", np.float64),
    ],
    align=True,
)


class Steps(NamedTuple):
    """The back-pointers of one path, oldest first, N of them; arrays [N]."""

    arcs: np.ndarray  # int32
    epsilons: np.ndarray  # int32, taken before the arc, or NONE
    frames: np.ndarray  # int32
    runs: np.ndarray  # int32, frames that the arc's label lasted
    probabilities: np.ndarray  # float32, sum of its posteriors over these frames


@no_refcount
def best_ends(tokens, counts, final, search, lm, ends):
    """Where each of R utterances ends best.

    Args:
        tokens: those of all utterances, one utterance after the other; counts: [R] tokens of each.
        final: the utterances are over: final costs count and closure arcs may lead to a final state.
        ends: [R] END, filled: number of the token within its utterance, NONE if no token reaches a final state; the
            closure arc to the end or NONE; the cost with all that comes after the last frame.
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
    """[E] END: all ways to end, `final` as in `best_end`; without it every token is one, at no cost."""
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
    """What it costs to end with a token, or where a closure arc leads it; inf if that is not final."""
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
    """LM score difference of the word of a closure arc, if there is one, and of the end after it."""
    difference = 0.0
    if lm.difference_weight == 0:
        return difference
    if olabel != 0:
        cost, context = difference_of_label(olabel, context, search, lm)
        difference += lm.difference_weight * cost
    return difference + final_difference(context, lm)


@linked
def cost_of_end(lm, state, label):
    if label == NO_LABEL:
        return np.float32(0.0)
    cost, _ = lookup(lm, state, label)
    return cost


@linked
def final_difference(context, lm):
    """What the LMs' ends of sentence add, weighted."""
    if lm.difference_weight == 0:
        return np.float32(0.0)
    cost = cost_of_end(lm.lms.large, large_of(context), lm.lms.large_end)
    if not lm.lms.is_difference:
        cost -= cost_of_end(lm.lms.small, small_of(context), lm.lms.small_end)
    return lm.difference_weight * cost


@no_refcount
def count_back_pointers(back_pointers, at):
    count = 0
    while at != keys.NONE:
        at = back_pointers[at].previous
        count += 1
    return count


@no_refcount
def trace_back(back_pointers, token, arcs, epsilons, frames, runs, probabilities, begin):
    """Write the back-pointers that `token` points to, oldest first, to the arrays of `Steps` from `begin` on.

    Returns:
        one past the last of them.
    """
    end = begin + count_back_pointers(back_pointers, token.back_pointer)
    at, run, probability = token.back_pointer, token.run, token.probability
    for n in range(end - 1, begin - 1, -1):
        arcs[n], epsilons[n], frames[n] = back_pointers[at].arc, back_pointers[at].epsilon, back_pointers[at].frame
        runs[n], probabilities[n] = run, probability
        run, probability = back_pointers[at].run, back_pointers[at].probability
        at = back_pointers[at].previous
    return end


class FoundPaths(NamedTuple):
    """P paths, as a search or a lattice has found them."""

    steps: Steps  # those of all paths, one path after the other
    step_ends: np.ndarray  # [P] int64, one past the last step of each path
    ends: np.ndarray  # [P] END; costs are from the first frame on
    ended: np.ndarray  # [P] bool, whether these include final costs

    def steps_of(self, n: int) -> Steps:
        """The steps of path n."""
        part = slice(int(self.step_ends[n - 1]) if n else 0, int(self.step_ends[n]))
        return Steps(*(values[part] for values in self.steps))


def ends_of(states: Sequence[StreamState], final: bool) -> np.ndarray:
    """[R] END: where streams end best, as `best_ends`; costs are from the first frame on."""
    ends, alike = np.empty(len(states), END), defaultdict(list)
    for r, state in enumerate(states):  # those of one decoder with the same weights and boosting share a call
        models, scorer = state.models, state.models.lm_scorer
        weight = None if scorer is None else scorer.difference_weight
        alike[models.weights, id(models.boosting), weight].append(r)
    for rows in alike.values():
        models, tokens = states[rows[0]].models, [states[r].tokens for r in rows]
        own = np.empty(len(rows), END)
        counts = np.array([len(each) for each in tokens])
        best_ends(concatenated(tokens), counts, final, models.search, models.lm_scorer, own)
        ends[rows] = own
    ends["cost"] += concatenated([state.counters for state in states])["cost"]
    return ends


def concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Records of one type, which np.concatenate would look at field by field."""
    return np.concatenate([array.view(np.uint8) for array in arrays]).view(arrays[0].dtype)


def best_paths(states: Sequence[StreamState], final: bool) -> FoundPaths:
    """The best path of each stream by the back-pointers of the search; of one that reaches no final state, the best
    of those that may go on."""
    ends, ended = ends_of(states, final), np.full(len(states), final)
    missing = np.flatnonzero(ends["node"] == keys.NONE)
    if len(missing):
        ends[missing], ended[missing] = ends_of([states[r] for r in missing.tolist()], final=False), False
    # back-pointers on one path are of different frames
    steps = _new_steps(sum(min(state.frames, len(state.back_pointers)) for state in states))
    step_ends, at = np.empty(len(states), np.int64), 0
    for r, (state, node) in enumerate(zip(states, ends["node"].tolist(), strict=True)):
        step_ends[r] = at = trace_back(state.back_pointers, state.tokens[node], *steps, at)
    return FoundPaths(Steps(*(values[:at] for values in steps)), step_ends, ends, ended)


def _new_steps(count: int) -> Steps:
    """Room for so many steps."""
    arcs, epsilons, frames, runs = np.empty((4, count), np.int32)
    return Steps(arcs, epsilons, frames, runs, np.empty(count, np.float32))


def steps_of(back_pointers: np.ndarray, token: np.void) -> Steps:
    """The path of a token."""
    steps = _new_steps(count_back_pointers(back_pointers, token["back_pointer"]))
    trace_back(back_pointers, token, *steps, 0)
    return steps
