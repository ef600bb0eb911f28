"""The GPU's engine: buffers and launches around `kernel.cu`; else as in `word_graph/cuda.py`.

How much room a chunk needs for its members and visits is not known beforehand. Where there is too
little, the kernel stops before the frame, the room is doubled, and the search goes on there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from nemo_gpu_decoding.cuda.launch import as_records, runtime
from nemo_gpu_decoding.cuda.upload import arrays_on_device
from nemo_gpu_decoding.lm.lookup_statistics import SECTOR_BYTES, LookupStatistics
from nemo_gpu_decoding.lm.on_device import PlacedLM
from nemo_gpu_decoding.search.word_graph import cuda
from nemo_gpu_decoding.search.word_graph import launch_shape as wfst_shapes
from nemo_gpu_decoding.search.word_graph.composition import launch_shape as shapes
from nemo_gpu_decoding.search.word_graph.composition import tokens as host
from nemo_gpu_decoding.search.word_graph.composition.composition import Rescoring
from nemo_gpu_decoding.search.word_graph.composition.config import PagedBigLMConfig
from nemo_gpu_decoding.search.word_graph.composition.streams import Setup
from nemo_gpu_decoding.search.word_graph.composition.ways import GROUPS_FULL
from nemo_gpu_decoding.search.word_graph.streams import Utterance


class PlacedRescoring:
    """Both LMs where GPUs find them; keep it as long as they are decoded with.

    Args:
        rescoring: what the CPU's search has.
        config: says where the large LM goes.
        name: of the large LM, for messages.
    """

    def __init__(self, rescoring: Rescoring, config: PagedBigLMConfig, name: str) -> None:
        self._rescoring = rescoring
        self._large = PlacedLM(rescoring.large, config.placement, config.cache_mb * 10**6, name)
        self._small = self._large  # a difference asks nothing else
        if not rescoring.is_difference:
            cache_bytes = config.cache_mb * 10**6  # if even the small one does not fit
            self._small = PlacedLM(rescoring.small, "auto", cache_bytes, "the small LM")

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Arguments of `advance` for kernels on `device`.

        Raises:
            ValueError: there is not enough memory for the LMs.
        """
        labels = (self._rescoring.large_labels, self._rescoring.small_labels)
        in_large, in_small = arrays_on_device(self, labels, device)
        return {
            **self._large.on(device).arguments("large"),
            **self._small.on(device).arguments("small"),
            "labels_in_large": in_large,
            "labels_in_small": in_small,
            "is_difference": self._rescoring.is_difference,
        }


class State(NamedTuple):
    """As `cuda_wfst.cuda.State`, with what the search took."""

    tokens: torch.Tensor
    records: torch.Tensor
    links: torch.Tensor | None
    progress: np.ndarray
    work: torch.Tensor  # [n] shapes.WORK


class CUDAEngine(cuda.CUDAEngine):
    """See `word_graph/cuda.py`.

    Args:
        setups: what each utterance is decoded with; all with the same graph and LMs. At least one.
        config: options of the batch.
        device: of the first log-probs; on the CPU: the current GPU is taken.
        placed: the LMs of all setups.

    Raises:
        ValueError: there is not enough memory for the LMs.
    """

    token = shapes.TOKEN
    host_token, host_progress = host.TOKEN, host.PROGRESS
    compact = shapes.COMPACT
    compact_defines: ClassVar = {"TOKEN_KEY": "HistoryKey"}

    def __init__(
        self,
        setups: Sequence[Setup],
        config: PagedBigLMConfig,
        device: torch.device,
        placed: PlacedRescoring,
    ) -> None:
        super().__init__(setups, config, device)
        self._placed, self._lms = placed, placed.arguments(self.device)
        self._doubled = 0  # times that members and visits got more room
        utterances = np.zeros(len(setups), shapes.UTTERANCE)
        shared = self._utterances.cpu().numpy().view(wfst_shapes.UTTERANCE)[:, 0]
        for name in wfst_shapes.UTTERANCE.names or ():
            utterances[name] = shared[name]
        utterances["correction_weight"] = [setup.composition.correction_weight for setup in setups]
        self._utterances = as_records(utterances).to(self.device)
        state: Any = self._state
        tokens = state.tokens.cpu().numpy().view(shapes.TOKEN)
        tokens["lm"] = setups[0].rescoring.start
        work = as_records(np.zeros(len(setups), shapes.WORK)).to(self.device)
        self._state: Any = State(
            as_records(tokens[..., 0]).to(self.device), state.records, state.links, state.progress, work
        )

    @property
    def lookup_statistics(self) -> LookupStatistics:
        """Of all utterances; what the look-ups of a paged LM cost."""
        work = self._state.work.cpu().numpy().view(shapes.WORK)[:, 0]
        sums = (int(work[name].sum()) for name in ("cache_hits", "cache_misses", "cache_sectors"))
        hits, misses, sectors = sums
        return LookupStatistics(hits, misses, sectors * SECTOR_BYTES)

    def leading(self, rows: Sequence[int], *, final: bool) -> list[Utterance]:
        known = self.utterances()
        return [known[row] for row in rows]

    def _is_stopped(self, status: np.ndarray) -> bool:
        return super()._is_stopped(status) or bool((status == GROUPS_FULL).any())

    def _with_more_room(self, state: Any, status: np.ndarray) -> Any:
        self._doubled += bool((status == GROUPS_FULL).any())
        return super()._with_more_room(state, status)

    def _progress_on_host(self, row: int, progress: np.void) -> np.ndarray:
        same = super()._progress_on_host(row, progress)
        work = self._state.work[row].cpu().numpy().view(shapes.WORK)[0]
        for name in ("look_ups", "memo_hits", "arc_visits", "groups", "prolonged"):
            same[name] = work[name]
        return same

    # ---------------------------------------------------------------------------------- launches

    def _advanced(self, state: Any, values: torch.Tensor, lengths: torch.Tensor) -> Any:
        n, frames, columns = values.shape
        setup: Any = self._setups[0]
        config, place = self._config, runtime()
        params, composition = setup.params, setup.composition
        room = shapes.room_for(config.max_active, columns, self._doubled)
        shared, row_bytes = shapes.shared_bytes(
            columns, values.element_size(), place.shared_bytes(self.device)
        )
        next_tokens = self._empty(n, 2, room.tokens, shapes.TOKEN.itemsize, dtype=torch.uint8)
        next_progress = self._empty(n, wfst_shapes.PROGRESS.itemsize, dtype=torch.uint8)
        next_work = torch.empty_like(state.work)
        defines: dict[str, int | str] = {"LOG_PROB": wfst_shapes.LOG_PROB_TYPES[values.dtype]}
        if config.keeps_links:
            defines["LINKS"] = 1
        if not composition.lazy:
            defines["EAGER"] = 1
        place.load("search/word_graph/composition/kernel.cu", self.device, defines).launch(
            shapes.advance_signature(values.dtype),
            grid=n,
            block=wfst_shapes.THREADS,
            shared_bytes=shared,
            log_probs=values,
            lengths=lengths,
            utterances=self._utterances,
            tokens=state.tokens,
            progress=as_records(state.progress).to(self.device),
            work_before=state.work,
            next_tokens=next_tokens,
            next_progress=next_progress,
            next_work=next_work,
            records=state.records,
            links=state.links,
            graph_states=self._graph[0],
            graph_arcs=self._graph[1],
            graph_epsilons=self._graph[2],
            graph_compounds=self._graph[3],
            boosting_states=self._boosting.states,
            boosting_arcs=self._boosting.arcs,
            **self._lms,
            **self._rooms(n, room),
            frames=frames,
            columns=columns,
            held=state.tokens.shape[1],
            max_tokens=room.tokens,
            max_ways=room.ways,
            max_records=state.records.shape[1],
            max_links=0 if state.links is None else state.links.shape[1],
            max_members=room.members,
            max_visits=room.visits,
            max_errands=room.errands,
            max_answers=room.answers,
            follower_slot_count=room.follower_slots,
            member_slot_count=room.member_slots,
            answer_slot_count=room.answer_slots,
            group_size=composition.group_size,
            num_words=params.num_words,
            blank_id=params.blank_id,
            topology=params.topology,
            beam=params.beam,
            max_active=params.max_active,
            acoustic_scale=params.acoustic_scale,
            lattice_beam=params.lattice_beam,
            row_bytes=row_bytes,
        )
        return self._reached(state._replace(work=next_work), next_tokens, next_progress)

    def _rooms(self, n: int, room: shapes.Room) -> dict[str, torch.Tensor]:
        def slots(count: int) -> torch.Tensor:
            return torch.zeros((n, count), dtype=torch.int32, device=self.device)

        def entries(count: int, size: int) -> torch.Tensor:
            kind = torch.int32 if size % 8 else torch.int64
            return self._empty(n, count, size // kind.itemsize, dtype=kind)

        return {
            "follower_slots": slots(room.follower_slots),
            "follower_entries": entries(room.tokens, shapes.ENTRY_BYTES),
            "ways": entries(room.ways, shapes.WAY_BYTES),
            "labels": self._empty(n, room.columns, dtype=torch.int32),
            "members": entries(room.members, shapes.MEMBER_BYTES),
            "histories": entries(room.members, shapes.HISTORY_BYTES),
            "groups": entries(room.members, shapes.GROUP_BYTES),
            "order": self._empty(n, room.members, dtype=torch.int64),
            "large_groups": self._empty(n, room.large_groups, dtype=torch.int32),
            "member_slots": slots(room.member_slots),
            "history_slots": slots(room.member_slots),
            "visits": self._empty(n, room.visits, 2, dtype=torch.int32),
            "errands": entries(room.errands, shapes.ERRAND_BYTES),
            "asked": self._empty(n, room.errands, dtype=torch.int32),
            "answers": entries(room.answers, shapes.ANSWER_BYTES),
            "answer_slots": slots(room.answer_slots),
        }
