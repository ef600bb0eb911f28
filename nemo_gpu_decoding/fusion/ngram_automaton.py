"""The back-off automaton of an n-gram LM over the labels 0 .. V-1 [NGPU-LM, section 2].

A state is a context: an n-gram below the highest order. Its arcs are the n-grams that extend it by one
label. Its back-off state is its longest proper suffix that is a state. Scores are equal to the bit to
those of NeMo's `NGramGPULanguageModel` where NeMo can read the file. This module also reads

- pruned files without some suffix n-grams: an absent context has back-off weight 0, so the longest
  suffix in the file gives the same scores;
- files without some prefix n-grams: the context gets a state, and the arc to it gets the weight of
  backing off;
- n-grams with <unk>, which represents every label that the LM does not list;
- files without <s> (an utterance begins in the root) or without </s> (the end has weight 0).

`lm/trie.py` and `lm/automaton.py` build the trie, states and targets; special symbols are labels beyond
the vocabulary there. Here, arcs with </s> become final weights and arcs with <unk> become arcs with the
unlisted labels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton, Columns
from nemo_gpu_decoding.lm.arpa import NGramBlock
from nemo_gpu_decoding.lm.automaton import BackoffArcs
from nemo_gpu_decoding.lm.packed import NO_LABEL, ROOT
from nemo_gpu_decoding.lm.trie import NGramTrie

logger = logging.getLogger("nemo_gpu_decoding")

# Labels of the special symbols; the trie stores -k as the label V + k - 1.
UNKNOWN, SENTENCE_START, SENTENCE_END = -1, -2, -3
_NUM_SPECIAL = 3
# NeMo's weight of a state that does not list </s>; its .nemo files may hold it (nemo NEG_INF)
NOT_FINAL = -10000.0


class _Arcs(NamedTuple):
    """Columns [A] of arcs, ascending by source and label."""

    sources: np.ndarray
    labels: np.ndarray
    weights: np.ndarray  # float32, natural log
    targets: np.ndarray


def build_ngram_automaton(
    orders: Sequence[NGramBlock], vocab_size: int, *, normalize_unk: bool, name: str
) -> BackoffAutomaton:
    """The automaton of an n-gram LM.

    Args:
        orders: the n-grams of order 1, 2, ...; their symbols are labels 0 .. vocab_size-1 or one of the
            special symbols above.
        normalize_unk: divide the probability of <unk> among the unlisted labels, as NeMo does.

    Raises:
        ValueError: an n-gram is listed twice.
    """
    unk, bos, eos = (vocab_size + k for k in range(_NUM_SPECIAL))
    orders = [_reachable(block, vocab_size) for block in orders]
    is_listed = np.zeros(vocab_size + _NUM_SPECIAL, bool)
    is_listed[orders[0].symbols[:, 0]] = True
    if is_listed.sum() < len(orders[0].symbols):
        raise _listed_twice(name, 1)
    unlisted = np.flatnonzero(~is_listed[:vocab_size])
    if not is_listed[bos] and len(orders) > 1:
        logger.warning("%s has no <s>: utterances begin without context", name)
    trie = _trie_of(orders, len(is_listed), name)
    inner = trie.backoff_costs
    inner[trie.labels[: len(inner)] == eos] = 0
    if len(inner) and not any((block.symbols[:, :-1] == unk).any() for block in orders[1:]):
        inner[unk] = 0  # as in NeMo: unlisted labels lead to the root
    start = bos if is_listed[bos] else NO_LABEL
    linked = BackoffArcs(trie, start)
    states = linked.states[:-1]
    all_arcs = _Arcs(
        np.repeat(np.arange(len(states)), np.diff(linked.states["arc_begin"])),
        linked.labels.astype(np.int64), -linked.costs, linked.targets.astype(np.int64),
    )  # fmt: skip
    share = np.log(len(unlisted)) if normalize_unk and len(unlisted) > 1 else 0.0
    arcs = _without_special(all_arcs, vocab_size, unlisted, float(share))
    backoff_to, backoff_weights = states["backoff_to"].astype(np.int64), -states["backoff_cost"]
    numbers = np.arange(len(states))
    return BackoffAutomaton.from_columns(
        Columns(
            arc_begin=np.searchsorted(arcs.sources, numbers),
            arc_end=np.searchsorted(arcs.sources, numbers, side="right"),
            backoff_to=backoff_to,
            backoff_weights=backoff_weights,
            final_weights=_final_weights(all_arcs, eos, backoff_to, backoff_weights, name),
            arc_labels=arcs.labels,
            arc_weights=arcs.weights,
            arc_targets=arcs.targets,
        ),
        vocab_size=vocab_size,
        start_state=linked.start_state,
        name=name,
    )


def resolve_final_weights(
    final_weights: np.ndarray, backoff_to: np.ndarray, backoff_weights: np.ndarray
) -> np.ndarray:
    """Replace the final weight of states without </s> (weight <= NOT_FINAL) by that of backing off.

    The float32 sums have NeMo's order. A back-off chain without </s> keeps NOT_FINAL.
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


def _reachable(block: NGramBlock, vocab_size: int) -> NGramBlock:
    """Drop n-grams that no sentence contains: <s> after another symbol, or </s> before one."""
    labels = np.where(block.symbols < 0, vocab_size - 1 - block.symbols, block.symbols).astype(np.int32)
    bos, eos = vocab_size - 1 - SENTENCE_START, vocab_size - 1 - SENTENCE_END
    kept = (labels[:, 1:] != bos).all(1) & (labels[:, :-1] != eos).all(1)
    return NGramBlock(block.order, labels[kept], block.log10_probs[kept], block.log10_backoffs[kept])


def _trie_of(orders: Sequence[NGramBlock], num_labels: int, name: str) -> NGramTrie:
    """The trie of the n-grams and of their contexts, including contexts that the file does not list."""
    trie = NGramTrie([num_labels, *(len(block.symbols) for block in orders[1:])])
    for block in orders:
        if len(block.symbols) and trie.add(block) >= 0:
            return _trie_of(_with_contexts(orders), num_labels, name)
        if trie.close(block.order) >= 0:
            raise _listed_twice(name, block.order)
    return trie


def _with_contexts(orders: Sequence[NGramBlock]) -> list[NGramBlock]:
    """The n-grams with all their contexts; added contexts have probability NaN."""
    completed = list(orders)
    for n in range(len(orders) - 1, 1, -1):
        block = completed[n - 1]
        ngrams, rows = np.unique(
            np.concatenate([block.symbols, completed[n].symbols[:, :-1]]), axis=0, return_index=True
        )
        missing = ngrams[rows >= len(block.symbols)]
        completed[n - 1] = NGramBlock(
            n,
            np.concatenate([block.symbols, missing]),
            np.append(block.log10_probs, np.full(len(missing), np.nan)),
            np.append(block.log10_backoffs, np.zeros(len(missing))),
        )
    return completed


def _listed_twice(name: str, order: int) -> ValueError:
    return ValueError(f"{name}: one of the {order}-grams is listed twice")


def _without_special(arcs: _Arcs, vocab_size: int, unlisted: np.ndarray, unk_share: float) -> _Arcs:
    """Arcs with vocabulary labels only; an arc with <unk> becomes one arc per unlisted label.

    Args:
        unk_share: natural log of the number of labels that share the probability of <unk>.
    """
    shared = (arcs.weights.astype(np.float64) - unk_share).astype(np.float32)
    # arc i of the root has the label i: the root has arcs for unlisted labels already
    arcs.weights[unlisted], arcs.targets[unlisted] = shared[vocab_size], arcs.targets[vocab_size]
    unknown = np.flatnonzero((arcs.labels == vocab_size) & (arcs.sources != ROOT))
    known = _Arcs(*(column[arcs.labels < vocab_size] for column in arcs))
    if not len(unknown) or not len(unlisted):
        return known
    copies = len(unlisted)
    sources = np.append(known.sources, np.repeat(arcs.sources[unknown], copies))
    labels = np.append(known.labels, np.tile(unlisted, len(unknown)))
    order = np.argsort(sources * vocab_size + labels, kind="stable")
    return _Arcs(
        sources[order],
        labels[order],
        np.append(known.weights, np.repeat(shared[unknown], copies))[order],
        np.append(known.targets, np.repeat(arcs.targets[unknown], copies))[order],
    )


def _final_weights(
    arcs: _Arcs, eos: int, backoff_to: np.ndarray, backoff_weights: np.ndarray, name: str
) -> np.ndarray:
    """The final weight of each state, [S]: the weight of </s>, including back-offs."""
    final = np.full(len(backoff_to), NOT_FINAL, np.float32)
    ends = arcs.labels == eos
    final[arcs.sources[ends]] = arcs.weights[ends]
    if (final <= NOT_FINAL).all():
        logger.warning("%s has no </s>: the end of an utterance is not scored", name)
        return np.zeros_like(final)
    return resolve_final_weights(final, backoff_to, backoff_weights)
