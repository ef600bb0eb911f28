"""`Decoder` is the interface of all decoders.

    decoder = FlexCTCBeam(vocab_size=1024, blank_id=1024, config=FlexCTCConfig(beam_size=8))
    results = decoder.decode(log_probs, lengths)          # one NBest per utterance

    streams = decoder.open(2)                             # two live streams
    decoder.push(streams, log_probs, lengths)             # as chunks arrive, any number of times
    decoder.partial(streams)                              # the best hypotheses so far, per stream
    results = decoder.close(streams)                      # the results do not depend on the chunks

Inputs may be NumPy arrays, or one utterance [T, ...], or a list of these; without lengths all frames are valid.

`decode` calls `open`, `push` and `close`. The streams hold all state of running utterances, so one decoder may serve
many threads.

A server opens a fixed number of streams and reuses each of them for one utterance after another:

    results = decoder.close(streams, rows=[1])            # stream 1 is over, the others go on
    decoder.reopen(streams, [1], requests)                # a new utterance in its place
    errors = decoder.push(streams, log_probs, lengths, rows=[0, 1], isolate=True)

A subclass implements input checks, engines (`engine.py`), and the conversion of an engine's results to hypotheses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.checks import FieldError, check_int, check_kind, given_or_default, warn_once
from nemo_gpu_decoding.fusion.automaton import BackoffAutomaton
from nemo_gpu_decoding.fusion.batch import BatchFusion, FusionLabels, check_fusion
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.search import inputs as of_inputs
from nemo_gpu_decoding.search.committed import worth_committing
from nemo_gpu_decoding.search.config import SearchConfig
from nemo_gpu_decoding.search.engine import BadRow, Engine, Streams, StreamsLost, choose_backend
from nemo_gpu_decoding.search.evidence import Units, as_committed, with_evidence
from nemo_gpu_decoding.search.inputs import Lengths, as_batch, checked_lengths, may_be_padded
from nemo_gpu_decoding.search.result import NBest, with_rules
from nemo_gpu_decoding.search.self_check import name_fault, why_distrusted

C = TypeVar("C", bound=SearchConfig)
R = TypeVar("R", bound=NBest)


MANY_TOKENS = 100  # after which the LM is judged
MOST_STREAMS, MOST_FRAMES = 1 << 20, 1 << 24  # of one `open`; MOST_FRAMES of 80 ms are 15 days


class Decoder(ABC, Generic[C, R]):
    """A batched beam search, which decodes inputs [B, T, ...]: B utterances of up to T frames.

    Args:
        config: options of the search.
        fusion: LM, boosting tree and their weights.
        labels: the labels that the automata of the fusion read.

    Raises:
        ValueError: an argument is out of range or does not fit the other arguments.
    """

    input_name: ClassVar[str] = "log_probs"  # for messages
    input_axes: ClassVar[str] = "T, V + 1"  # of one utterance, for messages
    reads_log_probs: ClassVar[bool] = True  # whether inputs are log-probs; a sample of them is checked
    strategy: ClassVar[str] = "a search"  # its name in NeMo's config, for messages
    vocab_size: int  # of a decoder that reads log-probs [B, T, vocab_size + 1]

    def __init__(self, config: C, fusion: Fusion | None, labels: FusionLabels) -> None:
        self.config = config
        self.fusion = given_or_default("fusion", fusion, Fusion)
        self._labels = labels
        self._is_sampled = not self.reads_log_probs  # True: no more frames are checked, for example after a warning
        self._is_checked = False  # whether frames of an input with lengths have been checked
        # The LM, until it has scored MANY_TOKENS of best hypotheses. None: the scores contain other LMs, too
        self._unjudged_lm = None if self.fusion.source_lm or self.fusion.lm_pool else self.fusion.lm
        self._lm_score, self._lm_tokens = 0.0, 0
        self._usual: BatchFusion | None = None  # of the last utterances without requests
        check_fusion(self.fusion, labels)

    # ------------------------------------------------------------------------------------ verbs

    def decode(
        self, inputs: Any, lengths: Lengths | None = None, requests: Sequence[Request | None] | None = None
    ) -> list[R]:
        """Decode a batch.

        Args:
            inputs: [B, T, ...] floating point; [T, ...] of one utterance; or a list of [T, ...], which is
                padded. torch tensors, NumPy arrays, or arrays with `__dlpack__` (JAX, CuPy). CTC decoders read
                natural log-probabilities [B, T, V + 1]. Transducers read the encoder's output [B, T, D]; NeMo's
                encoders return [B, D, T], so use transpose(1, 2). Frames beyond an utterance's length are not read.
            lengths: [B] number of valid frames of each utterance; None means that all frames are valid.
            requests: [B] for each utterance, None or weights and boosting trees that replace the decoder's.

        Returns:
            One `NBest` per utterance; for [T, ...] a list of one.

        Raises:
            ValueError: wrong types or shapes, lengths beyond T, NaN, +inf or log-probabilities above 0 (by more
                than rounding) in valid frames, wrong requests.
        """
        is_whole = lengths is None and not isinstance(inputs, list | tuple)  # and may be padded
        inputs, lengths = as_batch(inputs, lengths, name=self.input_name, axes=self.input_axes)
        self._check_inputs(inputs, batch=None)
        streams = self.open(len(inputs), requests, capacity=inputs.shape[1])
        self._push(streams, inputs, lengths, is_whole, deferred=True)
        return self._ended(streams, range(len(streams)))

    def open(
        self,
        n: int,
        requests: Sequence[Request | None] | None = None,
        *,
        capacity: int = 0,
        device: torch.device | str | None = None,
    ) -> Streams:
        """Begin n utterances that arrive in chunks.

        Args:
            n: number of utterances, 0 .. 1,048,576.
            requests: [n] for each utterance, None or weights and boosting trees that replace the decoder's.
            capacity: frames per utterance to allocate buffers for, 0 .. 16,777,216. Buffers grow with the utterance,
                except inside a CUDA graph, see `flexctc_beam/cuda_engine.py`.
            device: device of the inputs; if given, the backend is chosen now instead of at the first push.
        """
        check_int("n", n, 0, MOST_STREAMS)
        check_int("capacity", capacity, 0, MOST_FRAMES)
        fusion = self._usual
        if requests is not None or fusion is None or len(fusion) != n:
            fusion = BatchFusion.resolve(self.fusion, n, requests, self._labels)
        if requests is None:
            self._usual = fusion
        streams = Streams(fusion, capacity, np.ones(n, bool))
        streams.remember(range(n), requests)
        if device is not None:
            self._engine(streams, torch.device(device))
        return streams

    def push(
        self,
        streams: Streams,
        inputs: Any,
        lengths: Lengths | None = None,
        *,
        rows: Sequence[int] | None = None,
        isolate: bool = False,
    ) -> dict[int, ValueError]:
        """Read the next chunk of streams.

        Args:
            inputs: [R, T, ...] a chunk for each of `rows`; [T, ...] for one stream; or a list of [T, ...]. Arrays
                as in `decode`.
            lengths: [R] number of valid frames of each chunk, 0 .. T; None means that all frames are valid.
            rows: [R] stream number of each chunk; None means all streams, and closed streams have length 0.
            isolate: only a stream with an unreadable frame skips the chunk; its error is returned, not raised.

        Returns:
            Stream number -> the error in the stream's chunk; that stream is unchanged. Empty without `isolate`.

        Raises:
            ValueError: as `decode`; the streams are unchanged. Errors in frames name the number of the stream. While a
                CUDA graph is captured, errors are raised by `partial` or `close` instead. If a transducer's networks
                fail or return NaN, all streams are closed.
        """
        is_whole = lengths is None and not isinstance(inputs, list | tuple)  # and may be padded
        inputs, lengths = as_batch(inputs, lengths, name=self.input_name, axes=self.input_axes)
        if rows is None:
            _check_open(streams)
            self._check_inputs(inputs, batch=len(streams))
        else:
            numbers = _numbers(streams, rows, expect_open=True)
            self._check_inputs(inputs, batch=len(numbers))
            inputs, lengths = self._scatter_rows(inputs, lengths, numbers, len(streams))
        return self._push(streams, inputs, lengths, is_whole, deferred=False, isolate=isolate)

    def partial(self, streams: Streams, n_best: int = 1, *, rows: Sequence[int] | None = None) -> list[R]:
        """Return the best hypotheses of streams so far; their scores do not contain final weights.

        Args:
            n_best: number of hypotheses per stream.
            rows: numbers of open streams, in the order of the results; None means all open streams.
        """
        numbers = _open_numbers(streams, rows, distinct=False)
        most, reason = self._most_partial()
        if n_best not in range(1, most + 1):
            raise FieldError("n_best", n_best, f"{'1' if most == 1 else f'1 .. {most}'}{reason}")
        results = as_committed(streams, numbers, self._hypotheses(streams, numbers, n_best, final=False), self._units)
        for i, row in enumerate(numbers):
            if streams.fusion.rules[row].grammar is not None and results[i].committed:
                results[i] = replace(results[i], committed=0)  # the result is empty if no sentence fits
        self._commit(streams, {row: nbest.num_frames for row, nbest in zip(numbers, results, strict=True)})
        return results

    def close(self, streams: Streams, *, rows: Sequence[int] | None = None) -> list[R]:
        """End utterances and return their hypotheses.

        Args:
            rows: numbers of the streams that have ended, in the order of the results; None means all open streams.
        """
        numbers = _open_numbers(streams, rows)
        streams.set_open(numbers, False)
        return self._ended(streams, numbers)

    def reopen(self, streams: Streams, rows: Sequence[int], requests: Sequence[Request | None] | None = None) -> None:
        """Begin new utterances in closed streams. Results do not depend on earlier utterances or other streams.

        Args:
            rows: [R] numbers of closed streams.
            requests: [R] for each utterance, None or weights and boosting trees that replace the decoder's.

        Raises:
            ValueError: a stream is open; a request is wrong; or the requests' boosting trees differ from those in a
                captured CUDA graph.
        """
        numbers = _numbers(streams, rows, expect_open=False)
        new = BatchFusion.resolve(self.fusion, len(numbers), requests, self._labels)
        fusion = streams.fusion.replaced(numbers, new)
        if numbers and streams.engine is not None:
            streams.engine.restart(numbers, fusion)
        streams.fusion = fusion
        streams.commit_frames = {**streams.commit_frames, **dict.fromkeys(numbers, 0)}
        streams.remember(numbers, requests)
        streams.set_open(numbers, True)

    @abstractmethod
    def with_options(self, config: C, fusion: Fusion) -> Decoder[C, R]:
        """Return a decoder with other options; it shares models and graphs with this decoder."""

    @property
    def why_unlocked(self) -> str:
        """Return why tokens cannot be forbidden by a language lock or a grammar, or "" if they can."""
        return self._labels.unlocked

    # ---------------------------------------------------------------------- what a strategy adds

    def _check_inputs(self, inputs: Tensor, batch: int | None) -> None:
        """Check the shape of floating point inputs with three axes and `batch` rows (None: any number).

        Raises:
            ValueError: names the argument, the value seen and the value expected.
        """
        of_inputs.check_log_probs(inputs, batch=batch, columns=self.vocab_size + 1)

    @abstractmethod
    def _cpu_engine(self, streams: Streams) -> Engine:
        """Return the engine that searches these streams on the CPU."""

    def _cuda_engine(self, streams: Streams, device: torch.device) -> Engine:
        """Return the engine that searches these streams on a GPU; `device` is the device of the first inputs."""
        raise NotImplementedError

    def _why_not_cuda(self, streams: Streams, device: torch.device) -> str | None:
        """Return None if the kernels can search these streams on `device`, else the reason in one line."""
        return "this strategy has no CUDA kernels"

    def _units(self, path: Any) -> Units:
        """Return the labels or words of a path, as the boosting tree reads them."""
        labels = path.tokens - (path.tokens > self._labels.blank_id)
        return Units(labels.tolist(), range(len(path)), range(1, len(path) + 1))

    def _most_partial(self) -> tuple[int, str]:
        """Return the largest `n_best` that `partial` accepts, and the reason, for the error message."""
        return 1, ": alternatives are known at the end only"

    @abstractmethod
    def _results(self, streams: Streams, engine: Engine, rows: Sequence[int], n_best: int, *, final: bool) -> list[R]:
        """Convert the engine's results for the streams `rows` to hypotheses."""

    # --------------------------------------------------------------------------------- internals

    def _scatter_rows(self, inputs: Tensor, lengths: Lengths, rows: list[int], n: int) -> tuple[Tensor, np.ndarray]:
        """Spread inputs and lengths of `rows` over all n streams; the other streams have length 0."""
        counts = np.zeros(n, np.int64)
        counts[rows] = checked_lengths(lengths, len(rows), inputs.shape[1], of=self.input_name)
        if rows == list(range(n)):
            return inputs, counts
        spread = inputs.new_zeros((n, *inputs.shape[1:]))  # finite: a transducer sums the frames to find a bad one
        spread[rows] = inputs
        return spread, counts

    def _push(
        self,
        streams: Streams,
        inputs: Tensor,
        lengths: Lengths,
        is_whole: bool,
        *,
        deferred: bool,
        isolate: bool = False,
    ) -> dict[int, ValueError]:
        n, frames = inputs.shape[:2]
        if n == 0:
            checked_lengths(lengths, n, frames, of=self.input_name)
            return {}
        engine = self._engine(streams, inputs.device)
        is_taken = isinstance(lengths, Tensor) and engine.accepts_device_lengths(lengths) and len(lengths) == n
        is_taken = is_taken and not streams.heard
        counts: Any = lengths
        is_open = streams.is_open.all()
        if not is_whole and not (is_taken and is_open):
            counts = checked_lengths(lengths, n, frames, of=self.input_name)
        if not is_open:
            for row in np.flatnonzero((counts > 0) & ~streams.is_open)[:1]:
                raise ValueError(f"lengths[{row}] is {counts[row]}, expected 0: stream {row} is closed")
        if not self._is_sampled and (not self._is_checked or (is_whole and frames and may_be_padded(inputs))):
            has_warned = of_inputs.warn_unless_normalised(inputs, counts)
            self._is_checked |= has_warned is not None
            # on a GPU a later check would wait for the device
            self._is_sampled = bool(has_warned) or (inputs.is_cuda and self._is_checked)
        errors: dict[int, ValueError] = {}
        while True:
            try:
                engine.push(inputs, counts, deferred=deferred)
                streams.hear(inputs, counts, copies=not deferred)
                return errors
            except StreamsLost:
                streams.set_open(range(n), False)
                streams.engine = None
                raise
            except BadRow as error:
                if not isolate:
                    raise
                errors[error.row] = error
                counts = counts.clone() if isinstance(counts, Tensor) else counts.copy()
                counts[error.row] = 0
            except RuntimeError as error:
                name_fault(self.strategy, error)
                raise

    def _engine(self, streams: Streams, device: torch.device) -> Engine:
        """Return the engine of the streams; create an engine for inputs on `device` if the streams have none."""
        if streams.engine is None:

            def obstacle(where: torch.device) -> str | None:
                return self._why_not_cuda(streams, where) or why_distrusted(self.strategy, where)

            backend = choose_backend(self.config.backend, device, obstacle)
            announce_compilation(self.strategy)
            if backend == "cuda":
                streams.engine = self._cuda_engine(streams, device)
            else:
                streams.engine = self._cpu_engine(streams)
        return streams.engine

    def _commit(self, streams: Streams, frames: Mapping[int, int]) -> None:
        """Commit tokens of streams with many new frames; `frames` maps stream numbers to frames read so far."""
        due = [row for row, read in frames.items() if worth_committing(read - streams.commit_frames.get(row, 0))]
        if due and streams.engine is not None:
            streams.engine.commit(due)
            streams.commit_frames = {**streams.commit_frames, **{row: frames[row] for row in due}}

    def _ended(self, streams: Streams, rows: Sequence[int]) -> list[R]:
        """Return the hypotheses of utterances that have ended."""
        results = self._hypotheses(streams, rows, self.config.n_best, final=True)
        return with_evidence(streams, rows, results, self._units, self.decode)

    def _hypotheses(self, streams: Streams, rows: Sequence[int], n_best: int, *, final: bool) -> list[R]:
        if len(rows) == 0:
            return []
        engine = streams.engine or self._cpu_engine(streams)  # nothing was pushed: all engines give the same result
        try:
            results = self._results(streams, engine, rows, n_best, final=final)
        except RuntimeError as error:
            name_fault(self.strategy, error)
            raise
        if any(tree.aliases is not None for tree in streams.fusion.trees):
            pairs = zip(results, map(streams.fusion.aliases_of, rows), strict=True)
            results = [nbest if aliases is None else replace(nbest, aliases=aliases) for nbest, aliases in pairs]
        if final:
            if any(map(any, streams.fusion.rules)):
                results = with_rules(results, [streams.fusion.rules[row] for row in rows], self._labels.blank_id)
            if self._unjudged_lm is not None:
                self._judge(self._unjudged_lm, results, streams.fusion.lm_weights[rows])
        return results

    def _judge(self, lm: BackoffAutomaton, results: Sequence[R], weights: np.ndarray) -> None:
        """Warn if the LM finds decoded tokens less probable than chance: it may be an LM of another tokenizer."""
        for nbest, weight in zip(results, weights.tolist(), strict=True):
            if weight > 0 and nbest.paths:
                self._lm_score += nbest.best.parts.lm / weight
                self._lm_tokens += len(nbest.best)
        equal = -math.log(self._labels.size)
        if self._lm_tokens < MANY_TOKENS:
            return
        self._unjudged_lm = None
        if self._lm_score < self._lm_tokens * equal:
            warn_once(
                f"the LM {lm.name} gives the decoded tokens a lower log-probability than {equal:.1f}, that of equal "
                "probabilities: it may be of another tokenizer, or made of too little text"
            )


def _check_open(streams: Streams) -> None:
    check_kind("streams", streams, Streams, ": open makes it")
    if streams.closed:
        raise ValueError("streams is closed, expected streams from open() that were not closed yet")


def _open_numbers(streams: Streams, rows: Sequence[int] | None, *, distinct: bool = True) -> list[int]:
    """Return `rows` after checking that these streams are open; for None return the numbers of all open streams."""
    _check_open(streams)
    if rows is None:
        return streams.is_open.nonzero()[0].tolist()
    return _numbers(streams, rows, expect_open=True, distinct=distinct)


def _numbers(streams: Streams, rows: Sequence[int], *, expect_open: bool, distinct: bool = True) -> list[int]:
    """Return the rows as ints.

    Raises:
        ValueError: a row is not the number of an open stream (without `expect_open`: of a closed one).
    """
    check_kind("rows", rows, Iterable)
    seen: set[int] = set()
    for row in rows:
        if not isinstance(row, (int, np.integer)) or not 0 <= row < len(streams):
            raise ValueError(f"rows holds {row!r}, expected numbers of streams, 0 .. {len(streams) - 1}")
        if distinct and row in seen:
            raise ValueError(f"rows holds {row} twice, expected each stream once")
        if streams.is_open[row] != expect_open:
            state, verb = ("closed", "reopen") if expect_open else ("open", "close")
            raise ValueError(f"rows holds {row}, a stream that is {state}: {verb} it first")
        seen.add(int(row))
    return [int(row) for row in rows]
