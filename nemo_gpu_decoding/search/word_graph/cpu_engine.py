"""Run the compiled search of `frame.py` with streams, buffers and threads (`CPUEngine`)."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.search.engine import Engine, for_each_share
from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.word_graph import keys, records, stream_state
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.frame import FEWEST_SLOTS, advance
from nemo_gpu_decoding.search.word_graph.large_lm import contexts as lm_contexts
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import CACHED_SCORE
from nemo_gpu_decoding.search.word_graph.lattice.links import grown_links
from nemo_gpu_decoding.search.word_graph.prune import BINS

CANDIDATES = 4096  # length of the list before it is recombined
MOST_STAMPS = 1 << 30  # a workspace is replaced when its stamps exceed it, before they overflow
MOST_KEPT = 1 << 24  # bytes of the tokens of a workspace that is kept between calls; all of it takes ten times as much
CACHED_SCORES = 1 << 14  # size of the LM query cache, a power of 2


_kept = threading.local()  # the last workspace of each thread, because a new one takes 160 us


def taken_workspace(kind: tuple[Any, ...]) -> records.Workspace:
    """Take the workspace of this thread's last call if it is of this kind, else create one. No other call uses it.

    Args:
        kind: a function that creates a workspace, and its arguments.
    """
    last: tuple[tuple[Any, ...], records.Workspace] | None = _kept.__dict__.pop("last", None)
    if last is None or last[0] != kind or max(last[1].stamps.tolist()) > MOST_STAMPS:
        return kind[0](*kind[1:])
    last[1].frame["status"] = keys.DONE
    if last[1].lm is not None:
        last[1].lm.cache.view(np.uint8)[:] = 0
    return last[1]


def read_chunk(
    stream: stream_state.WordGraphStream,
    log_probs: np.ndarray,
    length: int,
    b: int,
    work: records.Workspace,
    advance: Callable[..., tuple[int, int]] = advance,
) -> tuple[stream_state.WordGraphStream, records.Workspace]:
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
            state = state._replace(
                back_pointers=stream_state.grown_back_pointers(state.back_pointers, counters, tokens, more)
            )
        elif status == keys.LINKS_FULL:
            state = state._replace(links=grown_links(state.links, counters, float(models.params.lattice_beam)))
        elif status == keys.GROUPS_FULL:
            work = with_more_groups(work, new_workspace, models.params.max_active)
        elif status in (keys.BAD_FRAME, keys.NO_TOKEN):
            stream_state.raise_stop(log_probs, b, frame, status)
    tokens = work.current[: int(counters["tokens"][0])].view(np.uint8).copy().view(work.current.dtype)
    live = tokens["back_pointer"]
    return stream_state.WordGraphStream(
        models, tokens, state.back_pointers, state.links, counters, live, stream.committed
    ), work


def new_workspace(
    max_active: int, columns: int, keeps_links: bool = False, composes: bool = False, entries: int | None = None
) -> records.Workspace:
    """Return buffers for one utterance at a time.

    Args:
        columns: V + 1, columns of the log-probs.
        keeps_links: whether groups keep all tokens, for lattices.
        composes: whether there is a large LM.
        entries: capacity for groups and LM contexts; None means twice the capacity for tokens.
    """
    capacity = records.token_capacity(max_active)
    entries = entries or 2 * capacity
    lm: lm_contexts.LmWorkspace | None = None
    if composes:
        groups, contexts, order, deferred = map(
            partial(np.empty, entries),
            (lm_contexts.LM_GROUP, lm_contexts.LM_CONTEXT, lm_contexts.ORDERED, lm_contexts.GROUP_ARC),
        )
        lm = lm_contexts.LmWorkspace(groups, contexts, order, deferred, slots_for(entries), query_cache())
    return records.Workspace(
        current=np.empty(capacity, records.LM_TOKEN if composes else records.TOKEN),
        next_tokens=np.empty(capacity, records.LM_TOKEN if composes else records.TOKEN),
        token_slots=slots_for(capacity),
        candidates=np.empty(CANDIDATES, records.LM_CANDIDATE if composes else records.CANDIDATE),
        groups=np.empty(0 if composes else entries, records.GROUP),
        group_slots=slots_for(entries),
        group_tokens=np.empty(2 * entries if keeps_links else 1, records.GROUP_TOKEN),
        posteriors=np.empty(columns, np.float32),
        labels=np.empty(columns, np.int32),
        histogram=np.empty(BINS, np.int64),
        renumbered=np.empty(capacity, np.int32),
        frame=np.zeros(1, lm_contexts.LM_FRAME_STATE if composes else records.FRAME_STATE),
        stamps=np.zeros(3, np.int32),
        lm=lm,
    )


def query_cache() -> np.ndarray:
    return np.zeros(CACHED_SCORES, CACHED_SCORE)  # void: no query has olabel 0


def with_more_groups(
    work: records.Workspace, make: Callable[..., records.Workspace], max_active: int
) -> records.Workspace:
    """Return a workspace with twice the capacity for groups, and the same tokens and LM query cache."""
    keeps_links, composes = len(work.group_tokens) > 1, work.lm is not None
    entries = 2 * (len(work.groups) or len(work.lm.groups))  # LM contexts have groups of their own
    larger = make(max_active, len(work.labels), keeps_links, composes, entries=entries)
    lm = None if larger.lm is None else larger.lm._replace(cache=work.lm.cache)
    return larger._replace(current=work.current, lm=lm)


def slots_for(entries: int) -> np.ndarray:
    return np.zeros(max(FEWEST_SLOTS, 1 << (2 * entries - 1).bit_length()), records.SLOT)


class CPUEngine(Engine):
    """An engine that searches on the CPU, see `search/engine.py`. `push` raises all errors itself.

    Args:
        models_of: returns the models of utterance b of a batch.
        fusion: LM weights and boosting of the batch.
        config: options of the search.
    """

    new_stream: Callable[[stream_state.StreamModels], Any] = staticmethod(stream_state.StreamModels.new_stream)
    read: Callable[..., tuple[Any, records.Workspace]] = staticmethod(read_chunk)
    without_committed: Callable[..., Any] = staticmethod(stream_state.without_committed)

    def __init__(self, models_of: stream_state.ModelsOf, fusion: BatchFusion, config: WFSTConfig) -> None:
        self._config, self._models_of, self._columns = config, models_of, 1
        models = stream_state.models_of_rows(models_of, fusion, range(len(fusion)))
        self._streams: list[Any] = [self.new_stream(models_of_row) for models_of_row in models]

    @property
    def make_workspace(self) -> Callable[..., records.Workspace]:
        return new_workspace

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        values, streams = as_float32(log_probs), list(self._streams)
        self._columns = values.shape[2]

        def read(b: int, work: records.Workspace) -> records.Workspace:
            streams[b], work = self.read(streams[b], values, int(lengths[b]), b, work)
            return work

        for_each_share(lambda rows: self._in_turn(rows.tolist(), read), lengths, self._config.threads)
        self._streams = streams

    def _in_turn(self, rows: Sequence[int], visit: Callable[[int, records.Workspace], records.Workspace]) -> None:
        """Call `visit` for each stream with this thread's workspace; `visit` returns this or a larger workspace."""
        models, config = [stream.models for stream in self._streams], self._config
        composes = models[0].lm_scorer is not None
        kind = self.make_workspace, config.max_active, self._columns, config.keeps_links, composes
        work, last = taken_workspace(kind), None
        for row in rows:
            large = None if (scorer := models[row].lm_scorer) is None else scorer.lms.large
            if last is not None and large is not None and last is not large:  # another large LM
                work.lm.cache.view(np.uint8)[:] = 0
            work, last = visit(row, work), large
        if work.current.nbytes <= MOST_KEPT:  # for the next call of this thread
            _kept.last = kind, work

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[stream_state.WordGraphStream]:
        return [self._streams[row] for row in rows]

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        for row, models in zip(rows, stream_state.models_of_rows(self._models_of, fusion, rows), strict=True):
            self._streams[row] = self.new_stream(models)

    def commit(self, rows: Sequence[int]) -> None:
        for row, state in zip(rows, self.results(rows, 1, final=False), strict=True):
            if more := stream_state.more_committed(state):
                self._streams[row] = self.without_committed(self._streams[row], *more)
