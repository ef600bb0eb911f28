"""The CPU's engine: buffers and threads around the compiled search of `cpu.py` and `prefix.py`."""

from __future__ import annotations

import numpy as np
import torch

from nemo_gpu_decoding.jit import announce_compilation
from nemo_gpu_decoding.search.flexctc_beam import cpu
from nemo_gpu_decoding.search.flexctc_beam.engine import Found, Setup
from nemo_gpu_decoding.search.flexctc_beam.prefix import advance_prefix
from nemo_gpu_decoding.search.history import grown_history, new_history, new_traces, trace_alignment
from nemo_gpu_decoding.search.inputs import as_float32, raise_bad_frame
from nemo_gpu_decoding.search.threads import for_each_share


class CPUEngine:
    """See `engine.Engine`. `capacity`: frames to make room for at once; more is made as they come."""

    def __init__(self, setup: Setup, capacity: int = 0) -> None:
        n, beam_size = len(setup), setup.config.beam_size
        self._setup = setup
        self._beam = cpu.new_beam(n, beam_size, setup.fusion.lm_starts, setup.fusion.boosting_starts)
        self._sizes = np.ones(n, np.int32)  # live hypotheses
        self._frames_done = np.zeros(n, np.int64)
        self._history = new_history(n, capacity, beam_size)

    def takes(self, lengths: object) -> bool:
        return False

    def push(
        self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False
    ) -> None:
        """Errors are never deferred here."""
        assert isinstance(lengths, np.ndarray)
        announce_compilation()
        setup, fusion, values = self._setup, self._setup.fusion, as_float32(log_probs)
        total = int((self._frames_done + lengths).max(initial=0))
        self._history = grown_history(self._history, total)
        beam, sizes, frames_done = self._beam.copy(), self._sizes.copy(), self._frames_done.copy()
        step = advance_prefix if setup.merge == cpu.MERGE_PREFIX else cpu.advance

        def advance(rows: np.ndarray) -> None:
            step(
                rows, values, lengths, frames_done, beam, sizes, self._history, setup.search,
                fusion.lm_weights, fusion.boosting_weights, fusion.lm.arrays, fusion.boosting,
            )  # fmt: skip

        for_each_share(advance, lengths, setup.config.threads)
        for b in np.flatnonzero(sizes <= 0):  # the streams stay as they were
            raise_bad_frame(values, int(b), int(frames_done[b] - self._frames_done[b]))
        self._beam, self._sizes, self._frames_done = beam, sizes, frames_done

    def results(self, n_best: int, *, final: bool) -> Found:
        setup, fusion, n = self._setup, self._setup.fusion, len(self._setup)
        most = int(self._frames_done.max(initial=0))
        order, scores = np.full((n, n_best), -1, np.int32), np.zeros((n, n_best), np.float32)
        traces = new_traces(n, n_best, most)

        def finish(rows: np.ndarray, final: bool = final) -> None:
            cpu.finish(
                rows, self._frames_done, self._beam, self._sizes, self._history, setup.search,
                fusion.lm_weights, fusion.boosting_weights, fusion.lm.arrays, fusion.boosting,
                final, order, scores, traces,
            )  # fmt: skip

        for_each_share(finish, self._frames_done + 1, setup.config.threads)
        without_final = order[:, 0] < 0
        if without_final.any():  # an LM may forbid the end everywhere: better a result than none
            finish(np.flatnonzero(without_final), final=False)
        labels = log_probs = None
        if setup.config.alignments:
            labels = np.empty((n, n_best, most), np.int32)
            log_probs = np.empty((n, n_best, most), np.float32)
            for b, rank in np.argwhere(order >= 0):
                trace_alignment(
                    self._history, b, int(self._frames_done[b]), order[b, rank],
                    labels[b, rank], log_probs[b, rank],
                )  # fmt: skip
        return Found(self._frames_done.copy(), order, scores, without_final, traces, labels, log_probs)
