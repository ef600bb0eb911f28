"""`CUDAEngine`: steps of a transducer search on the GPU, with the kernels of `alsd.cu` and `aes.cu`.

In a step, the joint reads frames and predictions of all hypotheses (`cuda_joint.py`), the kernels `expand` and `merge`
search, and the prediction network reads the new tokens (`cuda_prediction.py`). Shapes are the same in every step: each
of the B * K hypotheses has a row, also if it needs none. The host reads nothing, so that any number of steps can be
queued or captured in a CUDA graph (`cuda_graphs.py`). The utterances are copied in before the first step and out after
the last.

The prediction cache is not searched by text: every new token gets an entry that no hypothesis of the old beam uses.
Most hypotheses take a blank in a step, so the batch of the prediction network has fewer rows. An utterance whose new
texts find no free rows waits for the next step, and reads no frame in this one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_gpu_decoding.cuda.launch import Module, as_records, runtime
from nemo_gpu_decoding.cuda.signature import FLOAT_TYPES
from nemo_gpu_decoding.fusion.batch import BatchFusion, DeviceAutomaton, on_device, trees_on_device
from nemo_gpu_decoding.search.transducer import records
from nemo_gpu_decoding.search.transducer.beam import BeamState, grown_nodes
from nemo_gpu_decoding.search.transducer.cuda_graphs import GraphRunner, check_not_capturing
from nemo_gpu_decoding.search.transducer.cuda_joint import Joint, JointPaths
from nemo_gpu_decoding.search.transducer.cuda_prediction import Prediction, PredictionPaths
from nemo_gpu_decoding.search.transducer.cuda_workspace import (
    Workspace,
    WorkspacePool,
    WorkspaceShape,
    bucket,
    kind_of,
)
from nemo_gpu_decoding.search.transducer.engine import Algorithm, StreamState, TransducerEngine
from nemo_gpu_decoding.search.transducer.records import HYPOTHESIS, STREAM_COUNTERS, ListSizes, SearchParams

MOST_LABELS = 4096  # columns that are scanned together; 4 bytes each
MOST_BYTES_WITH_LOG_PROBS = 56 * 1024  # of a block that stores log-probs: four blocks per multiprocessor of an H100
KEY_BYTES = 8  # of what is ranked, see rank_key.cuh


def why_not(params: SearchParams, most_shared: int) -> str | None:
    """None if the kernels can search with this beam, else the reason in one line."""
    choices = (params.vocab_size + 1) * params.num_durations + 1
    if params.beam_size * choices > 2**32:
        return f"beam {params.beam_size} x {choices} choices exceed the 2^32 that kernels can number"
    _, expand_bytes = list_sizes(params, records.EXPAND_THREADS)
    needed = max(merge_bytes(params), expand_bytes)
    if needed > most_shared:
        return (
            f"a beam of {params.beam_size} needs {needed} bytes of shared memory per block of threads, "
            f"of which there are {most_shared}"
        )
    return None


def expand_threads(rows: int, frame_by_frame: bool, processors: int, capability: tuple[int, int]) -> int:
    """Threads of a block of `expand`: fewer if blocks of EXPAND_THREADS for so many rows would need a second wave.

    With half the threads, a block takes a tenth more time by estimate, but twice as many blocks are resident.

    Args:
        rows: blocks.
        frame_by_frame: as in `SearchParams`.
        processors: multiprocessors of the GPU.
        capability: compute capability of the GPU.
    """
    # blocks of EXPAND_THREADS per multiprocessor, as EXPAND_BLOCKS in aes.cu and alsd.cu
    resident = (4 if capability in ((8, 6), (8, 9)) else 2) if frame_by_frame else 4 if capability < (10, 0) else 3
    wide = rows <= resident * processors
    return records.EXPAND_THREADS if wide else min(records.EXPAND_THREADS, records.FEWER_EXPAND_THREADS)


def multiprocessors(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Number of multiprocessors and compute capability of a GPU; those of an H100 if the kernels are emulated."""
    if device.type != "cuda":
        return 132, (9, 0)
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)


def list_sizes(params: SearchParams, threads: int) -> tuple[ListSizes, int]:
    """Lists of `expand` for M extensions per hypothesis of V + 1 labels, and the dynamic shared memory of a block."""
    labels = max(params.max_extensions, min(params.vocab_size + 1, MOST_LABELS))
    sizes = ListSizes(2 * params.max_extensions + threads, labels, params.vocab_size + 1)
    # in the order of `Workspace` in expand.cuh
    scratch = (32 + 2 * 4) * 8
    lists = sizes.items * 2 * (KEY_BYTES + records.FUSION_STATES.itemsize)
    needed = scratch + records.LIST_COUNTERS.itemsize + lists + 4 * (threads + labels)
    if needed + 4 * sizes.log_probs > MOST_BYTES_WITH_LOG_PROBS:
        sizes = sizes._replace(log_probs=0)
    return sizes, needed + 4 * sizes.log_probs


def merge_bytes(params: SearchParams) -> int:
    """Dynamic shared memory of a block of `merge`; the order is that of `MergeWorkspace` in merge.cuh.

    aes_pp's `Pool` follows it.
    """
    numbers, pooled = 3 * 4, KEY_BYTES + 4
    beams = params.beam_size * (2 * HYPOTHESIS.itemsize + records.CANDIDATE.itemsize + numbers)
    extension = KEY_BYTES + pooled * params.frame_by_frame
    alignment = 8 * params.frame_by_frame  # of the pool
    return beams + params.beam_size * params.max_extensions * extension + alignment


def prediction_rows(utterances: int, params: SearchParams) -> int:
    """Number of rows of the prediction network's batch, large enough that utterances seldom wait for one.

    On real speech 12 to 37 % of the hypotheses have a new text after a step, fewest with aes_pp (docs/gpus.md).
    """
    rows = utterances * params.beam_size
    share = rows // (4 if params.frame_by_frame else 2)
    return min(rows, max(share, records.FEWEST_PREDICTION_ROWS, params.beam_size))


class Shared(NamedTuple):
    """Objects that all runs of a decoder share."""

    workspaces: WorkspacePool
    graphs: GraphRunner  # runs steps as CUDA graphs, or plainly
    predictions: PredictionPaths  # runs the prediction network
    joints: JointPaths  # runs the joint


class CUDAEngine(TransducerEngine):
    """The search on the device of the networks; arguments as in `TransducerEngine`."""

    def __init__(self, algorithm: Algorithm, fusion: BatchFusion, shared: Shared) -> None:
        super().__init__(algorithm, fusion)
        self._shared = shared

    def _advance(self, state: StreamState, *, ended: bool) -> None:
        beams, parts, device = state.beams, state.predictions.parts, state.predictions.outputs.device
        check_not_capturing(device)
        counters = beams.counters
        with self._shared.workspaces.borrowed(self._shape(state)) as work:
            work.take_predictions(parts)
            work.take_frames(state.frames.values.to(device))
            work.take_boosting(trees_on_device(self._fusion, device))
            prediction = self._shared.predictions.on(work)
            prediction.begin()
            joint = self._shared.joints.on(work)
            step = _Step(self._algorithm, work, on_device(self._fusion.lm, device), joint, prediction)
            _put(work.streams, _stream_params(state, ended))
            _put(work.beams, beams.beam)
            while True:
                counters["node_base"] = counters["node_count"]
                _put(work.counters, counters)
                step.schedule()
                self._shared.graphs.run(step, work)
                counters[:] = _get(work.counters, STREAM_COUNTERS)[: len(counters)]
                state.nodes = _append_nodes(state.nodes, work.nodes, counters)
                if (counters["size"] <= 0).any() or not (counters["activity"] == records.FULL).any():
                    break
            work.give_predictions(parts)
            beams.beam[:] = _get(work.beams, HYPOTHESIS)[: len(counters)]
        _list_cached_texts(beams)

    def _shape(self, state: StreamState) -> WorkspaceShape:
        parts, params = state.predictions.parts, self._algorithm.params
        utterances = bucket(len(state.nodes))
        return WorkspaceShape(
            device=parts[0].device,
            utterances=utterances,
            beam_size=params.beam_size,
            max_extensions=params.max_extensions,
            cache_entries=state.beams.cache_hashes.shape[1],
            prediction_rows=prediction_rows(utterances, params),
            frame=kind_of(state.frames.values.flatten(0, 1)),
            parts=tuple(map(kind_of, parts)),
            durations=tuple(self._algorithm.durations.tolist()),
        )


class _Step:
    """The launches of one step on a workspace."""

    def __init__(
        self, algorithm: Algorithm, work: Workspace, lm: DeviceAutomaton, joint: Joint, prediction: Prediction
    ) -> None:
        self._algorithm, self._work, self._lm = algorithm, work, lm
        self._joint, self._prediction = joint, prediction
        self._kernels: dict[tuple[torch.dtype, bool], Module] = {}  # by type of logits, and whether in a loop
        temperature = algorithm.config.softmax_temperature
        self._inverse_temperature = 1.0 / temperature
        # values that a captured step depends on, besides the workspace
        self.key = (
            lm.states.data_ptr(), lm.arcs.data_ptr(), algorithm.params, temperature,
            algorithm.kernels, joint.key, prediction.key,
        )  # fmt: skip

    def schedule(self) -> None:
        """Choose the frame that each hypothesis reads in the first step."""
        work = self._work
        work.launch(work.kernels, records.SCHEDULE, grid=work.num_utterances, block=records.MERGE_THREADS)

    def load(self, *, in_loop: bool) -> None:
        """Load the kernels, see `cuda_graphs.GraphStep`."""
        kernels = self._kernels_for(self._joint.logits().dtype, in_loop)
        kernels.find(records.EXPAND)
        kernels.find(records.MERGE)

    def run(self, *, in_loop: bool = False, handle: int | None = None) -> None:
        """Launch a step, see `cuda_graphs.GraphStep`."""
        work, params = self._work, self._algorithm.params
        threads = expand_threads(work.rows, params.frame_by_frame, *multiprocessors(work.shape.device))
        sizes, expand_bytes = list_sizes(params, threads)
        logits = self._joint.logits()
        kernels = self._kernels_for(logits.dtype, in_loop)
        work.launch(
            kernels,
            records.EXPAND,
            grid=work.rows,
            block=threads,
            shared_bytes=expand_bytes,
            logits=logits,
            lm_states=self._lm.states,
            lm_arcs=self._lm.arcs,
            boosting_states=work.boosting.states,
            boosting_arcs=work.boosting.arcs,
            params=params,
            sizes=sizes,
            inverse_temperature=self._inverse_temperature,
            columns=logits.shape[1],
        )
        work.launch(
            kernels,
            records.MERGE,
            grid=work.num_utterances,
            block=records.MERGE_THREADS,
            shared_bytes=merge_bytes(params),
            params=params,
            handle=np.uint64(handle or 0),
            sets_condition=int(handle is not None),
        )
        self._prediction.run()

    def _kernels_for(self, logits: torch.dtype, in_loop: bool) -> Module:
        if (logits, in_loop) not in self._kernels:
            defines = {"LOGIT": FLOAT_TYPES[logits]} | ({"LOOP": 1} if in_loop else {})
            module = runtime().load(self._algorithm.kernels, self._work.shape.device, defines)
            self._kernels[logits, in_loop] = module
        return self._kernels[logits, in_loop]

    def count_active(self) -> None:
        """Write the number of utterances that have a next step to `work.active`."""
        work = self._work
        work.launch(work.kernels, records.COUNT_ACTIVE, grid=1, block=records.MERGE_THREADS)


def _put(device_records: Tensor, values: np.ndarray) -> None:
    """Copy `values` to the first records; the others become zeros, which are utterances without frames."""
    device_records[len(values) :].zero_()
    device_records[: len(values)].copy_(as_records(values))


def _get(device_records: Tensor, dtype: np.dtype) -> np.ndarray:
    return device_records.cpu().numpy().view(dtype)[..., 0]


def _stream_params(state: StreamState, ended: bool) -> np.ndarray:
    n, columns = state.frames.values.shape[:2]
    params = np.zeros(n, records.STREAM_PARAMS)
    utterances = state.fusions.utterances
    params["lm_weight"], params["boosting_weight"] = utterances["lm_weight"], utterances["boosting_weight"]
    weights = utterances["lm_weight"].astype(np.float64)
    params["inverse_lm_weight"] = np.divide(1.0, weights, out=np.zeros(n), where=weights > 0)
    params["first_row"] = np.arange(n) * columns - state.frames.first
    params["end"] = state.beams.ends
    params["ended"] = ended
    return params


def _append_nodes(nodes: np.ndarray, new: Tensor, counters: np.ndarray) -> np.ndarray:
    """The trees with the nodes that the device has added since the last call."""
    counts = counters["node_count"] - counters["node_base"]
    most = int(counts.max())
    if most == 0:
        return nodes
    nodes = grown_nodes(nodes, int(counters["node_count"].max()))
    added = _get(new[: len(counters), :most], records.NODE)
    for b in np.flatnonzero(counts):
        begin, end = counters["node_base"][b], counters["node_count"][b]
        nodes[b, begin:end] = added[b, : counts[b]]
    return nodes


def _list_cached_texts(beams: BeamState) -> None:
    """Store the hashes and lengths of the texts in the prediction cache: those of the beam."""
    beams.steps[:] += 1
    beams.cache_lengths[:] = -1
    b, k = np.nonzero(beams.live)
    hypotheses = beams.beam[b, k]
    entries = hypotheses["cache_entry"]
    beams.cache_hashes[b, entries] = hypotheses["text_hash"]
    beams.cache_lengths[b, entries] = hypotheses["length"]
    beams.cache_used[b, entries] = beams.steps[b]
