"""`CPUEngine` and `LetEngine`: streams, buffers and threads around the compiled search."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.lib.recfunctions import require_fields

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.threads import for_each_share
from nemo_gpu_decoding.search.word_graph import keys, records, stream_state
from nemo_gpu_decoding.search.word_graph.committed import Committed, more_committed, without_committed
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.frame import FEWEST_SLOTS, advance
from nemo_gpu_decoding.search.word_graph.large_lm import contexts, let
from nemo_gpu_decoding.search.word_graph.large_lm.let_groups import LET_CANDIDATE, LET_GROUP
from nemo_gpu_decoding.search.word_graph.large_lm.let_nodes import ARENA_FULL
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import CACHED_SCORE, LM_COUNTERS
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import grown_links
from nemo_gpu_decoding.search.word_graph.prune import BINS
from nemo_gpu_decoding.search.word_graph.stream_state import LetStream, ModelsOf, StreamModels, StreamState

CANDIDATES = 4096  # length of the list before it is recombined
MOST_STAMPS = 1 << 30  # a workspace is replaced when its stamps exceed it, before they overflow
MOST_KEPT = 1 << 23  # bytes of the tokens of a workspace that is kept between calls; all of it takes ten times as much
CACHED_SCORES = 1 << 14  # size of the LM query cache, a power of 2

Advance = Callable[..., tuple[int, int]]  # `frame.advance`


class CPUEngine(Engine):
    """The search on the CPU, see `search/engine.py`. `push` raises all errors itself.

    Args:
        models_of: returns the models of utterance b of a batch.
        fusion: LM weights and boosting of the batch.
        config: options of the search.
    """

    advance: Advance = staticmethod(advance)

    def __init__(self, models_of: ModelsOf, fusion: BatchFusion, config: WFSTConfig) -> None:
        self._config, self._models_of = config, models_of
        self._streams: list[Any] = [None] * len(fusion)
        self.restart(range(len(fusion)), fusion)

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        values, streams = as_float32(log_probs), list(self._streams)

        def read(rows: np.ndarray) -> None:
            self._read(rows, streams, values, lengths)

        for_each_share(read, lengths, self._config.threads)
        self._streams = streams

    def _read(self, rows: np.ndarray, streams: list[Any], values: np.ndarray, lengths: np.ndarray) -> None:
        """Replace the streams of some rows by their states after the chunk."""
        config, composes = self._config, streams[0].models.lm_scorer is not None
        sizes = new_workspace, config.max_active, values.shape[2], config.keeps_links, composes
        work = _take_workspace(*sizes)
        for b in rows.tolist():
            streams[b], work = read_chunk(streams[b], values, int(lengths[b]), b, work, self.advance)
        if work.current.nbytes <= MOST_KEPT:
            _kept.last = sizes, work

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[StreamState]:
        return [self._streams[row] for row in rows]

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        for row, models in zip(rows, stream_state.models_of_rows(self._models_of, fusion, rows), strict=True):
            self._streams[row] = self._new_stream(models)

    def _new_stream(self, models: StreamModels) -> Any:
        return models.new_stream(Committed.nothing(models))

    def commit(self, rows: Sequence[int]) -> None:
        for row in rows:
            if more := more_committed(self._streams[row]):
                self._streams[row] = without_committed(self._streams[row], *more)


_kept = threading.local()  # the last workspace of each thread, because a new one takes 160 us


def _take_workspace(make: Callable[..., records.Workspace], *sizes: int) -> records.Workspace:
    """The workspace of the thread's last call if it has these sizes, else a new one. No other call uses it."""
    last_sizes, work = _kept.__dict__.pop("last", (None, None))
    if last_sizes != (make, *sizes) or work.stamps.max() > MOST_STAMPS:
        return make(*sizes)
    work.frame["status"] = keys.DONE
    if work.lm is not None:
        work.lm.cache.view(np.uint8)[:] = 0  # it may hold scores of other LMs
    return work


def read_chunk(
    stream: StreamState,
    log_probs: np.ndarray,
    length: int,
    b: int,
    work: records.Workspace,
    advance: Advance = advance,
) -> tuple[StreamState, records.Workspace]:
    """Decode the first `length` frames of log_probs[b], where log_probs is [B, T, V + 1].

    Returns:
        the new state of the stream, and the workspace, which may be a larger one.

    Raises:
        BadRow: a frame contains NaN or a value above 0, or no path can read it. `stream` is unchanged.
    """
    models, count, counters = stream.models, len(stream.tokens), stream.counters.copy()
    work.current[:count].view(np.uint8)[:] = stream.tokens.view(np.uint8)  # records are copied field by field
    state = records.StreamArrays(counters, stream.back_pointers, stream.links)
    search, lm, frame, status = models.search, models.lm_scorer, 0, keys.DONE
    while frame < length:
        frame, status = advance(log_probs[b], frame, length, state, search, lm, work)
        if status == keys.BACK_POINTERS_FULL:
            tokens, more = work.current[: int(counters["tokens"][0])], int(work.frame["tokens"][0])
            kept = stream_state.grown_back_pointers(state.back_pointers, counters, tokens, more)
            state = state._replace(back_pointers=kept)
        elif status == keys.LINKS_FULL:
            state = state._replace(links=grown_links(state.links, counters, float(models.params.lattice_beam)))
        elif status == keys.GROUPS_FULL:
            work = with_more_groups(work, models.params.max_active)
        elif status in (keys.BAD_FRAME, keys.NO_TOKEN):
            stream_state.raise_stop(log_probs, b, frame, status)
    tokens = work.current[: int(counters["tokens"][0])].view(np.uint8).copy().view(work.current.dtype)
    live = tokens["back_pointer"]
    return StreamState(models, tokens, state.back_pointers, state.links, counters, live, stream.committed), work


def new_workspace(
    max_active: int, columns: int, keeps_links: bool = False, composes: bool = False, entries: int | None = None
) -> records.Workspace:
    """Buffers for one utterance at a time.

    Args:
        max_active: option of the config.
        columns: V + 1, columns of the log-probs.
        keeps_links: groups keep all their tokens, for lattices.
        composes: there is a large LM.
        entries: capacity for groups and LM contexts; None: twice the capacity for tokens.
    """
    capacity = records.token_capacity(max_active)
    entries = entries or 2 * capacity
    return records.Workspace(
        current=np.empty(capacity, records.LM_TOKEN if composes else records.TOKEN),
        next_tokens=np.empty(capacity, records.LM_TOKEN if composes else records.TOKEN),
        token_slots=_slots(capacity),
        candidates=np.empty(CANDIDATES, records.LM_CANDIDATE if composes else records.CANDIDATE),
        groups=np.empty(0 if composes else entries, records.GROUP),
        group_slots=_slots(entries),
        group_tokens=np.empty(2 * entries if keeps_links else 1, records.GROUP_TOKEN),
        acoustic_costs=np.empty(columns, np.float32),
        posteriors=np.empty(columns, np.float32),
        labels=np.empty(columns, np.int32),
        histogram=np.empty(BINS, np.int64),
        renumbered=np.empty(capacity, np.int32),
        frame=np.zeros(1, contexts.LM_FRAME_STATE if composes else records.FRAME_STATE),
        stamps=np.zeros(3, np.int32),
        lm=_lm_workspace(entries) if composes else None,
    )


def _lm_workspace(entries: int) -> contexts.LmWorkspace:
    return contexts.LmWorkspace(
        groups=np.empty(entries, contexts.LM_GROUP),
        contexts=np.empty(entries, contexts.LM_CONTEXT),
        context_slots=_slots(entries),
        order=np.empty(entries, contexts.ORDERED),
        deferred=np.empty(entries, contexts.GROUP_ARC),
        cache=_query_cache(),
    )


def _query_cache() -> np.ndarray:
    return np.zeros(CACHED_SCORES, CACHED_SCORE)  # zeros are empty entries, because no query has olabel 0


def with_more_groups(work: records.Workspace, max_active: int) -> records.Workspace:
    """A workspace with twice the capacity for groups, and the same tokens and LM query cache."""
    keeps_links, composes = len(work.group_tokens) > 1, work.lm is not None
    entries = 2 * len(work.lm.groups if composes else work.groups)
    larger = new_workspace(max_active, len(work.labels), keeps_links, composes, entries=entries)
    return _with_tokens_of(work, larger)


def _with_tokens_of(work: records.Workspace, larger: records.Workspace) -> records.Workspace:
    """The larger workspace with the tokens and the LM query cache of `work`."""
    lm = None if work.lm is None else larger.lm._replace(cache=work.lm.cache)
    return larger._replace(current=work.current, lm=lm)


def _slots(entries: int) -> np.ndarray:
    """An empty hash table for so many entries, at most half full."""
    return np.zeros(max(FEWEST_SLOTS, 1 << (2 * entries - 1).bit_length()), records.SLOT)


# ------------------------------------------------------------------------------ composition "let"


class LetEngine(CPUEngine):
    """The engine of `large_lm/let.py`. Its results are streams of LM tokens, as those of `CPUEngine`."""

    def _read(self, rows: np.ndarray, streams: list[Any], values: np.ndarray, lengths: np.ndarray) -> None:
        work = new_let_workspace(self._config.max_active, values.shape[2])
        for b in rows.tolist():
            streams[b], work = read_let_chunk(streams[b], values, int(lengths[b]), b, work)

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[StreamState]:
        work, listed = new_let_workspace(self._config.max_active, 1), []
        for row in rows:
            self._streams[row], state = listed_stream(self._streams[row], work)
            listed.append(state)
        return listed

    def commit(self, rows: Sequence[int]) -> None:
        for row, state in zip(rows, self.results(rows, 1, final=False), strict=True):
            if more := more_committed(state):
                committed, root = more
                stream = self._streams[row]
                stream.arrays.back_pointers["previous"][root] = keys.NONE  # `collect` drops what is before it
                self._streams[row] = replace(stream, committed=committed)

    def _new_stream(self, models: StreamModels) -> LetStream:
        return replace(stream_state.new_let_stream(models), committed=Committed.nothing(models))


def read_let_chunk(
    stream: LetStream, log_probs: np.ndarray, length: int, b: int, work: records.Workspace
) -> tuple[LetStream, records.Workspace]:
    """As `read_chunk`. It works on a copy, because the search changes nodes in place."""
    models, count = stream.models, len(stream.tokens)
    if length == 0:
        return stream, work
    work.current[:count] = stream.tokens
    state, search, frame, stopped = stream_state.collected(stream.arrays, work.current[:count]), models.search, 0, -1
    while frame < length:
        frame, status = let.advance(log_probs[b], frame, length, state, search, models.lm_scorer, work)
        tokens = work.current[: int(state.counters["tokens"][0])]
        if status == ARENA_FULL:
            state, stopped = stream_state.collected(state, tokens, more=frame == stopped), frame
        elif status == keys.GROUPS_FULL:
            work = with_more_let_groups(work, models.params.max_active)
        elif status != keys.DONE:
            stream_state.raise_stop(log_probs, b, frame, status)
    tokens = work.current[: int(state.counters["tokens"][0])]
    return LetStream(models, tokens.copy(), state, stream.committed), work


def listed_stream(stream: LetStream, work: records.Workspace) -> tuple[LetStream, StreamState]:
    """A stream in the form of `CPUEngine`: the contexts of the best token and of all tokens in which it may end.

    Returns:
        the stream, reduced to the entries that its tokens need, and the list. Back-pointers have the same numbers in
        both.
    """
    models, tokens, status, count = stream.models, stream.tokens.copy(), ARENA_FULL, 0
    arrays, search, more = stream.arrays, models.search, False
    while status != keys.DONE:
        if status == keys.GROUPS_FULL:
            work = with_more_let_groups(work, models.params.max_active)
        else:
            arrays, more = stream_state.collected(arrays, tokens, more=more), True
        # nodes change in place; new contexts follow the existing ones
        state = arrays._replace(counters=arrays.counters.copy(), nodes=arrays.nodes.copy())
        status, count = stream_state.expand_ends(tokens, state, search, models.lm_scorer, work)
    listed, own = np.zeros(count, records.LM_TOKEN), arrays.counters
    stream_state.list_contexts(tokens, state, search, listed)
    live = arrays.contexts["back_pointer"][: int(own["contexts"][0])].copy()
    links, counters = np.empty(0, records.LINK), require_fields(own, LM_COUNTERS)
    committed = stream.committed
    listed_state = StreamState(models, listed, state.back_pointers, links, counters, live, committed)
    return replace(stream, tokens=tokens, arrays=arrays), listed_state


def new_let_workspace(max_active: int, columns: int, *, entries: int | None = None) -> records.Workspace:
    """Buffers for one utterance at a time, as `new_workspace`."""
    entries = entries or 2 * records.token_capacity(max_active)
    return new_workspace(max_active, columns, keeps_links=True, entries=entries)._replace(
        candidates=np.empty(max(CANDIDATES, 2 * entries), LET_CANDIDATE),
        groups=np.empty(entries, LET_GROUP),
        frame=np.zeros(1, contexts.LM_FRAME_STATE),
        lm=let.LetWorkspace(
            deferred=np.empty(entries, contexts.GROUP_ARC),
            cache=_query_cache(),
            stack=np.empty(4 * entries, np.int32),
            context_slots=_slots(entries),
        ),
    )


def with_more_let_groups(work: records.Workspace, max_active: int) -> records.Workspace:
    """As `with_more_groups`, and with twice the capacity for candidates."""
    return _with_tokens_of(work, new_let_workspace(max_active, len(work.labels), entries=2 * len(work.groups)))
