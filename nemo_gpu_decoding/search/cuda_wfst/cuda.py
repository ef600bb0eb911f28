"""The GPU's engine: buffers and launches around `kernel.cu` and `compact.cu`. A chunk is one launch.

    advance   one block per utterance reads its frames of the chunk: the search
    compact   drops records that no token's past leads to: where they fill their room, and before
              what is known of utterances is copied to the host

A `push` waits for the device once, to say whether a frame was bad or records have filled their room; in
the latter case they are compacted, get more room if need be, and the search goes on where it stopped.
Between pushes a stream keeps its tokens (24 bytes each, about max_active) and its records; tables are
shared with whatever torch's allocator serves next. Work goes to torch's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton, arrays_on_device, on_device
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.search.cuda_wfst import launch_shape as shapes
from nemo_gpu_decoding.search.cuda_wfst import tokens as host
from nemo_gpu_decoding.search.cuda_wfst.config import WFSTConfig
from nemo_gpu_decoding.search.cuda_wfst.streams import Setup, Utterance, raise_stop
from nemo_gpu_decoding.search.cuda_wfst.ways import BAD_FRAME, NO_TOKEN, RECORDS_FULL
from nemo_gpu_decoding.search.inputs import as_float32

# of a stream, at first; more room is made as they come
FIRST_RECORDS, RECORDS_PER_ACTIVE = 4096, 4


def why_not(config: WFSTConfig) -> str | None:
    """None if the kernels can do what `config` asks for, else why not, in one line."""
    if config.keeps_links:
        asked = "lattice is True" if config.lattice else f"n_best is {config.n_best}"
        return f"the kernels keep no lattice, and {asked}"
    return None


class State(NamedTuple):
    """What streams keep between pushes; never changed in place."""

    tokens: torch.Tensor  # [n, H] shapes.TOKEN; of each stream as many as its progress says
    records: torch.Tensor  # [n, R] RECORD
    progress: np.ndarray  # [n] shapes.PROGRESS


class CUDAEngine:
    """See `engine.Engine`. Tensors of any device are taken; the search runs on one.

    Args:
        setups: what each utterance is decoded with; all with the same graph. At least one.
        config: the options that they share.
        device: of the first log-probs; on the CPU: the current GPU is taken.
    """

    def __init__(self, setups: Sequence[Setup], config: WFSTConfig, device: torch.device) -> None:
        self.device = runtime().device_for(device)
        self._setups, self._config = list(setups), config
        graph = setups[0].graph
        self._graph = arrays_on_device(graph, graph.arrays, self.device)
        self._boosting, utterances = _boosting_on_device(self._setups, self.device)
        self._utterances = as_records(utterances).to(self.device)
        n, progress = len(setups), np.zeros(len(setups), shapes.PROGRESS)
        progress["tokens"] = 1
        tokens = np.zeros((n, 1), shapes.TOKEN)
        tokens["key"][:, 0] = [setup.first_key for setup in setups]
        tokens["record"] = host.NONE
        records = self._empty(
            n,
            max(RECORDS_PER_ACTIVE * config.max_active, FIRST_RECORDS),
            host.RECORD.itemsize,
            dtype=torch.uint8,
        )
        self._state = State(as_records(tokens).to(self.device), records, progress)

    def push(self, log_probs: torch.Tensor, lengths: np.ndarray) -> None:
        dtype = log_probs.dtype if log_probs.dtype in shapes.LOG_PROB_TYPES else torch.float32
        values = log_probs.detach().to(self.device, dtype, non_blocking=True).contiguous()
        counts = torch.from_numpy(lengths).to(self.device)
        state = self._state._replace(progress=self._state.progress.copy())
        state.progress["begin"] = 0
        while True:
            state = self._advanced(state, values, counts)
            status = state.progress["status"]
            for b in np.flatnonzero((status == BAD_FRAME) | (status == NO_TOKEN)).tolist():
                raise_stop(as_float32(values), b, int(state.progress["begin"][b]), int(status[b]))
            if not (status == RECORDS_FULL).any():
                break
            state = self._roomier(state)
        self._state = state

    def utterances(self) -> list[Utterance]:
        state = self._compacted(self._state, self._state.records.shape[1])
        counts = state.progress["records"]
        most = int(counts.max())
        records = state.records[:, :most].cpu().numpy().view(host.RECORD)[..., 0]
        tokens = state.tokens.cpu().numpy().view(shapes.TOKEN)[..., 0]
        return [
            Utterance(
                setup,
                _on_host(tokens[b, : state.progress["tokens"][b]]),
                records[b, : counts[b]],
                np.empty(0, host.LINK),
                _progress_on_host(state.progress[b]),
            )
            for b, setup in enumerate(self._setups)
        ]

    # ---------------------------------------------------------------------------------- launches

    def _advanced(self, state: State, values: torch.Tensor, lengths: torch.Tensor) -> State:
        """The streams after the rest of the chunk, as far as nothing stops them."""
        n, frames, columns = values.shape
        search, config, place = self._setups[0].search, self._config, runtime()
        room = shapes.room_for(config.max_active, columns, normal=search.topology == NORMAL)
        shared, row_bytes = shapes.shared_bytes(
            columns, values.element_size(), place.shared_bytes(self.device)
        )
        next_tokens = self._empty(n, 2, room.tokens, shapes.TOKEN.itemsize, dtype=torch.uint8)
        next_progress = self._empty(n, shapes.PROGRESS.itemsize, dtype=torch.uint8)
        defines: dict[str, int | str] = {"LOG_PROB": shapes.LOG_PROB_TYPES[values.dtype]}
        place.load("search/cuda_wfst/kernel.cu", self.device, defines).launch(
            shapes.advance_signature(values.dtype),
            grid=n,
            block=shapes.THREADS,
            shared_bytes=shared,
            log_probs=values,
            lengths=lengths,
            utterances=self._utterances,
            tokens=state.tokens,
            progress=as_records(state.progress).to(self.device),
            next_tokens=next_tokens,
            next_progress=next_progress,
            records=state.records,
            graph_states=self._graph[0],
            graph_arcs=self._graph[1],
            graph_epsilons=self._graph[2],
            graph_compounds=self._graph[3],
            boosting_states=self._boosting.states,
            boosting_arcs=self._boosting.arcs,
            **self._tables(n, room),
            frames=frames,
            columns=columns,
            held=state.tokens.shape[1],
            max_tokens=room.tokens,
            max_groups=room.groups,
            max_ways=room.ways,
            max_records=state.records.shape[1],
            follower_slot_count=room.follower_slots,
            group_slot_count=room.group_slots,
            num_words=search.num_words,
            blank_id=search.blank_id,
            topology=search.topology,
            beam=search.beam,
            max_active=search.max_active,
            acoustic_scale=search.acoustic_scale,
            row_bytes=row_bytes,
        )
        progress = next_progress.cpu().numpy().view(shapes.PROGRESS)[:, 0]
        most = int(progress["tokens"].max())
        halves = torch.from_numpy(progress["half"].astype(np.int64)).to(self.device)
        rows = torch.arange(n, device=self.device)
        return State(next_tokens[:, :, :most][rows, halves].contiguous(), state.records, progress)

    def _tables(self, n: int, room: shapes.Room) -> dict[str, torch.Tensor | None]:
        def slots(count: int) -> torch.Tensor:
            return torch.zeros((n, count), dtype=torch.int32, device=self.device)

        def entries(count: int, size: int) -> torch.Tensor:
            return self._empty(n, count, size // 8, dtype=torch.int64)

        return {
            "follower_slots": slots(room.follower_slots),
            "follower_entries": entries(room.tokens, shapes.ENTRY_BYTES),
            "group_slots": slots(room.group_slots),
            "group_entries": entries(room.groups, shapes.ENTRY_BYTES),
            "group_seconds": entries(room.groups, shapes.ENTRY_BYTES) if room.seconds else None,
            "ways": entries(room.ways, shapes.WAY_BYTES),
            "labels": self._empty(n, room.columns, dtype=torch.int32),
        }

    def _compacted(self, state: State, room: int) -> State:
        """The streams with no more records than needed, in arrays for `room` of them."""
        n, max_records = state.records.shape[:2]
        tokens = state.tokens.clone()
        progress = as_records(state.progress.copy()).to(self.device)
        kept = self._empty(n, room, host.RECORD.itemsize, dtype=torch.uint8)
        runtime().load("search/cuda_wfst/compact.cu", self.device).launch(
            shapes.COMPACT,
            grid=n,
            block=shapes.THREADS,
            tokens=tokens,
            progress=progress,
            records=state.records,
            kept=kept,
            numbers=self._empty(n, max_records, dtype=torch.int32),
            held=tokens.shape[1],
            max_records=max_records,
            room=room,
        )
        return State(tokens, kept, progress.cpu().numpy().view(shapes.PROGRESS)[:, 0])

    def _roomier(self, state: State) -> State:
        """Records that no token points to any more are dropped; more room is made if need be."""
        compacted = self._compacted(state, state.records.shape[1])
        room, live = state.records.shape[1], compacted.progress["records"]
        stopped = state.progress["status"] == RECORDS_FULL
        needed = int((live + state.progress["wanted"])[stopped].max())
        if 2 * needed <= room:
            return compacted
        larger = self._empty(len(live), 2 * max(room, needed), host.RECORD.itemsize, dtype=torch.uint8)
        larger[:, :room] = compacted.records
        return compacted._replace(records=larger)

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _boosting_on_device(setups: list[Setup], device: torch.device) -> tuple[DeviceAutomaton, np.ndarray]:
    """All boosting automata one after the other, and where each utterance [n] finds its own."""
    automata = list(dict.fromkeys(setup.boosting for setup in setups))
    copies = [on_device(automaton, device) for automaton in automata]
    begins = np.cumsum([(0, 0)] + [(len(c.states), len(c.arcs)) for c in copies], axis=0)
    utterances = np.zeros(len(setups), shapes.UTTERANCE)
    for own, setup in zip(utterances, setups, strict=True):
        own["boosting_states"], own["boosting_arcs"] = begins[automata.index(setup.boosting)]
        for name in ("lm_weight", "least_cost", "boosting_weight", "most_bonus", "boosts"):
            own[name] = getattr(setup.search, name)
    if len(copies) == 1:
        return copies[0], utterances
    return DeviceAutomaton(*(torch.cat(parts) for parts in zip(*copies, strict=True))), utterances


def _on_host(tokens: np.ndarray) -> np.ndarray:
    """Tokens [n] as the CPU's search has them."""
    same = np.zeros(len(tokens), host.TOKEN)
    for name in shapes.TOKEN.names or ():
        same[name] = tokens[name]
    return same


def _progress_on_host(progress: np.void) -> np.ndarray:
    same = np.zeros(1, host.PROGRESS)
    for name in ("tokens", "records", "frames", "cost", "limited", "overflowed"):
        same[name] = progress[name]
    return same
