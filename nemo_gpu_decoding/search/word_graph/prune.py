"""Prune a frame (step 4 of `frame.py`): keep the surviving tokens, their back-pointers, and links between them."""

import numpy as np

from nemo_gpu_decoding.graph.csr import GRAPH
from nemo_gpu_decoding.jit import linked
from nemo_gpu_decoding.search.word_graph import keys
from nemo_gpu_decoding.search.word_graph.candidates import cost_of

BINS = 256  # of the histogram of costs
UNKNOWN = np.float32(-1)  # a posterior that is not computed yet
WIDENING = np.float32(1.25)  # factor of the beam if fewer than min_active tokens are within it
WIDEST = np.float32(16)  # the beam of a frame is widened while it is narrower than this times the beam


@linked
def prune(row, state, search, work):
    """Take step 4: the surviving tokens become work.current. Nothing changes if the back-pointers do not fit."""
    counters, frame, next_tokens = state.counters[0], work.frame[0], work.next_tokens
    kept, limited = choose_tokens(next_tokens, frame, search.params, work)
    if counters.back_pointers + kept > len(state.back_pointers):
        frame.status = keys.BACK_POINTERS_FULL
        return
    for i in range(frame.tokens):
        if work.renumbered[i] != keys.NONE:
            _add_back_pointer(next_tokens[i], row, state, search, work)
    if search.params.keeps_links:
        _keep_links(row, state, search, work)
    keep_tokens(kept, limited, counters, work)


@linked
def keep_tokens(kept, limited, counters, work):
    """Copy the `kept` tokens that `choose_tokens` chose to work.current, and count the frame."""
    frame = work.frame[0]
    for i in range(frame.tokens):
        index = work.renumbered[i]
        if index != keys.NONE:
            work.current[index] = work.next_tokens[i]
            work.current[index].cost -= frame.best
    counters.limited += limited or frame.last_rank != keys.ANY_RANK
    counters.tokens = kept
    counters.cost += np.float64(frame.best)
    counters.frames += 1


@linked
def widen_beam(params, work):
    """If fewer than min_active next tokens are within the beam of the frame, set a wider beam and return True."""
    frame, within = work.frame[0], 0
    if params.min_active == 0 or frame.beam >= WIDEST * params.beam:
        return False
    for i in range(frame.tokens):
        within += work.next_tokens[np.uintp(i)].cost <= frame.best + frame.beam
    if within >= params.min_active:
        return False
    frame.beam *= WIDENING
    return True


@linked
def choose_tokens(tokens, frame, params, work):
    """Choose the tokens within the beam, about max_active at most; their order stays.

    A histogram of the costs has 256 bins of beam / 256. The cheapest bins survive as long as they have at most
    max_active tokens together; the first bin always survives. After widening for min_active, only as many bins survive
    as are needed for min_active tokens. work.renumbered gets the index of each token in the next frame, or NONE.

    Returns:
        the number of tokens chosen, and whether max_active excluded any.
    """
    count, best, beam, is_widened = frame.tokens, frame.best, frame.beam, frame.beam > params.beam
    last, scale = BINS - 1, np.float32(BINS) / beam
    if count > params.max_active or is_widened:
        histogram, last = work.histogram, 0
        histogram[:] = 0
        for i in range(count):
            if tokens[i].cost <= best + beam:
                histogram[_bin(tokens[i].cost, best, scale)] += 1
        total = histogram[0]
        while last < BINS - 1 and total + histogram[last + 1] <= params.max_active:
            if is_widened and total >= params.min_active:
                break
            last += 1
            total += histogram[last]
    kept, within = 0, 0
    for i in range(count):
        work.renumbered[i] = keys.NONE
        if tokens[i].cost <= best + beam:
            within += 1
            if _bin(tokens[i].cost, best, scale) <= last:
                work.renumbered[i] = kept
                kept += 1
    return kept, kept < within and not is_widened


@linked
def _bin(cost, best, scale):
    return min(np.int64((cost - best) * scale), BINS - 1)


@linked
def move_of(arc, epsilon, source, state, search):
    """Return the move of an arc: BLANK_MOVE, REPEAT_MOVE or NEW_TOKEN.

    A ready-made graph contains the topology in its arcs. In such a graph, an arc that reads the blank is a BLANK_MOVE
    unless it emits a word, and a self-loop that reads the last label is a REPEAT_MOVE.
    """
    if arc < 0:
        return arc
    arcs, params = search.graph.arcs, search.params
    if params.topology != GRAPH or epsilon != keys.NONE or arcs[arc].olabel != 0:
        return keys.NEW_TOKEN
    if arcs[arc].ilabel == params.blank_id:
        return keys.BLANK_MOVE
    if arcs[arc].target != keys.state_of(source.key) or source.back_pointer == keys.NONE:
        return keys.NEW_TOKEN
    last_label = arcs[state.back_pointers[source.back_pointer].arc].ilabel
    return keys.REPEAT_MOVE if arcs[arc].ilabel == last_label else keys.NEW_TOKEN


@linked
def label_read(arc, key, search):
    """Return the label (column of the log-probs) that an arc or a move to a token with this key reads."""
    if arc >= 0:
        return np.int64(search.graph.arcs[arc].ilabel)
    return keys.label_of(key) - 1 if arc == keys.REPEAT_MOVE else np.int64(search.params.blank_id)


@linked
def _add_back_pointer(token, row, state, search, work):
    """Give a token the back-pointers of its source, and a new one if it has a new label."""
    source, label = work.current[np.uintp(token.source)], label_read(token.arc, token.key, search)
    is_blank, probability = label == search.params.blank_id, np.float32(0.0)
    if not is_blank:
        probability = work.posteriors[label]
        if probability == UNKNOWN:  # computed in double and rounded once: all libraries and devices agree to the bit
            probability = work.posteriors[label] = np.float32(np.exp(np.float64(row[label])))
    move = move_of(token.arc, token.epsilon, source, state, search)
    step = token.arc, token.epsilon, state.counters[0].frames, probability, is_blank
    take_step(token, source, move, step, state)


@linked
def take_step(token, source, move, step, state):
    """Give a token the back-pointers of its source, and a new one if the move is NEW_TOKEN.

    Args:
        token: of the search, or a context of a node with composition "let".
        step: arc, closure arc, frame, posterior of the label, whether the label is the blank.
    """
    arc, epsilon, frame, probability, is_blank = step
    token.back_pointer, token.run, token.probability = source.back_pointer, source.run, source.probability
    if move == keys.REPEAT_MOVE:
        token.run += 1
        token.probability += probability
    elif move == keys.NEW_TOKEN:
        counters = state.counters[0]
        new = state.back_pointers[np.uintp(counters.back_pointers)]
        new.previous, new.arc, new.epsilon = source.back_pointer, arc, epsilon
        new.frame, new.run, new.probability = frame, source.run, source.probability
        token.back_pointer, token.run, token.probability = counters.back_pointers, not is_blank, probability
        counters.back_pointers += 1


@linked
def _keep_links(row, state, search, work):
    """Keep the links of the frame between surviving tokens whose extra cost is within the lattice beam."""
    counters, links = state.counters[0], state.links
    begin, kept = counters.links, counters.links
    for i in range(begin, begin + work.frame[0].links):
        source, target = work.current[links[i].source], work.next_tokens[links[i].target]
        index = work.renumbered[links[i].target]
        if index == keys.NONE or links[i].acoustic_cost > work.frame[0].cutoff:
            continue  # the cutoff was higher when the link was found
        if source.cost + links[i].cost - target.cost > search.params.lattice_beam:
            continue
        links[kept] = links[i]
        link = links[kept]
        label = label_read(link.arc, target.key, search)
        link.target, link.ilabel = index, label
        link.acoustic_cost = cost_of(row, label, search)
        link.move = move_of(link.arc, link.epsilon, source, state, search)
        kept += 1
    counters.links = kept
