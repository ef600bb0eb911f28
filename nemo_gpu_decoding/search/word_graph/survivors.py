"""Step 4 of a frame: the tokens that survive, what they remember, and the links between them."""

from __future__ import annotations

import numpy as np

from nemo_gpu_decoding.graph.topology import GRAPH
from nemo_gpu_decoding.jit import inlined, no_refcount
from nemo_gpu_decoding.search.word_graph.tokens import (
    ANY_RANK,
    BLANK_MOVE,
    NEW_TOKEN,
    NONE,
    REPEAT_MOVE,
    cheapest,
    label_of,
    state_of,
)
from nemo_gpu_decoding.search.word_graph.ways import DONE, RECORDS_FULL, cost_of


@no_refcount
def commit(row, progress, records, links, search, graph, space):
    """Step 4: what survives becomes space.current, with its past in `records`."""
    front, following = space.front[0], space.following
    kept, limited = cheapest(
        following, front.tokens, front.best, search.beam, search.max_active, space.histogram,
        space.renumbered,
    )  # fmt: skip
    if progress.records + kept > len(records):
        return RECORDS_FULL
    progress.limited += limited or front.last != ANY_RANK
    for i in range(front.tokens):
        if space.renumbered[i] != NONE:
            _remember(following[i], row, progress, records, search, graph, space.current)
    if search.keeps_links:
        _keep_links(row, progress, links, records, search, graph, space)
    for i in range(front.tokens):
        place = space.renumbered[i]
        if place != NONE:
            space.current[place] = following[i]
            space.current[place].cost -= front.best
    progress.tokens = kept
    progress.cost += np.float64(front.best)
    progress.frames += 1
    return DONE


@inlined
def _move_of(arc, epsilon, source, records, search, graph):
    """What reading an arc means: a blank, the last label again, or something new.

    The arcs of a ready-made graph contain its topology: an arc that reads the blank tells nothing new
    unless it tells a word, and a loop that reads the last label again makes the token longer.
    """
    if arc < 0:
        return arc
    if search.topology != GRAPH or epsilon != NONE or graph.arcs[arc].word != 0:
        return NEW_TOKEN
    if graph.arcs[arc].label == search.blank_id:
        return BLANK_MOVE
    if graph.arcs[arc].target != state_of(source.key) or source.record == NONE:
        return NEW_TOKEN
    last_label = graph.arcs[records[source.record].arc].label
    return REPEAT_MOVE if graph.arcs[arc].label == last_label else NEW_TOKEN


@inlined
def _label_read(arc, key, search, graph):
    """The column that a move to a token with this key reads."""
    if arc >= 0:
        return np.int64(graph.arcs[arc].label)
    return label_of(key) - 1 if arc == REPEAT_MOVE else np.int64(search.blank_id)


@inlined
def _remember(token, row, progress, records, search, graph, current):
    """Give a surviving token its past: that of its source, and a new record if it has a new label."""
    source = current[token.source]
    token.record, token.run, token.probability = source.record, source.run, source.probability
    move = _move_of(token.arc, token.epsilon, source, records, search, graph)
    if move == BLANK_MOVE:
        return
    label = _label_read(token.arc, token.key, search, graph)
    probability = np.float32(0.0)
    if label != search.blank_id:  # in double, libraries and devices agree to the last bit
        probability = np.float32(np.exp(np.float64(row[label])))
    if move == REPEAT_MOVE:
        token.run += 1
        token.probability += probability
        return
    record = records[progress.records]
    record.previous, record.arc, record.epsilon = source.record, token.arc, token.epsilon
    record.frame, record.run, record.probability = progress.frames, source.run, source.probability
    token.record = progress.records
    progress.records += 1
    token.run = 1 if label != search.blank_id else 0
    token.probability = probability


@inlined
def _keep_links(row, progress, links, records, search, graph, space):
    """Keep the frame's links between survivors that are not hopeless for the lattice."""
    begin, kept = progress.links, progress.links
    for i in range(begin, begin + space.front[0].links):
        source, target = space.current[links[i].source], space.following[links[i].target]
        place = space.renumbered[links[i].target]
        if place == NONE or links[i].acoustic_cost > space.front[0].cutoff:
            continue  # the cutoff may have been higher when the link was found
        if source.cost + links[i].cost - target.cost > search.lattice_beam:
            continue
        links[kept] = links[i]
        link = links[kept]
        label = _label_read(link.arc, target.key, search, graph)
        link.target, link.label = place, label
        link.acoustic_cost = cost_of(row, label, search)
        link.move = _move_of(link.arc, link.epsilon, source, records, search, graph)
        kept += 1
    progress.links = kept
