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
    JUMP,
    BackPointers,
    fill_jumps,
    grown,
    new_traces,
    newest_mark,
    shared_frames,
    slot_at,
    trace_alignment,
    without_first,
)
from nemo_gpu_decoding.search.flexctc_beam.config import FlexCTCConfig
from nemo_gpu_decoding.search.flexctc_beam.cpu import advance, new_state, new_workspace
from nemo_gpu_decoding.search.flexctc_beam.finish import NO_SLOT, Found, Heads, Mark, Trunk, rank, trace_back_all
from nemo_gpu_decoding.search.flexctc_beam.prefix import advance_prefix
from nemo_gpu_decoding.search.flexctc_beam.records import MERGE_PREFIX, SearchParams
from nemo_gpu_decoding.search.inputs import as_float32, raise_bad_frame
from nemo_gpu_decoding.search.threads import for_each_share

FEWEST_OPEN = 64  # last frames of the best hypothesis that are traced back each time


class CPUEngine(Engine):
    """See `engine.Engine`. Errors are never deferred here."""

    def __init__(self, config: FlexCTCConfig, params: SearchParams, streams: Streams) -> None:
        self._config, self._params = config, params
        self._fusion = streams.fusion
        self._state = new_state(streams.fusion.arrays, config.beam_size, streams.capacity)
        n, beam_size = len(streams), config.beam_size
        self._trunks = [Trunk() for _ in range(n)]
        self._dropped = np.zeros(n, np.int64)  # first frames, which all share, that back-pointers do not hold
        self._jumps = [np.empty((0, beam_size), np.int16) for _ in range(n)]

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
            self._drop_shared()
            needed = int((self._state.frames_done + lengths).max())
            if 2 * needed > capacity:  # too few for what it takes
                needed = max(needed, capacity + 1)
        return grown(self._state.back_pointers, needed)

    def _drop_shared(self) -> None:
        """Forget back-pointers that all live hypotheses share, up to the last mark there."""
        found, state = self.results(range(len(self._trunks)), 1, final=False), self._state
        dropped = np.zeros(len(self._trunks), np.int64)
        for b, trunk in enumerate(self._trunks):
            last, slot = int(state.frames_done[b]), 0
            marks = [mark for mark in trunk.marks if mark.frame <= found.shared[b]]
            trunk.marks = trunk.marks[self._newest(b, marks, last, slot) :]
            dropped[b] = trunk.marks[0].frame - self._dropped[b]
            if dropped[b]:
                self._jumps[b] = self._jumps[b][:0]
        without_first(state.back_pointers, dropped, state.frames_done)
        self._dropped += dropped
        self._state = state._replace(frames_done=state.frames_done - dropped)

    def _newest(self, b: int, marks: list[Mark], last: int, slot: int) -> int:
        """Number of the last mark that a path goes through."""
        if len(marks) == 1:
            return 0
        newest = marks[-1]  # nearly always
        back_pointers, dropped = self._state.back_pointers, int(self._dropped[b])
        if slot_at(back_pointers, b, last, slot, newest.frame - dropped) == newest.slot:
            return len(marks) - 1
        frames, slots = (np.array([mark[i] for mark in marks]) for i in range(2))
        return newest_mark(back_pointers, b, last, slot, frames - dropped, slots)

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> Found:
        state, numbers = self._state, np.array(rows, np.int64)
        dropped, last, fusions = self._dropped[numbers], state.frames_done[numbers], self._fusion.arrays
        order = np.full((len(numbers), n_best), -1, np.int32)
        scores = np.zeros((len(numbers), n_best), np.float32)
        rank(np.arange(len(numbers)), numbers, state, self._params, fusions, final, order, scores)
        without_final = order[:, 0] < 0
        if without_final.any():  # an LM may forbid the end everywhere: better a result than none
            rank(np.flatnonzero(without_final), numbers, state, self._params, fusions, False, order, scores)
        heads = Heads.none(len(numbers), n_best)
        for r, b in enumerate(rows):
            if len(self._trunks[b].marks) > 1 or dropped[r]:
                self._put_heads(heads, r, b, order[r])
        first = heads.frames - dropped[:, None]
        most = int((last[:, None] - first).max(initial=0))
        traces = new_traces(len(numbers), n_best, most)

        def trace_back_rows(which: np.ndarray) -> None:
            trace_back_all(which, numbers, first, state, self._params, order, traces)

        for_each_share(trace_back_rows, last - first.min(axis=1, initial=most) + 1, self._config.threads)
        labels = log_probs = None
        if self._config.alignments:
            labels = np.empty((len(numbers), n_best, most), np.int32)
            log_probs = np.empty((len(numbers), n_best, most), np.float32)
            for r, n in np.argwhere(order >= 0):
                trace_alignment(
                    state.back_pointers, numbers[r], (int(first[r, n]), int(last[r])), order[r, n], labels[r, n],
                    log_probs[r, n],
                )  # fmt: skip
        if dropped.any():
            traces = traces._replace(frames=traces.frames + dropped[:, None, None].astype(np.int32))
        shared = last.copy() if final else np.array([self._shared(b) for b in rows], np.int64)
        found = Found(
            numbers, last + dropped, order, scores, without_final, traces, shared + dropped, heads, labels, log_probs
        )
        if not final:
            for r, b in enumerate(rows):
                self._extend(found, r, b)
        return found

    def _put_heads(self, heads: Heads, r: int, b: int, slots: np.ndarray) -> None:
        trunk, last = self._trunks[b], int(self._state.frames_done[b])
        for n, slot in enumerate(slots.tolist()):
            heads.put(r, n, trunk, trunk.marks[self._newest(b, trunk.marks, last, slot) if slot >= 0 else 0])

    def _shared(self, b: int) -> int:
        """Frames in the back-pointers that live hypotheses share."""
        state, jumps = self._state, self._jumps[b]
        last = int(state.frames_done[b])
        if last // JUMP > len(jumps):
            longer = np.empty((last // JUMP, jumps.shape[1]), np.int16)
            longer[: len(jumps)] = jumps
            fill_jumps(state.back_pointers, b, longer, len(jumps))
            self._jumps[b] = jumps = longer
        return shared_frames(state.back_pointers, b, last, int(state.sizes[b]), jumps)

    def _extend(self, found: Found, r: int, b: int) -> None:
        """Let the trunk of a stream be the best hypothesis, but for its last frames, of which others are as likely."""
        trunk, slot = self._trunks[b], int(found.order[r, 0])
        begin, end = int(found.heads.frames[r, 0]), int(found.frames[r]) - FEWEST_OPEN
        if slot < 0 or not is_worth(end - begin) or trunk.marks[-1].frame > end:
            return
        trunk.cut(next(mark for mark in trunk.marks if mark.frame == begin))
        for stop in (min(end, int(found.shared[r])), end):
            reached = trunk.extend(found, r, stop, self._params, self._fusion.arrays)
            if trunk.marks[-1].slot == NO_SLOT:
                last, dropped = int(self._state.frames_done[b]), int(self._dropped[b])
                own = slot_at(self._state.back_pointers, b, last, slot, reached - dropped)
                trunk.marks[-1] = trunk.marks[-1]._replace(slot=own)

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        beam, sizes, frames_done = (part.copy() for part in self._state[:3])
        beam["boosting_state"] += self._fusion.moved_states(fusion)[:, None]
        fresh = new_state(fusion.arrays, self._config.beam_size, 0)
        beam[rows], sizes[rows], frames_done[rows] = fresh.beam[rows], 1, 0
        self._dropped[rows] = 0
        for b in rows:
            self._trunks[b], self._jumps[b] = Trunk(), self._jumps[b][:0]
        self._state = self._state._replace(beam=beam, sizes=sizes, frames_done=frames_done)
        self._fusion = fusion
