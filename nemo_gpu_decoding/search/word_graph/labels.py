"""Choose the labels of a frame that may stay below the cutoff, and find the cheapest step of the best token."""

import numpy as np

from nemo_gpu_decoding.graph.csr import GRAPH, NORMAL, first_arc
from nemo_gpu_decoding.jit import LANES, linked, not_below, trailing_zeros
from nemo_gpu_decoding.search.numerics import LARGEST, MOST_LOG_PROB
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.candidates import boosted, cost_of, least_total

SMALL_STATE = 8  # the search tries all arcs of a state with at most this many
SORTED_LABELS = 128  # the labels are sorted if there are at most this many; at most BINS


@linked
def choose_labels(row, search, work):
    """Fill work.labels with the labels that can stay below the cutoff; the likeliest label is first.

    Returns:
        False if the frame holds NaN or a value above MOST_LOG_PROB.
    """
    frame, labels, least = work.frame[0], work.labels, _least_likely(work.frame[0], search)
    count, likeliest, skipped_label = 0, 0, keys.NONE if search.params.topology == GRAPH else search.params.blank_id
    whole = len(row) - len(row) % LANES
    for begin in range(0, whole, LANES):
        lanes = np.uint32(not_below(row, begin, least))
        while lanes != 0:
            labels[np.uintp(count)] = begin + np.int64(trailing_zeros(lanes))
            count += labels[np.uintp(count)] != skipped_label
            lanes &= lanes - np.uint32(1)
    for v in range(whole, len(row)):
        labels[np.uintp(count)] = v
        count += not row[np.uintp(v)] < least and v != skipped_label  # NaN is not below anything
    for i in range(count):
        if not row[labels[i]] <= MOST_LOG_PROB:
            return False
        likeliest = i if row[labels[i]] > row[labels[likeliest]] else likeliest
    if count > 0:
        labels[0], labels[likeliest] = labels[likeliest], labels[0]
    frame.labels = count
    return True


@linked
def rank_labels(row, search, work):
    """Remove labels above the tightened cutoff from work.labels. If few are left, sort them, likely ones first."""
    frame, labels, count = work.frame[0], work.labels, 0
    least = _least_likely(frame, search)
    for i in range(frame.labels):
        labels[count] = labels[i]
        count += not row[labels[i]] < least
    frame.labels = count
    if count <= SORTED_LABELS:
        order = work.histogram  # a buffer that is free here
        for i in range(count):
            order[i] = -(keys.ordered_bits(row[labels[i]]) << 32) + labels[i]
        for i in range(count):
            index = 0
            for j in range(count):  # rank by counting smaller keys: O(n^2), but without branches and with SIMD
                index += int(order[np.uintp(j)] < order[np.uintp(i)])
            labels[index] = order[i] & 0xFFFFFFFF


@linked
def labels_within(cost, source, row, search, work):
    """Return how many of the first entries of work.labels may keep an arc of this state below the cutoff."""
    frame, count = work.frame[0], 0
    if frame.labels > SORTED_LABELS:
        return frame.labels
    while count < frame.labels:
        acoustic_cost = cost_of(row, work.labels[count], search)
        if least_total(cost, source.least_cost, acoustic_cost, search) > frame.cutoff:
            break
        count += 1
    return count


@linked
def _least_likely(frame, search):
    """Return the log-prob below which a label is above the cutoff after any token; at most MOST_LOG_PROB."""
    most = np.float64(frame.cutoff) - search.weights.least_cost
    slack = 1e-6 * abs(most) + 1e-5  # for rounding errors
    limit = -(most + slack) / search.params.acoustic_scale
    return np.float32(min(max(limit, -np.float64(LARGEST)), np.float64(MOST_LOG_PROB)))


@linked
def likeliest_step(row, state, search, lm, work):
    """Return the best token's step with the lowest cost in the graph, if it costs less than all candidates.

    Returns:
        index of the best token; closure arc or NONE; arc, or NONE if no step is cheaper; boosting state after them;
        total cost of the step, else of the best candidate.
    """
    graph, best = search.graph, 0
    for i in range(1, state.counters[0].tokens):
        token, other = work.current[i], work.current[best]
        if token.cost < other.cost or (token.cost == other.cost and keys.precedes(token, other, lm)):
            best = i
    token = work.current[best]
    state_of_best, least = graph.states[keys.state_of(token.key)], work.frame[0].best
    last_epsilon, last_arc, last_boost = keys.NONE, keys.NONE, keys.boost_of(token.key)
    for e in range(state_of_best.epsilon_begin - 1, state_of_best.epsilon_end):
        cost, boost, s, epsilon = token.cost, keys.boost_of(token.key), keys.state_of(token.key), keys.NONE
        if e >= state_of_best.epsilon_begin:
            closure, epsilon = graph.epsilons[e], e
            bonus, boost = boosted(closure.olabel, boost, search)
            cost = cost + search.weights.lm_weight * closure.cost - bonus
            s = np.int64(closure.target)
        reached = least, cost, boost, s
        total, a = _likeliest_arc(row, reached, keys.label_of(token.key), search, work)
        if total < least:
            least, last_epsilon, last_arc, last_boost = total, epsilon, a, boost
    if last_arc != keys.NONE:
        _, last_boost = boosted(graph.arcs[last_arc].olabel, last_boost, search)
    return best, last_epsilon, last_arc, last_boost, least


@linked
def _likeliest_arc(row, reached, last_label, search, work):
    """Return the cheapest arc of a state and its total cost; NONE and `least` if no arc costs less than `least`.

    Args:
        reached: `least`; then the cost, the boosting state and the number of the state.
    """
    least, cost, boost, s = reached
    source = search.graph.states[s]
    frame, arcs, weights, best = work.frame[0], search.graph.arcs, search.weights, keys.NONE
    for i in range(frame.labels):
        label = work.labels[i]
        acoustic_cost = cost_of(row, label, search)
        if least_total(cost, source.least_cost, acoustic_cost, search) > least:
            if i == 0:
                break  # the first label is the likeliest
            continue
        if search.params.topology == NORMAL and label == np.int32(last_label) - 1:
            continue
        a = first_arc(search.arc_index, arcs, s, source, label)
        while a < source.arc_end and arcs[a].ilabel == label:
            bonus, _ = boosted(arcs[a].olabel, boost, search)
            total = cost + weights.lm_weight * arcs[a].cost - bonus + acoustic_cost
            if total < least or (total == least and a < best):  # NONE is below all arcs
                least, best = total, a
            a += 1
    return least, best
