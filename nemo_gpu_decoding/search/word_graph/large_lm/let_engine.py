"""CPU engine of composition "let": streams, buffers and threads for the compiled search of `let.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nemo_gpu_decoding.search.word_graph import cpu_engine, keys, records
from nemo_gpu_decoding.search.word_graph.best_path import all_ends
from nemo_gpu_decoding.search.word_graph.committed import more_committed
from nemo_gpu_decoding.search.word_graph.large_lm import let
from nemo_gpu_decoding.search.word_graph.large_lm.contexts import GROUP_ARC, LM_FRAME_STATE
from nemo_gpu_decoding.search.word_graph.large_lm.let_groups import LET_CANDIDATE, LET_GROUP
from nemo_gpu_decoding.search.word_graph.large_lm.let_lattice import links_to_ends
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import ARENA_FULL, NodeArrays
from nemo_gpu_decoding.search.word_graph.large_lm.let_stream import (
    LetStream,
    collected,
    forget_contexts,
    list_ends,
    live_pasts,
    new_let_stream,
    without,
)
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmScorer
from nemo_gpu_decoding.search.word_graph.stream_state import StreamModels, StreamState, raise_stop

NO_LINKS = np.empty(0, records.LINK)


def read_let_chunk(
    stream: LetStream, log_probs: np.ndarray, length: int, b: int, work: records.Workspace
) -> tuple[LetStream, records.Workspace]:
    """As `read_chunk`. After an error, the caller calls `forget_contexts` on the arrays of `stream`."""
    models, count, stopped = stream.models, len(stream.tokens), -1
    if length == 0:
        return stream, work
    work.current[:count].view(np.uint8)[:] = stream.tokens.view(np.uint8)  # records are copied field by field
    stream = replace(stream, arrays=stream.arrays._replace(counters=stream.arrays.counters.copy()))
    frame, state = 0, stream.arrays
    while frame < length:
        frame, status = let.advance(log_probs[b], frame, length, state, models.search, models.lm_scorer, work)
        tokens = work.current[: int(state.counters["tokens"][0])]
        if status == ARENA_FULL:
            stream = collected(replace(stream, tokens=tokens), work, more=frame == stopped)
            state, stopped = stream.arrays, frame
        elif status == keys.GROUPS_FULL:
            work = with_more_let_groups(work, models.params.max_active)
        elif status != keys.DONE:
            raise_stop(log_probs, b, frame, status)
    tokens = work.current[: int(state.counters["tokens"][0])].view(np.uint8).copy().view(records.TOKEN)
    return replace(stream, tokens=tokens), work


def listed_stream(
    stream: LetStream, work: records.Workspace, *, final: bool, n_best: int = 1
) -> tuple[LetStream, StreamState, records.Workspace]:
    """Convert a stream to the form of `CPUEngine`: the LM contexts of the best token and of all that may end.

    With `n_best` > 1 or `final`, the result includes the links of a lattice if the search keeps links.

    Returns:
        the stream, whose nodes may have new numbers; its listed form, valid until the next chunk; the workspace.
    """
    models, has_links = stream.models, stream.models.params.keeps_links and (final or n_best > 1)
    pasts, lists_all, ends_only, more = None, has_links and not final, final, False
    while True:
        if not final:
            pasts = live_pasts(stream.tokens, stream.arrays)
        state = stream.arrays._replace(counters=stream.arrays.counters.copy())
        status, listed = list_ends(stream.tokens, state, lists_all, _scorers(models), work)
        if status == keys.DONE and not (has_links and len(all_ends(listed, ends_only, *_scorers(models))) == 0):
            break
        forget_contexts(stream.arrays)
        if status == keys.GROUPS_FULL:
            work = with_more_let_groups(work, models.params.max_active)
        elif status == ARENA_FULL:
            stream, more = collected(replace(stream, tokens=stream.tokens.copy()), work, more=more), True
        else:
            lists_all, ends_only = True, False
    links = NO_LINKS
    if has_links:
        links, listed = _lattice(stream, state, listed, ends_only, work)
    forget_contexts(stream.arrays)
    counters = stream.arrays.counters.view(np.uint8)[-LM_COUNTERS.itemsize :].copy().view(LM_COUNTERS)
    counters["links"] = len(links)
    back_pointers = stream.arrays.back_pointers
    return stream, StreamState(models, listed, back_pointers, links, counters, pasts, stream.committed), work


def _scorers(models: StreamModels) -> tuple[records.Search, LmScorer]:
    assert models.lm_scorer is not None
    return models.search, models.lm_scorer


def _lattice(
    stream: LetStream, state: NodeArrays, listed: np.ndarray, ends_only: bool, work: records.Workspace
) -> tuple[np.ndarray, np.ndarray]:
    """`links_to_ends` of a stream with expanded nodes; `ends_only`: only for paths to a final state."""
    assert stream.lattice is not None
    scorers = _scorers(stream.models)
    ends, costs = all_ends(listed, ends_only, *scorers), np.full(len(listed), np.inf)
    np.minimum.at(costs, ends["node"], ends["cost"])
    costs += listed["cost"]
    return links_to_ends(state, listed, costs - costs.min(), stream.lattice, scorers, work)


def new_let_workspace(
    max_active: int, columns: int, *, keeps_links: bool = False, composes: bool = True, entries: int | None = None
) -> records.Workspace:
    """Buffers for one utterance at a time, as `new_workspace`; `keeps_links` and `composes` have no effect."""
    work = cpu_engine.new_workspace(max_active, columns, keeps_links=True, entries=entries)
    entries = len(work.groups)
    return work._replace(
        candidates=np.empty(max(cpu_engine.CANDIDATES, 2 * entries), LET_CANDIDATE),
        groups=np.empty(entries, LET_GROUP),
        frame=np.zeros(1, LM_FRAME_STATE),
        lm=let.LetWorkspace(
            deferred=np.empty(entries, GROUP_ARC),
            cache=cpu_engine.query_cache(),
            stack=np.empty(4 * entries, np.int32),
            context_slots=cpu_engine.slots_for(entries),
        ),
    )


def with_more_let_groups(work: records.Workspace, max_active: int) -> records.Workspace:
    """A workspace with twice the capacity for a frame, the same tokens and the same LM query cache."""
    larger = new_let_workspace(max_active, len(work.labels), entries=2 * len(work.groups))
    return larger._replace(current=work.current, lm=larger.lm._replace(cache=work.lm.cache))


class LetEngine(cpu_engine.CPUEngine):
    """The engine of `let.py`. As with `CPUEngine`, its results are streams of LM tokens."""

    new_stream = staticmethod(new_let_stream)
    read = staticmethod(read_let_chunk)

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        try:
            super().push(log_probs, lengths, deferred=deferred)
        except BaseException:
            for stream in self._streams:
                forget_contexts(stream.arrays)
            raise

    @property
    def _kind(self) -> cpu_engine.WorkspaceKind:
        config = self._config
        return cpu_engine.WorkspaceKind(new_let_workspace, config.max_active, self._columns, config.keeps_links, True)

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[StreamState]:
        kind, listed, last = self._kind, [], None
        work = cpu_engine.taken_workspace(kind)
        for row in rows:
            stream = self._streams[row]
            last = cpu_engine.scores_kept_for(stream.models, last, work)
            self._streams[row], state, work = listed_stream(stream, work, final=final, n_best=n_best)
            listed.append(state)
        cpu_engine.keep_workspace(kind, work)
        return listed

    def commit(self, rows: Sequence[int]) -> None:
        for row, state in zip(rows, self.results(rows, 1, final=False), strict=True):
            if more := more_committed(state):
                self._streams[row] = without(self._streams[row], *more)
