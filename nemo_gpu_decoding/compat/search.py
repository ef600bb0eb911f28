"""The searches behind pyctcdecode's interface, and the log-probs that they read."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.checks import check_int
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import any_order, compiled
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE, FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.word_graph.best_path import best_paths
from nemo_gpu_decoding.search.word_graph.config import MAX_ACTIVE_LIMIT, WFSTConfig
from nemo_gpu_decoding.search.word_graph.cpu_engine import CPUEngine, WorkspaceKind, new_workspace, read_alone
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels


class Width(NamedTuple):
    """How much wider the search with an LM is than pyctcdecode's.

    The graph charges for a word at its beginning, where pyctcdecode does at its end, and one hypothesis of pyctcdecode
    corresponds to several states of the graph.
    """

    lead: float  # hypotheses are kept that are worse by this more, natural log
    states: int  # per hypothesis of pyctcdecode


# A word earns the bonus of a hotword at its end at the latest, so that its beginning needs a wider search. The values
# were chosen on other utterances than those of the benchmark.
PLAIN, WITH_HOTWORDS = Width(0.0, 2), Width(3.0, 10)
MOST_RESULTS = 10_000
LN2 = math.log(2)
MOST_KEPT = 1 << 24  # bytes of log-probs that a thread keeps between calls
LEAST_LOGP = math.log(1e-15)  # tokens with smaller log-probs are always skipped
SKIPPED = -1000.0  # log-prob of a token below token_min_logp: a path of the graph takes it if there is no other


class TokenSearch(FlexCTCBeam):
    """The search without an LM.

    Args:
        vocab_size: V, which is also the column of the blank.
        beam_width: hypotheses per frame.
        beam_prune_logp: of pyctcdecode, < 0.
        n_best: number of results.
    """

    def __init__(self, vocab_size: int, beam_width: int, beam_prune_logp: float, n_best: int) -> None:
        check_int("beam_width", beam_width, 1, MAX_BEAM_SIZE)
        config = FlexCTCConfig(
            beam_size=beam_width, beam_threshold=-beam_prune_logp, merge="prefix", n_best=n_best, backend="cpu"
        )
        super().__init__(vocab_size, vocab_size, config)
        self._is_sampled = True  # rows without unlikely tokens do not add up to 1

    def best_tokens(
        self, batch: np.ndarray, lengths: np.ndarray, requests: Sequence[Request | None], begin: int
    ) -> list[np.ndarray]:
        """The tokens of the best hypothesis of each utterance, from a frame on; see `likely_batch`."""
        found = self.decode(torch.from_numpy(batch), lengths, requests)
        return [nbest.best.tokens[nbest.best.frames >= begin] for nbest in found]


class WordSearch(CudaWFST):
    """The search with a word LM; `width` is PLAIN or WITH_HOTWORDS, other arguments as for `TokenSearch`."""

    def __init__(
        self, graph: WordGraph, width: Width, vocab_size: int, beam_width: int, beam_prune_logp: float, n_best: int
    ) -> None:
        beam = width.lead - beam_prune_logp
        config = WFSTConfig(
            beam=beam,
            lattice_beam=beam,
            max_active=min(width.states * beam_width, MAX_ACTIVE_LIMIT),
            n_best=min(n_best, MOST_RESULTS),
            topology="normal",
            backend="cpu",
        )
        super().__init__(graph, vocab_size, vocab_size, config)
        self._is_sampled = True

    def best_tokens(
        self, batch: np.ndarray, lengths: np.ndarray, requests: Sequence[Request | None], begin: int
    ) -> list[np.ndarray]:
        """As `TokenSearch.best_tokens`; no other part of a result is computed."""
        if len(batch) == 1 and not any(requests):
            states = [read_alone(self._models, batch, int(lengths[0]), self._kind)]
        else:
            fusion = BatchFusion.resolve(self.fusion, len(batch), requests, self._labels)
            engine = CPUEngine(self._models_of, fusion, self.config)
            engine.push(torch.from_numpy(batch), lengths)
            states = engine.results(range(len(batch)), 1, final=True)
        found = best_paths(states, final=True)
        steps = map(found.steps_of, range(len(batch)))
        return [self.graph.arrays.arcs["ilabel"][own.arcs[own.frames >= begin]] for own in steps]

    @cached_property
    def _kind(self) -> WorkspaceKind:
        return WorkspaceKind(
            new_workspace, self.config.max_active, self.vocab_size + 1, self.config.keeps_links, False
        )

    @cached_property
    def _models(self) -> StreamModels:
        """The models of an utterance without a request."""
        return self._models_of(BatchFusion.resolve(self.fusion, 1, None, self._labels), 0)

    def _most_bonus(self, boosting: BackoffAutomaton, weight: float) -> float:
        """Without a warning of large bonuses: the user does not choose the beam of the graph."""
        return weight * max(0.0, float(boosting.arrays.states["upper_bound"].max())) * self.graph.most_words

    def _parts(self, *path: Any) -> tuple[float, float, float]:
        """None: beams have whole scores, and the parts take time to add up."""
        return 0.0, 0.0, 0.0


def log_norms(logits: np.ndarray, name: str) -> np.ndarray:
    """The logarithm of the sum of exp over each frame, [T].

    Args:
        logits: [T, V + 1] float32 or float64.
        name: of the logits in messages.

    Raises:
        ValueError: a frame has NaN or +inf, or -inf alone.
    """
    norms = _log_sums(logits)
    for frame in np.flatnonzero(np.isnan(norms))[:1].tolist():
        for column in np.flatnonzero(~(logits[frame] < np.inf))[:1].tolist():
            value = logits[frame, column]
            raise ValueError(f"{name}[{frame}, {column}] is {value}, expected a finite value or -inf")
        raise ValueError(f"{name}[{frame}] leaves no label possible: all its values are -inf")
    return norms


@any_order
def _log_sums(logits):
    """log(sum(exp(logits))) of each frame; NaN if a value is NaN or +inf, or if all are -inf.

    exp(x) is 2^n 2^r with a Taylor polynomial for |r| <= 1/2. Both loops use SIMD; the maximum is that of integers
    with the order of the values, because a maximum of floats does not.
    """
    found, log2_e = np.empty(len(logits), logits.dtype), np.float32(1 / math.log(2))
    for t in range(len(logits)):
        row, most, total = logits[t], np.int32(-(1 << 31)), np.float32(0)
        for v in range(logits.shape[1]):
            bits = np.float32(row[np.uintp(v)]).view(np.int32)
            most = max(most, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        top = np.int32(most ^ ((most >> 31) & 0x7FFFFFFF)).view(np.float32)
        for v in range(logits.shape[1]):
            x = np.float32(row[np.uintp(v)] - top) * log2_e
            x = np.float32(-126) if x < np.float32(-126) else x  # NaN stays
            n = np.floor(x + np.float32(0.5))
            power = np.int32((n + np.float32(127)) * np.float32(1 << 23)).view(np.float32)
            r = (x - n) * np.float32(LN2)
            high = np.float32(1 / 6) + r * (np.float32(1 / 24) + r * (np.float32(1 / 120) + r * np.float32(1 / 720)))
            total += power * (np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * high)))
        found[t] = top + np.log(total) if abs(top) < np.inf else np.nan
    return found


def likely_batch(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    before: np.ndarray,
    blank: int,
    token_min_logp: float,
    *,
    merges: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs in which unlikely tokens are `SKIPPED`, except for the most likely one of each frame.

    They are valid until the next call in the same thread, which uses the same memory: new memory takes four times as
    long to write.

    Args:
        pairs: logits [T, V + 1] float32 or float64 of each utterance, and norms [T], see `log_norms`.
        before: [n, V + 1] log-probs that come before each utterance.
        blank: column of the blank, which becomes the last one.
        token_min_logp: the least log-prob of a likely token.
        merges: drop each frame that can only be a blank, like the one before it. Such a frame changes no text.

    Returns:
        [B, T, V + 1] float32; [B] valid frames.
    """
    shape = len(pairs), len(before) + max(len(values) for values, _ in pairs), before.shape[1]
    batch, least = _memory(math.prod(shape)).reshape(shape), max(token_min_logp, LEAST_LOGP)
    lengths = np.full(len(pairs), len(before))
    for b, (values, norms) in enumerate(pairs):
        batch[b, : len(before)] = before
        lengths[b] += _copy_likely(values, norms, blank, least, merges, batch[b, len(before) :])
    return batch, lengths


_kept = threading.local()


def _memory(count: int) -> np.ndarray:
    """[count] float32, unless it is large that of the thread's last call."""
    values = getattr(_kept, "values", np.empty(0, np.float32))
    if len(values) < count:
        values = np.empty(count, np.float32)
        if values.nbytes <= MOST_KEPT:
            _kept.values = values
    return values[:count]


@compiled
def _copy_likely(logits, norms, blank, least, merges, found):
    """Returns the number of frames in `found`."""
    count, last, was_blank, skipped = 0, logits.shape[1] - 1, False, np.float32(SKIPPED)
    for t in range(len(logits)):
        row, kept, likely, norm = logits[t], found[count], 0, norms[t]
        limit = norm + logits.dtype.type(least)
        for v in range(blank):
            likely += row[v] >= limit
            kept[v] = row[v] - norm if row[v] >= limit else skipped
        for v in range(blank, last):
            likely += row[v + 1] >= limit
            kept[v] = row[v + 1] - norm if row[v + 1] >= limit else skipped
        is_blank = row[blank] >= limit
        kept[last] = row[blank] - norm if is_blank else skipped
        if likely == 0 and not is_blank:
            best = np.argmax(row)
            is_blank = best == blank
            kept[last if is_blank else best - (best > blank)] = row[best] - norm
            likely = 0 if is_blank else 1
        if merges and was_blank and likely == 0:
            continue
        was_blank = likely == 0
        count += 1
    return count


def aligned_score(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, values: np.ndarray) -> float:
    """The sum of log-probs [T, V + 1] along an alignment, whose tokens last from start to stop."""
    labels = np.full(len(values), values.shape[1] - 1)
    for token, start, stop in zip(tokens.tolist(), starts.tolist(), stops.tolist(), strict=True):
        labels[max(start, 0) : max(stop, 0)] = token
    return float(sum(values[np.arange(len(values)), labels].tolist(), 0.0))
