"""The searches behind pyctcdecode's interface, and the log-probs that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.checks import check_int
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.fusion import Request
from nemo_gpu_decoding.graph.csr import WordGraph
from nemo_gpu_decoding.jit import compiled
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE, FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.word_graph.best_path import best_paths
from nemo_gpu_decoding.search.word_graph.config import MAX_ACTIVE_LIMIT, WFSTConfig
from nemo_gpu_decoding.search.word_graph.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST

# With an LM: the graph charges for a word at its beginning, where pyctcdecode does at its end, so the search keeps
# hypotheses that are worse by LEAD more, natural log. One hypothesis of pyctcdecode corresponds to several states of
# the graph. Higher values did not lower the error rates of the benchmark's tasks.
LEAD, STATES_PER_BEAM = 3.0, 10
MOST_RESULTS = 10_000
LN2 = math.log(2)
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
        self, inputs: Sequence[np.ndarray], requests: Sequence[Request | None], begin: int
    ) -> list[np.ndarray]:
        """The tokens of the best hypothesis of each utterance, from a frame on; `inputs`: [T, V + 1] of each."""
        found = self.decode([torch.from_numpy(values) for values in inputs], requests=requests)
        return [nbest.best.tokens[nbest.best.frames >= begin] for nbest in found]


class WordSearch(CudaWFST):
    """The search with a word LM; arguments as for `TokenSearch`."""

    def __init__(
        self, graph: WordGraph, vocab_size: int, beam_width: int, beam_prune_logp: float, n_best: int
    ) -> None:
        beam = LEAD - beam_prune_logp
        config = WFSTConfig(
            beam=beam,
            lattice_beam=beam,
            max_active=min(STATES_PER_BEAM * beam_width, MAX_ACTIVE_LIMIT),
            n_best=min(n_best, MOST_RESULTS),
            topology="normal",
            backend="cpu",
        )
        super().__init__(graph, vocab_size, vocab_size, config)
        self._is_sampled = True

    def best_tokens(
        self, inputs: Sequence[np.ndarray], requests: Sequence[Request | None], begin: int
    ) -> list[np.ndarray]:
        """As `TokenSearch.best_tokens`; no other part of a result is computed."""
        lengths = np.array([len(values) for values in inputs])
        batch = inputs[0][None]  # one utterance is not copied
        if len(inputs) > 1:
            batch = np.zeros((len(inputs), lengths.max(), self.vocab_size + 1), np.float32)
            for row, values in zip(batch, inputs, strict=True):
                row[: len(values)] = values
        fusion = BatchFusion.resolve(self.fusion, len(inputs), requests, self._labels)
        engine = CPUEngine(self._models_of, fusion, self.config)
        engine.push(torch.from_numpy(batch), lengths)
        found = best_paths(engine.results(range(len(inputs)), 1, final=True), final=True)
        steps = map(found.steps_of, range(len(inputs)))
        return [self.graph.arrays.arcs["ilabel"][own.arcs[own.frames >= begin]] for own in steps]

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
    most = logits.max(axis=1)
    norms = most + _log_sums(logits, most, np.empty(logits.shape[1], np.float32))
    for frame in np.flatnonzero(np.isnan(norms))[:1].tolist():
        for column in np.flatnonzero(~(logits[frame] < np.inf))[:1].tolist():
            value = logits[frame, column]
            raise ValueError(f"{name}[{frame}, {column}] is {value}, expected a finite value or -inf")
        raise ValueError(f"{name}[{frame}] leaves no label possible: all its values are -inf")
    return norms


@compiled
def _log_sums(logits, most, terms):
    """log(sum(exp(logits - most))) of each frame; NaN if `most` is not finite.

    exp(x) is 2^n 2^r with a Taylor polynomial for |r| <= 1/2, and the terms are added in a tree: both loops use SIMD.
    """
    found, log2_e = np.empty_like(most), np.float32(1 / math.log(2))
    for t in range(len(most)):
        row, top = logits[t], most[t]
        for v in range(len(terms)):
            x = max(np.float32(row[np.uintp(v)] - top) * log2_e, np.float32(-126))
            n = np.floor(x + np.float32(0.5))
            power = np.int32((n + np.float32(127)) * np.float32(1 << 23)).view(np.float32)
            r = (x - n) * np.float32(LN2)
            high = np.float32(1 / 6) + r * (np.float32(1 / 24) + r * (np.float32(1 / 120) + r * np.float32(1 / 720)))
            terms[np.uintp(v)] = power * (np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * high)))
        count = len(terms)
        while count > 1:
            half = (count + 1) // 2
            for v in range(count - half):
                terms[np.uintp(v)] += terms[np.uintp(v) + np.uintp(half)]
            count = half
        found[t] = np.log(terms[0]) if abs(top) < np.inf else np.nan
    return found


def likely_labels(
    logits: np.ndarray, norms: np.ndarray, blank: int, token_min_logp: float, *, merges: bool
) -> np.ndarray:
    """Log-probs in which unlikely tokens are `SKIPPED`, except for the most likely one of each frame.

    Args:
        logits: [T, V + 1] float32 or float64.
        norms: [T], see `log_norms`; the log-probs are logits - norms.
        blank: column of the blank, which becomes the last one.
        token_min_logp: the least log-prob of a likely token.
        merges: drop each frame that can only be a blank, like the one before it. Such a frame changes no text.

    Returns:
        [T, V + 1] float32; fewer frames with `merges`.
    """
    found = np.empty(logits.shape, np.float32)
    return found[: _copy_likely(logits, norms, blank, max(token_min_logp, LEAST_LOGP), merges, found)]


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
