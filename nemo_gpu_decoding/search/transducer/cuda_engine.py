"""`CUDAEngine`: the loop of all transducer searches on the GPU.

A step: frames and predictions of all hypotheses are gathered, torch runs the joint, `expand` and `merge`
search, and the prediction network reads the new tokens (`cuda_prediction.py`). Shapes are the same in
every step (a row for each of B * K hypotheses, whether it needs one or not), and nothing is read by the
host, so that any number of steps can be queued or be captured in a CUDA graph (`cuda_graphs.py`). The
utterances are copied in before the first step and out after the last.

The memory of predictions is used without its search by text: every new token gets an entry that no
hypothesis of the old beam uses. The prediction network runs for all rows anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import Module, as_records, runtime
from nemo_gpu_decoding.fusion.batch import BatchFusion
from nemo_gpu_decoding.fusion.on_device import DeviceAutomaton, on_device, upload
from nemo_gpu_decoding.search.transducer import launch_shape as shapes
from nemo_gpu_decoding.search.transducer.beam import NODE, Batch, grown_nodes
from nemo_gpu_decoding.search.transducer.config import TransducerConfig
from nemo_gpu_decoding.search.transducer.cuda_graphs import GraphRunner
from nemo_gpu_decoding.search.transducer.cuda_prediction import PLAN, Prediction, PredictionPaths
from nemo_gpu_decoding.search.transducer.cuda_rows import move_rows
from nemo_gpu_decoding.search.transducer.cuda_step import StepInputs
from nemo_gpu_decoding.search.transducer.cuda_workspace import (
    Workspace,
    WorkspacePool,
    WorkspaceShape,
    bucket,
    kind_of,
)
from nemo_gpu_decoding.search.transducer.engine import Strategy, StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.memory import Frames
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks


class Shared(NamedTuple):
    """What all runs of a decoder share."""

    workspaces: WorkspacePool
    graphs: GraphRunner  # runs steps as CUDA graphs, or plainly
    predictions: PredictionPaths  # runs the prediction network


class CUDAEngine(TransducerEngine):
    """The search on the device where the networks are; arguments as in `TransducerEngine`."""

    def __init__(
        self,
        networks: TransducerNetworks,
        config: TransducerConfig,
        strategy: Strategy,
        fusion: BatchFusion,
        shared: Shared,
    ) -> None:
        super().__init__(networks, config, strategy, fusion)
        self._shared = shared

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        batch = state.batch
        parts = (state.predictions.outputs, *state.predictions.state)
        device = parts[0].device
        with self._shared.workspaces.borrowed(self._shape(state)) as work:
            work.take_predictions(parts)
            work.take_frames(state.frames.values.to(device))
            work.take_boosting(_boosting(self._fusion, device))
            prediction = self._shared.predictions.on(work)
            prediction.begin()
            lm = on_device(self._fusion.lm, device)
            temperature = self._config.softmax_temperature
            step = _Step(self._networks, self._strategy, temperature, work, lm, prediction)
            _put(work.utterances, _utterances(batch, state.frames, ended))
            _put(work.beams, batch.beam)
            progress = _progress(batch)
            while True:
                _put(work.progress, progress)
                step.begin()
                self._shared.graphs.run(step, work)
                progress = _get(work.progress, shapes.PROGRESS)[: len(progress)]
                state.nodes = _append_nodes(state.nodes, work.nodes, progress)
                if (progress["size"] <= 0).any() or not (progress["activity"] == shapes.FULL).any():
                    break
                progress = progress.copy()
                progress["node_base"] = progress["node_count"]
            work.give_predictions(parts)
            batch.beam[:] = _get(work.beams, batch.beam.dtype)[: len(batch.beam)]
        _update(batch, progress)

    def _shape(self, state: StreamState) -> WorkspaceShape:
        n, beam_size = state.batch.beam.shape
        parts = (state.predictions.outputs, *state.predictions.state)
        return WorkspaceShape(
            device=parts[0].device,
            utterances=bucket(n),
            beam_size=beam_size,
            per_hypothesis=self._strategy.kernels.per_hypothesis,
            entries=state.batch.memo_hash.shape[1],
            frame=kind_of(state.frames.values.flatten(0, 1)),
            parts=tuple(map(kind_of, parts)),
        )


class _Step:
    """One step on a workspace, and the launches around it."""

    def __init__(
        self,
        networks: TransducerNetworks,
        strategy: Strategy,
        temperature: float,
        work: Workspace,
        lm: DeviceAutomaton,
        prediction: Prediction,
    ) -> None:
        self._work = work
        self._lm = lm
        self._prediction = prediction
        self._search = strategy.search
        self._networks = networks
        self._kernels = strategy.kernels
        self._modules: dict[torch.dtype, Module] = {}
        self._inverse_temperature = 1.0 / temperature
        self._plan = runtime().load(PLAN, work.shape.device, shapes.DEFINES)
        key = "durations", tuple(strategy.durations.tolist())
        if key not in work.constants:
            work.constants[key] = torch.from_numpy(strategy.durations).to(work.shape.device)
        self._durations = work.constants[key]
        # what a captured step knows besides the workspace
        self.key = (
            lm.states.data_ptr(), lm.arcs.data_ptr(), strategy.search, temperature, strategy.kernels,
            prediction.key,
        )  # fmt: skip

    def begin(self) -> None:
        """Decide who reads which frame first."""
        work = self._work
        self._plan.launch(
            shapes.BEGIN,
            grid=work.shape.utterances,
            block=shapes.MERGE_THREADS,
            utterances=work.utterances,
            beams=work.beams,
            progress=work.progress,
            frame_rows=work.frame_rows,
            text_rows=work.text_rows,
            beam_size=work.shape.beam_size,
            entries=work.shape.entries,
            room=work.node_room,
        )

    def run(self) -> None:
        """Launch a step."""
        work = self._work
        move_rows(
            self._plan,
            work.rows,
            (work.frames, work.frame_rows.view(-1), work.joint_frames, None),
            (work.memory[0], work.text_rows.view(-1), work.joint_predictions, None),
        )
        logits = self._networks.join(work.joint_frames, work.joint_predictions)
        if logits.dtype not in shapes.LOGIT_TYPES:
            logits = logits.float()
        if logits.dtype not in self._modules:
            self._modules[logits.dtype] = self._kernels.load(logits.dtype, work.shape.device)
        self._kernels(
            StepInputs(
                module=self._modules[logits.dtype],
                logits=logits.contiguous(),
                workspace=work,
                lm=self._lm,
                search=self._search,
                durations=self._durations,
                inverse_temperature=self._inverse_temperature,
            )
        )
        self._prediction.run()

    def count_going(self) -> None:
        """Leave in `going` how many utterances have a next step."""
        work = self._work
        self._plan.launch(
            shapes.COUNT_GOING,
            grid=1,
            block=shapes.MERGE_THREADS,
            progress=work.progress,
            going=work.going,
            num_utterances=work.shape.utterances,
        )

    def decide(self, handle: int) -> None:
        """Tell a WHILE node whether there is a next step."""
        work = self._work
        runtime().load("search/transducer/decide.cu", work.shape.device, shapes.DEFINES).launch(
            shapes.DECIDE,
            grid=1,
            block=shapes.MERGE_THREADS,
            handle=np.uint64(handle),
            progress=work.progress,
            num_utterances=work.shape.utterances,
        )


def _boosting(fusion: BatchFusion, device: torch.device) -> DeviceAutomaton:
    if len(fusion.trees) == 1:
        return on_device(fusion.trees[0], device)
    return upload(fusion.arrays.boosting, device)


def _put(records: Tensor, values: np.ndarray) -> None:
    """Fill the first records from the host; the others become zeros: utterances with nothing to read."""
    records[len(values) :].zero_()
    records[: len(values)].copy_(as_records(values))


def _get(records: Tensor, dtype: np.dtype) -> np.ndarray:
    return records.cpu().numpy().view(dtype)[..., 0]


def _utterances(batch: Batch, frames: Frames, ended: bool) -> np.ndarray:
    n, columns = frames.values.shape[:2]
    records = np.zeros(n, shapes.UTTERANCE)
    records["lm_weight"] = batch.lm_weights
    records["boosting_weight"] = batch.boosting_weights
    weights = batch.lm_weights.astype(np.float64)
    records["inverse_lm_weight"] = np.divide(1.0, weights, out=np.zeros(n), where=weights > 0)
    records["first_row"] = np.arange(n) * columns - frames.first
    records["end"] = batch.ends
    records["ended"] = ended
    return records


def _progress(batch: Batch) -> np.ndarray:
    records = np.zeros(len(batch.sizes), shapes.PROGRESS)
    records["size"] = batch.sizes
    records["expansions"] = batch.expansions
    records["node_count"] = records["node_base"] = batch.node_counts
    return records


def _append_nodes(nodes: np.ndarray, new: Tensor, progress: np.ndarray) -> np.ndarray:
    """The trees with what the device has added to them since the last time."""
    counts = progress["node_count"] - progress["node_base"]
    most = int(counts.max())
    if most == 0:
        return nodes
    nodes = grown_nodes(nodes, int(progress["node_count"].max()))
    added = _get(new[: len(progress), :most], NODE)
    for b in np.flatnonzero(counts):
        begin, end = progress["node_base"][b], progress["node_count"][b]
        nodes[b, begin:end] = added[b, : counts[b]]
    return nodes


def _update(batch: Batch, progress: np.ndarray) -> None:
    """What the host remembers of the utterances besides beams and nodes."""
    batch.sizes[:] = progress["size"]
    batch.expansions[:] = progress["expansions"]
    batch.node_counts[:] = progress["node_count"]
    batch.steps[:] += 1
    batch.memo_length[:] = -1
    for b, k in np.argwhere(np.arange(batch.beam.shape[1]) < batch.sizes[:, None]):
        hypothesis = batch.beam[b, k]
        entry = hypothesis["memo"]
        batch.memo_hash[b, entry] = hypothesis["text_hash"]
        batch.memo_length[b, entry] = hypothesis["length"]
        batch.memo_used[b, entry] = batch.steps[b]
