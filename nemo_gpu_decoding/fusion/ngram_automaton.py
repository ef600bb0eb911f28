"""From the n-grams of an ARPA file to a back-off automaton [NGPU-LM, section 2].

A state is an n-gram of less than the highest order, seen as a context. Its arcs are the n-grams that
prolong it, its back-off state is its longest proper suffix that is a state. Scores agree to the bit
with NeMo's `NGramGPULanguageModel` wherever NeMo can read the file; besides, this reads

- pruned files whose suffix n-grams are missing: an absent context has back-off weight 0, hence the
  longest suffix that exists gives the same scores;
- files whose prefix n-grams are missing: the context gets its state, and its own arc the weight that
  backing off gives;
- n-grams with <unk>, which stands for every label that the LM does not list;
- files without <s> (an utterance begins in the root) or without </s> (ending costs nothing).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.trie import ROOT, Trie

logger = logging.getLogger("nemo_gpu_decoding")

# Symbols that are no token, as label; `_Labels` turns them into labels beyond the vocabulary.
UNKNOWN, SENTENCE_START, SENTENCE_END = -1, -2, -3
_NUM_SPECIAL = 3
# NeMo's weight of a state that does not list </s>; its .nemo files may hold it (nemo NEG_INF)
NOT_FINAL = -10000.0


@dataclass(frozen=True)
class LabelledNGrams:
    """M n-grams of one order. Labels are token ids or one of the special symbols above."""

    labels: np.ndarray  # [M, order] int
    log10_probs: np.ndarray  # [M] float64
    log10_backoffs: np.ndarray  # [M] float64


def build_ngram_automaton(
    orders: Sequence[LabelledNGrams], vocab_size: int, *, normalize_unk: bool, name: str
) -> BackoffAutomaton:
    """The automaton of an n-gram LM over the labels 0 .. vocab_size-1.

    Args:
        orders: the n-grams of order 1, 2, ...
        normalize_unk: divide the probability of <unk> among the labels it stands for, as NeMo does.

    Raises:
        ValueError: an n-gram is listed twice.
    """
    return _NGramTrie(orders, vocab_size, normalize_unk, name).automaton()


def resolve_final_weights(
    final_weights: np.ndarray, backoff_to: np.ndarray, backoff_weights: np.ndarray
) -> np.ndarray:
    """Give states that do not list </s> (weight <= NOT_FINAL) the weight that backing off gives.

    The float32 sums are done in NeMo's order. A chain that lists </s> nowhere keeps NOT_FINAL.
    """
    resolved = final_weights.astype(np.float32)
    states, paid = np.arange(len(resolved)), np.zeros(len(resolved), np.float32)
    pending = np.flatnonzero((resolved <= NOT_FINAL) & (backoff_to != states))
    while len(pending):
        paid[pending] += backoff_weights[states[pending]]
        states[pending] = backoff_to[states[pending]]
        listed = final_weights[states[pending]] > NOT_FINAL
        hit = pending[listed]
        resolved[hit] = paid[hit] + final_weights[states[hit]]
        at_root = backoff_to[states[pending]] == states[pending]
        pending = pending[~listed & ~at_root]
    return resolved


class _NGramTrie:
    """The steps of the construction; nodes of the prefix tree are the states."""

    def __init__(
        self, orders: Sequence[LabelledNGrams], vocab_size: int, normalize_unk: bool, name: str
    ) -> None:
        self.name, self.vocab_size = name, vocab_size
        self.unk, self.bos, self.eos = (vocab_size + k for k in range(_NUM_SPECIAL))
        self.orders = [self._usable(n, ngrams) for n, ngrams in enumerate(orders, 1)]
        unigrams = self.orders[0].labels[:, 0]
        self.unlisted = np.setdiff1d(np.arange(vocab_size), unigrams)
        share = np.log(len(self.unlisted)) if normalize_unk and len(self.unlisted) > 1 else 0.0
        self.unk_share = float(share)  # natural log of the number of labels that divide <unk>
        self.tree = Trie(vocab_size + _NUM_SPECIAL)
        self.nodes: list[np.ndarray] = []  # per order, the state of each n-gram below the highest
        self.contexts: list[np.ndarray] = []  # per order, the state that each n-gram prolongs
        for n, ngrams in enumerate(self.orders, 1):
            self._add_order(n, ngrams)
        self.links = self.tree.suffix_links()

    def _usable(self, order: int, ngrams: LabelledNGrams) -> LabelledNGrams:
        """Without n-grams that no token sequence can reach: <s> after, or </s> before, something."""
        labels = np.asarray(ngrams.labels, np.int64)
        for special, label in (
            (UNKNOWN, self.unk),
            (SENTENCE_START, self.bos),
            (SENTENCE_END, self.eos),
        ):
            labels = np.where(labels == special, label, labels)
        reachable = (labels[:, 1:] != self.bos).all(1) & (labels[:, :-1] != self.eos).all(1)
        to_natural = np.log10(np.e)  # divided by, as NeMo does: a product would round otherwise
        return LabelledNGrams(
            labels[reachable],
            (ngrams.log10_probs[reachable] / to_natural).astype(np.float32),
            (ngrams.log10_backoffs[reachable] / to_natural).astype(np.float32),
        )

    def _add_order(self, order: int, ngrams: LabelledNGrams) -> None:
        contexts = np.full(len(ngrams.labels), ROOT)
        for k in range(order - 1):
            contexts = self.tree.find_or_add(contexts, ngrams.labels[:, k])
        keys = np.sort(contexts * self.tree.radix + ngrams.labels[:, -1])
        if len(keys) and (keys[1:] == keys[:-1]).any():
            raise ValueError(f"{self.name}: one of the {order}-grams is listed twice")
        self.contexts.append(contexts)
        if order < len(self.orders):
            self.nodes.append(self._add_states(order, contexts, ngrams.labels[:, -1]))

    def _add_states(self, order: int, contexts: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """States of n-grams; ROOT for those that are no context, </s> and the <unk> that NeMo knows."""
        is_state = labels != self.eos
        if order == 1 and not any((o.labels[:, :-1] == self.unk).any() for o in self.orders[1:]):
            is_state &= labels != self.unk  # <unk> begins no n-gram: unlisted labels lead to the root
        nodes = np.full(len(labels), ROOT)
        nodes[is_state] = self.tree.find_or_add(contexts[is_state], labels[is_state])
        return nodes

    def automaton(self) -> BackoffAutomaton:
        backoff_weights, state_weights = self._state_weights()
        sources, labels, weights, targets = self._expand_unknown(*self._arcs(state_weights))
        order = np.argsort(sources * self.tree.radix + labels)
        states = np.arange(len(self.tree))
        return BackoffAutomaton.from_arrays(
            vocab_size=self.vocab_size,
            start_state=self._start_state(),
            arc_begin=np.searchsorted(sources[order], states),
            arc_end=np.searchsorted(sources[order], states, side="right"),
            backoff_to=self.links,
            backoff_weights=backoff_weights,
            final_weights=self._final_weights(backoff_weights),
            arc_labels=labels[order],
            arc_weights=weights[order],
            arc_targets=targets[order],
            name=self.name,
        )

    def _start_state(self) -> int:
        start = int(self.tree.find(np.array([ROOT]), np.array([self.bos]))[0])
        if start < 0 and len(self.orders) > 1:
            logger.warning("%s has no <s>: utterances begin without context", self.name)
        return max(start, ROOT)

    def _state_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Back-off weight of every state, and the weight of the arc that leads to it from its parent."""
        backoffs = np.zeros(len(self.tree), np.float32)
        weights = np.full(len(self.tree), np.nan, np.float32)
        for nodes, ngrams in zip(self.nodes, self.orders, strict=False):
            is_state = nodes != ROOT
            backoffs[nodes[is_state]] = ngrams.log10_backoffs[is_state]
            weights[nodes[is_state]] = ngrams.log10_probs[is_state]
        for level in self.tree.levels()[1:]:  # contexts that the file does not list
            implied = level[np.isnan(weights[level])]
            weights[implied] = self._backed_off(implied, weights, backoffs)
        return backoffs, weights

    def _backed_off(self, nodes: np.ndarray, weights: np.ndarray, backoffs: np.ndarray) -> np.ndarray:
        """What the LM gives the last label of each state without an arc of its parent's own."""
        at, labels = self.tree.parents[nodes], self.tree.labels[nodes]
        total = np.zeros(len(nodes), np.float32)
        pending = np.arange(len(nodes))
        while len(pending):
            total[pending] += backoffs[at[pending]]
            at[pending] = self.links[at[pending]]
            children = self.tree.find(at[pending], labels[pending])
            hit = children >= 0
            total[pending[hit]] += weights[children[hit]]
            pending = pending[~hit]  # ends: the root has a child for every label of a context
        return total

    def _arcs(self, state_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Source, label, weight and target of all n-grams, <unk> still a label of its own."""
        states = np.arange(1, len(self.tree))
        states = states[self.tree.labels[states] != self.bos]
        highest, contexts = self.orders[-1], self.contexts[-1]
        is_arc = (highest.labels[:, -1] != self.eos) & (highest.labels[:, -1] != self.bos)
        sources, labels = contexts[is_arc], highest.labels[is_arc, -1]
        if len(self.orders) == 1:
            targets = np.full(len(sources), ROOT)
        else:
            targets = self.tree.follow(self.links[sources], labels, self.links)
        sources = np.append(self.tree.parents[states], sources)
        labels = np.append(self.tree.labels[states], labels)
        weights = np.append(state_weights[states], highest.log10_probs[is_arc])
        targets = np.append(states, targets)
        if not ((sources == ROOT) & (labels == self.unk)).any():
            # the root is dense: each unlisted label gets the weight of <unk> and stays in the root
            sources, labels = np.append(sources, ROOT), np.append(labels, self.unk)
            weights = np.append(weights, np.float32(self._unknown_weight()))
            targets = np.append(targets, ROOT)
        return sources, labels, weights, targets

    def _unknown_weight(self) -> float:
        unigrams = self.orders[0]
        listed = unigrams.log10_probs[unigrams.labels[:, 0] == self.unk]
        return float(listed[0]) if len(listed) else -np.inf

    def _expand_unknown(
        self, sources: np.ndarray, labels: np.ndarray, weights: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Replace each arc with <unk> by one arc for every label that it stands for."""
        known, unknown = np.flatnonzero(labels != self.unk), np.flatnonzero(labels == self.unk)
        copies = len(self.unlisted)
        shared = (weights[unknown].astype(np.float64) - self.unk_share).astype(np.float32)
        return (
            np.append(sources[known], np.repeat(sources[unknown], copies)),
            np.append(labels[known], np.tile(self.unlisted, len(unknown))),
            np.append(weights[known], np.repeat(shared, copies)),
            np.append(targets[known], np.repeat(targets[unknown], copies)),
        )

    def _final_weights(self, backoff_weights: np.ndarray) -> np.ndarray:
        final = np.full(len(self.tree), NOT_FINAL, np.float32)
        for contexts, ngrams in zip(self.contexts, self.orders, strict=True):
            ends = ngrams.labels[:, -1] == self.eos
            final[contexts[ends]] = ngrams.log10_probs[ends]
        if (final <= NOT_FINAL).all():
            logger.warning("%s has no </s>: the end of an utterance is not scored", self.name)
            return np.zeros_like(final)
        return resolve_final_weights(final, self.links, backoff_weights)
