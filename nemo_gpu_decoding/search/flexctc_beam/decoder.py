"""`FlexCTCBeam`: the public face of flexctc_beam. Checks inputs, keeps buffers; no algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_gpu_decoding.fusion.fusion import Fusion, Request
from nemo_gpu_decoding.search.backend import choose_backend
from nemo_gpu_decoding.search.flexctc_beam import cuda
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.cpu_engine import CPUEngine
from nemo_gpu_decoding.search.flexctc_beam.engine import Engine, Found, Setup
from nemo_gpu_decoding.search.flexctc_beam.parts import added_scores
from nemo_gpu_decoding.search.fusing import Fuser
from nemo_gpu_decoding.search.inputs import checked_lengths, checked_log_probs
from nemo_gpu_decoding.search.result import NBest, Path, ScoreParts

NO_END = "the LM gives no hypothesis a finite end-of-sentence weight; scores are without it"


@dataclass
class Streams:
    """n utterances being decoded: everything a search remembers. Belongs to one thread at a time."""

    setup: Setup
    capacity: int  # frames to make room for at once
    engine: Engine | None = None  # made by the first push, on the backend that suits its log-probs
    closed: bool = False

    def __len__(self) -> int:
        return len(self.setup)


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
        self._fuser = Fuser(vocab_size, self.fusion)

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
        log_probs = self._checked_log_probs(log_probs, batch=None)
        streams = self._open(len(log_probs), requests, capacity=log_probs.shape[1])
        self._push(streams, log_probs, lengths, deferred=True)
        return self.close(streams)

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
            n: number of utterances.
            requests: [n] what single utterances want instead of the decoder's fusion.
            capacity: frames of an utterance to make room for at once; more is made as they come, except
                inside a CUDA graph, see `cuda.py`.
            device: where the log-probs will be, to choose the backend now and not at the first push.
        """
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}, expected a number of frames, >= 0")
        streams = self._open(n, requests, capacity)
        if device is not None:
            self._engine(streams, torch.device(device))
        return streams

    def push(
        self, streams: Streams, log_probs: torch.Tensor, lengths: torch.Tensor | Sequence[int]
    ) -> None:
        """Read the next chunk of every stream: log_probs [n, T, V + 1], lengths [n] (0 = nothing new).

        Raises:
            ValueError: as `decode`; the streams are then as they were before the call. While a CUDA
                graph is captured, errors wait for `partial` or `close`, see `cuda.py`.
        """
        self._check_open(streams)
        log_probs = self._checked_log_probs(log_probs, batch=len(streams))
        self._push(streams, log_probs, lengths, deferred=False)

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
        return self._results(streams, self.config.n_best, final=True)

    # ------------------------------------------------------------------------------- inner rooms

    def _checked_log_probs(self, log_probs: torch.Tensor, batch: int | None) -> torch.Tensor:
        rows = log_probs.shape[0] if isinstance(log_probs, torch.Tensor) and log_probs.ndim else 0
        checked_log_probs(log_probs, [0] * rows, batch=batch, columns=self.vocab_size + 1)
        return log_probs

    def _push(
        self,
        streams: Streams,
        log_probs: torch.Tensor,
        lengths: torch.Tensor | Sequence[int],
        deferred: bool,
    ) -> None:
        engine = self._engine(streams, log_probs.device)
        n, frames = log_probs.shape[:2]
        if isinstance(lengths, torch.Tensor) and engine.takes(lengths) and len(lengths) == n:
            engine.push(log_probs, lengths, deferred=deferred)
        else:
            engine.push(log_probs, checked_lengths(lengths, n, frames), deferred=deferred)

    def _engine(self, streams: Streams, device: torch.device) -> Engine:
        """The engine of the streams; chosen for `device` if there is none yet."""
        if streams.engine is None:
            backend = choose_backend(
                self.config.backend, device, lambda place: cuda.why_not(streams.setup, place)
            )
            if backend == "cuda":
                streams.engine = cuda.CUDAEngine(streams.setup, device, streams.capacity)
            else:
                streams.engine = CPUEngine(streams.setup, streams.capacity)
        return streams.engine

    def _open(self, n: int, requests: Sequence[Request | None] | None, capacity: int) -> Streams:
        if n < 0:
            raise ValueError(f"n is {n}, expected the number of streams, >= 0")
        setup = Setup(self.config, self.vocab_size, self.blank_id, self._fuser.of(n, requests))
        return Streams(setup, capacity)

    @staticmethod
    def _check_open(streams: Streams) -> None:
        if streams.closed:
            raise ValueError("streams is closed, expected streams from open() that were not closed yet")

    def _results(self, streams: Streams, n_best: int, final: bool) -> list[NBest]:
        engine = streams.engine or CPUEngine(streams.setup)  # nothing pushed: any engine will do
        found = engine.results(n_best, final=final)
        lm, boosting = added_scores(found, streams.setup, final)
        return [
            NBest(
                tuple(
                    self._path(found, b, n, float(lm[b, n]), float(boosting[b, n]))
                    for n in range(n_best)
                    if found.order[b, n] >= 0
                ),
                num_frames=int(found.frames[b]),
                notes=(NO_END,) if final and found.without_final[b] else (),
            )
            for b in range(len(streams))
        ]

    def _path(self, found: Found, b: int, n: int, lm: float, boosting: float) -> Path:
        count, frames = int(found.traces.lengths[b, n]), int(found.frames[b])
        score, insertion = float(found.scores[b, n]), self.config.beam_beta * count
        alignment = alignment_log_probs = None
        if found.alignment is not None and found.alignment_log_probs is not None:
            alignment = found.alignment[b, n, :frames].copy()
            alignment_log_probs = found.alignment_log_probs[b, n, :frames].copy()
        return Path(
            tokens=found.traces.tokens[b, n, :count].copy(),
            frames=found.traces.frames[b, n, :count].copy(),
            repeats=found.traces.repeats[b, n, :count].copy(),
            token_confidence=found.traces.confidence[b, n, :count].copy(),
            score=score,
            parts=ScoreParts(score - lm - boosting - insertion, lm, boosting, insertion),
            alignment=alignment,
            alignment_log_probs=alignment_log_probs,
        )
