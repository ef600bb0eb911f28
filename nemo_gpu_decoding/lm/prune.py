"""Entropy pruning of an n-gram LM [Stolcke 1998]: leaves out the n-grams that change the LM least.

Leaving (h, w) out changes the relative entropy between the LM and what is left of it by

    D(h, w) = -P(h) { p(w|h) [log p(w|h') + log a' - log p(w|h)] + (1 - S) [log a' - log a] }

h' is h without its first symbol, S the sum of p(.|h) over what the LM lists after h, a the back-off
weight of h with which all p(.|h) sum to 1, and a' that without (h, w). P(h) is the probability of h by
the LM. The lower orders of Kneser-Ney LMs do not give it well: heavy pruning costs them more than it
costs other LMs [Chelba et al. 2010].

What stays keeps its probability, and its context and suffix stay as well; back-off weights are computed
anew. So the small LM is part of the large one: paged_biglm then serves both with one look-up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError
from nemo_gpu_decoding.lm.arpa import Arpa, NGramBlock

BOS, EOS = "<s>", "</s>"
# The least probability that a context leaves to what it does not list: LMs are written with some digits.
_LEAST_MASS = 1e-6


class _Order(NamedTuple):
    """The M n-grams of one order, and where their parts stand in the order below."""

    symbols: np.ndarray  # [M, order]
    log_probs: np.ndarray  # [M] natural log
    context: np.ndarray  # [M] without the last symbol
    suffix: np.ndarray  # [M] without the first symbol; -1 if the LM does not list it


def prune_ngram_lm(arpa: Arpa, *, size: int | None = None, threshold: float | None = None) -> Arpa:
    """The LM without the n-grams that are worth least; all 1-grams stay.

    Args:
        arpa: from `read_arpa` or `estimate_ngram_lm`; needs 130 bytes of memory per n-gram beside it.
        size: as many n-grams stay at most, of all orders together.
        threshold: n-grams stay if the LM's perplexity would grow by this share without them, as
            with SRILM's `ngram -prune`; 1e-8 is usual.

    Raises:
        ValueError: not one of `size` and `threshold` is given; one is out of range; the LM lists an
            n-gram without its context.
    """
    unigrams = len(arpa.orders[0].symbols)
    if (size is None) == (threshold is None):
        raise ValueError("expected one of size and threshold")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < unigrams):
        raise FieldError("size", size, f"an integer >= {unigrams}, the number of 1-grams")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise FieldError("threshold", threshold, "a finite number >= 0")
    orders = _linked(arpa)
    changes = _entropy_changes(arpa, orders)
    if size is not None:
        threshold = _threshold_for(size, orders, changes)
    assert threshold is not None
    return _rest(arpa, orders, _kept(orders, changes, threshold))


def _linked(arpa: Arpa) -> list[_Order]:
    """The n-grams of each order with the numbers of their contexts and suffixes."""
    size = len(arpa.symbols)
    numbers = np.full(size, -1)
    numbers[arpa.orders[0].symbols[:, 0]] = np.arange(len(arpa.orders[0].symbols))
    nothing = np.zeros(len(arpa.orders[0].symbols), np.int64)
    keys: list[tuple[np.ndarray, np.ndarray]] = []  # of each order: sorted context * size + symbol, numbers

    def number_of(grams: np.ndarray) -> np.ndarray:
        """The numbers of n-grams [M, order] in their order; -1 for those that are not listed."""
        found = numbers[grams[:, 0]]
        for n in range(1, grams.shape[1]):
            sorted_keys, order_of = keys[n - 1]
            wanted = found * size + grams[:, n]
            at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
            is_listed = (found >= 0) & (sorted_keys[at] == wanted) if len(sorted_keys) else found < -1
            found = np.where(is_listed, order_of[at] if len(sorted_keys) else -1, -1)
        return found

    linked: list[_Order] = []
    for block in arpa.orders:
        grams = block.symbols.astype(np.int64)
        log_probs = block.log10_probs * math.log(10)
        if block.order == 1:
            linked.append(_Order(grams, log_probs, nothing, nothing))
            continue
        context = number_of(grams[:, :-1])
        if (context < 0).any():
            gram = [arpa.symbols[i] for i in grams[np.argmax(context < 0)]]
            raise ValueError(
                f"the LM lists {' '.join(gram)!r} without {' '.join(gram[:-1])!r}, expected the "
                "context of every n-gram, as KenLM and SRILM write it"
            )
        linked.append(_Order(grams, log_probs, context, number_of(grams[:, 1:])))
        own = context * size + grams[:, -1]
        by_key = np.argsort(own, kind="stable")
        keys.append((own[by_key], by_key))
    return linked


def _backed_off(orders: list[_Order], backoffs: list[np.ndarray], n: int) -> np.ndarray:
    """[M] log p(w|h') of the n-grams of order n + 1, with these back-off weights (natural log)."""
    order = orders[n]
    scores = np.where(order.suffix >= 0, orders[n - 1].log_probs[order.suffix], np.nan)
    for i in np.flatnonzero(order.suffix < 0):  # rare: LMs that were pruned by others
        scores[i] = _score(orders, backoffs, tuple(order.symbols[i, 1:]))
    return scores


def _score(orders: list[_Order], backoffs: list[np.ndarray], gram: tuple[int, ...]) -> float:
    """log p of the last symbol after the others; slow, for single n-grams."""
    n = len(gram)
    listed = np.flatnonzero((orders[n - 1].symbols == gram).all(axis=1))
    if len(listed):
        return float(orders[n - 1].log_probs[listed[0]])
    context = np.flatnonzero((orders[n - 2].symbols == gram[:-1]).all(axis=1))
    weight = float(backoffs[n - 2][context[0]]) if len(context) else 0.0
    return weight + _score(orders, backoffs, gram[1:])


def _masses(order: _Order, backed_off: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size] for each context: what p(.|h) and p(.|h') leave to what is not listed after h."""
    left = 1 - np.bincount(order.context, np.exp(order.log_probs), minlength=size)
    left_below = 1 - np.bincount(order.context, np.exp(backed_off), minlength=size)
    return np.maximum(left, _LEAST_MASS), np.maximum(left_below, _LEAST_MASS)


def _entropy_changes(arpa: Arpa, orders: list[_Order]) -> list[np.ndarray]:
    """D(h, w) of each n-gram, by order; infinite for 1-grams."""
    backoffs = [block.log10_backoffs * math.log(10) for block in arpa.orders]
    context_log_probs = orders[0].log_probs.copy()
    row = {symbol: i for i, (symbol,) in enumerate(orders[0].symbols)}
    bos, eos = (row.get(arpa.symbols.index(s)) if s in arpa.symbols else None for s in (BOS, EOS))
    if bos is not None and eos is not None:  # sentences begin as often as they end
        context_log_probs[bos] = context_log_probs[eos]
    changes = [np.full(len(orders[0].symbols), np.inf)]
    for n, order in enumerate(orders[1:], 1):
        log_below = _backed_off(orders, backoffs, n)
        probs, below = np.exp(order.log_probs), np.exp(log_below)
        masses = _masses(order, log_below, len(orders[n - 1].symbols))
        left, left_below = (mass[order.context] for mass in masses)
        weight = np.log(left) - np.log(left_below)
        without = np.log(left + probs) - np.log(left_below + below)
        gain = probs * (log_below + without - order.log_probs) + left * (without - weight)
        changes.append(-np.exp(context_log_probs[order.context]) * gain)
        context_log_probs = context_log_probs[order.context] + order.log_probs
    return changes


def _kept(orders: list[_Order], changes: list[np.ndarray], threshold: float) -> list[np.ndarray]:
    """Which n-grams stay: those worth it, and the contexts and suffixes of longer ones that stay."""
    kept = [np.expm1(change) >= threshold for change in changes]
    for n in range(len(orders) - 1, 0, -1):
        order, is_kept = orders[n], kept[n]
        kept[n - 1][order.context[is_kept]] = True
        suffixes = order.suffix[is_kept]
        kept[n - 1][suffixes[suffixes >= 0]] = True
    return kept


def _threshold_for(size: int, orders: list[_Order], changes: list[np.ndarray]) -> float:
    """The smallest of the n-grams' own thresholds with which at most `size` of them stay."""
    candidates = np.unique(np.expm1(np.concatenate(changes[1:]))) if len(changes) > 1 else np.zeros(0)
    candidates = np.append(np.maximum(candidates, 0.0), np.inf)
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(map(np.count_nonzero, _kept(orders, changes, candidates[middle]))) <= size:
            high = middle
        else:
            low = middle + 1
    return float(candidates[low])


def _rest(arpa: Arpa, orders: list[_Order], kept: list[np.ndarray]) -> Arpa:
    """The LM of the n-grams that stay, with back-off weights of their own."""
    blocks: list[NGramBlock] = []
    backoffs: list[np.ndarray] = []
    for n, block in enumerate(arpa.orders):
        is_kept = kept[n]
        weights = np.zeros(len(is_kept))
        if n + 1 < len(orders):
            above = orders[n + 1]
            rows = np.flatnonzero(kept[n + 1])
            stays = _Order(*(column[rows] for column in above))
            log_below = _backed_off([*orders[: n + 1], stays], backoffs, n + 1)
            left, left_below = _masses(stays, log_below, len(is_kept))
            has_arcs = np.bincount(stays.context, minlength=len(is_kept)) > 0
            weights = np.where(has_arcs, np.log(left) - np.log(left_below), 0.0)
        backoffs.append(weights)
        blocks.append(
            replace(
                block,
                symbols=block.symbols[is_kept],
                log10_probs=block.log10_probs[is_kept],
                log10_backoffs=weights[is_kept] / math.log(10),
            )
        )
    while len(blocks) > 1 and not len(blocks[-1].symbols):
        blocks.pop()
    return replace(arpa, orders=tuple(blocks))
