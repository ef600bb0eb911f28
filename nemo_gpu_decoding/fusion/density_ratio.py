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

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns, SortedArcs

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
    pairs = _Pairs(_Reader(lm), _Reader(source), ratio)
    start = pairs.numbers(lm.start_state, source.start_state)
    known, parts = np.zeros(0, np.int64), []
    new = np.array([start], np.int64)
    while len(new):
        parts.append(pairs.leaving(new))
        known = np.union1d(known, new)
        reached = np.unique(np.append(parts[-1].backoff_to, parts[-1].targets))
        new = np.setdiff1d(reached, known, assume_unique=True)
    columns = _columns(_Part(*map(np.concatenate, zip(*parts, strict=True))))
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
    """N states of the density ratio and their A arcs; a state is a pair, numbered by `_Pairs.numbers`."""

    pairs: np.ndarray  # [N]
    counts: np.ndarray  # [N] number of arcs of each pair
    backoff_to: np.ndarray  # [N] pairs
    backoff_weights: np.ndarray  # [N]
    final_weights: np.ndarray  # [N]
    labels: np.ndarray  # [A]
    weights: np.ndarray  # [A]
    targets: np.ndarray  # [A] pairs


class _Pairs:
    """The pairs of an LM state and a source state, which are the states of the density ratio."""

    def __init__(self, lm: _Reader, source: _Reader, ratio: float) -> None:
        self.lm, self.source, self.ratio = lm, source, ratio

    def numbers(self, t, s):
        """Return the number of each pair of LM state t and source state s."""
        return t * len(self.source.states) + s

    def leaving(self, numbers: np.ndarray) -> _Part:
        """Return the arcs, back-off arcs and final weights of the pairs with these numbers."""
        t, s = np.divmod(numbers, len(self.source.states))
        by_lm = ~self.lm.is_root[t] | self.source.is_root[s]
        parts = [self._leaving_lm(t[by_lm], s[by_lm]), self._leaving_source(t[~by_lm], s[~by_lm])]
        return _Part(*map(np.concatenate, zip(*parts, strict=True)))

    def _leaving_lm(self, t: np.ndarray, s: np.ndarray) -> _Part:
        """Return the arcs of pairs (t, s) that back off in the LM, or whose states are both roots."""
        counts, rows, arcs = self.lm.arcs_of(t)
        weights, after = self.source.read(s[rows], arcs["label"])
        backoff_to = self.numbers(self.lm.backoff_to[t], s)
        return _Part(
            self.numbers(t, s), counts, backoff_to, self.lm.backoff_weights[t], self._final_weights(t, s),
            arcs["label"], arcs["weight"] - self.ratio * weights, self.numbers(arcs["target"].astype(np.int64), after),
        )  # fmt: skip

    def _leaving_source(self, t: np.ndarray, s: np.ndarray) -> _Part:
        """Return the arcs of pairs (t, s) that back off in the source, because t is a root of the LM."""
        counts, rows, arcs = self.source.arcs_of(s)
        weights, after = self.lm.read(t[rows], arcs["label"])
        backoff_to, backoff_weights = self.numbers(t, self.source.backoff_to[s]), self.source.backoff_weights[s]
        return _Part(
            self.numbers(t, s), counts, backoff_to, -self.ratio * backoff_weights, self._final_weights(t, s),
            arcs["label"], weights - self.ratio * arcs["weight"], self.numbers(after, arcs["target"].astype(np.int64)),
        )  # fmt: skip

    def _final_weights(self, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        subtracted = self.source.states["final_weight"][s].astype(np.float64)
        subtracted[subtracted < LEAST_WEIGHT] = 0.0
        return self.lm.states["final_weight"][t] - self.ratio * subtracted


class _Reader(SortedArcs):
    """An automaton with vectorised look-ups, for many states and labels at once."""

    def __init__(self, automaton: BackoffAutomaton) -> None:
        super().__init__(*automaton.arrays)
        self.states = automaton.arrays.states
        self.backoff_to = self.states["backoff_to"].astype(np.int64)
        self.backoff_weights = self.states["backoff_weight"].astype(np.float64)
        self.is_root = self.backoff_to == np.arange(len(self.states))

    def arcs_of(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for states [N] the numbers of arcs, [N], the row in `states` of each arc, [A], and the arcs, [A]."""
        counts = self.counts[states]
        rows = np.repeat(np.arange(len(states)), counts)
        offsets = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        return counts, rows, self.arcs[self.begins[states][rows] + offsets]

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


def _columns(part: _Part) -> Columns:
    """Return the columns of the automaton whose states are all pairs, in the order of `part`."""
    order = np.argsort(part.pairs)
    ordered = part.pairs[order]
    backoff_to, targets = (order[np.searchsorted(ordered, pairs)] for pairs in (part.backoff_to, part.targets))
    of_states = backoff_to, part.backoff_weights, part.final_weights
    return Columns.grouped(part.counts, *of_states, part.labels, part.weights, targets)
