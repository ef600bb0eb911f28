"""Run the compiled search of `frame.py` with buffers and threads (`CPUEngine`)."""

from collections.abc import Sequence

import numpy as np
import torch

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.search import numerics
from nemo_gpu_decoding.search.engine import Streams, for_each_share
from nemo_gpu_decoding.search.flexctc_beam import backpointers
from nemo_gpu_decoding.search.flexctc_beam.backpointers import BackPointers
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.finish import FlexCTCEngine, FlexCTCNBest, finish
from nemo_gpu_decoding.search.flexctc_beam.frame import CANDIDATE, FlexCTCBeams, advance, new_state
from nemo_gpu_decoding.search.flexctc_beam.records import HYPOTHESIS, SearchParams
from nemo_gpu_decoding.search.inputs import as_float32, raise_bad_frame


class CPUEngine(FlexCTCEngine):
    """An engine that searches on the CPU, see `engine.Engine`. Errors are never deferred."""

    def __init__(self, config: FlexCTCConfig, params: SearchParams, streams: Streams) -> None:
        super().__init__(config, params, streams.fusion)
        self._state = new_state(streams.fusion.arrays, config.beam_size, streams.capacity)

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        values = as_float32(log_probs)
        needed = max((self._state.frames_done + lengths).tolist(), default=0)
        needed = self._frames_needed(needed, self._state.back_pointers.labels.shape[1], lengths)
        beam, sizes, frames_done, offsets, back_pointers = self._state
        if needed > back_pointers.labels.shape[1]:
            back_pointers = BackPointers(*(numerics.grown(part, needed) for part in back_pointers))
        if not deferred:  # an error leaves the streams unchanged
            beam, sizes, offsets = beam.copy(), sizes.copy(), offsets.copy()
        state = FlexCTCBeams(beam, sizes, frames_done.copy(), offsets, back_pointers)
        fusions, beam_size = self._fusion.arrays, self._config.beam_size

        def advance_rows(rows: np.ndarray) -> None:
            candidates = numerics.Candidates(np.empty(beam_size, CANDIDATE), np.empty(beam_size, np.int32))
            next_beam = np.empty(beam_size, HYPOTHESIS)
            advance(rows, values, lengths, state, self._params, fusions, candidates, next_beam)

        for_each_share(advance_rows, lengths, self._config.threads)
        for b in (sizes <= 0).nonzero()[0]:  # an error; the state of the streams is not replaced
            raise_bad_frame(values, int(b), int(state.frames_done[b] - frames_done[b]))
        self._state = state

    def _drop(self, dropped: np.ndarray) -> np.ndarray:
        state = self._state
        backpointers.without_first(state.back_pointers, dropped, state.frames_done)
        self._state = state._replace(frames_done=state.frames_done - dropped)
        return self._state.frames_done

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> FlexCTCNBest:
        state, numbers = self._state, np.array(rows, np.int64)
        dropped, last, fusions = self._dropped[numbers], state.frames_done[numbers], self._fusion.arrays
        committed = [self._committed[b] for b in rows]
        first = np.array([tokens.frames for tokens in committed], np.int64) - dropped
        frames, shape = last - first, (len(numbers), n_best)
        order, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
        without_final, shared = np.zeros(len(numbers), np.bool_), last.copy()
        traces = backpointers.new_traces(*shape, max(frames.tolist(), default=0), alignments=self._config.alignments)

        def finish_rows(which: np.ndarray) -> None:
            outputs = order, scores, without_final, traces, shared
            finish(which, numbers, first, state, self._params, fusions, final, *outputs)

        for_each_share(finish_rows, frames + 1, self._config.threads)
        if any(dropped.tolist()):
            traces = traces._replace(frames=traces.frames + dropped[:, None, None].astype(np.int32))
        ends = last + dropped
        return FlexCTCNBest(numbers, ends, order, scores, without_final, traces, shared + dropped, committed)

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        self._state.beam["boosting_state"] += self._fusion.moved_states(fusion)[:, None]
        fresh = new_state(fusion.arrays, self._config.beam_size, 0)
        for part, new in zip(self._state[:-1], fresh[:-1], strict=True):  # all but the back-pointers
            part[rows] = new[rows]
        super().restart(rows, fusion)
