"""Exact back-off in a grammar transducer.

In G, back-off is an arc that every path may take. A listed n-gram that is less likely than its back-off estimate is
then never used: the path backs off. LMs with interpolation, as KenLM's lmplz makes them, have no such n-grams; others
may. For a state that has some, `with_exact_backoff` lets back-off lead to a copy of the shorter context, which lacks
their words.
"""

from __future__ import annotations

import logging

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns, arcs_by_state
from nemo_gpu_decoding.fusion.ngram_automaton import NOT_FINAL

logger = logging.getLogger("nemo_gpu_decoding")

END = -1  # stands for </s> among words
TOLERANCE = 1e-3  # natural log; a smaller difference is rounding
MOST_COPIED = 2_000_000  # arcs


def with_exact_backoff(automaton: BackoffAutomaton) -> BackoffAutomaton:
    """The LM with copies of contexts, such that backing off gives no listed word a higher probability.

    If the copies would have too many arcs, the LM is returned unchanged, with a warning.
    """
    states, arcs = automaton.arrays
    sources, arcs = arcs_by_state(states, arcs)
    worse = _worse_than_backoff(automaton, sources, arcs)
    if not worse:
        return automaton
    copies = _Copies(automaton, sources, arcs, worse)
    for state in worse:
        copies.redirect(state)
        if copies.num_arcs > MOST_COPIED:
            logger.warning(
                "%s: %d contexts have words that are less likely than by back-off; back-off stays possible for these "
                "words, as in Kaldi, because exact back-off would need more than %d more arcs",
                automaton.name, len(worse), MOST_COPIED,
            )  # fmt: skip
            return automaton
    return copies.finish()


def _worse_than_backoff(automaton: BackoffAutomaton, sources: np.ndarray, arcs: np.ndarray) -> dict[int, set[int]]:
    """Per state, the words that are less likely than by back-off, and END."""
    states = automaton.arrays.states
    suffix, backoff = states["backoff_to"], states["backoff_weight"].astype(np.float64)
    keys = sources * automaton.vocab_size + arcs["label"]
    pending = np.flatnonzero(suffix[sources] != sources)
    at, estimate = suffix[sources[pending]], backoff[sources[pending]]
    worse: dict[int, set[int]] = {}
    while len(pending):
        key = at * automaton.vocab_size + arcs["label"][pending]
        places = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        listed = keys[places] == key
        estimates = estimate + arcs["weight"][places]
        for arc in pending[listed & (arcs["weight"][pending] < estimates - TOLERANCE)].tolist():
            worse.setdefault(int(sources[arc]), set()).add(int(arcs["label"][arc]))
        pending, at, estimate = pending[~listed], at[~listed], estimate[~listed]
        estimate, at = estimate + backoff[at], suffix[at]
    final = states["final_weight"].astype(np.float64)
    ends = np.maximum(final, NOT_FINAL) < backoff + final[suffix] - TOLERANCE
    for state in np.flatnonzero(ends & (suffix != np.arange(len(suffix))) & (final[suffix] > NOT_FINAL)).tolist():
        worse.setdefault(state, set()).add(END)
    return worse


class _Copies:
    """The columns of an LM, to which copies of states are added."""

    def __init__(
        self, automaton: BackoffAutomaton, sources: np.ndarray, arcs: np.ndarray, worse: dict[int, set[int]]
    ) -> None:
        self.automaton, self.arcs, self.worse = automaton, arcs, worse
        self.begin = np.searchsorted(sources, np.arange(automaton.num_states + 1))
        states = automaton.arrays.states
        self.backoff_to = states["backoff_to"].tolist()
        self.backoff_weights = states["backoff_weight"].tolist()
        self.final_weights = states["final_weight"].tolist()
        self.added: list[np.ndarray] = []  # arcs of each copy
        self.num_arcs = 0
        self._copy_of: dict[tuple[int, frozenset[int]], int] = {}

    def redirect(self, state: int) -> None:
        """Let a state back off to a copy that lacks its worse words."""
        self.backoff_to[state] = self._copied(
            int(self.automaton.arrays.states["backoff_to"][state]), self.worse[state]
        )

    def _copied(self, state: int, without: set[int]) -> int:
        key = state, frozenset(without)
        if key in self._copy_of:
            return self._copy_of[key]
        arcs = self.arcs[self.begin[state] : self.begin[state + 1]]
        number = self._copy_of[key] = len(self.backoff_to)
        kept = arcs[~np.isin(arcs["label"], list(without))]
        self.added.append(kept)
        self.num_arcs += len(kept)
        suffix = int(self.automaton.arrays.states["backoff_to"][state])
        self.final_weights.append(NOT_FINAL if END in without else self.final_weights[state])
        if suffix == state:  # no back-off: a word that is left out is impossible
            self.backoff_to.append(number)
            self.backoff_weights.append(-np.inf)
        else:
            self.backoff_to.append(suffix)
            self.backoff_weights.append(self.backoff_weights[state])
            self.backoff_to[number] = self._copied(suffix, without | self.worse.get(state, set()))
        return number

    def finish(self) -> BackoffAutomaton:
        arcs = np.concatenate([self.arcs, *self.added])
        begin = len(self.arcs) + np.cumsum([0, *map(len, self.added)])
        columns = Columns(
            arc_begin=np.append(self.begin[:-1], begin[:-1]),
            arc_end=np.append(self.begin[1:], begin[1:]),
            backoff_to=np.array(self.backoff_to),
            backoff_weights=np.array(self.backoff_weights),
            final_weights=np.array(self.final_weights),
            arc_labels=arcs["label"],
            arc_weights=arcs["weight"],
            arc_targets=arcs["target"],
        )
        automaton = self.automaton
        return BackoffAutomaton.from_columns(columns, automaton.vocab_size, automaton.start_state, automaton.name)
