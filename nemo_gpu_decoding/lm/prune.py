"""Prune an n-gram LM by entropy [Stolcke 1998]: remove the n-grams that change the LM least.

Removing (h, w) changes the relative entropy between the LM and the pruned LM by

    D(h, w) = -P(h) { p(w|h) [log p(w|h') + log a' - log p(w|h)] + (1 - S) [log a' - log a] }

h' is h without its first symbol. S is the sum of p(.|h) over the symbols that the LM lists after h. a is the back-off
weight of h with which all p(.|h) sum to 1; a' is this weight without (h, w). P(h) is the probability of
h in the LM. The lower orders of Kneser-Ney LMs estimate P(h) badly, so heavy pruning degrades them more
than other LMs [Chelba et al. 2010].

Kept n-grams keep their probabilities, contexts and suffixes; back-off weights are recomputed. So the
small LM is a subset of the large one, and paged_biglm needs one look-up for both.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nemo_gpu_decoding.checks import FieldError, check_kind
from nemo_gpu_decoding.lm.arpa import Arpa, NGramBlock, without_repetitions

BOS, EOS = "<s>", "</s>"
# The least probability that a context leaves to unlisted symbols: LM files have few digits.
_LEAST_MASS = 1e-6
# N-grams per step; temporary arrays then stay below 100 MB.
_ROWS = 1 << 20


class _Order(NamedTuple):
    """The M n-grams of one order, and the numbers of their contexts and suffixes in the next lower order."""

    block: NGramBlock
    context: np.ndarray  # [M] int32: without the last symbol
    suffix: np.ndarray  # [M] int32: without the first symbol; -1 if the LM does not list it

    def log_probs(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the natural logs of the probabilities, [rows]."""
        return self.block.log10_probs[rows] * math.log(10)


_Kept = list[np.ndarray] | None  # by order: which n-grams stay; None: all of them


def _parts(count: int) -> Iterator[slice]:
    for begin in range(0, count, _ROWS):
        yield slice(begin, min(begin + _ROWS, count))


def prune_ngram_lm(arpa: Arpa, *, size: int | None = None, threshold: float | None = None) -> Arpa:
    """Remove the n-grams that change the LM least; all 1-grams stay.

    Args:
        arpa: an LM from `read_arpa` or `estimate_ngram_lm`.
        size: largest number of n-grams to keep, of all orders together.
        threshold: remove an n-gram if the LM's perplexity grows by less than this share without it, as
            SRILM's `ngram -prune` does; a usual value is 1e-8.

    Raises:
        ValueError: both or neither of `size` and `threshold` are given; a value is out of range; the LM
            lists an n-gram without its context.
    """
    check_kind("arpa", arpa, Arpa, ": read_arpa or estimate_ngram_lm makes it")
    unigrams = len(arpa.orders[0].symbols)
    if (size is None) == (threshold is None):
        raise ValueError("expected one of size and threshold")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < unigrams):
        raise FieldError("size", size, f"an integer >= {unigrams}, the number of 1-grams")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise FieldError("threshold", threshold, "a finite number >= 0")
    arpa = replace(arpa, orders=tuple(without_repetitions(block, "the LM") for block in arpa.orders))
    model = _Model(arpa)
    changes = _perplexity_changes(arpa, model)
    if size is not None:
        threshold = _threshold_for(size, model.orders, changes)
    assert threshold is not None
    return _rest(arpa, model, _kept(model.orders, changes, threshold))


class _Model:
    """The n-grams of an LM, which are numbered order by order."""

    def __init__(self, arpa: Arpa) -> None:
        self._size = len(arpa.symbols)
        words = arpa.orders[0].symbols[:, 0]
        self._words = np.full(self._size, -1)
        self._words[words] = np.arange(len(words))
        self._keys: list[tuple[np.ndarray, np.ndarray]] = []  # by order: sorted context * size + symbol, numbers
        nothing = np.zeros(len(words), np.int32)
        self.orders = [_Order(arpa.orders[0], nothing, nothing)]
        for block in arpa.orders[1:]:
            self.orders.append(self._linked(block, arpa.symbols))
            if block.order < len(arpa.orders):
                keys = self.orders[-1].context * np.int64(self._size) + block.symbols[:, -1]
                numbers = np.argsort(keys, kind="stable").astype(np.int32)
                keys.sort()
                self._keys.append((keys, numbers))

    def _linked(self, block: NGramBlock, symbols: Sequence[str]) -> _Order:
        count = len(block.symbols)
        order = _Order(block, np.zeros(count, np.int32), np.zeros(count, np.int32))
        for part in _parts(count):
            grams = block.symbols[part].astype(np.int64)
            order.context[part] = self.number_of(grams[:, :-1])
            order.suffix[part] = self.number_of(grams[:, 1:])
            if (order.context[part] < 0).any():
                gram = [symbols[i] for i in grams[np.argmax(order.context[part] < 0)]]
                raise ValueError(
                    f"the LM lists {' '.join(gram)!r} without {' '.join(gram[:-1])!r}, expected the "
                    "context of every n-gram, as KenLM and SRILM write it"
                )
        return order

    def number_of(self, grams: np.ndarray) -> np.ndarray:
        """Return each n-gram's number among the n-grams of its order, [M], or -1 for an unlisted n-gram."""
        ids = self._words[grams[:, 0]]
        for n in range(1, grams.shape[1]):
            sorted_keys, numbers = self._keys[n - 1]
            if not len(sorted_keys):
                return np.full(len(grams), -1)
            wanted = ids * self._size + grams[:, n]
            at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
            ids = np.where((ids >= 0) & (sorted_keys[at] == wanted), numbers[at], -1).astype(np.int64)
        return ids

    def weights(
        self, n: int, rows: slice | np.ndarray, backoffs: list[np.ndarray], kept: _Kept
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return contexts, log p(w|h) and log p(w|h') of n-grams of order n + 1, [rows] natural log.

        Args:
            backoffs: back-off weights of all n-grams by order, log10.
            kept: the n-grams that remain; log p(w|h') is computed with them only.
        """
        order = self.orders[n]
        suffixes = order.suffix[rows]
        log_below = np.where(suffixes >= 0, self.orders[n - 1].log_probs(suffixes), np.nan)
        missing = np.flatnonzero(suffixes < 0)
        if len(missing):  # other programs prune suffixes as well
            grams = order.block.symbols[rows][missing].astype(np.int64)
            log_below[missing] = self._log_probs(grams[:, 1:], backoffs, kept)
        return order.context[rows], order.log_probs(rows), log_below

    def _log_probs(self, grams: np.ndarray, backoffs: list[np.ndarray], kept: _Kept) -> np.ndarray:
        """Return log p(last symbol | preceding symbols) of n-grams [M, order]; shape [M], natural log."""
        n = grams.shape[1] - 1
        ids = self.number_of(grams)
        is_kept = (ids >= 0) & (kept is None or kept[n][ids])
        scores = self.orders[n].log_probs(ids)
        if not is_kept.all():
            rest = grams[~is_kept]
            context = self.number_of(rest[:, :-1])
            weights = np.where(context >= 0, backoffs[n - 1][context] * math.log(10), 0.0)
            scores[~is_kept] = weights + self._log_probs(rest[:, 1:], backoffs, kept)
        return scores


def _unlisted_masses(
    contexts: int, ngrams: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of p(.|h) and p(.|h') over symbols that are not listed after a context h, [contexts] each.

    Args:
        ngrams: parts of the listed n-grams: their contexts, log p(w|h) and log p(w|h').
    """
    listed, listed_below = np.zeros(contexts), np.zeros(contexts)
    for context, log_probs, log_below in ngrams:
        np.add.at(listed, context, np.exp(log_probs))
        np.add.at(listed_below, context, np.exp(log_below))
    return np.maximum(1 - listed, _LEAST_MASS), np.maximum(1 - listed_below, _LEAST_MASS)


def _perplexity_changes(arpa: Arpa, model: _Model) -> list[np.ndarray]:
    """Return exp D(h, w) - 1 of each n-gram, by order; infinite for 1-grams."""
    orders, backoffs = model.orders, [block.log10_backoffs for block in arpa.orders]
    context_log_probs = orders[0].log_probs(slice(None))
    row = {symbol: i for i, (symbol,) in enumerate(orders[0].block.symbols)}
    bos, eos = (row.get(arpa.symbols.index(s)) if s in arpa.symbols else None for s in (BOS, EOS))
    if bos is not None and eos is not None:  # <s> is as probable as </s>
        context_log_probs[bos] = context_log_probs[eos]
    changes = [np.full(len(orders[0].context), np.inf)]
    for n, order in enumerate(orders[1:], 1):
        count = len(order.context)
        weights = (model.weights(n, rows, backoffs, None) for rows in _parts(count))
        masses = _unlisted_masses(len(orders[n - 1].context), weights)
        change, joint_log_probs = np.zeros(count), np.zeros(count)
        for rows in _parts(count):
            context, log_probs, log_below = model.weights(n, rows, backoffs, None)
            probs, below = np.exp(log_probs), np.exp(log_below)
            left, left_below = (mass[context] for mass in masses)
            weight = np.log(left) - np.log(left_below)
            without = np.log(left + probs) - np.log(left_below + below)
            gain = probs * (log_below + without - log_probs) + left * (without - weight)
            change[rows] = np.expm1(-np.exp(context_log_probs[context]) * gain)
            joint_log_probs[rows] = context_log_probs[context] + log_probs
        changes.append(change)
        context_log_probs = joint_log_probs
    return changes


def _kept(orders: list[_Order], changes: list[np.ndarray], threshold: float) -> list[np.ndarray]:
    """Return which n-grams stay: n-grams with changes above the threshold, and their contexts and suffixes."""
    kept = [change >= threshold for change in changes]
    for n in range(len(orders) - 1, 0, -1):
        kept[n - 1][orders[n].context[kept[n]]] = True
        suffixes = orders[n].suffix[kept[n]]
        kept[n - 1][suffixes[suffixes >= 0]] = True
    return kept


def _threshold_for(size: int, orders: list[_Order], changes: list[np.ndarray]) -> float:
    """Return the smallest threshold with which at most `size` n-grams stay.

    The bits of floats >= 0, read as integers, have the same order as the floats. So 63 bisections of the bits find it.
    """
    low, high = 0, int(np.float64(np.inf).view(np.int64))
    while low < high:
        middle = (low + high) // 2
        threshold = float(np.int64(middle).view(np.float64))
        if sum(map(np.count_nonzero, _kept(orders, changes, threshold))) <= size:
            high = middle
        else:
            low = middle + 1
    return float(np.int64(low).view(np.float64))


def _rest(arpa: Arpa, model: _Model, kept: list[np.ndarray]) -> Arpa:
    """Return the LM of the kept n-grams, with new back-off weights."""
    blocks: list[NGramBlock] = []
    backoffs: list[np.ndarray] = []  # log10, of all n-grams
    for n, block in enumerate(arpa.orders):
        is_kept, weights = kept[n], np.zeros(len(kept[n]))
        if n + 1 < len(arpa.orders):
            context, is_above = model.orders[n + 1].context, kept[n + 1]
            rows_above = (part.start + np.flatnonzero(is_above[part]) for part in _parts(len(context)))
            above = (model.weights(n + 1, rows, backoffs, kept) for rows in rows_above)
            left, left_below = _unlisted_masses(len(is_kept), above)
            has_arcs = np.bincount(context[is_above], minlength=len(is_kept)) > 0
            weights = np.where(has_arcs, np.log(left) - np.log(left_below), 0.0) / math.log(10)
        backoffs.append(weights)
        columns = (block.symbols, block.log10_probs, weights)
        blocks.append(NGramBlock(n + 1, *(column[is_kept] for column in columns)))
    while len(blocks) > 1 and not len(blocks[-1].symbols):
        blocks.pop()
    return replace(arpa, orders=tuple(blocks))
