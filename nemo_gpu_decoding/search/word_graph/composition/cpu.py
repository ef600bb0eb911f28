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
step 2 the best token looks ahead: the way that looks best by the small LM's cost is taken at once, at
its true cost, to lower the cutoff.

Which words are asked for does not depend on the order of work. The cutoff of step 2 is that after step 1
and the look-ahead; that of step 4 is what stays, look-ahead and all ways of step 3 leave. An arc and a
history that need the LMs (the arc has a word, or the history one that nobody has asked for) are asked
for if and only if their cost by the small LM, boosting included, is not above that cutoff, whatever the
answers to others are. If the keys find no room, the same ways are found again, and of the keys those of
the lowest rank are kept (`rank_of`). So tokens, their costs to the bit, look-ups and groups are the same
in whatever order tokens, groups and arcs come; arc visits, prolonged tokens and cache hits are not.

With "eager" each token takes each arc of its state and asks for each word at once [BigLM, the baseline
of LET, section II]; only the true cost prunes. Both give the same result where the beam is wide enough.

Costs are kept relative to the best token, so that float32 serves streams of any length; where the best
one stands is a double.
"""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH, NORMAL
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.log_space import LARGEST
from nemo_gpu_decoding.search.word_graph.composition.composition import ask
from nemo_gpu_decoding.search.word_graph.composition.eager import take_all_arcs
from nemo_gpu_decoding.search.word_graph.composition.groups import (
    join_groups,
    run_errands,
    take_arcs,
    target_key,
)
from nemo_gpu_decoding.search.word_graph.composition.tokens import RANK_BITS, rank_of, void_tables
from nemo_gpu_decoding.search.word_graph.composition.ways import is_first, offer, recombine
from nemo_gpu_decoding.search.word_graph.groups import first_arc
from nemo_gpu_decoding.search.word_graph.labels import SORTED_LABELS, choose_labels, narrow_labels
from nemo_gpu_decoding.search.word_graph.survivors import commit
from nemo_gpu_decoding.search.word_graph.tokens import (
    ANY_RANK,
    BLANK_MOVE,
    NONE,
    REPEAT_MOVE,
    boost_of,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.ways import (
    BAD_FRAME,
    DONE,
    NO_TOKEN,
    boosted,
    cost_of,
)


@no_refcount
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


@inlined
def _expand_within_room(row, progress, links, search, graph, boosting, rescoring, space):
    """All ways into the next frame that stay below the cutoff, or the cheapest if they are too many.

    If there is no room for all keys, that may be since the cutoff was not low yet: once more, with only
    those entered that stay below the last cutoff. If they still are too many, the highest rank is looked
    for with which they fit, until half of the room is used. Each try finds the same ways.
    """
    front, tries = space.front[0], 0
    low = high = front.last = ANY_RANK
    while tries < 3 or low < high:
        status = _expand(row, progress, links, search, graph, boosting, rescoring, space)
        tries += 1
        if status not in (DONE, NO_TOKEN) or (tries <= 2 and not front.full):
            break
        if tries == 1:
            high = front.last = rank_of(front.cutoff, 0, 0) + (1 << RANK_BITS)
            continue
        if tries == 2:
            progress.overflowed += 1
            low = rank_of(front.best, 0, 0)
        elif front.full:
            high = front.last
        elif high - low <= 1 or 2 * front.tokens >= len(space.following):
            break
        else:
            low = front.last  # also if there is no token: none ranks so high
        front.last = low + (high - low) // 2
    if tries == 2:
        front.last = ANY_RANK  # nothing was left out
    return status


@inlined
def _expand(row, progress, links, search, graph, boosting, rescoring, space):
    """All ways into the next frame that stay below the cutoff, as far as there is room for their keys.

    Fills space.following.
    """
    front = space.front[0]
    front.tokens = front.candidates = front.links = 0
    front.groups = front.histories = front.members = front.errands = front.ordered = 0
    front.look_ups = front.memo_hits = front.arc_visits = front.prolonged = 0
    front.full = False
    front.best = front.cutoff = LARGEST
    front.ahead_source = NONE
    void_tables(progress.tokens, space)
    status = DONE
    if search.topology != GRAPH:
        status = _stay(row, progress, links, search, graph, boosting, space)
    if status == DONE and not choose_labels(row, search, space):
        status = BAD_FRAME
    if status == DONE and not search.lazy:
        status = take_all_arcs(row, progress, links, search, graph, boosting, rescoring, space)
    elif status == DONE and front.labels > 0:
        status = _expand_lazily(row, progress, links, search, graph, boosting, rescoring, space)
    if status == DONE:
        status = recombine(progress, links, search, graph, boosting, space)
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
        narrow_labels(row, search, space)
    if front.labels == 0:
        return status
    least = cost_of(row, space.labels[0], search)
    for i in range(1, front.labels):
        least = min(least, cost_of(row, space.labels[i], search))
    for i in range(progress.tokens):
        status = join_groups(i, least, search, graph, boosting, space)
        if status != DONE:
            return status
    if front.groups > 0:
        status = take_arcs(row, progress, links, search, graph, boosting, space)
    if status == DONE and front.errands > 0:
        status = run_errands(row, progress, links, search, graph, boosting, rescoring, space)
    return status


@no_refcount
def _stay(row, progress, links, search, graph, boosting, space):
    """Step 1: a blank, or the last label again."""
    front, status = space.front[0], DONE
    if not row[search.blank_id] <= LARGEST:
        return BAD_FRAME
    blank_cost = cost_of(row, search.blank_id, search)
    for i in range(progress.tokens):
        if front.candidates + 4 > len(space.candidates):  # two for this one, and one to look ahead
            status = recombine(progress, links, search, graph, boosting, space)
            if status != DONE:
                break
        cost, key, lm = space.current[i].cost, space.current[i].key, space.current[i].lm
        label = label_of(key)
        offer(cost + blank_cost, key - label, lm, i, BLANK_MOVE, NONE, search, space)
        if label > 0:  # 0 after a blank, and always with topology "minimal"
            total = cost + cost_of(row, label - 1, search)
            offer(total, key, lm, i, REPEAT_MOVE, NONE, search, space)
    return status


@no_refcount
def _look_ahead(row, progress, search, graph, boosting, rescoring, space):
    """Take the best token's way that looks best, if by the small LM it costs less than all known ones.

    Of equal ones, the first by epsilon record and arc. The LMs are asked for it, so that it lowers the
    cutoff by its true cost; as it is taken at once, there is a token below that cutoff.
    """
    best = 0
    for i in range(1, progress.tokens):
        token, other = space.current[i], space.current[best]
        if token.cost < other.cost or (token.cost == other.cost and is_first(token, other)):
            best = i
    token = space.current[best]
    state = graph.states[state_of(token.key)]
    front, least = space.front[0], space.front[0].best
    last_epsilon, last_arc, last_boost = NONE, NONE, boost_of(token.key)
    for e in range(state.epsilon_begin - 1, state.epsilon_end):
        cost, boost, source, epsilon = token.cost, boost_of(token.key), state, NONE
        if e >= state.epsilon_begin:
            record, epsilon = graph.epsilons[e], e
            bonus, boost = boosted(record.word, boost, search, graph, boosting)
            cost += search.lm_weight * record.cost
            cost -= bonus
            source = graph.states[record.target]
        total, a = _likeliest_arc(row, least, cost, boost, token, source, search, graph, boosting, space)
        if total < least:
            least, last_epsilon, last_arc, last_boost = total, epsilon, a, boost
    if last_arc == NONE:
        return
    correction, lm, arc = np.float32(0.0), token.lm, graph.arcs[last_arc]
    if last_epsilon != NONE and graph.epsilons[last_epsilon].word != 0:
        word = graph.epsilons[last_epsilon].word
        correction, lm = ask(word, lm, front, search, graph, rescoring, space.memo)
    if arc.word != 0:
        more, lm = ask(arc.word, lm, front, search, graph, rescoring, space.memo)
        correction += more
        _, last_boost = boosted(arc.word, last_boost, search, graph, boosting)
    front.ahead_source, front.ahead_arc, front.ahead_epsilon = best, last_arc, last_epsilon
    key = target_key(arc, last_boost, search)
    offer(least + correction, key, lm, best, last_arc, last_epsilon, search, space)


@inlined
def _likeliest_arc(row, least, cost, boost, token, state, search, graph, boosting, space):
    """The arc of a state with the least cost by the small LM below `least`, and that cost."""
    front, best = space.front[0], NONE
    for i in range(front.labels):
        label = space.labels[i]
        acoustic_cost = cost_of(row, label, search)
        if cost + search.lm_weight * state.least_cost - search.most_bonus + acoustic_cost > least:
            if front.labels <= SORTED_LABELS:
                break
            continue
        if search.topology == NORMAL and label == np.int32(label_of(token.key)) - 1:
            continue
        a = first_arc(graph.arcs, state, label)
        while a < state.arc_end and graph.arcs[a].label == label:
            bonus, _ = boosted(graph.arcs[a].word, boost, search, graph, boosting)
            total = cost + search.lm_weight * graph.arcs[a].cost - bonus + acoustic_cost
            if total < least or (total == least and a < best):  # no arc is before NONE
                least, best = total, a
            a += 1
    return least, best
