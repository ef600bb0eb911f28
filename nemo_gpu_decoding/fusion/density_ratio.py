"""Combine an LM minus a source LM to one automaton (density ratio) [arXiv 2002.11268; LODR, arXiv 2203.16776].

An acoustic network has learnt the language of its training text. An LM that is added to the network's scores counts
this knowledge twice. The density ratio subtracts a source LM, an n-gram LM of the training text:

    log p(v) + lm_weight * log P_LM(v) - source_lm_weight * log P_source(v)

The automaton has the weights log P_LM - ratio * log P_source with ratio = source_lm_weight / lm_weight, and the
searches multiply them by lm_weight. So the LM score of a transducer's blank keeps the weight lm_weight, see
`search/transducer/scoring.py`.

A state is a pair of an LM state t and a source state s. A look-up backs off in the LM first, then in the source:

    pair            arcs                                         backs off to
    (t, s)          those of t; the source reads their labels    (back-off of t, s)
    (root, s)       those of s; the LM reads their labels        (root, back-off of s)
    (root, root)    all labels

Every weight is therefore exact for any two LMs. The context of t determines s unless s has the longer context. With a
bigram source, the automaton has as many states as the LM, and about one more per token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns, SortedArcs, in_ranges

LEAST_WEIGHT = -100.0  # of a source LM, natural log; below are probabilities of 0, which ARPA files write as 1e-99


def density_ratio(lm: BackoffAutomaton, source: BackoffAutomaton, ratio: float) -> BackoffAutomaton:
    """Return the automaton whose weights are the weights of `lm` minus `ratio` times the weights of `source`.

    Final weights subtract the source's weight of </s>, unless the source has no </s> in that state.

    Args:
        lm, source: n-gram LMs over the same tokens.
        ratio: the source's weight divided by the LM's, >= 0.

    Raises:
        ValueError: the source has another vocabulary, or a token with probability 0.
    """
    if lm.vocab_size != source.vocab_size:
        raise ValueError(
            f"source_lm ({source.name}) was made for {source.vocab_size} tokens, "
            f"expected {lm.vocab_size} as in lm ({lm.name})"
        )
    _check_positive(source)
    own, other = _Reader(lm, 1.0, source.num_states), _Reader(source, -ratio, 1)
    known, parts = np.zeros(0, np.int64), []
    new = np.array([lm.start_state * own.step + source.start_state], np.int64)
    while len(new):
        t, s = np.divmod(new, own.step)
        by_lm = ~own.is_root[t] | other.is_root[s]
        parts += [_leaving(own, other, t[by_lm], s[by_lm]), _leaving(other, own, s[~by_lm], t[~by_lm])]
        known = np.union1d(known, new)
        reached = np.concatenate([pairs for part in parts[-2:] for pairs in (part.backoff_to, part.targets)])
        new = np.setdiff1d(np.unique(reached), known, assume_unique=True)
    part = _Part(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.argsort(part.pairs)
    ordered = part.pairs[order]
    backoff_to, targets = (order[np.searchsorted(ordered, pairs)] for pairs in (part.backoff_to, part.targets))
    t, s = np.divmod(part.pairs, own.step)
    subtracted = other.states["final_weight"][s].astype(np.float64)
    subtracted[subtracted < LEAST_WEIGHT] = 0.0
    final_weights = own.states["final_weight"][t] - ratio * subtracted
    of_states = backoff_to, part.backoff_weights, final_weights
    columns = Columns.grouped(part.counts, *of_states, part.labels, part.weights, targets)
    return BackoffAutomaton.from_columns(columns, lm.vocab_size, 0, f"{lm.name} - {ratio:.3g} * {source.name}")


def _check_positive(source: BackoffAutomaton) -> None:
    """Raise a ValueError if a token has probability 0 in the source: its density ratio would be infinite."""
    states, arcs = source.arrays
    impossible = np.flatnonzero(arcs["weight"] < LEAST_WEIGHT)
    if len(impossible) or (states["backoff_weight"] < LEAST_WEIGHT).any():
        token = f"token {arcs['label'][impossible[0]]}" if len(impossible) else "unseen tokens"
        raise ValueError(
            f"source_lm ({source.name}) gives {token} probability 0, expected a probability above 0 for every "
            "token: estimate it with <unk>, as build-lm does"
        )


class _Part(NamedTuple):
    """N states of the density ratio and their A arcs. The pair (t, s) has the number t * states of the source + s."""

    pairs: np.ndarray  # [N]
    counts: np.ndarray  # [N] number of arcs of each pair
    backoff_to: np.ndarray  # [N] pairs
    backoff_weights: np.ndarray  # [N]
    labels: np.ndarray  # [A]
    weights: np.ndarray  # [A]
    targets: np.ndarray  # [A] pairs


def _leaving(own: _Reader, other: _Reader, states: np.ndarray, others: np.ndarray) -> _Part:
    """Return the pairs of `states` of one automaton and `others` of the other that have the arcs of `states`."""
    counts, rows, arcs = own.arcs_of(states)
    weights, after = other.read(others[rows], arcs["label"])
    beside = other.step * others
    return _Part(
        own.step * states + beside, counts, own.step * own.backoff_to[states] + beside,
        own.factor * own.backoff_weights[states], arcs["label"], own.factor * arcs["weight"] + other.factor * weights,
        own.step * arcs["target"].astype(np.int64) + other.step * after,
    )  # fmt: skip


class _Reader(SortedArcs):
    """An automaton with vectorised look-ups, for many states and labels at once.

    Args:
        factor: of its weights in the density ratio.
        step: of a pair's number from one state of this automaton to the next.
    """

    def __init__(self, automaton: BackoffAutomaton, factor: float, step: int) -> None:
        super().__init__(*automaton.arrays)
        self.factor, self.step = factor, step
        self.states = automaton.arrays.states
        self.backoff_to = self.states["backoff_to"].astype(np.int64)
        self.backoff_weights = self.states["backoff_weight"].astype(np.float64)
        self.is_root = self.backoff_to == np.arange(len(self.states))

    def arcs_of(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for states [N] the numbers of arcs, [N], the row in `states` of each arc, [A], and the arcs, [A]."""
        rows, places = in_ranges(self.begins[states], self.counts[states])
        return self.counts[states], rows, self.arcs[places]

    def read(self, states: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weight of labels[i] in states[i], back-offs included, [A] float64; and the next states, [A]."""
        weights, after = np.zeros(len(labels)), states.copy()
        pending = np.arange(len(labels))
        while len(pending):
            states = after[pending]
            arc, is_found = self.find(states, labels[pending])
            read, arc = pending[is_found], arc[is_found]
            weights[read] += self.arcs["weight"][arc]
            after[read] = self.arcs["target"][arc]
            pending, states = pending[~is_found], states[~is_found]
            weights[pending] += self.backoff_weights[states]
            after[pending] = self.backoff_to[states]
        return weights, after
