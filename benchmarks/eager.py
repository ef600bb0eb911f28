"""Ablations of paged_biglm on a CPU: what its frame saves is measured without it.

    eager          every token takes every arc of its state, and queries the LMs before it is pruned [BigLM]
    bounded_eager  the arcs and bounds of lazy composition, but words query the LMs before they are pruned
    eager_groups   the same, and tokens in one graph state look at its arcs together [LET, IV-C]

With a wide beam the results are those of lazy composition. The functions are those of `frame.py` and of
`large_lm/contexts.py`, with another decision in `_expand`, `_join`, `_expand_group` and `_expand_deferred`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding import PagedBigLM
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.graph.csr import NORMAL, first_arc
from nemo_gpu_decoding.jit import linked, no_refcount
from nemo_gpu_decoding.search.engine import Engine, Streams
from nemo_gpu_decoding.search.numerics import LARGEST
from nemo_gpu_decoding.search.word_graph import candidates, frame, keys, labels, prune, token_groups
from nemo_gpu_decoding.search.word_graph.cpu_engine import CPUEngine, read_chunk
from nemo_gpu_decoding.search.word_graph.keys import DONE, NONE, Origin
from nemo_gpu_decoding.search.word_graph.large_lm import contexts
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LmPair, query
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels


class EagerScorer(NamedTuple):
    """An `LmScorer`, and which ablation it is for."""

    lms: LmPair
    difference_weight: np.float32
    group_size: int
    bounded: bool  # by the cutoff and by the labels that may stay within the beam
    grouped: bool  # tokens in one graph state look at its arcs together


@no_refcount
def advance(log_probs, begin, end, state, search, lm, work):
    """As `frame.advance`."""
    now = work.frame[0]
    for t in range(begin, end):
        if now.status == keys.BACK_POINTERS_FULL:
            now.status = DONE
        else:
            _expand_or_bisect(log_probs[t], state, search, lm, work)
        if now.status == DONE:
            prune.prune(log_probs[t], state, search, work)
        if now.status != DONE:
            return t, now.status
        contexts.count_work(state.counters[0], now)
    return end, DONE


@linked
def _expand_or_bisect(row, state, search, lm, work):
    """As in `frame.py`."""
    now, tries = work.frame[0], 0
    low = high = now.last_rank = keys.ANY_RANK
    while tries < 3 or low < high:
        _expand(row, state, search, lm, work)
        tries += 1
        if (now.status != DONE and now.status != keys.NO_TOKEN) or (tries <= 2 and not now.full):
            break
        if tries == 1:
            high = now.last_rank = keys.rank_of(now.cutoff, 0, 0) + (1 << keys.HASH_BITS)
            continue
        if tries == 2:
            state.counters[0].overflowed += 1
            low = keys.rank_of(now.best, 0, 0)
        elif now.full:
            high = now.last_rank
        elif high - low <= 1 or 2 * now.tokens >= len(work.next_tokens):
            break
        else:
            low = now.last_rank
        now.last_rank = low + (high - low) // 2
    if tries == 2:
        now.last_rank = keys.ANY_RANK


@linked
def _expand(row, state, search, lm, work):
    """All candidates that stay below the cutoff, as far as there is capacity for their keys."""
    now = work.frame[0]
    now.beam = search.params.beam
    frame.begin_frame(LARGEST, state.counters[0].tokens, work)
    frame.offer_blanks_and_repeats(row, state, search, lm, work)
    if now.status == DONE and not labels.choose_labels(row, search, work):
        now.status = keys.BAD_FRAME
    if now.status == DONE:
        contexts.begin_frame(work)
        if lm.bounded:
            _expand_groups(row, state, search, lm, work)
        else:
            _expand_all_arcs(row, state, search, lm, work)
    if now.status == DONE:
        candidates.recombine(state, search, lm, work)
    if now.status == DONE and now.tokens == 0:
        now.status = keys.NO_TOKEN


# ------------------------------------------------------------------------------------------- eager


@linked
def _expand_all_arcs(row, state, search, lm, work):
    """All arcs of all tokens, also by way of closure arcs."""
    graph, weights, now = search.graph, search.weights, work.frame[0]
    for i in range(state.counters[0].tokens):
        token = work.current[i]
        now.expanded += 1
        own = graph.states[keys.state_of(token.key)]
        for e in range(own.epsilon_begin - 1, own.epsilon_end):
            cost, start, before = token.cost, keys.boost_of(token.key), token.lm
            source, epsilon, first = own, NONE, np.float32(0.0)
            if e >= own.epsilon_begin:
                closure, epsilon = graph.epsilons[e], e
                source = graph.states[closure.target]
                cost += weights.lm_weight * closure.cost
                if closure.olabel != 0:
                    bonus, start = candidates.boosted(closure.olabel, start, search)
                    cost -= bonus
                    first, before = query(closure.olabel, before, search, lm, work)
            for a in range(source.arc_begin, source.arc_end):
                now.arc_visits += 1
                arc, boost, context, difference = graph.arcs[a], start, before, first
                if search.params.topology == NORMAL and arc.ilabel + 1 == keys.label_of(token.key):
                    continue
                bonus = np.float32(0.0)
                if arc.olabel != 0:
                    bonus, boost = candidates.boosted(arc.olabel, boost, search)
                    more, context = query(arc.olabel, context, search, lm, work)
                    difference += more
                acoustic_cost = candidates.cost_of(row, arc.ilabel, search)
                total = cost + weights.lm_weight * arc.cost - bonus + acoustic_cost + difference
                key, origin = token_groups.target_key(arc, boost, search), Origin(a, i, epsilon)
                candidates.offer(total, key, context, origin, search, lm, work)
                if now.candidates == len(work.candidates):
                    candidates.recombine(state, search, lm, work)


# ---------------------------------------------------------------------- bounded_eager, eager_groups


@linked
def _expand_groups(row, state, search, lm, work):
    """As in `frame.py`."""
    now = work.frame[0]
    if now.labels > 0:
        contexts.tighten_cutoff(row, state, search, lm, work)
    labels.rank_labels(row, search, work)
    if now.labels > 0:
        _epsilon_closure(row, state.counters[0].tokens, search, lm, work)
        if now.status == DONE:
            cheapest = 0
            for g in range(now.groups):
                if work.lm.groups[g].cost < work.lm.groups[cheapest].cost:
                    cheapest = g
            for n in range(now.groups):
                g = cheapest if n == 0 else (n - 1 if n <= cheapest else n)
                _expand_group(g, row, state, search, lm, work)
        _expand_deferred(row, state, search, lm, work)


@linked
def _epsilon_closure(row, count, search, lm, work):
    """As in `frame.py`."""
    graph, weights = search.graph, search.weights
    cutoff, least = work.frame[0].cutoff, candidates.cost_of(row, work.labels[0], search)
    for i in range(count):
        token = work.current[i]
        source = graph.states[keys.state_of(token.key)]
        for e in range(source.epsilon_begin - 1, source.epsilon_end):
            cost, boost, epsilon, olabel = token.cost, keys.boost_of(token.key), NONE, np.int32(0)
            target, least_arc = keys.state_of(token.key), source.least_cost
            if e >= source.epsilon_begin:
                closure = graph.epsilons[e]
                epsilon, target, least_arc = e, np.int64(closure.target), closure.least_cost
                olabel = closure.olabel
                bonus, boost = candidates.boosted(olabel, boost, search)
                cost = cost + weights.lm_weight * closure.cost - bonus
            if candidates.least_total(cost, least_arc, least, search) <= cutoff:
                key, origin = keys.key_of(target, boost, 0) >> 16, Origin(NONE, i, epsilon)
                _join(key, olabel, cost, origin, search, lm, work)


@linked
def _join(key, olabel, cost, origin, search, lm, work):
    """Put a token into its LM context of a group; the word of a closure arc queries the LMs here."""
    now, slots, entries = work.frame[0], work.lm.context_slots, work.lm.contexts
    context, none = work.current[origin.source].lm, np.int32(0)
    if olabel != 0:
        difference, context = query(olabel, context, search, lm, work)
        cost += difference
    slot = contexts.find_context_slot(key, context, none, work)
    if slots[slot].stamp == work.stamps[2]:
        c = slots[slot].entry
        token_groups.keep_best(entries[c], cost, origin, search, lm, work)
        group = work.lm.groups[entries[c].group]
        group.cost = min(group.cost, cost)
    elif now.contexts == len(entries):
        now.status = keys.GROUPS_FULL
        return
    else:
        c = np.int32(now.contexts)
        candidates.fill_slot(slots, slot, work.stamps[2], c)
        token_groups.begin_group(entries[c], key, cost, origin, search, work)
        entries[c].lm, entries[c].lm_after, entries[c].olabel = context, context, none
        entries[c].difference = np.float32(0.0)
        if lm.grouped:
            g = contexts.group_of(key, work)
        else:
            g = contexts.new_group(key, work)
        contexts.add_context(c, g, work)
    if search.params.keeps_links:
        token_groups.add_group_token(entries[c], cost, origin, work)


@linked
def _expand_group(g, row, state, search, lm, work):
    """As in `frame.py`, but arcs with words are taken whatever they cost."""
    now, arcs, group = work.frame[0], search.graph.arcs, work.lm.groups[g]
    source = search.graph.states[group.key >> 16]
    count = source.arc_end - source.arc_begin
    rounds = 1 if count <= labels.SMALL_STATE else labels.labels_within(group.cost, source, row, search, work)
    walks = count <= labels.SMALL_STATE * rounds
    for n in range(1 if walks else rounds):
        label, first = NONE, source.arc_begin
        if not walks:
            label = work.labels[n]
            acoustic_cost = candidates.cost_of(row, label, search)
            if candidates.least_total(group.cost, source.least_cost, acoustic_cost, search) > now.cutoff:
                continue
            first = first_arc(search.arc_index, arcs, group.key >> 16, source, label)
        for a in range(first, source.arc_end):
            arc = arcs[a]
            if not walks and arc.ilabel != label:
                break
            now.arc_visits += 1
            acoustic_cost = candidates.cost_of(row, arc.ilabel, search)
            is_below = not candidates.least_total(group.cost, arc.cost, acoustic_cost, search) > now.cutoff
            if is_below or arc.olabel != 0:
                contexts.expand_arc(a, g, acoustic_cost, state, search, lm, work)


@linked
def _expand_deferred(row, state, search, lm, work):
    """The arcs that query the LMs, for all contexts, whatever they cost before the query."""
    arcs = search.graph.arcs
    for n in range(work.frame[0].deferred if work.frame[0].status == DONE else 0):
        group, a = work.lm.groups[work.lm.deferred[n].group], work.lm.deferred[n].arc
        acoustic_cost = candidates.cost_of(row, arcs[a].ilabel, search)
        if not candidates.least_total(group.cost, arcs[a].cost, acoustic_cost, search) > LARGEST:
            contexts.expand_with_lm(a, group, acoustic_cost, LARGEST, state, (search, lm), work)


# ---------------------------------------------------------------------------------------- decoders


class EagerEngine(CPUEngine):
    """`CPUEngine` with `advance` of this file."""

    read = staticmethod(partial(read_chunk, advance=advance))


class Eager(PagedBigLM):
    """Eager composition [BigLM]."""

    bounded, grouped = False, False

    def _cpu_engine(self, streams: Streams) -> Engine:
        return EagerEngine(self._models_of, streams.fusion, self.config)

    def _models_of(self, fusion: BatchFusion, i: int) -> StreamModels:
        models = super()._models_of(fusion, i)
        assert models.lm_scorer is not None
        scorer = EagerScorer(*models.lm_scorer, self.bounded, self.grouped)
        return replace(models, lm_scorer=scorer)  # type: ignore[arg-type]


class BoundedEager(Eager):
    """Eager composition of which arcs and bounds are those of lazy: the fair baseline."""

    bounded = True


class EagerGroups(Eager):
    """Token groups without laziness [LET, IV-C]: LMs are queried before words are pruned."""

    bounded, grouped = True, True
