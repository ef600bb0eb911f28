"""`CUDAEngine`: buffers and launches around three kernels. A chunk is one launch.

    advance    one block per utterance reads its frames of the chunk: the search
    compact    drops back-pointers that lead to no token: where they fill their array, and before all
               that is known of utterances is copied to the host, for lattices
    best_path  finds the tokens that best paths are about, with a large LM by both LMs' ends of sentence
               too; these tokens and one path, from the committed words on, are copied to the host,
               whatever else streams keep

A `push` waits for the device once, to say whether a frame was bad or an array is full; in the latter
case what no result can need is dropped from that array, or it grows, and the search goes on where it stopped.
Between pushes a stream keeps its tokens (24 bytes each, about max_active), its back-pointers, and for
lattices the links of its last frames (36 bytes each); other buffers are shared with whatever torch's
allocator serves next. Links of former frames wait on the host, those that a lattice may need (5 to 25 per
frame of peaked posteriors), so that a long stream takes no more of the device. Work goes to torch's
current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import Signature, as_records, runtime
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.fusion.batch import BatchFusion, DeviceAutomaton, on_device
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.word_graph import kernel_abi, keys
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.committed import Committed, more_committed
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.cuda_kernels import PLAIN_KERNELS, LargeLMKernels, PlainKernels
from nemo_gpu_decoding.search.word_graph.kernel_abi import BACK_POINTER, LINK, STREAM_COUNTERS, STREAM_PARAMS, WORK
from nemo_gpu_decoding.search.word_graph.lattice.link_pruning import with_links
from nemo_gpu_decoding.search.word_graph.records import COUNTERS
from nemo_gpu_decoding.search.word_graph.stream_state import (
    ModelsOf,
    StreamModels,
    StreamState,
    models_of_rows,
    raise_stop,
)

# of a stream, at first; the arrays grow as more come
FIRST_BACK_POINTERS, BACK_POINTERS_PER_ACTIVE = 4096, 4
FIRST_LINKS = 1 << 15
FIRST_PATH = 256  # back-pointers of a best path that are copied at first
_FULL = (keys.BACK_POINTERS_FULL, keys.LINKS_FULL, keys.GROUPS_FULL)
_PREVIOUS = (BACK_POINTER.names or ()).index("previous")  # of the fields, all of 4 bytes


class State(NamedTuple):
    """What streams keep between pushes; never changed in place, but by `commit`."""

    tokens: torch.Tensor  # [n, held] of the kernels' token; of each as many as its counters say
    back_pointers: torch.Tensor  # [n, R] BACK_POINTER
    links: torch.Tensor | None  # [n, L] LINK of the last frames, if links are kept
    former_links: tuple[tuple[np.ndarray, ...], ...]  # of each stream, see `with_links`
    counters: np.ndarray  # [n] STREAM_COUNTERS
    work: torch.Tensor | None  # [n] WORK, with a large LM


class CUDAEngine(Engine):
    """See `search/engine.py`. Tensors of any device are taken; the search runs on one; no error is
    deferred.

    Args:
        models_of: what utterance b of a batch is decoded with; all with the same graph.
        fusion: of the batch, at least one utterance.
        config: options of the batch.
        device: of the first log-probs; on the CPU: the current GPU is taken.
        kernels: those of the strategy.

    Raises:
        ValueError: there is not enough memory for the LMs.
    """

    def __init__(
        self,
        models_of: ModelsOf,
        fusion: BatchFusion,
        config: WFSTConfig,
        device: torch.device,
        kernels: PlainKernels | LargeLMKernels = PLAIN_KERNELS,
    ) -> None:
        self.device = runtime().device_for(device)
        self._models_of, self._config, self._kernels = models_of, config, kernels
        self._models = models_of_rows(models_of, fusion, range(len(fusion)))
        graph = self._models[0].graph
        arrays = arrays_on_device(graph, graph.arrays, self.device)
        names = ("graph_states", "graph_arcs", "graph_epsilons", "graph_word_sequences")
        self._tables: dict[str, Any] = dict(zip(names, arrays, strict=True))
        self._tables |= kernels.arguments(self._models, self.device)
        self._take_boosting()
        self._grown = 0  # times that there were more groups than expected
        self._committed = [Committed.nothing(own) for own in self._models]
        self._state = self._first_state()

    def _take_boosting(self) -> None:
        """Boosting automata and weights of the utterances, as kernels read them."""
        boosting, utterances = _boosting_on_device(self._models, self.device)
        utterances["difference_weight"] = [self._kernels.weight(own) for own in self._models]
        self._tables |= {"boosting_states": boosting.states, "boosting_arcs": boosting.arcs}
        self._tables["utterances"] = as_records(utterances).to(self.device)

    def _first_state(self) -> State:
        n, config = len(self._models), self._config
        counters = np.zeros(n, STREAM_COUNTERS)
        counters["tokens"] = 1
        tokens = self._kernels.first_tokens(self._models)
        count = max(BACK_POINTERS_PER_ACTIVE * config.max_active, FIRST_BACK_POINTERS)
        return State(
            as_records(tokens).to(self.device),
            self._empty(n, count, BACK_POINTER.itemsize),
            self._empty(n, FIRST_LINKS, LINK.itemsize) if config.keeps_links else None,
            ((),) * n,
            counters,
            as_records(np.zeros(n, WORK)).to(self.device) if self._kernels.composes else None,
        )

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        dtype = log_probs.dtype if log_probs.dtype in kernel_abi.LOG_PROB_TYPES else torch.float32
        values = log_probs.detach().to(self.device, dtype, non_blocking=True).contiguous()
        counts = torch.from_numpy(lengths).to(self.device)
        state = self._state._replace(counters=self._state.counters.copy())
        state.counters["begin"] = 0
        while True:
            state = self._advanced(state, values, counts)
            status = state.counters["status"]
            for b in np.flatnonzero((status == keys.BAD_FRAME) | (status == keys.NO_TOKEN)).tolist():
                raise_stop(as_float32(values), b, int(state.counters["begin"][b]), int(status[b]))
            if not np.isin(status, _FULL).any():
                break
            if (status == keys.LINKS_FULL).any():
                state = self._with_room_for_links(state)
            if (status == keys.BACK_POINTERS_FULL).any():
                state = self._with_more_back_pointers(state, status == keys.BACK_POINTERS_FULL)
            self._grown += bool((status == keys.GROUPS_FULL).any())
        self._state = state

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[StreamState]:
        """Of the utterances `rows` what their results need: all for a lattice, else see `best_paths`."""
        if self._config.keeps_links and (final or n_best > 1):
            return self.utterances(rows)
        return self.best_paths(rows, final=final)

    def commit(self, rows: Sequence[int]) -> None:
        for row, state in zip(rows, self.best_paths(rows, final=False), strict=True):
            if state.numbers is not None and (more := more_committed(state)):
                self._committed[row], root = more
                # no trace-back goes beyond it now; `compact` drops what is before it, which leads to no token
                self._state.back_pointers.view(torch.int32)[row, int(state.numbers[root]), _PREVIOUS] = keys.NONE

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        numbers, state = torch.tensor(list(rows), device=self.device), self._state
        for row, models in zip(rows, models_of_rows(self._models_of, fusion, rows), strict=True):
            self._models[row], self._committed[row] = models, Committed.nothing(models)
        self._take_boosting()
        first = as_records(self._kernels.first_tokens([self._models[row] for row in rows])).to(self.device)
        tokens, counters, work = state.tokens.clone(), state.counters.copy(), state.work
        tokens[numbers, :1] = first
        counters[rows] = np.zeros((), STREAM_COUNTERS)
        counters["tokens"][rows] = 1
        if work is not None:
            work = work.clone()
            work[numbers] = 0
        over = set(rows)
        former_links = tuple(() if row in over else former for row, former in enumerate(state.former_links))
        self._state = State(tokens, state.back_pointers, state.links, former_links, counters, work)

    def utterances(self, rows: Sequence[int]) -> list[StreamState]:
        """All that is known of some utterances, in the host's memory."""
        state = self._compacted(self._state_of(rows), self._state.back_pointers.shape[1])
        counts, counters = state.counters["back_pointers"], self._counters_on_host(state.counters, state.work)
        back_pointers = _on_host(state.back_pointers[:, : counts.max(initial=0)], BACK_POINTER)
        tokens = _on_host(state.tokens, self._kernels.token)
        newest = np.empty((len(rows), 0), LINK)
        if state.links is not None:
            newest = _on_host(state.links[:, : state.counters["links"].max(initial=0)], LINK)
        each = zip(state.former_links, newest, state.counters["links"].tolist(), strict=True)
        links = [concatenated((*former, own[:count])) for former, own, count in each]
        counters["links"] = [len(own) for own in links]
        return [
            StreamState(
                self._models[row],
                self._kernels.tokens_on_host(tokens[i, : state.counters["tokens"][i]]),
                back_pointers[i, : counts[i]],
                links[i],
                counters[i : i + 1],
                pasts=tokens["back_pointer"][i, : state.counters["tokens"][i]],
                committed=self._committed[row],
            )
            for i, row in enumerate(rows)
        ]

    def _state_of(self, rows: Sequence[int]) -> State:
        """What some streams keep."""
        state = self._state
        if list(rows) == list(range(len(self._models))):
            return state
        numbers = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        return State(
            state.tokens[numbers],
            state.back_pointers[numbers],
            None if state.links is None else state.links[numbers],
            tuple(state.former_links[row] for row in rows),
            state.counters[list(rows)],
            None if state.work is None else state.work[numbers],
        )

    def best_paths(self, rows: Sequence[int], *, final: bool) -> list[StreamState]:
        """Of some utterances what best paths need, whatever else they have in memory.

        Args:
            rows: numbers of utterances.
            final: they are over. The token with which each ends best is there, with its back-pointers;
                else the best token with its back-pointers and the newest of these that all tokens share,
                and the token with which the utterance would end best. Where no token may end, the best
                one is there in either case.
        """
        if len(rows) == 0:
            return []
        wanted = torch.tensor(rows, dtype=torch.int32).to(self.device)
        capacity = FIRST_PATH
        while True:
            found, paths = self._launch_best_path(wanted, capacity, final)
            most = int(found["back_pointers"].max())
            if most <= capacity:
                break
            capacity = most
        newest_first = _on_host(paths[:, :most], BACK_POINTER)
        counters = self._counters_on_host(self._state.counters, self._state.work)
        return [
            self._on_best_path(row, own, path[: own["back_pointers"]], counters[row : row + 1], final=final)
            for row, own, path in zip(rows, found, newest_first, strict=True)
        ]

    def _on_best_path(
        self, row: int, found: np.void, newest_first: np.ndarray, counters: np.ndarray, *, final: bool
    ) -> StreamState:
        """An utterance of one token with this path, and perhaps of that which ends best."""
        tokens = np.stack([found["ending" if final else "best"], found["ending"]])
        back_pointers = newest_first[::-1].copy()
        numbers = None if final else np.append(back_pointers["previous"][1:], tokens["back_pointer"][0])
        tokens["back_pointer"] = [len(newest_first) - 1, keys.NONE]
        is_other = not final and found["ends"] and tokens["key"][0] != tokens["key"][1]
        back_pointers["previous"] = np.arange(-1, len(back_pointers) - 1)
        return StreamState(
            self._models[row],
            self._kernels.tokens_on_host(tokens[: 1 + is_other]),
            back_pointers,
            np.empty(0, LINK),
            counters,
            pasts=None if final else np.array([found["shared"] - 1], np.int32),
            committed=self._committed[row],
            numbers=numbers,
        )

    def _counters_on_host(self, counters: np.ndarray, work: torch.Tensor | None) -> np.ndarray:
        """[n] COUNTERS, or LM_COUNTERS, of all utterances."""
        same = np.zeros(len(counters), self._kernels.host_counters)
        for name in COUNTERS.names or ():
            same[name] = counters[name]
        if work is not None:
            counted = _on_host(work, WORK)
            for name in WORK.names or ():
                same[name] = counted[name]
        return same

    # ---------------------------------------------------------------------------------- launches

    def _launch(self, kernel: str, signature: Signature, blocks: int, **options: Any) -> None:
        """With those of the tables and sizes that the signature has."""
        known = {name: self._tables[name] for name in self._tables if name in signature.parameters}
        defines, shared_bytes = options.pop("defines", {}), options.pop("shared_bytes", 0)
        runtime().load(f"search/word_graph/{kernel}.cu", self.device, defines).launch(
            signature, grid=blocks, block=kernel_abi.THREADS, shared_bytes=shared_bytes, **known, **options
        )

    def _advanced(self, state: State, values: torch.Tensor, lengths: torch.Tensor) -> State:
        """The streams after the rest of the chunk, as far as nothing stops them."""
        n, frames, columns = values.shape
        kernels, params = self._kernels, self._models[0].params
        capacity = kernels.capacity(self._config, params, columns, self._grown)
        most_shared = runtime().shared_bytes(self.device) - kernels.static_shared_bytes
        shared_bytes, row_bytes = kernel_abi.shared_bytes(columns, values.element_size(), most_shared)
        next_tokens = self._empty(n, 2, capacity.tokens, kernels.token.itemsize)
        next_counters = self._empty(n, STREAM_COUNTERS.itemsize)
        work: dict[str, torch.Tensor] = {}
        if state.work is not None:
            work = {"work": state.work, "next_work": torch.empty_like(state.work)}
        defines: dict[str, int | str] = {"LOG_PROB": kernel_abi.LOG_PROB_TYPES[values.dtype]}
        if kernels.composes:
            defines["COMPOSE"] = 1
        if params.keeps_links:
            defines["LINKS"] = 1
        self._launch(
            "kernel",
            kernels.advance,
            n,
            defines=defines,
            shared_bytes=shared_bytes,
            log_probs=values,
            lengths=lengths,
            tokens=state.tokens,
            counters=as_records(state.counters).to(self.device),
            next_tokens=next_tokens,
            next_counters=next_counters,
            back_pointers=state.back_pointers,
            links=state.links,
            **work,
            **self._buffers(n, capacity),
            params=params,
            capacity=capacity,
            frames=frames,
            held=state.tokens.shape[1],
            max_back_pointers=state.back_pointers.shape[1],
            max_links=0 if state.links is None else state.links.shape[1],
            row_bytes=row_bytes,
        )
        counters = _on_host(next_counters, STREAM_COUNTERS)
        halves = torch.from_numpy(counters["half"].astype(np.int64)).to(self.device)
        rows = torch.arange(n, device=self.device)
        kept = next_tokens[:, :, : counters["tokens"].max()][rows, halves].contiguous()
        return state._replace(tokens=kept, counters=counters, work=work.get("next_work"))

    def _launch_best_path(self, wanted: torch.Tensor, capacity: int, final: bool) -> tuple[np.ndarray, torch.Tensor]:
        """[A] best paths' records of the utterances wanted, and [A, capacity] BACK_POINTER, still there."""
        state, kernels = self._state, self._kernels
        found = self._empty(len(wanted), kernels.best_path.itemsize)
        paths = self._empty(len(wanted), capacity, BACK_POINTER.itemsize)
        self._launch(
            "best_path",
            kernels.trace_back,
            len(wanted),
            defines={"COMPOSE": int(kernels.composes)},
            rows=wanted,
            tokens=state.tokens,
            counters=as_records(state.counters).to(self.device),
            back_pointers=state.back_pointers,
            found=found,
            paths=paths,
            held=state.tokens.shape[1],
            max_back_pointers=state.back_pointers.shape[1],
            capacity=capacity,
            num_words=self._models[0].params.num_words,
            final=final,
        )
        return _on_host(found, kernels.best_path), paths

    def _compacted(self, state: State, capacity: int) -> State:
        """The streams with no more back-pointers than needed, in arrays for `capacity` of them."""
        n, max_back_pointers = state.back_pointers.shape[:2]
        tokens = state.tokens.clone()
        counters = as_records(state.counters.copy()).to(self.device)
        kept = self._empty(n, capacity, BACK_POINTER.itemsize)
        self._launch(
            "compact",
            self._kernels.compact,
            n,
            defines={"COMPOSE": int(self._kernels.composes)},
            tokens=tokens,
            counters=counters,
            back_pointers=state.back_pointers,
            kept=kept,
            numbers=torch.empty((n, max_back_pointers), dtype=torch.int32, device=self.device),
            held=tokens.shape[1],
            max_back_pointers=max_back_pointers,
            capacity=capacity,
        )
        return state._replace(tokens=tokens, back_pointers=kept, counters=_on_host(counters, STREAM_COUNTERS))

    # ----------------------------------------------------------------------------------- buffers

    def _buffers(self, n: int, capacity: kernel_abi.Capacity) -> dict[str, torch.Tensor]:
        """What `advance` works in; hash tables are empty."""
        found = {}
        for name, tensor in self._kernels.buffers.items():
            new = torch.zeros if name.endswith("slots") else torch.empty
            shape = kernel_abi.buffer_shape(tensor, n, capacity)
            values = new(shape, dtype=torch.uint8, device=self.device)
            if not tensor.layout.record_bytes:
                values = values.view(tensor.layout.dtypes[0]).squeeze(-1)
            found[name] = values
        return found

    def _with_more_back_pointers(self, state: State, stopped: np.ndarray) -> State:
        """Those that lead to no token are dropped; their array grows if need be."""
        compacted = self._compacted(state, state.back_pointers.shape[1])
        capacity, live = state.back_pointers.shape[1], compacted.counters["back_pointers"]
        needed = int((live + state.counters["needed"])[stopped].max())
        if 2 * needed <= capacity:
            return compacted
        larger = self._empty(len(live), 2 * max(capacity, needed), BACK_POINTER.itemsize)
        larger[:, :capacity] = compacted.back_pointers
        return compacted._replace(back_pointers=larger)

    def _with_room_for_links(self, state: State) -> State:
        """Streams whose array of links is full have them on the host, and so have those that have used half of it; it
        grows if a frame alone needs more."""
        assert state.links is not None
        counters, former, size = state.counters.copy(), list(state.former_links), state.links.shape[1]
        stopped = counters["status"] == keys.LINKS_FULL
        for b in np.flatnonzero(stopped | (2 * counters["links"] > size)).tolist():
            own, links = counters[b], _on_host(state.links[b, : counters["links"][b]], LINK)
            beam = float(self._models[b].params.lattice_beam)
            former[b] = with_links(former[b], links, int(own["frames"]), beam)
            own["links"] = 0
        needed = int(counters["needed"][stopped].max())
        # another array: should a frame of this chunk be bad, the streams are to be as they were
        links = self._empty(len(counters), size if needed <= size else 2 * needed, LINK.itemsize)
        used = int(counters["links"].max())
        links[:, :used] = state.links[:, :used]
        return state._replace(links=links, former_links=tuple(former), counters=counters)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)


def _on_host(records: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """Records [..., bytes] in the host's memory, [...]."""
    return records.cpu().contiguous().numpy().view(dtype)[..., 0]


def _boosting_on_device(models: list[StreamModels], device: torch.device) -> tuple[DeviceAutomaton, np.ndarray]:
    """All boosting automata one after the other, and the STREAM_PARAMS [n] of each utterance."""
    automata = list(dict.fromkeys(own.boosting for own in models))
    copies = [on_device(automaton, device) for automaton in automata]
    begins = np.cumsum([(0, 0)] + [(len(c.states), len(c.arcs)) for c in copies], axis=0)
    utterances = np.zeros(len(models), STREAM_PARAMS)
    for own, given in zip(utterances, models, strict=True):
        own["boosting_states"], own["boosting_arcs"] = begins[automata.index(given.boosting)]
        for name, value in given.weights._asdict().items():
            own[name] = value
    if len(copies) == 1:
        return copies[0], utterances
    return DeviceAutomaton(*(torch.cat(parts) for parts in zip(*copies, strict=True))), utterances
