"""`FlexCTCBeam`: the public face of flexctc_beam. Checks inputs, keeps buffers; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nemo_gpu_decoding.fusion.automaton import (
    AutomatonArrays,
    BackoffAutomaton,
    concatenate,
    empty_automaton,
)
from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.search.backend import choose_backend
from nemo_gpu_decoding.search.flexctc_beam import cpu
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.prefix import advance_prefix
from nemo_gpu_decoding.search.history import (
    History,
    Traces,
    grown_history,
    new_history,
    new_traces,
    trace_alignment,
)
from nemo_gpu_decoding.search.inputs import (
    as_float32,
    checked_log_probs,
    raise_bad_frame,
)
from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts
from nemo_gpu_decoding.search.threads import for_each_share

MERGE = {"max": cpu.MERGE_MAX, "sum": cpu.MERGE_SUM, "prefix": cpu.MERGE_PREFIX}


@dataclass
class Streams:
    """n utterances being decoded: everything a search remembers. Belongs to one thread at a time."""

    beam: np.ndarray  # [n, K] cpu.HYPOTHESIS
    sizes: np.ndarray  # [n] int32, live hypotheses
    frames_done: np.ndarray  # [n] int64
    history: History
    lm: AutomatonArrays
    boosting: AutomatonArrays
    lm_starts: np.ndarray  # [n] int32
    boosting_starts: np.ndarray  # [n] int32
    lm_weights: np.ndarray  # [n] float32
    boosting_weights: np.ndarray  # [n] float32
    closed: bool = False

    def __len__(self) -> int:
        return len(self.sizes)


class FlexCTCBeam:
    """Batched CTC beam search with n-gram LM and phrase boosting [FlexCTC].

    Args:
        vocab_size: V, number of tokens without the blank.
        blank_id: column of the blank in the log-probs, 0 .. V. NeMo's is V.
        config: see `FlexCTCConfig`.
        fusion: LM and boosting tree. Both number the tokens without the blank: where blank_id is V a
            token's label is its id, with a smaller blank_id the ids above it are shifted down by one.

    Example:
        >>> decoder = FlexCTCBeam(2, blank_id=2, config=FlexCTCConfig(beam_size=4))
        >>> log_probs = torch.log_softmax(torch.randn(1, 50, 3), dim=-1)
        >>> tokens = decoder.decode(log_probs, [50])[0].best.tokens

    One decoder may serve several threads at once: it holds no state of a running utterance.

    Raises:
        ValueError: an argument is out of range or does not fit the others.
    """

    def __init__(
        self,
        vocab_size: int,
        blank_id: int,
        config: FlexCTCConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}, expected at least 1")
        if not 0 <= blank_id <= vocab_size:
            raise ValueError(f"blank_id is {blank_id}, expected 0 .. {vocab_size} (vocab_size)")
        self.vocab_size = vocab_size
        self.blank_id = blank_id
        self.config = config or FlexCTCConfig()
        self.fusion = fusion or Fusion()
        if self.config.alignments and self.config.merge == "prefix":
            raise ValueError(
                "alignments is True with merge='prefix', expected merge='max' or 'sum': "
                "prefix search sums over alignments and has none of its own"
            )
        self._nothing = empty_automaton(vocab_size)
        for name, automaton in (
            ("fusion.lm", self.fusion.lm),
            ("fusion.boosting", self.fusion.boosting),
        ):
            self._check_automaton(name, automaton)

    # ------------------------------------------------------------------------------------ verbs

    def decode(
        self,
        log_probs: torch.Tensor,
        lengths: torch.Tensor | Sequence[int],
        requests: Sequence[Request | None] | None = None,
    ) -> list[NBest]:
        """Decode a batch.

        Args:
            log_probs: [B, T, V + 1] natural log-probabilities, float32, float16 or bfloat16. What lies
                beyond an utterance's length is never read.
            lengths: [B] valid frames.
            requests: [B] what single utterances want instead of the decoder's fusion.

        Returns:
            One `NBest` per utterance.

        Raises:
            ValueError: wrong shapes, lengths beyond T, NaN or +inf in valid frames, wrong requests.
        """
        checked_log_probs(log_probs, lengths, batch=None, columns=self.vocab_size + 1)
        streams = self._open(len(log_probs), requests, capacity=log_probs.shape[1])
        self.push(streams, log_probs, lengths)
        return self.close(streams)

    def open(self, n: int, requests: Sequence[Request | None] | None = None) -> Streams:
        """Begin n utterances that arrive in chunks."""
        return self._open(n, requests, capacity=0)

    def push(
        self, streams: Streams, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> None:
        """Read the next chunk of every stream: log_probs [n, T, V + 1], lengths [n] (0 = nothing new).

        Raises:
            ValueError: as `decode`; the streams are then as they were before the call.
        """
        self._check_open(streams)
        log_probs, frames = checked_log_probs(
            log_probs, lengths, batch=len(streams), columns=self.vocab_size + 1
        )
        choose_backend(self.config.backend, log_probs.device)
        announce_compilation()
        values = as_float32(log_probs)
        total = int((streams.frames_done + frames).max(initial=0))
        streams.history = grown_history(streams.history, total)
        beam, sizes, frames_done = streams.beam.copy(), streams.sizes.copy(), streams.frames_done.copy()

        step = advance_prefix if self.config.merge == "prefix" else cpu.advance

        def advance(rows: np.ndarray) -> None:
            step(
                rows, values, frames, frames_done, beam, sizes, streams.history, self._search(),
                streams.lm_weights, streams.boosting_weights, streams.lm, streams.boosting,
            )  # fmt: skip

        for_each_share(advance, frames, self.config.threads)
        for b in np.flatnonzero(sizes <= 0):  # the streams stay as they were
            raise_bad_frame(values, int(b), int(frames_done[b] - streams.frames_done[b]))
        streams.beam, streams.sizes, streams.frames_done = beam, sizes, frames_done

    def partial(self, streams: Streams, n_best: int = 1) -> list[NBest]:
        """The best hypotheses of every stream so far; final weights are not in their scores."""
        self._check_open(streams)
        if not 1 <= n_best <= self.config.beam_size:
            raise ValueError(f"n_best is {n_best}, expected 1 .. {self.config.beam_size} (beam_size)")
        return self._results(streams, n_best, final=False)

    def close(self, streams: Streams) -> list[NBest]:
        """End the utterances and return their hypotheses."""
        self._check_open(streams)
        streams.closed = True
        return self._results(streams, n_best=self.config.n_best, final=True)

    # ------------------------------------------------------------------------------- inner rooms

    def _open(self, n: int, requests: Sequence[Request | None] | None, capacity: int) -> Streams:
        if n < 0:
            raise ValueError(f"n is {n}, expected the number of streams, >= 0")
        wishes = self._checked_requests(n, requests)
        lm_weights = np.array(
            [self._weight(self.fusion.lm, self.fusion.lm_weight, w.lm_weight) for w in wishes]
        )
        trees = [w.boosting or self.fusion.boosting for w in wishes]
        boosting_weights = np.array(
            [
                self._weight(tree, self.fusion.boosting_weight, wish.boosting_weight)
                for tree, wish in zip(trees, wishes, strict=True)
            ]
        )
        lm = self.fusion.lm or self._nothing
        lm_starts = np.full(n, lm.start_state, np.int32)
        boosting, boosting_starts = self._joined(trees)
        return Streams(
            beam=cpu.new_beam(n, self.config.beam_size, lm_starts, boosting_starts),
            sizes=np.ones(n, np.int32),
            frames_done=np.zeros(n, np.int64),
            history=new_history(n, capacity, self.config.beam_size),
            lm=lm.arrays,
            boosting=boosting,
            lm_starts=lm_starts,
            boosting_starts=boosting_starts,
            lm_weights=lm_weights.astype(np.float32),
            boosting_weights=boosting_weights.astype(np.float32),
        )

    def _joined(self, trees: Sequence[BackoffAutomaton | None]) -> tuple[AutomatonArrays, np.ndarray]:
        """All trees of a batch in one set of arrays, each of them once, and every row's start state."""
        distinct = {id(tree): tree for tree in trees if tree is not None}
        if not distinct:
            return self._nothing.arrays, np.zeros(len(trees), np.int32)
        arrays, starts = concatenate(list(distinct.values()))
        start_of = dict(zip(distinct, starts, strict=True))
        return arrays, np.array([start_of.get(id(tree), 0) for tree in trees], np.int32)

    @staticmethod
    def _weight(automaton: BackoffAutomaton | None, own: float, wished: float | None) -> float:
        if automaton is None:
            return 0.0
        return own if wished is None else wished

    def _checked_requests(self, n: int, requests: Sequence[Request | None] | None) -> list[Request]:
        if requests is None:
            return [Request()] * n
        if len(requests) != n:
            raise ValueError(f"requests has {len(requests)} entries, expected {n}: one per utterance")
        for i, request in enumerate(requests):
            if request is None:
                continue
            if not isinstance(request, Request):
                raise ValueError(
                    f"requests[{i}] is a {type(request).__name__}, expected a Request or None"
                )
            self._check_automaton(f"requests[{i}].boosting", request.boosting)
            if request.lm_weight is not None and self.fusion.lm is None:
                raise ValueError(
                    f"requests[{i}].lm_weight is {request.lm_weight}, but the decoder has no LM"
                )
            if request.boosting_weight is not None and not (request.boosting or self.fusion.boosting):
                raise ValueError(
                    f"requests[{i}].boosting_weight is {request.boosting_weight}, but neither the "
                    "request nor the decoder has a boosting tree"
                )
        return [request or Request() for request in requests]

    def _check_automaton(self, name: str, automaton: BackoffAutomaton | None) -> None:
        if automaton is not None and automaton.vocab_size != self.vocab_size:
            raise ValueError(
                f"{name} ({automaton.name}) was made for {automaton.vocab_size} tokens, "
                f"expected {self.vocab_size} (vocab_size)"
            )

    @staticmethod
    def _check_open(streams: Streams) -> None:
        if streams.closed:
            raise ValueError("streams is closed, expected streams from open() that were not closed yet")

    def _search(self, lm_weight: float = 0.0, boosting_weight: float = 0.0) -> cpu.Search:
        return cpu.Search(
            blank_id=self.blank_id,
            vocab_size=self.vocab_size,
            merge=MERGE[self.config.merge],
            beam_beta=np.float32(self.config.beam_beta),
            threshold=np.float32(self.config.beam_threshold),
            lm_weight=np.float32(lm_weight),
            boosting_weight=np.float32(boosting_weight),
        )

    def _results(self, streams: Streams, n_best: int, final: bool) -> list[NBest]:
        n = len(streams)
        order = np.full((n, n_best), -1, np.int32)
        scores = np.zeros((n, n_best), np.float32)
        traces = new_traces(n, n_best, int(streams.frames_done.max(initial=0)))

        def finish(rows: np.ndarray, final: bool = final) -> None:
            cpu.finish(
                rows, streams.frames_done, streams.beam, streams.sizes, streams.history, self._search(),
                streams.lm_weights, streams.boosting_weights, streams.lm, streams.boosting, final,
                order, scores, traces,
            )  # fmt: skip

        for_each_share(finish, streams.frames_done + 1, self.config.threads)
        notes: dict[int, tuple[str, ...]] = {}
        unfinished = np.flatnonzero((order[:, 0] < 0) & (streams.sizes > 0))
        if len(
            unfinished
        ):  # an LM may forbid the end of a sentence everywhere: better a result than none
            finish(unfinished, final=False)
            note = "the LM gives no hypothesis a finite end-of-sentence weight; scores are without it"
            notes = dict.fromkeys(unfinished.tolist(), (note,))
        return [
            NBest(
                tuple(
                    self._path(streams, b, n, order, scores, traces, final and b not in notes)
                    for n in range(n_best)
                    if order[b, n] >= 0
                ),
                num_frames=int(streams.frames_done[b]),
                notes=notes.get(b, ()),
            )
            for b in range(n)
        ]

    def _path(
        self,
        streams: Streams,
        b: int,
        n: int,
        order: np.ndarray,
        scores: np.ndarray,
        traces: Traces,
        final: bool,
    ) -> Path:
        count = int(traces.lengths[b, n])
        tokens = traces.tokens[b, n, :count].copy()
        score = float(scores[b, n])
        search = self._search(streams.lm_weights[b], streams.boosting_weights[b])
        lm, boosting = cpu.fusion_parts(
            tokens, search, streams.lm, streams.boosting,
            streams.lm_starts[b], streams.boosting_starts[b], final,
        )  # fmt: skip
        insertion = self.config.beam_beta * count
        alignment = alignment_log_probs = None
        if self.config.alignments:
            frames = int(streams.frames_done[b])
            alignment, alignment_log_probs = np.empty(frames, np.int32), np.empty(frames, np.float32)
            trace_alignment(streams.history, b, frames, order[b, n], alignment, alignment_log_probs)
        return Path(
            tokens=tokens,
            frames=traces.frames[b, n, :count].copy(),
            repeats=traces.repeats[b, n, :count].copy(),
            token_confidence=traces.confidence[b, n, :count].copy(),
            score=score,
            parts=ScoreParts(score - lm - boosting - insertion, lm, boosting, insertion),
            alignment=alignment,
            alignment_log_probs=alignment_log_probs,
        )
