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
from nemo_gpu_decoding.jit import LANES, any_order, compiled, linked, no_refcount, not_below, trailing_zeros
from nemo_gpu_decoding.search.flexctc_beam.config import MAX_BEAM_SIZE, FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.decoder import FlexCTCBeam
from nemo_gpu_decoding.search.streams import for_each_share
from nemo_gpu_decoding.search.word_graph.best_path import END, best_end
from nemo_gpu_decoding.search.word_graph.config import MAX_ACTIVE_LIMIT, WFSTConfig
from nemo_gpu_decoding.search.word_graph.cpu_engine import (
    WorkspaceKind,
    keep_workspace,
    new_workspace,
    taken_workspace,
    with_more_room,
)
from nemo_gpu_decoding.search.word_graph.decoder import CudaWFST
from nemo_gpu_decoding.search.word_graph.frame import advance
from nemo_gpu_decoding.search.word_graph.keys import DONE, NONE
from nemo_gpu_decoding.search.word_graph.labels import SKIPPED
from nemo_gpu_decoding.search.word_graph.records import BACK_POINTER, LINK, StreamArrays, Workspace
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels, models_of_rows


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
LARGE_NORM = 20.0  # from here on, the largest value of a frame is subtracted before exp, for precision
MOST_KEPT = 1 << 24  # bytes of log-probs that a thread keeps between calls
LEAST_LOGP = math.log(1e-15)  # tokens with smaller log-probs are always skipped


class Logits(NamedTuple):
    """The output of a model for an utterance."""

    values: np.ndarray  # [T, V + 1] float32 or float64: logits, log-probs or probabilities
    name: str  # in messages


class Normed(NamedTuple):
    """Logits, and what makes them log-probs."""

    logits: np.ndarray  # [T, V + 1] float32 or float64
    norms: np.ndarray  # [T], subtracted from each frame


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
        self, utterances: Sequence[Logits], requests: Sequence[Request | None], options: Likely
    ) -> list[np.ndarray]:
        """The tokens of the best hypothesis of each utterance, without those of `options.before`."""
        batch, lengths, _ = likely_batch(utterances, options)
        found = self.decode(torch.from_numpy(batch), lengths, requests)
        return [nbest.best.tokens[nbest.best.frames >= len(options.before)] for nbest in found]


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
        self, utterances: Sequence[Logits], requests: Sequence[Request | None], options: Likely
    ) -> list[np.ndarray]:
        """As `TokenSearch.best_tokens`; no other part of a result is computed."""
        models = [self._models] * len(utterances)
        if any(requests):
            fusion = BatchFusion.resolve(self.fusion, len(utterances), requests, self._labels)
            models = models_of_rows(self._models_of, fusion, range(len(utterances)))
        found: list[np.ndarray] = [np.empty(0, np.int32)] * len(utterances)

        def read(rows: np.ndarray) -> None:
            work = taken_workspace(self._kind)
            for b in rows.tolist():
                frames, _ = likely_labels(utterances[b], options)
                found[b], work = _read_text(frames, models[b], len(options.before), work)
            keep_workspace(self._kind, work)

        for_each_share(read, np.array([1 + len(logits.values) for logits in utterances]), self.config.threads)
        return found

    @cached_property
    def _kind(self) -> WorkspaceKind:
        return WorkspaceKind(
            _new_workspace, self.config.max_active, self.vocab_size + 1, self.config.keeps_links, False
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


class Likely(NamedTuple):
    """Which labels of a frame are likely."""

    before: np.ndarray  # [n] int32, the only label of each frame that comes before an utterance; V: the blank
    blank: int  # column of the blank, which becomes the last one
    token_min_logp: float  # the least log-prob of a likely label
    merges: bool  # drop each frame that can only be a blank, like the one before it; such a frame changes no text


class Frames(NamedTuple):
    """The likely labels of T frames, those of one frame after the other, and their log-probs."""

    ends: np.ndarray  # [T] int64, end of each frame in the other two
    labels: np.ndarray  # int32, ascending within a frame; V: the blank
    log_probs: np.ndarray  # float32


def likely_labels(utterance: Logits, options: Likely) -> tuple[Frames, Normed]:
    """The likely labels of each frame of an utterance; if a frame has none, its most likely one.

    They are valid until the next call in the same thread, which uses the same memory: new memory takes four times as
    long to write.

    Raises:
        ValueError: a frame has NaN or +inf, or -inf alone.
    """
    logits, name = utterance
    count = len(options.before) + logits.size
    memory, ends = _memory("sparse", 2 * count), np.empty(len(options.before) + len(logits), np.int64)
    found = Frames(ends, memory[:count].view(np.int32), memory[count:])
    norms, least = np.empty(len(logits), logits.dtype), max(options.token_min_logp, LEAST_LOGP)
    arguments = options.before, options.blank, least, options.merges, found
    frames, bad = _find_likely(logits, norms, True, *arguments)
    if bad < len(logits):
        raise _bad_frame(logits[bad], f"{name}[{bad}")
    if _are_probabilities(logits, norms):
        logits, norms = np.log(np.clip(logits, 1e-15, 1)), np.zeros_like(norms)
        frames, _ = _find_likely(logits, norms, False, *arguments)
    return Frames(ends[:frames], *found[1:]), Normed(logits, norms)


def _bad_frame(row: np.ndarray, where: str) -> ValueError:
    """The error of a frame with NaN or +inf, or with -inf alone."""
    for column in np.flatnonzero(~(row < np.inf))[:1].tolist():
        return ValueError(f"{where}, {column}] is {row[column]}, expected a finite value or -inf")
    return ValueError(f"{where}] leaves no label possible: all its values are -inf")


def _are_probabilities(logits: np.ndarray, norms: np.ndarray) -> bool:
    """Whether the frames add up to 1; norms of probabilities are large, because their exp are 1 or more."""
    if not len(norms) or norms[0] <= 0.1 or norms.min() <= 0.1:
        return False
    return math.isclose(logits.sum() / len(logits), 1, rel_tol=1e-5 if logits.dtype == np.float32 else 1e-9)


def likely_batch(utterances: Sequence[Logits], options: Likely) -> tuple[np.ndarray, np.ndarray, list[Normed]]:
    """Log-probs in which all but the likely labels are `SKIPPED`, valid as those of `likely_labels`.

    Tokens below token_min_logp are among them: a path of the graph takes one if there is no other.

    Returns:
        [B, T, V + 1] float32; [B] valid frames; the logits with their norms.
    """
    most = len(options.before) + max(len(own.values) for own in utterances)
    shape = len(utterances), most, utterances[0].values.shape[1]
    batch = _memory("dense", math.prod(shape)).reshape(shape)
    batch[:] = SKIPPED
    lengths, found = np.empty(len(utterances), np.int64), []
    for b, own in enumerate(utterances):
        (ends, labels, log_probs), normed = likely_labels(own, options)
        lengths[b], count = len(ends), ends[-1] if len(ends) else 0
        batch[b, np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)), labels[:count]] = log_probs[:count]
        found.append(normed)
    return batch, lengths, found


_kept = threading.local()


def _memory(name: str, count: int) -> np.ndarray:
    """[count] float32, unless it is large that of the thread's last call with this name."""
    values: np.ndarray = _kept.__dict__.get(name, np.empty(0, np.float32))
    if len(values) < count:
        values = np.empty(count, np.float32)
        if values.nbytes <= MOST_KEPT:
            _kept.__dict__[name] = values
    return values[:count]


@any_order
def _log_sum(row, top):
    """log(sum(exp(row))); top: about the largest value, so that no exp overflows and not all of them vanish.

    exp(x) is 2^n 2^r with a Taylor polynomial for |r| <= 1/2; the loop uses SIMD.
    """
    total, log2_e, most = np.float32(0), np.float32(1 / math.log(2)), np.float32(126)
    for v in range(len(row)):
        x = np.float32(row[np.uintp(v)] - top) * log2_e
        x = -most if x < -most else x  # NaN stays
        x = most if x > most else x
        n = np.floor(x + np.float32(0.5))
        power = np.int32((n + np.float32(127)) * np.float32(1 << 23)).view(np.float32)
        r = (x - n) * np.float32(LN2)
        high = np.float32(1 / 6) + r * (np.float32(1 / 24) + r * (np.float32(1 / 120) + r * np.float32(1 / 720)))
        total += power * (np.float32(1) + r * (np.float32(1) + r * (np.float32(0.5) + r * high)))
    return top + np.log(total)


@compiled
def _find_likely(logits, norms, normalises, before, blank, least, merges, frames):
    """Write the likely labels to `frames`, and the norms to `norms` or, if not `normalises`, read them.

    Returns:
        the number of frames, and of the first bad one of the logits, or T.
    """
    ends, labels, log_probs = frames
    end, count, last, was_blank = len(before), len(before), logits.shape[1] - 1, False
    whole = logits.shape[1] - logits.shape[1] % LANES
    for t in range(len(before)):
        ends[t], labels[t], log_probs[t] = t + 1, before[t], np.float32(0)
    for t in range(len(logits)):
        row, begin = logits[t], end
        if normalises:
            norms[t] = _log_sum(row, row.dtype.type(0))
            if not abs(norms[t]) < LARGE_NORM:
                norms[t] = _log_sum(row, row.max())
            if not abs(norms[t]) < np.inf:
                return count, t
        norm = norms[t]
        limit = norm + logits.dtype.type(least)
        for first in range(0, whole, LANES):
            found = np.uint32(not_below(row, first, limit))
            while found != 0:
                end = _add_label(row, first + np.int64(trailing_zeros(found)), norm, blank, end, frames)
                found &= found - np.uint32(1)
        for v in range(whole, len(row)):
            if row[v] >= limit:
                end = _add_label(row, v, norm, blank, end, frames)
        if row[blank] >= limit:
            labels[end], log_probs[end] = last, row[blank] - norm
            end += 1
        if end == begin:
            best = np.argmax(row)
            labels[end], log_probs[end] = last if best == blank else best - (best > blank), row[best] - norm
            end += 1
        is_blank = labels[begin] == last
        if merges and was_blank and is_blank:
            end = begin
            continue
        was_blank = is_blank
        ends[count] = end
        count += 1
    return count, len(logits)


@linked
def _add_label(row, v, norm, blank, end, frames):
    """Write column v to frames at `end`, unless it is the blank; returns the next end."""
    frames.labels[np.uintp(end)] = v - (v > blank)
    frames.log_probs[np.uintp(end)] = row[np.uintp(v)] - norm
    return end + (v != blank)


def _new_workspace(*sizes: Any, **options: Any) -> Workspace:
    """A workspace for searches without the probabilities of labels."""
    return new_workspace(*sizes, **options)._replace(posteriors=np.empty(0, np.float32))


def _read_text(frames: Frames, models: StreamModels, before: int, work: Workspace) -> tuple[np.ndarray, Workspace]:
    """The tokens of the best hypothesis of an utterance, without those of the first `before` frames.

    Returns:
        [N] int32; the workspace, which may be a larger one.
    """
    first, counters = models.first
    work.current[:1].view(np.uint8)[:] = first.view(np.uint8)  # records are copied field by field
    state = StreamArrays(counters.copy(), np.empty(2048, BACK_POINTER), np.empty(0, LINK))
    row, ends = np.full((1, len(work.labels)), SKIPPED, np.float32), np.empty(1, END)
    tokens, frame = np.empty(len(frames.ends), np.int32), 0
    while True:
        frame, status, begin = _advance_text(frames, frame, before, row, state, models.search, work, ends, tokens)
        if status == DONE:
            return tokens[begin:], work
        state, work = with_more_room(status, state, work, models)


@no_refcount
def _advance_text(frames, begin, before, row, state, search, work, ends, tokens):
    """Decode the frames from `begin` on, then write the best hypothesis to the end of `tokens`.

    Args:
        row: [1, V + 1] SKIPPED.

    Returns:
        the number of the next frame and a status, as `advance`; index of the first token that was written.
    """
    for t in range(begin, len(frames.ends)):
        first, last, listed = frames.ends[t - 1] if t > 0 else 0, frames.ends[t], 0
        for i in range(first, last):
            label = frames.labels[np.uintp(i)]
            row[0, np.uintp(label)] = frames.log_probs[np.uintp(i)]
            work.labels[np.uintp(listed)] = label
            listed += label != search.params.blank_id
        work.frame[0].listed = listed + 1
        _, status = advance(row, 0, 1, state, search, None, work)
        for i in range(first, last):
            row[0, np.uintp(frames.labels[np.uintp(i)])] = SKIPPED
        if status != DONE:
            return t, status, 0
    counters, node = state.counters[0], NONE
    for final in (True, False):
        if node == NONE:
            best_end(work.current, 0, counters.tokens, final, search, None, ends[0])
            node = ends[0].node
    at, count = work.current[node].back_pointer, len(tokens)
    while at != NONE and state.back_pointers[at].frame >= before:
        count -= 1
        tokens[count] = search.graph.arcs[state.back_pointers[at].arc].ilabel
        at = state.back_pointers[at].previous
    return len(frames.ends), DONE, count


def aligned_score(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, values: np.ndarray) -> float:
    """The sum of log-probs [T, V + 1] along an alignment, whose tokens last from start to stop."""
    labels = np.full(len(values), values.shape[1] - 1)
    for token, start, stop in zip(tokens.tolist(), starts.tolist(), stops.tolist(), strict=True):
        labels[max(start, 0) : max(stop, 0)] = token
    return float(sum(values[np.arange(len(values)), labels].tolist(), 0.0))
