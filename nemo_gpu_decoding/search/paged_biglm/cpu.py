"""paged_biglm on the CPU: search of the small LM's graph, with a large LM asked on the fly [LET].

A token is a path through the graph and a history of both LMs. It has paid acoustic costs, the graph's
costs (the small LM), minus boosting, plus a correction for each word that the graph has told, see
`composition.py`. In every frame, with composition "lazy",

1. a token may read a blank, or its last label again (the CTC topology; `graph/topology.py`);
2. tokens of the same graph state form a group, also by way of epsilon records; those of a group with
   the same LM history are one. A record that tells a word changes the history, but nobody asks how yet;
3. each group looks at the arcs of its state once, at the cost of its best history. Arcs without a word
   are taken right away by all histories that stay below the cutoff;
4. for what is left and still below the cutoff by the small LM's cost, the LMs are asked, and the arcs
   taken at the true cost ("prune before the look-up"; [LET] calls 2 and 4 the expansion of a group);
5. equal keys recombine; tokens above best + beam are dropped, then all but about max_active.

So a word is pruned twice: by the small LM's cost before the look-up, by the large LM's after it. Before
step 2 the best token looks ahead, to lower the cutoff.

With "eager" each token takes each arc of its state and asks for each word at once [BigLM, the baseline
of LET, section II]; only the true cost prunes. Both give the same result where the beam is wide enough.

Costs are kept relative to the best token, so that float32 serves streams of any length; where the best
one stands is a double.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH, NORMAL
from nemo_gpu_decoding.jit import inlined
from nemo_gpu_decoding.search.cuda_wfst.cpu import _choose_labels
from nemo_gpu_decoding.search.cuda_wfst.groups import SORTED_LABELS, first_arc
from nemo_gpu_decoding.search.cuda_wfst.survivors import commit
from nemo_gpu_decoding.search.cuda_wfst.tokens import (
    ANY_RANK,
    BLANK_MOVE,
    NONE,
    REPEAT_MOVE,
    boost_of,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.cuda_wfst.uncounted import uncounted
from nemo_gpu_decoding.search.cuda_wfst.ways import (
    BAD_FRAME,
    DONE,
    NO_TOKEN,
    boosted,
    cost_of,
    lower_cutoff,
)
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.paged_biglm.composition import ask
from nemo_gpu_decoding.search.paged_biglm.eager import take_all_arcs
from nemo_gpu_decoding.search.paged_biglm.groups import join_groups, run_errands, take_arcs
from nemo_gpu_decoding.search.paged_biglm.tokens import RANK_BITS, rank_of
from nemo_gpu_decoding.search.paged_biglm.ways import is_first, offer, recombine


@uncounted
def advance(log_probs, begin, end, progress, records, links, search, graph, boosting, rescoring, space):
    """Read the frames begin .. end of log_probs [T, C] float32. space.current holds the tokens.

    Returns:
        the frame before which it stopped, and why: DONE; BAD_FRAME (NaN or +inf); NO_TOKEN (no label
        is possible); RECORDS_FULL, LINKS_FULL, GROUPS_FULL: make room and go on there.
    """
    for t in range(begin, end):
        row, now = log_probs[t], progress[0]
        status = _expand_within_room(row, now, links, search, graph, boosting, rescoring, space)
        if status == DONE:
            status = commit(row, now, records, links, search, graph, space)
        if status != DONE:
            return t, status
        front = space.front[0]
        now.look_ups += front.look_ups
        now.memo_hits += front.memo_hits
        now.arc_visits += front.arc_visits
        now.groups += front.groups
        now.prolonged += front.prolonged
    return end, DONE


@uncounted
def _expand_within_room(row, progress, links, search, graph, boosting, rescoring, space):
    """All ways into the next frame that stay below the cutoff, or the cheapest if they are too many.

    As in cuda_wfst: if there is no room for all keys, once more with the best cost known from the
    start; then with the highest rank that they fit with, until half of the room is used.
    """
    front = space.front[0]
    front.last = ANY_RANK
    front.look_ups = front.memo_hits = front.arc_visits = front.prolonged = 0
    facts = search, graph, boosting, rescoring, space
    status = _expand(LARGEST, row, progress, links, *facts)
    if status != DONE or not front.full:
        return status
    best = front.best
    status = _expand(best, row, progress, links, *facts)
    if status != DONE or not front.full:
        return status
    progress.overflowed += 1
    low, high = rank_of(best, 0, 0), rank_of(best + search.beam, 0, 0) + (1 << RANK_BITS)
    while low < high and status == DONE:
        front.last = low + (high - low) // 2
        status = _expand(best, row, progress, links, *facts)
        if front.full:
            high = front.last
        elif high - low <= 1 or 2 * front.tokens >= len(space.following):
            break
        else:
            low = front.last
    return status


@uncounted
def _expand(best, row, progress, links, search, graph, boosting, rescoring, space):
    """All ways into the next frame that stay below the cutoff, as far as there is room for their keys.

    Fills space.following. `best`: cost of the best way, if it is known, or LARGEST.
    """
    front = space.front[0]
    front.tokens = front.candidates = front.links = 0
    front.groups = front.histories = front.members = front.errands = front.ordered = 0
    front.full = False
    front.best, front.cutoff = best, (best + search.beam if best < LARGEST else LARGEST)
    for table in range(len(space.stamps)):
        space.stamps[table] += 1
    status = DONE
    if search.topology != GRAPH:
        status = _stay(row, progress, links, search, space)
    if status == DONE and not _choose_labels(row, search, space):
        status = BAD_FRAME
    if status == DONE and not search.lazy:
        status = take_all_arcs(row, progress, links, search, graph, boosting, rescoring, space)
    elif status == DONE and front.labels > 0:
        status = _expand_lazily(row, progress, links, search, graph, boosting, rescoring, space)
    if status == DONE:
        status = recombine(progress, links, search, space)
    if status == DONE and front.tokens == 0:
        status = NO_TOKEN
    return status


@inlined
def _expand_lazily(row, progress, links, search, graph, boosting, rescoring, space):
    """Steps 2 to 4."""
    front, status = space.front[0], DONE
    cutoff = front.cutoff
    _look_ahead(row, progress, search, graph, boosting, rescoring, space)
    if front.cutoff < cutoff:
        _choose_labels(row, search, space)
    if front.labels == 0:
        return status
    least = cost_of(row, space.labels[0], search)
    for i in range(1, front.labels):
        least = min(least, cost_of(row, space.labels[i], search))
    for i in range(progress.tokens):
        status = join_groups(i, least, search, graph, boosting, space)
        if status != DONE:
            return status
    status = take_arcs(row, progress, links, search, graph, boosting, space)
    if status == DONE:
        status = run_errands(row, progress, links, search, graph, boosting, rescoring, space)
    return status


@uncounted
def _stay(row, progress, links, search, space):
    """Step 1: a blank, or the last label again."""
    front, status = space.front[0], DONE
    if not row[search.blank_id] <= LARGEST:
        return BAD_FRAME
    blank_cost = cost_of(row, search.blank_id, search)
    for i in range(progress.tokens):
        if front.candidates + 2 > len(space.candidates):
            status = recombine(progress, links, search, space)
            if status != DONE:
                break
        cost, key, lm = space.current[i].cost, space.current[i].key, space.current[i].lm
        label = label_of(key)
        offer(cost + blank_cost, key - label, lm, i, BLANK_MOVE, NONE, search, space)
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + cost_of(row, label - 1, search)
            offer(total, key, lm, i, REPEAT_MOVE, NONE, search, space)
    return status


@uncounted
def _look_ahead(row, progress, search, graph, boosting, rescoring, space):
    """Lower the cutoff by the best token's way that looks best, if it looks better than all known ones.

    The LMs are asked for it, so that it counts at its true cost.
    """
    best = 0
    for i in range(1, progress.tokens):
        token, other = space.current[i], space.current[best]
        if token.cost < other.cost or (token.cost == other.cost and is_first(token, other)):
            best = i
    token = space.current[best]
    state = graph.states[state_of(token.key)]
    least, last_epsilon, last_arc = space.front[0].best, NONE, NONE
    for e in range(state.epsilon_begin - 1, state.epsilon_end):
        cost, boost, source, epsilon = token.cost, boost_of(token.key), state, NONE
        if e >= state.epsilon_begin:
            record, epsilon = graph.epsilons[e], e
            bonus, boost = boosted(record.word, boost, search, graph, boosting)
            cost += search.lm_weight * record.cost
            cost -= bonus
            source = graph.states[record.target]
        total, arc = _likeliest_arc(
            row, least, cost, boost, token, source, search, graph, boosting, space
        )
        if total < least:
            least, last_epsilon, last_arc = total, epsilon, arc
    if last_arc == NONE:
        return
    correction, lm, front = np.float32(0.0), token.lm, space.front[0]
    if last_epsilon != NONE and graph.epsilons[last_epsilon].word != 0:
        word = graph.epsilons[last_epsilon].word
        correction, lm = ask(word, lm, front, search, graph, rescoring, space.memo)
    if graph.arcs[last_arc].word != 0:
        word = graph.arcs[last_arc].word
        more, lm = ask(word, lm, front, search, graph, rescoring, space.memo)
        correction += more
    lower_cutoff(least + correction, front, search)


@inlined
def _likeliest_arc(row, least, cost, boost, token, state, search, graph, boosting, space):
    """The arc of a state with the least cost by the small LM below `least`, and that cost."""
    front, best = space.front[0], NONE
    for i in range(front.labels):
        label = space.labels[i]
        acoustic_cost = cost_of(row, label, search)
        if not cost + search.lm_weight * state.least_cost - search.most_bonus + acoustic_cost < least:
            if front.labels <= SORTED_LABELS:
                break
            continue
        if search.topology == NORMAL and label == np.int32(label_of(token.key)) - 1:
            continue
        a = first_arc(graph.arcs, state, label)
        while a < state.arc_end and graph.arcs[a].label == label:
            bonus, _ = boosted(graph.arcs[a].word, boost, search, graph, boosting)
            total = cost + search.lm_weight * graph.arcs[a].cost - bonus + acoustic_cost
            if total < least:
                least, best = total, a
            a += 1
    return least, best
