"""Launch three kernels with their buffers on torch's current stream (`CUDAEngine`). A chunk is one launch.

    advance    the search; one block per utterance reads its frames of the chunk
    compact    drops the back-pointers that no token needs; runs when their array is full, and before a
               stream is copied to the host for a lattice
    best_path  finds the best token and the best end, and traces back one of them; only these tokens and
               this path, from the committed words on, are copied to the host

A `push` is one upload, one launch and one copy back, which reads the status of the streams. Only the first `push`
allocates memory on the device. If an array is full, the host drops entries that no result needs, or grows the array,
and the search continues at that frame. Because the host takes part, a push cannot be captured into a CUDA graph.

Between pushes a stream keeps its working memory and its back-pointers, and for lattices the links of its last frames
(36 bytes each). Older links that a lattice may need (5 to 25 per frame of peaked posteriors) move to the host, so that
a long stream needs no more memory on the device.

An engine has one set of kernels: `PLAIN_KERNELS` for cuda_wfst, `LargeLMKernels` for paged_biglm.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.recfunctions import assign_fields_by_name, require_fields

from nemo_gpu_decoding.cuda.launch import Signature, as_records, runtime
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.cuda.upload import Exchange, arrays_on_device
from nemo_gpu_decoding.fusion.batch import BatchFusion, DeviceAutomaton, on_device
from nemo_gpu_decoding.graph.csr import NORMAL, WordGraph
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.search.engine import Engine
from nemo_gpu_decoding.search.inputs import as_float32, for_kernels
from nemo_gpu_decoding.search.word_graph import kernel_abi, keys, records, stream_state
from nemo_gpu_decoding.search.word_graph.best_path import concatenated
from nemo_gpu_decoding.search.word_graph.config import PagedBigLMConfig, WFSTConfig
from nemo_gpu_decoding.search.word_graph.kernel_abi import STREAM_COUNTERS, WORK, Capacity
from nemo_gpu_decoding.search.word_graph.large_lm.scorer import LM_COUNTERS, LmPair, LmScorer
from nemo_gpu_decoding.search.word_graph.lattice.links import with_links
from nemo_gpu_decoding.search.word_graph.records import BACK_POINTER, LINK


class PlainKernels:
    """The kernels that search without a large LM."""

    composes = False
    static_shared_bytes = 0
    token = kernel_abi.PLAIN_TOKEN
    host_token, host_counters = records.TOKEN, records.COUNTERS  # of the CPU search
    best_path = kernel_abi.PLAIN_BEST_PATH
    advance, compact = kernel_abi.PLAIN_ADVANCE, kernel_abi.PLAIN_COMPACT
    trace_back = kernel_abi.PLAIN_TRACE_BACK
    buffers = kernel_abi.PLAIN_BUFFERS

    def capacity(self, config: WFSTConfig, params: records.SearchParams, columns: int, doubled: int) -> Capacity:
        """Return sizes of the buffers of `advance`; `doubled` counts how often they were too small."""
        seconds = params.topology == NORMAL and not params.keeps_links
        return kernel_abi.capacity_for(config.max_active, columns, seconds=seconds)

    def arguments(self, scorer: LmScorer | None, device: torch.device) -> dict[str, Any]:
        """Return the large LM's arguments of `advance` and `trace_back`; raise a ValueError if memory is too small."""
        return {}


PLAIN_KERNELS = PlainKernels()


class OpenedLabels:
    """An object that holds, on the devices, both LMs' labels for the words of `opened_graph`."""


class LargeLMKernels(PlainKernels):
    """Kernels that add the LM score difference to the costs of words. The object holds the LMs on the devices.

    Args:
        lms: both LMs of the CPU search.
        config: has the placement of the large LM.
        name: name of the large LM, for messages.
    """

    composes = True
    static_shared_bytes = kernel_abi.STATIC_SHARED_BYTES
    # the bytes of kernel_abi.LM_TOKEN; the fields of its key are fields of the token here
    token = np.dtype([records.KEY, records.LM, *records.TOKEN_FIELDS], align=True)
    host_token, host_counters = records.LM_TOKEN, LM_COUNTERS
    best_path = kernel_abi.best_path_of(token)
    advance, compact = kernel_abi.LM_ADVANCE, kernel_abi.LM_COMPACT
    trace_back = kernel_abi.LM_TRACE_BACK
    buffers = kernel_abi.LM_BUFFERS

    def __init__(self, lms: LmPair, config: PagedBigLMConfig, name: str) -> None:
        self._lms, self._opened = lms, OpenedLabels()
        cache_bytes = config.cache_mb * 10**6
        self._large = PlacedLM(lms.large, config.placement, cache_bytes, name)
        self._small = self._large  # the kernels do not read it if there is a difference automaton
        if not lms.is_difference:
            self._small = PlacedLM(lms.small, "auto", cache_bytes, "the small LM")

    def capacity(self, config: WFSTConfig, params: records.SearchParams, columns: int, doubled: int) -> Capacity:
        return kernel_abi.lm_capacity_for(config.max_active, columns, doubled)

    def arguments(self, scorer: LmScorer | None, device: torch.device) -> dict[str, Any]:
        assert scorer is not None
        owner = self if scorer.lms is self._lms else self._opened
        labels = (scorer.lms.large_labels, scorer.lms.small_labels)
        in_large, in_small = arrays_on_device(owner, labels, device)
        return {
            **self._large.on(device).arguments("large"),
            **self._small.on(device).arguments("small"),
            "labels_in_large": in_large,
            "labels_in_small": in_small,
            "is_difference": self._lms.is_difference,
            "large_end": self._lms.large_end,
            "small_end": self._lms.small_end,
            "contexts_per_group": scorer.group_size,
        }


# First capacities of a stream; the arrays grow
FIRST_BACK_POINTERS, BACK_POINTERS_PER_ACTIVE = 4096, 4
FIRST_LINKS = 1 << 15
FIRST_PATH = 256  # first capacity for the back-pointers of a best path
_PREVIOUS = (BACK_POINTER.names or ()).index("previous")  # of the fields, all of 4 bytes


class DeviceState(NamedTuple):
    """The state of n streams between pushes. Only `commit` and `restart` change it in place."""

    tokens: torch.Tensor  # [n, 3, capacity] tokens of the kernels; the counters have their places and numbers
    back_pointers: torch.Tensor  # [n, R] BACK_POINTER
    links: torch.Tensor | None  # [n, L] LINK of the last frames; for lattices
    former_links: tuple[tuple[np.ndarray, ...], ...]  # [n] older links on the host, see `with_links`
    counters: np.ndarray  # [n] STREAM_COUNTERS, on the host
    work: np.ndarray  # [n] WORK, with a large LM


class CUDAEngine(Engine):
    """An engine that searches on one GPU, see `search/engine.py`. `push` raises all errors itself.

    Args:
        models_of: returns the models of utterance b of a batch; all have one graph, some with new words added to it.
        fusion: LM weights and boosting of the batch, at least one utterance.
        config: options of the search.
        device: device of the first log-probs; if it is the CPU, the search runs on the current GPU.
        kernels: kernels of the strategy.

    Raises:
        ValueError: the device has not enough memory for the LMs.
    """

    def __init__(
        self,
        models_of: stream_state.ModelsOf,
        fusion: BatchFusion,
        config: WFSTConfig,
        device: torch.device,
        kernels: PlainKernels = PLAIN_KERNELS,
    ) -> None:
        self.device = runtime().device_for(device)
        self._models_of, self._config, self._kernels = models_of, config, kernels
        n = len(fusion)
        self._models: list[Any] = [None] * n  # `StreamModels`
        self._committed: list[Any] = [None] * n  # `Committed`
        self._tables: dict[str, Any] = {}
        self._graph: WordGraph | None = None  # in `_tables`
        self._grown = 0  # how often the capacity for groups was doubled
        # what `advance` reads of the host, and what the host reads of it
        kinds = {"counters": STREAM_COUNTERS} | ({"work": WORK} if kernels.composes else {})
        outputs = {name: (kind, (n,)) for name, kind in kinds.items()}
        self._outputs = Exchange(outputs, self.device)
        self._inputs = Exchange({**outputs, "lengths": (np.dtype(np.int64), (n,))}, self.device)
        # the buffers of `advance`, and their capacity; its hash tables are empty between launches
        self._working: tuple[Capacity, dict[str, torch.Tensor]] | None = None
        count = max(BACK_POINTERS_PER_ACTIVE * config.max_active, FIRST_BACK_POINTERS)
        self._state = DeviceState(
            self._empty(n, 3, kernel_abi.token_capacity(config.max_active), kernels.token.itemsize),
            self._empty(n, count, BACK_POINTER.itemsize),
            self._empty(n, FIRST_LINKS, LINK.itemsize) if config.keeps_links else None,
            ((),) * n,
            np.zeros(n, STREAM_COUNTERS),
            np.zeros(n, WORK),
        )
        self.restart(range(n), fusion)

    def _upload_models(self) -> None:
        """Copy the graph, the LMs, the boosting automata and the weights of all utterances to the device."""
        # the models with the largest graph, which has the arcs and labels of all others
        self._largest = max(self._models, key=lambda models: len(models.graph.words))
        if self._largest.graph is not self._graph:
            self._graph = graph = self._largest.graph
            arrays = graph.arrays
            if graph.shut is not None:  # of utterances without new words
                arrays = arrays._replace(states=np.append(graph.shut, arrays.states))
            names = ("graph_states", "graph_arcs", "graph_epsilons", "graph_word_sequences")
            self._tables |= dict(zip(names, arrays_on_device(graph, arrays, self.device), strict=True))
            self._tables |= self._kernels.arguments(self._largest.lm_scorer, self.device)
        boosting, utterances = _boosting_on_device(self._models, self.device)
        utterances["graph_states"] = [
            0 if models.graph.shut is None else len(models.graph.shut) for models in self._models
        ]
        self._tables |= {"boosting_states": boosting.states, "boosting_arcs": boosting.arcs}
        self._tables["utterances"] = as_records(utterances).to(self.device)

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False) -> None:
        assert isinstance(lengths, np.ndarray)
        values = for_kernels(log_probs, self.device)
        state = self._state._replace(counters=self._state.counters.copy())
        state.counters["begin"] = 0
        while True:
            state = self._advanced(state, values, lengths)
            status = state.counters["status"]
            for b in np.flatnonzero((status == keys.BAD_FRAME) | (status == keys.NO_TOKEN)).tolist():
                stream_state.raise_stop(as_float32(values), b, int(state.counters["begin"][b]), int(status[b]))
            if not status.any():
                break
            if state.tokens is self._state.tokens:  # the next launch writes to the place of the former tokens
                state = state._replace(tokens=state.tokens.clone())
            if (status == keys.LINKS_FULL).any():
                state = self._with_room_for_links(state)
            if (status == keys.BACK_POINTERS_FULL).any():
                state = self._with_more_back_pointers(state, status == keys.BACK_POINTERS_FULL)
            self._grown += bool((status == keys.GROUPS_FULL).any())
        self._state = state

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[stream_state.WordGraphStream]:
        if self._config.keeps_links and (final or n_best > 1):
            return self.utterances(rows)
        return self.best_paths(rows, final=final)

    def commit(self, rows: Sequence[int]) -> None:
        for row, state in zip(rows, self.best_paths(rows, final=False), strict=True):
            if state.device_numbers is not None and (more := stream_state.more_committed(state)):
                self._committed[row], root = more
                # trace-backs end there from now on, and `compact` drops older back-pointers
                number = int(state.device_numbers[root])
                self._state.back_pointers.view(torch.int32)[row, number, _PREVIOUS] = keys.NONE

    def restart(self, rows: Sequence[int], fusion: BatchFusion) -> None:
        state = self._state
        for row, models in zip(rows, stream_state.models_of_rows(self._models_of, fusion, rows), strict=True):
            self._models[row], self._committed[row] = models, stream_state.Committed.nothing(models)
        self._upload_models()
        first = concatenated([self._models[row].first[0] for row in rows])  # tokens before the first frame
        state.tokens[list(rows), 0, 0] = as_records(require_fields(first, self._kernels.token)).to(self.device)
        state.counters[rows] = np.zeros((), STREAM_COUNTERS)
        state.counters["tokens"][rows] = 1
        state.work[rows] = np.zeros((), WORK)
        over = set(rows)
        former_links = tuple(() if row in over else former for row, former in enumerate(state.former_links))
        self._state = state._replace(former_links=former_links)

    def utterances(self, rows: Sequence[int]) -> list[stream_state.WordGraphStream]:
        """Copy the complete state of some utterances to the host, and return it."""
        state = self._compacted(self._state_of(rows))
        counts, counters = state.counters["back_pointers"], self._host_counters(state.counters, state.work)
        back_pointers = _on_host(state.back_pointers[:, : counts.max(initial=0)], BACK_POINTER)
        live, places = state.counters["tokens"], torch.from_numpy(state.counters["place"].astype(np.int64))
        current = state.tokens[:, :, : live.max(initial=0)][torch.arange(len(rows)), places.to(self.device)]
        tokens = _on_host(current, self._kernels.token)
        newest = np.empty((len(rows), 0), LINK)
        if state.links is not None:
            newest = _on_host(state.links[:, : state.counters["links"].max(initial=0)], LINK)
        parts = zip(state.former_links, newest, state.counters["links"].tolist(), strict=True)
        links = [concatenated((*former, new[:count])) for former, new, count in parts]
        counters["links"] = [len(links_of_row) for links_of_row in links]
        return [
            stream_state.WordGraphStream(
                self._models[row],
                require_fields(tokens[i, : live[i]], self._kernels.host_token),
                back_pointers[i, : counts[i]],
                links[i],
                counters[i : i + 1],
                live=tokens["back_pointer"][i, : live[i]],
                committed=self._committed[row],
            )
            for i, row in enumerate(rows)
        ]

    def _state_of(self, rows: Sequence[int]) -> DeviceState:
        """Return the state of the streams with these numbers."""
        state, chosen = self._state, list(rows)
        if chosen == list(range(len(self._models))):
            return state
        numbers = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        parts = {name: part[numbers] for name, part in state._asdict().items() if isinstance(part, torch.Tensor)}
        former_links, counters = tuple(state.former_links[row] for row in chosen), state.counters[chosen]
        return state._replace(**parts, former_links=former_links, counters=counters, work=state.work[chosen])

    def best_paths(self, rows: Sequence[int], *, final: bool) -> list[stream_state.WordGraphStream]:
        """Return the parts of some streams that best paths need, on the host.

        Args:
            rows: numbers of streams.
            final: True if the utterances have ended: the result has the token at which the utterance ends at the
                lowest cost, with its back-pointers. If False, the result has the best token with its back-pointers,
                the newest back-pointer that all tokens share, and the token of the best end. If no token may end, the
                best token counts as the end.
        """
        if len(rows) == 0:
            return []
        numbers = torch.tensor(rows, dtype=torch.int32).to(self.device)
        ends, paths = self._launch_best_path(numbers, FIRST_PATH, final)
        most = int(ends["back_pointers"].max())
        if most > FIRST_PATH:
            ends, paths = self._launch_best_path(numbers, most, final)
        newest_first = _on_host(paths[:, :most], BACK_POINTER)
        counters, streams = self._host_counters(self._state.counters, self._state.work), []
        for row, end, path in zip(rows, ends, newest_first, strict=True):
            # the token with this path; unless `final`, a second token may hold the best end
            tokens = np.stack([end["ending" if final else "best"], end["ending"]])
            is_other = not final and end["ends"] and end["best"] != end["ending"]
            back_pointers = path[: end["back_pointers"]][::-1].copy()
            numbers = None if final else np.append(back_pointers["previous"][1:], tokens["back_pointer"][0])
            tokens["back_pointer"] = [len(back_pointers) - 1, keys.NONE]
            back_pointers["previous"] = np.arange(-1, len(back_pointers) - 1)
            stream = stream_state.WordGraphStream(
                self._models[row],
                require_fields(tokens[: 1 + is_other], self._kernels.host_token),
                back_pointers,
                np.empty(0, LINK),
                counters[row : row + 1],
                live=None if final else np.array([end["shared"] - 1], np.int32),
                committed=self._committed[row],
                device_numbers=numbers,
            )
            streams.append(stream)
        return streams

    def _host_counters(self, counters: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return [n] COUNTERS, or LM_COUNTERS, of all utterances."""
        same = require_fields(counters, self._kernels.host_counters)
        if self._kernels.composes:
            assign_fields_by_name(same, work, zero_unassigned=False)
        return same

    # ---------------------------------------------------------------------------------- launches

    def _launch(self, kernel: str, signature: Signature, blocks: int, defines: dict[str, Any], **options: Any) -> None:
        """Launch a kernel with these arguments and with the tables that its signature names."""
        tables = {name: table for name, table in self._tables.items() if name in signature.parameters}
        runtime().load(f"search/word_graph/{kernel}.cu", self.device, defines).launch(
            signature, grid=blocks, block=kernel_abi.THREADS, **tables, **options
        )

    def _stream_arguments(self, state: DeviceState) -> dict[str, Any]:
        """Return the arguments of `compact` and `best_path` that describe streams."""
        return {
            "tokens": state.tokens,
            "counters": as_records(state.counters).to(self.device),
            "back_pointers": state.back_pointers,
            "held": state.tokens.shape[2],
            "max_back_pointers": state.back_pointers.shape[1],
        }

    def _advanced(self, state: DeviceState, values: torch.Tensor, lengths: np.ndarray) -> DeviceState:
        """Return the streams after the chunk, or before the frame at which their search stops."""
        n, frames, columns = values.shape
        kernels, params = self._kernels, self._largest.params
        capacity = kernels.capacity(self._config, params, columns, self._grown)
        most_shared = runtime().shared_bytes(self.device) - kernels.static_shared_bytes
        shared_bytes, shared_rows = kernel_abi.shared_bytes(columns, values.element_size(), most_shared)
        defines: dict[str, int | str] = {"LOG_PROB": FLOAT_TYPES[values.dtype]}
        if kernels.composes:
            defines["COMPOSE"] = 1
        if params.keeps_links:
            defines["LINKS"] = 1
        if params.min_active:
            defines["MIN_ACTIVE"] = 1
        if self._working is None or self._working[0] != capacity:
            self._working = None  # frees memory first
            self._working = capacity, self._buffers(n, capacity)
        buffers, self._working = self._working[1], None  # a launch that fails may leave entries in the hash tables
        given = {"counters": state.counters, "work": state.work, "lengths": lengths}
        for name, buffer in self._inputs.on_host.items():
            buffer[:] = given[name]
        self._inputs.upload()
        self._launch(
            "kernel",
            kernels.advance,
            n,
            defines=defines,
            shared_bytes=shared_bytes,
            log_probs=values,
            tokens=state.tokens,
            back_pointers=state.back_pointers,
            links=state.links,
            **self._inputs.on_device,
            **{f"next_{name}": buffer for name, buffer in self._outputs.on_device.items()},
            **buffers,
            params=params,
            capacity=capacity,
            frames=frames,
            max_back_pointers=state.back_pointers.shape[1],
            max_links=0 if state.links is None else state.links.shape[1],
            shared_rows=shared_rows,
        )
        self._outputs.fetch()  # waits for the launch
        outputs: dict[str, Any] = {name: buffer.copy() for name, buffer in self._outputs.on_host.items()}
        counters = outputs["counters"]
        if not counters["status"].any():
            self._working = capacity, buffers
        return state._replace(**outputs)

    def _launch_best_path(self, rows: torch.Tensor, capacity: int, final: bool) -> tuple[np.ndarray, torch.Tensor]:
        """Return [A] best paths of the utterances `rows`, and their [A, capacity] BACK_POINTER on the device."""
        kernels = self._kernels
        best = self._empty(len(rows), kernels.best_path.itemsize)
        paths = self._empty(len(rows), capacity, BACK_POINTER.itemsize)
        self._launch(
            "best_path",
            kernels.trace_back,
            len(rows),
            defines={"COMPOSE": int(kernels.composes)},
            rows=rows,
            **self._stream_arguments(self._state),
            found=best,
            paths=paths,
            capacity=capacity,
            num_words=self._largest.params.num_words,
            final=final,
        )
        return _on_host(best, kernels.best_path), paths

    def _compacted(self, state: DeviceState) -> DeviceState:
        """Return the streams with only the back-pointers that tokens need, in new arrays of the same capacity."""
        n, capacity = state.back_pointers.shape[:2]
        arguments = self._stream_arguments(
            state._replace(tokens=state.tokens.clone(), counters=state.counters.copy())  # the kernel writes both
        )
        kept = self._empty(n, capacity, BACK_POINTER.itemsize)
        self._launch(
            "compact",
            self._kernels.compact,
            n,
            defines={"COMPOSE": int(self._kernels.composes)},
            **arguments,
            kept=kept,
            numbers=torch.empty((n, capacity), dtype=torch.int32, device=self.device),
            capacity=capacity,
        )
        counters = _on_host(arguments["counters"], STREAM_COUNTERS)
        return state._replace(tokens=arguments["tokens"], back_pointers=kept, counters=counters)

    # ----------------------------------------------------------------------------------- buffers

    def _buffers(self, n: int, capacity: Capacity) -> dict[str, torch.Tensor]:
        """Return the buffers of `advance`; hash tables are empty."""
        buffers = {}
        for name, tensor in self._kernels.buffers.items():
            new = torch.zeros if name.endswith("slots") else torch.empty
            shape = kernel_abi.buffer_shape(tensor, n, capacity)
            values = new(shape, dtype=torch.uint8, device=self.device)
            if not tensor.layout.record_bytes:
                values = values.view(tensor.layout.dtypes[0]).squeeze(-1)
            buffers[name] = values
        return buffers

    def _with_more_back_pointers(self, state: DeviceState, stopped: np.ndarray) -> DeviceState:
        """Drop the back-pointers that no token needs; grow the array if it is then more than half full."""
        compacted = self._compacted(state)
        capacity, live = state.back_pointers.shape[1], compacted.counters["back_pointers"]
        needed = int((live + state.counters["needed"])[stopped].max())
        if 2 * needed <= capacity:
            return compacted
        larger = self._empty(len(live), 2 * max(capacity, needed), BACK_POINTER.itemsize)
        larger[:, :capacity] = compacted.back_pointers
        return compacted._replace(back_pointers=larger)

    def _with_room_for_links(self, state: DeviceState) -> DeviceState:
        """Move the links of a stream to the host if they fill more than half of the array.

        The array grows if the links of a single frame do not fit.
        """
        assert state.links is not None
        counters, former, size = state.counters.copy(), list(state.former_links), state.links.shape[1]
        stopped = counters["status"] == keys.LINKS_FULL
        for b in np.flatnonzero(stopped | (2 * counters["links"] > size)).tolist():
            counters_of_row, links = counters[b], _on_host(state.links[b, : counters["links"][b]], LINK)
            beam = float(self._models[b].params.lattice_beam)
            former[b] = with_links(former[b], links, int(counters_of_row["frames"]), beam)
            counters_of_row["links"] = 0
        needed = int(counters["needed"][stopped].max())
        # a new array, because the streams must stay unchanged if a later frame of this chunk is bad
        links = self._empty(len(counters), size if needed <= size else 2 * needed, LINK.itemsize)
        used = int(counters["links"].max())
        links[:, :used] = state.links[:, :used]
        return state._replace(links=links, former_links=tuple(former), counters=counters)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)


def _on_host(values: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """Copy records [..., bytes] to the host, as [...] of this type."""
    return values.cpu().contiguous().numpy().view(dtype)[..., 0]


def _boosting_on_device(
    models: list[stream_state.StreamModels], device: torch.device
) -> tuple[DeviceAutomaton, np.ndarray]:
    """Return all boosting automata, one after the other, and the STREAM_PARAMS [n] of the utterances."""
    automata = list(dict.fromkeys(models_of_row.boosting for models_of_row in models))
    copies = [on_device(automaton, device) for automaton in automata]
    begins = np.cumsum([(0, 0)] + [(len(c.states), len(c.arcs)) for c in copies], axis=0)
    utterances = np.zeros(len(models), kernel_abi.STREAM_PARAMS)
    for n, models_of_row in enumerate(models):
        weight = 0.0 if models_of_row.lm_scorer is None else models_of_row.lm_scorer.difference_weight
        utterances[n] = (*begins[automata.index(models_of_row.boosting)], 0, *models_of_row.weights, weight)
    if len(copies) == 1:
        return copies[0], utterances
    return DeviceAutomaton(*(torch.cat(parts) for parts in zip(*copies, strict=True))), utterances
