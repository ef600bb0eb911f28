"""The GPU's engine: buffers and launches around three kernels. A chunk is one launch.

    advance   one block per utterance reads its frames of the chunk: the search
    compact   drops records that no token's past leads to: where they fill their room, and before
              all that is known of utterances is copied to the host, for lattices
    leading   finds the tokens that best paths are about, which are copied to the host with one past

A `push` waits for the device once, to say whether a frame was bad or records or links have filled their
room; in the latter case they get more room (records are compacted first), and the search goes on where
it stopped. Between pushes a stream keeps its tokens (24 bytes each, about max_active), its records, and
for lattices its links (36 bytes each, 5 to 25 per frame of peaked posteriors); tables are shared with
whatever torch's allocator serves next. Work goes to torch's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton, on_device
from nemo_gpu_decoding.graph.topology import NORMAL
from nemo_gpu_decoding.search.inputs import as_float32
from nemo_gpu_decoding.search.word_graph import launch_shape as shapes
from nemo_gpu_decoding.search.word_graph import tokens as host
from nemo_gpu_decoding.search.word_graph.config import WFSTConfig
from nemo_gpu_decoding.search.word_graph.streams import Setup, Utterance, raise_stop
from nemo_gpu_decoding.search.word_graph.ways import BAD_FRAME, LINKS_FULL, NO_TOKEN, RECORDS_FULL

# of a stream, at first; more room is made as they come
FIRST_RECORDS, RECORDS_PER_ACTIVE = 4096, 4
FIRST_LINKS = 1 << 15
FIRST_PAST = 256  # records of a best path that are copied at first


class State(NamedTuple):
    """What streams keep between pushes; never changed in place."""

    tokens: torch.Tensor  # [n, H] shapes.TOKEN; of each stream as many as its progress says
    records: torch.Tensor  # [n, R] RECORD
    links: torch.Tensor | None  # [n, L] LINK, if links are kept
    progress: np.ndarray  # [n] shapes.PROGRESS


class CUDAEngine:
    """See `search/engine.py`. Tensors of any device are taken; the search runs on one; no error is
    deferred.

    Args:
        setups: what each utterance is decoded with; all with the same graph. At least one.
        config: options of the batch.
        device: of the first log-probs; on the CPU: the current GPU is taken.
    """

    # What another strategy that searches word graphs has its own of
    token = shapes.TOKEN
    host_token, host_progress = host.TOKEN, host.PROGRESS
    compact = shapes.COMPACT
    compact_defines: ClassVar[dict[str, int | str]] = {}

    def __init__(self, setups: Sequence[Setup], config: WFSTConfig, device: torch.device) -> None:
        self.device = runtime().device_for(device)
        self._setups, self._config = list(setups), config
        graph = setups[0].graph
        self._graph = arrays_on_device(graph, graph.arrays, self.device)
        self._boosting, utterances = _boosting_on_device(self._setups, self.device)
        self._utterances = as_records(utterances).to(self.device)
        n, progress = len(setups), np.zeros(len(setups), shapes.PROGRESS)
        progress["tokens"] = 1
        tokens = np.zeros((n, 1), self.token)
        tokens["key"][:, 0] = [setup.first_key for setup in setups]
        tokens["record"] = host.NONE
        records = self._empty(
            n,
            max(RECORDS_PER_ACTIVE * config.max_active, FIRST_RECORDS),
            host.RECORD.itemsize,
            dtype=torch.uint8,
        )
        links = None
        if config.keeps_links:
            links = self._empty(n, FIRST_LINKS, host.LINK.itemsize, dtype=torch.uint8)
        self._state = State(as_records(tokens).to(self.device), records, links, progress)

    def takes(self, lengths: torch.Tensor) -> bool:
        return False

    def push(
        self, log_probs: torch.Tensor, lengths: np.ndarray | torch.Tensor, *, deferred: bool = False
    ) -> None:
        assert isinstance(lengths, np.ndarray)
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
            if not self._is_stopped(status):
                break
            state = self._with_more_room(state, status)
        self._state = state

    def _is_stopped(self, status: np.ndarray) -> bool:
        """Whether any utterance waits for more room."""
        return bool(((status == RECORDS_FULL) | (status == LINKS_FULL)).any())

    def _with_more_room(self, state: State, status: np.ndarray) -> State:
        """With room for what has stopped utterances."""
        if (status == LINKS_FULL).any():
            state = self._with_room_for_links(state, status == LINKS_FULL)
        if (status == RECORDS_FULL).any():
            state = self._with_room_for_records(state, status == RECORDS_FULL)
        return state

    def results(self, rows: Sequence[int], n_best: int, *, final: bool) -> list[Utterance]:
        """Of the utterances `rows` what their results need: all for a lattice, else see `leading`."""
        if final and self._config.keeps_links:
            known = self.utterances()
            return [known[row] for row in rows]
        return self.leading(rows, final=final)

    def utterances(self) -> list[Utterance]:
        """All that is known of every utterance, in the host's memory."""
        state = self._compacted(self._state, self._state.records.shape[1])
        counts = state.progress["records"]
        most = int(counts.max())
        records = state.records[:, :most].cpu().numpy().view(host.RECORD)[..., 0]
        tokens = state.tokens.cpu().numpy().view(self.token)[..., 0]
        links = np.empty((len(counts), 0), host.LINK)
        if state.links is not None:
            most = int(state.progress["links"].max())
            links = state.links[:, :most].cpu().numpy().view(host.LINK)[..., 0]
        return [
            Utterance(
                setup,
                self._on_host(tokens[b, : state.progress["tokens"][b]]),
                records[b, : counts[b]],
                links[b, : state.progress["links"][b]],
                self._progress_on_host(b, state.progress[b]),
            )
            for b, setup in enumerate(self._setups)
        ]

    def leading(self, rows: Sequence[int], *, final: bool) -> list[Utterance]:
        """Of some utterances at least what best paths need.

        Args:
            rows: numbers of utterances.
            final: they are over. The token with which each ends best is there, with its past; else the
                best token with its past, and the one with which the utterance would end best. Where no
                token may end, the best one is there with its past in either case.
        """
        if len(rows) == 0:
            return []
        asked = torch.tensor(rows, dtype=torch.int32).to(self.device)
        room = FIRST_PAST
        while True:
            found, pasts = self._launch_leading(asked, room, final)
            most = int(found["records"].max())
            if most <= room:
                break
            room = most
        newest_first = pasts[:, :most].cpu().numpy().view(host.RECORD)[..., 0]
        return [
            self._led(row, own, past[: own["records"]], final)
            for row, own, past in zip(rows, found, newest_first, strict=True)
        ]

    def _led(self, row: int, found: np.void, newest_first: np.ndarray, final: bool) -> Utterance:
        """An utterance of nothing but its leader, which has this past, and the token that ends best."""
        tokens = np.stack([found["ending" if final else "best"], found["ending"]])
        tokens["record"] = [len(newest_first) - 1, host.NONE]
        is_other = not final and found["ends"] and tokens["key"][0] != tokens["key"][1]
        records = newest_first[::-1].copy()
        records["previous"] = np.arange(-1, len(records) - 1)
        return Utterance(
            self._setups[row],
            self._on_host(tokens[: 1 + is_other]),
            records,
            np.empty(0, host.LINK),
            self._progress_on_host(row, self._state.progress[row]),
        )

    # ---------------------------------------------------------------------------------- launches

    def _advanced(self, state: State, values: torch.Tensor, lengths: torch.Tensor) -> State:
        """The streams after the rest of the chunk, as far as nothing stops them."""
        n, frames, columns = values.shape
        params, config, place = self._setups[0].params, self._config, runtime()
        seconds = params.topology == NORMAL and not params.keeps_links
        room = shapes.room_for(config.max_active, columns, seconds=seconds)
        shared, row_bytes = shapes.shared_bytes(
            columns, values.element_size(), place.shared_bytes(self.device)
        )
        next_tokens = self._empty(n, 2, room.tokens, shapes.TOKEN.itemsize, dtype=torch.uint8)
        next_progress = self._empty(n, shapes.PROGRESS.itemsize, dtype=torch.uint8)
        defines: dict[str, int | str] = {"LOG_PROB": shapes.LOG_PROB_TYPES[values.dtype]}
        if params.keeps_links:
            defines["LINKS"] = 1
        place.load("search/word_graph/kernel.cu", self.device, defines).launch(
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
            links=state.links,
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
            max_links=0 if state.links is None else state.links.shape[1],
            follower_slot_count=room.follower_slots,
            group_slot_count=room.group_slots,
            num_words=params.num_words,
            blank_id=params.blank_id,
            topology=params.topology,
            beam=params.beam,
            max_active=params.max_active,
            acoustic_scale=params.acoustic_scale,
            lattice_beam=params.lattice_beam,
            row_bytes=row_bytes,
        )
        return self._reached(state, next_tokens, next_progress)

    def _reached(self, state: State, next_tokens: torch.Tensor, next_progress: torch.Tensor) -> State:
        """What `advance` has left: the tokens [n, 2, N] of each stream in one half, and its progress."""
        progress = next_progress.cpu().numpy().view(shapes.PROGRESS)[:, 0]
        most = int(progress["tokens"].max())
        halves = torch.from_numpy(progress["half"].astype(np.int64)).to(self.device)
        rows = torch.arange(len(progress), device=self.device)
        next_tokens = next_tokens[:, :, :most][rows, halves].contiguous()
        return state._replace(tokens=next_tokens, progress=progress)

    def _launch_leading(
        self, asked: torch.Tensor, room: int, final: bool
    ) -> tuple[np.ndarray, torch.Tensor]:
        """[A] LEADING of the utterances asked about, and [A, room] RECORD, which are still there."""
        state = self._state
        found = self._empty(len(asked), shapes.LEADING.itemsize, dtype=torch.uint8)
        pasts = self._empty(len(asked), room, host.RECORD.itemsize, dtype=torch.uint8)
        runtime().load("search/word_graph/leading.cu", self.device).launch(
            shapes.LEADING_SIGNATURE,
            grid=len(asked),
            block=shapes.THREADS,
            rows=asked,
            utterances=self._utterances,
            tokens=state.tokens,
            progress=as_records(state.progress).to(self.device),
            records=state.records,
            graph_states=self._graph[0],
            graph_epsilons=self._graph[2],
            graph_compounds=self._graph[3],
            boosting_states=self._boosting.states,
            boosting_arcs=self._boosting.arcs,
            found=found,
            pasts=pasts,
            held=state.tokens.shape[1],
            max_records=state.records.shape[1],
            room=room,
            num_words=self._setups[0].params.num_words,
            final=final,
        )
        return found.cpu().numpy().view(shapes.LEADING)[:, 0], pasts

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
        runtime().load("search/word_graph/compact.cu", self.device, self.compact_defines).launch(
            self.compact,
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
        reached = progress.cpu().numpy().view(shapes.PROGRESS)[:, 0]
        return state._replace(tokens=tokens, records=kept, progress=reached)

    def _with_room_for_records(self, state: State, stopped: np.ndarray) -> State:
        """Records that no token points to any more are dropped; more room is made if need be."""
        compacted = self._compacted(state, state.records.shape[1])
        room, live = state.records.shape[1], compacted.progress["records"]
        needed = int((live + state.progress["wanted"])[stopped].max())
        if 2 * needed <= room:
            return compacted
        larger = self._empty(len(live), 2 * max(room, needed), host.RECORD.itemsize, dtype=torch.uint8)
        larger[:, :room] = compacted.records
        return compacted._replace(records=larger)

    def _with_room_for_links(self, state: State, stopped: np.ndarray) -> State:
        """With at least twice the room for links; those that are there are copied."""
        assert state.links is not None
        held, room = state.progress["links"], state.links.shape[1]
        needed = int((held + state.progress["wanted"])[stopped].max())
        larger = self._empty(len(held), 2 * max(room, needed), host.LINK.itemsize, dtype=torch.uint8)
        used = int(held.max())
        larger[:, :used] = state.links[:, :used]
        return state._replace(links=larger)

    def _on_host(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens [n] as the CPU's search has them."""
        same = np.zeros(len(tokens), self.host_token)
        for name in self.token.names or ():
            same[name] = tokens[name]
        return same

    def _progress_on_host(self, row: int, progress: np.void) -> np.ndarray:
        same = np.zeros(1, self.host_progress)
        for name in ("tokens", "records", "frames", "cost", "limited", "overflowed", "links"):
            same[name] = progress[name]
        return same

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
            own[name] = getattr(setup.weights, name)
    if len(copies) == 1:
        return copies[0], utterances
    return DeviceAutomaton(*(torch.cat(parts) for parts in zip(*copies, strict=True))), utterances
