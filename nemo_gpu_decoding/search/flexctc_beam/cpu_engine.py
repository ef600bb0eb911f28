"""`CPUEngine`: buffers and threads around the compiled search of `cpu.py` and `prefix.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.search.committed import is_worth
from nemo_gpu_decoding.search.decoder import Streams
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.flexctc_beam.backpointers import (
    BackPointers,
    grown,
    new_traces,
    shared_frames,
    trace_alignment,
    without_first,
)
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.cpu import advance, new_state, new_workspace
from nemo_gpu_decoding.search.flexctc_beam.finish import Committed, Found, finish
from nemo_gpu_decoding.search.flexctc_beam.prefix import advance_prefix
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE_PREFIX, SearchParams
from nemo_gpu_decoding.search.inputs import as_float32, raise_bad_frame
from nemo_gpu_decoding.search.threads import for_each_share


class CPUEngine(Engine):
    """See `engine.Engine`. Errors are never deferred here."""

    def __init__(self, config: FlexCTCConfig, params: SearchParams, streams: Streams) -> None:
        self._config, self._params = config, params
        self._fusion = streams.fusion
        self._state = new_state(streams.fusion.arrays, config.beam_size, streams.capacity)
        self._committed = Committed(len(streams))
        self._dropped = np.zeros(len(streams), np.int64)  # first frames, committed, that back-pointers do not hold

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        values = as_float32(log_probs)
        back_pointers = self._back_pointers_for(lengths)
        before = self._state
        beam, sizes, frames_done = (part.copy() for part in before[:3])
        state = before._replace(
            beam=beam, sizes=sizes, frames_done=frames_done,
            back_pointers=back_pointers,
        )  # fmt: skip
        fusions = self._fusion.arrays
        step = advance_prefix if self._params.merge == MERGE_PREFIX else advance

        def advance_rows(rows: np.ndarray) -> None:
            workspace = new_workspace(self._config.beam_size)
            step(rows, values, lengths, state, self._params, fusions, workspace)

        for_each_share(advance_rows, lengths, self._config.threads)
        for b in np.flatnonzero(sizes <= 0):  # the streams stay as they were
            raise_bad_frame(values, int(b), int(frames_done[b] - before.frames_done[b]))
        self._state = state

    def _back_pointers_for(self, lengths: np.ndarray) -> BackPointers:
        """With room for so many frames more; those of committed frames are dropped before more memory is taken."""
        state = self._state
        needed, capacity = int((state.frames_done + lengths).max(initial=0)), state.back_pointers.labels.shape[1]
        if capacity < needed and is_worth(capacity):
            self.results(range(len(lengths)), 1, final=False)  # commits
            dropped = self._committed.frames - self._dropped
            without_first(state.back_pointers, dropped, state.frames_done)
            self._dropped += dropped
            self._state = state = state._replace(frames_done=state.frames_done - dropped)
            needed = int((state.frames_done + lengths).max())
            if 2 * needed > capacity:  # too few for what it takes
                needed = max(needed, capacity + 1)
        return grown(state.back_pointers, needed)

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Found:
        state, numbers = self._state, np.array(rows, np.int64)
        committed, dropped = self._committed.heads(numbers), self._dropped[numbers]
        first, last = committed.frames - dropped, state.frames_done[numbers]
        most = int((last - first).max(initial=0))
        order = np.full((len(numbers), n_best), -1, np.int32)
        scores = np.zeros((len(numbers), n_best), np.float32)
        traces = new_traces(len(numbers), n_best, most)

        def finish_rows(which: np.ndarray, final: bool = final) -> None:
            finish(which, numbers, first, state, self._params, self._fusion.arrays, final, order, scores, traces)

        for_each_share(finish_rows, last - first + 1, self._config.threads)
        without_final = order[:, 0] < 0
        if without_final.any():  # an LM may forbid the end everywhere: better a result than none
            finish_rows(np.flatnonzero(without_final), final=False)
        shared = last.copy()
        if not final:
            for r, b in enumerate(rows):
                shared[r] = shared_frames(state.back_pointers, b, int(last[r]), int(state.sizes[b]))
        labels = log_probs = None
        if self._config.alignments:
            labels = np.empty((len(numbers), n_best, most), np.int32)
            log_probs = np.empty((len(numbers), n_best, most), np.float32)
            for r, n in np.argwhere(order >= 0):
                trace_alignment(
                    state.back_pointers, numbers[r], (int(first[r]), int(last[r])), order[r, n], labels[r, n],
                    log_probs[r, n],
                )  # fmt: skip
        if dropped.any():
            traces = traces._replace(frames=traces.frames + dropped[:, None, None].astype(np.int32))
        found = Found(
            numbers, last + dropped, order, scores, without_final, traces, shared + dropped, committed, labels,
            log_probs,
        )  # fmt: skip
        if not final:
            self._committed.extend(found, self._params, self._fusion.arrays)
        return found

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        beam, sizes, frames_done = (part.copy() for part in self._state[:3])
        beam["boosting_state"] += self._fusion.moved_states(fusion)[:, None]
        fresh = new_state(fusion.arrays, self._config.beam_size, 0)
        beam[rows], sizes[rows], frames_done[rows] = fresh.beam[rows], 1, 0
        self._committed.forget(rows)
        self._dropped[rows] = 0
        self._state = self._state._replace(beam=beam, sizes=sizes, frames_done=frames_done)
        self._fusion = fusion
